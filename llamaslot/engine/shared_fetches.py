"""Fetches of objects from the remote store, shared by all requests that want the same object at the same time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from llamaslot.kvcache.tiers.remote_io import Fetched, RemoteObject

_MAX_FETCHES = 2
"""Most concurrent fetches for one request: the next object is received while one is being verified."""
_MAX_ALL_FETCHES = 4
"""Most concurrent fetches for all requests, because their memory does not count against the RAM tier."""


@dataclass(frozen=True, slots=True)
class WantedObject:
    """An object, and which parts of it a request wants."""

    object: RemoteObject
    has_kv: bool = True
    has_state: bool = False


class SharedFetches:
    """Fetches objects with `fetch`, in tasks that `spawn` starts. All methods are called on one event loop."""

    def __init__(
        self,
        fetch: Callable[[WantedObject], Coroutine[Any, Any, Fetched | None]],
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        self._fetch = fetch
        self._spawn = spawn
        self._tasks: dict[WantedObject, asyncio.Task[Fetched | None]] = {}
        self._n_waiting: Counter[WantedObject] = Counter()
        """Number of requests that wait for each object, now or later."""
        self._slots = asyncio.Semaphore(_MAX_ALL_FETCHES)

    async def ordered(self, wanted: Sequence[WantedObject]) -> AsyncGenerator[Fetched | None, None]:
        """Yield each object in order once it is fetched (None if the store no longer has it); fetches two ahead.

        The caller must close the generator, so that fetches that no request waits for any more are skipped.
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
                # Shielded, because another request may want the object too when this one is cancelled.
                fetched = await asyncio.shield(tasks[i])
                ask(i + 1 + _MAX_FETCHES)
                yield fetched
        finally:
            self._n_waiting.subtract(asked)
            # Removes the counts that are zero.
            self._n_waiting = +self._n_waiting

    def _task(self, wanted: WantedObject) -> asyncio.Task[Fetched | None]:
        """Return the task that fetches an object; started now unless another request has done so."""
        self._n_waiting[wanted] += 1
        task = self._tasks.get(wanted)
        if task is None:
            self._tasks[wanted] = task = self._spawn(self._fetch_in_turn(wanted))
            task.add_done_callback(lambda _: self._tasks.pop(wanted, None))
        return task

    async def _fetch_in_turn(self, wanted: WantedObject) -> Fetched | None:
        async with self._slots:
            if not self._n_waiting[wanted]:
                # The requests that wanted it gave up waiting, and compute it.
                return None
            return await self._fetch(wanted)
