"""Sessions through the engine: what is reused, why no more is, and what stays when one is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from llamaslot.backend.disk import DiskStore
from llamaslot.base.commands import CacheCleared, ClearCache, PromptPart, TextPart
from llamaslot.base.errors import ErrorInfo
from llamaslot.base.events import Cancelled, Finished, Output, Progress
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.prompt_jobs import DropSession
from llamaslot.kvcache.tiers import pacing
from tests.engine.harness import Harness, running
from tests.fake_backend import FakeBackend
from tests.prompt_threads import text_request, without_bos

SYSTEM = "You are a helpful assistant who answers at length. " * 4
ENDLESS = Sampling(temperature=0.0, ignore_eos=True)
HELLO = "Hello, this is the first message of a conversation. " * 3


@pytest.fixture
async def engine() -> AsyncIterator[Harness]:
    async with running(FakeBackend(n_slots=2, n_ctx=4096, n_reserved=6)) as harness:
        yield harness


async def ask(engine: Harness, prompt: str | Sequence[PromptPart], **fields: object) -> Progress:
    end = await engine.submit(f"{len(engine.ends)}", prompt, **({"session_id": "mine", "max_tokens": 6} | fields))
    assert isinstance(end, Finished)
    return end.progress


async def drop(engine: Harness, session_id: str = "mine", salt: str = "") -> CacheCleared:
    answer = await engine.ask(DropSession(session_id, salt))
    assert isinstance(answer, CacheCleared)
    return answer


async def is_unknown(engine: Harness, session_id: str, salt: str) -> bool:
    answer = await engine.ask(DropSession(session_id, salt))
    return isinstance(answer, ErrorInfo) and answer.type == "not_found_error"


def last_text(engine: Harness) -> str:
    return engine.text(f"{len(engine.ends) - 1}")


async def test_each_turn_of_a_session_keeps_its_tokens(engine: Harness) -> None:
    first = await ask(engine, HELLO)
    assert (first.session_match, first.n_cached, first.miss) == ("new", 0, "cold")
    text = HELLO + last_text(engine)
    second = await ask(engine, text + "</s> And then?")
    assert (second.session_match, second.miss) == ("extend", "")
    assert second.n_prompt_computed == second.n_prompt - second.n_cached
    assert second.n_cached >= len(text)
    again = await ask(engine, text + "</s> And then?" + last_text(engine))
    assert (again.session_match, again.n_prompt_computed) == ("exact", 1)


async def test_requests_without_a_session_report_no_match(engine: Harness) -> None:
    assert (await ask(engine, HELLO, session_id="")).session_match == ""


async def test_the_reason_of_a_miss(engine: Harness) -> None:
    assert (await ask(engine, SYSTEM + "One.", session_id="")).miss == "cold"
    other = await ask(engine, SYSTEM + "Two.", session_id="", max_tokens=12)
    assert (other.miss, other.diverged_at) == ("diverged", len(SYSTEM))
    assert (await ask(engine, SYSTEM + "One.", session_id="", cache_salt="s")).miss == "salted"
    assert (await ask(engine, SYSTEM + "One.", session_id="", cache_prompt=False)).miss == "off"
    assert (await ask(engine, SYSTEM + "One.", session_id="")).miss == ""


async def test_a_reply_that_comes_back_edited_is_a_miss_by_change(engine: Harness) -> None:
    await ask(engine, SYSTEM, max_tokens=40)
    reply = last_text(engine)
    changed = await ask(engine, SYSTEM + reply[:3] + "#" + reply[4:] + "</s>", max_tokens=12)
    assert (changed.session_match, changed.miss) == ("tokens", "changed")
    assert changed.diverged_at == len(SYSTEM) + 3


async def test_an_evicted_prefix_is_a_miss_by_eviction() -> None:
    async with running(FakeBackend(n_slots=1, n_ctx=600, n_reserved=2)) as engine:
        assert (await ask(engine, SYSTEM + "One.")).miss == "cold"
        await ask(engine, "x" * 500, session_id="")
        again = await ask(engine, SYSTEM + "One.")
        assert (again.miss, again.session_match) == ("evicted", "tokens")


async def test_a_model_whose_kv_cannot_be_trimmed_reports_unsupported() -> None:
    async with running(FakeBackend(n_slots=1, can_trim=False)) as engine:
        await ask(engine, HELLO)
        again = await ask(engine, HELLO)
        assert (again.miss, again.n_cached) == ("unsupported", 0)


async def test_dropping_a_session_drops_what_only_it_uses(engine: Harness) -> None:
    await ask(engine, SYSTEM + "One, and more of it.", session_id="one")
    await ask(engine, SYSTEM + "Two.", session_id="two")
    before = engine.engine.scheduler.cache._tree.n_tokens
    answer = await drop(engine, "one")
    assert answer.cleared_tokens == before - engine.engine.scheduler.cache._tree.n_tokens
    assert len("One, and more of it.") <= answer.cleared_tokens < len(SYSTEM)
    again = await ask(engine, SYSTEM + "One, and more of it.", session_id="one")
    assert again.session_match == "new"
    assert again.n_cached == len("<" + SYSTEM)
    assert (await ask(engine, SYSTEM + "Two.", session_id="")).n_prompt_computed == 1


async def test_dropping_a_session_drops_tokens_that_were_not_sent(engine: Harness) -> None:
    await ask(engine, SYSTEM + "Two.", session_id="two")
    n_before = engine.engine.scheduler.cache._tree.n_tokens
    await ask(engine, SYSTEM + "One.", session_id="one", max_tokens=40, sampling=ENDLESS)
    word = last_text(engine)[10:20]
    await drop(engine, "one")
    end = await engine.submit(
        "stopped", SYSTEM + "One.", session_id="one", max_tokens=40, sampling=ENDLESS, stop=(word,)
    )
    assert isinstance(end, Finished)
    assert end.reason == "word"
    assert (await drop(engine, "one")).cleared_tokens > 0
    assert engine.engine.scheduler.cache._tree.n_tokens == n_before


async def test_dropping_a_session_drops_its_earlier_replies(engine: Harness) -> None:
    """A regenerated reply and an edited one branch off the session's last sequence."""
    empty = engine.engine.scheduler.cache._tree.n_tokens
    await ask(engine, SYSTEM, session_id="one", sampling=ENDLESS, max_tokens=20)
    reply = last_text(engine)
    await ask(engine, SYSTEM + reply[:5] + "another end</s>", session_id="one", max_tokens=9, sampling=ENDLESS)
    await ask(engine, SYSTEM + "Something else", session_id="one", max_tokens=9, sampling=ENDLESS)
    answer = await drop(engine, "one")
    assert engine.engine.scheduler.cache._tree.n_tokens == empty
    assert answer.cleared_tokens > len(SYSTEM)


