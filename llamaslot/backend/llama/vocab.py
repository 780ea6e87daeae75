"""A model's vocabulary: text to tokens and back. Constant after loading, so any thread may use it.

`ConstraintTokenizer` is the vocabulary in the form that llguidance needs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from llamaslot.backend.llama import library
from llamaslot.backend.llama.loading import load_vocab
from llamaslot.backend.llama.special_tokens import SpecialTokens
from llamaslot.base.errors import ConfigError, InvalidRequestError, NotSupportedError
from llamaslot.base.files import MetadataValue
from llamaslot.base.kv_ops import IllegalCallError
from llamaslot.base.model import FimTokens
from llamaslot.base.tokens import Tokens
from llamaslot.text.grammars.compiling import SPECIAL_PREFIX

_SPLITTER_KEY = "tokenizer.ggml.pre"
_SPLITTERS_WITHOUT_REGEX = frozenset(
    """
    llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe chatglm-bpe glm4
    glm5 starcoder refact command-r smollm codeshell exaone exaone4 minerva-7b mellum2 gpt-2 phi-2 jina-es jina-de
    gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code roberta-bpe mpt olmo jais
    trillion granite-docling stablelm2 qwen2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open qwen35 kimi-k2
    grok-2 laguna gemma4 granite-embed-multi-311m sarvam-moe
    """.split()  # noqa: SIM905 - one name a line would take a page
)
"""Values of `tokenizer.ggml.pre` whose text splitting llama.cpp implements in code of its own.

