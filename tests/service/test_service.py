"""The service over the real engine on the fake backend, or, where the moment matters, over its messages alone."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from llamaslot.backend.fake import FakeBackend
from llamaslot.base.backend import Decoded, Run
from llamaslot.base.commands import Command, Detokenize, Sampling, Submit, TextPart
from llamaslot.base.errors import InvalidRequestError, LlamaslotError, QueueFullError, ServerError, UnavailableError
from llamaslot.base.events import Accepted, Cancelled, Event, Failed, Finished, Output, Progress, Stopped
from llamaslot.base.stats import State
from llamaslot.engine.engine import Engine
from llamaslot.service.metrics import Metrics
from llamaslot.service.service import Generation, Outcome, Service, ServiceSettings
from llamaslot.text.template import ChatTemplate

_ids = itertools.count(1)


def service_for(backend: FakeBackend, max_queue: int = 256) -> Service:
    template = ChatTemplate("{{ messages }}", bos_token="<s>", eos_token="</s>")
    return Service(backend.info, template, ServiceSettings(max_queue=max_queue), Metrics())


@asynccontextmanager
async def running(backend: FakeBackend, max_queue: int = 256) -> AsyncIterator[Service]:
    """A service whose engine runs inside the block."""
    service = service_for(backend, max_queue)
    engine = Engine(backend, service.receive)
    service.connect(engine.send)
    task = asyncio.create_task(engine.run())
    try:
        async with asyncio.timeout(30):
            yield service
    finally:
        engine.stop()
        await task


class Wire:
    """A service without an engine: what it sends lies in `sent`, and the test answers."""

    def __init__(self, *, n_slots: int = 2, max_queue: int = 2) -> None:
        self.service = service_for(FakeBackend(n_slots=n_slots), max_queue)
        self.sent: list[Command] = []
        self.service.connect(self.sent.append)

    def finish(self, request_id: str, *, seconds: float) -> None:
        """Let a request end that took so long in its slot."""
        progress = Progress(
            n_prompt=10,
            n_cached=0,
            n_prompt_computed=10,
            n_generated=2,
            queue_ms=0.0,
            prompt_ms=seconds * 250,
            predicted_ms=seconds * 750,
        )
        self.service.receive([Finished(request_id, "limit", progress)])


async def outcomes(generation: Generation) -> AsyncIterator[Output | Finished]:
    """What comes of a generation; raises the error of one that failed."""
    came: asyncio.Queue[Outcome] = asyncio.Queue()
    generation.listen(came.put_nowait)
    outcome: Outcome | None = None
    while not isinstance(outcome, Finished):
        outcome = await came.get()
        if isinstance(outcome, LlamaslotError):
            raise outcome
        yield outcome


async def result(generation: Generation) -> tuple[str, tuple[int, ...], Finished]:
    """All text, all tokens and the end of a generation."""
    *_, last = events = [event async for event in outcomes(generation)]
    assert isinstance(last, Finished)
    return "".join(e.content for e in events), tuple(token for e in events for token in e.tokens), last


def submit(
    prompt: str = "hello", *, max_tokens: int = 4, stop: tuple[str, ...] = (), client_id: str = ""
) -> Submit:
    """A greedy request of one token a letter that generates all of its tokens."""
    return Submit(
        f"r{next(_ids)}",
        (TextPart(prompt),),
        add_special=False,
        sampling=Sampling(temperature=0.0, ignore_eos=True),
        max_tokens=max_tokens,
        stop=stop,
        client_id=client_id,
    )


async def samples(service: Service) -> dict[str, float]:
    """The metrics by name, with the labels that a sample has."""
    text = (await service.exposition()).decode()
    return parsed(text)


def parsed(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items())
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


async def test_metrics_after_known_requests() -> None:
    backend = FakeBackend(n_slots=2)
    async with running(backend) as service:
        text, _, first = await result(service.generate(submit("a" * 20, max_tokens=4)))
        _, _, second = await result(service.generate(submit("a" * 20 + text + "b" * 6, max_tokens=6)))
        assert (first.progress.n_cached, second.progress.n_cached) == (0, 23)
        await samples(service)  # reading must count nothing
        found = await samples(service)
    ends = [first.progress, second.progress]
    exact = {
        "llamacpp:prompt_tokens_total": 20 + 7,
        "llamacpp:prompt_tokens_cached_total": 23,
        "llamacpp:tokens_predicted_total": 4 + 6,
        "llamacpp:n_decode_total": 4 + 6,
        "llamacpp:n_tokens_max": 35,
        "llamacpp:requests_processing": 0,
        "llamacpp:requests_deferred": 0,
        "llamacpp:n_busy_slots_per_decode": 1,
        "llamaslot_requests_total{finish_reason=limit}": 2,
        "llamaslot_prompt_tokens_total": 50,
        "llamaslot_prefix_cache_tokens_total": 23,
        "llamaslot_prefix_cache_hit_rate": 23 / 50,
        "llamaslot_prefix_cache_hit_requests_total{reuse=same_slot}": 1,
        "llamaslot_prefix_cache_hit_requests_total{reuse=cross_slot}": 0,
        "llamaslot_prefix_cache_hit_requests_total{reuse=from_ram}": 0,
        "llamaslot_prefix_cache_hit_requests_total{reuse=from_disk}": 0,
        "llamaslot_prefix_cache_miss_requests_total": 1,
        "llamaslot_prefix_cache_wait_requests_total": 0,
        "llamaslot_prefix_cache_copied_tokens_total": 0,
        "llamaslot_prefix_cache_evicted_tokens_total": 0,
        "llamaslot_prefix_cache_stored_tokens_total": 0,
        "llamaslot_prefix_cache_loaded_tokens_total": 0,
        "llamaslot_ram_bytes": 0,
        "llamaslot_ram_used_bytes": 0,
        "llamaslot_ram_tokens": 0,
        "llamaslot_ram_segments": 0,
        "llamaslot_cells": 256,
        "llamaslot_cells_used": 35,
        "llamaslot_cells_idle": 35,
        "llamaslot_cells_pinned": 0,
        "llamaslot_sequences": 2,
        "llamaslot_sequences_used": 1,
        "llamaslot_queue_seconds_count": 2,
        "llamaslot_ttft_seconds_count": 2,
        "llamaslot_request_seconds_count": 2,
        "llamaslot_prefix_cache_ratio_count": 2,
        "llamaslot_prefix_cache_ratio_sum": 23 / 30,
        "llamaslot_tokens_per_second_count": 2,
    }
    assert {name: found[name] for name in exact} == pytest.approx(exact)
    timed = {
        "llamacpp:prompt_seconds_total": sum(p.prompt_ms for p in ends) / 1e3,
        "llamacpp:tokens_predicted_seconds_total": sum(p.predicted_ms for p in ends) / 1e3,
        "llamaslot_queue_seconds_sum": sum(p.queue_ms for p in ends) / 1e3,
        "llamaslot_ttft_seconds_sum": sum(p.queue_ms + p.prompt_ms for p in ends) / 1e3,
        "llamaslot_request_seconds_sum": sum(p.queue_ms + p.prompt_ms + p.predicted_ms for p in ends) / 1e3,
    }
    assert {name: found[name] for name in timed} == pytest.approx(timed)


async def test_metrics_of_what_is_shared_and_given_up() -> None:
    class Slow(FakeBackend):
        """Takes so long that the second request comes before the first one's prompt is computed."""

        def decode(self, runs: Sequence[Run]) -> Decoded:
            time.sleep(0.02)
            return super().decode(runs)

    backend = Slow(n_slots=2, n_reserved=2, n_ctx=256, n_ubatch=32)
    head = "h" * 100
    async with running(backend) as service:
        first, second = (service.generate(submit(head + tail)) for tail in "ab")
        ends = [(await result(generation))[2].progress for generation in (first, second)]
        waited = await samples(service)
        await result(service.generate(submit("other " * 25)))
        evicted = await samples(service)
        assert evicted["llamaslot_cells_used"] == backend.cells_used
    assert [(p.n_cached, p.n_copied) for p in ends] == [(0, 0), (100, 100)]
    exact = {
        "llamaslot_prefix_cache_hit_requests_total{reuse=same_slot}": 0,
        "llamaslot_prefix_cache_hit_requests_total{reuse=cross_slot}": 1,
        "llamaslot_prefix_cache_miss_requests_total": 1,
        "llamaslot_prefix_cache_wait_requests_total": 1,
        "llamaslot_prefix_cache_copied_tokens_total": 100,
        "llamaslot_prefix_cache_evicted_tokens_total": 0,
        "llamaslot_prefix_cache_stored_tokens_total": 0,
        "llamaslot_cells_idle": 100 + 2 * 4,
        "llamaslot_sequences": 4,
        "llamaslot_sequences_used": 2,
    }
    assert {name: waited[name] for name in exact} == exact
    assert evicted["llamaslot_prefix_cache_miss_requests_total"] == 2
    assert evicted["llamaslot_prefix_cache_evicted_tokens_total"] >= 108 + 150 + 3 - 256


