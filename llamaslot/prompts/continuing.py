"""Prompts of a session: what its last sequence says of a text is taken over, token by token.

    session   |---- prompt ----|---- reply ----|
    EXACT     |---------------- all -----------|
    EXTEND    |---------------- all -----------|-- tokenized --|
    DIVERGE   |-------- kept ------|xxxxxxxxxxx|
                                   |-- tokenized --|

The texts are compared as marked bytes (`prompts/cuts.py`), so a control token agrees only with a control token.
Where a text leaves the session's before its end, what is kept ends with a token that lies in the common text,
before a control token or a word: there tokenizing hardly ever looks back. That is done only if it keeps more than
the text's
own tokens would, and enough of the session's text; otherwise the text is tokenized as if there were no session.

What comes out always spells the prompt's text. Once the server serves, all of this belongs to the tokenizer's
thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from llamaslot.base.backend import Vocab
from llamaslot.base.commands import Submit, TextPart
from llamaslot.base.namespaces import salted
from llamaslot.base.tokens import Tokens, n_common
from llamaslot.prompts.anchoring import Anchoring, Prompt, tokenized
from llamaslot.prompts.cuts import CONTROL, Cutter
from llamaslot.prompts.sessions import Session, Sessions, digest_of

LEAST_CHARACTERS = 100
"""Characters that must be kept of a text that goes on in another way."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """The marked text of some tokens, and for each of them where its text ends."""

    text: bytes
    ends: npt.NDArray[np.int64]


def spelled(vocab: Vocab, tokens: Sequence[int]) -> Spelling:
    """What tokens spell, control tokens marked. A byte that could be taken for a mark, which no text has, becomes
    another one.
    """
    pieces = [_piece(vocab, token) for token in tokens]
    return Spelling(b"".join(pieces), np.fromiter(accumulate(map(len, pieces)), np.int64, len(pieces)))


def _piece(vocab: Vocab, token: int) -> bytes:
    piece = vocab.piece(token)
    return piece.replace(CONTROL, b"\xfe") if piece else CONTROL + vocab.detokenize([token])


class Continuing:
    """Tokenizes as `anchoring` does, but for the prompts of sessions.

    Of a text that goes on in another way `min_match` must be kept, as a share of the session's characters.
    """

    def __init__(self, vocab: Vocab, anchoring: Anchoring, *, min_match: float) -> None:
        self.sessions = Sessions()
        self._vocab = vocab
        self._anchoring = anchoring
        self._min_match = min_match
        self._spellings: dict[bytes, tuple[Session, Spelling]] = {}
        """Of sessions by digest: worked out behind a reply, so that the next prompt need not wait for it."""

    def submitted(self, submit: Submit) -> Prompt:
        """A request's prompt, whose own ids exist."""
        if not submit.session_id or not submit.cache_prompt:
            return self._anchoring.submitted(submit)
        digest = digest_of(salted(submit.cache_salt), submit.session_id)
        session = self.sessions.find(digest)
        if session is None:
            return replace(self._anchoring.submitted(submit), session_match="new")
        texts = [part for part in submit.prompt if isinstance(part, TextPart)]
        cutter = self._anchoring.cutter
        is_text = session.is_text and len(texts) == len(submit.prompt)
        if cutter is None or not is_text or not np.array_equal(self._added(submit), session.added):
            return replace(self._anchoring.submitted(submit), session_match="tokens")
        text, spelling = cutter.marked(texts), self._spelling(digest, session)
        n_same = n_common(np.frombuffer(spelling.text, np.uint8), np.frombuffer(text, np.uint8))
        return self._continued(submit, _Pair(texts, text, session, spelling, cutter, n_same))

    def replied(self, submit: Submit, prompt: Prompt, generated: Tokens, n_sent: int) -> tuple[bytes, Session]:
        """Remember a reply, of which `n_sent` characters were sent: the session and its digest."""
        digest = digest_of(salted(submit.cache_salt), submit.session_id)
        texts = [part for part in submit.prompt if isinstance(part, TextPart)]
        cutter, n_prompt, n_added = self._anchoring.cutter, len(prompt.tokens), len(self._added(submit))
        own = spelled(self._vocab, prompt.tokens[n_added:].tolist())
        # Some vocabularies add a space in front of a text.
        is_text = cutter is not None and len(texts) == len(submit.prompt) and own.text == cutter.marked(texts)
        reply = self._anchoring.as_sent(generated.tolist(), n_sent)
        session = Session(
            np.concatenate([prompt.tokens, generated]),
            n_added=n_added,
            n_prompt=n_prompt,
            n_text=n_prompt + (len(reply[1]) if reply is not None else 0),
            is_text=is_text,
        )
        if (before := self.sessions.find(digest)) is not None:
            session = session.behind(before)
        self.put(digest, session)
        if is_text and self.sessions.find(digest) is session:
            self._spelling(digest, session)
        return digest, session

    def put(self, digest: bytes, session: Session) -> None:
        """Know a session."""
        for gone in (digest, *self.sessions.put(digest, session)):
            self._spellings.pop(gone, None)

    def drop(self, digest: bytes) -> Session | None:
        """Forget a session, and return it."""
        self._spellings.pop(digest, None)
        return self.sessions.drop(digest)

    def clear(self) -> None:
        """Forget all."""
        self._spellings.clear()
        self.sessions.clear()

    def _added(self, submit: Submit) -> Tokens:
        """What the model wants in front of a prompt."""
        return self._vocab.tokenize("", add_special=submit.add_special, parse_special=True)

    def _spelling(self, digest: bytes, session: Session) -> Spelling:
        known = self._spellings.get(digest)
        if known is None or known[0] is not session:
            known = session, spelled(self._vocab, session.spelled.tolist())
            self._spellings[digest] = known
        return known[1]

    def _continued(self, submit: Submit, pair: _Pair) -> Prompt:
        if pair.has_all:
            prompt = self._behind(submit, pair, pair.n_kept())
            if prompt is not None:
                return replace(prompt, session_match="exact" if pair.n_same == len(pair.text) else "extend")
        anchored = self._anchoring.submitted(submit)
        least = max(LEAST_CHARACTERS, math.ceil(self._min_match * n_characters(pair.spelling.text)))
        n_kept = pair.n_kept(least) if n_characters(pair.text[: pair.n_same]) >= least else 0
        n_more = pair.session.n_added + n_kept - n_common(anchored.tokens, pair.session.tokens)
        prompt = self._behind(submit, pair, n_kept) if n_more > 0 else None
        if prompt is not None:
            return replace(prompt, session_match="diverge", n_approximate=n_more, is_changed=pair.is_changed)
        return replace(anchored, session_match="tokens", is_changed=pair.is_changed)

    def _behind(self, submit: Submit, pair: _Pair, n_kept: int) -> Prompt | None:
        """The prompt that begins with so many of the session's tokens; None where the rest would not spell it."""
        if not n_kept:
            return None
        session, at = pair.session, pair.end(n_kept)
        own = tokenized(self._vocab, pair.cutter.parts_behind(pair.texts, at), add_special=False)
        rest = spelled(self._vocab, own.tolist())
        if rest.text != pair.text[at:]:
            return None
        tokens = np.concatenate([session.tokens[: session.n_added + n_kept], own])
        ends = np.concatenate([pair.spelling.ends[:n_kept], rest.ends + at])
        return Prompt(tokens, ending=self._anchoring.ending(submit, pair.texts, session.n_added, ends))


