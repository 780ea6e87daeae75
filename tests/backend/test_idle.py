"""What idle prefixes cost, as the backend measures it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from llamaslot.backend.llama import LlamaBackend, LlamaSettings, idle
from llamaslot.base.model import IdleCost
from llamaslot.core.backend import Run, Status


def settings(model: Path, **fields: object) -> LlamaSettings:
    return LlamaSettings(model, n_slots=1, n_cache_seqs=0, measure_idle_cost=True, **fields)


def test_it_is_the_time_beside_so_many_cells_over_that_in_an_empty_pool(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill of n tokens takes n ms, and in a full pool 2.5 times as long."""
    seen = []
    prefill = idle._prefill

    def timed(backend: LlamaBackend, context: object, n_tokens: int) -> float:
        prefill(backend, context, n_tokens)
        is_full = llama_cpp.llama_memory_seq_pos_max(backend._memory, 1) >= 0
        seen.append((n_tokens, is_full))
        return n_tokens * (2.5 if is_full else 1.0) / 1e3

    loaded = []
    load = llama_cpp.llama_state_seq_set_data

    def counted(*args: object) -> int:
        loaded.append(load(*args))
        return loaded[-1]

    monkeypatch.setattr(idle, "_prefill", timed)
    monkeypatch.setattr(llama_cpp, "llama_state_seq_set_data", counted)
    backend = LlamaBackend(settings(tiny_model, n_ctx=4096, n_ubatch=512))
    assert backend.info.idle_cost == IdleCost(4096 - 512, 2.5)
    assert seen == [(16, False)] * 2 + [(200, False), (200, True)] * 5
    assert all(loaded)
    assert len(loaded) * 64 == 5 * (4096 - 512)
    backend.close()


def test_the_pool_is_empty_behind_it(tiny_model: Path) -> None:
    backend = LlamaBackend(settings(tiny_model, n_ctx=4096, n_ubatch=512))
    assert backend.info.idle_cost is not None
    assert [backend.seq_range(seq) for seq in range(backend.n_seqs)] == [range(0)] * backend.n_seqs
    # Only an empty pool has room for all of these.
    for start in range(0, 4096, 512):
        run = Run(0, start, np.full(512, 5, dtype=np.int32), output=False)
        assert backend.decode([run]).status is Status.OK
    backend.close()


def test_a_slow_model_is_not_kept_from_serving(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "_prefill", lambda *_: 0.3)
    backend = LlamaBackend(settings(tiny_model, n_ctx=4096, n_ubatch=512))
    assert backend.info.idle_cost is None
    backend.close()


def test_a_pool_that_cannot_be_filled_is_not_measured(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "llama_state_seq_set_data", lambda *_: 0)
    backend = LlamaBackend(settings(tiny_model, n_ctx=4096, n_ubatch=512))
    assert backend.info.idle_cost is None
    assert [backend.seq_range(seq) for seq in range(backend.n_seqs)] == [range(0)] * backend.n_seqs
    backend.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"n_ctx": 2048},
        {"n_ctx": 4096, "unified": False},
        {"n_ctx": 4096, "measure_idle_cost": False},
        {"n_ctx": 4096, "flash_attn": "off"},
        {"n_ctx": 4096, "n_ubatch": 32},
    ],
)
def test_where_it_does_not_matter_or_is_not_asked_for_nothing_is_measured(
    tiny_model: Path, fields: dict[str, Any]
) -> None:
    backend = LlamaBackend(LlamaSettings(tiny_model, **{"measure_idle_cost": True} | fields))
    assert backend.info.idle_cost is None
    backend.close()


@pytest.mark.parametrize(
    ("ratio", "life"), [(1.0, None), (1.02, None), (1.1, 81_920), (1.5, 16_384), (2.0, 8192), (5.0, 2048)]
)
def test_idle_cells_have_cost_what_they_took_after_so_many_tokens(ratio: float, life: int | None) -> None:
    assert IdleCost(8192, ratio).life == life