async def test_cells_of_what_runs_are_pinned() -> None:
    async with running(FakeBackend(n_ctx=4096)) as service:
        await result(service.generate(submit("a" * 20)))
        endless = service.generate(submit("b" * 30, max_tokens=4000))
        async for _ in outcomes(endless):
            break
        state = await service.state()
        found = parsed(service.metrics.exposition(state).decode())
        endless.cancel()
    assert found["llamaslot_cells_pinned"] == state.slots[1].n_held >= 30
    assert found["llamaslot_cells_idle"] == 23
    assert found["llamaslot_cells_used"] == found["llamaslot_cells_pinned"] + 23


async def test_a_reply_keeps_the_tail_that_could_have_become_a_stop_string() -> None:
    async with running(FakeBackend()) as service:
        whole, tokens, _ = await result(service.generate(submit(max_tokens=8)))
        assert len(whole) == 8
        events = [
            event async for event in outcomes(service.generate(submit(max_tokens=8, stop=(whole[-3:] + "!",))))
        ]
        assert "".join(event.content for event in events) == whole
        assert sum((event.tokens for event in events), ()) == tokens
        last = events[-1]
        assert isinstance(last, Finished)
        assert (last.content, last.reason, last.stopping_word) == (whole[-3:], "limit", "")


@pytest.mark.parametrize(("reason", "kind"), [("", UnavailableError), ("it broke", ServerError)])
async def test_questions_fail_when_the_engine_stops(reason: str, kind: type[LlamaslotError]) -> None:
    wire = Wire()
    questions = [
        asyncio.create_task(question)
        for question in (
            wire.service.tokenize((TextPart("a"),), add_special=False),
            wire.service.detokenize((97,)),
            wire.service.state(),
            wire.service.cache(top=1),
            wire.service.clear_cache(),
        )
    ]
    await asyncio.sleep(0)
    assert len(wire.sent) == 5
    wire.service.receive([Stopped(reason)])
    async with asyncio.timeout(5):
        answers = await asyncio.gather(*questions, return_exceptions=True)
    assert [type(answer) for answer in answers] == [kind] * 5
    with pytest.raises(kind):
        async with asyncio.timeout(5):
            await wire.service.state()
    with pytest.raises(kind):
        wire.service.generate(submit())
    assert await wire.service.stopped == reason
    assert len(wire.sent) == 5


