"""Prompts as token ids, with the tokens of earlier replies where their text comes back (`prompts/token_memory.py`).

Without a session, the longest prefix of the text that has a text anchor gets the anchor's tokens, and the rest is
tokenized in two runs:

    text      |--- anchored ---|---- middle ----|---- tail ----|---- reply ----|
    tokens    |  the anchor's  |   tokenized    |   tokenized  |   generated   |
               last cut point with an anchor ^    ^ last cut point

Thanks to the last cut, only the tail and the reply are tokenized again after the reply, to see whether their text
would give other tokens. Only then the whole text gets an anchor: the prefix match finds other replies anyway.
A prompt with a session is compared with the session's text first (`prompts/cut_points.py`). A chat whose
replies are remembered begins with their tokens (`protocol/replies/`), and only the text after them is tokenized.

Detokenizing a prompt's tokens always gives its text, and generated tokens are only used where this server generated
them for this text. So prompts of token ids, and replies with control tokens (shown or left out of the text),
never give tokens to a text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice

import numpy as np
from msgspec import structs

from llamaslot.base.adapters import activation_of, adapters_key
from llamaslot.base.backend import Vocab
from llamaslot.base.cache_ids import CacheIds, cache_ids_of
from llamaslot.base.commands import ImagePart, PromptPart, TextPart, TokensPart
from llamaslot.base.errors import ContextSizeError, InvalidRequestError
from llamaslot.base.images import PromptImage, before_tile, tile_ids
from llamaslot.base.text_records import Session, TextAnchor, TextRecord, session_digest
from llamaslot.base.tokens import (
    WIDTH,
    SessionMatch,
    TokenizedPrompt,
    Tokens,
    n_common,
    packed,
    unpacked,
)
from llamaslot.formats.format import Format
from llamaslot.prompts.cut_points import (
    CutPoint,
    MarkedText,
    Pieces,
    PromptText,
    SessionComparison,
    TextScanner,
    exact_cut_tokens,
    n_characters,
)
from llamaslot.prompts.remembering import PromptContext, SentReply, remembered_reply, returned_message
from llamaslot.prompts.token_memory import TokenMemory
from llamaslot.protocol.images import MEDIA_MARKER
from llamaslot.protocol.text_requests import TextRequest
from llamaslot.text.conversation import Message

_MAX_TAIL = 2**14
"""Most characters after the last cut point for a reply to get an anchor: all of them are tokenized again then."""
_MAX_CHARACTERS = 2**20
"""Most characters of a text where a token may stand for any number of them: 128 for each token of BGE-M3."""
_WORD = re.compile(r"[0-9A-Za-z][^ \t\n\r]*")
"""A word that has at least a part of a token: these characters are never dropped, and these blanks end any word."""
MIN_KEPT_CHARACTERS = 100
"""Characters of a session's text that a prompt must keep where it diverges from it."""


def tokenize_parts(vocab: Vocab, parts: Iterable[PromptPart], *, add_special: bool) -> Tokens:
    """Tokenize a prompt part by part; token ids must be in the vocabulary."""
    return _tokenized_parts(vocab, parts, add_special=add_special)[0]


def _tokenized_parts(
    vocab: Vocab, parts: Iterable[PromptPart], *, add_special: bool
) -> tuple[Tokens, tuple[PromptImage, ...]]:
    """Return the tokens of a prompt, and its images with their places among them."""
    runs: list[Tokens] = []
    images: list[PromptImage] = []
    for part in parts:
        is_first = add_special and not runs
        if isinstance(part, TextPart):
            runs.append(vocab.tokenize(part.text, add_special=is_first, parse_special=part.special))
        elif isinstance(part, TokensPart):
            runs.append(np.array(part.tokens, dtype=np.int32))
        else:
            if is_first:
                # What the model wants before a prompt, such as BOS, goes before an image too.
                runs.append(vocab.tokenize("", add_special=True, parse_special=True))
            ids, image = _placed(part, sum(map(len, runs)))
            runs += ids
            images.append(image)
    return np.concatenate(runs) if runs else np.empty(0, dtype=np.int32), tuple(images)


