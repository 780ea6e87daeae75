"""The service over the real engine on the fake backend or, where timing matters, over its messages alone."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from llamaslot.base.backend import Decoded, Run
from llamaslot.base.commands import (
    Cancel,
    Command,
    CountTokens,
    Detokenize,
    Detokenized,
    InspectEngine,
    ProbeCache,
    Query,
    Submit,
    TextPart,
)
from llamaslot.base.errors import (
    ContextSizeError,
    ErrorInfo,
    InvalidRequestError,
    LlamaslotError,
    NotSupportedError,
    QueueFullError,
    ServerError,
    UnavailableError,
)
from llamaslot.base.events import Event, Finished, Output, Progress, Reply, Stopped
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.prompt import CountedTokens
from llamaslot.base.stats import CacheProbe, EngineState, SlotState
from llamaslot.service.generations import Generations
from llamaslot.service.metrics import Metrics
from llamaslot.service.service import Service
from tests.engine.harness import LocalEngine
from tests.fake_backend import FakeBackend

_ids = itertools.count(1)


def service_for(backend: FakeBackend, max_queue: int = 256, *, has_remote: bool = False) -> Service:
    return Service(backend.info, "", Metrics(), max_queue=max_queue, has_remote=has_remote)


@asynccontextmanager
async def running(
    backend: FakeBackend, max_queue: int = 256, *, has_remote: bool = False
) -> AsyncIterator[Service]:
    """A service whose engine runs inside the block."""
    service = service_for(backend, max_queue, has_remote=has_remote)
    engine = LocalEngine(backend, service.receive)
    service.connect(engine.send)
    task = asyncio.create_task(engine.run())
    try:
        async with asyncio.timeout(30):
            yield service
    finally:
        await engine.stop()
        await task


class Wire:
    """A service without an engine: commands collect in `sent`, and the test sends the events."""

    def __init__(self, *, n_slots: int = 2, max_queue: int = 2) -> None:
        self.service = service_for(FakeBackend(n_slots=n_slots), max_queue)
        self.sent: list[Command] = []
        self.service.connect(self.sent.append)

    def finish(self, request_id: str, *, seconds: float) -> None:
        """End a request that spent `seconds` in its slot."""
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


async def events(generations: Generations) -> AsyncIterator[Output | Finished]:
    """The events of completions; raises the error of one that failed."""
    async with generations:
        while batch := await generations.next_batch():
            for _, event in batch:
                yield event


async def result(generations: Generations) -> tuple[str, tuple[int, ...], Finished]:
    """All text, all tokens and the end of a completion."""
    tokens = [token async for event in events(generations) for token in event.tokens]
    (generation,) = generations.all
    return generation.text, tuple(tokens), generation.end


def submit(
    prompt: str = "hello", *, max_tokens: int = 4, stop: tuple[str, ...] = (), client_request_id: str = ""
) -> Submit:
    """A greedy request of one token a letter that generates all of its tokens."""
    return Submit(
        f"r{next(_ids)}",
        (TextPart(prompt),),
        add_special=False,
        sampling=Sampling(temperature=0.0, ignore_eos=True),
        max_tokens=max_tokens,
        stop=stop,
        client_request_id=client_request_id,
    )


async def samples(service: Service) -> dict[str, float]:
    """The metrics by name and labels."""
    text = (await service.exposition()).decode()
    return parsed(text)


def parsed(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items())
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


async def test_counters_are_named_as_prometheus_recommends() -> None:
    async with running(FakeBackend()) as service:
        text = (await service.exposition()).decode()
    families = {each.name: each for each in text_string_to_metric_families(text)}
    counters = [name for name, each in families.items() if each.type == "counter"]
    assert len(counters) > 20
    # The exposition adds the one suffix.
    assert not [name for name in counters if "total" in name.split("_")]
    assert not [name for name, each in families.items() if each.type != "counter" and name.endswith("_total")]


async def test_what_llama_server_counts_is_of_the_type_counter() -> None:
    async with running(FakeBackend()) as service:
        text = (await service.exposition()).decode()
    assert "# TYPE llamacpp:n_tokens_max counter\nllamacpp:n_tokens_max 0.0\n" in text
    for each in ("draft_tokens", "accepted_tokens", "drafts"):
        name = f"llamacpp:spec_decode_num_{each}_total"
        assert f"# TYPE {name} counter\n{name} 0.0\n" in text


async def test_metrics_after_known_requests() -> None:
    backend = FakeBackend(n_slots=2)
    async with running(backend) as service:
        text, _, first = await result(service.generate([submit("a" * 20, max_tokens=4)]))
        _, _, second = await result(service.generate([submit("a" * 20 + text + "b" * 6, max_tokens=6)]))
        assert (first.progress.n_cached, second.progress.n_cached) == (0, 23)
        await samples(service)  # reading must count nothing
        found = await samples(service)
    ends = [first.progress, second.progress]
    exact = {
        "llamacpp:prompt_tokens_total": 20 + 7,
        "llamacpp:prompt_tokens_cached_total": 23,
        "llamacpp:tokens_predicted_total": 4 + 6,
        "llamacpp:n_decode_total": 4 + 6,
        "llamaslot_decoded_tokens_total": 20 + 7 + 3 + 5,
        # The parser gives a counter the suffix that its name should have.
        "llamacpp:n_tokens_max_total": 35,
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
        "llamaslot_prefix_cache_offloaded_tokens_total": 0,
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


async def test_metrics_of_sharing_and_eviction() -> None:
    class Slow(FakeBackend):
        """Takes so long that the second request comes before the first one's prompt is computed."""

        def decode(self, runs: Sequence[Run]) -> Decoded:
            time.sleep(0.02)
            return super().decode(runs)

    backend = Slow(n_slots=2, n_reserved=2, n_ctx=256, n_ubatch=32)
    head = "h" * 100
    async with running(backend) as service:
        first, second = (service.generate([submit(head + tail)]) for tail in "ab")
        ends = [(await result(generation))[2].progress for generation in (first, second)]
        waited = await samples(service)
        await result(service.generate([submit("other " * 25)]))
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
        "llamaslot_prefix_cache_offloaded_tokens_total": 0,
        "llamaslot_cells_idle": 100 + 2 * 4,
        "llamaslot_sequences": 4,
        "llamaslot_sequences_used": 2,
    }
    assert {name: waited[name] for name in exact} == exact
    assert evicted["llamaslot_prefix_cache_miss_requests_total"] == 2
    assert evicted["llamaslot_prefix_cache_evicted_tokens_total"] >= 108 + 150 + 3 - 256


