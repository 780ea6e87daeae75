"""Log-probabilities in replies: OpenAI's formats for chat and for text, and llama-server's."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from llamaslot.api.bodies import encode, joined_lists
from llamaslot.base.commands import GenerateParams
from llamaslot.base.generation.token_probs import ProbRows, TokenProb

_MAX_TOPS = 4096
"""Tokens whose JSON is kept."""


class TopProb(msgspec.Struct):
    """One of the most likely tokens."""

    id: int
    token: str
    """Its text."""
    bytes: list[int]
    logprob: float | UnsetType = UNSET
    prob: float | UnsetType = UNSET
    """Its probability after sampling, in place of the logarithm (`post_sampling_probs`)."""


class Prob(TopProb, kw_only=True):
    """A token of the reply."""

    top_logprobs: list[TopProb] | UnsetType = UNSET
    top_probs: list[TopProb] | UnsetType = UNSET


class ChatLogprobs(msgspec.Struct):
    """Probabilities of a chat reply's tokens."""

    content: list[Prob]


class TextLogprobs(msgspec.Struct):
    """Probabilities of a text's tokens in OpenAI's format, and in llama-server's as `content`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """Log-probability by text; bytes that are not valid UTF-8 are written as in OpenAI's API."""
    text_offset: list[int]
    content: list[Prob]
    """Generated tokens only."""


class ProbsWriter:
    """Writes the probabilities of one choice's tokens, in order; those of its prompt, if any, come first.

    The texts of all tokens join to the choice's text: a character of several tokens belongs to the last of them.
    """

    def __init__(self, params: GenerateParams) -> None:
        self._texts = _Texts()
        self._are_sampled = params.sampling.post_sampling_probs
        self._tops: dict[int, bytes] = {}
        """JSON of a `TopProb` up to its probability, by token: the same tokens are likely in many places."""

    def native(self, rows: Iterable[TokenProb]) -> list[Prob]:
        """Return the next tokens in llama-server's format, which has all fields of OpenAI's for chat."""
        return [self._prob(row, self._texts.next(row)[1]) for row in rows]

    def native_later(self, rows: ProbRows) -> Iterator[bytes]:
        """Yield the JSON of `native`."""
        return joined_lists(self.native(part) for part in rows.parts())

    def chat(self, rows: Iterable[TokenProb]) -> ChatLogprobs:
        """Return the next tokens in OpenAI's format for chat."""
        return ChatLogprobs(self.native(rows))

    def text(self, rows: Sequence[TokenProb]) -> TextLogprobs:
        """Return the next tokens in OpenAI's format for text completions."""
        places = [self._texts.next(row) for row in rows]
        return TextLogprobs(
            tokens=[_name(row) for row in rows],
            token_logprobs=[row.value for row in rows],
            top_logprobs=[_top_of(row) for row in rows],
            text_offset=[offset for offset, _ in places],
            content=[self._prob(row, text) for row, (_, text) in zip(rows, places, strict=True)],
        )

    def text_later(self, prompt: ProbRows | None, text: str, rows: ProbRows) -> tuple[Iterator[bytes], ...]:
        """Return the JSON of each list of a `TextLogprobs`: a prompt's tokens, if wanted, then the reply's."""
        both = (rows,) if prompt is None else (prompt, rows)

        def each(value: Callable[[TokenProb], Any], *, with_top: bool = False) -> Iterator[bytes]:
            parts = (part for each in both for part in each.parts(with_top=with_top))
            return joined_lists([value(row) for row in part] for part in parts)

        def offsets() -> Iterator[bytes]:
            places = _Texts(len(text))
            of_prompt = self._prompt_offsets(prompt, text) if prompt is not None else iter(())
            of_reply = ([places.next(row)[0] for row in part] for part in rows.parts(with_top=False))
            return joined_lists(chain(of_prompt, of_reply))

        return (
            each(_name),
            each(lambda row: row.value),
            each(_top_of, with_top=True),
            offsets(),
            self.native_later(rows),
        )

    def prompt(self, rows: ProbRows, text: str) -> Iterator[TextLogprobs]:
        """Yield the tokens of a prompt in parts, and count its text, which all that follows comes after.

        A tokenizer may have put BOS and a space before it, which the text does not have.
        """
        self._texts = _Texts(len(text))
        places = filter(None, self._prompt_offsets(rows, text))
        for part, offsets in zip(rows.parts(), places, strict=True):
            yield TextLogprobs(
                tokens=[_name(row) for row in part],
                token_logprobs=[row.value for row in part],
                top_logprobs=[_top_of(row) for row in part],
                text_offset=offsets,
                content=[],
            )

    def _prompt_offsets(self, rows: ProbRows, text: str) -> Iterator[list[int]]:
        """Yield the offsets of each part of a prompt's tokens, after an empty list for each part."""
        counted = _Texts()
        for part in rows.parts(with_top=False):
            for row in part:
                counted.next(row)
            yield []
        n_added, places = max(counted.n - len(text), 0), _Texts()
        for part in rows.parts():
            yield [max(places.next(row)[0] - n_added, 0) for row in part]

    def _prob(self, row: TokenProb, text: str) -> Prob:
        assert row.value is not None
        found = Prob(row.token, text, list(row.piece))
        top: Any = msgspec.Raw(b"[%b]" % b",".join(map(self._top, row.top)))
        if self._are_sampled:
            found.prob, found.top_probs = row.value, top
        else:
            found.logprob, found.top_logprobs = row.value, top
        return found

    def _top(self, row: TokenProb) -> bytes:
        """Return the JSON of a `TopProb`."""
        begin = self._tops.get(row.token)
        if begin is None:
            if len(self._tops) >= _MAX_TOPS:
                self._tops.clear()
            begin = encode(TopProb(row.token, _text(row.piece), list(row.piece)))[:-1]
            begin += b',"prob":' if self._are_sampled else b',"logprob":'
            self._tops[row.token] = begin
        return b"%b%b}" % (begin, encode(row.value))


class _Texts:
    """The texts of consecutive tokens, and `n` characters so far, those before the first one included."""

    def __init__(self, n: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.n = n

    def next(self, row: TokenProb) -> tuple[int, str]:
        """Count a token; return the characters before it, and its text."""
        before, text = self.n, self._decoder.decode(row.piece)
        self.n += len(text)
        return before, text


def _top_of(row: TokenProb) -> dict[str, float] | None:
    """Return the most likely tokens of a place by text, with its own; None where nothing is scored."""
    return _by_name([*row.top, row]) if row.value is not None else None


def _text(piece: bytes) -> str:
    """Return the text of a token alone, as llama-server does without an incomplete character at its end."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(piece)


def _name(row: TokenProb) -> str:
    """Return a token's text, or its bytes as OpenAI writes them."""
    try:
        return row.piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in row.piece)


def _by_name(rows: Iterable[TokenProb]) -> dict[str, float]:
    """Return probabilities by text, in their order; the highest of several tokens with the same text counts."""
    found: dict[str, float] = {}
    for row in rows:
        if row.value is not None:
            name = _name(row)
            found[name] = max(row.value, found.get(name, row.value))
    return found
