"""Texts that are cut before special tokens have the tokens of the whole, with vocabularies of every type."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path

import gguf
import pytest

from llamaslot.backend.llama import special_tokens
from llamaslot.backend.llama.special_tokens import SpecialTokens
from llamaslot.backend.llama.vocab import LlamaVocab
from tests.conftest import LONG
from tests.random_workloads import run_workloads

TYPES = ("llama", "gpt2", "bert", "t5", "rwkv", "plamo2")
STRIPPING = {"nothing": ("llama", ""), "right": ("llama", "phi-3"), "left": ("nomic-bert-moe", "")}
"""Architecture and name of a model by what its special tokens strip (llama.cpp goes by them)."""
NAMES = ("<unk>", "<s>", "</s>", "<sep>", "<pad>", "<|endoftext|>", "<mask>")
LETTERS = "ab<> \n\té"
N_VOCABULARIES = 400 if LONG else 20
N_TEXTS = 20

CONTROL, USER_DEFINED, UNKNOWN = (
    gguf.TokenType.CONTROL,
    gguf.TokenType.USER_DEFINED,
    gguf.TokenType.UNKNOWN,
)


def written(kind: str, text: str) -> str:
    """Return the raw text of a normal token in a vocabulary of a type."""
    match kind:
        case "llama" | "t5" | "bert":
            return text.replace(" ", "\u2581")
        case "gpt2":
            return "".join({" ": "Ġ", "\n": "Ċ", "\t": "ĉ", "é": "Ã©"}.get(c, c) for c in text)
        case "rwkv":
            return text.replace("\n", "\\n").replace("\t", "\\t")
    return text


def write_vocabulary(path: Path, kind: str, strips: str, specials: dict[str, gguf.TokenType]) -> LlamaVocab:
    """Write a vocabulary of all texts of one or two letters, of bytes and of special tokens, and load it."""
    types = {NAMES[0]: UNKNOWN, **dict.fromkeys(NAMES[1:], CONTROL)}
    if kind in {"llama", "plamo2"}:
        types |= {f"<0x{byte:02X}>": gguf.TokenType.BYTE for byte in range(256)}
    pairs = [a + b for a, b in product(LETTERS, LETTERS)]
    types |= {written(kind, text): gguf.TokenType.NORMAL for text in (*LETTERS, *pairs)}
    types |= specials
    architecture, name = STRIPPING[strips]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name or "tiny")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(types))
    writer.add_token_scores([-float(i % 7) for i in range(len(types))])
    writer.add_token_types(list(types.values()))
    if kind == "gpt2":
        writer.add_token_merges(
            [" ".join(written(kind, each) for each in pair) for pair in pairs if "é" not in pair]
        )
    ids = {text: i for i, text in enumerate(types)}
    writer.add_unk_token_id(ids["<unk>"])
    writer.add_bos_token_id(ids["<s>"])
    writer.add_eos_token_id(ids["</s>"])
    writer.add_sep_token_id(ids["<sep>"])
    writer.add_pad_token_id(ids["<pad>"])
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return LlamaVocab.load(path)


@dataclass
class Workload:
    """A vocabulary whose special tokens overlap, and texts that consist of them."""

    seed: int
    kind: str
    strips: str
    path: Path
    counts: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        rng = random.Random(self.seed)
        specials = {self._text(rng): rng.choice((CONTROL, USER_DEFINED, UNKNOWN)) for _ in range(rng.randint(1, 6))}
        vocab = write_vocabulary(self.path, self.kind, self.strips, specials)
        for _ in range(N_TEXTS):
            pieces = rng.choices([*specials, *LETTERS, "<mask>", "</s>", "<0x0A>"], k=rng.randint(1, 60))
            self._compare(vocab, "".join(pieces), add_special=rng.random() < 0.5, parse_special=rng.random() < 0.7)

    def _text(self, rng: random.Random) -> str:
        return "".join(rng.choices(LETTERS, k=rng.randint(1, 4)))

    def _compare(self, vocab: LlamaVocab, text: str, *, add_special: bool, parse_special: bool) -> None:
        data = text.encode()
        cuts = vocab._searched[parse_special].cuts(data)
        whole = vocab._tokenize(data, add_special, parse_special).tolist()
        parts = vocab.tokenize(text, add_special=add_special, parse_special=parse_special).tolist()
        assert parts == whole, (text, cuts)
        self.counts["cuts"] += len(cuts)


@pytest.mark.parametrize("strips", STRIPPING)
@pytest.mark.parametrize("kind", TYPES)
def test_a_text_has_the_same_tokens_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, strips: str
) -> None:
    monkeypatch.setattr(special_tokens, "_PART", 1)
    monkeypatch.setattr(special_tokens, "_SEARCHED", 8)
    run_workloads(lambda seed: Workload(seed, kind, strips, tmp_path / f"{seed}.gguf"), N_VOCABULARIES, ["cuts"])


def test_parts_stay_short_however_many_special_tokens_a_text_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's time is quadratic in the special tokens of a part, and linear in the number of parts."""
    runs = {"\n" * n: USER_DEFINED for n in range(1, 32)}
    vocab = write_vocabulary(tmp_path / "runs.gguf", "llama", "nothing", runs)
    rng = random.Random(6)
    text = "".join(rng.choice(["a", "b ", "<s>", "ab"]) + "\n" * rng.randint(0, 40) for _ in range(10_000))
    assert text.count("\n") > 100_000
    n_places, is_cut = 0, SpecialTokens._is_cut

    def counted(self: SpecialTokens, data: bytes, at: int) -> bool:
        nonlocal n_places
        n_places += 1
        return is_cut(self, data, at)

    monkeypatch.setattr(SpecialTokens, "_is_cut", counted)
    for parse_special in (False, True):
        cuts = [0, *vocab._searched[parse_special].cuts(text.encode()), len(text)]
        assert max(b - a for a, b in pairwise(cuts)) <= special_tokens._PART + special_tokens._SEARCHED
    # A single run has no cut.
    assert not vocab._searched[True].cuts(b"\n" * len(text))
    assert n_places < 3 * len(text) * special_tokens._SEARCHED / special_tokens._PART
    assert len(vocab.tokenize(text, add_special=False, parse_special=True)) > 10_000