async def test_cells_of_running_requests_are_pinned() -> None:
    async with running(FakeBackend(n_ctx=4096)) as service:
        await result(service.generate([submit("a" * 20)]))
        endless = service.generate([submit("b" * 30, max_tokens=4000)])
        async with endless:
            await endless.next_batch()
            state = await service.ask(InspectEngine(), EngineState)
        found = parsed(service.metrics.exposition(state).decode())
    assert found["llamaslot_cells_pinned"] == state.slots[1].n_held >= 30
    assert found["llamaslot_cells_idle"] == 23
    assert found["llamaslot_cells_used"] == found["llamaslot_cells_pinned"] + 23


async def test_a_reply_keeps_the_tail_that_could_have_become_a_stop_string() -> None:
    async with running(FakeBackend()) as service:
        whole, tokens, _ = await result(service.generate([submit(max_tokens=8)]))
        assert len(whole) == 8
        stopped = service.generate([submit(max_tokens=8, stop=(whole[-3:] + "!",))])
        found = [event async for event in events(stopped)]
        assert "".join(event.content for event in found) == whole
        assert sum((event.tokens for event in found), ()) == tokens
        last = found[-1]
        assert isinstance(last, Finished)
        assert (last.content, last.reason, last.stopping_word) == (whole[-3:], "limit", "")


