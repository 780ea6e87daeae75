"""The step loop: take in commands, plan, let the worker apply, commit, send events.

All state lives on one event loop, so there are no locks: commands that arrive while a step runs wait in the inbox
until it has been committed. While the worker decodes a step, the loop is free to deliver the text of the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import structlog

from llamaslot.base.backend import Backend
from llamaslot.base.commands import (
    CacheCleared,
    Cancel,
    ClearCache,
    Command,
    Detokenize,
    DropSession,
    InspectCache,
    InspectEngine,
    Query,
    SessionDropped,
    SlotAction,
    Submit,
    Tokenize,
)
from llamaslot.base.errors import (
    ContextSizeError,
    InvalidRequestError,
    LlamaslotError,
    ServerError,
    UnavailableError,
)
from llamaslot.base.events import Accepted, Cancelled, Event, Failed, Finished, FinishReason, Output, Reply, Stopped
from llamaslot.base.prompt import TokenizedPrompt
from llamaslot.engine.disk import Disk, DiskWorker
from llamaslot.engine.reports import Reports, Respond
from llamaslot.engine.slot_actions import SlotActions
from llamaslot.engine.worker import Worker, model_thread
from llamaslot.kvcache.shared import SharedLedger
from llamaslot.kvcache.slot_store import SlotStore
from llamaslot.prompts.tokenizer import Tokenizer
from llamaslot.prompts.worker import PromptWorker
from llamaslot.scheduler.request import Request, RequestEvent, RequestState
from llamaslot.scheduler.scheduler import Broke, Sampled, Scheduler
from llamaslot.scheduler.settings import SchedulerSettings
from llamaslot.scheduler.step import StepPlan, StepResult
from llamaslot.text.stream import TextStream

_WIND_UP_SECONDS = 5.0
"""How long the end may take for what is not on disk yet."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Live:
    """A request between `Accepted` and its terminal event."""

    request: Request
    text: TextStream
    n_sent: int = 0
    """Characters that were sent."""
    unsent: list[int] = field(default_factory=list)
    """Tokens whose text is still held back."""


