"""Invalid logits and decodes that fail: which requests fail, which KV is dropped, when the engine ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from llamaslot.backend.disk import DiskStore
from llamaslot.base.adapters import applied
from llamaslot.base.backend import NO_TOKEN, Decoded, Draws, Run, Sampler, Status
from llamaslot.base.commands import ClearCache, InspectCache, TextPart
from llamaslot.base.events import Failed, Finished, Output
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.namespaces import PUBLIC_SALT, PUBLIC_TENANT, key_salt, key_secret, salt_namespace
from llamaslot.kvcache.tiers import pacing
from tests.engine.harness import GREEDY, Harness, alone, running
from tests.fake_backend import FakeBackend, adapted
from tests.fake_pool import Cell
from tests.prompt_threads import text_request

HEAD = "You are a helpful assistant. " * 4
ENDLESS = Sampling(temperature=0.0, ignore_eos=True)


def backend_with_spares() -> FakeBackend:
    return FakeBackend(n_ctx=1024, n_reserved=6, n_ubatch=64)


async def prompt_alone(prompt: str) -> str:
    return await alone(prompt, FakeBackend(n_ctx=1024))


async def finished(harness: Harness, name: str, prompt: str) -> Finished:
    end = await harness.submit(name, prompt)
    assert isinstance(end, Finished), end
    assert harness.text(name) == await prompt_alone(prompt)
    return end


async def test_a_request_that_reused_bad_kv_is_computed_anew_and_the_bad_kv_is_dropped() -> None:
    backend = backend_with_spares()
    async with running(backend, debug_invariants=True) as harness:
        for name in "abc":
            await finished(harness, name, f"{HEAD}{name} and more")
        backend.damage(50)
        after = await finished(harness, "after", HEAD + "d and more")
        assert after.progress.n_cached == 0
        # The cause may have been in what only it reused, or further up: each request drops one node more.
        assert (await finished(harness, "again", HEAD + "e and more")).progress.n_cached == 0
        assert (await finished(harness, "good", HEAD + "f and more")).progress.n_cached >= len(HEAD)
        assert not any(cell.is_bad and cell.seqs for cell in backend.pools[0].cells)
        await harness.ask(ClearCache())
    assert harness.stopped is not None
    assert not harness.stopped.reason


async def test_a_prefix_stays_if_what_continued_it_was_bad() -> None:
    backend = backend_with_spares()
    async with running(backend, debug_invariants=True) as harness:
        for name in "abc":
            await finished(harness, name, f"{HEAD}{name} and more")
        backend.damage(len(HEAD) + 5)
        for name in "ab":
            again = await finished(harness, f"{name} again", f"{HEAD}{name} and more")
            assert again.progress.n_cached == 0, "computed anew"
            assert (await finished(harness, f"{name} after", f"{HEAD}another")).progress.n_cached >= len(HEAD)


async def test_bad_kv_in_ram_is_dropped() -> None:
    backend = FakeBackend(n_slots=2, n_ctx=512, n_ubatch=64, n_reserved=2)
    prompts = [f"{i} is where this one begins. " * 12 for i in range(3)]
    async with running(backend, debug_invariants=True, ram_bytes=10**6) as harness:
        for i, prompt in enumerate(prompts):
            await finished(harness, f"first {i}", prompt)
        assert backend.segments
        backend.bad_segments.update(backend.segments)
        for i, prompt in enumerate(prompts):
            await finished(harness, f"second {i}", prompt)
        assert not backend.bad_segments


async def test_bad_public_kv_is_dropped_once_a_tenant_finds_out() -> None:
    backend = FakeBackend(n_slots=2, n_ctx=1024, n_ubatch=64, n_reserved=2)
    salts = [key_salt(key_secret(key), "") for key in ("ann", "bob")]
    async with running(backend, debug_invariants=True, ram_bytes=10**6) as harness:
        await harness.submit("public", HEAD, cache_salt=PUBLIC_SALT, max_tokens=0)
        good = await harness.submit("good", HEAD + "1", cache_salt=key_salt(key_secret("cem"), ""))
        assert good.progress.n_cached >= len(HEAD)
        backend.bad_segments.update(backend.segments)
        for i, salt in enumerate(salts):
            end = await harness.submit(f"r{i}", HEAD + "2", cache_salt=salt)
            assert isinstance(end, Finished)
            assert end.progress.n_cached == 0
            assert harness.text(f"r{i}") == await prompt_alone(HEAD + "2")
        state = await harness.ask(InspectCache(top=1, tenants=True))
        assert {each.tenant: each.ram_bytes for each in state.tenants}[PUBLIC_TENANT] == 0


ANN, BOB = (key_salt(key_secret(key), "") for key in ("ann", "bob"))


async def public_bytes(harness: Harness) -> int:
    """Bytes of public KV in RAM."""
    state = await harness.ask(InspectCache(top=1, tenants=True))
    n_bytes: int = {each.tenant: each.ram_bytes for each in state.tenants}[PUBLIC_TENANT]
    return n_bytes


MORE = "1, and what only this tenant asks"


@pytest.mark.parametrize(
    ("place", "prompt"), [(50, HEAD + "2"), (len(HEAD) + 5, HEAD + MORE)], ids=["copy", "continuation"]
)
async def test_public_kv_stays_if_the_bad_kv_is_a_tenants_own(place: int, prompt: str) -> None:
    backend = backend_with_spares()
    async with running(backend, debug_invariants=True, ram_bytes=10**6) as harness:
        await harness.submit("public", HEAD, cache_salt=PUBLIC_SALT, max_tokens=0)
        n_bytes = await public_bytes(harness)
        assert (await harness.submit("a1", HEAD + MORE, cache_salt=ANN)).progress.n_cached >= len(HEAD)
        for cell in own_cells(harness, backend, ANN):
            cell.is_bad = cell.position == place
        assert sum(cell.is_bad for cell in backend.pools[0].cells) == 1
        again = await harness.submit("a2", prompt, cache_salt=ANN)
        assert again.progress.n_cached == 0
        assert harness.text("a2") == await prompt_alone(prompt)
        assert not any(cell.is_bad and cell.seqs for cell in backend.pools[0].cells)
        assert await public_bytes(harness) == n_bytes
        assert (await harness.submit("b", HEAD + "3", cache_salt=BOB)).progress.n_cached >= len(HEAD)


@pytest.mark.parametrize("salt", ["", "s"])
async def test_a_client_without_a_key_whose_kv_is_bad_drops_nothing_public(salt: str) -> None:
    backend = backend_with_spares()
    async with running(backend, debug_invariants=True, ram_bytes=10**6) as harness:
        await harness.submit("public", HEAD, cache_salt=PUBLIC_SALT, max_tokens=0)
        n_bytes = await public_bytes(harness)
        for name in "12":
            await harness.submit(name, HEAD + name, cache_salt=salt)
        for cell in own_cells(harness, backend, salt):
            cell.is_bad = cell.position == 50
        assert any(cell.is_bad for cell in backend.pools[0].cells)
        assert (await harness.submit("3", HEAD + "3", cache_salt=salt)).progress.n_cached == 0
        assert await public_bytes(harness) == n_bytes
        assert (await harness.submit("b", HEAD + "4", cache_salt=BOB)).progress.n_cached >= len(HEAD)


def own_cells(harness: Harness, backend: FakeBackend, salt: str) -> list[Cell]:
    """Cells of the sequences of a salt's namespace."""
    own = set(harness.engine.scheduler.cache._sequences.in_namespace(salt_namespace(salt)))
    return [cell for cell in backend.pools[0].cells if cell.seqs and cell.seqs <= own]