@pytest.mark.parametrize(("reason", "kind"), [("", UnavailableError), ("it broke", ServerError)])
async def test_queries_fail_when_the_engine_stops(reason: str, kind: type[LlamaslotError]) -> None:
    wire = Wire()
    queries = [
        asyncio.create_task(wire.service.ask(Detokenize((97,)), Detokenized)),
        asyncio.create_task(wire.service.ask(InspectEngine(), EngineState)),
    ]
    await asyncio.sleep(0)
    assert len(wire.sent) == 2
    wire.service.receive([Stopped(reason)])
    async with asyncio.timeout(5):
        replies = await asyncio.gather(*queries, return_exceptions=True)
    assert [type(reply) for reply in replies] == [kind] * 2
    with pytest.raises(kind):
        async with asyncio.timeout(5):
            await wire.service.ask(InspectEngine(), EngineState)
    with pytest.raises(kind):
        wire.service.generate([submit()])
    assert await wire.service.stopped == reason
    assert len(wire.sent) == 2


async def test_a_query_that_is_cancelled_while_its_reply_arrives_affects_no_other() -> None:
    backend = FakeBackend()
    service = service_for(backend)
    queries: list[asyncio.Task[Detokenized]] = []

    def receive(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Reply) and event.error:
                queries[0].cancel()
        service.receive(events)

    engine = LocalEngine(backend, receive)
    service.connect(engine.send)
    run = asyncio.create_task(engine.run())
    queries.append(asyncio.create_task(service.ask(Detokenize((10**6,)), Detokenized)))
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await queries[0]
        assert isinstance(await service.ask(InspectEngine(), EngineState), EngineState)
        with pytest.raises(InvalidRequestError):
            await service.ask(Detokenize((-1,)), Detokenized)
    await engine.stop()
    await run
    assert await service.stopped == ""


async def test_a_cancelled_query_is_cancelled_in_the_engine_and_its_reply_ignored() -> None:
    wire = Wire()
    query = asyncio.create_task(wire.service.ask(Detokenize((10**6,)), Detokenized))
    await asyncio.sleep(0)
    query.cancel()
    await asyncio.gather(query, return_exceptions=True)
    sent, cancelled = wire.sent
    assert isinstance(sent, Query)
    assert cancelled == Cancel(sent.request_id)
    with capture_logs() as lines:
        wire.service.receive([Reply(sent.request_id, error=ErrorInfo("invalid_request_error", "no such token"))])
    assert lines == []


async def test_a_reply_that_was_decoded_from_another_process_has_its_type() -> None:
    wire = Wire()
    state = EngineState(slots=(SlotState(0, 64, 3),), n_queued=2)
    for body in (state, msgspec.to_builtins(state)):
        query = asyncio.create_task(wire.service.ask(InspectEngine(), EngineState))
        await asyncio.sleep(0)
        wire.service.receive([Reply(wire.sent[-1].request_id, body)])
        assert await query == state