@pytest.mark.parametrize("n_ctx", [840, 860, 880])
async def test_dropping_a_session_keeps_what_others_have_in_another_tier(n_ctx: int) -> None:
    """Tokens after the shared prompt are in RAM only for one session, and in the pool for the other, or both."""
    async with running(FakeBackend(n_slots=2, n_ctx=n_ctx, n_reserved=6), ram_bytes=10**6) as engine:
        texts = {"a": SYSTEM + "a" * 100, "b": SYSTEM + "b" * 200}
        for name in ("b", "a"):
            await ask(engine, texts[name], session_id=name, max_tokens=1)
        for _ in range(2):
            await ask(engine, "z" * 550, session_id="", max_tokens=1)
        before = n_cached(engine, texts)
        await drop(engine, "a")
        assert n_cached(engine, texts)["b"] == before["b"]
        assert n_cached(engine, texts)["a"] < before["a"]
        await drop(engine, "b")
        assert n_cached(engine, texts) == {"a": 1, "b": 1} or n_cached(engine, texts) == {"a": 0, "b": 0}


async def test_a_choice_that_shares_its_only_token_reports_no_miss(engine: Harness) -> None:
    params = text_request("one", (TextPart(HELLO),), sampling=ENDLESS, max_tokens=1, n=2)
    ends = [await end for end in engine.submit_all(params)]
    assert [end.progress.miss for end in ends if isinstance(end, Finished)] == ["cold", ""]


async def test_prompts_with_and_without_added_tokens_do_not_match(engine: Harness) -> None:
    await ask(engine, HELLO)
    text = HELLO + last_text(engine)
    again = await ask(engine, without_bos(text))
    assert (again.session_match, again.n_prompt) == ("tokens", len(text))


async def test_dropping_a_session_keeps_a_prefix_of_another_request(engine: Harness) -> None:
    await ask(engine, SYSTEM, session_id="", max_tokens=0, id_slot=0)
    await ask(engine, SYSTEM + "One.", session_id="one", id_slot=1)
    await drop(engine, "one")
    assert n_cached(engine, {"": SYSTEM + "One."}) == {"": len("<" + SYSTEM)}


