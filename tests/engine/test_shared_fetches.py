"""Objects come in order, are fetched once for all, and are left out once no request waits for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from llamaslot.engine.remote_worker import SharedFetches, WantedObject
from llamaslot.kvcache.tiers.remote_tier import Fetched, RemoteObject


def wanted(number: int) -> WantedObject:
    return WantedObject(RemoteObject(0, 64, bytes([number]) * 16, 10))


def result(number: int) -> Fetched:
    return Fetched(np.full(10, number, dtype=np.uint8), None)


class Store:
    """Objects that are fetched once they are released."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.released = asyncio.Event()
        self.fetches = SharedFetches(self.fetch, self.spawn)
        self.tasks: set[asyncio.Task[Any]] = set()

    async def fetch(self, each: WantedObject) -> Fetched:
        number = each.object.digest[0]
        self.asked.append(number)
        await self.released.wait()
        return result(number)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(coroutine)
        self.tasks.add(task)
        return task

    async def take(self, *numbers: int) -> list[int]:
        async with contextlib.aclosing(self.fetches.ordered([wanted(n) for n in numbers])) as objects:
            return [int(each.kv[0]) async for each in objects if each is not None and each.kv is not None]


async def run_tasks() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_objects_come_in_order_and_two_are_fetched_at_a_time() -> None:
    store = Store()
    taking = asyncio.ensure_future(store.take(3, 1, 2))
    await run_tasks()
    assert store.asked == [3, 1]
    store.released.set()
    assert await taking == [3, 1, 2]
    assert store.asked == [3, 1, 2]


async def test_requests_share_a_fetch() -> None:
    store = Store()
    taking = [asyncio.ensure_future(store.take(1, 2)) for _ in range(3)]
    await run_tasks()
    store.released.set()
    assert await asyncio.gather(*taking) == [[1, 2]] * 3
    assert store.asked == [1, 2]
    assert await store.take(1) == [1]
    assert store.asked == [1, 2, 1], "it may be another one now"


async def test_the_end_of_a_request_does_not_end_the_fetch_of_another() -> None:
    store = Store()
    first, second = (asyncio.ensure_future(store.take(1)) for _ in range(2))
    await run_tasks()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    store.released.set()
    assert await second == [1]
    assert store.asked == [1]


async def test_what_no_request_waits_for_any_more_is_left_out() -> None:
    store = Store()
    taking = [asyncio.ensure_future(store.take(2 * n, 2 * n + 1)) for n in range(4)]
    await run_tasks()
    assert len(store.asked) == 4
    for each in taking:
        each.cancel()
    await asyncio.wait(taking)
    store.released.set()
    await asyncio.wait(store.tasks)
    assert len(store.asked) == 4
    assert not store.fetches._n_waiting
