"""Queries to the engine: reports, dropping prefixes, and saving, restoring and erasing a slot (`POST /slots/{id}`).

save       wait until the slot is idle; copy its KV to host memory in the next step; write the file on a thread
restore    read and verify the file on the thread; wait until the slot is idle; load the KV in the next step
erase      wait until the slot is idle; clear it

Clearing the cache and deleting a session drop prefixes in all tiers; the reply follows once the disk and the remote
store have deleted them. Everything else is answered at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import structlog

from llamaslot.base import commands
from llamaslot.base.adapters import activation_of
from llamaslot.base.backend import Backend
from llamaslot.base.cache_ids import cache_ids_of
from llamaslot.base.commands import CacheCleared, SlotAction, SlotActionDone
from llamaslot.base.errors import (
    InvalidRequestError,
    LlamaslotError,
    NotFoundError,
    NotSupportedError,
    QueueFullError,
    ServerError,
    UnavailableError,
)
from llamaslot.base.images import ImageLayout, ImageSize
from llamaslot.base.stats import CacheProbe, CacheState, EngineState, SlotState
from llamaslot.base.threads import close_after_queue, started_executor
from llamaslot.base.tokens import WIDTH, packed, unpacked
from llamaslot.engine.disk_worker import DiskWorker
from llamaslot.engine.measurements import PendingSelfTest
from llamaslot.engine.remote_worker import RemoteWorker
from llamaslot.kvcache.slot_snapshots import (
    InvalidSnapshotError,
    SlotSave,
    SlotSnapshot,
    SnapshotPart,
    SnapshotStore,
    UnsavableSlotError,
)
from llamaslot.scheduler.request import Slot
from llamaslot.scheduler.scheduler import Scheduler
from llamaslot.scheduler.step import StepPlan, StepResult

_log = structlog.get_logger(__name__)

MAX_WAITING = 8
"""Most actions that may wait for their slots. Limited, because a waiting restore has its whole file in memory."""
_EVENTS = {"save": "slot.saved", "restore": "slot.restored", "erase": "slot.erased"}
Respond: TypeAlias = Callable[[msgspec.Struct | LlamaslotError], None]
"""Sends the reply to one query. Called exactly once unless the engine stops first."""
_Drop: TypeAlias = Callable[[Callable[[str], None]], None]
"""Deletes objects of the remote store, then calls its argument with the reason of a failure, or an empty text."""


class Queries:
    """Answers queries between two steps, and counts decoded tokens for that.

    Costs may be measured while a `ReadOnlyQuery` is answered: of the backend it uses `vocab` and `info` alone.

    `lacks_disk` is True if a disk is configured but cannot be used, so that its content cannot be deleted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        self_test: PendingSelfTest,
        slot_actions: SlotActions,
        *,
        disk: DiskWorker | None,
        remote: RemoteWorker | None,
        lacks_disk: bool,
    ) -> None:
        self._scheduler = scheduler
        self._dropper = scheduler.cache.dropper
        self._pins = scheduler.cache.pins
        self._backend = backend
        self._self_test = self_test
        self._slot_actions = slot_actions
        self._disk = disk
        self._remote = remote
        self._lacks_disk = lacks_disk
        self._n_decode_calls = 0
        self._n_decoded = 0
        self._n_busy_slots = 0

    def answer(self, query: commands.EngineQuery, respond: Respond) -> None:
        """Answer a query, at once or later."""
        match query:
            case commands.InspectEngine():
                respond(self._engine_state())
            case commands.InspectCache():
                respond(self._cache_state(query))
            case commands.ProbePrompt():
                respond(self._probe(query))
            case commands.InspectHitCurve():
                hit_rate = self._scheduler.cache_stats().prompt_tokens.hit_rate
                respond(self._scheduler.cache.hit_curve(hit_rate))
            case commands.LayOutImages(sizes):
                respond(self._layouts(sizes))
            case commands.DropPaths():
                self._drop_paths(query, respond)
            case commands.ClearCache():
                self._clear(query, respond)
            case commands.SlotAction():
                self._slot_actions.handle(query, respond)

    def count(self, plan: StepPlan, result: StepResult) -> None:
        """Count an executed step."""
        if plan.work:
            self._n_decode_calls += 1
            self._n_busy_slots += len(plan.work)
            self._n_decoded += sum(n for _, n in result.decoded.sent.values())

    def _engine_state(self) -> EngineState:
        """Return the state of slots, queue and cache."""
        scheduler = self._scheduler
        return EngineState(
            slots=tuple(map(self._slot_state, scheduler.slots)),
            n_queued=len(scheduler.queue),
            n_decode_calls=self._n_decode_calls,
            n_decoded_tokens=self._n_decoded,
            n_busy_slots_total=self._n_busy_slots,
            backend=self._backend.stats,
            cache=scheduler.cache_stats(),
        )

    def _cache_state(self, query: commands.InspectCache) -> CacheState:
        """Return the statistics of the cache, and the prefixes with the most hits."""
        detokenize = self._backend.vocab.detokenize if query.text else None
        listing = self._scheduler.cache.listing(self._scheduler.cache_stats(), query.top, detokenize)
        listing.costs_pending = self._backend.info.costs_pending
        return listing if query.tenants else msgspec.structs.replace(listing, tenants=msgspec.UNSET)

    def _probe(self, query: commands.ProbePrompt) -> CacheProbe:
        """Return what is cached of a prompt."""
        params, prompt = query.generate.params, query.generate.prompt
        n_tokens = prompt.n_tokens
        if not params.cache_prompt:
            return CacheProbe(n_tokens, 0, 0, 0, n_tokens, 0, "off")
        why_not = self._self_test.why_not_reused
        if why_not or not self._scheduler.cache.settings.can_reuse:
            return CacheProbe(n_tokens, 0, 0, 0, n_tokens, 0, why_not or "unsupported")
        known = cache_ids_of(prompt, activation_of(params.adapters, prompt.packed_tokens))
        found = self._scheduler.cache.probe(params.namespace_with(known.key), packed(known.ids))
        if found.miss == "diverged" and prompt.is_reply_edited:
            found.miss = "changed"
        found.session_match = prompt.session_match or None
        found.approximate_tokens = prompt.n_approximate
        return found

    def _layouts(self, sizes: Sequence[ImageSize]) -> commands.ImageLayouts | LlamaslotError:
        """Return the tokens of images of these sizes, or why there are none."""
        layouts: list[ImageLayout] = []
        for size in sizes:
            try:
                layouts.append(self._backend.image_layout(size))
            except InvalidRequestError as error:
                layouts.append(ImageLayout((), error.message))
            except LlamaslotError as error:
                return error
        return commands.ImageLayouts(tuple(layouts))

    def _slot_state(self, slot: Slot) -> SlotState:
        n_ctx, n_held = self._scheduler.n_ctx_slot, self._scheduler.cache.length(slot.id)
        request = slot.request
        if request is None or request.params.is_background:
            # Any request may have the slot at once.
            return SlotState(slot.id, n_ctx, n_held)
        return SlotState(
            id=slot.id,
            n_ctx=n_ctx,
            n_held=n_held,
            request_id=request.id,
            n_prompt=request.n_prompt,
            n_prompt_computed=request.n_prompt_computed,
            n_generated=request.n_generated,
            max_tokens=request.params.max_tokens,
            speculates=self._scheduler.can_draft and request.params.max_draft > 0,
            shift=request.params.shift,
            sampling=request.params.sampling,
        )

    def _clear(self, query: commands.ClearCache, respond: Respond) -> None:
        """Drop all idle prefixes, pinned ones too, or those of one tier."""
        if not query.tier:
            self._pins.clear()
        cleared = self._dropper.drop_tier(query.tier) if query.tier else self._dropper.drop()
        _log.info("cache.cleared", tier=query.tier, **msgspec.structs.asdict(cleared))
        if self._disk is not None:
            self._disk.start(self._scheduler.cache.take_jobs())
            if not query.tier:
                self._disk.clear_texts()
        remote = self._remote if not query.tier else None
        self._respond_when_written(respond, cleared, remote.clear if remote is not None else None)

    def _drop_paths(self, query: commands.DropPaths, respond: Respond) -> None:
        """Drop the paths of a session."""
        forks = self._dropper.forks(query.paths)
        dropped = self._dropper.drop_paths(query.paths)
        _log.info("session.dropped", **msgspec.structs.asdict(dropped))
        if self._disk is not None:
            self._disk.start(self._scheduler.cache.take_jobs())
            self._disk.drop_session(query.session)
        # Even if the session is unknown, the disk may still have it, if an earlier deletion failed there.
        answer = dropped if query.paths else NotFoundError("there is no such session")
        remote = self._remote
        drop = (lambda then: remote.drop(forks, then)) if remote is not None and forks else None
        self._respond_when_written(respond, answer, drop)

    def _respond_when_written(
        self, respond: Respond, answer: CacheCleared | LlamaslotError, drop_remote: _Drop | None
    ) -> None:
        """Respond once the disk and the remote store have deleted everything, or with an error if they fail."""

        def finish(where: str, reason: str) -> None:
            message = f"done in the pool and in RAM, but {where} {reason}"
            respond(UnavailableError(message) if reason else answer)

        def then(reason: str) -> None:
            if reason or drop_remote is None:
                finish("the disk (--cache-disk)", reason)
            else:
                drop_remote(lambda reason: finish("the remote store (--cache-remote)", reason))

        if self._disk is not None:
            self._disk.when_written(then)
        else:
            then("cannot be used, so its content was not deleted" if self._lacks_disk else "")