@pytest.mark.parametrize(
    "error",
    [
        QueueFullError("busy", retry_after=7),
        ContextSizeError.of(9, 5),
        NotSupportedError("no", param="x"),
        ServerError("it broke"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_query_raises_the_error_of_its_reply_whole(error: LlamaslotError) -> None:
    wire = Wire()
    query = asyncio.create_task(wire.service.ask(InspectEngine(), EngineState))
    await asyncio.sleep(0)
    wire.service.receive([Reply(wire.sent[-1].request_id, error=error.info())])
    with pytest.raises(type(error)) as raised:
        await query
    assert vars(raised.value) == vars(error)


async def test_the_capacity_is_the_slots_and_the_queue() -> None:
    wire = Wire(n_slots=2, max_queue=2)
    wire.service.check_capacity(4)
    with pytest.raises(InvalidRequestError) as never:
        wire.service.check_capacity(5)
    assert never.value.param == "n"
    for _ in range(3):
        wire.service.generate([submit()])
    wire.service.check_capacity(1)
    with pytest.raises(QueueFullError):
        wire.service.check_capacity(2)
    (last,) = wire.service.generate([submit()]).all
    with pytest.raises(QueueFullError) as refused:
        wire.service.generate([submit()])
    assert refused.value.retry_after == 1
    assert wire.service.n_in_flight == len(wire.sent) == 4
    wire.finish(last.submit.request_id, seconds=1)
    wire.service.generate([submit()])


@pytest.mark.parametrize(("query", "reply"), [(ProbeCache, CacheProbe), (CountTokens, CountedTokens)])
async def test_a_prompt_that_is_only_counted_is_limited_as_a_request_is(query: Any, reply: Any) -> None:
    wire = Wire(n_slots=1, max_queue=2)
    service = wire.service
    running = service.generate([submit()])
    counts = [asyncio.create_task(service.ask_about(query(submit()), reply)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="--max-queue "):
        await asyncio.wait_for(service.ask_about(query(submit()), reply), 5)
    with pytest.raises(QueueFullError):
        service.generate([submit()])
    counts[0].cancel()
    await asyncio.wait(counts[:1])
    assert isinstance(wire.sent[-1], Cancel), "the prompt worker need not tokenize it"
    counts[1].cancel()
    await asyncio.wait(counts)
    wire.finish(running.all[0].submit.request_id, seconds=1)
    service.check_capacity(3)
    assert not service._n_of_client


async def test_retry_after_is_the_time_that_those_in_flight_should_take() -> None:
    wire = Wire(n_slots=2, max_queue=3)

    def retry_after() -> int:
        while wire.service.n_in_flight < 5:
            wire.service.generate([submit()])
        with pytest.raises(QueueFullError) as refused:
            wire.service.generate([submit()])
        return refused.value.retry_after

    def finish(seconds: float) -> None:
        wire.service.generate([submit()])
        wire.finish(wire.sent[-1].request_id, seconds=seconds)

    finish(10)
    assert retry_after() == 25  # two and a half rounds of ten seconds
    wire.finish(next(c.request_id for c in wire.sent[1:]), seconds=20)
    assert retry_after() == 28  # the mean is 11 seconds now
    wire.finish(next(c.request_id for c in wire.sent[2:]), seconds=1000)
    assert retry_after() == 60


async def test_refused_requests_are_counted() -> None:
    wire = Wire(n_slots=1, max_queue=0)
    wire.service.generate([submit()])
    for _ in range(3):
        with pytest.raises(QueueFullError):
            wire.service.generate([submit()])
    found = parsed(wire.service.metrics.exposition(EngineState()).decode())
    assert found["llamaslot_requests_total{finish_reason=refused}"] == 3
    assert found["llamaslot_queue_seconds_count"] == 0


async def test_every_end_is_counted_by_its_reason() -> None:
    backend = FakeBackend(n_ctx=64)
    async with running(backend) as service:
        await result(service.generate([submit()]))
        text, _, _ = await result(service.generate([submit(max_tokens=3)]))
        await result(service.generate([submit(stop=(text[1],))]))
        with pytest.raises(LlamaslotError):
            await result(service.generate([submit("x" * 100)]))
        cancelled = service.generate([submit(max_tokens=50)])
        async with cancelled:
            assert await cancelled.next_batch()
        while service.n_in_flight:
            await service.ask(InspectEngine(), EngineState)
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


async def test_the_log_contains_the_id_that_the_client_gave() -> None:
    async with running(FakeBackend()) as service:
        with capture_logs() as lines:
            for client_request_id in ("mine", ""):
                await result(service.generate([submit(client_request_id=client_request_id)]))
        named, nameless = (line for line in lines if line["event"] == "request.done")
    assert (named["client_request_id"], named["finish_reason"]) == ("mine", "limit")
    assert "client_request_id" not in nameless


@pytest.mark.parametrize("has_remote", [False, True])
async def test_the_log_has_the_tokens_of_the_remote_tier_if_there_is_one(has_remote: bool) -> None:
    async with running(FakeBackend(), has_remote=has_remote) as service:
        with capture_logs() as lines:
            await result(service.generate([submit()]))
    [done] = (line for line in lines if line["event"] == "request.done")
    assert done.get("prefix_fetched_tokens") == (0 if has_remote else None)
    assert done["prefix_read_tokens"] == 0
