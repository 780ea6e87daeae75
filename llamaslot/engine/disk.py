"""Has the core's disk jobs done beside the steps: one thread writes and erases, another one reads.

The answers come back between two steps, like commands. Bytes that were read are handed to the backend only if the
core still wants them then, so nothing that was planned before can hit them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Protocol

import structlog

from llamaslot.base.backend import Backend
from llamaslot.base.kv_ops import Kv
from llamaslot.kvcache.disk import BadSegmentError, Erase, Job, Read, SegmentDisk, Use, Write
from llamaslot.kvcache.shared import SharedLedger
from llamaslot.prompts.text_store import TextStore

_log = structlog.get_logger(__name__)


class Disk(SegmentDisk, TextStore, Protocol):
    """A disk on which segments, anchors and sessions outlive the server."""


class DiskWorker:
    """Carries out jobs on a disk for a ledger, whose bytes `backend` has. `post` runs an answer between steps.

    Every method is called on the event loop.
    """

    def __init__(
        self,
        disk: Disk,
        backend: Backend,
        ledger: SharedLedger,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self._disk = disk
        self._backend = backend
        self._ledger = ledger
        self._post = post
        self._clock = clock
        self._reads: set[Future[tuple[Kv | None, float]]] = set()
        self._was_silent = False
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="llamaslot-disk-writer")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="llamaslot-disk-reader")

    @property
    def is_writing(self) -> bool:
        """Whether a segment is being written."""
        return bool(self._ledger.tiers.writing)

    def restore(self) -> None:
        """Let the core know what the disk has, before anything else."""
        tiers, records = self._ledger.tiers, self._disk.take_records()
        too_large = tiers.restore(records, self._disk.first_number)
        self._disk.leave(too_large)
        n_erased = len(records) - len(tiers.disk) - len(too_large)
        _log.info("disk.restored", segments=len(tiers.disk), erased=n_erased, larger_than_ram=len(too_large))

    def start(self, jobs: Sequence[Job]) -> None:
        """Begin with jobs of which the operations before them are done."""
        self._report_silence()
        for job in jobs:
            match job:
                case Write():
                    self._write(job)
                case Read():
                    self._read(job)
                case Erase(numbers):
                    self.write(self._disk.erase, numbers)
                case Use(numbers):
                    self.write(self._disk.use, numbers)

    def write(self, method: Callable[..., None], *arguments: object) -> None:
        """Call a method of the disk on the thread that writes."""
        self._writer.submit(method, *arguments).add_done_callback(_log_failure)

    def when_written(self, then: Callable[[], None]) -> None:
        """Call `then` between two steps, once the jobs so far that change the disk are done."""
        future = asyncio.get_running_loop().run_in_executor(self._writer, lambda: None)
        future.add_done_callback(lambda _: self._post(then))

    def close(self) -> None:
        """Wait until everything is written, and end the threads; what is read is not wanted any more."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown()

    def _write(self, job: Write) -> None:
        number = job.record.number
        kv = self._backend.kv_of(number)
        if kv is None:
            self._ledger.tiers.was_written(number, self._clock(), is_good=False)
            return
        future = asyncio.get_running_loop().run_in_executor(self._writer, self._disk.write, job.record, kv)

        def done() -> None:
            if error := future.exception():
                _log.error("disk.write_failed", segment=number, exc_info=error)
            self._ledger.tiers.was_written(number, self._clock(), is_good=error is None and future.result())

        future.add_done_callback(lambda _: self._post(done))

    def _read(self, job: Read) -> None:
        loop = asyncio.get_running_loop()
        future = self._reader.submit(self._timed_read, job.number)
        self._reads.add(future)
        self._ledger.tiers.reads(self._clock())

        def done() -> None:
            self._reads.remove(future)
            if future.cancelled():
                return
            error = future.exception()
            if isinstance(error, BadSegmentError):
                self._ledger.tiers.was_bad(job.number, self._clock())
            elif error is not None:
                _log.error("disk.read_failed", segment=job.number, exc_info=error)
                self._ledger.tiers.was_not_read(job.number, self._clock())
            else:
                self._put(job.number, *future.result())
            self._report_silence()

        def hand_over(_: object) -> None:
            # A loop that is closed has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._post, done)

        future.add_done_callback(hand_over)

    def _report_silence(self) -> None:
        is_silent = self._ledger.tiers.is_silent
        if is_silent and not self._was_silent:
            _log.error("disk.silent")
            for each in self._reads:
                each.cancel()
        elif self._was_silent and not is_silent:
            _log.info("disk.answers_again")
        self._was_silent = is_silent

    def _timed_read(self, number: int) -> tuple[Kv | None, float]:
        started = perf_counter()
        return self._disk.read(number), perf_counter() - started

    def _put(self, number: int, kv: Kv | None, seconds: float) -> None:
        if kv is None:
            self._ledger.tiers.was_not_read(number, self._clock())
            return
        positions = self._ledger.was_read(number, seconds, self._clock())
        if positions is not None:
            self._backend.put(number, positions.start, positions.stop, kv)


def _log_failure(future: Future[None]) -> None:
    if error := future.exception():
        _log.error("disk.failed", exc_info=error)
