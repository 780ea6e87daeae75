"""Start-up measurements are kept for the next start of the same model with the same settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import llama_cpp
import msgspec
import numpy as np
import pytest

from bench import synthetic
from llamaslot.backend.host import CpuTimes, HostCpus, host_cpus
from llamaslot.backend.llama import (
    LlamaBackend,
    LlamaSettings,
    costs,
    library,
    self_test,
)
from llamaslot.backend.llama.costs import Measurements, Quiet
from llamaslot.backend.llama.threads import StepThreads
from llamaslot.base.backend import Run, Status
from llamaslot.base.errors import ConfigError
from llamaslot.base.kv_ops import IllegalCallError, Load, NotLoadedError, Remove, Save
from llamaslot.base.model import NOT_YET, KvCost, StateCost, StepCost

MEASURED = Measurements(
    kv_cost=KvCost(
        n_idle_cells=8192, prefill_slowdown=2.0, prefill_us=100.0, save_us=0.4, first_save_us=0.4, load_us=0.6
    ),
    step_cost=StepCost(step_us=1.0, token_us=2.0, token_cell_us=3.0, block_us=4.0, block_cell_us=5.0),
)
KEY = "0123456789abcdef"


def settings(model: Path, folder: Path | None, **fields: object) -> LlamaSettings:
    given: dict[str, object] = {"n_ctx": 1024, "n_slots": 2, "n_ubatch": 64, "measure_costs": True} | fields
    return LlamaSettings(model, measurements=folder, **given)


@pytest.fixture
def n_measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of times that the costs were measured, which then takes no time."""
    count = [0]

    def measure(*_: object) -> KvCost | None:
        count[0] += 1
        return MEASURED.kv_cost

    monkeypatch.setattr(costs, "measure_kv_cost", measure)
    monkeypatch.setattr(costs, "measure_step_cost", lambda *_: MEASURED.step_cost)
    return count


def measured(given: LlamaSettings) -> LlamaBackend:
    """A closed backend that has measured what was pending, as an idle engine has it do."""
    backend = LlamaBackend(given)
    assert backend.measure_costs()
    backend.close()
    return backend


def start(model: Path, folder: Path | None, **fields: object) -> Measurements:
    """Load a model, measure what is pending, and say what it takes for its measurements."""
    backend = measured(settings(model, folder, **fields))
    info = backend.info
    return Measurements(info.kv_cost, info.step_cost)


def test_a_second_start_measures_nothing_and_has_the_same_figures(
    tiny_model: Path, tmp_path: Path, n_measured: list[int]
) -> None:
    first = start(tiny_model, tmp_path / "made" / "for it", unified=False)
    assert first.kv_cost is not None
    assert start(tiny_model, tmp_path / "made" / "for it", unified=False) == first
    assert n_measured == [1]
    assert [file.suffix for file in (tmp_path / "made" / "for it").iterdir()] == [".json"]


def test_the_cost_of_checkpoints_is_kept_too(tmp_path: Path, n_measured: list[int]) -> None:
    def started() -> StateCost | None:
        return measured(settings(synthetic.ensure("tiny-lfm2"), tmp_path, checkpoints=True)).info.state_cost

    first = started()
    assert first is not None
    assert 0 < first.take_ms < 1000
    assert 0 < first.restore_ms < 1000
    assert started() == first
    assert n_measured == [1]


def test_without_a_folder_each_start_measures(tiny_model: Path, n_measured: list[int]) -> None:
    start(tiny_model, None)
    start(tiny_model, None)
    assert n_measured == [2]


@pytest.mark.parametrize(
    "fields", [{"n_ubatch": 128}, {"n_threads": 1}, {"cache_type_k": "q8_0"}, {"n_slots": 3}, {"unified": False}]
)
def test_other_settings_are_measured_anew(
    tiny_model: Path, tmp_path: Path, n_measured: list[int], fields: dict[str, object]
) -> None:
    start(tiny_model, tmp_path)
    start(tiny_model, tmp_path, **fields)
    assert n_measured == [2]


