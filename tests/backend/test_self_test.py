"""The self-test of reuse: models as they are pass, each planted bug fails, and what failed is not reused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from bench import synthetic
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.backend.llama.state import self_test
from llamaslot.base.backend import Decoded, Run, Status
from llamaslot.base.kv_ops import Copy, IllegalCallError, Operation, Remove, Restore, Save, Take
from tests.backend.test_models import failing

WINDOWS = ("tiny-swa", "tiny-oss")
RECURRENT = ("tiny-mamba", "tiny-mamba2", "tiny-rwkv7")
HYBRIDS = ("tiny-lfm2", "tiny-next", "tiny-qwen35", "tiny-granite")
STATES = (*WINDOWS, *HYBRIDS, *RECURRENT)
EXACT = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"}
LONG_WINDOWS = {
    "swa-200": replace(synthetic.SHAPES["tiny-swa"], window=200),
    "oss-128": replace(synthetic.SHAPES["tiny-oss"], window=128),
}
"""Shapes in which one token of a window hardly matters, and rounding moves logits as much."""
OTHER = 9
"""Number of a checkpoint that only the bug takes."""
TOKEN = np.array([301], dtype=np.int32)


class WrongBackend(LlamaBackend):
    """A backend with a bug."""

    def __init__(self, settings: LlamaSettings, bug: str = "") -> None:
        self._bug = bug
        self._held: dict[int, list[int]] = defaultdict(list)
        self.n_decoded = 0
        super().__init__(settings)

    def decode(self, runs: Sequence[Run]) -> Decoded:
        self.n_decoded += sum(len(run.tokens) for run in runs)
        for run in runs:
            self._held[run.seq][run.start :] = run.tokens.tolist()
        return super().decode(runs)

    def change(self, operation: Operation) -> None:
        match self._bug, operation:
            case "a checkpoint after another token", Take(number, src, end):
                ids = self._held[src][:end]
                self._of_other(1, [*ids[:-1], ids[0]], Take(number, 1, end))
            case "a checkpoint of another branch", Take(number, src, end):
                self._of_other(1, self._held[src][:end][::-1], Take(number, 1, end))
            case "cells of another segment", Save(number, src, start, end, scratch):
                self._of_other(1, self._held[src][:end][::-1], Save(number, 1, start, end, scratch))
            case "another checkpoint in place", Take(_, src, end):
                super().change(operation)
                self._of_other(1, self._held[src][:end][::-1], Take(OTHER, 1, end))
            case "another checkpoint in place", Restore(_, 0):
                super().change(Restore(OTHER, 0))
            case "no restore", Restore(number, 1):
                end = self._kv.states.checkpoints[number]
                llama_cpp.llama_memory_seq_rm(self._memory, 1, end, -1)
                self._kv.states.restore(1)
                self._kv.lengths[1] = end
            case "cells of another branch", Copy(src, dst, 0, end):
                self._compute(dst, self._held[src][:end][::-1])
            case "a fork of another branch", Copy(src, dst, 0, end) if end == self.seq_len(src):
                self._compute(dst, self._held[src][:end][::-1])
            case "no trim", Remove(seq, keep) if keep:
                self._kv.lengths[seq] = keep
            case _:
                super().change(operation)

    def _of_other(self, seq: int, ids: list[int], operation: Operation) -> None:
        """Carry out an operation on an empty sequence while it holds other tokens."""
        self._compute(seq, ids)
        super().change(operation)
        super().change(Remove(seq, 0))

    def _compute(self, seq: int, ids: list[int]) -> None:
        n = self.info.n_ubatch
        for at in range(0, len(ids), n):
            run = Run(seq, at, np.array(ids[at : at + n], np.int32), output=False)
            assert super().decode([run]).status is Status.OK


@contextmanager
def loaded(shape: str, bug: str = "", **fields: Any) -> Iterator[WrongBackend]:
    chosen: dict[str, Any] = {"n_ctx": 1024, "n_slots": 2, "n_ubatch": 512, "n_threads": 1, "checkpoints": True}
    is_exact = fields.get("flash_attn") == "off"
    settings = LlamaSettings(synthetic.ensure(shape, is_exact=is_exact), **chosen | fields)
    backend = WrongBackend(settings, bug)
    try:
        yield backend
    finally:
        backend.close()


def is_empty(backend: LlamaBackend) -> bool:
    kv = backend._kv
    holds = any(backend.seq_range(seq) for seq in range(backend.n_seqs))
    return not (holds or kv.segments.positions or kv.states.checkpoints or kv.partial._states)


@pytest.fixture(autouse=True)
def _long_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in LONG_WINDOWS.items():
        monkeypatch.setitem(synthetic.SHAPES, name, shape)


@pytest.mark.parametrize("shape", [*STATES, *LONG_WINDOWS, "tiny-mla"])
@pytest.mark.parametrize("fields", [EXACT, {}, {"n_ubatch": 64}, {"n_slots": 1}], ids=str)
def test_a_right_model_passes_and_leaves_nothing(shape: str, fields: dict[str, Any]) -> None:
    with loaded(shape, **fields) as backend:
        info = backend.info
        assert (info.self_test, info.self_test_reason) == ("passed", "")
        assert info.keeps_checkpoints is (shape != "tiny-mla")
        assert info.can_trim is (shape == "tiny-mla")
        assert is_empty(backend)


@pytest.mark.parametrize(
    "bug", ["a checkpoint after another token", "a checkpoint of another branch", "no restore"]
)
@pytest.mark.parametrize("fields", [EXACT, {}], ids=["exact", "rounded"])
@pytest.mark.parametrize("shape", [*STATES, *LONG_WINDOWS])
def test_a_wrong_state_fails(shape: str, fields: dict[str, Any], bug: str) -> None:
    with loaded(shape, bug, **fields) as backend:
        assert backend.info.self_test == "failed"
        assert backend.info.reuse_reason.startswith("self-test failed: ")
        assert is_empty(backend)


@pytest.mark.parametrize("shape", [*WINDOWS, *HYBRIDS, "tiny-mla"])
def test_wrong_cells_of_a_segment_fail(shape: str) -> None:
    with loaded(shape, "cells of another segment") as backend:
        assert backend.info.self_test == "failed"
        assert "after segments that were loaded" in backend.info.reuse_reason


@pytest.mark.parametrize(
    ("shape", "bug"),
    [
        *((shape, "another checkpoint in place") for shape in STATES),
        *((shape, "a fork of another branch") for shape in (*HYBRIDS, *RECURRENT)),
    ],
)
def test_a_sequence_and_its_forks_are_tested_apart_from_copies_of_its_cells(shape: str, bug: str) -> None:
    with loaded(shape, bug) as backend:
        assert backend.info.self_test == "failed"
        where = "in its own sequence" if "place" in bug else "in a copy of a whole sequence"
        assert where in backend.info.reuse_reason


@pytest.mark.parametrize("bug", ["cells of another branch", "no trim"])
def test_wrong_cells_of_a_model_that_can_be_trimmed_fail(bug: str) -> None:
    with loaded("tiny-mla", bug) as backend:
        info = backend.info
        assert info.self_test == "failed"
        assert not info.can_trim
        assert not info.state.can_trim
        assert info.n_cache_seqs == 0


def test_a_model_that_failed_is_computed_whole() -> None:
    with loaded("tiny-lfm2", "no restore") as backend:
        info = backend.info
        assert not info.keeps_checkpoints
        assert (info.checkpoint_size, info.segment_size, info.state_cost) == (None, None, None)
        assert info.reuse_reason == info.self_test_reason
        assert backend.decode([Run(0, 0, TOKEN, True)]).status is Status.OK
        for operation in (Take(1, 0, 1), Copy(0, 1, 0, 1), Save(1, 0, 0, 1, backend.n_seqs - 1)):
            with pytest.raises(IllegalCallError):
                backend.change(operation)
        backend.change(Remove(0, 0))


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        *(("tiny", {}), ("tiny-swa", {"checkpoints": False}), ("tiny-qwen35", {"checkpoints": False})),
        ("tiny-mamba", {"unified": False}),
    ],
)
def test_dense_models_and_those_that_reuse_nothing_need_none(shape: str, fields: dict[str, Any]) -> None:
    with loaded(shape, **fields) as backend:
        assert backend.info.self_test == ""
        assert backend.run_self_test()
        assert backend.info.self_test == ""


def test_streams_of_a_partitioned_pool_are_tested_by_their_copies() -> None:
    with loaded("tiny-mla", unified=False, n_cache_seqs=1) as backend:
        assert backend.info.self_test == "passed"


def test_a_test_that_takes_too_long_is_run_later() -> None:
    with loaded("tiny-lfm2", self_test_limit_s=0.0) as backend:
        info = backend.info
        assert (info.self_test, info.keeps_checkpoints) == ("pending", True)
        assert info.self_test_reason.startswith("the self-test takes too long at start: about ")
        assert is_empty(backend)
        asked = iter([False, False, True])
        assert not backend.run_self_test(lambda: next(asked))
        assert next(asked, None) is None
        assert backend.info == info
        assert is_empty(backend)
        assert backend.run_self_test()
        assert (backend.info.self_test, backend.info.self_test_reason) == ("passed", "")
        n_decoded = backend.n_decoded
        assert backend.run_self_test()
        assert backend.n_decoded == n_decoded


def test_a_later_test_may_fail() -> None:
    with loaded("tiny-swa", "a checkpoint of another branch", self_test_limit_s=0.0) as backend:
        assert backend.run_self_test()
        assert (backend.info.self_test, backend.info.keeps_checkpoints) == ("failed", False)
        assert is_empty(backend)


def test_a_later_test_needs_an_empty_backend() -> None:
    with loaded("tiny-mamba", self_test_limit_s=0.0) as backend:
        backend.decode([Run(1, 0, TOKEN, True)])
        with pytest.raises(IllegalCallError, match="empty"):
            backend.run_self_test()
        backend.change(Take(5, 1, 1))
        backend.change(Remove(1, 0))
        with pytest.raises(IllegalCallError, match="empty"):
            backend.run_self_test()


@pytest.mark.parametrize(
    ("step_s", "outcome"),
    [
        (lambda n: 0.01, "passed"),
        (lambda n: 0.001 * n, "pending"),
        (lambda n: 0.00001 * n, "passed"),
        (lambda n: 0.05, "pending"),
    ],
    ids=["a GPU", "a slow CPU", "a fast CPU", "a slow GPU"],
)
def test_time_is_estimated_from_few_tokens_and_where_possible_from_many(
    step_s: Callable[[int], float], outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test of the window of 200 tokens computes about 800 in some 15 steps."""
    with loaded("swa-200", n_ubatch=128, checkpoints=True, self_test_limit_s=0.0) as backend:
        now = 0.0
        decode = backend.decode

        def timed(runs: Sequence[Run]) -> Decoded:
            nonlocal now
            now += step_s(len(runs[0].tokens))
            return decode(runs)

        monkeypatch.setattr(backend, "decode", timed)
        monkeypatch.setattr(self_test, "perf_counter", lambda: now)
        result = self_test.run(backend, backend._context, limit_s=0.5)
        assert result.outcome == outcome
        assert now < 2 * 0.5
        assert is_empty(backend)


