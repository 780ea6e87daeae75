"""What the parent knows of the engine's model, and how it goes on with an engine that died; without a process."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from llamaslot.base.events import Event, Finished, ModelInfoChanged, Progress, Stopped
from llamaslot.kvcache.cache_settings import Budgets
from llamaslot.processes.engine_supervisor import EngineSupervisor
from llamaslot.processes.messages import Events, Loaded
from llamaslot.processes.supervisor import Exit
from tests.fake_backend import FakeBackend
from tests.fake_clock import LoopClock

PROGRESS = Progress(**dict.fromkeys(Progress.__struct_fields__, 1))


async def test_a_self_test_that_ends_while_the_vocabulary_is_loaded_is_heard_of() -> None:
    info = FakeBackend().info
    engine = EngineSupervisor("no.module", {}, lambda _, __: None)
    engine._receive(Loaded(info, Budgets()))
    assert await engine.loaded() is not None
    event = ModelInfoChanged(msgspec.structs.replace(info, self_test="passed"))
    engine._receive(Events([event]))
    heard: list[Event] = []
    engine.listen(heard.extend, lambda _: None, lambda: None)
    assert heard == [event]


async def test_what_another_engine_knows_of_its_self_test_takes_the_place_of_what_the_last_one_knew() -> None:
    info = msgspec.structs.replace(FakeBackend().info, self_test="pending")
    engine = EngineSupervisor("no.module", {}, lambda _, __: None)
    engine._receive(Loaded(info, Budgets()))
    heard: list[Event] = []
    engine.listen(heard.extend, lambda _: None, lambda: None)
    passed = msgspec.structs.replace(info, self_test="passed")
    engine._receive(Loaded(passed, Budgets()))
    assert heard == [ModelInfoChanged(passed)]


class Played:
    """A supervisor whose process the test plays, on a clock that the test moves on."""

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.engine = EngineSupervisor("no.module", {}, lambda _, __: None)
        self.lost: list[bool] = []
        """Whether each engine that was lost has crashed."""
        self.n_kills = 0
        self.load()
        self.engine.listen(lambda _: None, self.lost.append, lambda: None)

    def load(self) -> None:
        """Start a process that loads the model."""
        self.engine._child = SimpleNamespace(kill=self._kill, pid=1)  # type: ignore[assignment]
        self.engine._receive(Loaded(FakeBackend().info, Budgets()))

    async def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.advance(seconds)
        for _ in range(3):
            await asyncio.sleep(0)

    def die(self) -> None:
        """Have the engine report that it died; its process still runs."""
        self.engine._receive(Events([Stopped("a bug")]))

    def end(self, status: int = 1) -> float | None:
        """End the process; returns the seconds until the next one."""
        self.engine._child = None
        return self.engine._on_ended(Exit(status))

    def _kill(self) -> None:
        self.n_kills += 1


@pytest.mark.parametrize("is_reported", [True, False])
async def test_the_pause_grows_while_engines_die_early(is_reported: bool) -> None:
    played, pauses = Played(), []
    for _ in range(9):
        await played.wait(6)
        if is_reported:
            played.die()
            await played.wait(5)
        pauses.append(played.end())
        played.load()
    assert pauses == [0, 0.5, 1, 2, 4, 8, 16, 32, 32]
    assert played.lost == [True] * 9


async def test_an_engine_that_served_a_request_or_ran_for_ten_seconds_starts_again_at_once() -> None:
    played, pauses = Played(), []
    for i in range(6):
        if i in (2, 3):
            played.engine._receive(Events([Finished("a", "eos", PROGRESS)]))
        elif i == 5:
            await played.wait(11)
        played.die()
        pauses.append(played.end())
        played.load()
    assert pauses == [0, 0.5, 0, 0, 0.5, 0]


async def test_the_process_of_an_engine_that_died_is_killed_if_it_does_not_end() -> None:
    played = Played()
    played.die()
    assert played.lost == [True]
    await played.wait(11)
    assert played.n_kills == 0
    await played.wait(2)
    assert played.n_kills == 1
    assert played.end(-9) == 0
    assert played.lost == [True]


async def test_one_that_ends_by_itself_leaves_no_time_limit_to_the_next_one() -> None:
    played = Played()
    played.die()
    played.end()
    played.load()
    await played.wait(60)
    assert (played.n_kills, played.lost) == (0, [True])
