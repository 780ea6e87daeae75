"""Costs that no earlier start has kept are measured while the engine is idle, and used."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llamaslot.backend.disk import SlotFiles
from llamaslot.base.commands import InspectCache, InspectEngine, InspectHitCurve, SlotAction, SlotActionDone
from llamaslot.base.errors import ErrorInfo
from llamaslot.base.events import Finished
from llamaslot.base.model import KvCost, StateKind, StepCost
from llamaslot.base.namespaces import key_salt, key_secret
from llamaslot.engine import measurements
from llamaslot.engine.measurements import PendingCosts
from llamaslot.engine.model_worker import StepWatch
from tests.engine.harness import Harness, running
from tests.fake_backend import FakeBackend

COST = KvCost(n_idle_cells=100, prefill_slowdown=2.0, prefill_us=100.0, save_us=1.0, first_save_us=3.0, load_us=2.0)
STEP = StepCost(step_us=1.0, token_us=2.0, token_cell_us=3.0, block_us=4.0, block_cell_us=5.0)
CHECKPOINT_BYTES = 64
"""Of a recurrent state of `FakeBackend`."""
PROMPT = "a prompt that is as long as this one, at least"


class BusyMachine(FakeBackend):
    """A backend whose costs could not be measured, and cannot before `is_quiet`."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.info = msgspec.structs.replace(self.info, costs_pending="threads waited for CPUs")
        self.is_quiet = False
        self.n_tries = 0

    def measure_costs(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        assert not any(self.seq_len(seq) for seq in range(self.n_seqs)), "the pool is not empty"
        self.n_tries += 1
        if not self.is_quiet or should_stop():
            return False
        self.info = msgspec.structs.replace(self.info, costs_pending="", kv_cost=COST, step_cost=STEP)
        return True


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "IDLE_S", 0.02)
    monkeypatch.setattr(measurements, "_RETRY_S", 0.02)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_once_the_machine_is_quiet_they_are_measured_and_used() -> None:
    backend = BusyMachine(n_reserved=3, n_ctx=512, n_ubatch=64)
    async with running(backend, ram_bytes=10**6, offloads_by_cost=True) as engine:
        made = engine.engine.scheduler.cache.settings
        await until(lambda: backend.n_tries > 1)
        assert (made.budgets.offload_after, made.cost.prefill_us) == (None, 0.0)
        await engine.submit("first", PROMPT, max_tokens=4)
        n_tries = backend.n_tries
        await until(lambda: backend.n_tries > n_tries)
        backend.is_quiet = True
        await until(lambda: not backend.info.costs_pending)
        await until(lambda: made.budgets.offload_after is not None)
        assert (made.budgets.offload_after, made.cost) == (3, COST)
        assert engine.engine.scheduler._planner._padding._cost == STEP
        n_tries = backend.n_tries
        end = await engine.submit("again", PROMPT, max_tokens=4)
        assert isinstance(end, Finished)
        assert engine.text("again") == engine.text("first")
        assert end.progress.n_loaded > 30, "what was in the pool went to RAM for the measurement"
        await asyncio.sleep(0.1)
        assert backend.n_tries == n_tries


class Threaded(Harness):
    """A harness whose backend runs on the model thread."""

    is_inline = False