def test_a_test_that_takes_longer_than_expected_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded("tiny-lfm2", self_test_limit_s=0.0) as backend:
        clock = iter([*[0.0] * 12, *[10.0] * 1000])
        monkeypatch.setattr(self_test, "perf_counter", lambda: next(clock))
        result = self_test.run(backend, backend._context, limit_s=0.5)
        assert (result.outcome, result.reason) == ("pending", "the self-test takes too long at start")
        assert is_empty(backend)


def starts(shape: str, folder: Path, n: int, bug: str = "", **fields: Any) -> tuple[list[str], list[int]]:
    """Outcomes and computed tokens of that many starts."""
    outcomes, computed = [], []
    for _ in range(n):
        with loaded(shape, bug, measurements=folder, **fields) as backend:
            outcomes.append(backend.info.self_test)
            computed.append(backend.n_decoded)
    return outcomes, computed


@pytest.mark.parametrize(("bug", "outcome"), [("", "passed"), ("no restore", "failed")])
def test_a_result_is_kept_for_the_next_start(bug: str, outcome: str, tmp_path: Path) -> None:
    outcomes, computed = starts("tiny-granite", tmp_path, 2, bug)
    assert outcomes == [outcome] * 2
    assert computed[1] < 3 < computed[0]
    assert starts("tiny-granite", tmp_path, 1, cache_type_k="q8_0")[1][0] > 3