async def test_a_longer_segment_of_the_same_text_is_no_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its last segment too little is wanted to be worth reading."""
    # At the start nothing is read, or the segment may be in RAM already.
    monkeypatch.setattr(pacing, "N_TRUSTED_READS", 0)
    text = "".join(chr(97 + i * i % 26) for i in range(640))
    async with served(tmp_path) as engine:
        await ask(engine, text, session_id="")
    async with served(tmp_path) as engine:
        again = await ask(engine, text[:518], session_id="")
        assert 500 < again.n_cached < 517
        assert again.miss == ""


async def test_dropping_an_unknown_session_drops_nothing(engine: Harness) -> None:
    await ask(engine, HELLO, cache_salt="s")
    for session_id, salt in (("yours", ""), ("mine", ""), ("mine", "t")):
        assert await is_unknown(engine, session_id, salt)
    assert (await drop(engine, "mine", "s")).cleared_tokens
    assert await is_unknown(engine, "mine", "s")


async def test_a_session_can_be_dropped_while_it_runs(engine: Harness) -> None:
    await ask(engine, HELLO)
    text = HELLO + last_text(engine) + " and"
    end = engine.submit("running", text, session_id="mine", max_tokens=-1, sampling=ENDLESS)
    await engine.wait_for("running", Output, 3)
    await drop(engine)
    engine.cancel("running")
    assert isinstance(await end, Cancelled)
    assert (await ask(engine, text + engine.text("running"))).session_match == "exact", "the session began again"


async def test_a_request_cancelled_before_it_ran_leaves_the_session_unchanged() -> None:
    async with running(FakeBackend(n_slots=1, n_ctx=1024)) as engine:
        await ask(engine, HELLO)
        text = HELLO + last_text(engine)
        busy = engine.submit("busy", "x", max_tokens=-1, sampling=ENDLESS)
        await engine.wait_for("busy", Output)
        waiting = engine.submit("waiting", "Something else. " * 9, session_id="mine")
        await asyncio.sleep(0)
        engine.cancel("waiting")
        await waiting
        engine.cancel("busy")
        await busy
        assert (await ask(engine, text + "</s>")).session_match == "extend"


async def test_one_conversation_is_evicted_completely_before_another() -> None:
    """Four turns of each of two conversations, then room for a part of them is wanted, and for more."""
    async with running(FakeBackend(n_slots=2, n_ctx=1200, n_reserved=6)) as engine:
        texts = {"a": "a" * 100, "b": "b" * 100}
        for turn in range(4):
            for name, text in texts.items():
                await ask(engine, text, session_id=name)
                texts[name] = text + last_text(engine) + f"</s>{turn}{name * 20}"
        whole = n_cached(engine, texts)
        await ask(engine, "x" * 900, session_id="")
        assert n_cached(engine, texts)["a"] < whole["a"]
        assert n_cached(engine, texts)["b"] == whole["b"]
        await ask(engine, "x" * 950 + "y" * 50, session_id="")
        assert n_cached(engine, texts)["a"] < 10 < n_cached(engine, texts)["b"]


def n_cached(engine: Harness, texts: dict[str, str]) -> dict[str, int]:
    """Number of cached tokens of each text."""
    cache = engine.engine.scheduler.cache
    return {name: cache.match("", packed(engine, text)).n_cached for name, text in texts.items()}


def packed(engine: Harness, text: str) -> bytes:
    tokens = engine.backend.vocab.tokenize(text, add_special=True, parse_special=True)
    return tokens.astype("<i4").tobytes()


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Harness]:
    store = DiskStore(folder)
    store.open(b"k" * 32, 10**7)
    try:
        async with running(
            FakeBackend(n_slots=2, n_ctx=1024, n_reserved=2), disk=store, ram_bytes=10**6
        ) as harness:
            yield harness
    finally:
        store.close()


async def test_sessions_survive_a_restart_but_not_their_end(tmp_path: Path) -> None:
    async with served(tmp_path) as engine:
        await ask(engine, HELLO)
        text = HELLO + last_text(engine)
    async with served(tmp_path) as engine:
        again = await ask(engine, text + "</s>more", max_tokens=1)
        assert (again.session_match, again.n_read > 0) == ("extend", True)
        answer = await drop(engine)
        assert answer.cleared_disk_tokens > len(HELLO) // 2
    async with served(tmp_path) as engine:
        again = await ask(engine, text + "</s>more", max_tokens=1)
        assert (again.session_match, again.n_cached) == ("new", 0)


async def test_sessions_are_cleared_with_the_cache(engine: Harness) -> None:
    await ask(engine, HELLO)
    await engine.ask(ClearCache())
    assert (await ask(engine, HELLO)).session_match == "new"