def test_another_file_machine_or_library_is_measured_anew(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(tiny_model.read_bytes())
    backend = LlamaBackend(LlamaSettings(model, n_ctx=256))
    backend.close()

    def key() -> str:
        return costs.key_of(LlamaSettings(model), backend.info, 4)

    keys = [key(), key()]
    assert len(set(keys)) == 1
    os.utime(model, (1, 1))
    keys.append(key())
    monkeypatch.setattr(library, "devices", lambda: [])
    keys.append(key())
    monkeypatch.setattr(library, "paths", lambda: [model])
    keys.append(key())
    backend.info = msgspec.structs.replace(backend.info, n_params=backend.info.n_params + 1)
    keys.append(key())
    assert len(set(keys)) == 5


def test_free_memory_that_makes_a_larger_pool_changes_nothing(tiny_model: Path) -> None:
    backend = LlamaBackend(LlamaSettings(tiny_model, n_ctx=256))
    backend.close()
    keys = set()
    for n_ctx in (16_384, 32_768):
        info = msgspec.structs.replace(backend.info, n_ctx=n_ctx)
        keys.add(costs.key_of(replace(settings(tiny_model, None), n_ctx=n_ctx), info, 4))
    assert len(keys) == 1


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert costs.read_kept(tmp_path, KEY) is None
    costs.keep(tmp_path, KEY, MEASURED)
    assert costs.read_kept(tmp_path, KEY) == MEASURED


ODD_NUMBERS = (b"-1.0", b"1e300", b"1e400", b"NaN", b"0.0")
"""The last is less than the time to load a token."""


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-10],
        lambda data: b"",
        lambda data: b"\x00\xff",
        lambda data: data.replace(KEY.encode(), b"\xff" * len(KEY)),
        lambda data: data.replace(b"8192", b'"many"'),
        lambda data: data.replace(KEY.encode(), b"another"),
        lambda data: b"[1, 2]",
        *(partial(re.sub, rb'"prefill_us":[^,]*', b'"prefill_us":' + value) for value in ODD_NUMBERS),
        *(partial(re.sub, rb'"block_us":[^,]*', b'"block_us":' + value) for value in ODD_NUMBERS[:4]),
        partial(re.sub, rb'"n_idle_cells":[^,]*', b'"n_idle_cells":-1'),
        partial(re.sub, rb'"prefill_slowdown":[^,]*', b'"prefill_slowdown":0.0'),
    ],
)
def test_a_corrupt_or_foreign_file_counts_as_missing_and_is_replaced(tmp_path: Path, change: object) -> None:
    costs.keep(tmp_path, KEY, MEASURED)
    [file] = tmp_path.iterdir()
    assert callable(change)
    file.write_bytes(change(file.read_bytes()))
    assert costs.read_kept(tmp_path, KEY) is None
    costs.keep(tmp_path, KEY, MEASURED)
    assert costs.read_kept(tmp_path, KEY) == MEASURED


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs.keep(tmp_path, KEY, MEASURED)

    def fails(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(Path, "replace", fails)
    costs.keep(tmp_path, KEY, Measurements())
    assert costs.read_kept(tmp_path, KEY) == MEASURED
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_used_is_no_error(tiny_model: Path, tmp_path: Path, n_measured: list[int]) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    assert start(tiny_model, in_the_way).kv_cost == MEASURED.kv_cost
    assert n_measured == [1]


def test_old_measurements_count_as_missing_and_are_deleted_later(tmp_path: Path) -> None:
    others = [KEY[::-1], KEY[::2]]
    for key in (KEY, *others):
        costs.keep(tmp_path, key, MEASURED)
    file = tmp_path / f"{KEY}.json"
    os.utime(file, (0, file.stat().st_mtime - costs.MAX_AGE_S - 60))
    assert costs.read_kept(tmp_path, KEY) is None
    costs.keep(tmp_path, others[0], msgspec.structs.replace(MEASURED, samples_faster=True))
    assert {path.stem for path in tmp_path.iterdir()} == set(others)


def test_costs_that_turn_offloading_off_are_measured_again(tmp_path: Path) -> None:
    assert MEASURED.kv_cost is not None
    slow = msgspec.structs.replace(MEASURED.kv_cost, load_us=MEASURED.kv_cost.prefill_us)
    costs.keep(tmp_path, KEY, msgspec.structs.replace(MEASURED, kv_cost=slow))
    assert costs.read_kept(tmp_path, KEY) is None


@pytest.mark.slow
def test_the_pool_is_empty_after_a_start_with_or_without_measuring(tiny_model: Path, tmp_path: Path) -> None:
    made = {"n_ctx": 4096, "measure_costs": True, "measurements": tmp_path}
    for _ in range(2):
        backend = LlamaBackend(LlamaSettings(tiny_model, **made))
        assert backend.measure_costs()
        assert [backend.seq_range(seq) for seq in range(backend.n_seqs)] == [range(0)] * backend.n_seqs
        tokens = np.full(512, 5, dtype=np.int32)
        for start in range(0, 4096, 512):
            assert backend.decode([Run(0, start, tokens, n_outputs=0)]).status is Status.OK
        backend.close()
    assert len(list(tmp_path.iterdir())) == 1


class Clocks:
    """The clocks of a thread that waited `delay_s` for a CPU."""

    def __init__(self) -> None:
        self.now = self.delay_s = 0.0

    def read(self) -> costs.Clocks:
        return costs.Clocks(self.now, self.now - self.delay_s, {1: self.delay_s})


MEASURES: dict[str, tuple[Any, str, object]] = {
    "kv_cost": (costs, "measure_kv_cost", MEASURED.kv_cost),
    "step_cost": (costs, "measure_step_cost", MEASURED.step_cost),
    "state_cost": (costs, "measure_state_cost", StateCost(take_ms=1.0, restore_ms=2.0)),
}
"""All that is measured and kept, and where: here each takes a second, and returns this."""


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.05, 0.5])
@pytest.mark.parametrize("name", MEASURES)
def test_what_was_measured_while_other_programs_ran_is_not_kept_and_is_measured_later(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, share: float
) -> None:
    clocks, shares = Clocks(), [share]
    monkeypatch.setattr(costs, "read_clocks", clocks.read)

    def measure(measured: str) -> Any:
        clocks.now += 1.0
        clocks.delay_s += shares[0] * (measured == name)
        return MEASURES[measured][2]

    for each, (owner, function, _) in MEASURES.items():
        monkeypatch.setattr(owner, function, lambda *_, each=each: measure(each))
    given = settings(tiny_model, tmp_path, n_threads=1)
    backend = LlamaBackend(given)
    assert backend.info.costs_pending == NOT_YET
    backend.measure_costs()
    found = {each: getattr(backend.info, each) for each in MEASURES}
    if share < costs.MAX_WAITING_SHARE:
        assert not backend.info.costs_pending
        assert found[name] == MEASURES[name][2]
        assert backend.measure_costs()
        backend.close()
        assert len(list(tmp_path.iterdir())) == 1
        return
    assert backend.info.costs_pending == "threads waited 0.50 s for CPUs within 1.00 s"
    assert not any(found.values()), "all are measured again"
    assert not list(tmp_path.iterdir())
    assert not backend.measure_costs(), "it is still disturbed"
    shares[0] = 0.0
    assert not backend.measure_costs(lambda: True), "it was to be stopped"
    assert backend.info.costs_pending
    assert backend.measure_costs()
    assert not backend.info.costs_pending
    assert getattr(backend.info, name) == MEASURES[name][2]
    backend.close()
    again = LlamaBackend(given)
    again.close()
    for each in MEASURES:
        assert getattr(again.info, each) == getattr(backend.info, each)


