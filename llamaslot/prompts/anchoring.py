"""Prompts as token ids, with what an earlier reply was made of where its text comes back.

    text      |---- 1 known ----|---- 2 between ----|---- 3 tail ----|---- 4 reply ----|
    tokens    |  the anchor's   |     tokenized     |    tokenized   |    generated    |
                longest known cut ^          last cut ^                        named here ^

A prompt is cut twice: 1 is the longest front that has a name, and its tokens are the anchor's; what follows is
tokenized, and apart from the last cut on, so that behind a reply only 3 and 4 have to be tokenized again to see
whether their text would give other tokens. Only then the whole gets a name: other replies the token match finds
anyway.

A prompt's tokens are so always tokens of its text, and those that were generated wherever this server generated
them. Only text that this server tokenized may stand for tokens: never prompts of token ids, nor a reply in which
control tokens are spelled or hidden. Once the server serves, all of this belongs to the tokenizer's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from llamaslot.base.backend import Vocab
from llamaslot.base.commands import PromptPart, Submit, TextPart
from llamaslot.base.events import SessionMatch
from llamaslot.base.namespaces import salted
from llamaslot.base.tokens import Tokens
from llamaslot.prompts.anchors import Anchor, Anchors
from llamaslot.prompts.cuts import Cut, Cutter, TextName, parts_between, parts_from

_MOST_BOUNDARIES = 128
"""Control tokens that are looked at; some vocabularies have thousands that nobody uses."""
_LONGEST_TAIL = 2**14
"""Characters behind the last cut up to which replies are named: all of them are tokenized again then."""
_FRONTS = ("x", "x ", "x\n", "x\n\n", "\n", "é", " ", "   ", ".", "0", "\t")
_BEHIND = ("", "x", " x", "\nx", "  x")
"""What texts end and begin with around a cut that is tried out."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What it takes to name a reply to a prompt."""

    name: TextName
    """Of the whole prompt."""
    front: bytes
    """The name of 1; empty where nothing was known."""
    tail: tuple[TextPart, ...]
    """The text of 3."""
    n_head: int
    """Tokens of 1 and 2."""
    add_special: bool
    """Whether the special tokens that the model wants in front of a prompt are in front of 3, since it is all."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt."""

    tokens: Tokens
    n_anchored: int = 0
    """Of its tokens, those of 1."""
    ending: Ending | None = field(default=None, compare=False)
    """None where replies to it get no name."""
    session_match: SessionMatch = ""
    """What came of holding it against its session's last sequence."""
    n_approximate: int = 0
    """Of its tokens, those of the session that the text's own tokens would not have begun with."""
    is_changed: bool = False
    """Whether it leaves its session's text within the last reply."""


def tokenized(vocab: Vocab, parts: Sequence[PromptPart], *, add_special: bool) -> Tokens:
    """The token ids of a prompt whose own ids exist."""
    runs = [
        vocab.tokenize(part.text, add_special=add_special and i == 0, parse_special=part.special)
        if isinstance(part, TextPart)
        else np.array(part.tokens, dtype=np.int32)
        for i, part in enumerate(parts)
    ]
    return np.concatenate(runs) if runs else np.empty(0, dtype=np.int32)


