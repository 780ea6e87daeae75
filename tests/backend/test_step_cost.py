"""Measurement of the cost of small steps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from llamaslot.backend.llama import LlamaBackend, LlamaSettings, costs
from llamaslot.backend.llama.costs import Quiet
from llamaslot.base.backend import Decoded, Run, Status
from llamaslot.base.commands import GenerateParams
from llamaslot.base.kv_ops import Remove
from llamaslot.base.model import QUERY_BLOCK
from llamaslot.base.tokens import TokenizedPrompt, packed
from llamaslot.scheduler.request import Request
from llamaslot.scheduler.step import StepPlan, StepResult, Work, apply, next_decode_step


def settings(model: Path, **fields: object) -> LlamaSettings:
    return LlamaSettings(model, **{"n_slots": 1, "n_cache_seqs": 0, "n_ctx": 2048, "n_ubatch": 512} | fields)  # type: ignore[arg-type]


def test_the_cost_is_that_of_a_few_tokens_and_of_a_query_block_alone_and_after_many_cells(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small steps take 3 ms, 1 ms a token, and 2 us for each cell; a query block 20 ms, and 10 us a cell."""
    seen = []
    compute = costs._compute
    now = 0.0

    def timed(backend: LlamaBackend, quiet: Quiet, n_tokens: int, *, seq: int = 0, start: int = 0) -> None:
        nonlocal now
        compute(backend, quiet, n_tokens, seq=seq, start=start)
        if seq == 0:
            # To be saved, and loaded many times.
            return
        n_cells = 0 if start == 0 else 1024
        seen.append((n_tokens, n_cells))
        now += 20e-3 + n_cells * 10e-6 if n_tokens == QUERY_BLOCK else 3e-3 + n_tokens * (1e-3 + n_cells * 2e-6)

    monkeypatch.setattr(costs, "_compute", timed)
    monkeypatch.setattr(costs, "perf_counter", lambda: now)
    backend = LlamaBackend(settings(tiny_model))
    cost = costs.measure_step_cost(backend, backend._context, Quiet(on_cpu=True))
    assert cost is not None
    assert (cost.step_us, cost.token_us, cost.token_cell_us) == pytest.approx((3000, 1000, 2))
    assert (cost.block_us, cost.block_cell_us) == (pytest.approx(20_000), pytest.approx(10))
    assert set(seen) == {(8, 0), (32, 0), (QUERY_BLOCK, 0), (8, 1024), (QUERY_BLOCK, 1024)}
    backend.close()


