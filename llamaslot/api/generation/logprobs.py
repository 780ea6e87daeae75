"""Log-probabilities in replies: OpenAI's formats for chat and for text, and llama-server's."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from llamaslot.base.commands import Submit
from llamaslot.base.generation.token_probs import TokenProb


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


P = TypeVar("P", TopProb, Prob)


class ChatLogprobs(msgspec.Struct):
    """Probabilities of a chat reply's tokens."""

    content: list[Prob]


class TextLogprobs(msgspec.Struct):
    """Probabilities of a text's tokens in OpenAI's format, and in llama-server's as `content`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """By text; OpenAI's way of writing bytes that are no text."""
    text_offset: list[int]
    content: list[Prob]
    """Generated tokens only."""


class ProbsWriter:
    """Writes the probabilities of one choice's tokens, in order; those of its prompt, if any, come first.

    The texts of all tokens together are the choice's text: a character of several tokens is the last one's.
    """

    def __init__(self, submit: Submit) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._are_sampled = submit.sampling.post_sampling_probs
        self._n = 0

    def native(self, rows: Iterable[TokenProb]) -> list[Prob]:
        """Return the next tokens in llama-server's format, which has all fields of OpenAI's for chat."""
        return [self._prob(row, self._next(row)[1]) for row in rows]

    def chat(self, rows: Iterable[TokenProb]) -> ChatLogprobs:
        """Return the next tokens in OpenAI's format for chat."""
        return ChatLogprobs(self.native(rows))

    def text(self, rows: Sequence[TokenProb]) -> TextLogprobs:
        """Return the next tokens in OpenAI's format for text completions."""
        places = [self._next(row) for row in rows]
        return TextLogprobs(
            tokens=[_name(row) for row in rows],
            token_logprobs=[row.value for row in rows],
            top_logprobs=[_by_name([*row.top, row]) if row.value is not None else None for row in rows],
            text_offset=[offset for offset, _ in places],
            content=[self._prob(row, text) for row, (_, text) in zip(rows, places, strict=True)],
        )

    def prompt(self, rows: Sequence[TokenProb], text: str) -> TextLogprobs:
        """Return the tokens of a prompt, and count its text, which all that follows comes after.

        A tokenizer may have put BOS and a space before it, which the text does not have.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        ends = list(accumulate(len(decoder.decode(row.piece)) for row in rows))
        n_added = max(ends[-1] - len(text), 0) if ends else 0
        self._n = len(text)
        return TextLogprobs(
            tokens=[_name(row) for row in rows],
            token_logprobs=[row.value for row in rows],
            top_logprobs=[_by_name([*row.top, row]) if row.value is not None else None for row in rows],
            text_offset=[max(end - n_added, 0) for end in [0, *ends[:-1]][: len(rows)]],
            content=[],
        )

    def _next(self, row: TokenProb) -> tuple[int, str]:
        """Return the characters before the next token, and its text."""
        offset, text = self._n, self._decoder.decode(row.piece)
        self._n += len(text)
        return offset, text

    def _prob(self, row: TokenProb, text: str) -> Prob:
        top = [self._value(TopProb(each.token, _text(each.piece), list(each.piece)), each) for each in row.top]
        found = self._value(Prob(row.token, text, list(row.piece)), row)
        if self._are_sampled:
            found.top_probs = top
        else:
            found.top_logprobs = top
        return found

    def _value(self, found: P, row: TokenProb) -> P:
        assert row.value is not None
        if self._are_sampled:
            found.prob = row.value
        else:
            found.logprob = row.value
        return found


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
