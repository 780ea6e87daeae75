"""The service over the real engine on the fake backend or, where timing matters, one that the test plays."""

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

from llamaslot.base.backend import Decoded, Draws, Run
from llamaslot.base.callers import Caller
from llamaslot.base.commands import InspectEngine, Query
from llamaslot.base.errors import (
    ContextSizeError,
    DeadlineError,
    InvalidRequestError,
    LlamaslotError,
    NotSupportedError,
    QueueFullError,
    ServerError,
    UnavailableError,
    stopped_error,
)
from llamaslot.base.events import Cancelled, Finished, Generated, Progress, Reply, Started, Stopped
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.prompt_jobs import AnswerBody
from llamaslot.base.stats import EngineState, SlotState
from llamaslot.base.tokens import WIDTH
from llamaslot.protocol.text_requests import TextRequest
from llamaslot.service.limits import ProbsLimit
from llamaslot.service.metrics import Metrics
from llamaslot.service.service import Service
from tests.engine.harness import LocalEngine
from tests.fake_backend import FakeBackend
from tests.prompt_threads import prepare_text, text_request, without_bos
from tests.service.live import Wire, begin, events, leave, result

_ids = itertools.count(1)
PROGRESS = Progress(**dict.fromkeys(Progress.__struct_fields__, 1))


@asynccontextmanager
async def running(
    backend: FakeBackend, max_queue: int = 256, *, has_remote: bool = False
) -> AsyncIterator[Service]:
    """A service whose engine runs inside the block."""
    engine = LocalEngine(backend, service={"max_queue": max_queue, "metrics": Metrics(has_remote=has_remote)})
    task = asyncio.create_task(engine.run())
    try:
        async with asyncio.timeout(30):
            yield engine.service
    finally:
        await engine.stop()
        await task


def finish(wire: Wire, completion_id: str, *, seconds: float) -> None:
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
    wire.receive(Finished(completion_id, "limit", progress))


