"""The dispatcher between a prompt worker on the fake vocabulary and an engine whose side the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from llamaslot.base.commands import (
    Cancel,
    ClearCache,
    Detokenize,
    DropPaths,
    DropSession,
    EngineCommand,
    Generate,
    InspectEngine,
    ProbeCache,
    Query,
    Submit,
    TextPart,
    WriteTexts,
)
from llamaslot.base.errors import ServerError
from llamaslot.base.events import (
    TERMINAL,
    Accepted,
    Cancelled,
    Event,
    Failed,
    Finished,
    Generated,
    Output,
    Progress,
    Reply,
    Started,
    Stopped,
)
from llamaslot.base.stats import EngineState
from llamaslot.prompts.tokenizer import Tokenizer
from llamaslot.service.dispatcher import Dispatcher
from tests.fake_backend import FakeBackend, FakeVocab
from tests.prompt_threads import prompt_thread

PROGRESS = Progress(5, 0, 5, 1, 0.0, 0.0, 0.0)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Side:
    """Collects what the dispatcher sends to the engine and to the service."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.prompts = prompt_thread(Tokenizer(FakeVocab(), 1000, min_match=0.8))
        self.events: list[Event] = []
        self.sent: list[EngineCommand] = []
        self.dispatcher = Dispatcher(
            FakeBackend(n_slots=2).info, self.prompts, self.events.extend, clock=self.clock
        )
        self.dispatcher.connect(self.sent.append)

    def submit(self, *names: str, prompt: str = "hello", **fields: Any) -> None:
        for name in names:
            self.dispatcher.send(Submit(name, (TextPart(prompt),), **fields))

    async def until(self, kind: type[Any], *names: str) -> None:
        """Wait for an event of that kind for each request."""
        async with asyncio.timeout(5):
            while not set(names) <= {e.request_id for e in self.events if isinstance(e, kind)}:
                await asyncio.sleep(0.001)

    async def accepted(self, *names: str, **fields: Any) -> None:
        self.submit(*names, **fields)
        await self.until(Accepted, *names)

    def engine(self, *events: Any) -> None:
        self.dispatcher.receive(list(events))

    @property
    def generates(self) -> list[str]:
        """The completions that the engine has got, in order."""
        return [each.submit.request_id for each in self.sent if isinstance(each, Generate)]

    @property
    def ends(self) -> dict[str, str]:
        """The terminal events, or the types of their errors; no request has two."""
        ends = [event for event in self.events if isinstance(event, TERMINAL)]
        assert len({event.request_id for event in ends}) == len(ends)
        return {e.request_id: e.error.type if isinstance(e, Failed) else type(e).__name__ for e in ends}


@pytest.fixture
async def side() -> AsyncIterator[Side]:
    side = Side()
    yield side
    await asyncio.sleep(0.01)
    side.prompts.close()


def finished(name: str, generated: Generated | None = None) -> Finished:
    return Finished(name, "eos", PROGRESS, generated=generated)


async def test_what_started_fails_when_the_engine_ends_and_the_rest_is_sent_to_the_next_one(side: Side) -> None:
    await side.accepted("a", "b", "c")
    side.engine(Started("b"))
    side.dispatcher.engine_lost(is_crash=False)
    await side.until(Failed, "b")
    assert side.ends == {"b": "unavailable_error"}
    side.submit("d", prompt="other")
    await side.until(Accepted, "d")
    assert side.generates == ["a", "b", "c"]
    side.sent.clear()
    side.dispatcher.engine_restarted()
    assert side.generates == ["a", "c", "d"]
    side.engine(*(Started(name) for name in "acd"), *(finished(name) for name in "acd"))
    assert side.ends == {"b": "unavailable_error", "a": "Finished", "c": "Finished", "d": "Finished"}
    assert not side.dispatcher._completions


async def test_the_time_that_a_request_waited_is_passed_on(side: Side) -> None:
    await side.accepted("a")
    side.dispatcher.engine_lost(is_crash=False)
    side.clock.now += 3
    side.dispatcher.engine_restarted()
    assert [each.waited_s for each in side.sent if isinstance(each, Generate)] == [0, 3]


async def test_a_request_is_cancelled_in_every_state(side: Side) -> None:
    side.submit("a")
    side.dispatcher.send(Cancel("a"))
    await side.until(Cancelled, "a")
    await side.accepted("b", "c")
    side.dispatcher.send(Cancel("b"))
    assert side.sent[-1] == Cancel("b")
    side.dispatcher.engine_lost(is_crash=False)
    await side.until(Cancelled, "b")
    side.sent.clear()
    side.dispatcher.engine_restarted()
    assert side.generates == ["c"]
    assert side.ends == {"a": "Cancelled", "b": "Cancelled"}


