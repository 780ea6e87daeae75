"""Random-weight files load in llama.cpp without complaint and have the properties that benchmarks rely on."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import gguf.quants
import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from bench import synthetic

CAPABILITIES = {
    "tiny": (False, False, 0),
    "tiny-swa": (False, False, 32),
    "tiny-lfm2": (False, True, 0),
    "tiny-mamba": (True, False, 0),
    "tiny-oss": (False, False, 32),
    "tiny-next": (False, True, 0),
    "tiny-qwen35": (False, True, 0),
    "tiny-granite": (False, True, 0),
    "tiny-mamba2": (True, False, 0),
    "tiny-rwkv7": (True, False, 0),
    "tiny-mla": (False, False, 0),
}
WARNING, CONTINUED = 3, 5
PROMPT = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n ab c{}<|im_end|>\n<|im_start|>assistant\n"


class Loaded:
    """A model with one sequence, straight on llama.cpp."""

    def __init__(self, path: Path) -> None:
        self.model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        assert self.model
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = 512, 1, 1
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        assert self.context
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def close(self) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 8))()
        n = llama_cpp.llama_tokenize(self.vocab, data, len(data), ids, len(ids), True, True)
        return list(ids[:n])

    def piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        n = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[:n]

    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        ids = (llama_cpp.llama_token * len(tokens))(*tokens)
        assert llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(ids, len(tokens))) == 0
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, -1), (self.n_vocab,)).copy()

    def greedy(self, prompt: list[int], n: int) -> list[int]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        answer: list[int] = []
        step = prompt
        while len(answer) < n:
            logits = self.logits(step)
            assert np.isfinite(logits).all()
            step = [int(logits.argmax())]
            answer += step
        return answer


@contextmanager
def complaints() -> Iterator[list[str]]:
    """Lines that llama.cpp logs at warning level or above."""
    lines: list[str] = []

    @llama_cpp.llama_log_callback
    def log(level: int, text: bytes, _: object) -> None:
        if WARNING <= level < CONTINUED:
            lines.append(text.decode(errors="replace"))

    llama_cpp.llama_log_set(log, None)
    try:
        yield lines
    finally:
        llama_cpp.llama_log_set(ctypes.cast(None, llama_cpp.llama_log_callback), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=CAPABILITIES)
def loaded(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[str, Loaded]]:
    with complaints() as lines:
        model = Loaded(synthetic.ensure(request.param, folder=folder))
    assert [line for line in lines if "full-size SWA cache" not in line] == []
    yield request.param, model
    model.close()


def test_llama_cpp_reads_the_capabilities_that_the_shape_stands_for(loaded: tuple[str, Loaded]) -> None:
    name, model = loaded
    assert CAPABILITIES[name] == (
        llama_cpp.llama_model_is_recurrent(model.model),
        llama_cpp.llama_model_is_hybrid(model.model),
        llama_cpp.llama_model_n_swa(model.model),
    )


def test_greedy_answers_vary_and_survive_tokenizing_again(loaded: tuple[str, Loaded]) -> None:
    _, model = loaded
    first, second = model.tokenize(PROMPT.format("")), model.tokenize(PROMPT.format(" d"))
    answer = model.greedy(first, 120)
    assert len(set(answer)) > 10
    assert answer != model.greedy(second, 120)
    text = b"".join(map(model.piece, answer)).decode()
    whole = model.tokenize(f"{PROMPT.format('')}{text}<|im_end|>\n")
    assert whole[: len(first) + len(answer)] == first + answer


def test_a_full_vocabulary_has_one_token_for_every_word(folder: Path) -> None:
    tokens, merges = synthetic.vocabulary(20_000)
    quiet = len(synthetic.quiet_tokens())
    assert len(set(tokens)) == 20_000
    assert set(merges) >= {f"{token[:-1]} {token[-1]}" for token in tokens[quiet:]}
    known = set(tokens)
    assert all(token[:-1] in known for token in tokens[quiet:])


def test_special_tokens_and_bytes_are_what_the_tokenizer_makes_of_them(folder: Path) -> None:
    model = Loaded(synthetic.ensure("tiny", folder=folder))
    try:
        start, end = model.tokenize("<|im_start|>"), model.tokenize("<|im_end|>")
        assert len(start) == len(end) == 1
        assert llama_cpp.llama_vocab_is_control(model.vocab, start[0])
        assert llama_cpp.llama_vocab_eos(model.vocab) == end[0]
        assert {model.piece(token) for token in range(256)} == {bytes([byte]) for byte in range(256)}
        text = "Grüße, 世界! 🦙\r\n\t 12"
        assert b"".join(map(model.piece, model.tokenize(text))).decode() == text
    finally:
        model.close()


def test_a_finished_file_is_reused_and_a_damaged_one_written_again(tmp_path: Path) -> None:
    path = synthetic.ensure("tiny", folder=tmp_path)
    content, written = path.read_bytes(), path.stat().st_mtime_ns
    assert synthetic.ensure("tiny", folder=tmp_path).stat().st_mtime_ns == written
    path.write_bytes(content[: len(content) // 2])
    assert synthetic.ensure("tiny", folder=tmp_path).read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_big_shapes_have_the_parameters_they_are_named_after() -> None:
    assert 58e6 < synthetic.parameters("60m") < 62e6
    assert synthetic.parameters("qwen3-0.6b") == 596_049_920
    assert 7.5e9 < synthetic.parameters("qwen3-8b") < 8.2e9


def test_an_exact_file_has_the_same_weights_as_float32(tmp_path: Path) -> None:
    """A shape with experts, whose tensors have three dimensions."""
    quantized = gguf.GGUFReader(synthetic.ensure("tiny-next", folder=tmp_path)).tensors
    exact = gguf.GGUFReader(synthetic.ensure("tiny-next", folder=tmp_path, is_exact=True)).tensors
    assert {tensor.tensor_type for tensor in exact} == {gguf.GGMLQuantizationType.F32}
    for one, other in zip(quantized, exact, strict=True):
        assert (one.name, list(one.shape)) == (other.name, list(other.shape))
        assert np.array_equal(gguf.quants.dequantize(one.data, one.tensor_type), other.data)
