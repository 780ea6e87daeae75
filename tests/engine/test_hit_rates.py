"""Predicted hit rates with other sizes of RAM and disk are those that servers of these sizes have."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from llamaslot.backend.disk import DiskStore
from llamaslot.base.advice import HitCurve
from llamaslot.base.commands import InspectHitCurve
from llamaslot.base.events import Finished
from llamaslot.base.model import SegmentSize
from tests.engine.harness import running
from tests.fake_backend import FakeBackend

RAM_BYTES = 100_000
"""Of about 8,000 tokens."""
TOLERANCE = 0.03


def conversations(n_requests: int) -> list[str]:
    """Prompts of conversations that go on and end, some of them more often than others, with two system prompts."""
    chance = random.Random(7)
    starts = [f"{kind} " * 80 for kind in ("A cook.", "A clerk.")]

    def begin() -> str:
        return chance.choice(starts) + f"conversation {chance.random()}: "

    histories = [begin() for _ in range(24)]
    prompts = []
    for _ in range(n_requests):
        i = min(int(chance.expovariate(0.15)), len(histories) - 1)
        if len(histories[i]) > 1500:
            histories[i] = begin()
        histories[i] += f" {chance.random()}" * chance.randint(3, 12)
        prompts.append(histories[i])
    return prompts


async def curve_of(prompts: list[str], ram_bytes: int, **settings: Any) -> HitCurve:
    """The hit rates, measured and predicted, of a server with so much RAM.

    A second passes after each request, and everything due is written: the load of the machine changes nothing.
    """
    now = 0.0
    backend = FakeBackend(n_slots=2, n_ctx=2048, n_reserved=2, n_ubatch=1024)
    async with running(backend, ram_bytes=ram_bytes, clock=lambda: now, **settings) as engine:
        cache = engine.engine.scheduler.cache
        for i, prompt in enumerate(prompts):
            assert isinstance(await engine.submit(f"r{i}", prompt, max_tokens=1), Finished)
            while cache._disk.writing:
                await asyncio.sleep(0.001)
            now += 1.0
        curve: HitCurve = await engine.local.service.ask(InspectHitCurve(), HitCurve)
    return curve


@pytest.mark.slow
async def test_hit_rates_with_other_sizes_of_ram_are_predicted() -> None:
    prompts = conversations(100)
    sizes = RAM_BYTES // 3, 2 * (RAM_BYTES // 3), 4 * (RAM_BYTES // 3)
    curves = {size: await curve_of(prompts, size) for size in sizes}
    measured = {size: curve.hit_rate for size, curve in curves.items()}
    assert measured[sizes[-1]] - measured[sizes[0]] > 4 * TOLERANCE, "the size makes little difference"
    for size, curve in curves.items():
        assert [each.bytes for each in curve.ram if each.is_current] == [size]
        predicted = {each.bytes: each.hit_rate for each in curve.ram}
        for other in predicted.keys() & measured.keys():
            assert predicted[other] == pytest.approx(measured[other], abs=TOLERANCE), (size, other)
        assert not curve.disk


@pytest.mark.slow
async def test_hit_rates_with_other_sizes_of_the_disk_are_predicted(tmp_path: Path) -> None:
    prompts, sizes = conversations(120), (RAM_BYTES, 2 * RAM_BYTES)
    measured, curves = {}, {}
    for size in sizes:
        store = DiskStore(tmp_path / str(size))
        store.open(b"k" * 32, size)
        curves[size] = await curve_of(prompts, RAM_BYTES // 2, disk=store)
        measured[size] = curves[size].hit_rate
    for size in sizes:
        predicted = {each.bytes: each.hit_rate for each in curves[size].disk}
        (of_ram_alone,) = (each.hit_rate for each in curves[size].ram if each.is_current)
        assert measured[size] > of_ram_alone + TOLERANCE, "the disk makes little difference"
        for other in sizes:
            assert predicted[other] == pytest.approx(measured[other], abs=TOLERANCE), (size, other)


async def test_without_requests_or_sizes_of_tokens_nothing_is_predicted() -> None:
    assert await curve_of([], RAM_BYTES) == HitCurve()
    # That of a purely recurrent model has the same size after any number of tokens.
    for size in (None, SegmentSize(100, 0)):
        async with running(FakeBackend(n_slots=2, n_ctx=2048, segment_size=size)) as engine:
            for i in range(2):
                await engine.submit(f"r{i}", "hello" * 50, max_tokens=1)
            curve = await engine.local.service.ask(InspectHitCurve(), HitCurve)
        assert curve.hit_rate > 0
        assert curve.ram == curve.disk == ()