@pytest.mark.parametrize("n", [1, 3])
async def test_a_request_whose_own_tokens_are_bad_fails_after_one_more_attempt(n: int) -> None:
    backend = backend_with_spares()
    backend.poison = {ord("!")}
    async with running(backend) as harness:
        await finished(harness, "good", HEAD + "Hello")
        prompt = (TextPart(HEAD + "!" + "x" * 40),)
        bad = await asyncio.gather(
            *harness.submit_all(text_request("bad", prompt, sampling=GREEDY, n=n, max_tokens=8))
        )
        for end in bad:
            assert isinstance(end, Failed)
            assert "INVALID_LOGITS" in end.error.message
        assert (await finished(harness, "after", HEAD + "?")).progress.n_cached >= len(HEAD)


async def test_without_flash_attention_data_of_bad_cells_is_cleared_before_others_go_on() -> None:
    """Such as with an adapter that makes KV infinite, for its own requests alone."""
    backend = FakeBackend(n_ctx=1024, n_ubatch=64, n_adapters=1, flash_attn=False)
    adapters = applied(backend.info.adapters, [1.0])
    backend.poison = {adapted(ord("!"), adapters)}
    async with running(backend, debug_invariants=True) as harness:
        await finished(harness, "first", HEAD + "?")
        async with harness.held():
            others = {name: harness.submit(name, f"{HEAD}{name}") for name in ("a", "b")}
            bad = harness.submit("bad", HEAD + "!", adapters=adapters)
        end = await bad
        assert isinstance(end, Failed)
        assert "INVALID_LOGITS" in end.error.message
        for name, other in others.items():
            assert isinstance(await other, Finished)
            assert harness.text(name) == await prompt_alone(f"{HEAD}{name}")
        assert not backend.is_spoiled
        await finished(harness, "after", HEAD + "!")
    assert harness.stopped is not None
    assert not harness.stopped.reason


