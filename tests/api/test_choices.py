"""Several generations read as one sequence of events: nothing that came before a failure is lost."""

from __future__ import annotations

import asyncio

import pytest

from llamaslot.api.choices import Choices
from llamaslot.base.errors import ServerError
from llamaslot.base.messages import Accepted, Failed, Finished, Output, Progress
from tests.service.test_service import Wire, submit

PROGRESS = Progress(**dict.fromkeys(Progress.__struct_fields__, 1))


async def test_what_came_before_a_failure_is_delivered_first() -> None:
    wire = Wire()
    submits = [submit(), submit()]
    first, second = (each.request_id for each in submits)
    choices = Choices(wire.service, submits)
    task = asyncio.create_task(choices.__aenter__())
    await asyncio.sleep(0)
    wire.service.receive([Accepted(first, 5), Accepted(second, 5)])
    await task
    wire.service.receive([Output(first, "a", (), PROGRESS), Output(second, "b", (), PROGRESS)])
    wire.service.receive([Output(first, "c", (), PROGRESS), Failed(first, "server_error", "out of luck")])
    wire.service.receive([Finished(second, "limit", PROGRESS)])
    assert [(choice.index, event.content) for choice, event in await choices.next_batch()] == [
        (0, "a"),
        (1, "b"),
        (0, "c"),
    ]
    for _ in range(2):
        with pytest.raises(ServerError, match="out of luck"):
            await choices.next_batch()
    await choices.__aexit__(None, None, None)