def test_what_fewer_threads_took_is_not_kept(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_machine: None
) -> None:
    """Beside a busy process on two CPUs one thread computes. It waits for nobody, but takes twice as long."""
    monkeypatch.undo()
    now, others, n_threads = CpuTimes(0.0, 2, 0.0, 0.0), 1.0, [0]

    def read() -> CpuTimes:
        nonlocal now
        now = CpuTimes(now.clock + 1, 2, now.all + 1 + others, now.own + 1)
        return now

    def measure(backend: LlamaBackend, context: Any, quiet: Quiet) -> KvCost | None:
        for _ in range(3):
            assert backend._threads is not None
            backend._threads._due = 0.0
            costs._prefill(backend, context, quiet, 1)
        n_threads.append(llama_cpp.llama_n_threads(context))
        backend.change(Remove(0, 0))
        return MEASURED.kv_cost

    monkeypatch.setattr(costs, "read_clocks", lambda: costs.Clocks(0.0, 0.0, {}))
    monkeypatch.setattr(costs, "measure_kv_cost", measure)
    monkeypatch.setattr(costs, "measure_step_cost", lambda *_: MEASURED.step_cost)
    backend = LlamaBackend(settings(tiny_model, tmp_path))
    backend._threads = StepThreads(2, read)
    assert not backend.measure_costs()
    assert "fewer threads" in backend.info.costs_pending
    assert (n_threads[-1], list(tmp_path.iterdir())) == (1, [])
    others = 0.0
    assert backend.measure_costs()
    assert (n_threads[-1], len(list(tmp_path.iterdir()))) == (2, 1)
    backend.close()