@dataclass(frozen=True, slots=True)
class _Pair:
    """A prompt beside its session's last sequence. Tokens are counted behind what the model wants in front."""

    texts: Sequence[TextPart]
    text: bytes
    """That of the prompt, marked."""
    session: Session
    spelling: Spelling
    """That of the session."""
    cutter: Cutter
    n_same: int
    """Bytes that both texts begin with."""

    @property
    def has_all(self) -> bool:
        """Whether the prompt has all of the session's text."""
        return self.n_same == len(self.spelling.text)

    @property
    def is_changed(self) -> bool:
        """Whether the prompt leaves the session's text within its reply."""
        n_tokens = self.session.n_prompt - self.session.n_added
        end_of_prompt = self.end(n_tokens)
        is_within = end_of_prompt <= self.n_same < min(len(self.spelling.text), len(self.text))
        return self.session.has_reply and is_within

    def n_kept(self, least: int = 0) -> int:
        """The session's tokens that can stand for the prompt's text; none for less than `least` characters of it.

        Behind all of a reply the text may go on anywhere: what was generated was generated.
        """
        ends, n_same = self.spelling.ends, self.n_same
        n = int(np.searchsorted(ends, n_same, side="right"))
        is_cut_character = n_same < len(self.text) and self.text[n_same] & 0xC0 == 0x80
        if self.has_all and self.session.has_reply and not is_cut_character:
            return n
        while n and ends[n - 1] >= least and not self.cutter.is_seam(self.text, int(ends[n - 1])):
            n -= 1
        return n if n_characters(self.text[: self.end(n)]) >= least else 0

    def end(self, n_tokens: int) -> int:
        """Where the text of the session's first tokens ends."""
        return int(self.spelling.ends[n_tokens - 1]) if n_tokens else 0


def n_characters(marked: bytes) -> int:
    """Characters of a marked text."""
    raw = np.frombuffer(marked, np.uint8)
    return int(np.count_nonzero((raw & 0xC0 != 0x80) & (raw != CONTROL[0])))
