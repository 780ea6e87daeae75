"""Disk worker: runs the cache's disk jobs on two threads, concurrently with the steps.

    plan -> jobs -> DiskWorker.start -> thread -> post -> KVCache.on_io (between two steps)

Reads and writes have separate threads, so that a read for a waiting request does not wait for write-back. KV that
was read is given to the backend only if the cache still expects it when the result arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Protocol

import structlog

from llamaslot.base.backend import Backend
from llamaslot.base.kv_ops import Kv
from llamaslot.base.text_records import TextRecord, TextStore
from llamaslot.base.threads import close_after_queue, started_executor
from llamaslot.kvcache import disk_io
from llamaslot.kvcache.cache import KVCache

_WRITE_TIMEOUT_S = 10.0
"""Most time that a query waits until the disk has executed the queued changes."""

_log = structlog.get_logger(__name__)


class Disk(disk_io.SegmentDisk, Protocol):
    """A disk that keeps segments and records of the token memory across restarts."""

    @property
    def texts(self) -> TextStore:
        """Records of the token memory. Its methods are called on the writer thread."""

    def delete_again(self) -> bool:
        """Retry deletions that failed before; returns True if none is left."""


class DiskWorker:
    """Carries out the jobs of `cache`; `post` runs a callback between two steps.

    All methods are called on the event loop.
    """

    def __init__(
        self,
        disk: Disk,
        backend: Backend,
        cache: KVCache,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self._disk = disk
        self._backend = backend
        self._cache = cache
        self._post = post
        self._clock = clock
        self._n_writes = 0
        self._reads: set[Future[tuple[Kv | None, float]]] = set()
        self._is_unresponsive = False
        self._writer = started_executor(1, "llamaslot-disk-writer")
        self._reader = started_executor(1, "llamaslot-disk-reader")

    @property
    def is_busy(self) -> bool:
        """True while a segment is being written."""
        return self._n_writes > 0

    def start(self, jobs: Sequence[disk_io.Job]) -> None:
        """Start jobs in order, after the KV operations of their plan: a `Write` needs the saved segment."""
        for job in jobs:
            match job:
                case disk_io.Write():
                    self._write(job)
                case disk_io.Read():
                    self._read(job)
                case disk_io.Erase(numbers):
                    self._submit(self._disk.erase, numbers)
                case disk_io.MarkUsed(numbers):
                    self._submit(self._disk.mark_used, numbers)
                case disk_io.Reparent(numbers, parent):
                    self._submit(self._disk.reparent, numbers, parent)
                case disk_io.CancelReads():
                    self._cancel_reads()

    def write_texts(self, records: Sequence[TextRecord]) -> None:
        """Write records of the token memory."""
        for each in records:
            self._submit(self._disk.texts.write, each)

    def drop_session(self, digest: bytes) -> None:
        """Delete the records of a session."""
        self._submit(self._disk.texts.drop_session, digest)

    def clear_texts(self) -> None:
        """Delete all records."""
        self._submit(self._disk.texts.clear_texts)

    def when_written(self, then: Callable[[str], None]) -> None:
        """Call `then` between two steps, once all changes queued so far are done.

        Its argument is empty, or the reason if not everything could be deleted within `_WRITE_TIMEOUT_S`.
        """
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._writer, self._disk.delete_again)
        timer = loop.call_later(_WRITE_TIMEOUT_S, future.cancel)

        def done(_: object) -> None:
            timer.cancel()
            reason = ""
            if future.cancelled():
                reason = "does not respond; its files are deleted once it does"
            else:
                if error := future.exception():
                    _log.error("disk.job_failed", exc_info=error)
                if error or not future.result():
                    reason = "could not delete everything; try again once it works"
            self._post(partial(then, reason))

        future.add_done_callback(done)

    def close(self) -> list[Future[None]]:
        """Cancel pending reads and end the threads. The futures are done once all queued writes are."""
        for each in self._reads:
            each.cancel()
        return [close_after_queue(self._writer), close_after_queue(self._reader)]

    def _submit(self, method: Callable[..., None], *arguments: object) -> None:
        """Queue a call that changes the disk. Errors are logged."""
        self._writer.submit(method, *arguments).add_done_callback(_log_failure)

    def _report(self, event: disk_io.IoEvent) -> range | None:
        return self._cache.on_io(event, self._clock())

    def _write(self, job: disk_io.Write) -> None:
        number = job.meta.number
        kv = self._backend.kv_of(number)
        if kv is None:
            self._report(disk_io.Written(number, ok=False))
            return

        def write() -> bool:
            # A checkpoint of a sliding window may have one cell fewer than was reserved for it.
            ok = self._disk.write(replace(job.meta, n_bytes=len(kv)), kv)
            self._disk.count_write(len(kv) if ok else 0, job.budget_used_bytes)
            return ok

        future = asyncio.get_running_loop().run_in_executor(self._writer, write)
        self._n_writes += 1

        def done() -> None:
            self._n_writes -= 1
            if error := future.exception():
                _log.error("disk.write_failed", segment=number, exc_info=error)
            self._report(disk_io.Written(number, ok=error is None and future.result()))

        future.add_done_callback(lambda _: self._post(done))

    def _read(self, job: disk_io.Read) -> None:
        loop = asyncio.get_running_loop()
        future = self._reader.submit(self._timed_read, job.number)
        self._reads.add(future)

        def begun() -> None:
            self._report(disk_io.ReadStarted())

        # Posted, so that a plan follows, which has the time at which the read times out.
        self._post(begun)

        def done() -> None:
            self._reads.remove(future)
            if future.cancelled():
                return
            error = future.exception()
            if isinstance(error, disk_io.CorruptSegmentError):
                self._log_answer()
                self._report(disk_io.Corrupt(job.number))
            elif error is not None:
                _log.error("disk.read_failed", segment=job.number, exc_info=error)
                self._report(disk_io.ReadFailed(job.number))
            else:
                self._put(job.number, *future.result())

        def hand_over(_: object) -> None:
            # If an unresponsive disk ends a read after the event loop was closed, nothing waits for it any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._post, done)

        future.add_done_callback(hand_over)

    def _cancel_reads(self) -> None:
        _log.error("disk.unresponsive", reads=len(self._reads))
        self._is_unresponsive = True
        for each in self._reads:
            each.cancel()

    def _timed_read(self, number: int) -> tuple[Kv | None, float]:
        started = perf_counter()
        return self._disk.read(number), perf_counter() - started

    def _log_answer(self) -> None:
        if self._is_unresponsive:
            self._is_unresponsive = False
            _log.info("disk.responsive")

    def _put(self, number: int, kv: Kv | None, seconds: float) -> None:
        if kv is None:
            self._report(disk_io.ReadFailed(number))
            return
        self._log_answer()
        positions = self._report(disk_io.ReadDone(number, seconds))
        if positions is not None:
            self._backend.put(number, positions.start, positions.stop, kv)


def _log_failure(future: Future[None]) -> None:
    if error := future.exception():
        _log.error("disk.job_failed", exc_info=error)
