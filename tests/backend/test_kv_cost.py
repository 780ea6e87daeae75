"""Measurement of the cost of idle prefixes, and of saving and loading them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from bench import synthetic
from llamaslot.backend.llama import LlamaBackend, LlamaSettings, costs, self_test
from llamaslot.base.backend import Run, Status
from llamaslot.base.kv_ops import Load, Operation, Save


def settings(model: Path, **fields: object) -> LlamaSettings:
    return LlamaSettings(model, n_slots=1, n_cache_seqs=0, measure_costs=True, **fields)


def state_bytes(backend: LlamaBackend, n_tokens: int) -> int:
    assert backend.info.segment_size is not None
    return backend.info.segment_size.of(n_tokens)


def test_the_ratio_is_the_time_beside_so_many_cells_over_that_in_an_empty_pool(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill of n tokens takes n ms, and in a full pool 2.5 times as long."""
    seen = []
    prefill = costs._prefill

    def timed(backend: LlamaBackend, context: object, quiet: costs.Quiet, n_tokens: int) -> float:
        prefill(backend, context, quiet, n_tokens)
        is_full = llama_cpp.llama_memory_seq_pos_max(backend._memory, 1) >= 0
        seen.append((n_tokens, is_full))
        return n_tokens * (2.5 if is_full else 1.0) / 1e3

    loaded = []
    load = llama_cpp.llama_state_seq_set_data

    def counted(*args: object) -> int:
        loaded.append(load(*args))
        return loaded[-1]

    monkeypatch.setattr(costs, "_prefill", timed)
    monkeypatch.setattr(costs, "measure_step_cost", lambda *_: None)
    monkeypatch.setattr(llama_cpp, "llama_state_seq_set_data", counted)
    backend = LlamaBackend(settings(tiny_model, n_ctx=4096, n_ubatch=512))
    backend.measure_costs()
    cost = backend.info.kv_cost
    assert cost is not None
    assert (cost.n_idle_cells, cost.prefill_slowdown, cost.prefill_us) == (4096 - 512, 2.5, pytest.approx(1000.0))
    probes = [(n, False) for n in (1, 1, 4, 4, 16, 16)]
    assert seen == probes + [(16, False)] * 3 + [(200, False), (200, True)] * 5
    assert all(loaded)
    assert sum(n != state_bytes(backend, 64) for n in loaded) == 5, "one of 200 tokens in each pair"
    assert sum(n == state_bytes(backend, 64) for n in loaded) * 64 == 5 * (4096 - 512)
    backend.close()


@pytest.mark.parametrize(("seconds", "n_saved"), [(0.2 / 32, 512), (0.2 / 10, 160)])
def test_saving_and_loading_are_timed_with_the_tokens_that_were_computed(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, n_saved: int
) -> None:
    """Prefill of 16 tokens takes so many seconds; saving n takes 3n ms, loading 2n ms."""
    prefill, change = costs._prefill, costs._change

    def paced(*args: Any) -> float:
        prefill(*args)
        return seconds

    def timed(backend: LlamaBackend, context: Any, operation: Operation) -> float:
        change(backend, context, operation)
        assert isinstance(operation, Save | Load)
        assert operation.end == n_saved
        return operation.end * (3e-3 if isinstance(operation, Save) else 2e-3)

    monkeypatch.setattr(costs, "_prefill", paced)
    monkeypatch.setattr(costs, "_change", timed)
    backend = LlamaBackend(settings(tiny_model, n_ctx=4096, n_ubatch=1024))
    backend.measure_costs()
    cost = backend.info.kv_cost
    assert cost is not None
    assert (cost.save_us, cost.load_us) == (pytest.approx(3000.0), pytest.approx(2000.0))
    backend.close()