def test_the_pool_is_empty_behind_it(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_LIMIT_S", math.inf)
    backend = LlamaBackend(settings(tiny_model, n_ctx=4096))
    assert costs.measure_step_cost(backend, backend._context, Quiet(on_cpu=True)) is not None
    assert [backend.seq_range(seq) for seq in range(backend.n_seqs)] == [range(0)] * backend.n_seqs
    for start in range(0, 4096, 512):
        assert backend.decode([Run(0, start, np.full(512, 5, dtype=np.int32), n_outputs=0)]).status is Status.OK
    backend.close()


def test_a_slow_model_is_not_kept_from_serving(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_computed = 0

    def slow(*_: Any, **__: Any) -> float:
        nonlocal n_computed
        n_computed += 1
        return 0.3

    backend = LlamaBackend(settings(tiny_model))
    monkeypatch.setattr(costs, "_step_seconds", slow)
    assert costs.measure_step_cost(backend, backend._context, Quiet(on_cpu=True)) is None
    assert n_computed == 1
    backend.close()


@pytest.mark.parametrize("fields", [{"n_ctx": 1024}, {"unified": False}, {"n_ubatch": 32}])
def test_where_no_step_is_ever_padded_nothing_is_measured(tiny_model: Path, fields: dict[str, Any]) -> None:
    backend = LlamaBackend(settings(tiny_model, measure_costs=True, **fields))
    assert backend.measure_costs()
    assert backend.info.step_cost is None
    backend.close()


def test_what_a_failed_decode_left_of_padding_is_removed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode that fails behind its first micro-batches leaves tokens of which the backend has no record."""
    backend = LlamaBackend(settings(tiny_model))
    scratch = backend.n_seqs - 1
    decode = llama_cpp.llama_decode

    def failing(*args: Any) -> int:
        decode(*args)
        return -3

    monkeypatch.setattr(llama_cpp, "llama_decode", failing)
    params = GenerateParams("r", max_tokens=1)
    tokens = np.full(10, 5, dtype=np.int32)
    request = Request(params, TokenizedPrompt(packed(tokens)), arrival=1, now=0.0)
    padding = Run(scratch, 0, np.zeros(QUERY_BLOCK - 10, dtype=np.int32), n_outputs=0)
    plan = StepPlan(work=[Work(request, Run(0, 0, tokens, n_outputs=1))], padding=[padding])
    result = apply(plan, backend, lambda: 0.0)
    assert result.decoded.status is Status.FATAL
    assert result.lengths == {0: 10}
    assert backend.seq_range(scratch) == range(0)
    backend.close()


def commit(result: StepResult) -> list[tuple[int, ...]]:
    """Give requests their samplers, and return the tokens of each."""
    for (each,) in result.results:
        each.request.sampler = each.sampler
    return [each.tokens for (each,) in result.results]


def test_padding_behind_a_prompt_in_its_part_changes_nothing(tiny_model: Path) -> None:
    tokens = np.arange(5, 15, dtype=np.int32)
    results = []
    for n_padding in (0, QUERY_BLOCK - 10):
        backend = LlamaBackend(settings(tiny_model, n_slots=2, n_cache_seqs=0, unified=False))
        stream = Request(GenerateParams("s", max_tokens=9), TokenizedPrompt(packed(tokens)), arrival=1, now=0.0)
        request = Request(
            GenerateParams("r", max_tokens=9), TokenizedPrompt(packed(tokens + 9)), arrival=2, now=0.0
        )
        work = [Work(stream, Run(0, 0, tokens, n_outputs=1)), Work(request, Run(1, 0, tokens + 9, n_outputs=1))]
        padding = [Run(1, 10, np.zeros(n_padding, dtype=np.int32), n_outputs=0)] if n_padding else []
        plan = StepPlan(work=work, padding=padding, n_extra_steps=3)
        texts = []
        for _ in range(4):
            result = apply(plan, backend, lambda: 0.0)
            assert result.decoded.status is Status.OK
            assert {seq: n for seq, (_, n) in result.decoded.sent.items()} == {
                each.run.seq: len(each.run.tokens) for each in plan.work
            }
            texts.append(commit(result))
            following = next_decode_step(replace(plan, padding=()), result, frozenset())
            if following is None:
                break
            plan = following
        results.append((texts, backend.seq_range(0), backend.seq_range(1)))
        backend.close()
    assert results[0] == results[1]


@pytest.mark.parametrize("n_held", [0, 20])
def test_a_row_in_a_slot_between_streams_changes_nothing(tiny_model: Path, n_held: int) -> None:
    held, tokens = np.arange(50, 50 + n_held, dtype=np.int32), np.arange(5, 15, dtype=np.int32)
    backend = LlamaBackend(settings(tiny_model, n_slots=3, n_cache_seqs=0, unified=False))
    results = []
    for padding in ([], [Run(1, n_held, np.zeros(1, dtype=np.int32), n_outputs=0)]):
        for seq in range(3):
            backend.change(Remove(seq, 0))
            if len(prompt := (tokens, held, tokens + 9)[seq]):
                backend.decode([Run(seq, 0, prompt, n_outputs=1)])
        streams = [
            Request(GenerateParams(f"r{seq}", max_tokens=9), TokenizedPrompt(packed(tokens)), arrival=seq, now=0.0)
            for seq in (0, 2)
        ]
        runs = [Run(seq, 10, np.array([7], dtype=np.int32), n_outputs=1) for seq in (0, 2)]
        plan = StepPlan(
            work=[Work(*each) for each in zip(streams, runs, strict=True)], padding=padding, n_extra_steps=5
        )
        texts = []
        while plan is not None:
            result = apply(plan, backend, lambda: 0.0)
            assert result.decoded == Decoded(Status.OK, {seq: (10 + len(texts), 1) for seq in (0, 2)})
            texts.append(commit(result))
            plan = next_decode_step(plan, result, frozenset())
        assert len(texts) == 6
        results.append((texts, [backend.seq_range(seq) for seq in range(3)]))
    assert results[0] == results[1]
    backend.close()