async def test_a_question_cancelled_in_the_turn_of_its_answer_harms_nobody() -> None:
    backend = FakeBackend()
    service = service_for(backend)
    questions: list[asyncio.Task[str]] = []

    def receive(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Failed):
                questions[0].cancel()
        service.receive(events)

    engine = Engine(backend, receive)
    service.connect(engine.send)
    run = asyncio.create_task(engine.run())
    questions.append(asyncio.create_task(service.detokenize((10**6,))))
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await questions[0]
        assert isinstance(await service.state(), State)
        with pytest.raises(InvalidRequestError):
            await service.detokenize((-1,))
    engine.stop()
    await run
    assert await service.stopped == ""


async def test_a_question_that_was_given_up_is_no_request() -> None:
    wire = Wire()
    question = asyncio.create_task(wire.service.detokenize((10**6,)))
    await asyncio.sleep(0)
    question.cancel()
    await asyncio.gather(question, return_exceptions=True)
    (asked,) = wire.sent
    assert isinstance(asked, Detokenize)
    with capture_logs() as lines:
        wire.service.receive([Failed(asked.request_id, "invalid_request_error", "no such token", "tokens")])
    assert lines == []


async def test_the_room_is_the_slots_and_the_queue() -> None:
    wire = Wire(n_slots=2, max_queue=2)
    wire.service.check_room(4)
    with pytest.raises(InvalidRequestError) as never:
        wire.service.check_room(5)
    assert never.value.param == "n"
    for _ in range(3):
        wire.service.generate(submit())
    wire.service.check_room(1)
    with pytest.raises(QueueFullError):
        wire.service.check_room(2)
    last = wire.service.generate(submit())
    with pytest.raises(QueueFullError) as refused:
        wire.service.generate(submit())
    assert refused.value.retry_after == 1
    assert wire.service.n_in_flight == len(wire.sent) == 4
    wire.finish(last.request_id, seconds=1)
    wire.service.generate(submit())