async def test_what_a_failed_step_computed_of_an_invocation_is_kept_for_its_adapter_alone() -> None:
    backend = FakeBackend(n_ctx=1024, n_ubatch=64, n_adapters=1, invocation=b"<do>")
    adapters = applied(backend.info.adapters, [1.0])
    async with running(backend) as harness:
        await finished(harness, "head", HEAD + "?")
        backend.failures.append((Status.FATAL, 2))
        async with harness.held():
            ends = [harness.submit(name, f"{HEAD}<do> {name}", adapters=adapters) for name in ("a", "b")]
        for name, end in zip("ab", ends, strict=True):
            assert isinstance(await end, Finished)
            other = await finished(harness, f"{name} alone", f"{HEAD}<do> {name}")
            assert other.progress.n_cached <= len(f"{HEAD}<do> ") + 1
            again = await harness.submit(
                f"{name} again", f"{HEAD}<do> {name}", adapters=adapters, cache_prompt=False
            )
            assert isinstance(again, Finished)
            assert harness.text(name) == harness.text(f"{name} again")
            assert harness.text(f"{name} alone") == await prompt_alone(f"{HEAD}<do> {name}")


class Damaging(FakeBackend):
    """A backend in which a cell goes bad once two requests share it."""

    has_damaged = False

    def decode(self, runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        """Damage a cell before the first batch of two requests."""
        if len(runs) > 1 and not self.has_damaged:
            self.has_damaged = True
            self.damage(30)
        return super().decode(runs, draws)


async def test_followers_that_run_on_bad_kv_are_computed_anew() -> None:
    async with running(Damaging(n_ctx=2048, n_slots=4, n_reserved=4)) as harness:
        leader = harness.submit("leader", HEAD, max_tokens=-1, sampling=ENDLESS)
        await harness.wait_for("leader", Output, count=2)
        followers = {name: harness.submit(name, f"{HEAD}{name}") for name in ("one", "two", "three")}
        assert isinstance(await leader, Failed)
        for name, end in followers.items():
            assert isinstance(await end, Finished)
            assert harness.text(name) == await prompt_alone(f"{HEAD}{name}")


class Losing(FakeBackend):
    """A backend in which one stream of a batch has no valid logits after `n_good` of its tokens."""

    lost: Sampler | None = None
    n_good = 5

    def sample(self, draws: Draws) -> list[tuple[int, ...]]:
        """Sample as ever, but for the stream that was drawn first."""
        self.lost = self.lost or draws[0][1]
        return [
            (NO_TOKEN,) if sampler is self.lost and sampler.n_drawn > self.n_good else tokens
            for (_, sampler), tokens in zip(draws, super().sample(draws), strict=True)
        ]


async def test_one_stream_of_a_batch_fails_and_the_others_go_on() -> None:
    backend = Losing(n_ctx=1024)
    async with running(backend) as harness:
        ends = [harness.submit(name, f"{name} prompt", max_tokens=60, sampling=ENDLESS) for name in "abcd"]
        first, *others = await asyncio.gather(*ends)
        assert isinstance(first, Failed)
        assert len(harness.tokens("a")) <= backend.n_good
        for name, end in zip("bcd", others, strict=True):
            assert isinstance(end, Finished)
            assert harness.text(name) == await alone(
                f"{name} prompt", FakeBackend(n_ctx=1024), max_tokens=60, sampling=ENDLESS
            )
        assert (await harness.submit("again", "a prompt")).progress.n_cached <= 1, "only the BOS token"


async def test_a_model_that_computes_nothing_more_ends_the_engine() -> None:
    backend = FakeBackend(n_slots=2)
    async with running(backend) as harness:
        await finished(harness, "good", "works")
        backend.failures.extend([(Status.FATAL, 0)] * 100)
        ends = [await harness.submit(str(i), f"{i} fails") for i in range(2)]
        assert all(isinstance(end, Failed) and "FATAL" in end.error.message for end in ends)
        assert harness.stopped is None
        assert isinstance(await harness.submit("last", "fails too"), Failed)
        async with asyncio.timeout(10):
            while harness.stopped is None:
                await asyncio.sleep(0)
    assert "could not compute 3 requests in a row" in harness.stopped.reason


async def test_failures_between_which_others_succeed_do_not_end_the_engine() -> None:
    backend = FakeBackend(n_slots=2)
    async with running(backend) as harness:
        for i in range(5):
            backend.failures.append((Status.FATAL, 0))
            assert isinstance(await harness.submit(f"bad {i}", f"{i} fails"), Failed)
            await finished(harness, f"good {i}", "works")
        backend.failures.extend([(Status.INVALID, 0)] * 5)
        for i in range(5):
            assert isinstance(await harness.submit(f"refused {i}", f"{i} is refused"), Failed)
        await finished(harness, "after", "works")


async def test_bad_kv_on_disk_is_dropped_and_what_continues_it_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bad segment also holds the beginning of another prompt: that one's segment cannot stay without it."""
    monkeypatch.setattr(pacing, "PARTIAL_DELAY_S", 0.0)
    store = DiskStore(tmp_path)
    store.open(b"k" * 32, 10**7)
    backend = FakeBackend(n_slots=1, n_ctx=512, n_reserved=2, n_ubatch=64)
    head = "p" * 100
    settings = {"disk": store, "ram_bytes": 10**6, "idle_cells": 0}
    async with running(backend, debug_invariants=True, **settings) as engine:
        tiers, disk_tier = engine.engine.scheduler.cache._tiers, engine.engine.scheduler.cache._disk
        for i, rest in enumerate(("x" * 40, "y" * 40)):
            await engine.submit(str(i), head + rest)
            async with asyncio.timeout(10):
                while len(tiers.disk) <= i or disk_tier.writing:
                    await asyncio.sleep(0.005)
        longest = max((each for each in tiers.ram if each.start == 0), key=lambda each: each.end)
        assert longest.end > len(head)
        assert longest.children
        backend.bad_segments.add(longest.number)
        end = await engine.submit("again", head + "x" * 40 + "z")
        assert isinstance(end, Finished)
        await asyncio.sleep(0.1)
        assert all(each.start == 0 or each.parent.state.uses_disk for each in tiers.disk)
        assert isinstance(await engine.submit("other", head + "y" * 40), Finished)
        assert engine.stopped is None
    store.close()