class Engine:
    """Runs requests on a backend, whose calls are made on `thread` alone.

    Every method is called on the loop that `run` runs on; `run` ends the thread in the end. Prefill makes the time
    between two tokens of a stream about `gap_ms` milliseconds long. Idle prefixes keep at most `idle_cells` cells
    (None: all that nothing else needs), and leave it once `idle_life` prompt tokens are computed beside them (None:
    when their cells are needed); what leaves the pool is stored in up to `ram_bytes` of the host's memory, and from
    there on `disk`, if there is one. `slot_store` has files for what single slots hold. With `anchors` a
    conversation that comes back as text continues from the tokens that were generated for it; where it has a
    session, of whose text `session_min_match` is kept, even if it goes on in another way. With `debug_invariants`
    the ledger is compared with the backend whenever nothing runs, and a difference ends the engine.
    """

    def __init__(
        self,
        backend: Backend,
        on_events: Callable[[list[Event]], None],
        *,
        gap_ms: float = 100.0,
        idle_cells: int | None = None,
        idle_life: int | None = None,
        ram_bytes: int = 0,
        disk: Disk | None = None,
        slot_store: SlotStore | None = None,
        anchors: bool = True,
        session_min_match: float = 0.8,
        debug_invariants: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        thread: Executor | None = None,
    ) -> None:
        info, cost = backend.info, backend.info.kv_cost
        self._backend = backend
        self._on_events = on_events
        self._clock = clock
        self.scheduler = Scheduler(
            SchedulerSettings(
                n_slots=info.n_slots,
                n_ctx=info.n_ctx,
                n_ctx_slot=info.n_ctx_slot,
                n_ubatch=info.n_ubatch,
                n_seqs=backend.n_seqs,
                may_move=info.flash_attn,
                idle_cells=idle_cells,
                idle_life=idle_life,
                ram_bytes=ram_bytes,
                disk_bytes=disk.capacity if disk is not None else 0,
                segment_size=info.segment_size,
                prefill_us=cost.prefill_us if cost is not None else 0.0,
                save_us=cost.first_save_us if cost is not None else 0.0,
                load_us=cost.load_us if cost is not None else 0.0,
                step_cost=info.step_cost,
                unified=info.unified,
                reuse=info.reuse,
                stream_copy_ms=info.stream_copy_ms,
                gap_ms=gap_ms,
                eog=backend.vocab.eog,
            )
        )
        tokenizer = Tokenizer(
            backend.vocab,
            info.n_ctx_slot,
            # A token behind every prompt would be behind what comes before a cut, too.
            use_anchors=anchors and info.reuse and not info.adds_eos,
            min_match=session_min_match,
            template=info.chat_template,
        )
        self._worker = Worker(backend, thread or model_thread(), clock, self._is_wanted)
        self._disk: DiskWorker | None = None
        ledger = self.scheduler.ledger
        if disk is not None and self.scheduler.settings.writes and isinstance(ledger, SharedLedger):
            self._disk = DiskWorker(disk, backend, ledger, self._post, clock)
            self._disk.restore()
        self._prompts = PromptWorker(tokenizer, post=self._post, fail=self._fail)
        if disk is not None and self._disk is not None:
            self._prompts.keep_in(disk, self._disk.write)
        self._reports = Reports(self.scheduler, self._prompts, backend.vocab)
        self._slot_actions = SlotActions(slot_store, backend, self.scheduler, post=self._post, clock=clock)
        self._queries: dict[type[msgspec.Struct], Callable[[Any, Respond], None]] = {
            Tokenize: self._prompts.answer,
            Detokenize: self._prompts.answer,
            DropSession: self._drop_session,
            InspectEngine: self._between_steps(lambda _, respond: respond(self._reports.engine_state())),
            InspectCache: self._between_steps(lambda query, respond: respond(self._reports.cache_state(query))),
            SlotAction: self._between_steps(self._slot_actions.handle),
            ClearCache: self._between_steps(self._clear_cache),
        }
        self._live: dict[str, _Live] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._outbox: list[Event] = []
        self._wake = asyncio.Event()
        self._stopping = False
        self._interrupts_at: float | None = None
        self._debug_invariants = debug_invariants
        self._is_checked = False
        self._n_arrived = 0

    def send(self, command: Command) -> None:
        """Hand in a command; it takes effect between two steps."""
        match command:
            case Submit():
                self._prompts.submit(command.completions(), partial(self._accept, self._clock()))
            case Cancel():
                self._post(lambda: self._cancel(command.request_id))
            case Query(request_id, body):
                self._queries[type(body)](body, partial(self._reply, request_id))

    def stop(self) -> None:
        """End `run` after the current step; whatever is unfinished fails as unavailable."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Run steps until `stop`, or until something breaks that no request is to blame for."""
        reason = ""
        self._prompts.start()
        try:
            while not self._stopping:
                await self._step()
            if self._disk is not None:
                await self._wind_up()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            _log.exception("engine.died")
        finally:
            self._stopping = True
            self._worker.close()
            if self._disk is not None:
                self._disk.close()
            self._fail_all(reason)
            self._outbox.append(Stopped(reason))
            self._flush()
            self._slot_actions.close()
            self._prompts.close()

    async def _step(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        self._slot_actions.begin()
        self._flush()
        plan = self.scheduler.plan(self._clock())
        for request in self.scheduler.admitted:
            if request.miss in ("diverged", "changed") and request.diverged_at < 0:
                self._prompts.locate(request.id, request.n_known, partial(setattr, request, "diverged_at"))
        self._interrupts_at = self.scheduler.interrupts_at
        if not plan:
            if self._debug_invariants and not self._is_checked:
                await self._check_invariants()
            if not self._inbox and not self._stopping:
                await self._sleep(self.scheduler.wakes_at)
            self._wake.clear()
            return
        self._is_checked = False
        await self._worker.run(plan, self._commit)

    async def _wind_up(self) -> None:
        """Have written what is known, as far as that goes in `_WIND_UP_SECONDS`."""
        assert self._disk is not None
        until = self._clock() + _WIND_UP_SECONDS
        self.scheduler.wind_up(self._clock())
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
            _log.error("ram.no_memory", segments=len(result.unsaved))
        now = result.started + result.seconds
        outcomes = self.scheduler.commit(plan, result, now)
        if self._disk is not None:
            self._disk.start(plan.jobs)
        for outcome in outcomes:
            if isinstance(outcome, Sampled):
                self._deliver(outcome, now)
            else:
                self._report_broken(outcome)
        self._reports.count(plan, result)
        self._flush()

    async def _check_invariants(self) -> None:
        """Compare the ledger with itself and the pool, while nothing runs; raises `AssertionError`."""
        ledger = self.scheduler.ledger
        await self._worker.call(lambda: ledger.check(self._backend.seq_range))
        self._is_checked = True
        _log.debug("invariants.ok", nodes=ledger.tree.n_nodes, cells_used=ledger.n_used, sequences=ledger.n_seqs)

    def _is_wanted(self) -> bool:
        """Whether the next step has to wait for a plan; called on the worker's thread."""
        until = self._interrupts_at
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

    def _accept(self, now: float, submit: Submit, prompt: TokenizedPrompt) -> None:
        try:
            self._check(submit, len(prompt.tokens))
        except LlamaslotError as error:
            self._prompts.release(submit.request_id)
            self._fail(submit.request_id, error)
            return
        self._n_arrived += 1
        reuse = self._backend.info.reuse
        request = Request(submit, prompt, arrival=self._n_arrived, now=now, reuse=reuse)
        self.scheduler.submit(request)
        self._live[request.id] = _Live(request, TextStream(submit.stop))
        shown = tuple(prompt.tokens.tolist()) if submit.return_tokens else ()
        self._outbox.append(Accepted(request.id, request.n_prompt, shown))

    def _check(self, submit: Submit, n_prompt: int) -> None:
        info = self._backend.info
        if not n_prompt:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        if n_prompt >= info.n_ctx_slot:
            raise ContextSizeError.of(n_prompt, info.n_ctx_slot)
        if not -1 <= submit.id_slot < info.n_slots:
            raise InvalidRequestError(f"id_slot must be between -1 and {info.n_slots - 1}", param="id_slot")
        for token in submit.sampling.logit_bias:
            if not 0 <= token < info.n_vocab:
                raise InvalidRequestError(
                    f"logit_bias names token {token}; the vocabulary has {info.n_vocab}", param="logit_bias"
                )

    def _cancel(self, request_id: str) -> None:
        if self._prompts.cancel(request_id):
            self._outbox.append(Cancelled(request_id))
            return
        live = self._live.pop(request_id, None)
        if live is None:
            return
        now = self._clock()
        self.scheduler.end(live.request, now, cancelled=True)
        self._release(live)
        progress = live.request.progress(now, self._held(live.request))
        self._outbox.append(Cancelled(request_id, progress))

    def _deliver(self, sampled: Sampled, now: float) -> None:
        """Turn a sampled token into text, and find out whether a stop string ends the request."""
        live = self._live[sampled.request.id]
        reason: FinishReason | None = sampled.reason
        text = ""
        if sampled.token is not None:
            live.unsent.append(sampled.token)
            if reason != "eos":
                text = live.text.push(self._backend.vocab.piece(sampled.token))
        if live.text.stopped is not None:
            if reason is None:
                self.scheduler.end(live.request, now)
            reason = "word"
        progress = live.request.progress(now, self._held(live.request))
        if reason is not None:
            text += live.text.flush()
            live.n_sent += len(text)
            self._release(live)
            del self._live[live.request.id]
            self._outbox.append(
                Finished(
                    request_id=live.request.id,
                    reason=reason,
                    progress=progress,
                    content=text,
                    tokens=tuple(live.unsent),
                    stopping_word=live.text.stopped or "",
                    truncated=sampled.truncated,
                )
            )
        elif text:
            live.n_sent += len(text)
            self._outbox.append(Output(live.request.id, text, tuple(live.unsent), progress))
            live.unsent.clear()

    def _release(self, live: _Live) -> None:
        """Have the reply remembered, if other requests may share what was computed for it."""
        request = live.request
        if request.is_private or not request.has_started:
            self._prompts.release(request.id)
        else:
            self._prompts.remember(request.id, request.known.view(request.n_prompt).copy(), live.n_sent)

    def _report_broken(self, broke: Broke) -> None:
        _log.error("decode.failed", request_id=broke.request.id, status=broke.status.name)
        del self._live[broke.request.id]
        self._prompts.release(broke.request.id)
        error = ServerError(f"the model could not compute this request ({broke.status.name})")
        self._fail(broke.request.id, error, broke.request)

    def _fail(self, request_id: str, error: LlamaslotError, request: Request | None = None) -> None:
        progress = request.progress(self._clock(), self._held(request)) if request else None
        self._outbox.append(Failed(request_id, error.info(), progress))

    def _fail_all(self, reason: str) -> None:
        """Fail whatever is unfinished, because the engine was told to stop or for a reason of its own."""
        error: LlamaslotError = UnavailableError("the server is shutting down")
        if reason:
            error = ServerError("the engine stopped because of an internal error")
        for request_id in self._prompts.cancel_all():
            self._fail(request_id, error)
        for request_id, live in self._live.items():
            # The scheduler may be what broke: it is not asked for anything any more.
            if live.request.state is not RequestState.DONE:
                live.request.handle(RequestEvent.END, self._clock())
            self._fail(request_id, error, live.request)
        self._live.clear()

    def _held(self, request: Request) -> int:
        return self.scheduler.ledger.length(request.slot_id) if request.slot_id >= 0 else 0

    def _clear_cache(self, _: ClearCache, respond: Respond) -> None:
        before = self._reports.cache_stats()
        n_tokens = self.scheduler.ledger.clear_idle()
        _log.info("cache.cleared", tokens=n_tokens, ram_tokens=before.ram.tokens, disk_tokens=before.disk.tokens)
        done = partial(respond, CacheCleared(n_tokens, before.ram.tokens, before.disk.tokens))
        if self._disk is not None:
            self._disk.start(self.scheduler.ledger.take_jobs())
        self._prompts.clear(lambda: self._when_written(done))

    def _drop_session(self, query: DropSession, respond: Respond) -> None:
        def drop(space: str, paths: list[bytes]) -> None:
            if not paths:
                respond(SessionDropped(is_known=False))
                return
            given_up = [self.scheduler.ledger.give_up(space, path) for path in paths]
            n_tokens, n_ram, n_disk = map(sum, zip(*given_up, strict=True))
            _log.info("session.dropped", tokens=n_tokens, ram_tokens=n_ram, disk_tokens=n_disk)
            if self._disk is not None:
                self._disk.start(self.scheduler.ledger.take_jobs())
            self._when_written(partial(respond, SessionDropped(True, n_tokens, n_ram, n_disk)))

        self._prompts.drop_session(query, drop, respond)

    def _when_written(self, action: Callable[[], None]) -> None:
        """Run an action once the disk has done what it was asked to so far."""
        if self._disk is None:
            action()
        else:
            self._disk.when_written(action)