async def test_retry_after_is_the_time_that_those_in_flight_should_take() -> None:
    wire = Wire(n_slots=2, max_queue=3)

    def retry_after() -> int:
        while wire.service.n_in_flight < 5:
            wire.service.generate(submit())
        with pytest.raises(QueueFullError) as refused:
            wire.service.generate(submit())
        return refused.value.retry_after

    def finish(seconds: float) -> None:
        wire.finish(wire.service.generate(submit()).request_id, seconds=seconds)

    finish(10)
    assert retry_after() == 25  # two and a half rounds of ten seconds
    wire.finish(next(c.request_id for c in wire.sent[1:]), seconds=20)
    assert retry_after() == 28  # the mean is 11 seconds now
    wire.finish(next(c.request_id for c in wire.sent[2:]), seconds=1000)
    assert retry_after() == 60


async def test_refused_requests_are_counted() -> None:
    wire = Wire(n_slots=1, max_queue=0)
    wire.service.generate(submit())
    for _ in range(3):
        with pytest.raises(QueueFullError):
            wire.service.generate(submit())
    state = State("", (), 0, 0, 0, 0)
    found = parsed(wire.service.metrics.exposition(state).decode())
    assert found["llamaslot_requests_total{finish_reason=refused}"] == 3
    assert found["llamaslot_queue_seconds_count"] == 0


async def test_every_end_is_counted_by_its_reason() -> None:
    backend = FakeBackend(n_ctx=64)
    async with running(backend) as service:
        await result(service.generate(submit()))
        text, _, _ = await result(service.generate(submit(max_tokens=3)))
        await result(service.generate(submit(stop=(text[1],))))
        with pytest.raises(LlamaslotError):
            await result(service.generate(submit("x" * 100)))
        cancelled = service.generate(submit(max_tokens=50))
        async for event in outcomes(cancelled):
            assert isinstance(event, Output)
            cancelled.cancel()
            break
        while service.n_in_flight:
            await service.state()
        found = await samples(service)
    name = "llamaslot_requests_total"
    counts = {key.removeprefix(name): value for key, value in found.items() if key.startswith(name)}
    assert counts == {
        "{finish_reason=limit}": 2,
        "{finish_reason=word}": 1,
        "{finish_reason=error}": 1,
        "{finish_reason=cancelled}": 1,
    }
    assert found["llamaslot_request_seconds_count"] == 4


async def test_the_log_names_the_clients_own_id() -> None:
    async with running(FakeBackend()) as service:
        with capture_logs() as lines:
            named = service.generate(submit(client_id="mine"))
            await result(named)
            nameless = service.generate(submit())
            await result(nameless)
        done = {line["request_id"]: line for line in lines if line["event"] == "request.done"}
    assert done[named.request_id]["client_request_id"] == "mine"
    assert "client_request_id" not in done[nameless.request_id]
    assert done[named.request_id]["finish_reason"] == "limit"


async def test_leaving_a_generation_cancels_it_once() -> None:
    wire = Wire()
    async with wire.service.generate(submit()) as generation:
        wire.service.receive([Accepted(generation.request_id, 5)])
        await generation.accepted()
        generation.cancel()
    assert [type(command).__name__ for command in wire.sent] == ["Submit", "Cancel"]
    assert wire.service.n_in_flight == 1
    wire.service.receive([Cancelled(generation.request_id)])
    assert wire.service.n_in_flight == 0


async def test_a_listener_gets_what_came_before_and_what_comes_after_and_the_error_last() -> None:
    wire = Wire()
    generation = wire.service.generate(submit())
    name, progress = generation.request_id, Progress(**dict.fromkeys(Progress.__struct_fields__, 0))
    outputs = [Output(name, text, (), progress) for text in "ab"]
    wire.service.receive([Accepted(name, 5), outputs[0]])
    came: list[Outcome] = []
    generation.listen(came.append)
    assert came == outputs[:1]
    wire.service.receive([outputs[1], Failed(name, "server_error", "out of luck")])
    assert came[:2] == outputs
    assert isinstance(came[2], ServerError)
    assert "out of luck" in str(came[2])


async def test_a_listener_hears_of_a_cancelled_request() -> None:
    wire = Wire()
    generation = wire.service.generate(submit())
    wire.service.receive([Accepted(generation.request_id, 5)])
    assert (await generation.accepted()).n_prompt == 5
    came: list[Outcome] = []
    generation.listen(came.append)
    wire.service.receive([Cancelled(generation.request_id)])
    assert [type(outcome) for outcome in came] == [ServerError]
