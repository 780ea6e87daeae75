"""A model's vocabulary: text to tokens and back. Constant after loading, so any thread may use it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import llama_cpp
import numpy as np

from llamaslot.core.backend import IllegalCallError, Tokens


class LlamaVocab:
    """The vocabulary of a loaded model; valid as long as the model is."""

    def __init__(self, model: int) -> None:
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self.n_tokens: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self.type: int = llama_cpp.llama_vocab_type(self._vocab)
        self.adds_bos: bool = llama_cpp.llama_vocab_get_add_bos(self._vocab)
        self.adds_eos: bool = llama_cpp.llama_vocab_get_add_eos(self._vocab)
        self.eog = frozenset(
            token for token in range(self.n_tokens) if llama_cpp.llama_vocab_is_eog(self._vocab, token)
        )
        self.control_tokens = tuple(
            self.text(token)
            for token in range(self.n_tokens)
            if llama_cpp.llama_vocab_is_control(self._vocab, token)
        )
        self._pieces: dict[int, bytes] = {}

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        """See `Vocab.tokenize`."""
        data = text.encode(errors="replace")
        capacity = len(data) + 8
        out = np.empty(capacity, dtype=np.int32)
        n = llama_cpp.llama_tokenize(
            self._vocab, data, len(data), _pointer(out), capacity, add_special, parse_special
        )
        if n < 0:
            out = np.empty(-n, dtype=np.int32)
            n = llama_cpp.llama_tokenize(
                self._vocab, data, len(data), _pointer(out), len(out), add_special, parse_special
            )
        if n < 0:
            raise IllegalCallError(f"tokenizing {len(data)} bytes gave {n}")
        return out[:n].copy()

    def piece(self, token: int) -> bytes:
        """See `Vocab.piece`."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece(token, special=False)
        return piece

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """See `Vocab.detokenize`."""
        return b"".join(self._piece(token, special=True) for token in tokens)

    def text(self, token: int) -> str:
        """How the vocabulary spells a token; empty for an id below 0 (no such token)."""
        return self._piece(token, special=True).decode(errors="replace") if token >= 0 else ""

    @property
    def bos(self) -> int:
        """The beginning-of-sequence token, or -1."""
        return int(llama_cpp.llama_vocab_bos(self._vocab))

    @property
    def eos(self) -> int:
        """The end-of-sequence token, or -1."""
        return int(llama_cpp.llama_vocab_eos(self._vocab))

    def _piece(self, token: int, *, special: bool) -> bytes:
        if not 0 <= token < self.n_tokens:
            raise IllegalCallError(f"token {token} is not in [0, {self.n_tokens})")
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n


def _pointer(array: Tokens) -> ctypes._Pointer[ctypes.c_int32]:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
