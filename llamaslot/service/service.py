"""Service: requests and queries between the HTTP handlers, the prompt worker and the engine.

    open --> prepare --> start --> Generate --> engine --> Started, Output, ..., Finished --> the handler
             |   ^                                              |
             v   |                                              v
         prompt worker: Prepare                             prompt worker: Remember, Release

A request is kept until its terminal event (`live_request.py` has its states). If the engine's process ends, the
requests that had started fail, and the others are sent to the next engine.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import structlog

from llamaslot.base.advice import CacheAdvice, Divergence, HitCurve
from llamaslot.base.callers import Caller
from llamaslot.base.commands import (
    CacheCleared,
    Cancel,
    ClearCache,
    EngineCommand,
    EngineQuery,
    Generate,
    ImageLayouts,
    InspectCache,
    InspectEngine,
    InspectHitCurve,
    LayOutImages,
    Load,
    LocalTier,
    ProbePrompt,
    Query,
    Unload,
    WriteTexts,
)
from llamaslot.base.errors import (
    DeadlineError,
    LlamaslotError,
    UnavailableError,
    stopped_error,
)
from llamaslot.base.events import (
    Cancelled,
    Event,
    Failed,
    Finished,
    Generated,
    ModelInfoChanged,
    ModelLoaded,
    Output,
    Reply,
    Started,
    Stopped,
)
from llamaslot.base.model import ModelInfo
from llamaslot.base.prompt_jobs import (
    BadBody,
    ClearTexts,
    DropSession,
    EarlierItems,
    Job,
    Locate,
    Located,
    Needs,
    NextTurn,
    PredictedPrompt,
    Prepare,
    Prepared,
    References,
    Release,
    Remember,
    RequestPolicy,
)
from llamaslot.base.stats import CacheProbe, CacheState, EngineState
from llamaslot.base.text_records import TextRecord
from llamaslot.formats.recognition import format_of
from llamaslot.processes.prompt_supervisor import PromptSupervisor
from llamaslot.service.activity import Activity
from llamaslot.service.advice import Adviser
from llamaslot.service.limits import AheadBudget, Capacity, ProbsLimit, ReplyBudget, Suspects, request_digest
from llamaslot.service.live_request import Completion, CompletionEvent, CompletionState, LiveRequest
from llamaslot.service.metrics import Metrics

_log = structlog.get_logger(__name__)
_R = TypeVar("_R", bound=msgspec.Struct)
_T = TypeVar("_T")

_AHEAD_PAUSE_S = 0.1
"""Time without a request after a reply until its next turn is predicted."""
_POLL_S = 0.01
"""Time between two looks at whether all requests have ended."""


class Service:
    """The engine and the prompt worker as HTTP handlers see them. Every method is called on the event loop.

    `max_queue` and `max_queue_per_client` are as in `Capacity`. A request fails after `request_timeout` seconds (0:
    never). At most `warm_ahead` tokens an hour are computed ahead of conversations' next turns.
    """

    def __init__(
        self,
        info: ModelInfo,
        prompts: PromptSupervisor,
        metrics: Metrics,
        *,
        names: Sequence[str],
        policy: RequestPolicy,
        tags: Sequence[str] = (),
        max_queue: int,
        max_queue_per_client: int = 0,
        request_timeout: float = 0,
        warm_ahead: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.info = info
        self.names = names
        """The model's names; the first one is in replies."""
        self.tags = tags
        self.policy = policy
        """Defaults of requests."""
        self.metrics = metrics
        self.activity = Activity(self.engine_state, self.cache_state)
        self._adviser = Adviser()
        self.capacity = Capacity(info.n_slots, max_queue, max_queue_per_client, metrics)
        self.reply_budget = ReplyBudget()
        self.adapter_scales = tuple(each.scale for each in info.adapters)
        """Scale of each LoRA adapter for requests that come from now on and name none."""
        self._ahead = AheadBudget(warm_ahead, clock)
        self.chat_template = prompts.chat_template
        """Jinja source of the template in use."""
        self.output_format = format_of(self.chat_template, {})
        """The format in which models write that use the template, to parse their output."""
        self._request_timeout = request_timeout
        self._clock = clock
        self._prompts = prompts
        self._preparing: set[asyncio.Future[Any]] = set()
        """Jobs of the prompt worker that a handler waits for."""
        self._send: Callable[[EngineCommand], None]
        self._why_stopped: Callable[[], str] = lambda: ""
        self.is_connected = False
        """True while an engine takes commands."""
        self._completions: dict[str, Completion] = {}
        """Those that have not ended, by id."""
        self._waiting: dict[str, Completion] = {}
        """Those of them that are to be sent to an engine, in order."""
        self._alone: Completion | None = None
        """Suspect that runs alone: nothing else is sent to the engine until it ends."""
        self._suspects = Suspects(clock)
        self._queries: dict[str, asyncio.Future[Any]] = {}
        """Queries that the engine has, by id."""
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        """Background tasks, such as remembering a reply."""
        self._unwritten: list[TextRecord] = []
        """New records that no engine has got yet."""
        self._is_closing = False
        self.is_loaded = True
        """False while the model is unloaded: then no request may be started."""
        self._loading: asyncio.Future[None] | None = None
        """Done when the engine has loaded or unloaded the model, or could not."""
        self._n_prepared = 0
        """Requests so far."""
        self.stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the engine has ended; its result is the reason, empty after an ordinary stop."""

    # Requests

    @asynccontextmanager
    async def open(self, caller: Caller) -> AsyncIterator[LiveRequest]:
        """Give a request to a handler, and cancel what has not ended when the handler leaves the block.

        Raises what `Capacity.check` raises, before a body is read for nothing.
        """
        # Only checked here: uploads that are slow would fill the queue if they counted.
        self.capacity.check(1, caller.known_client)
        deadline = asyncio.get_running_loop().time() + self._request_timeout if self._request_timeout else None
        live = LiveRequest(caller, deadline, self.capacity, self.reply_budget)
        try:
            yield live
        finally:
            live.close()
            for completion in live.completions:
                self._cancel(completion)
            if not live.completions:
                live.count(-live.n_reserved)
                self._release(live)

    async def prepare(
        self, live: LiveRequest, job: Prepare, find: Callable[[References], EarlierItems] | None = None
    ) -> None:
        """Have the prompt worker read a body and tokenize its prompts; `find` returns earlier items that it names.

        Raises what `Capacity.check` raises, and `InvalidRequestError` or `ContextSizeError` for what cannot run.
        """
        live.reserve(1, live.client)
        context = msgspec.structs.replace(job.context, adapter_scales=self.adapter_scales)
        job = msgspec.structs.replace(job, context=context)
        self._n_prepared += 1
        live.id, live.prepared_at = job.context.request_id, self._clock()
        try:
            prepared: Prepared | BadBody | Needs = await self.answer(job)
            while isinstance(prepared, Needs):
                if prepared.may_compile:
                    job = msgspec.structs.replace(job, may_compile=True)
                elif prepared.layouts:
                    asked = await self.ask(LayOutImages(prepared.layouts), ImageLayouts)
                    known = dict(zip(prepared.layouts, asked.layouts, strict=True))
                    job = msgspec.structs.replace(job, layouts={**job.layouts, **known})
                else:
                    # Only the prompt worker decodes bodies, and it has no earlier items.
                    assert find is not None
                    job = msgspec.structs.replace(job, earlier=find(prepared.references))
                prepared = await self.answer(job)
        except (LlamaslotError, asyncio.CancelledError) as error:
            if job.purpose == "run":
                self._record(live, self._unstarted(live, error))
            raise
        if isinstance(prepared, BadBody):
            raise prepared.error.exception()
        live.prompts, live.options = prepared.prompts, prepared.options
        live.texts, live.echoes = prepared.texts, prepared.echoes
        n_image_bytes = sum(len(image.data) for each in live.prompts for image in each.prompt.images)
        live.charge(live.options.n_bytes + sum(map(len, (*live.texts, *live.echoes))) + n_image_bytes)
        # Its body may name another client.
        live.reserve(
            sum(each.params.n for each in live.prompts) if job.purpose == "run" and not live.is_batch else 1,
            live.prompts[0].params.client,
        )

    def _unstarted(self, live: LiveRequest, error: BaseException) -> Failed | Cancelled:
        """Return the terminal event of a request that no engine has got."""
        is_late = live.deadline is not None and asyncio.get_running_loop().time() >= live.deadline
        if isinstance(error, asyncio.CancelledError):
            return Failed(live.id, self._deadline_error().info()) if is_late else Cancelled(live.id)
        assert isinstance(error, LlamaslotError)
        return Failed(live.id, error.info())

    def start(self, live: LiveRequest, probs: ProbsLimit | None = None) -> None:
        """Have the engine generate the completions of a prepared request, all or none.

        `prepare` has reserved their places: the caller does not suspend between the two.

        Raises `InvalidRequestError` for a reply over the limit `probs` (without it tokens and probabilities are
        passed on and not kept), and `UnavailableError` for a request with which the engine has crashed twice, or if
        the server has stopped meanwhile.
        """
        if self.stopped.done() or self._is_closing:
            # Its prompts were ready in the moment in which all that is being prepared failed.
            raise self.capacity.refusal or stopped_error("")
        if probs is not None:
            probs.check(live.prompts, self.info.n_ctx_slot)
        if self._suspects:
            for each in live.prompts:
                self._suspects.check(request_digest(each.params, each.prompt))
        live.begin(probs)
        if live.deadline is not None:
            # The engine has it now: it ends by a terminal event, once its slot is free.
            live.timer = asyncio.get_running_loop().call_at(live.deadline, self._expire, live)
        self._completions |= {each.id: each for each in live.completions}
        self._waiting |= {each.id: each for each in live.first_inputs(self.info.n_slots)}
        self._send_waiting()

    def cancel(self, completion_id: str) -> bool:
        """Cancel a completion, if it runs or waits: it fails. Return False if it has ended."""
        completion = self._completions.get(completion_id)
        if completion is not None:
            self._cancel(completion)
        return completion is not None

    def owner_of(self, completion_id: str) -> str:
        """Return the owner of a completion that runs or waits; empty for an unknown one."""
        completion = self._completions.get(completion_id)
        return completion.live.caller.owner if completion is not None else ""

    @asynccontextmanager
    async def until_deadline(self, live: LiveRequest) -> AsyncIterator[None]:
        """Cancel what runs in the `async with` block at the request's deadline, and raise `DeadlineError`."""
        try:
            async with asyncio.timeout_at(live.deadline):
                yield
        except TimeoutError:
            raise self._deadline_error() from None

    # The engine's side

    def connect(self, send: Callable[[EngineCommand], None], why_stopped: Callable[[], str] = lambda: "") -> None:
        """Set the function that passes commands to the engine, and one that says why nothing is carried out."""
        self._send = send
        self._why_stopped = why_stopped
        self.is_connected = True

    def check_running(self) -> None:
        """Raise `UnavailableError` while the engine is restarting, or stopped by a signal."""
        if not self.is_connected:
            raise _restarting_error()
        if reason := self._why_stopped():
            raise UnavailableError(reason, retry_after=1)

    def receive(self, events: list[Event]) -> None:
        """Take the events of an engine step."""
        for event in events:
            match event:
                case Reply():
                    self._resolve(event)
                case ModelInfoChanged(info):
                    # The backend does not know the limits that the server has chosen.
                    self.info = msgspec.structs.replace(info, checkpoint_limits=self.info.checkpoint_limits)
                case ModelLoaded(is_loaded, reason):
                    self.is_loaded = is_loaded
                    self._end_loading(UnavailableError(reason, retry_after=1) if reason else None)
                case Stopped(reason):
                    self._stop(reason)
                case _:
                    completion = self._completions.get(event.completion_id)
                    if completion is not None:
                        self._receive(completion, event)

    def _receive(self, completion: Completion, event: Started | Output | Finished | Failed | Cancelled) -> None:
        """Take an event of a completion that has not ended."""
        match event:
            case Started():
                is_first = completion.state is CompletionState.SENT
                completion.handle(CompletionEvent.START)
                if is_first:
                    self._on_start(completion, event)
            case Output():
                completion.live.put(completion, event)
            case _:
                self._end(completion, event)

    def _on_start(self, completion: Completion, event: Started) -> None:
        """Find out where the prompt diverges from what is cached, and why."""
        if completion.live.is_batch:
            # Texts to embed are no conversations.
            return
        client, n_prompt = completion.params.client, completion.prompt.n_tokens
        self._adviser.count(client, n_prompt, event.n_matched)
        match event.miss:
            case "evicted" | "no_checkpoint" if event.n_lost:
                self._adviser.add(client, completion.live.id, Divergence(event.miss, event.n_lost))
            case "diverged" | "changed" | "cold" | "salted":
                job = Locate(completion.live.id, event.n_matched, completion.prompt_number, explains=True)
                has_place = event.miss in ("diverged", "changed")
                locating = self._prompts.call(job)
                self._spawn(self._locate(completion, completion.live.id, locating, has_place=has_place))

    def _stop(self, reason: str) -> None:
        """End everything: the engine has ended for good."""
        self.capacity.refusal = stopped_error(reason)
        self._end_all(self.capacity.refusal)
        self._end_loading(self.capacity.refusal)
        if not self.stopped.done():
            self.stopped.set_result(reason)

    def engine_lost(self, is_crash: bool) -> None:
        """Fail the requests that had started, and keep the others for the next engine: this one has ended."""
        self.is_connected = False
        in_engine = [each for each in self._completions.values() if each.is_in_engine]
        alone, self._alone = self._alone, None
        # What crashes while the model is loaded again is not a request.
        if is_crash and in_engine and self.is_loaded:
            self._add_suspects(in_engine, alone)
        message = "the engine ended while it ran this request, and is restarting"
        error = stopped_error("") if self._is_closing else UnavailableError(message, retry_after=1)
        lost: dict[str, Completion] = {}
        for completion in in_engine:
            if completion.is_cancelled:
                self._end(completion, Cancelled(completion.id))
            elif (
                completion.state is CompletionState.RUNNING
                or (is_crash and completion is alone)
                or self._is_closing
            ):
                self._fail(completion, error)
            else:
                completion.handle(CompletionEvent.LOSE)
                lost[completion.id] = completion
        # They came before those that no engine has had.
        self._waiting = lost | self._waiting
        self._fail_queries(_restarting_error())
        self._end_loading(_restarting_error())

    def engine_restarted(self) -> None:
        """Send the requests that wait: another engine takes commands."""
        self.is_connected = self.is_loaded = True
        self._end_loading(None)
        self._write_texts()
        self._send_waiting()

    async def load(self) -> None:
        """Have the engine load the model again. Raises `UnavailableError` with the reason if it cannot.

        If the engine has ended, wait for the next one, which has it loaded.
        """
        if not self.is_loaded:
            await self._have_loaded(Load() if self.is_connected else None)

    async def unload(self, *, is_urgent: bool = False) -> bool:
        """Have the engine unload the model, whose KV goes to RAM; return False if the engine needs it.

        `is_urgent` is as in `Unload`.

        Raises `UnavailableError` if the engine is not there.
        """
        self.check_running()
        await self._have_loaded(Unload(is_urgent))
        return not self.is_loaded

    async def _have_loaded(self, command: Load | Unload | None) -> None:
        """Send a command, if there is one, and wait until it is known whether the model is loaded now."""
        assert self._loading is None, "the model is loaded and unloaded by one caller"
        self._loading = asyncio.get_running_loop().create_future()
        if command is not None:
            self._send(command)
        try:
            await self._loading
        finally:
            self._loading = None

    def _end_loading(self, error: LlamaslotError | None) -> None:
        if self._loading is None or self._loading.done():
            return
        if error is None:
            self._loading.set_result(None)
        else:
            self._loading.set_exception(error)

    async def close(self, seconds: float) -> None:
        """End all requests as unavailable, and wait until their replies are remembered, at most `seconds`."""
        self._is_closing = True
        error = stopped_error("")
        self.capacity.refusal = self.capacity.refusal or error
        self._fail_preparing(error)
        for completion in list(self._completions.values()):
            self._cancel(completion)
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (self._completions or self._tasks) and loop.time() < until:
            await asyncio.sleep(_POLL_S)
        self._end_all(error)

    def _send_waiting(self) -> None:
        """Send completions to the engine in order; a suspect waits until the engine has nothing else."""
        for completion in list(self._waiting.values()):
            if not self.is_connected or self._alone is not None:
                return
            try:
                has_to_run_alone = bool(self._suspects) and self._suspects.check(completion.digest)
            except LlamaslotError as error:
                self._fail(completion, error)
                continue
            if has_to_run_alone:
                if any(each.is_in_engine for each in self._completions.values()):
                    return
                self._alone = completion
            completion.handle(CompletionEvent.SEND)
            del self._waiting[completion.id]
            waited = self._clock() - completion.live.prepared_at
            self._send(Generate(completion.params, completion.prompt, waited))

    def _add_suspects(self, in_engine: list[Completion], alone: Completion | None) -> None:
        """Find the suspects of a crash: what had started, or else what the engine was about to start."""
        blamed = [each for each in in_engine if each.state is CompletionState.RUNNING] or in_engine
        if alone is not None:
            self._suspects.refuse(alone.digest)
        else:
            for completion in blamed:
                self._suspects.add(completion.digest)
        _log.warning("engine.suspects", request_ids=[each.id for each in blamed], alone=alone is not None)

    async def _locate(
        self, completion: Completion, request_id: str, locating: asyncio.Future[Located], *, has_place: bool
    ) -> None:
        """Note the character at which a prompt diverges from what was cached, and why.

        The request may have been released before this runs, so its id is given.
        """
        located = await locating
        if has_place:
            completion.diverged_at = located.n_characters
        if located.divergence is not None:
            self._adviser.add(completion.params.client, request_id, located.divergence)

    # The end of a completion

    def _cancel(self, completion: Completion) -> None:
        """Cancel a completion that has not ended: it ends at once, or when the engine has freed its slot."""
        if completion.state is CompletionState.DONE:
            return
        if completion.state is CompletionState.WAITING:
            self._end(completion, Cancelled(completion.id))
        elif not completion.is_cancelled:
            completion.is_cancelled = True
            self._send(Cancel(completion.id))

    def _expire(self, live: LiveRequest) -> None:
        """End a request at its deadline."""
        live.is_expired = True
        for completion in live.completions:
            self._cancel(completion)

    def _fail(self, completion: Completion, error: LlamaslotError) -> None:
        self._end(completion, Failed(completion.id, error.info()))

    def _end_all(self, error: LlamaslotError) -> None:
        """Fail all that waits for the engine."""
        self._fail_preparing(error)
        self._fail_queries(error)
        for completion in list(self._completions.values()):
            self._fail(completion, error)

    def _end(self, completion: Completion, event: Finished | Failed | Cancelled) -> None:
        """Take the terminal event of a completion that has not ended: every one passes here, once."""
        live = completion.live
        completion.handle(CompletionEvent.END)
        del self._completions[completion.id]
        self._waiting.pop(completion.id, None)
        live.end_one()
        was_alone = completion is self._alone
        if was_alone:
            self._alone = None
            if isinstance(event, Finished):
                self._suspects.clear(completion.digest)
        if not isinstance(event, Failed) and event.generated is not None:
            # Before the client learns of the end: jobs run in order, so its next prompt finds the reply.
            self._remember(completion, event.generated, is_whole=isinstance(event, Finished))
        if isinstance(event, Finished) and event.generated is not None:
            self._compute_next_turn(completion, event.generated)
        if not live.n_reserved:
            self._release(live)
        if completion.diverged_at >= 0 and event.progress is not None:
            progress = msgspec.structs.replace(event.progress, diverged_at=completion.diverged_at)
            event = msgspec.structs.replace(event, progress=progress)
        if isinstance(event, Cancelled) and (live.is_expired or self._is_closing):
            error = self._deadline_error() if live.is_expired else stopped_error("")
            event = Failed(event.completion_id, error.info(), event.progress)
        live.put(completion, event)
        self._record(live, event)
        # If an input fails, so does its request: no other one is sent.
        following = live.next_input() if isinstance(event, Finished) else None
        if following is not None:
            self._waiting[following.id] = following
            self._send_waiting()
        if was_alone or self._suspects:
            # Others may have waited for this end. Not at once: the caller may be going through all completions.
            asyncio.get_running_loop().call_soon(self._send_waiting)

    def _record(self, live: LiveRequest, event: Finished | Failed | Cancelled) -> None:
        """Count and log the end of a request, and tell those who watch.

        A request for vectors ends with its last input.
        """
        if live.is_batch:
            live.add_end(event)
            if live.n_running or live.end is None:
                return
            event = live.end
        reason, fields = self.metrics.record(event, live.caller.client_request_id)
        self.activity.record(event.completion_id, reason, fields)

    def _remember(self, completion: Completion, generated: Generated, *, is_whole: bool) -> None:
        job = Remember(
            completion.live.id,
            generated.packed_tokens,
            generated.n_sent,
            completion.id if is_whole else "",
            completion.prompt_number,
        )
        self._spawn(self._write_new(self._prompts.call(job)))

    def _compute_next_turn(self, completion: Completion, generated: Generated) -> None:
        """If the server has nothing to do after a request's only completion, have the next turn computed ahead."""
        live, n_left = completion.live, self._ahead.n_left
        if self.capacity.n_in_flight or self._is_closing or len(live.completions) > 1 or n_left <= 0:
            return
        job = NextTurn(live.id, generated.packed_tokens, generated.n_sent, completion.id, n_left)
        # The prompt worker releases the request.
        live.id = ""
        self._spawn(self._compute_ahead(job))

    async def _compute_ahead(self, job: NextTurn) -> None:
        # A program continues at once, and its prompt would wait for the prediction.
        n_before = self._n_prepared
        await asyncio.sleep(_AHEAD_PAUSE_S)
        if self._n_prepared != n_before or self._is_closing:
            _ignored(self._prompts.call(Release(job.request_id)))
            return
        predicted: PredictedPrompt | None = await self._prompts.call(job)
        if predicted is None:
            return
        self._write_texts(predicted.records)
        if self.is_connected and self.is_loaded and self._loading is None and not self._is_closing:
            # If the engine ends, it is lost: the next turn computes it.
            self._ahead.take(predicted.n_new)
            self._send(predicted.generate)

    async def _write_new(self, remembering: asyncio.Future[tuple[TextRecord, ...]]) -> None:
        self._write_texts(await remembering)

    def _write_texts(self, records: tuple[TextRecord, ...] = ()) -> None:
        """Have the engine write new records to disk, and those that no engine has got yet."""
        self._unwritten += records
        if self._unwritten and self.is_connected:
            unwritten, self._unwritten = tuple(self._unwritten), []
            self._send(WriteTexts(unwritten))

    def _release(self, live: LiveRequest) -> None:
        """Have the prompt worker drop what it keeps of a request."""
        if live.id:
            _ignored(self._prompts.call(Release(live.id)))
            live.id = ""

    def _deadline_error(self) -> DeadlineError:
        return DeadlineError(f"the request took more than {self._request_timeout:g} s (--request-timeout)")

    # Queries

    async def ask(self, body: EngineQuery, reply_type: type[_R]) -> _R:
        """Return the engine's reply to a query, or raise its error."""
        self._check_stopped()
        if not self.is_connected:
            raise _restarting_error()
        query_id = f"query-{next(self._ids)}"
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = future
        try:
            self._send(Query(query_id, body))
            # From another process the body arrives as builtins.
            return msgspec.convert(await future, reply_type)
        finally:
            self._queries.pop(query_id, None)

    async def answer(self, job: Job) -> Any:
        """Return the prompt worker's answer, or raise its error; the job is cancelled with the task that waits."""
        self._check_stopped()
        future = self._prompts.call(job)
        self._preparing.add(future)
        try:
            return await future
        finally:
            self._preparing.discard(future)

    async def probe(self, live: LiveRequest) -> CacheProbe:
        """Return what is cached of the prompt of a prepared request, which is not run."""
        (prompt,) = live.prompts
        probe = await self.ask(ProbePrompt(prompt), CacheProbe)
        if probe.miss in ("diverged", "changed"):
            located: Located = await self.answer(Locate(live.id, probe.prompt_tokens - probe.computed))
            if located.n_characters >= 0:
                probe.diverged_at = located.n_characters
        return probe

    async def engine_state(self) -> EngineState:
        """Return the state of slots, queue and cache."""
        state = await self.ask(InspectEngine(), EngineState)
        state.cache.anchors, state.cache.sessions, state.cache.messages = self._prompts.stats
        return state

    async def cache_state(self, query: InspectCache) -> CacheState:
        """Return the cache's statistics and its radix tree."""
        state = await self.ask(query, CacheState)
        state.anchors, state.sessions, state.messages = self._prompts.stats
        return state

    async def cache_advice(self) -> CacheAdvice:
        """Return where prompts diverged from what was cached, and hit rates with other sizes of the cache."""
        curve = await self.ask(InspectHitCurve(), HitCurve)
        return CacheAdvice(self._adviser.clients(), curve.hit_rate, curve.ram, curve.disk)

    async def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return self.metrics.exposition(await self.engine_state())

    async def drop_session(self, session_id: str, cache_salt: str) -> CacheCleared:
        """Drop a session, and the KV that only it uses; raises `NotFoundError`.

        It goes on if the client does not wait: what the prompt worker has dropped must not stay on disk.
        """
        self.check_running()
        return await asyncio.shield(self._spawn(self._drop_session(DropSession(session_id, cache_salt))))

    async def _drop_session(self, job: DropSession) -> CacheCleared:
        drop = await self._prompts.call(job)
        # Those of other sessions, too: places do not say whose text they have.
        self._adviser.drop_texts()
        return await self.ask(drop, CacheCleared)

    async def clear_cache(self, tier: LocalTier | None = None) -> CacheCleared:
        """Drop what no running request uses: one tier, or all of them and what is remembered of texts."""
        self.check_running()
        return await asyncio.shield(self._spawn(self._clear_cache(tier)))

    async def _clear_cache(self, tier: LocalTier | None) -> CacheCleared:
        if tier is None:
            # First the texts: what is being remembered now is dropped too.
            await self._prompts.call(ClearTexts())
            self._adviser.drop_texts()
        return await self.ask(ClearCache(tier), CacheCleared)

    def _check_stopped(self) -> None:
        if self.stopped.done():
            raise self.capacity.refusal or stopped_error("")

    def _resolve(self, reply: Reply) -> None:
        future = self._queries.pop(reply.query_id, None)
        if future is None or future.done():
            return
        if reply.error is not None:
            future.set_exception(reply.error.exception())
        else:
            future.set_result(reply.body)

    def _fail_queries(self, error: LlamaslotError) -> None:
        for future in self._queries.values():
            if not future.done():
                future.set_exception(error)
        self._queries.clear()

    def _fail_preparing(self, error: LlamaslotError) -> None:
        for future in self._preparing:
            if not future.done():
                future.set_exception(error)

    def _spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run something in the background; an error that nobody awaits is dropped."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        _ignored(task)
        return task


def _restarting_error() -> UnavailableError:
    return UnavailableError("the engine is restarting; try later", retry_after=1)


def _ignored(future: asyncio.Future[Any]) -> None:
    """Ignore the result of a future, and its error."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
