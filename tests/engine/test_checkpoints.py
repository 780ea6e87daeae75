"""Models with a partial state under an engine: small pools, restarts, many clients."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path

import pytest

from bench import synthetic
from llamaslot.backend.disk.disk_store import DiskStore
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.events import Finished
from llamaslot.kvcache.tiers import pacing
from tests.engine.harness import Harness, running

MIB = 2**20
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon")
MAX_AGAIN = 64
"""Tokens that a turn may compute besides its new ones."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=["tiny-lfm2", "tiny-mamba", "tiny-swa"])
def shape(request: pytest.FixtureRequest) -> str:
    return request.param


def load(folder: Path, shape: str, *, n_ctx: int, n_slots: int) -> LlamaBackend:
    file = synthetic.ensure(shape, folder=folder)
    chosen = LlamaSettings(file, n_ctx=n_ctx, n_slots=n_slots, n_ubatch=128, n_threads=1, checkpoints=True)
    backend = LlamaBackend(chosen)
    # On a busy machine the self-test takes too long for the start.
    assert backend.info.self_test == "passed" or backend.run_self_test()
    assert backend.info.self_test == "passed"
    return backend


def words(draw: random.Random, n: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(n))


async def turn(engine: Harness, name: str, text: str) -> tuple[str, Finished]:
    """Ask for a reply; returns the text up to its end, and the result."""
    end = await engine.submit(name, text, max_tokens=24)
    assert isinstance(end, Finished)
    return f"{text}{engine.text(name)}<|im_end|>\n", end


def user(content: str) -> str:
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
async def test_more_conversations_than_slots_compute_their_new_tokens(folder: Path, shape: str) -> None:
    draw = random.Random(shape)
    backend = load(folder, shape, n_ctx=2048, n_slots=2)
    texts = [f"<|im_start|>system\n{words(draw, 60)}<|im_end|>\n"] * 5
    async with running(backend, checkpoint_bytes=64 * MIB, ram_bytes=64 * MIB) as engine:
        for n in range(3):
            for i, text in enumerate(texts):
                asked = text + user(f"{i} {n} {words(draw, 6)}")
                before = len(backend.vocab.tokenize(text, add_special=True, parse_special=True))
                texts[i], end = await turn(engine, f"{i}.{n}", asked)
                n_new = end.progress.n_prompt - before
                if n:
                    assert end.progress.n_prompt_computed <= n_new + MAX_AGAIN, (i, n)
        stats = engine.engine.scheduler.cache.stats()
    backend.close()
    assert stats.checkpoints.restored >= 8
    assert stats.checkpoints.used_bytes <= stats.checkpoints.total_bytes


async def test_conversations_go_on_after_a_restart(
    folder: Path, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "PARTIAL_DELAY_S", 0.0)
    draw = random.Random(shape)
    texts = [f"<|im_start|>system\n{words(draw, 60)}<|im_end|>\n"] * 3
    for n in range(3):
        store = DiskStore(tmp_path / "disk")
        store.open(b"k" * 32, 64 * MIB)
        backend = load(folder, shape, n_ctx=2048, n_slots=2)
        async with running(backend, checkpoint_bytes=64 * MIB, ram_bytes=64 * MIB, disk=store) as engine:
            for i, text in enumerate(texts):
                before = len(backend.vocab.tokenize(text, add_special=True, parse_special=True))
                texts[i], end = await turn(engine, f"{i}", text + user(f"{i} {n} {words(draw, 6)}"))
                progress = end.progress
                if n:
                    assert i or progress.n_read > 0
                    assert progress.n_prompt_computed <= progress.n_prompt - before + MAX_AGAIN, (i, n)
        backend.close()
        store.close()


