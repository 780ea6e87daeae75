"""Context shift in llama.cpp: what is moved, what stays as it is, and what is refused before the call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from bench import synthetic
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.backend.llama.loading import Rope
from llamaslot.base.backend import Run, Status
from llamaslot.base.kv_ops import Copy, IllegalCallError, Remove, Shift
from tests.noise import last_logits

WORDS = np.random.default_rng(5).integers(300, 500, 400).astype(np.int32)
N, NEXT = 60, 301
TOLERANCE = 1e-3
"""Of logits without rounding, in other cells. What a shift changes is a hundred times as large."""
ROUNDED_TOLERANCE = 0.5
"""Of logits with it: they differ by up to 0.14 (q4_0), and by 4 to 10 from those of tokens that were not moved."""


def load(model: Path, **settings: Any) -> LlamaBackend:
    chosen: dict[str, Any] = {"n_ctx": 256, "n_slots": 2, "n_cache_seqs": 1, "n_ubatch": 64, "n_threads": 1}
    exact = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"}
    return LlamaBackend(LlamaSettings(model, **chosen | exact | settings))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.ensure("tiny", folder=tmp_path_factory.mktemp("models"), is_exact=True)


@pytest.fixture(params=[True, False], ids=["unified", "partitioned"])
def backend(model: Path, request: pytest.FixtureRequest) -> Iterator[LlamaBackend]:
    sizes = {} if request.param else {"unified": False, "n_ctx": 512, "n_cache_seqs": 0}
    backend = load(model, **sizes)
    yield backend
    backend.close()


def feed(backend: LlamaBackend, seq: int, tokens: np.ndarray) -> np.ndarray:
    """The logits after further tokens of a sequence."""
    for at in range(0, len(tokens), 64):
        chunk = tokens[at : at + 64]
        run = Run(seq, backend.seq_len(seq), chunk, n_outputs=at + 64 >= len(tokens))
        assert backend.decode([run]).status is Status.OK
    return last_logits(backend)


def as_llama_server_does(backend: LlamaBackend, seq: int, start: int, end: int) -> None:
    """The calls of llama-server on a sequence that shares no cells."""
    length = backend.seq_len(seq)
    llama_cpp.llama_memory_seq_rm(backend._memory, seq, start, end)
    llama_cpp.llama_memory_seq_add(backend._memory, seq, end, length, start - end)
    assert backend.seq_len(seq) == length - (end - start)


@pytest.mark.gpu
def test_a_shift_gives_what_llama_servers_calls_give(model: Path, backend: LlamaBackend) -> None:
    reference = load(model)
    following = np.array([NEXT], dtype=np.int32)
    try:
        for each in (backend, reference):
            feed(each, 0, WORDS[:N])
        backend.change(Shift(0, 3, 30, copies=True))
        as_llama_server_does(reference, 0, 3, 30)
        assert backend.seq_range(0) == range(N - 27)
        shifted = feed(backend, 0, following)
        assert np.abs(shifted - feed(reference, 0, following)).max() < TOLERANCE
        # It is not the KV of the tokens that are left.
        reference.change(Remove(0, 0))
        computed = feed(reference, 0, np.concatenate([WORDS[:3], WORDS[30:N], following]))
        assert np.abs(shifted - computed).max() > 100 * TOLERANCE
        # And again.
        reference.change(Remove(0, 0))
        feed(reference, 0, WORDS[:N])
        as_llama_server_does(reference, 0, 3, 30)
        feed(reference, 0, following)
        backend.change(Shift(0, 0, 10, copies=False))
        as_llama_server_does(reference, 0, 0, 10)
        assert np.abs(feed(backend, 0, following) - feed(reference, 0, following)).max() < TOLERANCE
    finally:
        reference.close()


@pytest.mark.gpu
def test_cells_that_other_sequences_share_are_not_moved(model: Path) -> None:
    backend, cold = load(model), load(model)
    try:
        feed(backend, 0, WORDS[:N])
        for seq in (1, 2):
            backend.change(Copy(0, seq, 0, N - seq))
        backend.change(Shift(0, 0, 20, copies=True))
        feed(backend, 0, WORDS[100:110])
        for seq in (1, 2):
            warm = feed(backend, seq, WORDS[200:203])
            cold.change(Remove(0, 0))
            expected = feed(cold, 0, np.concatenate([WORDS[: N - seq], WORDS[200:203]]))
            assert np.abs(warm - expected).max() < TOLERANCE
    finally:
        backend.close()
        cold.close()


@pytest.mark.gpu
@pytest.mark.parametrize("cache_type_k", ["f16", "q8_0", "q4_0"])
def test_keys_that_are_not_exact_are_moved_as_by_llama_server(model: Path, cache_type_k: str) -> None:
    types = {"flash_attn": "on", "cache_type_k": cache_type_k, "cache_type_v": "f16"}
    backend, reference = load(model, **types), load(model, **types)
    try:
        for each in (backend, reference):
            feed(each, 0, WORDS[:N])
        backend.change(Copy(0, 1, 0, N))
        backend.change(Shift(0, 3, 30, copies=True))
        as_llama_server_does(reference, 0, 3, 30)
        for word in WORDS[100:110]:
            following = np.array([word], dtype=np.int32)
            assert np.abs(feed(backend, 0, following) - feed(reference, 0, following)).max() < ROUNDED_TOLERANCE
    finally:
        backend.close()
        reference.close()


def test_without_cells_for_the_copy_the_sequence_is_empty(model: Path) -> None:
    backend, cold = load(model), load(model)
    try:
        feed(backend, 0, WORDS[:150])
        backend.change(Copy(0, 1, 0, 150))
        with pytest.raises(MemoryError):
            backend.change(Shift(0, 0, 10, copies=True))
        assert [backend.seq_range(seq) for seq in (0, 1)] == [range(0), range(150)]
        warm, expected = feed(backend, 1, WORDS[150:153]), feed(cold, 0, WORDS[:153])
        assert np.abs(warm - expected).max() < TOLERANCE
    finally:
        backend.close()
        cold.close()


@pytest.mark.parametrize("span", [(-1, 3), (3, 3), (4, 3), (0, N), (10, N), (10, N + 1)])
def test_illegal_ranges_are_refused(backend: LlamaBackend, span: tuple[int, int]) -> None:
    feed(backend, 0, WORDS[:N])
    with pytest.raises(IllegalCallError):
        backend.change(Shift(0, *span, copies=True))
    with pytest.raises(IllegalCallError):
        backend.change(Shift(99, 0, 1, copies=True))
    assert backend.seq_range(0) == range(N)


@pytest.mark.gpu
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("cache_type_k", ["f16", "q8_0", "q4_0"])
def test_keys_that_stay_are_those_of_before(model: Path, cache_type_k: str, *, unified: bool) -> None:
    sizes = {"flash_attn": "on", "cache_type_k": cache_type_k, "cache_type_v": "f16", "unified": unified}
    backend = load(model, context_shift=True, n_cache_seqs=int(unified), **sizes)
    try:
        assert backend.info.unshifted_reason == ""
        assert backend.seq_range(0) == range(0)
    finally:
        backend.close()


def test_a_model_whose_keys_would_all_be_scaled_is_not_shifted(model: Path) -> None:
    """YaRN scales what it rotates, be it by nothing. The shift of one sequence would spoil all others."""
    backend = load(model, context_shift=True, rope=Rope(scaling="yarn", freq_scale=0.25))
    try:
        assert "RoPE scaling" in backend.info.unshifted_reason
    finally:
        backend.close()


@pytest.mark.parametrize(
    ("shape", "reason"), [("tiny-swa", "sliding-window"), ("tiny-mamba", "recurrent"), ("tiny-lfm2", "hybrid")]
)
@pytest.mark.parametrize("checkpoints", [True, False])
def test_models_with_a_partial_state_are_not_shifted(shape: str, reason: str, *, checkpoints: bool) -> None:
    backend = load(synthetic.ensure(shape, is_exact=True), checkpoints=checkpoints)
    try:
        assert backend.info.unshifted_reason.startswith(reason)
        feed(backend, 0, WORDS[:20])
        with pytest.raises(IllegalCallError):
            backend.change(Shift(0, 0, 5, copies=False))
    finally:
        backend.close()
