"""Several generations read as one sequence of events: nothing that came before a failure is lost."""

from __future__ import annotations

import asyncio

import pytest

from llamaslot.api.choices import Choice, Choices
from llamaslot.base.errors import ServerError
from llamaslot.base.events import Accepted, Failed, Finished, Output, Progress
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


async def accepted(wire: Wire, n: int) -> tuple[Choices, list[str]]:
    """Choices that the engine has accepted, and their requests' ids."""
    submits = [submit() for _ in range(n)]
    choices = Choices(wire.service, submits)
    task = asyncio.create_task(choices.__aenter__())
    await asyncio.sleep(0)
    wire.service.receive([Accepted(each.request_id, 5) for each in submits])
    await task
    return choices, [each.request_id for each in submits]


async def test_a_sink_gets_output_at_once_unless_earlier_output_waits() -> None:
    wire = Wire()
    choices, (name,) = await accepted(wire, 1)
    seen: list[str] = []
    is_free = True

    choices.listen(lambda _, output: seen.append(output.content), lambda: is_free)
    wire.service.receive([Output(name, "a", (1,), PROGRESS)])
    is_free = False
    wire.service.receive([Output(name, "b", (2,), PROGRESS)])
    is_free = True
    wire.service.receive([Output(name, "c", (3,), PROGRESS)])
    assert seen == ["a"]
    assert [event.content for _, event in await choices.next_batch()] == ["b", "c"]
    wire.service.receive([Output(name, "d", (4,), PROGRESS), Finished(name, "limit", PROGRESS, "e", (5,))])
    assert seen == ["a", "d"]
    assert [event.content for _, event in await choices.next_batch()] == ["e"]
    assert choices.done
    assert (choices.all[0].text, choices.all[0].tokens) == ("abcde", [1, 2, 3, 4, 5])
    await choices.__aexit__(None, None, None)


async def test_what_a_sink_raises_ends_its_request_and_nothing_else() -> None:
    wire = Wire()
    choices, names = await accepted(wire, 2)

    def sink(choice: Choice, output: Output) -> None:
        raise ZeroDivisionError

    choices.listen(sink, lambda: True)
    wire.service.receive([Output(name, "a", (), PROGRESS) for name in names])
    with pytest.raises(ZeroDivisionError):
        await choices.next_batch()
    await choices.__aexit__(None, None, None)
