"""A model whose self-test is pending: nothing is reused, and what was kept is reused once the test has passed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest.mock import patch

import msgspec
import pytest

from bench import synthetic
from llamaslot.backend.llama import LlamaBackend, LlamaSettings, self_test
from llamaslot.base.events import Finished, Output, Started
from llamaslot.base.kv_ops import Copy, Load, NotSavedError, Operation, Restore, Save, Take
from llamaslot.base.model import SelfTestOutcome, StateKind
from llamaslot.engine import measurements
from llamaslot.engine.measurements import PendingSelfTest
from tests.engine.harness import Accepted, Harness, running
from tests.fake_backend import FakeBackend

KINDS = StateKind.WINDOW, StateKind.RECURRENT, StateKind.HYBRID
FIRST, SECOND = "the first turn of a conversation, " * 8, "and the second one"
STORES = {"checkpoint_bytes": 10**6, "ram_bytes": 10**6}


class Untested(FakeBackend):
    """A model whose self-test ends as `outcome`; `reused` has the operations that need what it checks."""

    def __init__(self, kind: StateKind, **shape: int) -> None:
        super().__init__(kind=kind, **shape)
        self.info = msgspec.structs.replace(self.info, self_test="pending", self_test_reason="the reason")
        self.reused: list[Operation] = []
        self.n_taken = 0
        self.outcome: SelfTestOutcome = "pending"
        self.lacks_memory = False

    def run_self_test(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        if self.lacks_memory:
            raise NotSavedError(0)
        if self.outcome == "pending":
            return False
        self.info = msgspec.structs.replace(self.info, self_test=self.outcome)
        if self.outcome == "failed":
            self.info = msgspec.structs.replace(
                self.info, keeps_checkpoints=False, checkpoint_size=None, segment_size=None
            )
        return True

    def change(self, operation: Operation) -> None:
        # A path that is moved from a slot to a spare sequence is kept, not used.
        is_move = isinstance(operation, Copy) and operation.dst >= self.info.n_slots
        if isinstance(operation, Copy | Restore | Load | Save) and not is_move:
            self.reused.append(operation)
        self.n_taken += isinstance(operation, Take)
        super().change(operation)


async def ask(engine: Harness, name: str, text: str) -> Finished:
    end = await engine.submit(name, text)
    assert isinstance(end, Finished)
    return end


async def steps() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outcome", ["pending", "failed"])
async def test_choices_of_one_prompt_share_no_state_that_is_not_proved(
    kind: StateKind, outcome: SelfTestOutcome
) -> None:
    backend = Untested(kind, n_slots=2, n_reserved=2)
    backend.outcome = outcome
    async with running(backend, **STORES) as harness:
        await harness.submit("first", "to have the test run")
        await steps()
        assert backend.info.self_test == outcome
        ends = [harness.submit(f"r-{i}", "the prompt of all", group="r") for i in range(3)]
        ends.append(harness.submit("other", "the prompt of all"))
        ended = await asyncio.gather(*ends)
        assert all(isinstance(end, Finished) for end in ended)
        assert {end.progress.miss for end in ended if isinstance(end, Finished)} == {f"self_test_{outcome}"}
        assert not backend.reused
        assert len({harness.text(name) for name in ("r-0", "r-1", "r-2", "other")}) == 1


@pytest.mark.parametrize("n_slots", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outcome", ["passed", "failed"])
async def test_the_first_conversation_is_reused_if_the_test_passes_and_else_dropped(
    kind: StateKind, outcome: SelfTestOutcome, n_slots: int
) -> None:
    backend = Untested(kind, n_slots=n_slots, n_ctx=4096)
    async with running(backend, **STORES) as engine:
        first = await ask(engine, "first", FIRST)
        assert (first.progress.miss, first.progress.n_cached) == ("self_test_pending", 0)
        again = await ask(engine, "again", FIRST)
        assert (again.progress.miss, again.progress.n_cached) == ("self_test_pending", 0)
        scheduler = engine.engine.scheduler
        assert not scheduler.can_draft
        assert engine.text("first") == engine.text("again")
        assert not backend.reused
        assert backend.n_taken
        text = FIRST + engine.text("first") + SECOND
        backend.outcome = outcome
        second = await ask(engine, "second", text)
        assert backend.info.self_test == outcome
        assert scheduler.can_draft == (outcome == "passed" and kind is StateKind.WINDOW)
        if outcome == "passed":
            assert second.progress.n_cached > len(FIRST) / 2
            assert (await ask(engine, "third", text)).progress.n_cached > 0
        else:
            assert (second.progress.miss, second.progress.n_cached) == ("self_test_failed", 0)
            stats = scheduler.cache.stats()
            assert (stats.checkpoints.count, stats.cells.used, stats.ram.segments) == (0, 0, 0)
            assert not backend.reused


async def test_what_does_not_fit_beside_the_test_is_dropped_and_the_test_runs_later() -> None:
    backend = Untested(StateKind.HYBRID, n_slots=1, n_ctx=4096)
    backend.lacks_memory = True
    async with running(backend, **STORES) as engine:
        await ask(engine, "first", FIRST)
        await steps()
        assert engine.engine.scheduler.cache.stats().cells.used == 0
        backend.lacks_memory, backend.outcome = False, "passed"
        await ask(engine, "second", FIRST)
        assert (await ask(engine, "third", FIRST)).progress.n_cached > 0


@pytest.mark.parametrize("outcome", ["passed", "failed"])
async def test_it_runs_between_requests_where_idleness_does_not_come(
    outcome: SelfTestOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that wait meanwhile are admitted after it, and know its result."""
    monkeypatch.setattr(measurements, "_OVERDUE_S", 0.0)
    backend = Untested(StateKind.HYBRID, n_slots=2, n_ctx=4096)
    async with running(backend, **STORES) as engine:
        running_on = engine.submit("a", FIRST, max_tokens=30)
        await engine.wait_for("a", Output, 2)
        backend.outcome = outcome
        waiting = engine.submit("b", FIRST + " with more")
        await engine.wait_for("b", Accepted)
        assert not any(isinstance(each, Started) for each in engine.events["b"])
        assert backend.info.self_test == "pending"
        first, second = await asyncio.gather(running_on, waiting)
        assert isinstance(first, Finished)
        assert isinstance(second, Finished)
        assert backend.info.self_test == outcome
        assert (second.progress.n_cached > 0) is (outcome == "passed")
        assert (second.progress.miss == "self_test_failed") is (outcome == "failed")