class Measuring(BusyMachine):
    """A backend that measures until it is told to stop, or has seen enough."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.may_end = threading.Event()
        self.is_measuring = False

    def measure_costs(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        self.is_measuring = True
        while not should_stop() and not self.may_end.wait(0.005):
            pass
        self.is_measuring, self.is_quiet = False, self.may_end.is_set()
        return super().measure_costs()


async def test_queries_that_only_read_are_answered_meanwhile_and_do_not_stop_it() -> None:
    backend = Measuring(n_reserved=3, n_ctx=512, n_ubatch=64)
    async with running(backend, kind=Threaded, ram_bytes=10**6) as engine:
        await until(lambda: backend.is_measuring)
        for query in (InspectEngine(), InspectCache(top=1, text=False), InspectHitCurve()):
            assert not isinstance(await asyncio.wait_for(engine.ask(query), 5), ErrorInfo)
        assert backend.is_measuring
        backend.may_end.set()
        await until(lambda: not backend.info.costs_pending)
        assert backend.n_tries == 1


async def test_a_request_stops_it_and_it_goes_on_once_the_server_idles_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measurements, "_RETRY_S", 1000.0)
    monkeypatch.setattr(measurements, "_STOP_PAUSE_S", 0.02)
    backend = Measuring(n_reserved=3, n_ctx=512, n_ubatch=64)
    async with running(backend, kind=Threaded, ram_bytes=10**6) as engine:
        for i in range(3):
            await until(lambda: backend.is_measuring)
            end = await asyncio.wait_for(engine.submit(str(i), PROMPT, max_tokens=4), 5)
            assert isinstance(end, Finished)
        backend.may_end.set()
        await until(lambda: not backend.info.costs_pending)
        assert backend.n_tries >= 4


async def test_one_that_hangs_is_noticed_although_others_poll() -> None:
    class Hanging(Measuring):
        def measure_costs(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
            return super().measure_costs()

    backend, watch = Hanging(n_reserved=3, n_ctx=512, n_ubatch=64), StepWatch(0.2)
    async with running(backend, kind=Threaded, ram_bytes=10**6, watch=watch) as engine:
        await until(lambda: backend.is_measuring)
        end = engine.submit("first", PROMPT, max_tokens=4)

        def is_noticed() -> bool:
            engine.query(InspectEngine())
            return watch.is_overdue

        try:
            await until(is_noticed)
        finally:
            backend.may_end.set()
        assert isinstance(await end, Finished)


def test_commands_that_keep_coming_make_tries_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "IDLE_S", 2.0)
    pending, due = PendingCosts(BusyMachine(n_ctx=512)), []
    for now in (0.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0):
        pending.note(now, is_idle=True)
        due.append((pending.due_at or 0.0) - now)
        pending.stopped(now)
        assert pending.due_at is None
        pending.note(now, is_idle=True)
        due.append((pending.due_at or 0.0) - now)
        pending.note(now, is_idle=False)
    assert due == [2, 2, 2, 2, 2, 4, 2, 8, 2, 16, 2, 32, 2, 60, 2, 60]


async def test_what_ram_has_no_room_for_stays_in_the_pool() -> None:
    backend = BusyMachine(n_reserved=3, n_ctx=512, n_ubatch=64)
    async with running(backend) as engine:
        await engine.submit("first", PROMPT, max_tokens=4)
        await asyncio.sleep(0.1)
        end = await engine.submit("again", PROMPT, max_tokens=4)
        assert isinstance(end, Finished)
        assert end.progress.n_cached > 30
        assert engine.engine.scheduler.cache.cells.used > 30
        assert backend.info.costs_pending


@pytest.mark.parametrize("lacks", ["memory", "share", "checkpoints", ""])
async def test_what_would_be_lost_stays_in_the_pool(lacks: str) -> None:
    kind = StateKind.RECURRENT if lacks in ("checkpoints", "") else StateKind.NONE
    backend = BusyMachine(n_reserved=3, n_ctx=512, n_ubatch=64, kind=kind, eos_every=10**9)
    assert backend.info.segment_size is not None
    salt, prompts = key_salt(key_secret("one"), ""), [letter * 50 for letter in "ab"]
    limits = {
        "ram_bytes_per_key": backend.info.segment_size.of(100) if lacks == "share" else 0,
        "checkpoint_bytes": CHECKPOINT_BYTES * (1 if lacks == "checkpoints" else 2),
    }
    async with running(backend, ram_bytes=10**6, **limits) as engine:
        cache = engine.engine.scheduler.cache
        if lacks == "memory":
            cache.on_save_failed([], time.perf_counter())
        for i, prompt in enumerate(prompts):
            await engine.submit(str(i), prompt, max_tokens=30, cache_salt=salt)
        n_used, n_tries = cache.cells.used, backend.n_tries
        await (asyncio.sleep(0.1) if lacks else until(lambda: backend.n_tries > n_tries))
        assert cache.cells.used == (n_used if lacks else 0)
        for i, prompt in enumerate(prompts):
            text = f"{prompt}{engine.text(str(i))} go on"
            end = await engine.submit(f"{i} again", text, max_tokens=1, cache_salt=salt)
            assert isinstance(end, Finished)
            assert end.progress.n_cached >= 70
            assert bool(end.progress.n_loaded) == (not lacks)


async def test_slots_that_may_be_saved_are_not_emptied_for_it(tmp_path: Path) -> None:
    backend = BusyMachine(n_reserved=3, n_ctx=512, n_ubatch=64)
    assert backend.info.segment_size is not None
    files = SlotFiles(tmp_path, lambda: b"k" * 32, backend.info.segment_size, 512)
    async with running(backend, ram_bytes=10**6, snapshots=files) as engine:
        await engine.submit("first", PROMPT, max_tokens=4, id_slot=0)
        await asyncio.sleep(0.1)
        saved = await engine.ask(SlotAction(0, "save", "a.bin"))
        assert isinstance(saved, SlotActionDone)
        assert saved.n_tokens > 30
        await engine.ask(SlotAction(0, "erase", ""))
        backend.is_quiet = True
        await until(lambda: not backend.info.costs_pending)
