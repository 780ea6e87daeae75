"""What the parent knows of the engine's model, before anybody listens and after a restart."""

from __future__ import annotations

import msgspec

from llamaslot.base.events import Event, ModelInfoChanged
from llamaslot.kvcache.cache_settings import Budgets
from llamaslot.processes.engine_supervisor import EngineSupervisor
from llamaslot.processes.messages import Events, Loaded
from tests.fake_backend import FakeBackend


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