def request(
    prompt: str = "hello", *, max_tokens: int = 4, stop: tuple[str, ...] = (), **fields: Any
) -> TextRequest:
    """A greedy request of one token a letter that generates all of its tokens."""
    return text_request(
        f"r{next(_ids)}",
        without_bos(prompt),
        sampling=Sampling(temperature=0.0, ignore_eos=True),
        max_tokens=max_tokens,
        stop=stop,
        **fields,
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


async def test_mean_rates_are_those_since_the_last_scrape() -> None:
    """As in llama-server; nothing new is no rate."""
    service = Metrics()
    progress = Progress(10, 2, 8, 5, 0.0, 100.0, 50.0)
    names = "llamacpp:prompt_tokens_seconds", "llamacpp:predicted_tokens_seconds"
    for n_requests, expected in ((0, [0, 0]), (1, [80, 100]), (0, [0, 0]), (2, [80, 100])):
        for _ in range(n_requests):
            service.record_end("eos", progress)
        found = parsed(service.exposition(EngineState()).decode())
        assert [found[name] for name in names] == expected


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
        text, _, first = await result(service, request("a" * 20, max_tokens=4))
        _, _, second = await result(service, request("a" * 20 + text + "b" * 6, max_tokens=6))
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

        def decode(self, runs: Sequence[Run], draws: Draws = ()) -> Decoded:
            time.sleep(0.02)
            return super().decode(runs, draws)

    backend = Slow(n_slots=2, n_reserved=2, n_ctx=256, n_ubatch=32)
    head = "h" * 100
    async with running(backend) as service:
        replies = await asyncio.gather(*(result(service, request(head + tail)) for tail in "ab"))
        ends = [end.progress for _, _, end in replies]
        waited = await samples(service)
        await result(service, request("other " * 25))
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
        await result(service, request("a" * 20))
        endless = await begin(service, request("b" * 30, max_tokens=4000))
        await endless.next_batch()
        state = await service.engine_state()
        await leave(endless)
        found = parsed(service.metrics.exposition(state).decode())
    assert found["llamaslot_cells_pinned"] == state.slots[1].n_held >= 30
    assert found["llamaslot_cells_idle"] == 23
    assert found["llamaslot_cells_used"] == found["llamaslot_cells_pinned"] + 23


async def test_a_reply_keeps_the_tail_that_could_have_become_a_stop_string() -> None:
    async with running(FakeBackend()) as service:
        whole, tokens, _ = await result(service, request(max_tokens=8))
        assert len(whole) == 8
        stopped = await begin(service, request(max_tokens=8, stop=(whole[-3:] + "!",)))
        found = [event async for event in events(stopped)]
        assert "".join(event.content for event in found) == whole
        assert sum((event.tokens for event in found), ()) == tokens
        last = found[-1]
        assert isinstance(last, Finished)
        assert (last.content, last.reason, last.stopping_word) == (whole[-3:], "limit", "")


async def test_the_advice_names_a_request_that_ended_in_the_step_in_which_it_started() -> None:
    wire = Wire()
    found: list[str] = []
    for day in ("2026-11-27", "2026-11-28"):
        live = await begin(wire.service, request(f"Today is {day}. " + "Be careful. " * 40))
        found.append(live.id)
        (name,) = wire.generates[-1:]
        end = Finished(name, "eos", PROGRESS, generated=Generated(bytes(WIDTH), 1))
        wire.receive(Started(name, n_matched=18, miss="diverged"), end)
        await leave(live)
    async with asyncio.timeout(5):
        while not (clients := wire.service._adviser.clients()):
            await asyncio.sleep(0.001)
    assert clients[0].places[0].last_request_id == found[1]
    await wire.close()


@pytest.mark.parametrize(("reason", "kind"), [("", UnavailableError), ("it broke", ServerError)])
async def test_queries_fail_when_the_engine_stops(reason: str, kind: type[LlamaslotError]) -> None:
    wire = Wire()
    query = asyncio.create_task(wire.service.engine_state())
    await asyncio.sleep(0)
    assert len(wire.sent) == 1
    wire.receive(Stopped(reason))
    async with asyncio.timeout(5):
        with pytest.raises(kind):
            await query
        for later in (wire.service.engine_state(), wire.service.answer(AnswerBody("tokenize", b"{}"))):
            with pytest.raises(kind):
                await later
        with pytest.raises(kind):
            await begin(wire.service, request())
    assert await wire.service.stopped == reason
    assert len(wire.sent) == 1
    await wire.close()


async def test_a_query_that_is_cancelled_while_its_reply_arrives_affects_no_other() -> None:
    wire = Wire()
    query = asyncio.create_task(wire.service.engine_state())
    await asyncio.sleep(0)
    (sent,) = wire.sent
    assert isinstance(sent, Query)
    wire.receive(Reply(sent.query_id, EngineState()))
    query.cancel()
    with capture_logs() as lines, pytest.raises(asyncio.CancelledError):
        await query
    again = asyncio.create_task(wire.service.engine_state())
    await asyncio.sleep(0)
    wire.receive(Reply(sent.query_id, EngineState()))
    assert not again.done()
    wire.receive(Reply(wire.sent[-1].query_id, EngineState(n_queued=3)))  # type: ignore[union-attr]
    assert (await again).n_queued == 3
    assert lines == []
    await wire.close()


async def test_a_reply_that_was_decoded_from_another_process_has_its_type() -> None:
    wire = Wire()
    state = EngineState(slots=(SlotState(0, 64, 3),), n_queued=2)
    for body in (state, msgspec.to_builtins(state)):
        query = asyncio.create_task(wire.service.ask(InspectEngine(), EngineState))
        await asyncio.sleep(0)
        wire.receive(Reply(wire.sent[-1].query_id, body))  # type: ignore[union-attr]
        assert await query == state
    await wire.close()


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
    query = asyncio.create_task(wire.service.engine_state())
    await asyncio.sleep(0)
    wire.receive(Reply(wire.sent[-1].query_id, error=error.info()))  # type: ignore[union-attr]
    with pytest.raises(type(error)) as raised:
        await query
    assert vars(raised.value) == vars(error)
    await wire.close()


async def test_the_capacity_is_the_slots_and_the_queue() -> None:
    wire = Wire(n_slots=2, max_queue=2)
    wire.service.capacity.check(4)
    with pytest.raises(InvalidRequestError) as never:
        await begin(wire.service, request(n=5))
    assert never.value.param == "n"
    lives = [await begin(wire.service, request()) for _ in range(3)]
    wire.service.capacity.check(1)
    with pytest.raises(QueueFullError):
        await begin(wire.service, request(n=2))
    lives.append(await begin(wire.service, request()))
    with pytest.raises(QueueFullError) as refused:
        await begin(wire.service, request())
    assert refused.value.retry_after == 1
    assert wire.service.capacity.n_in_flight == len(wire.generates) == 4
    finish(wire, lives[-1].completions[0].id, seconds=1)
    lives.append(await begin(wire.service, request()))
    await wire.close(lives)


async def test_a_full_queue_refuses_a_request_before_its_body_is_read() -> None:
    wire = Wire(n_slots=1, max_queue=0)
    live = await begin(wire.service, request())
    with pytest.raises(QueueFullError):
        async with wire.service.open(Caller()):
            raise AssertionError("the body would be read")
    await wire.close([live])


async def test_a_request_that_is_being_prepared_counts_as_one_of_its_client() -> None:
    wire = Wire(n_slots=1, max_queue=10, max_queue_per_client=1)
    service = wire.service
    first = await begin(service, request(client="mine"))
    async with service.open(Caller("mine")) as preparing:
        await service.prepare(preparing, prepare_text(request(client="mine")))
        assert service.capacity.n_in_flight == 2
        with pytest.raises(QueueFullError, match=r"from this client.*--max-queue-per-client"):
            await begin(service, request(client="mine"))
        others = await begin(service, request(client="other"))
        with pytest.raises(QueueFullError, match="from this client"):
            # Its body says that it is another's, who has too many.
            preparing.reserve(2, "other")
        assert service.capacity.n_in_flight == 3
    assert (service.capacity.n_in_flight, service.capacity.n_of_client.each) == (2, {"mine": 1, "other": 1})
    for live in (first, others):
        await leave(live)
        wire.receive(Cancelled(live.completions[0].id))
    assert not service.capacity.n_in_flight
    assert not service.capacity.n_of_client.each
    await wire.close()


async def test_a_prompt_that_is_only_counted_is_limited_as_a_request_is() -> None:
    wire = Wire(n_slots=1, max_queue=10, max_queue_per_client=1)
    service = wire.service
    lives = [await begin(service, request(client="mine")) for _ in range(2)]
    job = msgspec.structs.replace(prepare_text(request(client="mine")), purpose="inspect")
    with pytest.raises(QueueFullError, match="--max-queue-per-client"):
        async with service.open(Caller()) as live:
            # Only its body says whose it is.
            await service.prepare(live, job)
    assert service.capacity.n_in_flight == 2
    await wire.close(lives)


async def test_a_prepared_request_that_does_not_start_gives_all_of_its_places_back() -> None:
    wire = Wire(n_slots=1, max_queue=3)
    service = wire.service
    async with service.open(Caller("mine")) as live:
        await service.prepare(live, prepare_text(request(n=3)))
        assert service.capacity.n_in_flight == 3
    assert not service.capacity.n_in_flight
    with pytest.raises(InvalidRequestError, match="--max-reply-probs"):
        await begin(service, request(n=3, prompt_probs=0), probs=ProbsLimit(1, ["n"]))
    with pytest.raises(InvalidRequestError, match="--max-queue"):
        await begin(service, request(n=5))
    assert (service.capacity.n_in_flight, service.capacity.n_of_client.each) == (0, {})
    await wire.close()


@pytest.mark.parametrize("n", [1, 2])
async def test_a_request_that_is_being_prepared_when_the_server_drains_is_served(n: int) -> None:
    wire = Wire()
    begin_jobs = wire.prompts._begin_jobs
    wire.prompts._begin_jobs = lambda: None  # type: ignore[method-assign]
    preparing = asyncio.create_task(begin(wire.service, request(n=n)))
    await asyncio.sleep(0)
    assert wire.service.capacity.n_in_flight == 1
    wire.service.capacity.refusal = stopped_error("")
    with pytest.raises(UnavailableError):
        await begin(wire.service, request())
    wire.prompts._begin_jobs = begin_jobs  # type: ignore[method-assign]
    begin_jobs()
    live = await asyncio.wait_for(preparing, 5)
    assert wire.service.capacity.n_in_flight == len(wire.generates) == n
    await wire.close([live])


@pytest.mark.parametrize("is_closing", [True, False])
async def test_a_request_whose_prompts_are_ready_as_the_server_stops_is_not_started(is_closing: bool) -> None:
    wire = Wire()
    async with wire.service.open(Caller()) as live:
        await wire.service.prepare(live, prepare_text(request()))
        if is_closing:
            await wire.service.close(0)
        else:
            wire.receive(Stopped(""))
        with pytest.raises(UnavailableError):
            wire.service.start(live)
    assert (wire.service.capacity.n_in_flight, wire.sent) == (0, [])
    await wire.close()


async def test_a_request_that_is_prepared_for_too_long_ends_at_its_deadline() -> None:
    wire = Wire(request_timeout=0.05)
    begin_jobs = wire.prompts._begin_jobs
    wire.prompts._begin_jobs = lambda: None  # type: ignore[method-assign]
    with capture_logs() as lines, pytest.raises(DeadlineError):
        async with wire.service.open(Caller()) as live, wire.service.until_deadline(live):
            await wire.service.prepare(live, prepare_text(request()))
    (line,) = lines
    assert (line["finish_reason"], line["type"]) == ("error", "timeout_error")
    assert not wire.service.capacity.n_in_flight
    wire.prompts._begin_jobs = begin_jobs  # type: ignore[method-assign]
    await wire.close()


async def test_a_client_that_goes_while_its_body_is_prepared_leaves_nothing() -> None:
    wire = Wire()
    service, entered = wire.service, asyncio.Event()

    async def handle() -> None:
        async with service.open(Caller("mine")) as live:
            entered.set()
            await service.prepare(live, prepare_text(request("x" * 500)))
            raise AssertionError("it was cancelled before")

    handler = asyncio.create_task(handle())
    await entered.wait()
    await asyncio.sleep(0)
    handler.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handler
    async with asyncio.timeout(5):
        while wire.prompts.n_kept or wire.prompts.lanes.running:
            await asyncio.sleep(0.001)
    assert (service.capacity.n_in_flight, service.capacity.n_of_client.each, wire.sent) == (0, {}, [])
    await wire.close()


async def test_a_request_ends_at_its_deadline_once_the_engine_has_freed_its_slot() -> None:
    wire = Wire(request_timeout=0.05)
    live = await begin(wire.service, request())
    (completion,) = live.completions
    async with asyncio.timeout(5):
        while len(wire.sent) < 2:
            await asyncio.sleep(0.005)
    with capture_logs() as lines:
        wire.receive(Cancelled(completion.id))
    with pytest.raises(DeadlineError, match="--request-timeout"):
        await live.next_batch()
    (line,) = lines
    assert (line["finish_reason"], line["type"]) == ("error", "timeout_error")
    await wire.close([live])


async def test_retry_after_is_the_time_that_those_in_flight_should_take() -> None:
    wire = Wire(n_slots=2, max_queue=3)

    async def retry_after() -> int:
        while wire.service.capacity.n_in_flight < 5:
            await begin(wire.service, request())
        with pytest.raises(QueueFullError) as refused:
            await begin(wire.service, request())
        return refused.value.retry_after

    live = await begin(wire.service, request())
    finish(wire, live.completions[0].id, seconds=10)
    assert await retry_after() == 25  # two and a half rounds of ten seconds
    finish(wire, wire.generates[1], seconds=20)
    assert await retry_after() == 28  # the mean is 11 seconds now
    finish(wire, wire.generates[2], seconds=1000)
    assert await retry_after() == 60
    await wire.close()


async def test_refused_requests_are_counted() -> None:
    wire = Wire(n_slots=1, max_queue=0)
    live = await begin(wire.service, request())
    for _ in range(3):
        with pytest.raises(QueueFullError):
            await begin(wire.service, request())
    found = parsed(wire.service.metrics.exposition(EngineState()).decode())
    assert found["llamaslot_requests_total{finish_reason=refused}"] == 3
    assert found["llamaslot_queue_seconds_count"] == 0
    await wire.close([live])


async def test_every_end_is_counted_by_its_reason() -> None:
    backend = FakeBackend(n_ctx=64)
    async with running(backend) as service:
        await result(service, request())
        text, _, _ = await result(service, request(max_tokens=3))
        await result(service, request(stop=(text[1],)))
        for bad in ("x" * 100, ""):
            with pytest.raises(LlamaslotError):
                await result(service, request(bad))
        cancelled = await begin(service, request(max_tokens=50))
        assert await cancelled.next_batch()
        await leave(cancelled)
        while service.capacity.n_in_flight:
            await service.engine_state()
        found = await samples(service)
    name = "llamaslot_requests_total"
    counts = {key.removeprefix(name): value for key, value in found.items() if key.startswith(name)}
    assert counts == {
        "{finish_reason=limit}": 2,
        "{finish_reason=word}": 1,
        "{finish_reason=error}": 2,
        "{finish_reason=cancelled}": 1,
    }
    assert found["llamaslot_request_seconds_count"] == 4


async def test_the_log_contains_the_id_that_the_client_gave() -> None:
    async with running(FakeBackend()) as service:
        with capture_logs() as lines:
            for client_request_id in ("mine", ""):
                await result(service, request(), client_request_id=client_request_id)
        named, nameless = (line for line in lines if line["event"] == "request.done")
    assert (named["client_request_id"], named["finish_reason"]) == ("mine", "limit")
    assert "client_request_id" not in nameless


@pytest.mark.parametrize("has_remote", [False, True])
async def test_the_log_has_the_tokens_of_the_remote_tier_if_there_is_one(has_remote: bool) -> None:
    async with running(FakeBackend(), has_remote=has_remote) as service:
        with capture_logs() as lines:
            await result(service, request())
    [done] = (line for line in lines if line["event"] == "request.done")
    assert done.get("prefix_fetched_tokens") == (0 if has_remote else None)
    assert done["prefix_read_tokens"] == 0