def test_the_pool_is_empty_behind_it(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = costs._prefill

    def fast(*args: Any) -> float:
        prefill(*args)
        return 0.01

    monkeypatch.setattr(costs, "_prefill", fast)
    backend = LlamaBackend(settings(tiny_model, n_ctx=4096, n_ubatch=512))
    backend.measure_costs()
    assert backend.info.kv_cost is not None
    assert [backend.seq_range(seq) for seq in range(backend.n_seqs)] == [range(0)] * backend.n_seqs
    # Only an empty pool has room for all of these.
    for start in range(0, 4096, 512):
        run = Run(0, start, np.full(512, 5, dtype=np.int32), n_outputs=0)
        assert backend.decode([run]).status is Status.OK
    backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tiny-swa", "tiny-lfm2", "tiny-mamba"])
def test_models_with_a_state_that_cannot_be_trimmed_are_measured_with_cells_alone(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows have fewer cells than the pool: what fills it must have none of theirs."""
    prefill, load = costs._prefill, llama_cpp.llama_state_seq_set_data
    loaded: list[int] = []

    def fast(*args: Any) -> float:
        prefill(*args)
        return 0.01

    def counted(*args: Any) -> int:
        loaded.append(load(*args))
        return loaded[-1]

    monkeypatch.setattr(costs, "_prefill", fast)
    monkeypatch.setattr(llama_cpp, "llama_state_seq_set_data", counted)
    monkeypatch.setattr(costs, "measure_state_cost", lambda *_: None)
    monkeypatch.setattr(self_test, "is_needed", lambda _: False)
    backend = LlamaBackend(settings(synthetic.ensure(shape), n_ctx=4096, n_ubatch=512, checkpoints=True))
    backend.measure_costs()
    assert backend.info.kv_cost is not None
    assert backend.info.kv_cost.n_idle_cells == 4096 - 512
    assert loaded == [state_bytes(backend, 320), *[state_bytes(backend, 64)] * ((4096 - 512) // 64)] * 5
    assert backend.info.step_cost is None, "such steps are not padded"
    assert [backend.seq_range(seq) for seq in range(backend.n_seqs)] == [range(0)] * backend.n_seqs
    for start in range(0, 4096, 512):
        run = Run(0, start, np.full(512, 5, dtype=np.int32), n_outputs=0)
        assert backend.decode([run]).status is Status.OK
    backend.close()


@pytest.mark.parametrize("measure_at_load", [False, True])
def test_a_slow_model_is_not_kept_from_serving_and_may_be_faster_after_another_start(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure_at_load: bool
) -> None:
    taken: list[int] = []

    def slow(*args: Any) -> float:
        taken.append(args[-1])
        return 0.3 * len(taken)

    monkeypatch.setattr(costs, "_prefill", slow)
    given = settings(tiny_model, n_ctx=4096, n_ubatch=512, measurements=tmp_path)
    backend = LlamaBackend(replace(given, measure_at_load=measure_at_load))
    assert backend.measure_costs()
    assert not list(tmp_path.iterdir())
    assert taken == [1, 1, 4, 4], "a step of one token may be slow the first time, one of four is so twice"
    assert backend.info.kv_cost is backend.info.step_cost is None
    backend.close()


def test_a_pool_that_cannot_be_filled_is_not_measured(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = llama_cpp.llama_state_seq_set_data
    monkeypatch.setattr(llama_cpp, "llama_state_seq_set_data", lambda *args: load(*args) if args[-1] else 0)
    backend = LlamaBackend(settings(tiny_model, n_ctx=4096, n_ubatch=512))
    backend.measure_costs()
    assert backend.info.kv_cost is None
    assert [backend.seq_range(seq) for seq in range(backend.n_seqs)] == [range(0)] * backend.n_seqs
    backend.close()


def test_a_partitioned_pool_has_no_idle_cells_to_measure(tiny_model: Path) -> None:
    backend = LlamaBackend(LlamaSettings(tiny_model, n_ctx=4096, unified=False, measure_costs=True))
    assert backend.measure_costs()
    cost = backend.info.kv_cost
    backend.close()
    assert cost is not None
    assert (cost.n_idle_cells, cost.prefill_slowdown) == (0, 1.0)
    assert 0 < cost.load_us < cost.prefill_us
    assert cost.save_us > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"n_ctx": 2048},
        {"n_ctx": 4096, "n_slots": 256},
        {"n_ctx": 4096, "measure_costs": False},
        {"n_ctx": 4096, "flash_attn": "off"},
        {"n_ctx": 4096, "n_ubatch": 32},
    ],
)
def test_where_it_does_not_matter_or_is_not_asked_for_nothing_is_measured(
    tiny_model: Path, fields: dict[str, Any]
) -> None:
    backend = LlamaBackend(LlamaSettings(tiny_model, **{"measure_costs": True} | fields))
    assert backend.measure_costs()
    assert backend.info.kv_cost is None
    backend.close()
