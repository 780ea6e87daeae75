"""Fetches of objects from the remote store, each shared by all requests that want the object at the same time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from llamaslot.kvcache.remote.remote_io import Fetched, RemoteObject

_MAX_FETCHES = 2
"""Most concurrent fetches for a request: the next object is received while one is verified."""
_MAX_ALL_FETCHES = 4
"""Most concurrent fetches for all requests, since they take memory that no limit of the RAM tier counts."""


@dataclass(frozen=True, slots=True)
class WantedObject:
    """An object, and which of its fields a request wants."""

    object: RemoteObject
    has_kv: bool = True
    has_state: bool = False


class SharedFetches:
    """Fetches objects by `fetch`, as tasks that `spawn` starts. All methods are called on one event loop."""

    def __init__(
        self,
        fetch: Callable[[WantedObject], Coroutine[Any, Any, Fetched | None]],
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        self._fetch = fetch
        self._spawn = spawn
        self._tasks: dict[WantedObject, asyncio.Task[Fetched | None]] = {}
        self._n_waiting: Counter[WantedObject] = Counter()
        """Number of requests that wait for each object, or will."""
        self._slots = asyncio.Semaphore(_MAX_ALL_FETCHES)

    async def ordered(self, wanted: Sequence[WantedObject]) -> AsyncGenerator[Fetched | None, None]:
        """Yield each object once it is fetched, None for one that the store has no more, and fetch the next ones.

        Close it in any case: fetches that no request waits for any more are then left out.
        """
        asked: list[WantedObject] = []
        tasks: list[asyncio.Task[Fetched | None]] = []

        def ask(n: int) -> None:
            for each in wanted[len(asked) : n]:
                asked.append(each)
                tasks.append(self._task(each))

        try:
            ask(_MAX_FETCHES)
            for i in range(len(wanted)):
                # Another request may want it too: the end of this one does not cancel the task.
                fetched = await asyncio.shield(tasks[i])
                ask(i + 1 + _MAX_FETCHES)
                yield fetched
        finally:
            self._n_waiting.subtract(asked)
            # Without those that are zero.
            self._n_waiting = +self._n_waiting

    def _task(self, wanted: WantedObject) -> asyncio.Task[Fetched | None]:
        """Start to fetch an object, unless another request has started that."""
        self._n_waiting[wanted] += 1
        task = self._tasks.get(wanted)
        if task is None:
            self._tasks[wanted] = task = self._spawn(self._fetch_in_turn(wanted))
            task.add_done_callback(lambda _: self._tasks.pop(wanted, None))
        return task

    async def _fetch_in_turn(self, wanted: WantedObject) -> Fetched | None:
        async with self._slots:
            if not self._n_waiting[wanted]:
                # Those that wanted it were late, and are computing it.
                return None
            return await self._fetch(wanted)
