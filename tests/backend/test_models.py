"""Facts about a model and its context are read from llama.cpp: settings arrive, limits hold.

Models whose state cannot be cut back must say so and be computed anew each turn, for llama.cpp would claim to have
trimmed them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest

from bench import synthetic
from llamaslot.app.model_files import resolve_model
from llamaslot.backend.llama import LlamaBackend, LlamaSettings, library, loading, model_info
from llamaslot.base.backend import Decoded, Run, Status
from llamaslot.base.errors import ConfigError
from llamaslot.base.events import Finished
from llamaslot.base.kv_ops import Copy, IllegalCallError, Remove, Share
from llamaslot.text.builtin_templates import resolve
from tests.engine.harness import running

N_CTX = 512
PROMPT = " ab cd ef gh ij kl" * 12
OTHER = " zz yy xx ww" * 15


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that cannot reuse KV, by shape."""
    folder = tmp_path_factory.mktemp("unlike")
    return {name: synthetic.ensure(name, folder=folder) for name in ("tiny-swa", "tiny-mamba", "tiny-lfm2")}


def load(model: Path, **settings: object) -> LlamaBackend:
    chosen: dict[str, object] = {"n_ctx": N_CTX, "n_slots": 2, "n_ubatch": 64, "n_threads": 1} | settings
    return LlamaBackend(LlamaSettings(model, **chosen))


@contextmanager
def loaded(model: Path, **settings: object) -> Iterator[LlamaBackend]:
    backend = load(model, **settings)
    try:
        yield backend
    finally:
        backend.close()


@contextmanager
def failing(backend: LlamaBackend, n_nodes: int = 1) -> Iterator[list[int]]:
    """Abort the computation of each step in here at that operation; yields a list with the number of them."""
    counted = [0]

    def is_due(_: object) -> bool:
        counted[0] += 1
        return counted[0] >= n_nodes

    callback = llama_cpp.ggml_abort_callback(is_due)
    llama_cpp.llama_set_abort_callback(backend._context, callback, None)
    try:
        yield counted
    finally:
        llama_cpp.llama_set_abort_callback(backend._context, llama_cpp.ggml_abort_callback(), None)


def feed(backend: LlamaBackend, seq: int, tokens: list[int]) -> Decoded:
    """Decode tokens behind what the sequence holds, with logits for the last."""
    return backend.decode([Run(seq, backend.seq_len(seq), np.array(tokens, dtype=np.int32), 1)])


def logits(backend: LlamaBackend, row: int) -> np.ndarray:
    address = llama_cpp.llama_get_logits_ith(backend._context, row)
    return np.ctypeslib.as_array(address, (backend.info.n_vocab,)).copy()


def state_bytes(backend: LlamaBackend, n_tokens: int = 60) -> int:
    """Bytes that llama.cpp needs to save a sequence of `n_tokens`."""
    assert feed(backend, 0, [300] * n_tokens).status is Status.OK
    return llama_cpp.llama_state_seq_get_size(backend._context, 0)


async def cold(model: Path, prompt: str, **settings: object) -> str:
    """The greedy answer of a backend that has seen nothing else."""
    async with running(load(model, **settings)) as harness:
        await harness.submit("cold", prompt)
        return harness.text("cold")


SHAPES = {"tiny-swa": "sliding-window", "tiny-mamba": "recurrent", "tiny-lfm2": "hybrid"}


@pytest.mark.parametrize(("shape", "kind"), SHAPES.items())
def test_a_state_that_cannot_be_cut_back_is_only_cleared_whole(
    unlike: dict[str, Path], shape: str, kind: str
) -> None:
    with loaded(unlike[shape]) as backend:
        assert not backend.info.can_trim
        assert backend.info.reuse_reason.startswith(f"{kind} model")
        assert feed(backend, 0, [300, 301, 302, 303]).status is Status.OK
        with pytest.raises(IllegalCallError):
            backend.change(Remove(0, 2))
        with pytest.raises(IllegalCallError):
            backend.change(Remove(0, 3))
        with pytest.raises(IllegalCallError):
            backend.change(Copy(0, 1, 0, 4))
        assert feed(backend, 1, [300, 301, 302, 303]).status is Status.OK
        with pytest.raises(IllegalCallError):
            backend.change(Share(0, 1, 0, 4))
        assert (backend.seq_len(0), backend.seq_len(1)) == (4, 4)
        backend.change(Remove(0, 0))
        assert backend.seq_len(0) == 0
        assert feed(backend, 0, [300]).status is Status.OK


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_second_turn_on_such_a_model_is_computed_whole(unlike: dict[str, Path], shape: str) -> None:
    async with running(load(unlike[shape])) as harness:
        first = await harness.submit("first", PROMPT)
        answer = harness.text("first")
        second = await harness.submit("second", PROMPT + answer + OTHER)
        text = harness.text("second")
    assert isinstance(first, Finished)
    assert isinstance(second, Finished)
    assert first.progress.n_cached == second.progress.n_cached == 0
    assert second.progress.n_prompt_computed == second.progress.n_prompt > first.progress.n_prompt
    assert text == await cold(unlike[shape], PROMPT + answer + OTHER)


