"""What is asked of single slots: to save what they hold to a file, to take it from one, to drop it.

save       wait until the slot is idle, have its KV stored, write it on a thread, answer
restore    read and verify on the thread, wait until the slot is idle, have it loaded, answer
erase      wait until the slot is idle, answer
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import structlog

from llamaslot.base.backend import Backend
from llamaslot.base.commands import SlotAction, SlotActionDone
from llamaslot.base.errors import (
    InvalidRequestError,
    LlamaslotError,
    NotSupportedError,
    QueueFullError,
    ServerError,
    UnavailableError,
)
from llamaslot.base.kv_ops import Save
from llamaslot.base.tokens import WIDTH, packed
from llamaslot.engine.reports import Respond
from llamaslot.kvcache.ledger import Ledger
from llamaslot.kvcache.shared import SharedLedger
from llamaslot.kvcache.slot_store import BadSlotError, SavedSegment, SavedSlot, SlotStore
from llamaslot.scheduler.scheduler import Scheduler

_MOST_WAITING = 8
"""Actions that may wait: those that restore have their file in memory."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Job:
    """An action that waits for its slot, or for a step."""

    command: SlotAction
    respond: Respond
    started: float
    saved: SavedSlot | None = None
    """What to restore."""
    read_seconds: float = 0.0
    n_bytes: int = 0
    space: str = ""
    tokens: bytes = b""
    saves: list[Save] = field(default_factory=list)


class SlotActions:
    """Carries out actions on slots, on the event loop, even if the client that asked for one has gone away.

    `post` runs something between two steps. Without a `store`, or where slots do not share cells, every action is
    refused.
    """

    def __init__(
        self,
        store: SlotStore | None,
        backend: Backend,
        scheduler: Scheduler,
        *,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._backend = backend
        self._slots = scheduler.slots
        self._n_ctx = scheduler.settings.n_ctx_slot
        self._ledger = _shared(scheduler.ledger)
        self._post = post
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llamaslot-slots")
        self._n_reading = 0
        self._waiting: list[_Job] = []
        self._begun: list[_Job] = []

    def handle(self, command: SlotAction, respond: Respond) -> None:
        """Accept an action, which begins as soon as its slot is idle."""
        if self._store is None or self._ledger is None:
            message = (
                "this server does not save its slots: start it with --slot-save-path, one pool for all slots and "
                "flash attention"
            )
            respond(NotSupportedError(message))
        elif not 0 <= command.slot < len(self._slots):
            message = f"there is no slot {command.slot}, only 0 to {len(self._slots) - 1}"
            respond(InvalidRequestError(message, param="id_slot"))
        elif len(self._waiting) + self._n_reading >= _MOST_WAITING:
            message = f"{_MOST_WAITING} actions wait for their slots; try later"
            respond(QueueFullError(message, retry_after=1))
        elif command.action == "restore":
            self._read(_Job(command, respond, self._clock()), self._store)
        else:
            self._waiting.append(_Job(command, respond, self._clock()))

    def begin(self) -> None:
        """Have done what waits for slots that are idle now: before a plan."""
        ledger = self._ledger
        if ledger is None or not self._waiting:
            return
        idle = [job for job in self._waiting if self._slots[job.command.slot].request is None]
        self._waiting = [job for job in self._waiting if job not in idle]
        # What two sequences computed side by side must be one before either is copied from.
        ledger.settle()
        for job in idle:
            job.started = self._clock() - job.read_seconds
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
            if job.saves:
                self._write(job)
            else:
                self._end(job)

    def close(self) -> None:
        """End the thread once it is done with what it is at; what waits is never answered."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _begin_saving(self, job: _Job, ledger: SharedLedger) -> None:
        slot = job.command.slot
        tip = ledger.tree.tip(slot)
        if tip is None or not ledger.length(slot):
            error = InvalidRequestError(f"slot {slot} holds nothing that could be saved", param="id_slot")
            job.respond(error)
            return
        job.space, job.tokens = tip.space, packed(ledger.tree.tokens(slot))
        job.saves = ledger.save(slot)
        self._begun.append(job)

    def _begin_restoring(self, job: _Job, ledger: SharedLedger) -> None:
        saved, job.saved = job.saved, None
        assert saved is not None
        given = ledger.restore(job.command.slot, saved)
        if given is None:
            error = UnavailableError("the pool has no room for what was saved: running requests use it")
            job.respond(error)
            return
        for number, segment in given.items():
            self._backend.put(number, segment.start, segment.end, segment.kv)
        job.tokens = saved.tokens
        self._begun.append(job)

    def _read(self, job: _Job, store: SlotStore) -> None:
        future = asyncio.get_running_loop().run_in_executor(self._thread, store.read, job.command.filename)
        self._n_reading += 1

        def done() -> None:
            self._n_reading -= 1
            if error := future.exception():
                job.respond(_error_of(error, job))
                return
            job.saved, job.n_bytes = future.result()
            job.read_seconds = self._clock() - job.started
            n_tokens = len(job.saved.tokens) // WIDTH
            if n_tokens > self._n_ctx:
                message = f"{job.command.filename} has {n_tokens} tokens, a slot here {self._n_ctx}"
                job.respond(InvalidRequestError(message, param="filename"))
            else:
                self._waiting.append(job)

        future.add_done_callback(lambda _: self._post(done))

    def _write(self, job: _Job) -> None:
        assert self._store is not None
        assert self._ledger is not None
        kvs = {save: kv for save in job.saves if (kv := self._backend.kv_of(save.segment)) is not None}
        self._ledger.discard(list(kvs))
        if len(kvs) < len(job.saves):
            job.respond(ServerError("there is no memory to save the slot in"))
            return
        order = self._ledger.cells.cell_order
        segments = (SavedSegment(save.start, save.end, order(save.segment), kv) for save, kv in kvs.items())
        saved = SavedSlot(job.space, job.tokens, tuple(segments))
        write = self._store.write
        future = asyncio.get_running_loop().run_in_executor(self._thread, write, job.command.filename, saved)

        def done() -> None:
            if error := future.exception():
                job.respond(_error_of(error, job))
            else:
                job.n_bytes = future.result()
                self._end(job)

        future.add_done_callback(lambda _: self._post(done))

    def _end(self, job: _Job) -> None:
        ms = (self._clock() - job.started) * 1e3
        n_tokens = len(job.tokens) // WIDTH
        command = job.command
        _log.info(_EVENTS[command.action], slot=command.slot, tokens=n_tokens, bytes=job.n_bytes, ms=round(ms, 2))
        job.respond(SlotActionDone(n_tokens, job.n_bytes, ms))


_EVENTS = {"save": "slot.saved", "restore": "slot.restored", "erase": "slot.erased"}


def _shared(ledger: Ledger) -> SharedLedger | None:
    """The ledger, if what it has can be saved."""
    return ledger if isinstance(ledger, SharedLedger) and ledger.scratch is not None else None


def _error_of(error: BaseException, job: _Job) -> LlamaslotError:
    name = job.command.filename
    if isinstance(error, FileNotFoundError) and job.command.action == "restore":
        return InvalidRequestError(f"there is no file {name}", param="filename")
    if isinstance(error, IsADirectoryError):
        return InvalidRequestError(f"{name} is a folder", param="filename")
    if isinstance(error, BadSlotError):
        return InvalidRequestError(f"{name} cannot be restored: {error}", param="filename")
    if isinstance(error, OSError):
        return ServerError(f"{name} cannot be used: {error.strerror or error}")
    _log.error("slot.failed", exc_info=error)
    return ServerError(f"{name} cannot be used")
