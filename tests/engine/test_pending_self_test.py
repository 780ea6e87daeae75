"""A model whose self-test is pending, or failed once the engine ran: nothing is reused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from llamaslot.base.events import Finished
from llamaslot.base.kv_ops import Copy, Load, Operation, Restore, Take
from llamaslot.base.model import StateKind
from tests.engine.harness import running
from tests.fake_backend import FakeBackend

KINDS = StateKind.WINDOW, StateKind.RECURRENT, StateKind.HYBRID


class Untested(FakeBackend):
    """A model that fails the self-test, once it is run; `reused` has the operations that need what it checks."""

    def __init__(self, kind: StateKind, **shape: int) -> None:
        super().__init__(kind=kind, **shape)
        self.info = msgspec.structs.replace(self.info, self_test="pending")
        self.reused: list[Operation] = []
        self.fails = False

    def run_self_test(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        if not self.fails:
            return False
        self.info = msgspec.structs.replace(
            self.info, self_test="failed", keeps_checkpoints=False, checkpoint_size=None, segment_size=None
        )
        return True

    def change(self, operation: Operation) -> None:
        if isinstance(operation, Copy | Take | Restore | Load):
            self.reused.append(operation)
        super().change(operation)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fails", [False, True])
async def test_choices_of_one_prompt_share_no_state_that_is_not_proved(kind: StateKind, fails: bool) -> None:
    backend = Untested(kind, n_slots=2, n_reserved=2)
    backend.fails = fails
    async with running(backend, checkpoint_bytes=10**6, ram_bytes=10**6) as harness:
        await harness.submit("first", "to have the test run")
        for _ in range(20):
            await asyncio.sleep(0)
        assert backend.info.self_test == ("failed" if fails else "pending")
        ends = [harness.submit(f"r-{i}", "the prompt of all", group="r") for i in range(3)]
        ends.append(harness.submit("other", "the prompt of all"))
        assert all(isinstance(end, Finished) for end in await asyncio.gather(*ends))
        assert not backend.reused
        assert len({harness.text(name) for name in ("r-0", "r-1", "r-2", "other")}) == 1