async def test_suspects_run_alone_until_they_have_ended(side: Side) -> None:
    await side.accepted("a", "b", prompt="one")
    await side.accepted("c", prompt="two")
    side.engine(Started("a"), Started("c"))
    side.dispatcher.engine_lost(is_crash=True)
    side.sent.clear()
    side.dispatcher.engine_restarted()
    assert side.generates == ["b"], "it is the same request as a"
    await side.accepted("d", prompt="innocent")
    assert side.generates == ["b"]
    side.engine(Started("b"), finished("b"))
    await asyncio.sleep(0)
    assert side.generates == ["b", "d"]
    await side.accepted("e", prompt="one")
    assert side.generates == ["b", "d", "e"], "it is no suspect any more"
    await side.accepted("f", prompt="two")
    await side.accepted("g", prompt="three")
    assert side.generates == ["b", "d", "e"], "a suspect waits until the engine is empty, and others wait behind it"
    side.engine(finished("d"), finished("e"))
    await asyncio.sleep(0)
    assert side.generates[3:] == ["f"]
    side.engine(Started("f"), finished("f"))
    await asyncio.sleep(0)
    assert side.generates[3:] == ["f", "g"]


async def test_a_suspect_with_which_the_engine_crashes_alone_is_refused_for_ten_minutes(side: Side) -> None:
    await side.accepted("a", prompt="bad")
    side.engine(Started("a"))
    side.dispatcher.engine_lost(is_crash=True)
    side.dispatcher.engine_restarted()
    await side.accepted("b", prompt="bad")
    side.dispatcher.engine_lost(is_crash=True)
    side.dispatcher.engine_restarted()
    side.submit("c", prompt="bad")
    await side.until(Failed, "a", "b", "c")
    assert side.ends == dict.fromkeys("abc", "unavailable_error")
    refusal = next(e for e in side.events if isinstance(e, Failed) and e.request_id == "c")
    assert refusal.error.retry_after == 600
    await side.accepted("d", prompt="good")
    assert side.generates == ["a", "b", "d"]
    side.engine(finished("d"))
    side.clock.now += 601
    await side.accepted("e", prompt="bad")


async def test_if_nothing_had_started_what_was_sent_is_tried_alone(side: Side) -> None:
    await side.accepted("a", prompt="one")
    await side.accepted("b", prompt="two")
    side.dispatcher.engine_lost(is_crash=True)
    side.sent.clear()
    side.dispatcher.engine_restarted()
    assert side.generates == ["a"]
    side.dispatcher.engine_lost(is_crash=True)
    await side.until(Failed, "a")
    side.dispatcher.engine_restarted()
    assert side.generates == ["a", "b"]


async def test_an_end_that_is_no_crash_makes_no_suspects(side: Side) -> None:
    await side.accepted("a")
    side.engine(Started("a"))
    side.dispatcher.engine_lost(is_crash=False)
    side.dispatcher.engine_restarted()
    await side.accepted("b", "c")
    assert side.generates == ["a", "b", "c"]


async def test_queries_fail_while_the_engine_restarts(side: Side) -> None:
    side.dispatcher.send(Query("1", InspectEngine()))
    side.dispatcher.engine_lost(is_crash=False)
    side.dispatcher.send(Query("2", ClearCache()))
    side.dispatcher.send(Query("3", Detokenize((1,))))
    await side.until(Reply, "1", "2", "3")
    errors = {e.request_id: e.error and e.error.type for e in side.events if isinstance(e, Reply)}
    assert errors == {"1": "unavailable_error", "2": "unavailable_error", "3": None}


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_probe_that_the_engine_does_not_answer_releases_its_prompt(side: Side, is_lost: bool) -> None:
    side.dispatcher.send(Query("1", ProbeCache(Submit("probe", (TextPart("hello"),)))))
    async with asyncio.timeout(5):
        while not side.sent:
            await asyncio.sleep(0.001)
        assert side.prompts.n_contexts == 1
        if is_lost:
            side.dispatcher.engine_lost(is_crash=False)
        else:
            side.engine(Reply("1", error=ServerError("no").info()))
        while side.prompts.n_contexts:
            await asyncio.sleep(0.001)
    await side.until(Reply, "1")


async def test_statistics_have_what_the_prompt_worker_remembers(side: Side) -> None:
    await side.accepted("a", session_id="mine")
    side.engine(finished("a", Generated(b"a\0\0\0", 1)))
    async with asyncio.timeout(5):
        while side.dispatcher._n_remembering:
            await asyncio.sleep(0.001)
    side.dispatcher.send(Query("1", InspectEngine()))
    side.engine(Reply("1", {"slots": [], "n_queued": 0}))
    state = side.events[-1].body
    assert isinstance(state, EngineState)
    assert state.cache.sessions.known == 1


async def test_records_are_written_once_there_is_an_engine(side: Side) -> None:
    await side.accepted("a", session_id="mine")
    side.engine(Started("a"), finished("a", Generated(b"a\0\0\0", 1)))
    side.dispatcher.engine_lost(is_crash=False)
    async with asyncio.timeout(5):
        while side.dispatcher._n_remembering:
            await asyncio.sleep(0.001)
    side.sent.clear()
    side.dispatcher.engine_restarted()
    (write,) = side.sent
    assert isinstance(write, WriteTexts)
    assert [record.kind for record in write.records] == ["session"]
    side.dispatcher.send(Query("1", DropSession("mine")))
    async with asyncio.timeout(5):
        while len(side.sent) < 2:
            await asyncio.sleep(0.001)
    drop = side.sent[-1].body
    assert isinstance(drop, DropPaths)
    assert drop.session == write.records[0].digest