def _placed(part: ImagePart, start: int) -> tuple[list[Tokens], PromptImage]:
    """Return the tokens of an image from a place of a prompt on, and the image with its tiles there."""
    runs: list[Tokens] = []
    tiles: list[tuple[int, int]] = []
    for piece in part.layout.pieces:
        if isinstance(piece, int):
            runs.append(tile_ids(part.digest, len(tiles), piece))
            tiles.append((start, start + piece))
        else:
            runs.append(np.array(piece, dtype=np.int32))
        start += len(runs[-1])
    return runs, PromptImage(part.data, part.digest, tuple(tiles))


def _first_tokens(prompt: TokenizedPrompt, n_tokens: int) -> TokenizedPrompt:
    """Return the first tokens of a prompt, without a tile that is not whole among them.

    If they end between two images of one group (`base/cache_ids.py`), later prompts share only what precedes both.
    """
    n_tokens = before_tile(prompt.tokens, n_tokens)
    images = [
        structs.replace(image, tiles=tuple(each for each in image.tiles if each[1] <= n_tokens))
        for image in prompt.images
    ]
    return TokenizedPrompt(packed(prompt.tokens[:n_tokens]), images=tuple(each for each in images if each.tiles))


class Tokenizer:
    """Tokenizes prompts for slots of `n_ctx` tokens, and remembers the tokens of replies in `memory`.

    `is_whole` is true if prompts have no replies and are computed in one step, which may have all `n_ctx` tokens.

    May be used by several threads.

    `use_anchors` is false where texts always get their own tokens. `template` is the model's chat template. A
    prompt that diverges from its session's text must keep `min_match` of its characters to keep its tokens.
    `clock` is that of the shares that owners have of `memory`.
    """

    def __init__(
        self,
        vocab: Vocab,
        n_ctx: int,
        *,
        min_match: float,
        use_anchors: bool = True,
        template: str = "",
        is_whole: bool = False,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.memory = TokenMemory(clock=clock)
        self._vocab = vocab
        self.pieces = Pieces(vocab)
        self._n_ctx = n_ctx
        self._max_prompt = n_ctx - (not is_whole)
        self._n_words = (self._max_prompt + 1) * vocab.words_per_token
        """Words that do not fit; 0 if that is not known."""
        self._is_whole = is_whole
        self._use_anchors = use_anchors
        self._min_match = min_match
        self._template = template

    @property
    def stack_bytes(self) -> int:
        """Stack that the thread needs; 0 for what threads have by default."""
        return self._vocab.stack_bytes

    def probe_cut_points(self) -> bool:
        """Probe for exact cut points, which takes some time; True if there are any, or none are wanted."""
        return self._scanner is not None or not self._use_anchors

    def add_records(self, records: Sequence[TextRecord]) -> None:
        """Remember the records of an earlier process, the oldest first."""
        for record in records:
            if self._use_anchors or not isinstance(record, TextAnchor):
                self.memory.add(record)

    def tokenize_prompt(self, request: TextRequest) -> PromptContext:
        """Tokenize a request's prompt, as far as those of `request.others` are the same.

        Raises `ContextSizeError` at once if it cannot fit a slot.
        """
        if request.is_cut:
            return PromptContext(request, TokenizedPrompt(packed(self._cut(request))))
        context = self._tokenized(request)
        if not request.others:
            return context
        tokens = context.prompt.tokens
        n = min(n_common(tokens, self._tokenized(each).prompt.tokens) for each in request.others)
        return replace(context, prompt=_first_tokens(context.prompt, n))

    def _tokenized(self, request: TextRequest) -> PromptContext:
        # The reader of the body has checked its other parts, before a text that is too long could take any time.
        self.check_size(request.rest)
        restored = self._with_replies(request)
        if restored is not None and restored.prompt.n_tokens <= self._max_prompt:
            return restored
        text = self._scan(request)
        has_session = request.session_id and request.params.cache_prompt
        found = self._from_session(request, text) if has_session else self._from_anchor(request, text)
        prompt = found.prompt
        if len(prompt.tokens) > self._max_prompt and (prompt.n_anchored or prompt.session_match):
            # The text's own tokens may be fewer.
            own = _with(self._from_anchor(request, None), session_match="tokens" if prompt.session_match else "")
            return replace(own, text=text)
        return found

    def _cut(self, request: TextRequest) -> Tokens:
        """Tokenize a text as far as it fits, with the token that the model wants after a text, if it wants one."""
        (part,) = request.parts
        assert isinstance(part, TextPart)
        # No more characters than that can matter.
        n_most = (self._max_prompt + 1) * self._vocab.longest_piece or _MAX_CHARACTERS
        words = self._first_words(part.text)
        if words and len(words) == self._n_words:
            n_most = words[-1].end()
        text = structs.replace(part, text=part.text[:n_most])
        tokens = tokenize_parts(self._vocab, (text,), add_special=True)
        if len(tokens) <= self._max_prompt:
            return tokens
        n_after = int(tokens[-1] in self._added_tokens[-1:])
        n = self._max_prompt - n_after
        return np.concatenate([tokens[:n], tokens[len(tokens) - n_after :]])

    def check_size(self, prompt: Iterable[PromptPart]) -> None:
        """Raise `ContextSizeError` for a prompt with more bytes of text than tokens that fit can stand for, beside
        those of its images, and `InvalidRequestError` for invalid Unicode, which templates can make.
        """
        prompt = list(prompt)
        texts = [part.text for part in prompt if isinstance(part, TextPart)]
        n_bytes, n_min = sum(map(_n_bytes, texts)), 0
        if longest := self._vocab.longest_piece:
            n_min = n_bytes // longest
        elif most := self._vocab.words_per_token:
            n_min = sum(len(self._first_words(text)) for text in texts) // most
        n_min += sum(part.layout.n_tokens for part in prompt if isinstance(part, ImagePart))
        if n_min > self._max_prompt:
            raise ContextSizeError.of(n_min, self._n_ctx, at_least=True, is_whole=self._is_whole)
        if self._vocab.words_per_token and sum(map(len, texts)) > _MAX_CHARACTERS:
            raise InvalidRequestError(f"the text has more than {_MAX_CHARACTERS} characters")

    def _first_words(self, text: str) -> list[re.Match[str]]:
        """Return words of which each has at least a part of a token, at most as many as are one token too many."""
        return list(islice(_WORD.finditer(text), self._n_words))

    def check_fits(self, prompt: TokenizedPrompt) -> None:
        """Raise `InvalidRequestError` for an empty prompt, `ContextSizeError` for one without place for a reply."""
        if not prompt.n_tokens:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        if prompt.n_tokens > self._max_prompt:
            raise ContextSizeError.of(prompt.n_tokens, self._n_ctx, is_whole=self._is_whole)

    def remember(
        self,
        context: PromptContext,
        generated: Tokens,
        n_sent: int,
        completion_id: str = "",
        format_: Format | None = None,
    ) -> tuple[TextRecord, ...]:
        """Remember the tokens of a reply, of which `n_sent` characters were sent; return the new records.

        With the id of its completion, a chat's reply that was written in a format is remembered by its meaning too.
        A cancelled reply is not, because the client may have received less than was sent.
        """
        request, is_chat = context.request, context.request.chat is not None
        if context.text is None and not request.session_id and not is_chat:
            return ()
        sent = self._sent(generated.tolist(), n_sent, request.params.preserved_tokens)
        anchor = self._add_anchor(context, sent) if sent.tokens else None
        session = self._session_after(context, generated, sent) if request.session_id else None
        message = None
        if is_chat and completion_id and format_ is not None:
            message = remembered_reply(context, completion_id, sent, format_)
        for record in (session, message):
            if record is not None:
                self.memory.add(record)
        return tuple(record for record in (anchor, session, message) if record is not None)

    def returned_message(
        self, context: PromptContext, generated: Tokens, n_sent: int, completion_id: str, format_: Format
    ) -> Message | None:
        """Return the reply to a chat as clients send it back; None if they cannot."""
        sent = self._sent(generated.tolist(), n_sent, context.request.params.preserved_tokens)
        return returned_message(context, completion_id, sent, format_) if sent.tokens else None

    def remember_branch(self, request: TextRequest, known: CacheIds) -> tuple[TextRecord, ...]:
        """Add a prompt that is computed to a request's session, so that it is dropped with it; return the record.

        It is empty if there is no session, or no longer.
        """
        session = self._session_of(request) if request.session_id else None
        if session is None:
            return ()
        session = session.with_branch(known.ids, _namespace_key(request, known))
        self.memory.add(session)
        return (session,)

    def n_characters(self, context: PromptContext, n_tokens: int) -> int:
        """Count the characters of the first tokens of a prompt, control tokens included.

        Tokens that the model wants before the prompt count as none, and those of images too.
        """
        return n_characters(self._written(context.prompt.tokens[self.n_added(context) : n_tokens]).data)

    def tokenize(self, prompt: Sequence[PromptPart], *, add_special: bool = False) -> list[int]:
        """Return the token ids of any prompt."""
        return list(tokenize_parts(self._vocab, prompt, add_special=add_special).tolist())

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return self._vocab.detokenize([token])

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, with invalid UTF-8 replaced. Tokens of images have none."""
        return self._vocab.detokenize([token for token in tokens if token >= 0]).decode(errors="replace")

    def echo(self, context: PromptContext) -> str:
        """Return a prompt as its client gave it; one with token ids as the model sees it."""
        parts = context.request.parts
        if not any(isinstance(part, TokensPart) for part in parts):
            return "".join(part.text if isinstance(part, TextPart) else MEDIA_MARKER for part in parts)
        return self.detokenize(context.prompt.tokens.tolist())

    @cached_property
    def _scanner(self) -> TextScanner | None:
        """None where texts always get their own tokens."""
        exact = exact_cut_tokens(self._vocab, self._template) if self._use_anchors else ()
        return TextScanner(exact, self._vocab.special_tokens) if exact else None

    def _scan(self, request: TextRequest) -> PromptText | None:
        texts = [part for part in request.parts if isinstance(part, TextPart)]
        is_text = bool(texts) and len(texts) == len(request.parts)
        if self._scanner is None or not request.params.cache_prompt or not is_text:
            return None
        return self._scanner.scan(texts, request.namespace)

    def _with_replies(self, request: TextRequest) -> PromptContext | None:
        """Tokenize the prompt after the tokens of remembered replies; None if it has none."""
        restored = request.chat.restored if request.chat is not None else None
        if restored is None:
            return None
        known = unpacked(restored.tokens)
        own = tokenize_parts(self._vocab, request.rest, add_special=False)
        # Some vocabularies add a space before a text, also before one that begins with a space.
        n_blanks = _n_leading_blanks(request.rest[0].text.encode(errors="replace")) if request.rest else 0
        if _n_leading_blanks(self._vocab.detokenize(own[: n_blanks + 4].tolist())) > n_blanks:
            return None
        prompt = TokenizedPrompt(
            packed(np.concatenate([known, own])), n_remembered=len(known), n_of_replies=restored.n_reply
        )
        if not request.session_id:
            return PromptContext(request, prompt)
        session = self._session_of(request)
        match: SessionMatch = "new" if session is None else "tokens"
        if self._scanner is None:
            return PromptContext(request, structs.replace(prompt, session_match=match))
        n_added = len(self._added_tokens)
        written = self._written(known[n_added:]).data
        text = self._scanner.scan(request.rest, request.namespace, written)
        is_edited = False
        if session is not None and session.is_text:
            compared = SessionComparison(text.data, session, self._written(session.text_tokens))
            is_edited = compared.is_reply_edited
            if compared.has_all and n_common(prompt.tokens, session.ids) >= session.n_text:
                match = "exact" if compared.is_same else "extend"
        return PromptContext(request, structs.replace(prompt, session_match=match, is_reply_edited=is_edited), text)

    def _from_anchor(self, request: TextRequest, text: PromptText | None) -> PromptContext:
        """Tokenize the prompt from the last cut point that has a text anchor, or all of it."""
        if text is None:
            own, images = _tokenized_parts(self._vocab, request.parts, add_special=True)
            return PromptContext(request, TokenizedPrompt(packed(own), images=images))
        cut, anchored = self._anchored(text)
        runs = [unpacked(anchored)] if anchored else []
        middle = text.parts(cut.at if cut is not None else 0, text.last_cut)
        for parts in filter(None, (middle, text.parts(text.last_cut) or [TextPart("")])):
            runs.append(tokenize_parts(self._vocab, parts, add_special=not runs))
        prompt = TokenizedPrompt(packed(np.concatenate(runs)), len(anchored) // WIDTH)
        return PromptContext(request, prompt, text, sum(map(len, runs[:-1])))

    def _from_session(self, request: TextRequest, text: PromptText | None) -> PromptContext:
        """Keep the tokens of the prompt's session as far as their text is the prompt's."""
        session = self._session_of(request)
        if session is None:
            return _with(self._from_anchor(request, text), session_match="new")
        is_comparable = session.is_text and np.array_equal(self._added_tokens, session.ids[: session.n_added])
        if text is None or self._scanner is None or not is_comparable:
            return _with(self._from_anchor(request, text), session_match="tokens")
        compared = SessionComparison(text.data, session, self._written(session.text_tokens))
        if compared.has_all:
            found = self._after_session(request, text, compared, compared.n_kept(self._scanner))
            if found is not None:
                return _with(found, session_match="exact" if compared.is_same else "extend")
        anchored = self._from_anchor(request, text)
        n_min = max(MIN_KEPT_CHARACTERS, math.ceil(self._min_match * n_characters(compared.known.data)))
        n_kept = compared.n_kept(self._scanner, n_min)
        n_more = session.n_added + n_kept - n_common(anchored.prompt.tokens, session.ids)
        # Tokens that come out anyway are no reason to cut where that is only approximately exact.
        found = self._after_session(request, text, compared, n_kept) if n_more > 0 else None
        is_edited = compared.is_reply_edited
        if found is None:
            return _with(anchored, session_match="tokens", is_reply_edited=is_edited)
        return _with(found, session_match="diverge", n_approximate=n_more, is_reply_edited=is_edited)

    def _after_session(
        self, request: TextRequest, text: PromptText, compared: SessionComparison, n_kept: int
    ) -> PromptContext | None:
        """Tokenize the prompt after the first tokens of its session; None if that would not give its text."""
        if not n_kept:
            return None
        session, at = compared.session, compared.end(n_kept)
        own = tokenize_parts(self._vocab, text.parts(at), add_special=False)
        rest = self._written(own)
        # Some vocabularies add a space before a text.
        if rest.data != text.data[at:]:
            return None
        tokens = np.concatenate([session.ids[: session.n_added + n_kept], own])
        ends = np.concatenate([compared.known.ends[:n_kept], rest.ends + at])
        n = int(np.searchsorted(ends, text.last_cut, side="right"))
        n_head = session.n_added + n if n and ends[n - 1] == text.last_cut else None
        return PromptContext(request, TokenizedPrompt(packed(tokens)), text, n_head if text.last_cut else 0)

    def _add_anchor(self, context: PromptContext, sent: SentReply) -> TextAnchor | None:
        """Add a text anchor for the prompt with its reply, if tokenizing their text would give other tokens."""
        text, n_head, reply = context.text, context.n_head, sent.text
        if text is None or n_head is None or self._scanner is None:
            return None
        if n_characters(text.data[text.last_cut :]) > _MAX_TAIL:
            return None
        *others, last = text.parts(text.last_cut) or [TextPart("")]
        ends = [TextPart(last.text + reply)] if last.special else [last, TextPart(reply)]
        if self._scanner.has_control_token(ends[-1].text, len(ends[-1].text) - len(reply)):
            return None
        tokens = np.concatenate([context.prompt.tokens, np.array(sent.tokens, dtype=np.int32)])
        own = tokenize_parts(self._vocab, [*others, *ends], add_special=not text.last_cut)
        if np.array_equal(own, tokens[n_head:]):
            return None
        cut, _ = self._anchored(text)
        parent = cut.digest if cut is not None else b""
        request = context.request
        return self.memory.add_anchor(
            text.digest_with(reply),
            packed(tokens),
            parent,
            session=request.session,
            owner=request.owner,
        )

    def _session_after(self, context: PromptContext, generated: Tokens, sent: SentReply) -> Session:
        """Return the session of a prompt, with the prompt and its reply as its last sequence."""
        request, text, tokens = context.request, context.text, context.prompt.tokens
        known = cache_ids_of(context.prompt, activation_of(request.params.adapters, context.prompt.packed_tokens))
        n_added, n_prompt = len(self._added_tokens), len(tokens)
        session = Session(
            key=_session_key(request),
            session=request.session,
            namespace_key=_namespace_key(request, known),
            owner=request.owner,
            tokens=packed(np.concatenate([tokens, generated])),
            n_added=n_added,
            n_prompt=n_prompt,
            n_text=n_prompt + len(sent.tokens),
            is_text=text is not None and self._written(tokens[n_added:]).data == text.data,
        )
        earlier = self._session_of(request)
        session = session if earlier is None else session.continuing(earlier)
        if not known.marked_from:
            return session
        # Dropping the session finds KV by the ids that the cache knows.
        return session.with_branch(np.concatenate([known.ids, generated]), session.namespace_key)

    def _session_of(self, request: TextRequest) -> Session | None:
        return self.memory.session(_session_key(request))

    def _sent(self, generated: list[int], n_sent: int, preserved_tokens: Container[int]) -> SentReply:
        """Return the text of a reply that was sent, and its tokens.

        Both are empty where a token of the reply gives no text, and where the sending ended within a token.
        """
        has_ended = bool(generated) and generated[-1] in self._vocab.eog
        if has_ended:
            generated.pop()
        pieces = [
            self._vocab.detokenize([token]) if token in preserved_tokens else self._vocab.piece(token)
            for token in generated
        ]
        if not all(pieces):
            return SentReply("", [], has_ended)
        text = b"".join(pieces).decode(errors="replace")
        while pieces and len(text) > n_sent:
            pieces.pop()
            text = b"".join(pieces).decode(errors="replace")
        is_exact = len(text) == n_sent
        return SentReply(text if is_exact else "", generated[: len(pieces)] if is_exact else [], has_ended)

    def _anchored(self, text: PromptText) -> tuple[CutPoint | None, bytes]:
        """Return the last cut point that has a text anchor, and the packed tokens before it."""
        for cut in reversed(text.cut_points):
            if (tokens := self.memory.anchored(cut.digest)) is not None:
                return cut, tokens
        return None, b""

    def _written(self, tokens: Tokens) -> MarkedText:
        return MarkedText.of(tokens.tolist(), self.pieces)

    def n_added(self, context: PromptContext) -> int:
        """Return how many tokens the model wanted before a prompt."""
        return 0 if isinstance(context.request.parts[0], TokensPart) else len(self._added_tokens)

    @property
    def _added_tokens(self) -> Tokens:
        """The tokens that the model wants before a prompt."""
        return self._vocab.tokenize("", add_special=True, parse_special=True)


def _session_key(request: TextRequest) -> bytes:
    return session_digest(request.namespace, request.session_id, request.session_branch)


def _namespace_key(request: TextRequest, known: CacheIds) -> str:
    """Return what the namespace of a prompt has besides the salt."""
    return adapters_key(request.params.adapters) + known.key


def _with(context: PromptContext, **changes: object) -> PromptContext:
    """Return a copy with other fields of its prompt."""
    return replace(context, prompt=structs.replace(context.prompt, **changes))


def _n_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequestError("the text is invalid Unicode") from None


def _n_leading_blanks(text: bytes) -> int:
    return len(text) - len(text.lstrip(b" "))