class Anchoring:
    """Tokenizes for a vocabulary, as if every text were new unless `is_wanted`; `template` is the model's own."""

    def __init__(self, vocab: Vocab, *, is_wanted: bool = True, template: str = "") -> None:
        self.is_wanted = is_wanted
        self.anchors = Anchors()
        self._vocab = vocab
        self._template = template
        self._is_prepared = False
        self._cutter: Cutter | None = None

    def prepare(self) -> bool:
        """Try out before which control tokens texts can be cut; whether there is any. The first prompt has it done,
        if nobody did before.
        """
        if self.is_wanted and not self._is_prepared:
            boundaries = exact_boundaries(self._vocab, self._template)
            self._cutter = Cutter(boundaries, self._vocab.special_tokens) if boundaries else None
        self._is_prepared = True
        return self._cutter is not None

    @property
    def cutter(self) -> Cutter | None:
        """What finds the places where texts can be cut; None where there are none, or nobody wants them."""
        self.prepare()
        return self._cutter

    def submitted(self, submit: Submit) -> Prompt:
        """A request's prompt, whose own ids exist."""
        texts = [part for part in submit.prompt if isinstance(part, TextPart)]
        cutter = self.cutter
        if cutter is None or not submit.cache_prompt or len(texts) < len(submit.prompt):
            return Prompt(tokenized(self._vocab, submit.prompt, add_special=submit.add_special))
        cuts, name = cutter.cuts(texts, _namespace(submit))
        known = self._known(cuts)
        last = cuts[-1] if cuts else None
        anchored = self.anchors.find(known.name) if known is not None else None
        between, tail = parts_between(texts, known, last), parts_from(texts, last)
        runs = [] if anchored is None else [anchored]
        for parts in (between, tail) if last is not None else (tail,):
            runs.append(tokenized(self._vocab, parts, add_special=submit.add_special and not runs))
        n_head = sum(map(len, runs[:-1]))
        ending = _ending(name, known, tail, n_head, add_special=submit.add_special and last is None)
        return Prompt(np.concatenate(runs), 0 if anchored is None else len(anchored), ending)

    def ending(
        self, submit: Submit, texts: Sequence[TextPart], n_front: int, ends: npt.NDArray[np.int64]
    ) -> Ending | None:
        """What it takes to name a reply to a prompt whose tokens behind the first `n_front` end so in its marked
        text, see `Cutter.marked`.
        """
        cutter = self.cutter
        if cutter is None:
            return None
        cuts, name = cutter.cuts(texts, _namespace(submit))
        last = cuts[-1] if cuts else None
        tail = parts_from(texts, last)
        at = int(ends[-1]) - len(cutter.marked(tail))
        n = int(np.searchsorted(ends, at, side="right"))
        if last is None:
            return _ending(name, None, tail, 0, add_special=submit.add_special)
        if not n or ends[n - 1] != at:
            return None
        return _ending(name, self._known(cuts), tail, n_front + n, add_special=False)

    def replied(self, prompt: Prompt, generated: Tokens, n_sent: int) -> Anchor | None:
        """Name a reply of which `n_sent` characters were sent, if its text would give other tokens."""
        ending = prompt.ending
        reply = self.as_sent(generated.tolist(), n_sent)
        if ending is None or reply is None or self._cutter is None:
            return None
        text, ids = reply
        *others, last = ending.tail or (TextPart(""),)
        end = [TextPart(last.text + text)] if last.special else [last, TextPart(text)]
        if self._cutter.spells_control(end[-1].text, len(end[-1].text) - len(text)):
            return None
        own = np.concatenate([prompt.tokens[ending.n_head :], np.array(ids, dtype=np.int32)])
        if np.array_equal(tokenized(self._vocab, [*others, *end], add_special=ending.add_special), own):
            return None
        tokens = np.concatenate([prompt.tokens[: ending.n_head], own])
        return self.anchors.add(ending.name.extended(text), tokens, ending.front)

    def as_sent(self, generated: list[int], n_sent: int) -> tuple[str, list[int]] | None:
        """The text that was sent of a reply, and its tokens.

        None where nothing was sent, a token that gives no text is among them, or the sending ended within one.
        """
        if generated and generated[-1] in self._vocab.eog:
            generated.pop()
        pieces = [self._vocab.piece(token) for token in generated]
        if not all(pieces):
            return None
        text = b"".join(pieces).decode(errors="replace")
        while pieces and len(text) > n_sent:
            pieces.pop()
            text = b"".join(pieces).decode(errors="replace")
        return (text, generated[: len(pieces)]) if pieces and len(text) == n_sent else None

    def _known(self, cuts: Sequence[Cut]) -> Cut | None:
        """The last cut whose text has a name."""
        return next((cut for cut in reversed(cuts) if cut.name in self.anchors), None)


def _namespace(submit: Submit) -> str:
    """What texts must have in common to have the same name."""
    return f"{salted(submit.cache_salt)} {submit.add_special}"


def _ending(
    name: TextName, known: Cut | None, tail: Sequence[TextPart], n_head: int, *, add_special: bool
) -> Ending | None:
    """None where the tail is too long to be tokenized again."""
    if sum(len(part.text) for part in tail) > _LONGEST_TAIL:
        return None
    return Ending(name, known.name if known is not None else b"", tuple(tail), n_head, add_special)


def exact_boundaries(vocab: Vocab, template: str = "") -> tuple[str, ...]:
    """The control tokens before which a text can be cut without changing its tokens, as far as trying shows.

    Those that the template names are tried first.
    """
    candidates = sorted(vocab.boundaries, key=lambda text: text not in template)

    def ids(text: str) -> list[int]:
        return list(map(int, vocab.tokenize(text, add_special=False, parse_special=True)))

    fronts = {front: ids(front) for front in _FRONTS}

    def is_exact(boundary: str) -> bool:
        rests = {rest: ids(boundary + rest) for rest in _BEHIND}
        return len(rests[""]) == 1 and all(
            ids(front + boundary + rest) == fronts[front] + rests[rest] for front in fronts for rest in rests
        )

    return tuple(filter(is_exact, candidates[:_MOST_BOUNDARIES]))
