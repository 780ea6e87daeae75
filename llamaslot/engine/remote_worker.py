"""Remote worker: fetches KV from the remote store and uploads KV to it, concurrently with the steps.

    request queued --> find --(between two steps)--> choose --> fetch --(between two steps)--> add, next portion ...
                                                        success or failure --> the request may be admitted
    plan --> uploads --> RemoteWorker.start --> upload --(between two steps)--> RemoteTier.on_uploaded

The store has its own thread and event loop, which receives, verifies and sends objects. Tasks on the engine's event
loop only wait for it. Requests that want the same object at the same time share its fetch.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import structlog

from llamaslot.base.backend import Backend
from llamaslot.base.kv_ops import Kv, KvPart
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.tiers import pacing
from llamaslot.kvcache.tiers.remote_tier import (
    Block,
    Choice,
    CorruptObjectError,
    Fetched,
    Lookup,
    Portion,
    RemoteObject,
    RemoteStore,
    RemoteTier,
    RemoteUnavailableError,
    Upload,
)
from llamaslot.scheduler.admission import Admission
from llamaslot.scheduler.request import Request

_log = structlog.get_logger(__name__)

_DROP_TIMEOUT_S = 10.0
"""Most time that clearing the cache, or deleting a session, waits for the store."""

_T = TypeVar("_T")
_MAX_FETCHES = 2
"""Most concurrent fetches for one request: the next object is received while one is being verified."""
_MAX_ALL_FETCHES = 4
"""Most concurrent fetches for all requests, because their memory does not count against the RAM tier."""


class RemoteWorker:
    """Fetches and uploads KV as `tier` decides; `backend` has the bytes in RAM.

    `post` runs a callback between two steps.
    All methods are called on the event loop.
    """

    def __init__(
        self,
        store: RemoteStore,
        backend: Backend,
        tier: RemoteTier,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._backend = backend
        self._tier = tier
        self._post = post
        self._clock = clock
        self._waiting: dict[tuple[str, bytes], list[Request]] = {}
        """Requests that wait for the same lookup, by namespace and tokens."""
        self._fetches = SharedFetches(self._fetch, self._spawn)
        self._answers = True
        """False after a lookup failed, until one succeeds."""
        self._late_logged_until = 0.0
        self._uploads: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        """All tasks: without a reference they could be garbage-collected while they wait."""
        self._loop = asyncio.new_event_loop()
        self._ended: Future[None] = Future()
        # A daemon: a store that hangs must not keep the process from ending.
        threading.Thread(target=self._run_loop, name="llamaslot-remote", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """True while a segment is being uploaded."""
        return self._tier.uploads.is_sending

    def check(self) -> None:
        """Start to connect to the store, so that an unavailable one is logged before a request needs it."""
        self._spawn(self._check())

    def look_up(self, request: Request, admission: Admission) -> None:
        """Start to look up and fetch KV for a queued request, which `is_fetching` until that has ended."""
        # A prefix that a running request is computing need not be fetched.
        if admission.is_in_flight(request):
            return
        lookup = self._tier.wanted(request.id, admission.match(request), request.prefix, self._clock())
        if lookup is None:
            return
        request.is_fetching = True
        key = lookup.namespace, lookup.tokens
        waiting = self._waiting.setdefault(key, [])
        waiting.append(request)
        if len(waiting) == 1:
            self._spawn(self._fetch_for(lookup))

    def start(self, uploads: Sequence[Upload]) -> None:
        """Start uploads. Must follow the KV operations of their plan, since they need the saved segments."""
        for upload in uploads:
            blocks = [(each, *found) for each in upload.blocks if (found := self._kv_of(each)) is not None]
            task = self._spawn(self._upload(upload, blocks))
            self._uploads.add(task)
            task.add_done_callback(self._uploads.discard)

    def clear(self, then: Callable[[str], None]) -> None:
        """Delete all objects of this model, then call `then` between two steps, with the reason if that failed."""
        self._tier.uploads.offer_all_again()
        self._spawn(self._delete([self._store.clear], then))

    def drop(self, paths: Sequence[tuple[str, bytes, int]], then: Callable[[str], None]) -> None:
        """Delete the objects that have tokens after the given position of a path; calls `then` as `clear` does."""
        calls = [lambda path=path: self._store.drop(*path) for path in paths]
        self._spawn(self._delete(calls, then))

    def close(self) -> list[Future[None]]:
        """Cancel all tasks and end the thread; the future is done once it has ended."""
        for each in self._tasks:
            each.cancel()

        async def end() -> None:
            for each in asyncio.all_tasks() - {asyncio.current_task()}:
                each.cancel()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._store.close(), self._store.timeout_s)
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(end(), self._loop)
        return [self._ended]

    # --- tasks ---

    async def _fetch_for(self, lookup: Lookup) -> None:
        """Look up, choose, fetch and add KV. In the end the waiting requests may be admitted, whatever happened."""
        try:
            with_checkpoints = lookup.restore_point is not None
            found = await self._answer(
                self._store.find(lookup.namespace, lookup.tokens, lookup.start, with_checkpoints=with_checkpoints)
            )
            choice = await self._between_steps(lambda: self._tier.choose(lookup, found))
            if choice.portions or choice.checkpoint is not None:
                try:
                    async with asyncio.timeout(choice.seconds):
                        await self._fetch_all(lookup, choice)
                except TimeoutError:
                    self._log_late(choice)
                    self._post(lambda: self._tier.on_late(choice, self._clock()))
        except CorruptObjectError:
            self._post(self._tier.on_corrupt)
        except RemoteUnavailableError:
            # Logged already.
            self._answers = False
            self._post(lambda: self._tier.on_unavailable(self._clock()))
        except (ValueError, MemoryError) as error:
            _log.warning("remote.unusable", error=str(error) or type(error).__name__)
        finally:
            self._post(lambda: self._release(lookup))

    async def _check(self) -> None:
        try:
            await self._answer(self._store.ping())
        except RemoteUnavailableError:
            # Logged already. The next request asks nevertheless: the store may have started by then.
            self._answers = False

    async def _answer(self, question: Coroutine[Any, Any, _T]) -> _T:
        """Return the store's answer, within its time limit for lookups. Logs the start and the end of an outage."""
        try:
            async with asyncio.timeout(self._store.timeout_s):
                answer = await self._call(question)
        except TimeoutError as error:
            reason = f"no answer within {self._store.timeout_s:g} s"
            if self._answers:
                _log.warning("remote.unavailable", flag="--cache-remote", url=self._store.address, error=reason)
            raise RemoteUnavailableError(reason) from error
        if not self._answers:
            self._answers = True
            _log.info("remote.available")
        return answer

    def _log_late(self, choice: Choice) -> None:
        """Log a late fetch, at most one each `RETRY_DELAY_S`, because many requests may be late together."""
        now = self._clock()
        if now >= self._late_logged_until:
            self._late_logged_until = now + pacing.RETRY_DELAY_S
            _log.warning(
                "remote.late",
                flag="--cache-remote",
                url=self._store.address,
                bytes=choice.n_bytes,
                waited_s=round(choice.seconds, 2),
                computed_tokens=choice.n_tokens,
            )

    async def _fetch_all(self, lookup: Lookup, choice: Choice) -> None:
        """Fetch the objects of a choice in order, and add each to the cache as soon as it is there."""
        wanted = [WantedObject(each.object) for each in choice.portions]
        if choice.rest is not None:
            wanted.append(WantedObject(choice.rest.object, has_state=True))
        state: Kv | None = None
        async with contextlib.aclosing(self._fetches.ordered(wanted)) as objects:
            for portion in choice.all_portions:
                fetched = await anext(objects)
                if fetched is None or fetched.kv is None:
                    return
                state = fetched.state
                part = KvPart(
                    fetched.kv, range(portion.object.start, portion.object.end), range(portion.start, portion.end)
                )
                kv = await asyncio.to_thread(self._store.join, [part])
                await self._between_steps(partial(self._add, lookup, portion, kv))
        checkpoint = choice.checkpoint
        if checkpoint is None:
            return
        if choice.rest is None:
            alone = [WantedObject(checkpoint, has_kv=False, has_state=True)]
            async with contextlib.aclosing(self._fetches.ordered(alone)) as objects:
                fetched = await anext(objects)
            state = fetched.state if fetched is not None else None
        if state is not None:
            await self._between_steps(partial(self._add_checkpoint, lookup, checkpoint, state))

    async def _fetch(self, wanted: WantedObject) -> Fetched | None:
        """Fetch an object, and learn the store's speed."""
        began = perf_counter()
        fetched = await self._call(self._store.fetch(wanted.object, kv=wanted.has_kv, state=wanted.has_state))
        seconds = perf_counter() - began
        if fetched is not None:
            n_bytes = fetched.n_bytes
            self._post(lambda: self._tier.on_fetched(n_bytes, seconds, self._clock()))
        return fetched

    async def _upload(self, upload: Upload, blocks: Sequence[tuple[Block, tuple[KvPart, ...], Kv | None]]) -> None:
        n_sent: int | None = None
        n_all = 0
        try:
            for block, parts, state in blocks:
                tokens = upload.tokens[: block.end * WIDTH]
                n_bytes = await self._call(self._store.upload(upload.namespace, tokens, block.start, parts, state))
                n_all += n_bytes
            n_sent = n_all
        except RemoteUnavailableError:
            # Logged by the store. The segment is uploaded again after a pause.
            pass
        except (ValueError, MemoryError) as error:
            # Counts as uploaded, since another try would fail as well.
            n_sent = n_all
            _log.error("remote.upload_failed", segment=upload.number, error=str(error) or type(error).__name__)
        finally:
            result = n_sent
            self._post(lambda: self._tier.on_uploaded(upload.number, self._clock(), result))

    async def _delete(
        self, calls: Sequence[Callable[[], Coroutine[Any, Any, None]]], then: Callable[[str], None]
    ) -> None:
        reason = ""
        try:
            async with asyncio.timeout(_DROP_TIMEOUT_S):
                # Current uploads may belong to a path that is to be deleted.
                if self._uploads:
                    await asyncio.wait(set(self._uploads))
                for call in calls:
                    await self._call(call())
        except Exception as error:
            _log.warning("remote.not_deleted", error=str(error) or type(error).__name__)
            reason = f"did not delete everything ({str(error) or 'timeout'}); try again once it works"
        self._post(lambda: then(reason))

    # --- between two steps ---

    def _add(self, lookup: Lookup, portion: Portion, kv: Kv) -> None:
        number = self._tier.add(lookup, portion, len(kv))
        if number is not None:
            self._backend.put(number, portion.start, portion.end, kv)

    def _add_checkpoint(self, lookup: Lookup, checkpoint: RemoteObject, state: Kv) -> None:
        number = self._tier.add_checkpoint(lookup, checkpoint, len(state))
        if number is not None:
            self._backend.put(number, checkpoint.end, checkpoint.end, state)

    def _release(self, lookup: Lookup) -> None:
        for request in self._waiting.pop((lookup.namespace, lookup.tokens), []):
            request.is_fetching = False

    # --- inside ---

    def _kv_of(self, block: Block) -> tuple[tuple[KvPart, ...], Kv | None] | None:
        """Return the KV of a block's parts, and its checkpoint; None if any of it has left RAM."""
        parts: list[KvPart] = []
        for each in block.parts:
            segment = each.segment
            kv = self._backend.kv_of(segment.number)
            if kv is None:
                return None
            parts.append(KvPart(kv, range(segment.start, segment.end), range(each.start, each.end)))
        state = self._backend.kv_of(block.checkpoint) if block.checkpoint is not None else None
        return (tuple(parts), state) if state is not None or block.checkpoint is None else None

    def _spawn(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, CorruptObjectError | RemoteUnavailableError | ValueError | MemoryError):
            _log.error("remote.failed", exc_info=error)

    async def _call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a call of the store on the store's event loop, and wait for it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def _between_steps(self, action: Callable[[], _T]) -> _T:
        """Run an action between two steps and return its result."""
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()

        def run() -> None:
            if future.done():
                return
            try:
                future.set_result(action())
            except (ValueError, MemoryError) as error:
                future.set_exception(error)

        self._post(run)
        return await future

    def _run_loop(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()
            self._ended.set_result(None)


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