async def test_where_a_prompt_departs_from_what_was_cached_is_told_from_then_on(side: Side) -> None:
    await side.accepted("a")
    side.engine(Started("a", n_matched=3, miss="diverged"))
    async with asyncio.timeout(5):
        while side.dispatcher._completions["a"].diverged_at < 0:
            await asyncio.sleep(0.001)
    side.engine(Output("a", "x", (5,), PROGRESS), finished("a"))
    assert [e.progress.diverged_at for e in side.events if isinstance(e, Output | Finished)] == [2, 2]


async def test_closing_ends_everything_once(side: Side) -> None:
    await side.accepted("a", "b")
    side.engine(Started("a"))
    side.submit("c", prompt="x" * 100)

    def answer(command: EngineCommand) -> None:
        assert isinstance(command, Cancel)
        asyncio.get_running_loop().call_soon(side.engine, Cancelled(command.request_id, PROGRESS))

    side.dispatcher.connect(answer)
    await side.dispatcher.close(5)
    assert side.ends == dict.fromkeys("abc", "unavailable_error")


async def test_nothing_is_accepted_once_the_engine_has_stopped(side: Side) -> None:
    await side.accepted("a")
    side.engine(Stopped("a bug"))
    side.submit("b")
    await side.until(Failed, "a", "b")
    assert side.ends == dict.fromkeys("ab", "server_error")


async def test_what_waits_when_its_request_is_refused_is_not_tried_again(side: Side) -> None:
    side.submit("a", prompt="bad", n=4)
    await side.until(Accepted, "a-0", "a-3")
    side.engine(Started("a-0"), Started("a-1"))
    for _ in range(2):
        side.dispatcher.engine_lost(is_crash=True)
        side.dispatcher.engine_restarted()
    await side.until(Failed, "a-0", "a-1", "a-2", "a-3")
    assert side.generates == ["a-0", "a-1", "a-2", "a-3", "a-2"]
    assert set(side.ends.values()) == {"unavailable_error"}


async def test_a_suspect_that_did_not_run_to_its_end_stays_one(side: Side) -> None:
    await side.accepted("a", prompt="bad")
    side.engine(Started("a"))
    side.dispatcher.engine_lost(is_crash=True)
    side.dispatcher.engine_restarted()
    await side.accepted("b", prompt="bad")
    side.dispatcher.send(Cancel("b"))
    side.engine(Started("b"), Cancelled("b"))
    await side.accepted("c", prompt="good")
    await side.accepted("d", prompt="bad")
    assert side.generates == ["a", "b", "c"], "d waits until c has ended"


async def test_a_request_that_was_cancelled_is_not_given_to_the_next_engine(side: Side) -> None:
    await side.accepted("a", "b")
    side.dispatcher.send(Cancel("a"))
    side.dispatcher.engine_lost(is_crash=False)
    await side.until(Cancelled, "a")
    side.sent.clear()
    side.dispatcher.engine_restarted()
    assert side.generates == ["b"]


async def test_closing_ends_what_the_engine_loses_meanwhile(side: Side) -> None:
    await side.accepted("a", "b")
    side.engine(Started("a"))
    closing = asyncio.ensure_future(side.dispatcher.close(5))
    await asyncio.sleep(0.02)
    side.dispatcher.engine_lost(is_crash=True)
    async with asyncio.timeout(1):
        await closing
    assert set(side.ends) == {"a", "b"}


async def test_closing_ends_what_the_engine_does_not_answer(side: Side) -> None:
    await side.accepted("a")
    await side.dispatcher.close(0.05)
    assert side.ends == {"a": "unavailable_error"}


async def test_no_session_is_dropped_while_the_engine_restarts(side: Side) -> None:
    await side.accepted("a", session_id="mine")
    side.engine(Started("a"), finished("a", Generated(b"a\0\0\0", 1)))
    side.dispatcher.engine_lost(is_crash=False)
    side.dispatcher.send(Query("1", DropSession("mine")))
    await side.until(Reply, "1")
    side.dispatcher.engine_restarted()
    side.dispatcher.send(Query("2", DropSession("mine")))
    async with asyncio.timeout(5):
        while not any(isinstance(each, Query) and isinstance(each.body, DropPaths) for each in side.sent):
            await asyncio.sleep(0.001)


async def test_clients_take_turns_when_what_waited_is_sent_to_the_next_engine(side: Side) -> None:
    many = [f"many {i}" for i in range(20)]
    side.dispatcher.engine_lost(is_crash=False)
    await side.accepted(*many, client="many")
    await side.accepted("one", client="one")
    side.dispatcher.engine_restarted()
    names = [each.submit.request_id for each in side.sent if isinstance(each, Generate)]
    assert names == ["many 0", "one", *many[1:]]
