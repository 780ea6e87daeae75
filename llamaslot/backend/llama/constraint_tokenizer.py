"""A model's vocabulary as llguidance takes it."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp
from llguidance import LLTokenizer

from llamaslot.backend.llama.vocab import LlamaVocab
from llamaslot.base.errors import NotSupportedError

_SPECIAL_PREFIX = b"\xff"
"""Marks tokens that are no text: a grammar allows them by name or id only."""
_PART_BYTES = 2048
"""Bytes tokenized at once where llama.cpp takes stack for each (fact 21); a grammar may force many more."""
_TOKENIZE = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    *(ctypes.c_void_p, ctypes.POINTER(ctypes.c_char), ctypes.c_int32),
    *(ctypes.POINTER(ctypes.c_int32), ctypes.c_int32, ctypes.c_bool, ctypes.c_bool),
)
"""The type of `llama_tokenize`."""


class ConstraintTokenizer:
    """Makes the tokenizer; must live as long as it is used, because of the callback."""

    def __init__(self, vocab: LlamaVocab) -> None:
        self._vocab = vocab
        self._callback = _TOKENIZE(_tokenize_in_parts)

    def make(self, eog: tuple[int, ...]) -> LLTokenizer:
        """Return the tokenizer, a second later for 151,936 tokens; raises `NotSupportedError`."""
        vocab = self._vocab
        tokens = [_token_bytes(vocab, token) for token in range(vocab.n_tokens)]
        function: Any = self._callback if vocab.stack_bytes else llama_cpp.llama_cpp._lib.llama_tokenize
        try:
            return LLTokenizer.from_llamacpp(  # type: ignore[attr-defined, no-any-return]
                tokens=tokens,
                vocab_ptr=vocab.pointer,
                tokenize_fptr=ctypes.cast(function, ctypes.c_void_p).value,
                eos_token=list(eog),
                slices=None,
            )
        except ValueError as error:
            raise NotSupportedError(f"replies of this model cannot be constrained: {error}") from error


def _token_bytes(vocab: LlamaVocab, token: int) -> bytes:
    """Return what a client gets of a token, or the name of one of which it gets nothing."""
    text = vocab.piece(token)
    name = vocab.detokenize([token])
    if text and vocab.named_tokens.get(name.decode(errors="replace")) != token:
        return text
    return _SPECIAL_PREFIX + name if name else b""


def _tokenize_in_parts(  # noqa: PLR0917 - the type of `llama_tokenize`
    vocab: int, text: Any, n_bytes: int, tokens: Any, n_max: int, add_special: bool, parse_special: bool
) -> int:
    """Tokenize like `llama_tokenize`, but a long text in parts: at their ends, tokens may differ."""
    data = ctypes.string_at(text, n_bytes)
    found: list[int] = []
    at = 0
    while at < n_bytes or (at == 0 and not found):
        end = min(at + _PART_BYTES, n_bytes)
        while end < n_bytes and data[end] & 0xC0 == 0x80:
            end -= 1
        part = data[at:end]
        out = (ctypes.c_int32 * (len(part) + 8))()
        n: int = llama_cpp.llama_tokenize(
            vocab, part, len(part), out, len(out), add_special and at == 0, parse_special
        )
        if n < 0:
            return n
        found += out[:n]
        at = end
        if end == n_bytes:
            break
    if len(found) > n_max:
        return -len(found)
    for i, token in enumerate(found):
        tokens[i] = token
    return len(found)
