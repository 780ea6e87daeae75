"""Engine: the step loop takes in commands, plans, lets the worker decode, commits, and sends events.

All state lives on one event loop, so there are no locks: commands that arrive while a step runs wait in the inbox
until it has been committed. Queries that only read are answered even while costs are measured. While the worker
decodes a step, the loop delivers the text of the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

import msgspec
import structlog

from llamaslot.base import commands
from llamaslot.base.backend import Backend, Status
from llamaslot.base.errors import (
    ConfigError,
    InvalidRequestError,
    LlamaslotError,
    NotSupportedError,
    ServerError,
    UnavailableError,
    stopped_error,
)
from llamaslot.base.events import Cancelled, Event, Failed, ModelLoaded, Progress, Reply, Started, Stopped
from llamaslot.base.kv_ops import NotSavedError
from llamaslot.base.namespaces import PUBLIC_SALT
from llamaslot.engine.constraint_worker import ConstraintWorker
from llamaslot.engine.disk_worker import Disk, DiskWorker
from llamaslot.engine.measurements import IDLE_S, PendingCosts, PendingSelfTest, ReadMemory, watch_memory
from llamaslot.engine.model_worker import ModelWorker, StepWatch
from llamaslot.engine.queries import Queries, Respond, SlotActions
from llamaslot.engine.remote_worker import RemoteWorker
from llamaslot.engine.reply_stream import ReplyStream, prefill_events
from llamaslot.kvcache.cache_settings import Budgets, cache_settings
from llamaslot.kvcache.slot_snapshots import SnapshotStore
from llamaslot.kvcache.tiers.remote_tier import RemoteStore
from llamaslot.scheduler.request import Request, RequestEvent, RequestState
from llamaslot.scheduler.scheduler import (
    INVALID_LOGITS,
    ConstraintFailed,
    DecodeFailed,
    Sampled,
    Scheduler,
    Scored,
)
from llamaslot.scheduler.step import StepPlan, StepResult

_FLUSH_TIMEOUT_S = 5.0
"""Time that shutting down may take to write what is not on disk yet."""
_CLOSE_TIMEOUT_S = 5.0
"""Time after that for calls that still run: of the disk, of slot files."""
_UNLOADED = "the model is unloaded"
_MAX_FATAL_DECODES = 3
"""Requests in a row that may fail alone because llama.cpp could not compute; the engine then ends."""

_log = structlog.get_logger(__name__)


class Engine:
    """Runs requests on a backend, whose calls are made on `thread` alone.

    Every method is called on the event loop of `run`, which ends the thread at its end. `gap_ms` is about the
    longest time between two tokens of a stream while prompts are computed (`--prefill-gap-ms`).

    Offloaded prefixes are written to `disk`, if there is one, and shared with other servers through `remote`;
    `lacks_disk` is True if a disk is configured but cannot be used, so that its content cannot be deleted.
    `snapshots` has files for what single slots hold. `watch` is told of steps. `read_memory` is called now and then
    on another thread: RAM is given back while memory is short.

    With `debug_invariants` the cache is compared with the backend whenever nothing runs; a difference ends the
    engine.
    """

    _stopping = False
    """True once `run` has been told to end."""
    _is_closed = False
    """True once nothing is written to disk any more."""
    _is_checked = False
    """True if the cache was compared with the backend since the last step (`debug_invariants`)."""
    _is_loaded = True
    _must_unload = _must_load = False
    """True if the model is to be unloaded or loaded before the next plan."""
    _is_urgent = False
    """True if it is unloaded although a measurement is about to begin."""
    _must_clear = False
    """True if cells may hold infinite KV, although no sequence has them any more."""
    _n_arrived = 0
    _n_fatal = 0
    """Requests that failed with `Status.FATAL` since a decode succeeded."""
    has_hung_thread = False
    """True if `run` has ended, but one of the threads has not: it still uses the disk."""

    def __init__(
        self,
        backend: Backend,
        on_events: Callable[[list[Event]], None],
        budgets: Budgets,
        *,
        gap_ms: float,
        thread: Executor,
        watch: StepWatch,
        debug_invariants: bool = False,
        lacks_disk: bool = False,
        disk: Disk | None = None,
        remote: RemoteStore | None = None,
        snapshots: SnapshotStore | None = None,
        clock: Callable[[], float] = time.perf_counter,
        read_memory: ReadMemory | None = None,
    ) -> None:
        info = backend.info
        self._backend = backend
        self._on_events = on_events
        self._clock = clock
        self._debug_invariants = debug_invariants
        for_cache = cache_settings(
            backend,
            budgets,
            disk,
            gap_ms=gap_ms,
            has_remote=remote is not None,
            has_slot_files=snapshots is not None,
        )
        disk = disk if for_cache.writes else None
        on_disk = disk.take_segments() if disk is not None else ()
        self.scheduler = Scheduler(
            info,
            for_cache,
            eog=backend.vocab.eog,
            control=set(backend.vocab.named_tokens.values()) - set(backend.vocab.added_tags.values()),
            on_disk=on_disk,
            first_number=disk.first_number if disk is not None else 0,
        )
        self._dropper = self.scheduler.cache.dropper
        self._watch = watch
        self._worker = ModelWorker(backend, thread, clock, self._needs_plan, watch)
        self._constraints = ConstraintWorker(backend, self._post)
        self._disk: DiskWorker | None = None
        if disk is not None:
            too_large = self.scheduler.cache.ignored
            disk.ignore(too_large)
            _log.info("disk.restored", segments=len(on_disk) - len(too_large), larger_than_ram=len(too_large))
            self._disk = DiskWorker(disk, backend, self.scheduler.cache, self._post, clock)
        self._remote: RemoteWorker | None = None
        if remote is not None and for_cache.uploads:
            self._remote = RemoteWorker(remote, backend, self.scheduler.cache.remote, self._post, clock)
        self._outer_tiers = [each for each in (self._disk, self._remote) if each is not None]
        self._read_memory = read_memory
        self._self_test = PendingSelfTest(backend, clock)
        self._costs = PendingCosts(backend)
        # Without checkpoints, sequences with the same tokens would be made to share cells, which is not tested yet.
        self.scheduler.cache.settings.is_on_trial = self._self_test.is_pending and info.keeps_checkpoints
        self._slot_actions = SlotActions(snapshots, backend, self.scheduler, post=self._post, clock=clock)
        self._queries = Queries(
            self.scheduler,
            backend,
            self._self_test,
            self._slot_actions,
            disk=self._disk,
            remote=self._remote,
            lacks_disk=lacks_disk,
        )
        self._replies: dict[str, ReplyStream] = {}
        """Requests that have not had their terminal event."""
        self._inbox: deque[Callable[[], None]] = deque()
        self._has_commands = False
        """True if the inbox has an action for which a measurement of costs is stopped."""
        self._outbox: list[Event] = []
        self._wake = asyncio.Event()

    def send(self, command: commands.EngineCommand) -> None:
        """Hand in a command; it takes effect between two steps."""
        match command:
            case commands.Generate():
                arrived = self._clock() - command.waited_s
                self._post(lambda: self._begin(command, arrived))
            case commands.Cancel():
                self._post(lambda: self._cancel(command.completion_id))
            case commands.Query(query_id, body):
                interrupts = not isinstance(body, commands.ReadOnlyQuery)
                self._post(lambda: self._answer(body, partial(self._reply, query_id)), interrupts=interrupts)
            case commands.Unload(is_urgent):
                self._post(lambda: self._ask_to_unload(is_urgent=is_urgent), interrupts=is_urgent)
            case commands.Load():
                self._post(self._ask_to_load, interrupts=False)
            case commands.WriteTexts(records) if self._disk is not None and not self._is_closed:
                self._disk.write_texts(records)

    def stop(self) -> None:
        """End `run` after the current step; unfinished requests fail as unavailable."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Run steps until `stop`, or until an error that is not one request's."""
        reason = ""
        watching: asyncio.Task[None] | None = None
        if self._read_memory is not None:
            wake = partial(self._post, lambda: None, interrupts=False)
            memory = watch_memory(self._read_memory, self.scheduler.cache, wake, self._clock)
            watching = asyncio.create_task(memory, name="memory-watch")
        if self._remote is not None:
            self._remote.check()
        try:
            while not self._stopping:
                await self._step()
            if self._outer_tiers:
                await self._flush_tiers()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            _log.exception("engine.died")
        finally:
            self._stopping = True
            if watching is not None:
                watching.cancel()
            self._worker.close()
            self._watch.end()
            if not reason:
                self._fail_all()
            # After an error it is for the service to fail requests, or to give them to another engine.
            self._end_all()
            self._outbox.append(Stopped(reason))
            self._flush()
            ends = [self._slot_actions.close(), *self._constraints.close()]
            self._is_closed = True
            for each in self._outer_tiers:
                ends += each.close()
            _, pending = await asyncio.wait(map(asyncio.wrap_future, ends), timeout=_CLOSE_TIMEOUT_S)
            self.has_hung_thread = bool(pending)

    async def _step(self) -> None:
        # 1. Commands that have come since the last step.
        self._watch.begin()
        self._take_inbox()
        if self._must_load:
            await self._reload()
            if self._stopping:
                return
        if self._is_loaded:
            self._slot_actions.begin()
        self._flush()
        # 2. What needs an idle pool, or empties it.
        if self._must_clear:
            await self._clear_pool()
        if self._self_test.is_pending:
            await self._test_reuse()
        if self._must_unload:
            await self._unload()
        if self._is_loaded:
            unified = self.scheduler.wants_unified(self._clock())
            if unified != self.scheduler.cache.settings.unified:
                await self._change_layout(unified=unified)
        # 3. The plan, and the events that come before its step.
        plan = self.scheduler.plan(self._clock())
        if self.scheduler.admitted:
            self._outbox += [
                Started(each.id, each.n_matched, each.miss, each.n_lost) for each in self.scheduler.admitted
            ]
            self._flush()
        self._outbox += prefill_events(plan, self._replies, self._clock())
        self._flush()
        # 4. The step, whose results `_commit` takes over; without one the engine idles.
        if plan:
            self._is_checked = False
            if plan.work:
                self._costs.note(self._clock(), is_idle=False)
            await self._carry_out(plan)
        else:
            await self._idle()

    async def _carry_out(self, plan: StepPlan) -> None:
        """Carry out a plan and the steps that follow it, then end the requests whose text has ended."""
        await self._worker.run(plan, self._commit)
        self.scheduler.end_ending(self._clock())

    async def _idle(self) -> None:
        """Check and measure what can be while nothing runs, then wait for a command or a deadline."""
        if self._debug_invariants and not self._is_checked and self._is_loaded:
            await self._check_invariants()
        background = self.scheduler.admission.background
        # A background request that waits does not fit, and keeps nothing busy.
        n_others = len(self._replies) - (background is not None and background.state is RequestState.QUEUED)
        is_busy = self._has_commands or n_others or self._stopping or self._self_test.is_pending
        is_idle = self._is_loaded and not is_busy
        self._costs.note(self._clock(), is_idle=is_idle)
        due_at = self._costs.due_at
        if due_at is not None and due_at <= self._clock():
            await self._measure_costs()
            return
        if not self._inbox and not self._stopping:
            times = (self.scheduler.deadlines.idle, due_at)
            await self._sleep(min((each for each in times if each is not None), default=None))
        self._wake.clear()

    async def _flush_tiers(self) -> None:
        """Write what is cached to disk, and upload it, for at most `_FLUSH_TIMEOUT_S`."""
        until = self._clock() + _FLUSH_TIMEOUT_S
        self.scheduler.stop(self._clock())
        self._fail_all()
        self._flush()
        while (now := self._clock()) < until:
            self._take_inbox()
            if plan := self.scheduler.plan(now):
                await self._carry_out(plan)
            elif any(each.is_busy for each in self._outer_tiers):
                self._wake.clear()
                await self._sleep(until)
            else:
                return

    async def _sleep(self, until: float | None) -> None:
        """Wait for a command, or for a time on the clock."""
        self._watch.end()
        seconds = None if until is None else max(0.0, until - self._clock())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)

    def _commit(self, plan: StepPlan, result: StepResult) -> None:
        self._slot_actions.done(result.incomplete)
        if result.unsaved:
            _log.error("offload.out_of_memory", segments=len(result.unsaved))
        if result.incomplete:
            _log.error("load.out_of_memory", sequences=len(result.incomplete))
        now = result.started + result.seconds
        outcomes = self.scheduler.commit(plan, result, now)
        if result.decoded.status is Status.OK:
            done = plan.without(result.incomplete)
            self._outbox += prefill_events(done, self._replies, now, is_computed=True)
        if self._disk is not None:
            self._disk.start(plan.jobs)
        if self._remote is not None:
            self._remote.start(plan.uploads)
        for outcome in outcomes:
            match outcome:
                case Sampled():
                    self._deliver(outcome, now)
                case Scored(request, scores):
                    self._outbox.append(self._replies[request.id].scored(scores, request.progress(now)))
                case DecodeFailed():
                    self._fail_decode(outcome)
                case ConstraintFailed(request, message):
                    del self._replies[request.id]
                    self._fail(request.id, InvalidRequestError(message), request)
        self._queries.count(plan, result)
        self._flush()
        if plan.work and result.decoded.status is Status.OK:
            self._n_fatal = 0
        if self._n_fatal >= _MAX_FATAL_DECODES:
            raise RuntimeError(f"llama.cpp could not compute {self._n_fatal} requests in a row")

    async def _check_invariants(self) -> None:
        """Compare the cache with itself and the backend, while nothing runs; raises `AssertionError`."""
        cache = self.scheduler.cache
        await self._worker.call(lambda: cache.check(self._backend.seq_range))
        self._is_checked = True
        _log.debug("invariants.ok", cells_used=cache.cells.used)

    async def _test_reuse(self) -> None:
        """Run the self-test of reuse if it is due, and use or drop what was kept until then."""
        scheduler = self.scheduler
        scheduler.admission.is_held = self._self_test.holds_requests
        if self._stopping or scheduler.running or not self._self_test.is_due(is_waiting=bool(scheduler.queue)):
            return
        await self._carry_out_operations()
        try:
            # If it were known how long it takes, it would not be pending.
            with self._watch.paused():
                tested = await self._self_test.run(
                    self._worker.call, is_busy=lambda: bool(self._inbox), is_stopping=lambda: self._stopping
                )
        except NotSavedError:
            self._dropper.drop_resident()
            return
        finally:
            scheduler.admission.is_held = False
        if tested is None:
            return
        allows_reuse = not self._self_test.why_not_reused
        if not allows_reuse:
            self._dropper.drop_resident()
        scheduler.end_trial(self._backend.info, allows_reuse=allows_reuse)
        self._outbox.append(tested)
        self._flush()

    async def _change_layout(self, *, unified: bool) -> None:
        """Make the context again with the pool unified or in parts; what it holds goes to RAM before that."""
        scheduler, started = self.scheduler, self._clock()
        n_cells = scheduler.cache.cells.used
        await self._empty_pool()
        try:
            with self._watch.paused():
                await self._worker.call(lambda: self._backend.set_layout(unified=unified))
        except MemoryError as error:
            if unified:
                # In parts, the request that is too long could not run. An engine that starts again is unified.
                raise
            scheduler.keeps_layout = True
            _log.warning("layout.kept", reason=str(error))
            return
        scheduler.set_layout(self._backend.info, self._backend.n_seqs)
        seconds = round(self._clock() - started, 3)
        _log.info("layout.changed", unified=unified, cells=n_cells, seconds=seconds)

    async def _empty_pool(self) -> None:
        """Move all that the pool holds to RAM, as far as it fits."""
        self.scheduler.empty_pool(self._clock())
        await self._carry_out_operations()

    async def _carry_out_operations(self) -> None:
        """Carry out what is planned for the sequences, without a decode."""
        if operations := self.scheduler.cache.take_operations():
            await self._carry_out(StepPlan(operations))

    async def _clear_pool(self) -> None:
        """Empty the pool and clear its data; running requests start again from what is in RAM.

        Without flash attention, llama.cpp masks cells of other sequences, and free ones, by weights of zero, which
        times infinity is no number: other requests would get invalid logits too, until all those cells are used
        again.
        """
        self._must_clear = False
        n_cells = self.scheduler.cache.cells.used
        await self._empty_pool()
        await self._worker.call(self._backend.clear)
        _log.warning("pool.cleared", cells=n_cells, reason="invalid logits without flash attention")

    def _ask_to_unload(self, *, is_urgent: bool) -> None:
        """Have the model unloaded in this step, unless something needs it."""
        self._cancel_background()
        self._must_unload, self._is_urgent = True, is_urgent

    def _ask_to_load(self) -> None:
        """Have the model loaded in this step."""
        self._must_load = True

    @property
    def _needs_model(self) -> bool:
        """True if a command that has come needs the model, or a measurement is about to."""
        due_at = self._costs.due_at
        is_due = due_at is not None and due_at - self._clock() < IDLE_S
        is_busy = self._slot_actions.is_busy or self._self_test.is_pending
        return bool(self._replies) or is_busy or (is_due and not self._is_urgent) or self._stopping

    async def _unload(self) -> None:
        """Free the model, after what the pool holds went to RAM, unless anything needs it; and answer."""
        self._must_unload = False
        started, n_cells = self._clock(), self.scheduler.cache.cells.used
        if self._is_loaded and not self._needs_model:
            await self._empty_pool()
            with self._watch.paused():
                await self._worker.call(self._backend.unload)
            self._is_loaded = False
            _log.info("model.unloaded", cells=n_cells, seconds=round(self._clock() - started, 3))
        self._outbox.append(ModelLoaded(self._is_loaded))
        self._flush()

    async def _reload(self) -> None:
        """Load the model unless it is loaded, and answer. Commands are taken meanwhile."""
        self._must_load = False
        if self._is_loaded:
            self._outbox.append(ModelLoaded(True))
            return
        started = self._clock()
        loading = asyncio.ensure_future(self._worker.call(lambda: self._backend.reload(lambda: self._stopping)))
        loading.add_done_callback(lambda _: self._wake.set())
        with self._watch.paused():
            while not loading.done():
                self._take_inbox()
                self._flush()
                self._wake.clear()
                await self._wake.wait()
        try:
            loading.result()
        except ConfigError as error:
            if not self._stopping:
                _log.error("model.not_loaded", reason=error.message)
                reason = f"the model could not be loaded again: {error.message}"
                self._outbox.append(ModelLoaded(False, reason))
                self._flush()
            return
        self._is_loaded = True
        _log.info("model.loaded", seconds=round(self._clock() - started, 3))
        self._outbox.append(ModelLoaded(True))

    async def _measure_costs(self) -> None:
        """Measure the costs that are pending, once the pool is empty: idle prefixes go to RAM for that.

        Not where slots can be saved: a client may be about to do that.
        """
        cache = self.scheduler.cache
        if cache.cells.used:
            if self._slot_actions.has_store or not cache.vacate():
                self._costs.postpone(self._clock())
            # The next plan carries it out.
            return
        self._watch.end()
        measuring = asyncio.ensure_future(
            self._costs.measure(self._worker.call, lambda: self._stopping or self._has_commands)
        )
        measuring.add_done_callback(lambda _: self._wake.set())
        is_watched = False
        while not measuring.done():
            # Read-only queries are answered meanwhile: an open page sends one each second.
            if not self._has_commands:
                self._take_inbox()
                self._flush()
            elif not is_watched:
                # The first command waits for the end of one step; those after it do not move the deadline.
                is_watched = True
                self._watch.begin()
            self._wake.clear()
            await self._wake.wait()
        if measuring.result():
            self.scheduler.set_costs(self._backend.info)
            cost = self._backend.info.kv_cost
            self._watch.expect(cost.prefill_us if cost is not None else 0.0)
        elif self._has_commands:
            self._costs.stopped(self._clock())
        else:
            self._costs.postpone(self._clock())

    def _needs_plan(self) -> bool:
        """True if the next step needs a plan; called on the worker's thread."""
        until = self.scheduler.deadlines.running
        is_due = until is not None and self._clock() >= until
        scheduler = self.scheduler
        return self._stopping or bool(self._inbox) or is_due or scheduler.has_drafts or bool(scheduler.ending)

    def _reply(self, query_id: str, answer: msgspec.Struct | LlamaslotError) -> None:
        if isinstance(answer, LlamaslotError):
            self._outbox.append(Reply(query_id, error=answer.info()))
        else:
            self._outbox.append(Reply(query_id, answer))

    def _answer(self, body: commands.EngineQuery, respond: Respond) -> None:
        if isinstance(body, commands.ClearCache | commands.DropPaths | commands.SlotAction):
            # None of them waits for it, or leaves what it uses.
            self._cancel_background()
        if isinstance(body, commands.SlotAction | commands.LayOutImages) and not self._is_loaded:
            respond(UnavailableError(_UNLOADED))
            return
        self._queries.answer(body, respond)

    def _cancel_background(self) -> None:
        background = self.scheduler.admission.background
        if background is not None:
            self._cancel(background.id)

    def _post(self, action: Callable[[], None], *, interrupts: bool = True) -> None:
        """Have an action done between two steps; a measurement of costs is stopped for it if it `interrupts`."""
        self._inbox.append(action)
        self._has_commands |= interrupts
        self._wake.set()

    def _take_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        self._has_commands = False

    def _flush(self) -> None:
        if self._outbox:
            events, self._outbox = self._outbox, []
            self._on_events(events)

    def _begin(self, command: commands.Generate, arrived: float) -> None:
        if command.params.cache_salt == PUBLIC_SALT and not self.scheduler.cache.settings.offloads:
            message = "'cache_public' needs prefixes in RAM, which are off here; the start line of the log says why"
            self._fail(command.params.completion_id, NotSupportedError(message, param="cache_public"))
            return
        if not self._is_loaded:
            self._fail(command.params.completion_id, UnavailableError(_UNLOADED))
            return
        self._n_arrived += 1
        cache, params, why_not = self.scheduler.cache, command.params, self._self_test.why_not_reused
        if cache.settings.can_reuse and why_not:
            # Choices of one prompt may not share a state before the self-test has passed either.
            params = msgspec.structs.replace(params, group="")
        request = Request(
            params,
            command.prompt,
            arrival=self._n_arrived,
            now=arrived,
            can_reuse=cache.settings.can_reuse and (not why_not or cache.settings.is_on_trial),
            why_not=why_not or "unsupported",
        )
        has_places = bool(command.prompt.images) or request.activation is not None
        if params.shift.is_on and (self._backend.info.unshifted_reason or has_places):
            # It could be shifted when the server started, but the self-test has failed since. Or tiles of images
            # and the invocation of an adapter would be at other places, or in part be discarded.
            shift = msgspec.structs.replace(params.shift, is_on=False)
            request.params = msgspec.structs.replace(params, shift=shift)
        if params.is_background and request.is_private:
            # Nothing of it would be kept.
            self._outbox.append(Cancelled(request.id))
            return
        background = self.scheduler.admission.background
        # The turn that was computed ahead has come: it continues from what was computed.
        if background is not None and (params.is_background or request.continues(background)):
            self._cancel_background()
        if params.pin and (refusal := self.scheduler.why_not_pinned(request)):
            message = f"'pin': {refusal}; unpin one by sending it with 'pin': false, or all by /cache/clear"
            self._fail(request.id, InvalidRequestError(message, param="pin"))
            return
        self.scheduler.submit(request)
        self._replies[request.id] = ReplyStream(request, self._backend.vocab)

        def failed(error: LlamaslotError) -> None:
            self.scheduler.end(request, self._clock(), cancelled=True)
            del self._replies[request.id]
            self._fail(request.id, error, request)

        self._constraints.compile_for(request, failed)
        if self._remote is not None and not params.is_background:
            self._remote.look_up(request, self.scheduler.admission)

    def _cancel(self, completion_id: str) -> None:
        reply = self._replies.pop(completion_id, None)
        if reply is None:
            return
        now = self._clock()
        self.scheduler.end(reply.request, now, cancelled=True)
        self._outbox.append(Cancelled(completion_id, self._progress(reply.request, now), reply.generated()))

    def _deliver(self, sampled: Sampled, now: float) -> None:
        """Send the text of a sampled token; a stop string in it ends the request."""
        reply = self._replies[sampled.request.id]
        text, reason, n_unused = reply.push(sampled)
        reply.request.drop_tokens(n_unused)
        if reason is not None and sampled.reason is None:
            # The worker may have begun another step with it.
            self.scheduler.end_by_text(reply.request)
        if reason is not None:
            del self._replies[reply.request.id]
            progress = self._progress(reply.request, now)
            truncated = (sampled.truncated and not n_unused) or reply.request.n_discarded > 0
            self._outbox.append(reply.finished(text, reason, progress, truncated=truncated, vector=sampled.vector))
        elif text:
            shown = self._progress(reply.request, now) if reply.wants_progress else None
            self._outbox.append(reply.output(text, shown))

    def _fail_decode(self, failed: DecodeFailed) -> None:
        _log.error("decode.failed", request_id=failed.request.id, reason=failed.reason, retried=failed.is_retried)
        self._must_clear |= failed.reason == INVALID_LOGITS and not self._backend.info.flash_attn
        if failed.is_retried:
            return
        self._n_fatal += failed.reason == Status.FATAL.name
        del self._replies[failed.request.id]
        error = ServerError(f"the model could not compute this request ({failed.reason})")
        self._fail(failed.request.id, error, failed.request)

    def _fail(self, completion_id: str, error: LlamaslotError, request: Request | None = None) -> None:
        progress = self._progress(request, self._clock()) if request is not None else None
        self._outbox.append(Failed(completion_id, error.info(), progress))

    def _fail_all(self) -> None:
        """Fail all unfinished requests because the engine was told to stop."""
        for completion_id, reply in self._replies.items():
            self._fail(completion_id, stopped_error(""), reply.request)
        self._end_all()

    def _end_all(self) -> None:
        """End all unfinished requests without the scheduler, whose state may be undefined."""
        # Those in `ending` were answered, so no reply is left.
        for request in (*(reply.request for reply in self._replies.values()), *self.scheduler.ending):
            if request.state is not RequestState.DONE:
                request.handle(RequestEvent.END, self._clock())
        self._replies.clear()

    def _progress(self, request: Request, now: float) -> Progress:
        return request.progress(now, self.scheduler.cache.length(request.slot) if request.slot >= 0 else 0)
