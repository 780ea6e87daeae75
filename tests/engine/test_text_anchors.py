"""Text anchors through the engine: of whole and truncated replies, over a restart, until the cache is cleared.

The model's replies are bytes that are no text, so that tokenizing them again gives other tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from llamaslot.backend.disk import DiskStore
from llamaslot.base.backend import Draws
from llamaslot.base.commands import ClearCache
from llamaslot.base.events import Cancelled, Finished, Output
from llamaslot.base.prompt_jobs import DropSession
from tests.engine.harness import Harness, running
from tests.fake_backend import FakeBackend

BROKEN = "\ufffd"


class Garbled(FakeBackend):
    """Every reply is two broken characters, `ab`, and so on."""

    n_sampled = 0

    def sample(self, draws: Draws) -> list[tuple[int, ...]]:
        tokens = []
        for _ in super().sample(draws):
            tokens.append(((0x80, 0x80, ord("a"), ord("b"))[self.n_sampled % 4],))
            self.n_sampled += 1
        return tokens


@pytest.fixture
async def engine() -> AsyncIterator[Harness]:
    async with running(Garbled(n_slots=2)) as harness:
        yield harness


async def n_anchored(engine: Harness, prompt: str) -> int:
    end = await engine.submit(f"again {len(engine.ends)}", prompt, max_tokens=1)
    assert isinstance(end, Finished)
    return end.progress.n_anchored


async def test_a_whole_reply_gets_an_anchor(engine: Harness) -> None:
    await engine.submit("1", "hello", max_tokens=8)
    assert engine.text("1") == 2 * f"{BROKEN}{BROKEN}ab"
    assert await n_anchored(engine, f"hello{engine.text('1')}</s>and") == len("<hello") + 8
    assert await n_anchored(engine, f"other{engine.text('1')}</s>and") == 0


async def test_a_reply_is_anchored_up_to_its_stop_string(engine: Harness) -> None:
    end = await engine.submit("1", "hello", max_tokens=20, stop=("ab",))
    assert isinstance(end, Finished)
    assert (end.reason, engine.text("1")) == ("word", BROKEN + BROKEN)
    assert await n_anchored(engine, f"hello{BROKEN}{BROKEN}</s>and") == len("<hello") + 2
    assert await n_anchored(engine, f"hello{BROKEN}{BROKEN}ab</s>and") == 0


async def test_a_cancelled_reply_is_anchored_as_far_as_it_was_sent(engine: Harness) -> None:
    end = engine.submit("1", "hello", max_tokens=-1)
    await engine.wait_for("1", Output, 3)
    engine.cancel("1")
    assert isinstance(await end, Cancelled)
    n_tokens = len(engine.tokens("1"))
    assert n_tokens >= 3
    assert await n_anchored(engine, f"hello{engine.text('1')}</s>and") == len("<hello") + n_tokens


async def test_clearing_the_cache_drops_anchors(engine: Harness) -> None:
    await engine.submit("1", "hello", max_tokens=8)
    await engine.ask(ClearCache())
    assert await n_anchored(engine, f"hello{engine.text('1')}</s>and") == 0


@asynccontextmanager
async def served(folder: Path, **settings: bool) -> AsyncIterator[Harness]:
    store = DiskStore(folder)
    store.open(b"k" * 32, 10**7)
    try:
        async with running(
            Garbled(n_slots=2, n_ctx=1024, n_reserved=2), disk=store, ram_bytes=10**6, **settings
        ) as harness:
            yield harness
    finally:
        store.close()


async def test_anchors_survive_a_restart_until_they_are_cleared(tmp_path: Path) -> None:
    async with served(tmp_path) as engine:
        await engine.submit("1", "hello", max_tokens=8)
        second = f"hello{engine.text('1')}</s>and"
        await engine.submit("2", second, max_tokens=8)
        third = f"{second}{engine.text('2')}</s>then"
    n_known = len("<hello") + 8 + len("xand") + 8
    async with served(tmp_path, text_anchors=False) as engine:
        assert await n_anchored(engine, third) == 0
    async with served(tmp_path) as engine:
        assert await n_anchored(engine, third) == n_known
        await engine.ask(ClearCache())
    async with served(tmp_path) as engine:
        assert await n_anchored(engine, third) == 0


async def test_a_dropped_session_leaves_no_anchors_in_memory_or_on_disk(tmp_path: Path) -> None:
    later = []
    async with served(tmp_path) as engine:
        for name in ("mine", ""):
            await engine.submit(f"of {name}", f"{name} hello", max_tokens=8, session_id=name)
            later.append(f"{name} hello{engine.text(f'of {name}')}</s>and")
        n_known = [len("<mine hello") + 8, len("< hello") + 8]
        assert [await n_anchored(engine, each) for each in later] == n_known
        await engine.ask(DropSession("mine"))
        assert [await n_anchored(engine, each) for each in later] == [0, n_known[1]]
    async with served(tmp_path) as engine:
        assert [await n_anchored(engine, each) for each in later] == [0, n_known[1]]