def test_what_was_measured_before_a_stop_is_not_measured_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    stops = {"step_cost"}

    def measure(name: str, quiet: Quiet) -> Any:
        if name in stops:
            stops.clear()
            raise costs.StoppedError
        done.append(name)
        return MEASURES[name][2]

    for each, (owner, function, _) in MEASURES.items():
        monkeypatch.setattr(owner, function, lambda *args, each=each: measure(each, args[-1]))
    backend = LlamaBackend(settings(tiny_model, tmp_path))
    assert not backend.measure_costs()
    assert backend.info.costs_pending == NOT_YET, "a stop is no disturbance"
    assert (done, backend.info.kv_cost, list(tmp_path.iterdir())) == (["kv_cost"], None, [])
    assert backend.measure_costs()
    backend.close()
    assert done == ["kv_cost", "step_cost", "state_cost"]
    assert all(getattr(backend.info, name) == value for name, (_, _, value) in MEASURES.items())


@pytest.mark.parametrize("error", [ConfigError("a reason"), NotLoadedError(1), MemoryError("a reason")])
def test_what_fails_while_the_server_idles_is_a_reason_and_ends_nothing(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    backend = LlamaBackend(settings(tiny_model, None))
    with monkeypatch.context() as patch:
        patch.setattr(costs, "measure_step_cost", fail)
        assert not backend.measure_costs()
    assert backend.info.costs_pending not in ("", NOT_YET)
    assert backend.measure_costs()
    backend.close()


@pytest.mark.parametrize("at_load", [False, True])
def test_of_a_slow_model_the_result_of_the_self_test_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, at_load: bool
) -> None:
    """Each start finds again that it is too slow to be measured."""
    monkeypatch.setattr(costs, "is_slow", lambda *_: True)
    monkeypatch.setattr(Quiet, "check", lambda _: None)
    given = settings(synthetic.ensure("tiny-lfm2"), tmp_path, checkpoints=True, measure_at_load=at_load)
    first = measured(given)
    (file,) = tmp_path.iterdir()
    os.utime(file, (1e9, time.time() - 60))
    written = file.stat().st_mtime_ns
    again = measured(given)
    assert first.info.self_test == again.info.self_test == "passed"
    assert [each.stat().st_mtime_ns for each in tmp_path.iterdir()] == [written]


def test_where_the_pool_may_never_be_empty_again_costs_are_measured_at_load(
    tiny_model: Path, tmp_path: Path, n_measured: list[int]
) -> None:
    for _ in range(2):
        backend = LlamaBackend(settings(tiny_model, tmp_path, measure_at_load=True))
        backend.close()
        assert (backend.info.costs_pending, backend.info.kv_cost) == ("", MEASURED.kv_cost)
        assert n_measured == [1]
    later = LlamaBackend(settings(tiny_model, tmp_path))
    later.close()
    assert (later.info.kv_cost, n_measured) == (MEASURED.kv_cost, [1]), "both kinds of starts share what is kept"


def test_costs_that_another_server_has_measured_meanwhile_are_taken(
    tiny_model: Path, tmp_path: Path, n_measured: list[int]
) -> None:
    first, second = (LlamaBackend(settings(tiny_model, tmp_path)) for _ in range(2))
    assert first.measure_costs()
    assert second.measure_costs()
    first.close()
    second.close()
    assert n_measured == [1]
    assert not second.info.costs_pending
    assert second.info.kv_cost == first.info.kv_cost == MEASURED.kv_cost


def test_costs_without_memory_for_a_segment_are_not_kept_and_are_measured_later(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Quiet, "check", lambda _: None)
    monkeypatch.setattr(Quiet, "compare", lambda *_: None)
    prefill = costs._prefill
    monkeypatch.setattr(costs, "_prefill", lambda *args: min(prefill(*args), 0.01))
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_state_seq_get_data", lambda *_: 0)
        backend = LlamaBackend(settings(tiny_model, tmp_path, n_ctx=4096, n_ubatch=512))
        assert not backend.measure_costs()
        assert (backend.info.kv_cost, list(tmp_path.iterdir())) == (None, [])
        assert "not enough memory" in backend.info.costs_pending
    assert backend.measure_costs()
    backend.close()
    assert (backend.info.kv_cost is not None, backend.info.costs_pending) == (True, "")
    assert len(list(tmp_path.iterdir())) == 1