def test_the_result_of_a_later_test_is_kept_too(tmp_path: Path) -> None:
    assert starts("tiny-swa", tmp_path, 2, self_test_limit_s=0.0)[0] == ["pending"] * 2
    [file] = tmp_path.iterdir()
    before = file.read_bytes()
    with loaded("tiny-swa", measurements=tmp_path, self_test_limit_s=0.0) as backend:
        assert file.read_bytes() == before
        assert backend.run_self_test()
    assert starts("tiny-swa", tmp_path, 1, self_test_limit_s=0.0)[0] == ["passed"]


def test_a_failure_for_want_of_memory_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded("tiny-swa", self_test_limit_s=0.0, measurements=tmp_path) as backend:
        with monkeypatch.context() as patched:
            patched.setattr(llama_cpp, "llama_state_seq_get_data_ext", lambda *_: 0)
            assert backend.run_self_test()
        assert backend.info.self_test == "failed"
        assert "no memory" in backend.info.reuse_reason
        assert is_empty(backend)
    assert starts("tiny-swa", tmp_path, 1)[0] == ["passed"]


def test_a_model_that_cannot_compute_fails_for_now(tmp_path: Path) -> None:
    with loaded("tiny-lfm2", self_test_limit_s=0.0, measurements=tmp_path) as backend:
        with failing(backend):
            assert backend.run_self_test()
        assert (backend.info.self_test, "ABORTED" in backend.info.reuse_reason) == ("failed", True)
        assert is_empty(backend)
    assert starts("tiny-lfm2", tmp_path, 1)[0] == ["passed"]


@pytest.mark.parametrize(("window", "outcome"), [(250, "failed"), (256, "passed"), (1000, "passed")])
def test_a_window_must_be_able_to_move_in_the_pool_or_never_moves(
    window: int, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(synthetic.SHAPES, "window", replace(synthetic.SHAPES["tiny-swa"], window=window))
    with loaded("window", n_ctx=256, n_ubatch=64) as backend:
        assert backend.info.self_test == outcome
        if outcome == "failed":
            assert backend.info.reuse_reason == "self-test failed: it needs 306 cells, and a sequence has 256"