def test_requests_are_held_for_a_short_time_only() -> None:
    now = 0.0
    test = PendingSelfTest(Untested(StateKind.WINDOW), lambda: now)
    due, held = [], []
    for second in range(700):
        now = float(second)
        due.append(test.is_due(is_waiting=True))
        held.append(test.holds_requests)
        assert test.is_due(is_waiting=False)
    assert due.index(True) == 11
    assert [i for i, each in enumerate(held) if each] == [*range(21, 40), *range(320, 340), *range(620, 640)]


@pytest.mark.slow
@pytest.mark.parametrize("n_slots", [1, 2])
@pytest.mark.parametrize("shape", ["tiny-swa", "tiny-lfm2", "tiny-mamba", "tiny-oss", "tiny-next"])
async def test_a_real_model_goes_on_from_checkpoints_that_were_taken_before_the_test(
    shape: str, n_slots: int
) -> None:
    settings = LlamaSettings(
        synthetic.ensure(shape),
        n_ctx=1024,
        n_slots=n_slots,
        n_ubatch=128,
        n_threads=1,
        checkpoints=True,
    )
    prompt = "<|im_start|>user\n" + "some words of a prompt " * 20 + "<|im_end|>\n<|im_start|>assistant\n"
    tests = []

    class Late(LlamaBackend):
        def run_self_test(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
            # Not before the conversation has begun.
            return bool(any(self._kv.lengths)) and (tests.append(1) or super().run_self_test(should_stop))

    with patch.object(self_test, "START_LIMIT_S", 0.0):
        late = Late(settings)
    async with running(late, checkpoint_bytes=10**8, ram_bytes=10**8, debug_invariants=True) as engine:
        first = await ask(engine, "first", prompt)
        assert (first.progress.miss, first.progress.n_cached) == ("self_test_pending", 0)
        async with asyncio.timeout(30):
            while engine.backend.info.self_test == "pending":
                await asyncio.sleep(0.01)
        assert engine.backend.info.self_test == "passed"
        text = (
            prompt + engine.text("first") + "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
        )
        second = await ask(engine, "second", text)
        assert second.progress.n_cached > 80
    # By a cold run in other chunks, rounding may decide between two tokens of such a model.
    with patch.object(self_test, "START_LIMIT_S", 1e3):
        tested = LlamaBackend(settings)
    async with running(tested, checkpoint_bytes=10**8, ram_bytes=10**8) as other:
        assert (await ask(other, "first", prompt)).progress.miss != "self_test_pending"
        assert (await ask(other, "second", text)).progress.n_cached == second.progress.n_cached
        assert other.text("second") == engine.text("second")