def test_threads_that_wait_for_each_other_are_no_disturbance(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, n_measured: list[int]
) -> None:
    """With more threads than CPUs they always do, so costs would be pending for ever."""
    ticking = iter(range(10**6))
    monkeypatch.setattr(costs, "read_clocks", lambda: costs.Clocks(t := float(next(ticking)), 0.0, {1: t}))
    n_cpus = int(host_cpus().n_at_once)
    for fields in ({"n_threads": n_cpus + 1}, {"n_threads_batch": n_cpus + 1}):
        backend = measured(settings(tiny_model, None, **fields))
        assert (backend.info.costs_pending, backend.info.kv_cost) == ("", MEASURED.kv_cost)


@pytest.mark.parametrize(("allowed", "quota", "n_at_once"), [(4, None, 4), (4, 2.5, 2.5), (2, 8.0, 2)])
def test_no_more_threads_run_at_once_than_affinity_and_quota_allow(
    allowed: int, quota: float | None, n_at_once: float
) -> None:
    assert HostCpus(cores=8, logical=16, allowed=allowed, quota=quota).n_at_once == n_at_once


@pytest.mark.slow
def test_the_result_of_the_self_test_is_kept_though_costs_were_disturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_measured: list[int]
) -> None:
    """Else nothing would be reused at each start on a busy machine, until the self-test has passed again."""
    ticking = iter(range(10**6))
    monkeypatch.setattr(costs, "read_clocks", lambda: costs.Clocks(t := float(next(ticking)), 0.0, {1: t}))
    given = settings(synthetic.ensure("tiny-lfm2"), tmp_path, checkpoints=True, n_threads=1)
    disturbed = LlamaBackend(given)
    assert not disturbed.measure_costs()
    disturbed.close()
    monkeypatch.setattr(self_test, "run", lambda *_, **__: pytest.fail("it was passed already"))
    backend = LlamaBackend(given)
    assert backend.info.costs_pending
    assert backend.info.self_test == "passed"
    monkeypatch.setattr(costs, "read_clocks", lambda: costs.Clocks(0.0, 0.0, {}))
    assert backend.measure_costs()
    backend.close()
    n_measured[0] = 0
    again = LlamaBackend(given)
    again.close()
    assert (again.info.self_test, again.info.kv_cost, n_measured) == ("passed", MEASURED.kv_cost, [0])


def test_what_the_self_test_says_of_drafts_is_kept_with_costs_that_are_measured_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_measured: list[int]
) -> None:
    passed = self_test.SelfTestResult("passed", why_no_drafts="the state after them is another one")
    monkeypatch.setattr(self_test, "run", lambda *_, **__: passed)
    measured(settings(synthetic.ensure("tiny-lfm2"), tmp_path, checkpoints=True))
    (file,) = tmp_path.iterdir()
    kept = costs.read_kept(tmp_path, file.stem)
    assert kept is not None
    assert (kept.self_test, kept.has_costs) == (passed, True)


@pytest.mark.slow
@pytest.mark.parametrize("outcome", ["off", "failed"])
def test_costs_that_are_measured_later_without_reuse_are_not_kept_for_starts_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Any
) -> None:
    ticking = iter(range(10**6))
    monkeypatch.setattr(costs, "read_clocks", lambda: costs.Clocks(t := float(next(ticking)), 0.0, {1: t}))
    failed = self_test.SelfTestResult("failed", "the reason")
    monkeypatch.setattr(self_test, "run", lambda *_, **__: failed)
    given = settings(synthetic.ensure("tiny-lfm2"), tmp_path, checkpoints=True, n_threads=1)
    choice: Any = "off" if outcome == "off" else "auto"
    backend = LlamaBackend(replace(given, reuse_self_test=choice))
    assert backend.info.self_test == outcome
    monkeypatch.setattr(costs, "read_clocks", lambda: costs.Clocks(0.0, 0.0, {}))
    assert backend.measure_costs()
    backend.close()
    again = LlamaBackend(replace(given, reuse_self_test="on"))
    assert again.info.costs_pending == NOT_YET
    assert again.measure_costs()
    again.close()
    assert again.info.state_cost is not None