def test_a_common_model_is_reusable(tiny_model: Path) -> None:
    with loaded(tiny_model) as backend:
        assert backend.info.can_trim
        assert backend.info.reuse_reason == ""
        assert backend.info.n_ctx_slot == N_CTX
        feed(backend, 0, [300, 301, 302, 303])
        backend.change(Remove(0, 2))
        backend.change(Copy(0, 1, 0, 2))
        feed(backend, 1, [302])
        backend.change(Share(1, 0, 1, 2))
        assert (backend.seq_len(0), backend.seq_len(1)) == (2, 3)


def test_sampling_that_the_file_recommends_is_read(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded(resolve_model("demo")) as backend:
        assert backend.info.sampling == pytest.approx({"temperature": 0.2, "min_p": 0.1})
    values = {"temp": "0.500000", "top_k": "20", "top_p": "nan", "min_p": "much", "penalty_last_n": "-1"}
    with loaded(tiny_model) as backend:
        assert backend.info.sampling == {}
        monkeypatch.setattr(library, "metadata", lambda _, key: values.get(key.rpartition(".")[2], ""))
        assert model_info.sampling_defaults(backend._model) == {
            "temperature": 0.5,
            "top_k": 20,
            "repeat_last_n": -1,
        }
        values = {"xtc_probability": "1", "mirostat": "2", "mirostat_tau": "4.5"}
        assert model_info.sampling_defaults(backend._model) == {
            "xtc_probability": 1.0, "mirostat": 2, "mirostat_tau": 4.5,
        }  # fmt: skip
        values = {"xtc_probability": "1.1", "mirostat": "3", "mirostat_tau": "inf", "mirostat_eta": "-1"}
        out_of_bounds = {"temp": "-1", "top_k": str(2**33), "top_p": "5", "min_p": "-0.1", "penalty_repeat": "0"}
        values |= out_of_bounds | {"penalty_last_n": "-2"}
        assert model_info.sampling_defaults(backend._model) == {}


def test_the_description_says_how_large_the_model_is(tiny_model: Path) -> None:
    with loaded(resolve_model("demo")) as backend:
        assert backend.info.description == "llama 2.32M F16"
    with loaded(tiny_model) as backend:
        assert backend.info.description == "llama 509K Q8_0"


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral-v7", "gemma", "phi3"])
def test_the_built_in_template_that_fits_a_source_is_named(name: str) -> None:
    assert model_info.builtin_template(resolve(name)) == name


@pytest.mark.parametrize("source", ["", "{{ messages[0].content }}"])
def test_no_built_in_template_is_named_where_none_fits(source: str) -> None:
    assert model_info.builtin_template(source) == ""


def test_weights_are_mapped_read_or_locked(tiny_model: Path) -> None:
    for mode in ("auto", "mmap", "mmap+mlock", "none", "mlock", "dio"):
        model, n_mapped = loading.load_model(
            LlamaSettings(tiny_model, n_gpu_layers=0, load_mode=mode), lambda _: True
        )
        llama_cpp.llama_model_free(model)
        assert (n_mapped > 0) == (mode in ("auto", "mmap", "mmap+mlock"))
        with loaded(tiny_model, load_mode=mode) as backend:
            assert feed(backend, 0, [300]).status is Status.OK


def test_types_of_the_kv_pool(tiny_model: Path) -> None:
    sizes = {}
    for k, v in (("f16", "f16"), ("q8_0", "f16"), ("f16", "q8_0"), ("f32", "f16")):
        with loaded(tiny_model, cache_type_k=k, cache_type_v=v, flash_attn="on") as backend:
            assert (backend.info.cache_type_k, backend.info.cache_type_v) == (k, v)
            sizes[k, v] = state_bytes(backend)
    per_half = 60 * synthetic.SHAPES["tiny"].layers * synthetic.SHAPES["tiny"].head_dim
    saved = per_half * 2 - per_half // 32 * 34
    assert sizes["f16", "f16"] - sizes["q8_0", "f16"] == saved
    assert sizes["f16", "f16"] - sizes["f16", "q8_0"] == saved
    assert sizes["f32", "f16"] - sizes["f16", "f16"] == per_half * 2


def test_quantized_values_need_flash_attention_and_keys_do_not(tiny_model: Path) -> None:
    with loaded(tiny_model, cache_type_k="q8_0", flash_attn="off") as backend:
        assert not backend.info.flash_attn
        assert feed(backend, 0, [300]).status is Status.OK
    with pytest.raises(ConfigError):
        load(tiny_model, cache_type_v="q8_0", flash_attn="off")


@pytest.mark.parametrize(("setting", "told"), [("off", False), ("on", True)])
def test_flash_attention_is_told_as_it_was_set(tiny_model: Path, setting: str, told: bool) -> None:
    with loaded(tiny_model, flash_attn=setting) as backend:
        assert backend.info.flash_attn is told


def test_the_pool_is_one_or_in_parts(tiny_model: Path) -> None:
    with loaded(tiny_model, n_ctx=1024, n_slots=4) as backend:
        assert backend.info.unified
        assert (backend.info.n_ctx, backend.info.n_ctx_slot) == (1024, 1024)
    with loaded(tiny_model, n_ctx=1024, n_slots=4, unified=False) as backend:
        assert not backend.info.unified
        assert (backend.info.n_ctx, backend.info.n_ctx_slot) == (1024, 256)
        for _ in range(4):
            assert feed(backend, 0, [300] * 64).status is Status.OK
        assert feed(backend, 0, [300]).status is Status.NO_CELLS
        assert feed(backend, 1, [300]).status is Status.OK
        backend.change(Copy(0, 2, 0, 64))
        with pytest.raises(IllegalCallError):
            backend.change(Share(0, 2, 0, 64))
        backend.change(Remove(0, 100))
        assert (backend.seq_len(0), backend.seq_len(1), backend.seq_len(2)) == (100, 1, 64)
        assert feed(backend, 2, [300] * 64).status is Status.OK, "it has its own cells"


@pytest.mark.cpu_only
async def test_conversations_side_by_side_in_a_pool_in_parts(tiny_model: Path) -> None:
    parts = {"n_slots": 2, "unified": False}
    async with running(load(tiny_model, **parts)) as harness:
        ends = [harness.submit(name, prompt) for name, prompt in (("a", PROMPT), ("b", OTHER))]
        slots = {(await end).progress.slot for end in ends}
        answers = {"a": harness.text("a"), "b": harness.text("b")}
        again = await harness.submit("a2", PROMPT + answers["a"] + " qq")
        answers["a2"] = harness.text("a2")
    assert slots == {0, 1}
    assert again.progress.n_cached > 0
    assert answers["a"] == await cold(tiny_model, PROMPT, **parts)
    assert answers["b"] == await cold(tiny_model, OTHER, **parts)
    assert answers["a2"] == await cold(tiny_model, PROMPT + answers["a"] + " qq", **parts)


def test_no_slot_is_longer_than_the_model_was_trained_for(tiny_model: Path) -> None:
    with loaded(tiny_model, n_ctx=8192) as backend:
        assert (backend.info.n_ctx_train, backend.info.n_ctx, backend.info.n_ctx_slot) == (4096, 8192, 4096)
    with loaded(tiny_model, n_ctx=0) as backend:
        assert (backend.info.n_ctx, backend.info.n_ctx_slot) == (4096 * backend.info.n_slots, 4096)


def test_sizes_and_threads_arrive(tiny_model: Path) -> None:
    settings = {"n_batch": 256, "n_ubatch": 128, "n_slots": 3, "n_threads": 1, "n_threads_batch": 2}
    with loaded(tiny_model, n_cache_seqs=5, **settings) as backend:
        info = backend.info
        assert (info.n_batch, info.n_ubatch, info.n_slots, info.n_cache_seqs) == (256, 128, 3, 5)
        assert backend.n_seqs == 3 + 5 + 2
        assert llama_cpp.llama_n_threads(backend._context) == 1
        assert llama_cpp.llama_n_threads_batch(backend._context) == 2


def test_control_tokens_are_parsed_only_where_asked(tiny_model: Path) -> None:
    with loaded(tiny_model) as backend:
        vocab = backend.vocab
        text = "<|im_start|>user\n ab<|im_end|>"
        start, end = (
            vocab.tokenize(t, add_special=False, parse_special=True) for t in ("<|im_start|>", "<|im_end|>")
        )
        assert len(start) == len(end) == 1
        control = {int(start[0]), int(end[0])}
        parsed = vocab.tokenize(text, add_special=False, parse_special=True).tolist()
        plain = vocab.tokenize(text, add_special=False, parse_special=False).tolist()
        assert (parsed[0], parsed[-1]) == (start[0], end[0])
        assert not control & set(plain)
        assert len(plain) > len(parsed)
        assert vocab.detokenize(parsed) == vocab.detokenize(plain) == text.encode()
        assert b"".join(vocab.piece(token) for token in parsed) == b"user\n ab"
        assert b"".join(vocab.piece(token) for token in plain) == text.encode()
        assert {vocab.text(token) for token in control} <= set(backend.info.control_tokens)


@pytest.mark.parametrize("parse_special", [True, False])
def test_a_long_text_gives_the_tokens_of_its_parts(tiny_model: Path, parse_special: bool) -> None:
    """Words are cut before their space, so the tokens of messages one after another are those of the whole."""
    many = [f"<|im_start|>user\n ab{' cd' * (i % 7)}<|im_end|>\n" for i in range(2500)]
    few = ["<|im_start|>" + " cd" * 12_000, " ef" * 12_000 + "<|im_end|>"]
    with loaded(tiny_model) as backend:
        vocab = backend.vocab
        for messages in (many, few):
            parts = [vocab.tokenize(m, add_special=False, parse_special=parse_special) for m in messages]
            whole = vocab.tokenize("".join(messages), add_special=False, parse_special=parse_special)
            assert whole.tolist() == np.concatenate(parts).tolist()


def test_bos_goes_once_before_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_flag = gguf.GGUFWriter.add_add_bos_token
    monkeypatch.setattr(gguf.GGUFWriter, "add_add_bos_token", lambda writer, _value: write_flag(writer, True))
    with loaded(synthetic.ensure("tiny", folder=tmp_path)) as backend:
        vocab = backend.vocab
        assert backend.info.adds_bos
        assert backend.info.bos_token == "<|endoftext|>"
        for text in (" ab", "<|im_start|> ab<|im_end|>" * 4000):
            plain = vocab.tokenize(text, add_special=False, parse_special=True).tolist()
            assert vocab.bos not in plain
            assert vocab.tokenize(text, add_special=True, parse_special=True).tolist() == [vocab.bos, *plain]


def test_the_length_is_read_back_after_a_failure(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = llama_cpp.llama_decode

    def computes_and_fails(context: object, batch: object) -> int:
        assert real(context, batch) == 0
        return -3

    with loaded(tiny_model) as backend:
        assert feed(backend, 0, [300] * 5).status is Status.OK
        with monkeypatch.context() as patch:
            patch.setattr(llama_cpp, "llama_decode", computes_and_fails)
            assert feed(backend, 0, [301] * 7).status is Status.FATAL
        assert backend.seq_len(0) == 12
        assert feed(backend, 0, [302]).status is Status.OK
        backend.change(Remove(0, 5))
        assert feed(backend, 0, [303]).status is Status.OK
        after = logits(backend, 0)
        feed(backend, 1, [300] * 5)
        feed(backend, 1, [303])
        np.testing.assert_allclose(after, logits(backend, 0), atol=0.05)


def test_a_failure_that_changed_nothing_leaves_the_length(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded(tiny_model) as backend:
        feed(backend, 0, [300] * 5)
        again = Run(0, 5, np.array([301] * 7, dtype=np.int32), 1)
        for code, status in ((1, Status.NO_CELLS), (2, Status.ABORTED), (-1, Status.INVALID), (-2, Status.FATAL)):
            with monkeypatch.context() as patch:
                patch.setattr(llama_cpp, "llama_decode", lambda _context, _batch, code=code: code)
                assert backend.decode([again]).status is status
        assert backend.decode([again]).status is Status.OK
        assert backend.seq_len(0) == 12
