"""The vocabulary: long texts are tokenized in parts, and that changes nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.backend.llama import vocab as llama_vocab


@pytest.fixture
def vocab(tiny_model: Path) -> llama_vocab.LlamaVocab:
    return LlamaBackend(LlamaSettings(tiny_model, n_ctx=256, n_slots=1, n_threads=1)).vocab


def test_a_long_text_gives_the_same_tokens_in_parts(
    vocab: llama_vocab.LlamaVocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(3)
    words = [" a", "bc", " ", "\n", "<|im_end|>", "<|im_start|>user\n", "<|", "|>", "\u20ac", " hello"]
    text = "".join(rng.choice(words) for _ in range(4000))
    whole = vocab.tokenize(text, add_special=True, parse_special=True)
    monkeypatch.setattr(llama_vocab, "_LONG_TEXT", 100)
    monkeypatch.setattr(llama_vocab, "_PART", 300)
    monkeypatch.setattr(llama_vocab, "_SEARCHED", 200)
    n_calls = 0
    tokenize = llama_vocab.LlamaVocab._tokenize

    def counted(self: llama_vocab.LlamaVocab, *args: object) -> object:
        nonlocal n_calls
        n_calls += 1
        return tokenize(self, *args)

    monkeypatch.setattr(llama_vocab.LlamaVocab, "_tokenize", counted)
    assert vocab.tokenize(text, add_special=True, parse_special=True).tolist() == whole.tolist()
    assert n_calls > 10


def test_no_token_stands_for_more_text_than_the_longest_piece(vocab: llama_vocab.LlamaVocab) -> None:
    assert max(len(vocab.detokenize([token])) for token in range(vocab.n_tokens)) <= vocab.longest_piece