@dataclass(slots=True, eq=False)
class _Job:
    """An action that is accepted but not answered yet."""

    command: SlotAction
    respond: Respond
    started: float
    snapshot: SlotSnapshot | None = None
    """The snapshot to restore."""
    save: SlotSave | None = None
    """The snapshot that the next step takes."""
    read_seconds: float = 0.0
    n_bytes: int = 0
    n_tokens: int = 0


class SlotActions:
    """Carries out actions on slots, even if their clients have disconnected. Used on the event loop.

    `post` runs a callback between two steps. Without a `store`, or if KV cannot be saved, all actions are refused.
    """

    def __init__(
        self,
        store: SnapshotStore | None,
        backend: Backend,
        scheduler: Scheduler,
        *,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self.has_store = store is not None
        """True if slots can be saved."""
        self._store = store
        self._backend = backend
        self._slots = scheduler.slots
        self._n_ctx = scheduler.n_ctx_slot
        self._cache = scheduler.cache
        self._post = post
        self._clock = clock
        self._thread = started_executor(1, "llamaslot-slots")
        self._n_reading = 0
        self._waiting: list[_Job] = []
        """Actions whose slots are busy, in the order of their arrival."""
        self._in_step: list[_Job] = []
        """Saves and restores whose KV operations are in the current plan."""

    @property
    def is_busy(self) -> bool:
        """True while an action waits for its file, its slot or a step."""
        return bool(self._n_reading or self._waiting or self._in_step)

    def handle(self, command: SlotAction, respond: Respond) -> None:
        """Accept or refuse an action; it begins as soon as its slot is idle."""
        if self._store is None or not self._cache.settings.saves:
            reason = self._backend.info.unsaved_reason or "start it with --slot-save-path"
            respond(NotSupportedError(f"this server does not save its slots: {reason}"))
        elif command.action != "erase" and (reason := self._backend.info.self_test_note):
            # While the self-test is pending nothing may be reused, and after a failed one the backend loads
            # nothing.
            respond(NotSupportedError(f"slots are neither saved nor restored now: {reason}"))
        elif not 0 <= command.slot < len(self._slots):
            message = f"there is no slot {command.slot}, only 0 to {len(self._slots) - 1}"
            respond(InvalidRequestError(message, param="id_slot"))
        elif len(self._waiting) + self._n_reading >= MAX_WAITING:
            message = f"too many slot actions are waiting (limit {MAX_WAITING}); try again later"
            respond(QueueFullError(message, retry_after=1))
        elif command.action == "restore":
            self._read(_Job(command, respond, self._clock()), self._store)
        else:
            self._waiting.append(_Job(command, respond, self._clock()))

    def begin(self) -> None:
        """Begin the actions whose slots are idle, so that the next plan includes their KV operations."""
        idle = [job for job in self._waiting if self._slots[job.command.slot].request is None]
        self._waiting = [job for job in self._waiting if job not in idle]
        for job in idle:
            job.started = self._clock() - job.read_seconds
            match job.command.action:
                case "save":
                    self._begin_save(job)
                case "restore":
                    self._begin_restore(job)
                case "erase":
                    job.n_tokens = self._cache.length(job.command.slot)
                    self._cache.truncate(job.command.slot, 0)
                    self._end(job)

    def done(self, incomplete: Collection[int] = ()) -> None:
        """Continue after a step: write the snapshots that it took, and answer the restores that it loaded.

        Loading into `incomplete` slots failed for lack of memory.
        """
        in_step, self._in_step = self._in_step, []
        for job in in_step:
            if job.save is None and job.command.slot in incomplete:
                job.respond(ServerError("not enough memory to restore the slot"))
            elif job.save is not None:
                self._write(job, job.save)
            else:
                self._end(job)

    def close(self) -> Future[None]:
        """End the thread. The future is done once all files are read or written. Waiting actions get no answer."""
        return close_after_queue(self._thread)

    def _begin_save(self, job: _Job) -> None:
        slot = job.command.slot
        try:
            job.save = self._cache.save_slot(slot)
        except UnsavableSlotError as error:
            job.respond(InvalidRequestError(f"slot {slot} cannot be saved: {error}", param="id_slot"))
            return
        job.n_tokens = self._cache.length(slot)
        self._in_step.append(job)

    def _begin_restore(self, job: _Job) -> None:
        snapshot, job.snapshot = job.snapshot, None
        assert snapshot is not None
        parts = self._cache.load_slot(job.command.slot, snapshot)
        if parts is None:
            job.respond(UnavailableError("not enough free cells to restore the slot: running requests use them"))
            return
        for number, part in parts.items():
            self._backend.put(number, part.start, part.end, part.kv)
        job.n_tokens = len(snapshot.tokens) // WIDTH
        if parts:
            self._in_step.append(job)
        else:
            # The whole snapshot is resident, so there may be no operation, and without one there is no step.
            self._end(job)

    def _read(self, job: _Job, store: SnapshotStore) -> None:
        future = asyncio.get_running_loop().run_in_executor(self._thread, store.read, job.command.filename)
        self._n_reading += 1

        def done() -> None:
            self._n_reading -= 1
            if error := future.exception():
                job.respond(_error_of(error, job))
                return
            job.snapshot, job.n_bytes = future.result()
            job.read_seconds = self._clock() - job.started
            n_tokens = len(job.snapshot.tokens) // WIDTH
            if n_tokens > self._n_ctx:
                message = f"{job.command.filename} has {n_tokens} tokens, but a slot holds at most {self._n_ctx}"
                job.respond(InvalidRequestError(message, param="filename"))
            elif not self._may_have_digests and unpacked(job.snapshot.tokens).min(initial=0) < 0:
                # llama-server's words. No prompt of this server could continue it.
                has = f"{job.command.filename} has an image, or was computed with an activated adapter"
                message = f"Cannot restore media tokens without an mmproj: {has}"
                job.respond(InvalidRequestError(message, param="filename"))
            else:
                self._waiting.append(job)

        future.add_done_callback(lambda _: self._post(done))

    @property
    def _may_have_digests(self) -> bool:
        """True if prompts of this server may have digests in place of tokens: images, or activated adapters."""
        info = self._backend.info
        return info.projector is not None or any(each.invocation for each in info.adapters)

    def _write(self, job: _Job, save: SlotSave) -> None:
        assert self._store is not None
        kvs = {number: kv for number in save.numbers if (kv := self._backend.kv_of(number)) is not None}
        self._cache.free_saved(kvs)
        if len(kvs) < len(save.numbers):
            job.respond(ServerError("not enough memory to save the slot"))
            return
        parts = tuple(SnapshotPart(each.start, each.end, kvs[each.segment]) for each in save.saves)
        state = kvs[save.take.checkpoint] if save.take is not None else None
        checkpoints = tuple(
            SnapshotPart(end, end, kv)
            for number, end in save.checkpoints
            if (kv := self._backend.kv_of(number)) is not None
        )
        snapshot = SlotSnapshot(save.namespace, save.tokens, parts, state, checkpoints)
        write = self._store.write
        future = asyncio.get_running_loop().run_in_executor(self._thread, write, job.command.filename, snapshot)

        def done() -> None:
            if error := future.exception():
                job.respond(_error_of(error, job))
            else:
                job.n_bytes = future.result()
                self._end(job)

        future.add_done_callback(lambda _: self._post(done))

    def _end(self, job: _Job) -> None:
        ms = (self._clock() - job.started) * 1e3
        command, n_tokens = job.command, job.n_tokens
        _log.info(_EVENTS[command.action], slot=command.slot, tokens=n_tokens, bytes=job.n_bytes, ms=round(ms, 2))
        job.respond(SlotActionDone(n_tokens, job.n_bytes, ms))


def _error_of(error: BaseException, job: _Job) -> LlamaslotError:
    name = job.command.filename
    if isinstance(error, FileNotFoundError) and job.command.action == "restore":
        return InvalidRequestError(f"there is no file {name}", param="filename")
    if isinstance(error, IsADirectoryError):
        return InvalidRequestError(f"{name} is a folder", param="filename")
    if isinstance(error, FileExistsError):
        return InvalidRequestError(f"{name} {error.strerror}", param="filename")
    if isinstance(error, InvalidSnapshotError):
        return InvalidRequestError(f"{name} cannot be restored: {error}", param="filename")
    if isinstance(error, OSError):
        return ServerError(f"{name} cannot be used: {error.strerror or error}")
    _log.error("slot.failed", exc_info=error)
    return ServerError(f"{name} cannot be used")
