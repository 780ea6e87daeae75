"""The service when its engine ends, crashes and comes back, and when it stops; the test plays the engine."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from llamaslot.base.callers import Caller
from llamaslot.base.commands import Cancel, DropPaths, EngineCommand, Generate, Query, WriteTexts
from llamaslot.base.errors import LlamaslotError, ServerError, UnavailableError
from llamaslot.base.events import (
    Cancelled,
    Failed,
    Finished,
    Generated,
    Output,
    Progress,
    Reply,
    Started,
    Stopped,
)
from llamaslot.base.prompt_jobs import AnswerBody, Remember
from llamaslot.base.text_records import Session
from llamaslot.service.live_request import Completion, CompletionState, LiveRequest
from tests.conftest import LONG
from tests.engine.harness import TERMINAL
from tests.prompt_threads import prepare_text, text_request
from tests.service.live import Wire, begin, leave

PROGRESS = Progress(5, 0, 5, 1, 0.0, 0.0, 0.0)


class Side(Wire):
    """A service, and the terminal events of its completions."""

    def __init__(self) -> None:
        super().__init__()
        self.lives: dict[str, LiveRequest] = {}
        self.events: list[Any] = []

    async def begin(self, *names: str, prompt: str = "hello", **fields: Any) -> None:
        """Begin requests that the service accepts."""
        for name in names:
            live = await begin(self.service, text_request(name, prompt, **fields))
            self._watch(live)
            for completion in live.completions:
                self.lives[completion.id] = live

    def _watch(self, live: LiveRequest) -> None:
        put = live.put

        def watched(completion: Completion, event: Any) -> None:
            self.events.append(event)
            put(completion, event)

        live.put = watched  # type: ignore[method-assign]

    def lose(self, *, is_crash: bool = False) -> None:
        self.service.engine_lost(is_crash)

    def restart(self) -> None:
        self.service.engine_restarted()

    @property
    def ends(self) -> dict[str, str]:
        """The terminal events, or the types of their errors; no completion has two."""
        ends = [event for event in self.events if isinstance(event, TERMINAL)]
        assert len({event.completion_id for event in ends}) == len(ends)
        return {e.completion_id: e.error.type if isinstance(e, Failed) else type(e).__name__ for e in ends}

    async def remembered(self) -> None:
        """Wait until all replies are remembered."""
        async with asyncio.timeout(5):
            while self.service._tasks:
                await asyncio.sleep(0.001)

    async def until_sent(self, kind: type[Any]) -> Any:
        """Wait for a query of that kind to the engine."""
        async with asyncio.timeout(5):
            while True:
                for each in self.sent:
                    if isinstance(each, Query) and isinstance(each.body, kind):
                        return each
                await asyncio.sleep(0.001)


@pytest.fixture
async def side() -> AsyncIterator[Side]:
    side = Side()
    yield side
    await side.close()


def finished(name: str, generated: Generated | None = None) -> Finished:
    return Finished(name, "eos", PROGRESS, generated=generated)


async def test_what_started_fails_when_the_engine_ends_and_the_rest_is_sent_to_the_next_one(side: Side) -> None:
    await side.begin("a", "b", "c")
    side.receive(Started("b"))
    side.lose()
    assert side.ends == {"b": "unavailable_error"}
    await side.begin("d", prompt="other")
    assert side.generates == ["a", "b", "c"]
    side.sent.clear()
    side.restart()
    assert side.generates == ["a", "c", "d"]
    side.receive(*(Started(name) for name in "acd"), *(finished(name) for name in "acd"))
    assert side.ends == {"b": "unavailable_error", "a": "Finished", "c": "Finished", "d": "Finished"}
    assert not side.service._completions
    assert not side.service.capacity.n_in_flight


async def test_the_time_that_a_request_waited_is_passed_on(side: Side) -> None:
    await side.begin("a")
    side.lose()
    side.clock.now += 3
    side.restart()
    assert [each.waited_s for each in side.sent if isinstance(each, Generate)] == [0, 3]


async def test_a_request_is_cancelled_in_every_state(side: Side) -> None:
    await side.begin("b", "c")
    side.service.cancel("b")
    assert side.sent[-1] == Cancel("b")
    side.service.cancel("b")
    assert side.sent.count(Cancel("b")) == 1
    side.lose()
    assert side.ends == {"b": "Cancelled"}
    side.service.cancel("c")
    assert side.ends == {"b": "Cancelled", "c": "Cancelled"}
    side.sent.clear()
    side.restart()
    assert side.generates == []
    assert not side.service.cancel("b")


async def test_suspects_run_alone_until_they_have_ended(side: Side) -> None:
    await side.begin("a", "b", prompt="one")
    await side.begin("c", prompt="two")
    side.receive(Started("a"), Started("c"))
    side.lose(is_crash=True)
    side.sent.clear()
    side.restart()
    assert side.generates == ["b"], "it is the same request as a"
    await side.begin("d", prompt="innocent")
    assert side.generates == ["b"]
    side.receive(Started("b"), finished("b"))
    await asyncio.sleep(0)
    assert side.generates == ["b", "d"]
    await side.begin("e", prompt="one")
    assert side.generates == ["b", "d", "e"], "it is no suspect any more"
    await side.begin("f", prompt="two")
    await side.begin("g", prompt="three")
    assert side.generates == ["b", "d", "e"], "a suspect waits until the engine is empty, and others wait behind it"
    side.receive(finished("d"), finished("e"))
    await asyncio.sleep(0)
    assert side.generates[3:] == ["f"]
    side.receive(Started("f"), finished("f"))
    await asyncio.sleep(0)
    assert side.generates[3:] == ["f", "g"]


async def test_a_suspect_with_which_the_engine_crashes_alone_is_refused_for_ten_minutes(side: Side) -> None:
    await side.begin("a", prompt="bad")
    side.receive(Started("a"))
    side.lose(is_crash=True)
    side.restart()
    await side.begin("b", prompt="bad")
    side.lose(is_crash=True)
    side.restart()
    with pytest.raises(UnavailableError) as refusal:
        await side.begin("c", prompt="bad")
    assert refusal.value.retry_after == 600
    assert side.ends == dict.fromkeys("ab", "unavailable_error")
    await side.begin("d", prompt="good")
    assert side.generates == ["a", "b", "d"]
    side.receive(finished("d"))
    side.clock.now += 601
    await side.begin("e", prompt="bad")


async def test_if_nothing_had_started_what_was_sent_is_tried_alone(side: Side) -> None:
    await side.begin("a", prompt="one")
    await side.begin("b", prompt="two")
    side.lose(is_crash=True)
    side.sent.clear()
    side.restart()
    assert side.generates == ["a"]
    side.lose(is_crash=True)
    assert side.ends == {"a": "unavailable_error"}
    side.restart()
    assert side.generates == ["a", "b"]


async def test_an_end_that_is_no_crash_makes_no_suspects(side: Side) -> None:
    await side.begin("a")
    side.receive(Started("a"))
    side.lose()
    side.restart()
    await side.begin("b", "c")
    assert side.generates == ["a", "b", "c"]


async def test_what_waits_when_its_request_is_refused_is_not_tried_again(side: Side) -> None:
    await side.begin("a", prompt="bad", n=4)
    side.receive(Started("a-0"), Started("a-1"))
    for _ in range(2):
        side.lose(is_crash=True)
        side.restart()
    await asyncio.sleep(0)
    assert side.generates == ["a-0", "a-1", "a-2", "a-3", "a-2"]
    assert side.ends == dict.fromkeys(("a-0", "a-1", "a-2", "a-3"), "unavailable_error")


async def test_a_suspect_that_did_not_run_to_its_end_stays_one(side: Side) -> None:
    await side.begin("a", prompt="bad")
    side.receive(Started("a"))
    side.lose(is_crash=True)
    side.restart()
    await side.begin("b", prompt="bad")
    side.service.cancel("b")
    side.receive(Started("b"), Cancelled("b"))
    await side.begin("c", prompt="good")
    await side.begin("d", prompt="bad")
    assert side.generates == ["a", "b", "c"], "d waits until c has ended"


async def test_queries_fail_while_the_engine_restarts(side: Side) -> None:
    before = asyncio.create_task(side.service.engine_state())
    await asyncio.sleep(0)
    side.lose()
    for query in (before, side.service.clear_cache(), side.service.drop_session("mine", "")):
        with pytest.raises(UnavailableError):
            await query
    assert (await side.service.answer(AnswerBody("tokenize", b'{"content": "a"}'))) == b'{"tokens":[97]}'


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_probe_that_the_engine_does_not_answer_releases_its_prompt(side: Side, is_lost: bool) -> None:
    async def probe() -> None:
        async with side.service.open(Caller()) as live:
            await side.service.prepare(live, prepare_text(text_request("probe", "hello")))
            await side.service.probe(live)

    probing = asyncio.create_task(probe())
    async with asyncio.timeout(5):
        while not side.sent:
            await asyncio.sleep(0.001)
        assert side.prompts.n_kept == 1
        if is_lost:
            side.lose()
        else:
            side.receive(Reply("query-1", error=ServerError("no").info()))
        with pytest.raises(LlamaslotError):
            await probing
        while side.prompts.n_kept:
            await asyncio.sleep(0.001)
    assert not side.service.capacity.n_in_flight


async def test_statistics_have_what_the_prompt_worker_remembers(side: Side) -> None:
    await side.begin("a", session_id="mine")
    side.receive(finished("a", Generated(b"a\0\0\0", 1)))
    await side.remembered()
    asking = asyncio.create_task(side.service.engine_state())
    await asyncio.sleep(0)
    side.receive(Reply("query-1", {"slots": [], "n_queued": 0}))
    assert (await asking).cache.sessions.known == 1


async def test_records_are_written_once_there_is_an_engine(side: Side) -> None:
    await side.begin("a", session_id="mine")
    side.receive(Started("a"), finished("a", Generated(b"a\0\0\0", 1)))
    side.lose()
    await side.remembered()
    side.sent.clear()
    side.restart()
    (write,) = side.sent
    assert isinstance(write, WriteTexts)
    assert [type(record) for record in write.records] == [Session]
    dropping = asyncio.create_task(side.service.drop_session("mine", ""))
    drop = await side.until_sent(DropPaths)
    assert drop.body.session == write.records[0].session
    side.receive(Reply(drop.query_id, {"cleared_tokens": 3}))
    assert (await dropping).cleared_tokens == 3


async def test_each_record_is_written_once_when_replies_are_remembered_at_once(side: Side) -> None:
    answers: list[asyncio.Future[Any]] = []
    call = side.prompts.call

    def held(job: Any) -> asyncio.Future[Any]:
        if not isinstance(job, Remember):
            return call(job)
        answers.append(asyncio.get_running_loop().create_future())
        return answers[-1]

    side.prompts.call = held  # type: ignore[method-assign]
    written: list[bytes] = []

    def note() -> None:
        written.extend(record.key for each in side.sent if isinstance(each, WriteTexts) for record in each.records)
        side.sent.clear()

    def answer(i: int) -> None:
        answers[i].set_result((Session(key=b"%d" % i, tokens=b"", n_added=0, n_prompt=0, n_text=0),))

    await side.begin("a", "b", "c")
    side.receive(*(Started(name) for name in "abc"))
    side.receive(*(finished(name, Generated(b"a\0\0\0", 1)) for name in "ab"))
    await asyncio.sleep(0)
    answer(0)
    await asyncio.sleep(0.01)
    note()
    side.receive(finished("c", Generated(b"a\0\0\0", 1)))
    await asyncio.sleep(0)
    side.lose()
    answer(1)
    answer(2)
    await side.remembered()
    side.restart()
    note()
    assert written == [b"0", b"1", b"2"]


async def test_no_session_is_dropped_while_the_engine_restarts(side: Side) -> None:
    await side.begin("a", session_id="mine")
    side.receive(Started("a"), finished("a", Generated(b"a\0\0\0", 1)))
    await side.remembered()
    side.lose()
    with pytest.raises(UnavailableError):
        await side.service.drop_session("mine", "")
    side.restart()
    dropping = asyncio.create_task(side.service.drop_session("mine", ""))
    assert (await side.until_sent(DropPaths)).body.paths
    dropping.cancel()


async def test_a_session_is_dropped_everywhere_although_its_client_goes_away(side: Side) -> None:
    await side.begin("a", session_id="mine")
    side.receive(Started("a"), finished("a", Generated(b"a\0\0\0", 1)))
    await side.remembered()
    dropping = asyncio.create_task(side.service.drop_session("mine", ""))
    await asyncio.sleep(0)
    dropping.cancel()
    assert (await side.until_sent(DropPaths)).body.paths


async def test_where_a_prompt_departs_from_what_was_cached_is_told_at_the_end(side: Side) -> None:
    await side.begin("a")
    side.receive(Started("a", n_matched=3, miss="diverged"))
    await side.remembered()
    side.receive(Output("a", "x", (5,), PROGRESS), Started("a", n_matched=1, miss="diverged"), finished("a"))
    assert side.events[-1].progress.diverged_at == 2


async def test_a_reply_is_remembered_before_its_client_learns_of_its_end(side: Side) -> None:
    await side.begin("a", session_id="mine")
    order: list[str] = []
    call, put = side.prompts.call, side.lives["a"].put
    side.prompts.call = lambda job: (order.append(type(job).__name__), call(job))[1]  # type: ignore[method-assign]
    side.lives["a"].put = lambda *event: (order.append("end"), put(*event))[1]  # type: ignore[method-assign]
    side.receive(Started("a"), finished("a", Generated(b"a\0\0\0", 1)))
    assert order == ["Remember", "Release", "end"]


async def test_closing_ends_everything_once(side: Side) -> None:
    await side.begin("a", "b")
    side.receive(Started("a"))
    preparing = asyncio.create_task(begin(side.service, text_request("c", "x" * 500)))
    await asyncio.sleep(0)

    def answer(command: EngineCommand) -> None:
        assert isinstance(command, Cancel)
        asyncio.get_running_loop().call_soon(side.receive, Cancelled(command.completion_id, PROGRESS))

    side.service.connect(answer)
    await side.service.close(5)
    assert side.ends == dict.fromkeys("ab", "unavailable_error")
    with pytest.raises(UnavailableError):
        await preparing
    assert not side.service.capacity.n_in_flight


async def test_nothing_is_accepted_once_the_engine_has_stopped(side: Side) -> None:
    await side.begin("a")
    side.receive(Stopped("a bug"))
    with pytest.raises(ServerError):
        await side.begin("b")
    assert side.ends == {"a": "server_error"}


async def test_closing_ends_what_the_engine_loses_meanwhile(side: Side) -> None:
    await side.begin("a", "b")
    side.receive(Started("a"))
    closing = asyncio.ensure_future(side.service.close(5))
    await asyncio.sleep(0.02)
    side.lose(is_crash=True)
    async with asyncio.timeout(1):
        await closing
    assert side.ends == dict.fromkeys("ab", "unavailable_error")


async def test_closing_ends_what_the_engine_does_not_answer(side: Side) -> None:
    await side.begin("a")
    await side.service.close(0.05)
    assert side.ends == {"a": "unavailable_error"}


@pytest.mark.parametrize("seed", range(200 if LONG else 20))
async def test_whatever_happens_each_completion_ends_once_and_nothing_is_left(  # noqa: PLR0912, PLR0915
    side: Side, seed: int
) -> None:
    """A random walk over the states: the engine starts, ends, is lost and comes back, clients come and go."""
    chance, service = random.Random(seed), side.service
    is_lost = False
    for step in itertools.count():
        mine = [each for each in service._completions.values() if each.is_in_engine]
        choice = chance.choice(
            ("begin", "begin", "start", "output", "end", "end", "cancel", "leave", "lose", "late")
        )
        if choice == "begin" and step < 150:
            prompt, n = chance.choice(("one", "two", "bad")), chance.choice((1, 1, 3))
            beginning = asyncio.ensure_future(side.begin(f"r{step}", prompt=prompt, n=n))
            if chance.random() < 0.3:
                for _ in range(chance.randint(0, 3)):
                    await asyncio.sleep(0)
                beginning.cancel()
            try:
                await beginning
            except UnavailableError:
                assert service._suspects
            except asyncio.CancelledError:
                assert beginning.cancelled()
        elif choice == "start" and mine:
            side.receive(Started(chance.choice(mine).id))
        elif choice == "output" and mine:
            side.receive(Output(chance.choice(mine).id, "x", (1,), PROGRESS))
        elif choice == "end" and mine:
            name = chance.choice(mine).id
            side.receive(Started(name), chance.choice((finished(name), Failed(name, ServerError("no").info()))))
        elif choice == "cancel" and service._completions:
            name = chance.choice(list(service._completions))
            service.cancel(name)
            if chance.random() < 0.5:
                side.receive(Cancelled(name, PROGRESS))
        elif choice == "leave" and side.lives:
            live = side.lives[chance.choice(list(side.lives))]
            side.lives = {name: each for name, each in side.lives.items() if each is not live}
            await leave(live)
        elif choice == "late":
            side.receive(Output("r0", "x", ()), finished("r0-none"), Started("none"))
        elif choice == "lose":
            if is_lost:
                side.restart()
            else:
                side.lose(is_crash=chance.random() < 0.5)
            is_lost = not is_lost
        await asyncio.sleep(0)
        assert service.capacity.n_in_flight == len(service._completions)
        assert side.ends.keys().isdisjoint(service._completions)
        assert not any(each.state is CompletionState.DONE for each in service._completions.values())
        if step > 150 and not service._completions:
            break
    assert len(side.ends) == sum(isinstance(each, TERMINAL) for each in side.events)
    assert not service.capacity.n_of_client.each
    await side.remembered()
    await asyncio.sleep(0.01)
    assert side.prompts.n_kept == 0
