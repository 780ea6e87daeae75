"""The engine on the fake backend: reuse, admission, preemption, cancellation, failures, its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from llamaslot.base.backend import Decoded, Draws, Run, Status
from llamaslot.base.commands import InspectEngine, TextPart
from llamaslot.base.events import Cancelled, Failed, Finished, Output
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.namespaces import salt_namespace
from llamaslot.base.prompt_jobs import AnswerBody
from llamaslot.base.stats import BackendStats
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.scheduler.request import RequestState
from tests.engine.harness import GREEDY, Accepted, Harness, alone, run_ahead, running
from tests.fake_backend import FakeBackend, FakeVocab
from tests.prompt_threads import text_request, without_bos


class CountingBackend(FakeBackend):
    """Counts the calls of `decode`."""

    n_decodes = 0

    def decode(self, runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        self.n_decodes += 1
        return super().decode(runs, draws)


def finished(event: object) -> Finished:
    assert isinstance(event, Finished), event
    return event


def failed(event: object) -> Failed:
    assert isinstance(event, Failed), event
    return event


async def test_the_next_turn_pays_only_for_what_is_new() -> None:
    async with running(FakeBackend()) as engine:
        first = finished(await engine.submit("1", "hello there"))
        reply = engine.text("1")
        assert first.progress.n_cached == 0
        assert first.progress.n_prompt_computed == first.progress.n_prompt == 12
        # The last token sampled was never decoded: it is new to the second turn.
        second = finished(await engine.submit("2", f"hello there{reply} and more"))
        assert first.progress.n_held == 12 + first.progress.n_generated - 1
        assert second.progress.n_cached == first.progress.n_held
        assert second.progress.slot == first.progress.slot
        assert engine.text("2") == await alone(f"hello there{reply} and more", FakeBackend())


async def test_a_prompt_that_is_cached_whole_computes_one_token() -> None:
    async with running(FakeBackend()) as engine:
        await engine.submit("1", "the same prompt")
        again = finished(await engine.submit("2", "the same prompt"))
        assert again.progress.n_prompt_computed == 1
        assert engine.text("1") == engine.text("2")


async def test_cache_prompt_off_neither_reads_nor_feeds() -> None:
    async with running(FakeBackend()) as engine:
        await engine.submit("1", "a prompt to remember")
        private = finished(await engine.submit("2", "a prompt to remember", cache_prompt=False))
        assert private.progress.n_cached == 0
        await engine.submit("3", without_bos("one more private"), cache_prompt=False)
        after = finished(await engine.submit("4", without_bos("one more private")))
        assert after.progress.n_cached == 0
        tree = engine.engine.scheduler.cache._tree
        assert {node.namespace for node in tree.nodes()} == {salt_namespace("")}


async def test_an_empty_slot_is_taken_before_a_slot_is_cut_in_half() -> None:
    async with running(FakeBackend(n_slots=2)) as engine:
        first = finished(await engine.submit("1", "shared head, then a long tail of its own"))
        second = finished(await engine.submit("2", "shared head, but another end"))
        assert second.progress.slot != first.progress.slot
        third = finished(await engine.submit("3", "shared head, then a long tail of its own, continued"))
        assert third.progress.slot == first.progress.slot
        assert third.progress.n_cached == len("shared head, then a long tail of its own") + 1


async def test_without_any_match_the_least_recently_used_slot_goes() -> None:
    async with running(FakeBackend(n_slots=2, unified=False)) as engine:
        slots = [
            finished(await engine.submit(str(i), without_bos(chr(97 + i) * 20))).progress.slot for i in range(4)
        ]
        assert slots == [slots[0], slots[1], slots[0], slots[1]]
        assert slots[0] != slots[1]


async def test_a_pinned_request_waits_for_its_slot_and_blocks_no_other() -> None:
    async with running(FakeBackend(n_slots=2)) as engine:
        blocker = engine.submit("blocker", "long", max_tokens=60, id_slot=1, sampling=Sampling(ignore_eos=True))
        await engine.wait_for("blocker", Output)
        pinned = engine.submit("pinned", "pinned", id_slot=1)
        other = finished(await engine.submit("other", "other"))
        assert other.progress.slot == 0
        assert not pinned.done()
        assert finished(await pinned).progress.slot == 1
        assert finished(await blocker).progress.slot == 1


@pytest.mark.parametrize("unified", [True, False])
async def test_more_requests_than_slots_all_finish_with_the_text_they_give_alone(unified: bool) -> None:
    prompts = [f"prompt {i} " * (1 + i % 3) for i in range(12)]
    async with running(FakeBackend(n_slots=3, unified=unified)) as engine:
        await asyncio.gather(*(engine.submit(str(i), p) for i, p in enumerate(prompts)))
        for i, prompt in enumerate(prompts):
            assert engine.text(str(i)) == await alone(prompt, FakeBackend(unified=unified))


async def test_two_requests_that_want_60_percent_of_the_pool_each_both_finish() -> None:
    long_run = {"max_tokens": 50, "sampling": Sampling(temperature=0.0, ignore_eos=True)}
    prompts = {"old": without_bos("o" * 27), "young": without_bos("y" * 27)}
    pool = {"n_ctx": 128, "n_slots": 2}
    async with running(FakeBackend(**pool)) as engine:
        engine.backend.failures.clear()
        ends = [engine.submit(name, prompt, **long_run) for name, prompt in prompts.items()]
        old, young = (finished(e) for e in await asyncio.gather(*ends))
        assert old.progress.n_generated == young.progress.n_generated == 50
        assert old.progress.n_prompt_computed == 27
        for name, prompt in prompts.items():
            assert engine.text(name) == await alone(prompt, FakeBackend(**pool), **long_run)


async def test_the_youngest_is_preempted_and_keeps_its_sampler() -> None:
    seeded = {"max_tokens": 80, "sampling": Sampling(temperature=1.0, seed=7, ignore_eos=True)}
    backend = FakeBackend(n_ctx=128, n_slots=2)
    async with running(backend) as engine:
        await asyncio.gather(engine.submit("old", "o" * 20, **seeded), engine.submit("young", "y" * 20, **seeded))
        assert len(backend.samplers) == 2
        for name, prompt in {"old": "o" * 20, "young": "y" * 20}.items():
            assert engine.text(name) == await alone(prompt, FakeBackend(n_ctx=128, n_slots=2), **seeded)
    assert all(sampler.closed for sampler in backend.samplers)


async def test_generation_stops_at_the_end_of_the_context() -> None:
    async with running(FakeBackend(n_ctx=64, n_slots=2)) as engine:
        end = finished(await engine.submit("1", "x" * 40, max_tokens=-1, sampling=Sampling(ignore_eos=True)))
        assert (end.reason, end.truncated) == ("limit", True)
        assert end.progress.n_held == 63


async def test_zero_tokens_evaluate_the_prompt_only() -> None:
    async with running(FakeBackend()) as engine:
        end = finished(await engine.submit("1", "warm me", max_tokens=0))
        assert (end.reason, end.content, end.progress.n_generated) == ("limit", "", 0)
        assert finished(await engine.submit("2", "warm me")).progress.n_prompt_computed == 1


async def test_stop_strings_end_a_request_and_are_not_sent() -> None:
    plain = await alone("tell me", FakeBackend(), max_tokens=30)
    stop = plain[10:13]
    async with running(FakeBackend()) as engine:
        end = finished(await engine.submit("1", "tell me", max_tokens=30, stop=(stop,)))
        assert (end.reason, end.stopping_word) == ("word", stop)
        assert engine.text("1") == plain[: plain.index(stop)]


async def test_cancelling_works_queued_running_and_unknown() -> None:
    endless = {"max_tokens": -1, "sampling": Sampling(ignore_eos=True)}
    backend = CountingBackend(n_slots=1)
    async with running(backend) as engine:
        first = engine.submit("first", "one", **endless)
        await engine.wait_for("first", Output)
        queued = engine.submit("queued", "two", **endless)
        await engine.wait_for("queued", Accepted)
        engine.cancel("queued")
        assert isinstance(await queued, Cancelled)
        n_before = backend.n_decodes
        engine.cancel("first")
        cancelled = await first
        assert isinstance(cancelled, Cancelled)
        assert backend.n_decodes - n_before <= 1
        engine.cancel("first")
        engine.cancel("nobody")
        again = finished(await engine.submit("again", "one and more"))
        assert again.progress.n_cached == 4, "the slot keeps what was computed"


async def test_cancelling_before_the_prompt_is_tokenized() -> None:
    async with running(FakeBackend()) as engine:
        end = engine.submit("1", "x" * 100)
        engine.cancel("1")
        assert isinstance(await end, Cancelled)


@pytest.mark.parametrize("n_applied", [0, 1, 2, 3])
@pytest.mark.parametrize("status", [Status.FATAL, Status.INVALID, Status.NO_CELLS, Status.ABORTED])
async def test_a_failed_step_costs_no_request_anything(status: Status, n_applied: int) -> None:
    backend = FakeBackend(n_slots=3)
    prompts = ["first prompt", "second prompt", "third prompt"]
    async with running(backend) as engine:
        ends = [engine.submit(str(i), p, max_tokens=12) for i, p in enumerate(prompts)]
        await engine.wait_for("1", Output, count=3)
        backend.failures.append((status, n_applied))
        for end in await asyncio.gather(*ends):
            finished(end)
        for i, prompt in enumerate(prompts):
            assert engine.text(str(i)) == await alone(prompt, FakeBackend(n_slots=3), max_tokens=12)


async def test_the_request_at_fault_fails_alone() -> None:
    class Poisoned(FakeBackend):
        def decode(self, runs, draws=()):
            if any(ord("!") in run.tokens for run in runs):
                self.failures.append((Status.FATAL, 0))
            return super().decode(runs, draws)

    backend = Poisoned(n_slots=3)
    async with running(backend) as engine:
        ends = [engine.submit(str(i), p, max_tokens=12) for i, p in enumerate(["good", "bad!", "fine"])]
        good, bad, fine = await asyncio.gather(*ends)
        assert failed(bad).error.type == "server_error"
        finished(good)
        finished(fine)
        assert engine.text("0") == await alone("good", FakeBackend(n_slots=3), max_tokens=12)
        finished(await engine.submit("later", "works again"))
    assert all(sampler.closed for sampler in backend.samplers), "of failed steps, too"


async def test_when_the_engine_dies_every_request_ends_once() -> None:
    class Dying(FakeBackend):
        def sample(self, draws):
            if self.n_decoded > 60:
                raise RuntimeError("the device is gone")
            return super().sample(draws)

    async with running(Dying(n_slots=2)) as engine:
        ends = [engine.submit(str(i), f"request {i}", max_tokens=40) for i in range(5)]
        for end in await asyncio.gather(*ends):
            assert isinstance(end, Failed | Finished)
        assert any(isinstance(e.result(), Failed) for e in ends)
        assert engine.stopped is not None
        assert "the device is gone" in engine.stopped.reason


async def test_when_the_engine_dies_a_request_whose_text_has_ended_before_is_ended_too() -> None:
    """Steps that were on the way when a stop string was found have computed it further."""

    class Dying(CountingBackend):
        def sample(self, draws: Draws) -> list[tuple[int, ...]]:
            if self.n_decodes == 20:
                raise RuntimeError("the device is gone")
            return super().sample(draws)

    plain = await alone("tell me", FakeBackend(), max_tokens=30)
    backend = Dying()
    async with running(backend) as engine:
        run_ahead(engine, 30)
        end = finished(await engine.submit("1", "tell me", max_tokens=30, stop=(plain[10:13],)))
        assert (end.reason, end.stopping_word) == ("word", plain[10:13])
    assert engine.stopped is not None
    assert "the device is gone" in engine.stopped.reason
    (ended,) = engine.engine.scheduler.ending
    assert ended.state is RequestState.DONE
    assert all(sampler.closed for sampler in backend.samplers)


@pytest.mark.parametrize("n", [1, 3])
async def test_a_request_with_nan_logits_fails_alone_and_its_kv_is_not_reused(n: int) -> None:
    backend = FakeBackend(n_ctx=1024, n_reserved=4)
    backend.poison = {ord("!")}
    head = "You are a helpful assistant. " * 4
    async with running(backend) as harness:
        good = harness.submit("good", head + "Hello", max_tokens=60)
        await harness.wait_for("good", Output)
        bad = harness.submit_all(
            text_request("bad", (TextPart(head + "!" + "x" * 40),), sampling=GREEDY, n=n, max_tokens=8)
        )
        for end in await asyncio.gather(*bad):
            assert isinstance(end, Failed)
            assert "INVALID_LOGITS" in end.error.message
        after = await harness.submit("after", head + "?")
        assert after.progress.n_cached >= len(head), "what others computed is still there"
        assert harness.text("after") == await alone(head + "?", FakeBackend(n_ctx=1024))
        await good
        assert harness.text("good") == await alone(head + "Hello", FakeBackend(n_ctx=1024), max_tokens=60)
        (again,) = await asyncio.gather(harness.submit("again", head + "!" + "x" * 40))
        assert again.progress.n_cached <= len(head) + 1, "its own KV was not reused"


async def test_followers_of_a_request_with_nan_logits_run_themselves() -> None:
    backend = FakeBackend(n_ctx=1024, n_reserved=4, n_ubatch=16)
    backend.poison = {ord("!")}
    head = "abcdefgh " * 20
    async with running(backend) as harness:
        bad = harness.submit("bad", head + "!")
        follower = harness.submit("follower", head + "?")
        assert isinstance(await bad, Failed)
        assert isinstance(await follower, Finished)
        assert harness.text("follower") == await alone(head + "?", FakeBackend(n_ctx=1024))


async def test_stopping_fails_what_is_unfinished_as_unavailable() -> None:
    async with running(FakeBackend(n_slots=1)) as engine:
        ends = [engine.submit(str(i), "x", max_tokens=-1, sampling=Sampling(ignore_eos=True)) for i in range(3)]
        await engine.wait_for("0", Output)
        engine.engine.stop()
        assert {failed(e).error.type for e in await asyncio.gather(*ends)} == {"unavailable_error"}


async def test_an_empty_prompt_is_refused_by_name() -> None:
    async with running(FakeBackend(n_slots=4)) as engine:
        refusal = failed(await engine.send(text_request("1", without_bos(""))))
        assert (refusal.error.type, refusal.error.param) == ("invalid_request_error", "prompt")


async def test_a_prompt_longer_than_a_slot_is_refused_with_both_numbers() -> None:
    async with running(FakeBackend(n_ctx=64)) as engine:
        refusal = failed(await engine.submit("1", "x" * 63))
        assert refusal.error.type == "exceed_context_size_error"
        assert (refusal.error.n_prompt_tokens, refusal.error.n_ctx) == (64, 64)
        finished(await engine.submit("2", "x" * 62))


async def test_when_text_breaks_the_engine_every_request_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(FakeBackend()) as engine:
        monkeypatch.setattr(FakeVocab, "piece", None)
        ends = [engine.submit(str(i), "x", max_tokens=1) for i in range(3)]
        assert {failed(e).error.type for e in await asyncio.gather(*ends)} == {"server_error"}


async def test_queries_are_answered_while_a_request_runs() -> None:
    backend = FakeBackend(n_slots=2)
    backend.stats = BackendStats(n_device_sampled=1, n_sampler_changes=2, n_step_threads=3, page_locked_bytes=4)
    async with running(backend) as engine:
        end = engine.submit("1", "x", max_tokens=100, sampling=Sampling(ignore_eos=True))
        await engine.wait_for("1", Output)
        tokenized = await engine.ask(AnswerBody("tokenize", b'{"content": "ab</s>", "add_special": true}'))
        assert tokenized == b'{"tokens":[256,97,98,257]}'
        detokenized = await engine.ask(AnswerBody("detokenize", b'{"tokens": [104, 105, 257]}'))
        assert detokenized == b'{"content":"hi</s>","prompt":"hi</s>"}'
        assert (await engine.ask(AnswerBody("detokenize", b'{"tokens": [999]}'))).param == "tokens"
        state = await engine.ask(InspectEngine())
        assert [slot.request_id for slot in state.slots] == ["1", ""]
        assert state.cache.cells.used >= 2
        assert state.backend == backend.stats
        finished(await end)


async def test_models_that_cannot_be_cut_compute_every_prompt_whole() -> None:
    async with running(FakeBackend(can_trim=False)) as engine:
        await engine.submit("1", "hello there")
        second = finished(await engine.submit("2", "hello there, again", id_slot=0))
        assert second.progress.n_cached == 0
        assert engine.text("2") == await alone("hello there, again", FakeBackend(can_trim=False))


async def submit_group(engine: Harness, prompt: str, n: int, **fields: object) -> list[asyncio.Future[object]]:
    """Several completions of one prompt, sent as one command."""
    return engine.submit_all(
        text_request("r", (TextPart(prompt),), sampling=Sampling(ignore_eos=True), n=n, **fields)
    )


@pytest.mark.parametrize("cache_prompt", [True, False])
async def test_choices_are_tokenized_and_computed_once(cache_prompt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend(n_slots=2)
    tokenize, n_tokenized = FakeVocab.tokenize, 0

    def counted(vocab: FakeVocab, text: str, **options: bool) -> object:
        nonlocal n_tokenized
        n_tokenized += text == "tell me a story"
        return tokenize(vocab, text, **options)

    monkeypatch.setattr(FakeVocab, "tokenize", counted)
    async with running(backend) as engine:
        ends = await submit_group(engine, "tell me a story", 5, max_tokens=6, cache_prompt=cache_prompt)
        ends = [finished(end) for end in await asyncio.gather(*ends)]
        assert [end.progress.n_prompt_computed for end in ends] == [16, 0, 0, 0, 0]
        assert n_tokenized == 1
        assert len({engine.text(f"r-{i}") for i in range(5)}) > 1
    for i in range(5):
        async with running(FakeBackend()) as apart:
            seeded = Sampling(seed=i, ignore_eos=True)
            await apart.submit("alone", "tell me a story", max_tokens=6, sampling=seeded)
            assert engine.text(f"r-{i}") == apart.text("alone")


async def test_one_of_several_choices_can_be_cancelled_before_it_is_admitted() -> None:
    async with running(FakeBackend()) as engine:
        async with engine.held():
            ends = await submit_group(engine, "x" * 50, 3, max_tokens=4)
        engine.cancel("r-0")
        assert [type(end) for end in await asyncio.gather(*ends)] == [Cancelled, Finished, Finished]


async def test_choices_of_a_prompt_that_is_refused_all_fail() -> None:
    async with running(FakeBackend(n_ctx=64)) as engine:
        ends = await submit_group(engine, "x" * 1000, 3)
        refusals = [failed(end) for end in await asyncio.gather(*ends)]
        assert {refusal.error.type for refusal in refusals} == {"exceed_context_size_error"}


async def test_when_the_cache_breaks_every_request_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_tree: RadixTree, _seq: int) -> None:
        raise AssertionError("a bug")

    async with running(FakeBackend(n_slots=2)) as engine:
        running_on = engine.submit("running", "x", max_tokens=-1, sampling=Sampling(ignore_eos=True))
        await engine.wait_for("running", Output)
        monkeypatch.setattr(RadixTree, "pin", broken)
        ends = [running_on, *(engine.submit(str(i), "y") for i in range(3))]
        assert {failed(end).error.type for end in await asyncio.gather(*ends)} == {"server_error"}
        assert all(sampler.closed for sampler in engine.backend.samplers)


async def test_what_is_idle_is_stored_once_nothing_is_asked_for() -> None:
    backend = FakeBackend(n_slots=2, n_reserved=2)
    async with running(backend, ram_bytes=10**6, offload_after=1) as engine:
        await engine.submit("a", "a prompt that is worth keeping", max_tokens=3)
        assert not backend.segments
        async with asyncio.timeout(30):
            while not backend.segments:
                await asyncio.sleep(0.01)
        n_calls = backend.n_decoded
        await engine.submit("b", "a prompt that is worth keeping", max_tokens=3)
        assert backend.n_decoded - n_calls <= 3
