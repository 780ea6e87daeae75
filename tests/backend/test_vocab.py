"""The vocabulary: long texts are tokenized in parts, and that changes nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.encoders import CLS, SEP, tiny_bert
from llamaslot.backend.llama import special_tokens
from llamaslot.backend.llama import vocab as llama_vocab
from llamaslot.prompts.tokenizer import _WORD


@pytest.mark.parametrize("kind", ["plain", "eos", "bert"])
def test_a_long_text_gives_the_same_tokens_in_parts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "bert":
        vocab = llama_vocab.LlamaVocab.load(tiny_bert(tmp_path / "bert.gguf"))
    else:
        vocab = llama_vocab.LlamaVocab.load(tiny_model, [("tokenizer.ggml.add_eos_token", kind == "eos")])
    rng = random.Random(3)
    words = [" a", "bc", " ", "\n", "<|im_end|>", "<|im_start|>user\n", "<|", "|>", "\u20ac", " hello", "[SEP]"]
    text = "".join(rng.choice(words) for _ in range(4000))
    whole = vocab._tokenize(text.encode(), True, True)
    if kind == "bert":
        assert (whole[0], whole[-1]) == (CLS, SEP)
    else:
        assert (int(whole[-1]) == vocab.eos) is (kind == "eos")
    monkeypatch.setattr(special_tokens, "_PART", 300)
    monkeypatch.setattr(special_tokens, "_SEARCHED", 200)
    n_calls = 0
    tokenize = llama_vocab.LlamaVocab._tokenize

    def counted(self: llama_vocab.LlamaVocab, *args: object) -> object:
        nonlocal n_calls
        n_calls += 1
        return tokenize(self, *args)

    monkeypatch.setattr(llama_vocab.LlamaVocab, "_tokenize", counted)
    assert vocab.tokenize(text, add_special=True, parse_special=True).tolist() == whole.tolist()
    plain = vocab.tokenize(text, add_special=False, parse_special=True).tolist()
    n_around = len(vocab.tokenize("", add_special=True, parse_special=True))
    assert len(plain) == len(whole) - n_around
    assert n_calls > 10


def test_a_text_has_a_token_for_each_of_its_words(tmp_path: Path) -> None:
    vocab = llama_vocab.LlamaVocab.load(tiny_bert(tmp_path / "bert.gguf"))
    assert (vocab.words_per_token, vocab.longest_piece) == (1, 0)
    rng = random.Random(4)
    pieces = ["a", "Sea", "9", " ", "\n", "\t", "\x1c", "\u00a0", "\u20ac", ".", "[SEP]", "\u4e2d", "the whale"]
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 30)))
        n_words = len(_WORD.findall(text))
        assert n_words <= len(vocab.tokenize(text, add_special=False, parse_special=True)), text


def test_a_token_may_have_several_words() -> None:
    texts = ["\u2581new", "\u2581new\u2581york", "new york", "\u2581", "york", "\u2581\u2581"]
    assert [llama_vocab._n_words(text.encode()) for text in texts] == [1, 2, 2, 1, 1, 2]


def test_no_token_stands_for_more_text_than_the_longest_piece(tiny_model: Path) -> None:
    vocab = llama_vocab.LlamaVocab.load(tiny_model)
    assert max(len(vocab.detokenize([token])) for token in range(vocab.n_tokens)) <= vocab.longest_piece
