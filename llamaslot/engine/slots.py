"""What is asked of single slots: to save what they hold to a file, to take it from one, to drop it.

    save       wait until the slot is idle, have its KV stored, write it on a thread, answer
    restore    read and verify on the thread, wait until the slot is idle, have it loaded, answer
    erase      wait until the slot is idle, answer

What is stored for this has numbers below 0, which no segment has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from llamaslot.base.errors import InvalidRequestError, LlamaslotError, NotSupportedError, ServerError
from llamaslot.base.messages import SlotActed, SlotAction
from llamaslot.core.backend import Backend
from llamaslot.core.disk import BadSegmentError, SavedPart, SavedSlot, SlotStore
from llamaslot.core.node import WIDTH, packed
from llamaslot.core.scheduler import Scheduler
from llamaslot.core.shared import Part, SharedLedger

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Job:
    """An action that waits for its slot, or for a step."""

    command: SlotAction
    started: float
    saved: SavedSlot | None = None
    """What to restore."""
    n_bytes: int = 0
    space: str = ""
    tokens: bytes = b""
    parts: tuple[Part, ...] = ()
    error: LlamaslotError | None = None


class SlotFiles:
    """Carries out actions on slots for the engine, whose callbacks these are. Used on the event loop alone.

    `post` runs something between two steps, `answer` and `fail` end an action. Without a `store`, or where slots do
    not share cells, every action is refused.
    """

    def __init__(
        self,
        store: SlotStore | None,
        backend: Backend,
        scheduler: Scheduler,
        *,
        post: Callable[[Callable[[], None]], None],
        answer: Callable[[SlotActed], None],
        fail: Callable[[str, LlamaslotError], None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._backend = backend
        self._scheduler = scheduler
        self._post = post
        self._answer = answer
        self._fail = fail
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llamaslot-slots")
        self._waiting: list[_Job] = []
        self._begun: list[_Job] = []
        self._n_jobs = 0

    def handle(self, command: SlotAction) -> None:
        """Begin with an action as soon as it can be."""
        if self._store is None or not isinstance(self._scheduler.ledger, SharedLedger):
            message = (
                "this server does not save its slots: start it with --slot-save-path, one pool for all slots and "
                "flash attention"
            )
            self._fail(command.request_id, NotSupportedError(message))
        elif not 0 <= command.slot < len(self._scheduler.slots):
            message = f"there is no slot {command.slot}, only 0 to {len(self._scheduler.slots) - 1}"
            self._fail(command.request_id, InvalidRequestError(message, param="id_slot"))
        elif command.action == "restore":
            self._read(_Job(command, self._clock()), self._store)
        else:
            self._waiting.append(_Job(command, self._clock()))

    def begin(self) -> None:
        """Have done what waits for slots that are idle now: before a plan."""
        ledger = self._scheduler.ledger
        assert isinstance(ledger, SharedLedger) or not self._waiting
        for job in list(self._waiting):
            if self._scheduler.slots[job.command.slot].request is not None:
                continue
            self._waiting.remove(job)
            assert isinstance(ledger, SharedLedger)
            match job.command.action:
                case "save":
                    self._begin_saving(job, ledger)
                case "restore":
                    self._begin_restoring(job, ledger)
                case "erase":
                    job.tokens = packed(ledger.tree.tokens(job.command.slot))
                    ledger.clear(job.command.slot)
                    self._end(job)

    def done(self) -> None:
        """The operations of the plan behind the last `begin` are done."""
        begun, self._begun = self._begun, []
        for job in begun:
            if job.error is not None:
                self._fail(job.command.request_id, job.error)
            elif job.command.action == "save":
                self._write(job)
            else:
                self._end(job)

    def close(self) -> None:
        """End the thread once it is done with what it is at; what waits is never answered."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _begin_saving(self, job: _Job, ledger: SharedLedger) -> None:
        slot = job.command.slot
        n_tokens, largest = ledger.length(slot), ledger.tiers.tree.largest
        tip = ledger.tree.tip(slot)
        if tip is None or not n_tokens:
            error = InvalidRequestError(f"slot {slot} holds nothing that could be saved", param="id_slot")
            self._fail(job.command.request_id, error)
            return
        job.started, job.space, job.tokens = self._clock(), tip.space, packed(ledger.tree.tokens(slot))
        job.parts = self._numbered([(at, min(at + largest, n_tokens)) for at in range(0, n_tokens, largest)])
        ledger.save(slot, job.parts)
        self._begun.append(job)

    def _begin_restoring(self, job: _Job, ledger: SharedLedger) -> None:
        saved = job.saved
        assert saved is not None
        job.parts = self._numbered([(part.start, part.end) for part in saved.parts])
        for (number, start, end), part in zip(job.parts, saved.parts, strict=True):
            self._backend.put(number, start, end, part.kv)
            ledger.cells.put(number, start, end - start, part.cell_order)
        if not ledger.restore(job.command.slot, saved.space, saved.tokens, job.parts):
            job.error = ServerError("the pool has no room for what was saved: running requests use it")
        job.tokens, job.saved = saved.tokens, None
        self._begun.append(job)

    def _read(self, job: _Job, store: SlotStore) -> None:
        future = asyncio.get_running_loop().run_in_executor(self._thread, store.read, job.command.filename)

        def done() -> None:
            if error := future.exception():
                self._fail(job.command.request_id, self._error_of(error, job))
                return
            job.saved, job.n_bytes = future.result()
            n_tokens, n_ctx = len(job.saved.tokens) // WIDTH, self._scheduler.settings.n_ctx_slot
            if n_tokens > n_ctx:
                message = f"{job.command.filename} has {n_tokens} tokens, a slot here {n_ctx}"
                self._fail(job.command.request_id, InvalidRequestError(message, param="filename"))
            else:
                self._waiting.append(job)

        future.add_done_callback(lambda _: self._post(done))

    def _write(self, job: _Job) -> None:
        assert self._store is not None
        ledger = self._scheduler.ledger
        assert isinstance(ledger, SharedLedger)
        parts = []
        for number, start, end in job.parts:
            kv = self._backend.kv_of(number)
            assert kv is not None
            parts.append(SavedPart(start, end, ledger.cells.cell_order(number), kv))
        ledger.discard(job.parts)
        saved = SavedSlot(job.space, job.tokens, tuple(parts))
        write = self._store.write
        future = asyncio.get_running_loop().run_in_executor(self._thread, write, job.command.filename, saved)

        def done() -> None:
            if error := future.exception():
                self._fail(job.command.request_id, self._error_of(error, job))
            else:
                job.n_bytes = future.result()
                self._end(job)

        future.add_done_callback(lambda _: self._post(done))

    def _numbered(self, ranges: Sequence[tuple[int, int]]) -> tuple[Part, ...]:
        self._n_jobs += len(ranges)
        return tuple((i - self._n_jobs, start, end) for i, (start, end) in enumerate(ranges))

    def _end(self, job: _Job) -> None:
        ms = (self._clock() - job.started) * 1e3
        n_tokens = len(job.tokens) // WIDTH
        command = job.command
        _log.info(f"slot.{command.action}d", slot=command.slot, tokens=n_tokens, bytes=job.n_bytes, ms=round(ms, 2))
        self._answer(SlotActed(command.request_id, n_tokens, job.n_bytes, ms))

    def _error_of(self, error: BaseException, job: _Job) -> LlamaslotError:
        name = job.command.filename
        if isinstance(error, FileNotFoundError):
            return InvalidRequestError(f"there is no file {name}", param="filename")
        if isinstance(error, BadSegmentError):
            return InvalidRequestError(f"{name} cannot be restored: {error}", param="filename")
        if isinstance(error, OSError):
            return ServerError(f"{name} cannot be used: {error.strerror or error}")
        _log.error("slot.failed", exc_info=error)
        return ServerError(f"{name} cannot be used")
