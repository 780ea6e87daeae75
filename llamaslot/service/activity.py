"""Activity: the state of slots and cache, prefixes, and each request that ends, for those who watch.

The engine is asked only while somebody watches, and once for all of them; each update is encoded once. What a
watcher has not read yet is bounded: it then misses the oldest updates, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, Literal, TypeAlias

import msgspec

from llamaslot.base.commands import InspectCache
from llamaslot.base.errors import LlamaslotError, QueueFullError, stopped_error
from llamaslot.base.stats import CachePrefix, CacheState, CacheStats, EngineState, SlotState

INTERVAL_S = 1.0
"""Time between two states."""
PREFIXES_EVERY = 3
"""States from one list of prefixes to the next: a long one takes the engine a few hundredths of a second."""
MAX_WATCHERS = 64
_MAX_UNREAD = 256
"""Updates that a watcher may have unread."""
_MAX_RECENT = 200
"""Ended requests that a new watcher is told of."""


SlotPhase: TypeAlias = Literal["idle", "loading", "prefill", "decode"]


class SlotActivity(msgspec.Struct, frozen=True):
    """Present activity of a slot, and tokens of its request."""

    id: int
    state: SlotPhase
    n_held: int
    request_id: str = ""
    n_prompt: int = 0
    n_prompt_computed: int = 0
    n_generated: int = 0

    @classmethod
    def of(cls, slot: SlotState) -> SlotActivity:
        """Return what a slot does; until it has computed something, it loads what is cached of its prompt."""
        if not slot.request_id:
            return cls(slot.id, "idle", slot.n_held)
        state: SlotPhase = "decode" if slot.n_generated else "prefill" if slot.n_prompt_computed else "loading"
        return cls(
            slot.id,
            state,
            slot.n_held,
            slot.request_id,
            slot.n_prompt,
            slot.n_prompt_computed,
            slot.n_generated,
        )


class StateUpdate(msgspec.Struct, frozen=True, tag_field="type", tag="state"):
    """The state of slots, queue and cache."""

    time: float
    """Seconds since the epoch."""
    slots: tuple[SlotActivity, ...]
    queued: int
    cache: CacheStats


class RequestUpdate(msgspec.Struct, frozen=True, tag_field="type", tag="request"):
    """A request that has ended; `fields` are those of its line in the log."""

    time: float
    request_id: str
    finish_reason: str
    fields: dict[str, Any] = {}


class PrefixesUpdate(msgspec.Struct, frozen=True, tag_field="type", tag="prefixes"):
    """The prefixes with the most hits, none before its ancestors."""

    time: float
    prefixes: tuple[CachePrefix, ...]


Update: TypeAlias = StateUpdate | PrefixesUpdate | RequestUpdate


@dataclass
class Told:
    """An update that all watchers are told of."""

    update: Update

    @cached_property
    def json(self) -> bytes:
        """The update as JSON, encoded once."""
        return msgspec.json.encode(self.update)


@dataclass(eq=False)
class _Watcher:
    asked: InspectCache | None
    """Its query for prefixes; None if it wants none."""
    queue: asyncio.Queue[Told | None] = field(default_factory=lambda: asyncio.Queue(_MAX_UNREAD))
    prefixes: Told | None = None
    """The list that it was told of last."""


class Activity:
    """Tells watchers what the server does. `read` and `inspect` ask the engine for its state."""

    def __init__(
        self,
        read: Callable[[], Awaitable[EngineState]],
        inspect: Callable[[InspectCache], Awaitable[CacheState]],
    ) -> None:
        self._read, self._inspect = read, inspect
        self._recent: deque[Told] = deque(maxlen=_MAX_RECENT)
        self._watchers: set[_Watcher] = set()
        self._lists: dict[int, tuple[tuple[CachePrefix, ...], Told]] = {}
        """The last lists of prefixes, by their limits."""
        self._polling: asyncio.Task[None] | None = None
        self._is_closed = False

    def record(self, request_id: str, finish_reason: str, fields: dict[str, Any]) -> None:
        """Tell of a request that has ended."""
        told = Told(RequestUpdate(time.time(), request_id, finish_reason, fields))
        self._recent.append(told)
        self._tell(told)

    async def watch(self, prefixes: InspectCache | None = None) -> AsyncGenerator[Told]:
        """Yield updates until the caller stops or `close` is called; raises `QueueFullError` if too many watch.

        Prefixes are among them if they are asked for, at first and when they have changed. All that ask agree on
        `text`.
        """
        if self._is_closed:
            raise stopped_error("")
        if len(self._watchers) >= MAX_WATCHERS:
            raise QueueFullError(f"{MAX_WATCHERS} clients watch /events already; try later", retry_after=10)
        watcher = _Watcher(prefixes)
        for ended in self._recent:
            watcher.queue.put_nowait(ended)
        self._watchers.add(watcher)
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll(), name="activity")
        try:
            while (told := await watcher.queue.get()) is not None:
                yield told
        finally:
            self._watchers.remove(watcher)
            if not self._watchers:
                self._polling.cancel()
                self._polling = None

    def close(self) -> None:
        """End all watching: the server is about to stop, and would wait for these replies."""
        self._is_closed = True
        self._tell(None)

    async def _poll(self) -> None:
        for i in count():
            try:
                state = await self._read()
                slots = tuple(map(SlotActivity.of, state.slots))
                self._tell(Told(StateUpdate(time.time(), slots, state.n_queued, state.cache)))
                asked = [each.asked for each in self._watchers if each.asked is not None]
                if asked and i % PREFIXES_EVERY == 0:
                    most = max(asked, key=lambda each: each.top)
                    self._tell_prefixes((await self._inspect(most)).prefixes)
            except LlamaslotError:
                # The engine is restarting.
                pass
            await asyncio.sleep(INTERVAL_S)

    def _tell_prefixes(self, prefixes: tuple[CachePrefix, ...]) -> None:
        before, self._lists = self._lists, {}
        for top in {each.asked.top for each in self._watchers if each.asked is not None}:
            own = prefixes[:top]
            known = before.get(top)
            if known is None or known[0] != own:
                known = own, Told(PrefixesUpdate(time.time(), own))
            self._lists[top] = known
        for each in self._watchers:
            # Lists are large: a watcher that is behind gets none, and nobody gets the same one twice.
            if each.asked is not None and each.queue.qsize() <= PREFIXES_EVERY:
                _, told = self._lists[each.asked.top]
                if each.prefixes is not told:
                    each.prefixes = told
                    self._put(each, told)

    def _tell(self, told: Told | None) -> None:
        for each in self._watchers:
            self._put(each, told)

    def _put(self, watcher: _Watcher, told: Told | None) -> None:
        if watcher.queue.full():
            watcher.queue.get_nowait()
        watcher.queue.put_nowait(told)