def test_costs_are_measured_on_empty_sequences_only_and_leave_what_is_saved(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = costs._prefill
    monkeypatch.setattr(costs, "_prefill", lambda *given: min(prefill(*given), 0.005))
    monkeypatch.setattr(costs, "_N_PAIRS", 1)
    ticking = iter(range(10**6))
    monkeypatch.setattr(costs, "read_clocks", lambda: costs.Clocks(t := float(next(ticking)), 0.0, {1: t}))
    backend = LlamaBackend(settings(tiny_model, None, n_ctx=4096, n_ubatch=512, n_threads=1))
    assert not backend.measure_costs()
    backend.decode([Run(0, 0, np.arange(100, 140, dtype=np.int32), n_outputs=0)])
    with pytest.raises(IllegalCallError):
        backend.measure_costs()
    backend.change(Save(0, 0, 0, 40))
    backend.change(Remove(0, 0))
    kept = bytes(backend.kv_of(0).data)  # type: ignore[union-attr]
    monkeypatch.setattr(costs, "read_clocks", lambda: costs.Clocks(0.0, 0.0, {}))
    stops = iter([False, False, True])
    assert not backend.measure_costs(lambda: next(stops))
    assert [backend.seq_range(seq) for seq in range(backend.n_seqs)] == [range(0)] * backend.n_seqs
    assert backend.measure_costs()
    assert backend.info.kv_cost is not None
    assert bytes(backend.kv_of(0).data) == kept  # type: ignore[union-attr]
    backend.change(Load(0, 0, ((0, 40),)))
    assert backend.seq_range(0) == range(40)
    backend.close()


READINGS = [
    # before, after, on a CPU, seconds of waiting
    (costs.Clocks(0, 0, {1: 0.0}), costs.Clocks(1, 0.2, {1: 0.3, 2: 0.1}), True, 0.4),
    (costs.Clocks(0, 0, {1: 0.0, 9: 5.0}), costs.Clocks(1, 0.2, {1: 0.3}), False, 0.3),
    (costs.Clocks(0, 0, {1: 0.0}), costs.Clocks(1, 0.1, {1: 0.0}), True, 0.0),
    (costs.Clocks(0, 0, None), costs.Clocks(1, 0.75, None), True, 0.25),
    (costs.Clocks(0, 0, None), costs.Clocks(1, 0.1, None), False, 0.0),
]


@pytest.mark.parametrize(("before", "after", "on_cpu", "waited"), READINGS)
def test_waiting_is_what_the_kernel_counts_else_the_time_without_a_cpu(
    before: costs.Clocks, after: costs.Clocks, on_cpu: bool, waited: float
) -> None:
    assert costs.waited_s(before, after, on_cpu=on_cpu) == pytest.approx(waited)


def test_equal_work_that_takes_unequal_times_is_a_disturbance_on_any_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(costs, "MAX_SPREAD", 1.5)
    costs.Quiet.compare([0.20, 0.21, 0.9])
    with pytest.raises(costs.DisturbedError, match=r"took 0\.200 to 0\.900 s"):
        costs.Quiet.compare([0.20, 0.8, 0.9])


def test_files_of_earlier_versions_are_not_read(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have been measured on a busy machine."""
    backend = LlamaBackend(LlamaSettings(tiny_model, n_ctx=256))
    backend.close()
    key = costs.key_of(LlamaSettings(tiny_model), backend.info, 4)
    monkeypatch.setattr(costs, "FORMAT", 2)
    assert costs.key_of(LlamaSettings(tiny_model), backend.info, 4) != key


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="CPUs are chosen")
def test_on_a_busy_machine_nothing_is_kept(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_machine: None
) -> None:
    """Really busy: three other processes want the one CPU that this one may use."""
    monkeypatch.undo()
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    loop = "import time; end = time.monotonic() + 30\nwhile time.monotonic() < end: pass"
    others = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(3)]
    try:
        backend = LlamaBackend(settings(tiny_model, tmp_path, n_ctx=4096, n_ubatch=512, n_threads=1))
        backend.measure_costs()
        backend.close()
    finally:
        for each in others:
            each.kill()
            each.wait()
        os.sched_setaffinity(0, allowed)
    assert backend.info.costs_pending
    assert backend.info.kv_cost is backend.info.step_cost is None
    assert not list(tmp_path.iterdir())
