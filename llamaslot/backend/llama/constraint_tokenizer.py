"""A model's vocabulary in the form that llguidance needs."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp
from llguidance import LLTokenizer

from llamaslot.backend.llama.vocab import LlamaVocab
from llamaslot.base.errors import NotSupportedError
from llamaslot.text.grammars.compiling import SPECIAL_PREFIX

_PART_BYTES = 2048
"""Most bytes tokenized at once if llama.cpp takes stack for each (fact 21). A grammar may force longer texts."""
_TOKENIZE = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    *(ctypes.c_void_p, ctypes.POINTER(ctypes.c_char), ctypes.c_int32),
    *(ctypes.POINTER(ctypes.c_int32), ctypes.c_int32, ctypes.c_bool, ctypes.c_bool),
)
"""The type of `llama_tokenize`."""


class ConstraintTokenizer:
    """Makes llguidance's tokenizer. Must live as long as that, because it owns the callback."""

    def __init__(self, vocab: LlamaVocab) -> None:
        self._vocab = vocab
        self._tag_parts = {token: self._without_tag(text) for text, token in vocab.added_tags.items()}
        """Tokens that spell an added tag as text, by the tag's own token, which llama.cpp finds in any text."""
        self._callback = _TOKENIZE(self._tokenize)

    def make(self, eog: tuple[int, ...]) -> LLTokenizer:
        """Return the tokenizer. Takes about a second for 151,936 tokens. Raises `NotSupportedError`."""
        vocab = self._vocab
        tokens = token_texts(vocab)
        is_native = not vocab.stack_bytes and not self._tag_parts
        function: Any = llama_cpp.llama_cpp._lib.llama_tokenize if is_native else self._callback
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

    def _without_tag(self, text: str) -> list[int]:
        parts = (
            self._vocab.tokenize(part, add_special=False, parse_special=False) for part in (text[:1], text[1:])
        )
        return [token for part in parts for token in part.tolist()]

    def _tokenize(  # noqa: PLR0917 - the type of `llama_tokenize`
        self, vocab: int, text: Any, n_bytes: int, tokens: Any, n_max: int, add_special: bool, parse_special: bool
    ) -> int:
        """Tokenize like `llama_tokenize`, but without the tokens of added tags, which a grammar's text excludes.

        If llama.cpp takes stack for each character, long texts are tokenized in parts, with other tokens at their
        ends.
        """
        data = ctypes.string_at(text, n_bytes)
        size = _PART_BYTES if self._vocab.stack_bytes else max(n_bytes, 1)
        found: list[int] = []
        at = 0
        while at < n_bytes or (at == 0 and not found):
            end = min(at + size, n_bytes)
            while end < n_bytes and data[end] & 0xC0 == 0x80:
                end -= 1
            part = data[at:end]
            out = (ctypes.c_int32 * (len(part) + 8))()
            n: int = llama_cpp.llama_tokenize(
                vocab, part, len(part), out, len(out), add_special and at == 0, parse_special
            )
            if n < 0:
                return n
            for token in out[:n]:
                found += self._tag_parts.get(token) or (token,)
            at = end
            if end == n_bytes:
                break
        if len(found) > n_max:
            return -len(found)
        for i, token in enumerate(found):
            tokens[i] = token
        return len(found)


def token_texts(vocab: LlamaVocab) -> list[bytes]:
    """Return the text of each token, or a marked name for tokens that a grammar allows by name only."""
    named = set(vocab.named_tokens.values())
    texts = [b"" if token in named else vocab.piece(token) for token in range(vocab.n_tokens)]
    for token, text in enumerate(texts):
        if not text and (name := vocab.detokenize([token])):
            texts[token] = SPECIAL_PREFIX + name
    return texts
