"""Engine: the step loop takes in commands, plans, lets the worker decode, commits, and sends events.

All state lives on one event loop, so there are no locks: commands that arrive while a step runs wait in the inbox
until it has been committed. While the worker decodes a step, the loop delivers the text of the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any

import msgspec
import structlog

from llamaslot.base import commands
from llamaslot.base.backend import Backend
from llamaslot.base.commands import CacheCleared
from llamaslot.base.errors import LlamaslotError, NotFoundError, ServerError, UnavailableError, stopped_error
from llamaslot.base.events import Accepted, Cancelled, Event, Failed, Reply, Stopped
from llamaslot.base.prompt import TokenizedPrompt
from llamaslot.engine.disk_worker import Disk, DiskWorker
from llamaslot.engine.engine_settings import EngineSettings, cache_settings, check_submit
from llamaslot.engine.model_worker import Worker, model_thread
from llamaslot.engine.reply_stream import ReplyStream
from llamaslot.engine.reports import Reports, Respond
from llamaslot.engine.slot_actions import SlotActions
from llamaslot.kvcache.offload.slot_snapshot import SnapshotStore
from llamaslot.prompts.prompt_worker import PromptWorker
from llamaslot.prompts.tokenizer import Tokenizer
from llamaslot.scheduler.request import Request, RequestEvent, RequestState
from llamaslot.scheduler.scheduler import DecodeFailed, Sampled, Scheduler
from llamaslot.scheduler.step import StepPlan, StepResult

_FLUSH_TIMEOUT_S = 5.0
"""Time that shutting down may take to write what is not on disk yet."""
_CLOSE_TIMEOUT_S = 5.0
"""Time after that for calls that still run: of the disk, of slot files, of the tokenizer."""

_log = structlog.get_logger(__name__)


class Engine:
    """Runs requests on a backend, whose calls are made on `thread` alone.

    Every method is called on the event loop of `run`, which ends the thread at its end. Offloaded prefixes are
    written to `disk`, if there is one; `snapshots` has files for what single slots hold.
    """

    def __init__(
        self,
        backend: Backend,
        on_events: Callable[[list[Event]], None],
        settings: EngineSettings,
        *,
        disk: Disk | None = None,
        snapshots: SnapshotStore | None = None,
        clock: Callable[[], float] = time.perf_counter,
        thread: Executor | None = None,
    ) -> None:
        info = backend.info
        self._backend = backend
        self._on_events = on_events
        self._clock = clock
        self._debug_invariants = settings.debug_invariants
        sizes = cache_settings(backend, settings, disk)
        disk = disk if sizes.writes else None
        on_disk = disk.take_segments() if disk is not None else ()
        self.scheduler = Scheduler(
            info,
            sizes,
            eog=backend.vocab.eog,
            on_disk=on_disk,
            first_number=disk.first_number if disk is not None else 0,
        )
        tokenizer = Tokenizer(
            backend.vocab,
            info.n_ctx_slot,
            # EOS after every prompt would also follow the text before a cut point.
            use_anchors=settings.text_anchors and info.reuse and not info.adds_eos,
            min_match=settings.session_min_match,
            template=info.chat_template,
        )
        self._worker = Worker(backend, thread or model_thread(), clock, self._needs_plan)
        self._disk: DiskWorker | None = None
        self._prompts = PromptWorker(tokenizer, post=self._post, fail=self._fail)
        if disk is not None:
            too_large = self.scheduler.cache.ignored
            disk.ignore(too_large)
            _log.info("disk.restored", segments=len(on_disk) - len(too_large), larger_than_ram=len(too_large))
            self._disk = DiskWorker(disk, backend, self.scheduler.cache, self._post, clock)
            self._prompts.keep_in(disk.texts, self._disk.submit)
        self._reports = Reports(self.scheduler, self._prompts, backend.vocab)
        self._slot_actions = SlotActions(snapshots, backend, self.scheduler, post=self._post, clock=clock)
        self._queries: dict[type[msgspec.Struct], Callable[[Any, Respond], None]] = {
            commands.DropSession: self._drop_session,
            commands.InspectEngine: self._between_steps(lambda _, respond: respond(self._reports.engine_state())),
            commands.InspectCache: self._between_steps(
                lambda query, respond: respond(self._reports.cache_state(query))
            ),
            commands.SlotAction: self._between_steps(self._slot_actions.handle),
            commands.ClearCache: self._between_steps(self._clear_cache),
        }
        self._replies: dict[str, ReplyStream] = {}
        """Requests between `Accepted` and their terminal event."""
        self._inbox: deque[Callable[[], None]] = deque()
        self._outbox: list[Event] = []
        self._wake = asyncio.Event()
        self._stopping = False
        self._is_checked = False
        self._n_arrived = 0
        self.has_hung_thread = False
        """True if `run` has ended, but one of the threads has not: it still uses the disk or the vocabulary."""

    def send(self, command: commands.Command) -> None:
        """Hand in a command; it takes effect between two steps."""
        match command:
            case commands.Submit():
                self._prompts.submit(command.completions(), partial(self._accept, self._clock()))
            case commands.Cancel():
                self._post(lambda: self._cancel(command.request_id))
            case commands.Query(request_id, body) if isinstance(body, commands.TokenQuery):
                self._prompts.answer(request_id, body, partial(self._reply, request_id))
            case commands.Query(request_id, body):
                self._queries[type(body)](body, partial(self._reply, request_id))

    def stop(self) -> None:
        """End `run` after the current step; unfinished requests fail as unavailable."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Run steps until `stop`, or until an error that is not one request's."""
        reason = ""
        self._prompts.start()
        try:
            while not self._stopping:
                await self._step()
            if self._disk is not None:
                await self._flush_disk()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            _log.exception("engine.died")
        finally:
            self._stopping = True
            self._worker.close()
            self._fail_all(reason)
            self._outbox.append(Stopped(reason))
            self._flush()
            ends = [*self._prompts.close(), self._slot_actions.close()]
            if self._disk is not None:
                ends += self._disk.close()
            _, pending = await asyncio.wait(map(asyncio.wrap_future, ends), timeout=_CLOSE_TIMEOUT_S)
            self.has_hung_thread = bool(pending)

    async def _step(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        self._slot_actions.begin()
        self._flush()
        plan = self.scheduler.plan(self._clock())
        for request in self.scheduler.admitted:
            if request.miss in ("diverged", "changed") and request.diverged_at < 0:
                self._prompts.locate(request.id, request.n_matched, partial(setattr, request, "diverged_at"))
        if not plan:
            if self._debug_invariants and not self._is_checked:
                await self._check_invariants()
            if not self._inbox and not self._stopping:
                await self._sleep(self.scheduler.deadlines.idle)
            self._wake.clear()
            return
        self._is_checked = False
        await self._worker.run(plan, self._commit)

    async def _flush_disk(self) -> None:
        """Write what is cached to disk, for at most `_FLUSH_TIMEOUT_S`."""
        assert self._disk is not None
        until = self._clock() + _FLUSH_TIMEOUT_S
        self.scheduler.stop(self._clock())
        self._fail_all("")
        self._flush()
        while (now := self._clock()) < until:
            while self._inbox:
                self._inbox.popleft()()
            if plan := self.scheduler.plan(now):
                await self._worker.run(plan, self._commit)
            elif self._disk.is_writing or self._prompts.is_remembering:
                self._wake.clear()
                await self._sleep(until)
            else:
                return

    async def _sleep(self, until: float | None) -> None:
        """Wait for a command, or for a time on the clock."""
        seconds = None if until is None else max(0.0, until - self._clock())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)

    def _commit(self, plan: StepPlan, result: StepResult) -> None:
        self._slot_actions.done()
        if result.unsaved:
            _log.error("offload.out_of_memory", segments=len(result.unsaved))
        now = result.started + result.seconds
        outcomes = self.scheduler.commit(plan, result, now)
        if self._disk is not None:
            self._disk.start(plan.jobs)
        for outcome in outcomes:
            if isinstance(outcome, Sampled):
                self._deliver(outcome, now)
            else:
                self._fail_decode(outcome)
        self._reports.count(plan, result)
        self._flush()

    async def _check_invariants(self) -> None:
        """Compare the cache with itself and the backend, while nothing runs; raises `AssertionError`."""
        cache = self.scheduler.cache
        await self._worker.call(lambda: cache.check(self._backend.seq_range))
        self._is_checked = True
        _log.debug("invariants.ok", cells_used=cache.cells.used)

    def _needs_plan(self) -> bool:
        """True if the next step needs a plan; called on the worker's thread."""
        until = self.scheduler.deadlines.running
        return self._stopping or bool(self._inbox) or (until is not None and self._clock() >= until)

    def _between_steps(self, handler: Callable[[Any, Respond], None]) -> Callable[[Any, Respond], None]:
        return lambda query, respond: self._post(lambda: handler(query, respond))

    def _reply(self, request_id: str, answer: msgspec.Struct | LlamaslotError) -> None:
        if isinstance(answer, LlamaslotError):
            self._outbox.append(Reply(request_id, error=answer.info()))
        else:
            self._outbox.append(Reply(request_id, answer))

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._wake.set()

    def _flush(self) -> None:
        if self._outbox:
            events, self._outbox = self._outbox, []
            self._on_events(events)

    def _accept(self, now: float, submit: commands.Submit, prompt: TokenizedPrompt) -> None:
        try:
            check_submit(submit, len(prompt.tokens), self._backend.info)
        except LlamaslotError as error:
            self._prompts.release(submit.request_id)
            self._fail(submit.request_id, error)
            return
        self._n_arrived += 1
        can_trim = self._backend.info.reuse
        request = Request(submit, prompt, arrival=self._n_arrived, now=now, can_trim=can_trim)
        self.scheduler.submit(request)
        self._replies[request.id] = ReplyStream(request, self._backend.vocab)
        shown = tuple(prompt.tokens.tolist()) if submit.return_tokens else ()
        self._outbox.append(Accepted(request.id, request.n_prompt, shown))

    def _cancel(self, request_id: str) -> None:
        self._prompts.cancel_query(request_id)
        if self._prompts.cancel(request_id):
            self._outbox.append(Cancelled(request_id))
            return
        live = self._replies.pop(request_id, None)
        if live is None:
            return
        now = self._clock()
        self.scheduler.end(live.request, now, cancelled=True)
        self._release(live)
        progress = live.request.progress(now, self._n_held(live.request))
        self._outbox.append(Cancelled(request_id, progress))

    def _deliver(self, sampled: Sampled, now: float) -> None:
        """Send the text of a sampled token; a stop string in it ends the request."""
        live = self._replies[sampled.request.id]
        text, reason = live.push(sampled)
        if reason == "word" and sampled.reason is None:
            self.scheduler.end(live.request, now)
        progress = live.request.progress(now, self._n_held(live.request))
        if reason is not None:
            finished = live.finished(text, reason, progress, truncated=sampled.truncated)
            self._release(live)
            del self._replies[live.request.id]
            self._outbox.append(finished)
        elif text:
            self._outbox.append(live.output(text, progress))

    def _release(self, live: ReplyStream) -> None:
        """Pass the reply to the tokenizer thread to be remembered, unless the request is private."""
        request = live.request
        if request.is_private or not request.has_started:
            self._prompts.release(request.id)
        else:
            self._prompts.remember(request.id, request.tokens.view(request.n_prompt).copy(), live.n_sent)

    def _fail_decode(self, failed: DecodeFailed) -> None:
        _log.error("decode.failed", request_id=failed.request.id, reason=failed.reason)
        del self._replies[failed.request.id]
        self._prompts.release(failed.request.id)
        error = ServerError(f"the model could not compute this request ({failed.reason})")
        self._fail(failed.request.id, error, failed.request)

    def _fail(self, request_id: str, error: LlamaslotError, request: Request | None = None) -> None:
        progress = request.progress(self._clock(), self._n_held(request)) if request else None
        self._outbox.append(Failed(request_id, error.info(), progress))

    def _fail_all(self, reason: str) -> None:
        """Fail all unfinished requests: because the engine was told to stop, or because of an internal error."""
        error = stopped_error(reason)
        for request_id in self._prompts.cancel_all():
            self._fail(request_id, error)
        for request_id, live in self._replies.items():
            # The scheduler may be in an undefined state, so the request is ended without it.
            if live.request.state is not RequestState.DONE:
                live.request.handle(RequestEvent.END, self._clock())
            self._fail(request_id, error, live.request)
        self._replies.clear()

    def _n_held(self, request: Request) -> int:
        return self.scheduler.cache.length(request.slot) if request.slot >= 0 else 0

    def _clear_cache(self, _: commands.ClearCache, respond: Respond) -> None:
        cleared = self.scheduler.cache.drop()
        _log.info("cache.cleared", **msgspec.structs.asdict(cleared))
        if self._disk is not None:
            self._disk.start(self.scheduler.cache.take_jobs())
        self._prompts.clear(lambda: self._respond_when_written(respond, cleared))

    def _drop_session(self, query: commands.DropSession, respond: Respond) -> None:
        def drop(namespace: str, paths: list[bytes]) -> None:
            if not paths:
                respond(NotFoundError(f"there is no session {query.session_id!r}"))
                return
            dropped = self.scheduler.cache.drop(namespace, paths)
            _log.info("session.dropped", **msgspec.structs.asdict(dropped))
            if self._disk is not None:
                self._disk.start(self.scheduler.cache.take_jobs())
            self._respond_when_written(respond, dropped)

        self._prompts.drop_session(query, drop, respond)

    def _respond_when_written(self, respond: Respond, answer: CacheCleared) -> None:
        """Respond once the disk has carried out all jobs so far, or with an error if it does not."""
        if self._disk is None:
            respond(answer)
            return
        error = UnavailableError(
            "done in the pool and in RAM, but the disk (--cache-disk) does not respond; its files are deleted once "
            "it does"
        )
        self._disk.when_written(lambda ok: respond(answer if ok else error))