@pytest.mark.slow
async def test_prompts_that_leave_a_conversation_are_cached_after_a_restart(
    folder: Path, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same prompt again, such as one that asked for a short reply, and another chat with the system prompt."""
    monkeypatch.setattr(pacing, "PARTIAL_DELAY_S", 0.0)
    draw = random.Random(shape)
    system = f"<|im_start|>system\n{words(draw, 60)}<|im_end|>\n"
    one_shot = words(draw, 100)
    text, other = system + user("alpha"), system + user("beta")
    for is_restarted in (False, True):
        store = DiskStore(tmp_path / "disk")
        store.open(b"k" * 32, 64 * MIB)
        backend = load(folder, shape, n_ctx=2048, n_slots=2)
        async with running(backend, checkpoint_bytes=64 * MIB, ram_bytes=64 * MIB, disk=store) as engine:
            if not is_restarted:
                text, _ = await turn(engine, "first", text)
                text += user("gamma")
            for name, prompt, limit in ((text, text, 20), (one_shot, one_shot, 20), ("other", other, 1)):
                if name == "other" and not is_restarted:
                    continue
                end = await engine.submit(name, prompt, max_tokens=limit)
                assert isinstance(end, Finished)
                if is_restarted:
                    assert end.progress.n_prompt_computed <= MAX_AGAIN < end.progress.n_prompt, name
        backend.close()
        store.close()


@pytest.mark.slow
async def test_eight_conversations_go_on_in_a_pool_and_ram_for_three(
    folder: Path, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has what leaves RAM, the last, partial segment of each and its checkpoint too."""
    # Each turn waits until the partial segment before it is written.
    monkeypatch.setattr(pacing, "PARTIAL_DELAY_S", 0.05)
    draw = random.Random(shape)
    backend = load(folder, shape, n_ctx=1024, n_slots=2)
    segment, checkpoint = backend.info.segment_size, backend.info.checkpoint_size
    assert segment is not None
    assert checkpoint is not None
    store = DiskStore(tmp_path / "disk")
    store.open(b"k" * 32, 64 * MIB)
    budgets = {"checkpoint_bytes": 15 * checkpoint.of(1024), "ram_bytes": 3 * segment.of(342)}
    texts = [f"<|im_start|>system\n{i} {words(draw, 60)}<|im_end|>\n" for i in range(8)]
    computed = fewest = 0
    async with running(backend, disk=store, **budgets) as engine:
        cache = engine.engine.scheduler.cache
        tiers, disk_tier, policy = cache._tiers, cache._disk, cache._policy
        for n in range(3):
            for i, text in enumerate(texts):
                before = len(backend.vocab.tokenize(text, add_special=True, parse_special=True)) if n else 0
                texts[i], end = await turn(engine, f"{i}.{n}", text + user(f"{i} {n} {words(draw, 6)}"))
                computed += end.progress.n_prompt_computed
                fewest += end.progress.n_prompt - before
                # Users take longer than this machine to offload what is idle, and than its disk.
                await asyncio.sleep(0.1)
                async with asyncio.timeout(10):
                    while (
                        tiers.busy
                        or policy._idle_work_at is not None
                        or (disk_tier.due_at or math.inf) <= engine.engine._clock()
                    ):
                        await asyncio.sleep(0.001)
        stats = engine.engine.scheduler.cache.stats()
    backend.close()
    store.close()
    assert stats.read_tokens > fewest
    assert computed <= 1.2 * fewest


@pytest.mark.slow
@pytest.mark.parametrize("n_ctx", [256, 512])
async def test_windows_of_many_sequences_share_the_cells_of_a_small_pool(folder: Path, n_ctx: int) -> None:
    """Eight windows of 32 tokens, a step and the scratch sequence need more than 256 cells."""
    draw = random.Random(n_ctx)
    backend = load(folder, "tiny-swa", n_ctx=n_ctx, n_slots=8)
    assert backend.info.state.n_window_cells == n_ctx
    async with running(backend, checkpoint_bytes=64 * MIB, ram_bytes=64 * MIB) as engine:
        for n in range(3):
            ends = [
                engine.submit(
                    f"{n}.{i}",
                    user(f"{'alpha beta ' * 10}{words(draw, draw.randint(1, 12))}"),
                    max_tokens=draw.randint(1, 60),
                )
                for i in range(16)
            ]
            assert all([isinstance(await end, Finished) for end in ends])
        stats = engine.engine.scheduler.cache.stats()
    backend.close()
    assert stats.checkpoints.restored > 0
