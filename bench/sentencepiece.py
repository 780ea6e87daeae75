"""A small SentencePiece vocabulary in the manner of Llama 2's.

Three special tokens, a token for each byte, the printable ASCII characters, and pieces of English words. As in a
trained vocabulary, every piece is made by merging two shorter ones, and the score falls with the id. The pieces are
chosen so that the prompts of llama-server's tests have as many tokens as with the model that these tests download.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

import gguf

SIZE = 512
SPECIALS = ("<unk>", "<s>", "</s>")
N_QUIET = len(SPECIALS) + 256
"""The special tokens and the bytes, which come first."""
SPACE = "\u2581"
WORDS = (
    "the", "to", "and", "he", "was", "in", "is", "it", "of", "so", "she", "you", "we", "they", "said",
    "little", "He", "one", "day", "mom", "with", "there", "very", "wanted", "happy",
    "jumped", "garden",
)  # fmt: skip
PAIRS = (
    "ru", "ll", "oo", "at", "tr", "ow", "pt", "us", "mm", "nt", "st", "ps", "he", "ip", "am", "er", "re", "ar",
    "ut", "ol", "im", "ma", "as", "ng", "on", "ou", "ex", "in", "lu", "nd", "ri", "te", "mi", "ec", "om", "do",
    "gi", "ve", "li", "fu", "od", "iq", "th", "ua", "ea", "ha", "mo",
)  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """An entry of the vocabulary."""

    text: str
    score: float
    kind: gguf.TokenType


def pieces() -> list[Piece]:
    """The vocabulary: `SIZE` pieces in the order of their ids."""
    merged = list(dict.fromkeys([*PAIRS, *_beginnings()]))
    return _pieces([*merged[: SIZE - N_QUIET - len(_characters())], *_characters()])


def pieces_of(words: Sequence[str]) -> list[Piece]:
    """A vocabulary of the printable ASCII characters and these words, each of which begins with a space."""
    beginnings = dict.fromkeys(SPACE + word[:end] for word in words for end in range(1, len(word) + 1))
    return _pieces([*beginnings, *_characters()])


def _pieces(texts: Sequence[str]) -> list[Piece]:
    unknown, *control = SPECIALS
    result = [Piece(unknown, 0.0, gguf.TokenType.UNKNOWN)]
    result += [Piece(text, 0.0, gguf.TokenType.CONTROL) for text in control]
    result += [Piece(f"<0x{byte:02X}>", 0.0, gguf.TokenType.BYTE) for byte in range(256)]
    return result + [Piece(text, float(-rank), gguf.TokenType.NORMAL) for rank, text in enumerate(texts)]


def add_vocabulary(writer: gguf.GGUFWriter, pieces: Sequence[Piece], *, adds_eos: bool = False) -> None:
    """Add a vocabulary that begins with `SPECIALS` to a file."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.text for piece in pieces])
    writer.add_token_scores([piece.score for piece in pieces])
    writer.add_token_types([piece.kind for piece in pieces])
    unknown, start, end = range(len(SPECIALS))
    writer.add_unk_token_id(unknown)
    writer.add_bos_token_id(start)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(adds_eos)


def token_of(text: str) -> int:
    """The id of a piece."""
    return next(i for i, piece in enumerate(pieces()) if piece.text == text)


def _characters() -> list[str]:
    return [SPACE, *(chr(code) for code in range(33, 127))]


def _beginnings() -> list[str]:
    """Beginnings of words: a space and a letter, then those of `WORDS` up to the whole word."""
    letters = [SPACE + letter for letter in string.ascii_lowercase + string.ascii_uppercase]
    return letters + [SPACE + word[:end] for word in WORDS for end in range(2, len(word) + 1)]
