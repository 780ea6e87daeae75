"""What idle prefixes cost, as the backend measures it."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.model import IdleCost
from llamaslot.core.backend import Run, Status


def test_the_measurement_fills_the_pool_and_leaves_it_empty(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    load = llama_cpp.llama_state_seq_set_data

    def counted(*args: object) -> int:
        loaded.append(load(*args))
        return loaded[-1]

    monkeypatch.setattr(llama_cpp, "llama_state_seq_set_data", counted)
    settings = LlamaSettings(
        tiny_model, n_ctx=4096, n_slots=1, n_cache_seqs=0, n_ubatch=512, measure_idle_cost=True
    )
    backend = LlamaBackend(settings)
    cost = backend.info.idle_cost
    assert cost is not None
    assert cost.n_cells == 4096 - 512
    assert cost.ratio >= 1
    assert all(loaded)
    assert len(loaded) * 64 == cost.n_cells
    assert [backend.seq_range(seq) for seq in range(backend.n_seqs)] == [range(0)] * backend.n_seqs
    # Only an empty pool has room for all of these.
    for start in range(0, 4096, 512):
        run = Run(0, start, np.full(512, 5, dtype=np.int32), output=False)
        assert backend.decode([run]).status is Status.OK
    backend.close()


@pytest.mark.parametrize(
    ("n_ctx", "unified", "asked"), [(2048, True, True), (4096, False, True), (4096, True, False)]
)
def test_where_it_does_not_matter_or_is_not_asked_for_nothing_is_measured(
    tiny_model: Path, n_ctx: int, unified: bool, asked: bool
) -> None:
    settings = LlamaSettings(tiny_model, n_ctx=n_ctx, unified=unified, measure_idle_cost=asked)
    backend = LlamaBackend(settings)
    assert backend.info.idle_cost is None
    backend.close()


@pytest.mark.parametrize(
    ("ratio", "life"), [(1.0, None), (1.02, None), (1.1, 81_920), (1.5, 16_384), (2.0, 8192), (5.0, 2048)]
)
def test_idle_cells_have_cost_what_they_took_after_so_many_tokens(ratio: float, life: int | None) -> None:
    assert IdleCost(8192, ratio).life == life