From `llm_tokenizer_bpe` and `unicode_regex_split_custom` of llama-cpp-python 0.3.36. For all others it uses
std::regex, which takes stack for each character of a match (fact 21). A name missing here only costs stack; a wrong
one would let a prompt crash the process (the long form of `tests/backend/test_splitters.py` tries all).
"""
_REGEX_STACK_BYTES = 512 * 2**20
_REGEX_MAX_CHARACTERS = 900_000
"""Longest text for which that stack always suffices, in characters: a match may be as long as the text."""
_ESCAPED_BLANK = "\u2581".encode()
"""How the raw text of a token has a blank."""
_MAX_TEXT_BYTES = 1024
"""Size of the buffer for the text of one token, in bytes; few have more than 100."""
_MAX_TOKENIZE_BYTES = 2048
"""Most bytes tokenized at once if llama.cpp takes stack for each (fact 21). A grammar may force longer texts."""
_TOKENIZE = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    *(ctypes.c_void_p, ctypes.POINTER(ctypes.c_char), ctypes.c_int32),
    *(ctypes.POINTER(ctypes.c_int32), ctypes.c_int32, ctypes.c_bool, ctypes.c_bool),
)
"""The type of `llama_tokenize`."""


class LlamaVocab:
    """Vocabulary of a loaded model. Valid as long as the model."""

    def __init__(self, model: int, overrides: Sequence[tuple[str, MetadataValue]] = ()) -> None:
        self.pointer: Any = llama_cpp.llama_model_get_vocab(model)
        """llama.cpp's pointer to the vocabulary."""
        # The tokens that begin and end a text, or -1.
        self.bos: int = llama_cpp.llama_vocab_bos(self.pointer)
        self.eos: int = llama_cpp.llama_vocab_eos(self.pointer)
        self.n_tokens: int = llama_cpp.llama_vocab_n_tokens(self.pointer)
        self.type: int = llama_cpp.llama_vocab_type(self.pointer)
        self.adds_bos: bool = llama_cpp.llama_vocab_get_add_bos(self.pointer)
        self.adds_eos: bool = llama_cpp.llama_vocab_get_add_eos(self.pointer)
        # That of BERT puts BOS before a text and SEP after it, whatever the file says.
        self._adds_sep = self.type == llama_cpp.LLAMA_VOCAB_TYPE_WPM
        self._check_added()
        # Some 100,000 calls of each function: by `map`, each takes half the time.
        self.eog = frozenset(np.flatnonzero(self._of_all(llama_cpp.llama_vocab_is_eog)).tolist())
        self._attributes = self._of_all(llama_cpp.llama_vocab_get_attr)
        controls = self._with_attribute(llama_cpp.LLAMA_TOKEN_ATTR_CONTROL)
        unknowns = self._with_attribute(llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN)
        plain = [t for t in controls if not self._attributes[t] & llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP]
        self._controls = frozenset(controls)
        self.control_tokens = self._texts(controls)
        self.special_tokens = self._texts({*controls, *unknowns})
        self.cut_tokens = self._texts(sorted(plain, key=lambda token: token not in self.eog))
        self._searched = {parse_special: self._searched_tokens(parse_special) for parse_special in (False, True)}
        # A token's raw text is at least as long as the text that it stands for. Tokenizers of other types may drop
        # spaces, so for them the longest text is unknown (0).
        keeps_text = self.type in (llama_cpp.LLAMA_VOCAB_TYPE_SPM, llama_cpp.LLAMA_VOCAB_TYPE_BPE)
        has_words = self.type in (llama_cpp.LLAMA_VOCAB_TYPE_WPM, llama_cpp.LLAMA_VOCAB_TYPE_UGM)
        texts = map(llama_cpp.llama_vocab_get_text, repeat(self.pointer), range(self.n_tokens))
        self.longest_piece = max(map(len, texts)) if keeps_text else 0
        self.words_per_token = max(map(_n_words, texts)) if has_words else 0
        is_bpe = self.type == llama_cpp.LLAMA_VOCAB_TYPE_BPE
        splitter = dict(overrides).get(_SPLITTER_KEY, library.metadata(model, _SPLITTER_KEY))
        self._splits_by_regex = is_bpe and splitter not in _SPLITTERS_WITHOUT_REGEX
        self.stack_bytes = _REGEX_STACK_BYTES if self._splits_by_regex else 0
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def load(cls, path: Path, overrides: Sequence[tuple[str, MetadataValue]] = ()) -> LlamaVocab:
        """Load the vocabulary of a model file, with values in place of its metadata's; raises `ConfigError`.

        It stays loaded until the process ends.
        """
        return cls(load_vocab(path, overrides), overrides)

    def _check_added(self) -> None:
        """Raise `ConfigError` if a token is added to texts and there is none: llama.cpp would abort (fact 40)."""
        if self.type == llama_cpp.LLAMA_VOCAB_TYPE_RWKV:
            return
        for name, token, is_added in (
            ("BOS", self.bos, self.adds_bos or self._adds_sep),
            ("EOS", self.eos, self.adds_eos),
            ("SEP", llama_cpp.llama_vocab_sep(self.pointer), self._adds_sep),
        ):
            if is_added and token < 0:
                message = f"the model's vocabulary adds the token {name} to texts, and has no such token"
                raise ConfigError(message, param="--model")

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        """Return the token ids of `text`. A long text is tokenized in parts where that gives the same ids."""
        data = text.encode(errors="replace")
        cuts = self._searched[parse_special].cuts(data)
        if not cuts:
            return self._tokenize(data, add_special, parse_special)
        parts = (data[a:b] for a, b in pairwise([0, *cuts, len(data)]))
        runs = [self._tokenize(part, False, parse_special) for part in parts]
        if add_special:
            # The tokens that llama.cpp adds do not depend on the text.
            added = self._tokenize(b"", True, True)
            n_before = int(self.adds_bos or self._adds_sep)
            runs = [added[:n_before], *runs, added[n_before:]]
        return np.concatenate(runs)

    def _tokenize(self, data: bytes, add_special: bool, parse_special: bool) -> Tokens:
        if self._splits_by_regex and len(data.decode(errors="replace")) > _REGEX_MAX_CHARACTERS:
            raise InvalidRequestError(
                f"a text has more than {_REGEX_MAX_CHARACTERS} characters in a row without a special token, which "
                "llama.cpp cannot tokenize with this model's vocabulary"
            )
        capacity = len(data) + 8
        # If the buffer is too small, llama.cpp returns the negative number of tokens.
        for _ in range(2):
            out = np.empty(capacity, dtype=np.int32)
            n = llama_cpp.llama_tokenize(
                self.pointer, data, len(data), _pointer(out), capacity, add_special, parse_special
            )
            if n >= 0:
                return out[:n].copy()
            capacity = -n
        raise IllegalCallError(f"tokenizing {len(data)} bytes gave {n}")

    def _searched_tokens(self, parse_special: bool) -> SpecialTokens:
        """Return the tokens that llama.cpp searches for in a text."""
        controls = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
        searched = self._with_attribute(controls | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED)
        attributes = ((token, int(self._attributes[token])) for token in searched)
        return SpecialTokens(
            {
                llama_cpp.llama_vocab_get_text(self.pointer, token): attribute
                for token, attribute in attributes
                if parse_special or not attribute & controls
            }
        )

    def piece(self, token: int) -> bytes:
        """Return the text of a generated token as bytes; empty for control tokens."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece(token, special=False)
        return piece

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """Return the text of `tokens` as bytes, including that of control tokens; tokens of images have none."""
        return b"".join(self._piece(token, special=True) for token in tokens if token >= 0)

    def texts(self) -> list[bytes]:
        """Return the text of each single token, including control tokens, without a space put before texts."""
        one, buffer = (ctypes.c_int32 * 1)(), ctypes.create_string_buffer(_MAX_TEXT_BYTES)
        texts = []
        for token in range(self.n_tokens):
            one[0] = token
            n = llama_cpp.llama_detokenize(self.pointer, one, 1, buffer, _MAX_TEXT_BYTES, False, True)
            texts.append(ctypes.string_at(buffer, n) if n >= 0 else self._piece(token, special=True))
        return texts

    def text(self, token: int) -> str:
        """Return the text of a token, including control tokens; empty for a negative id (no such token)."""
        return self._piece(token, special=True).decode(errors="replace") if token >= 0 else ""

    @cached_property
    def named_tokens(self) -> dict[str, int]:
        """Ids, by text, of tokens that a grammar allows by name only: control tokens and added tags (`<name>`)."""
        controls = {text: token for token in self._controls if (text := self.text(token))}
        return self.added_tags | controls

    @cached_property
    def added_tags(self) -> dict[str, int]:
        """Ids, by text, of added tags (`<name>`) that are not control tokens. llama.cpp finds them in any text."""
        added = self._with_attribute(llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED)
        return {text: token for token in added if token not in self._controls and is_tag(text := self.text(token))}

    @property
    def fim(self) -> FimTokens | None:
        """Tokens of fill-in-the-middle prompts; None if one of the three required ones is missing."""
        found = FimTokens(
            prefix=llama_cpp.llama_vocab_fim_pre(self.pointer),
            suffix=llama_cpp.llama_vocab_fim_suf(self.pointer),
            middle=llama_cpp.llama_vocab_fim_mid(self.pointer),
            repository=llama_cpp.llama_vocab_fim_rep(self.pointer),
            file_separator=llama_cpp.llama_vocab_fim_sep(self.pointer),
            bos=self.bos if self.adds_bos else -1,
        )
        return found if min(found.prefix, found.suffix, found.middle) >= 0 else None

    def _texts(self, tokens: Iterable[int]) -> tuple[str, ...]:
        return tuple(text for token in tokens if (text := self.text(token)))

    def _of_all(self, function: Callable[[Any, int], int]) -> npt.NDArray[np.int32]:
        """Return what a function of llama.cpp says of each token."""
        values = map(function, repeat(self.pointer), range(self.n_tokens))
        return np.fromiter(values, dtype=np.int32, count=self.n_tokens)

    def _with_attribute(self, attribute: int) -> list[int]:
        """Return the tokens that have an attribute, in order."""
        tokens: list[int] = np.flatnonzero(self._attributes & attribute).tolist()
        return tokens

    def _piece(self, token: int, *, special: bool) -> bytes:
        if not 0 <= token < self.n_tokens:
            raise IllegalCallError(f"token {token} is not in [0, {self.n_tokens})")
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = llama_cpp.llama_token_to_piece(self.pointer, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n


def _n_words(text: bytes) -> int:
    """Return the most words, with blanks between them, that the raw text of a token can have."""
    return 1 + text.count(_ESCAPED_BLANK, 1) + text.count(b" ", 1)


def is_tag(text: str) -> bool:
    """Return True for the text of an added token such as `<name>`."""
    return text.startswith("<") and text.endswith(">")


def _pointer(array: Tokens) -> ctypes._Pointer[ctypes.c_int32]:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))


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
        size = _MAX_TOKENIZE_BYTES if self._vocab.stack_bytes else max(n_bytes, 1)
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
