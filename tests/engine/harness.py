"""Runs an engine on a backend and collects what comes out, checking at every step what must always hold."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamaslot.base import commands
from llamaslot.base.backend import Backend
from llamaslot.base.callers import Caller
from llamaslot.base.commands import PromptPart
from llamaslot.base.errors import LlamaslotError
from llamaslot.base.events import (
    Cancelled,
    Event,
    Failed,
    Finished,
    ModelInfoChanged,
    ModelLoaded,
    Output,
    Reply,
    Stopped,
)
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.prompt_jobs import AnswerBody, DropSession
from llamaslot.engine.engine import Engine
from llamaslot.engine.model_worker import ModelWorker, OnStep, StepWatch, model_thread
from llamaslot.prompts.tokenizer import Tokenizer
from llamaslot.protocol.text_requests import TextRequest
from llamaslot.scheduler.request import Request
from llamaslot.scheduler.step import StepPlan
from llamaslot.service.live_request import Completion
from llamaslot.service.metrics import Metrics
from llamaslot.service.service import Service
from tests.cache_settings import take_budgets
from tests.conftest import LONG
from tests.fake_backend import BOS, FakeBackend
from tests.pool import check_pool
from tests.prompt_threads import PLAIN_TEMPLATE, SETTINGS, prepare_text, prompt_thread, text_request

GREEDY = Sampling(temperature=0.0)
TERMINAL = (Finished, Failed, Cancelled)


class Inline(Executor):
    """Runs everything at once and on the event loop, so that a seed repeats a run exactly."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call `fn` now."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@dataclass(frozen=True)
class Accepted:
    """A request's prompt is tokenized, and the engine has it."""

    completion_id: str
    prompt_tokens: tuple[int, ...]


class LocalEngine:
    """A service with a prompt worker and an engine in this process; policies and files are given by name.

    `on_events` gets all that happens to requests and queries, one list for each step of the engine; `service` has
    arguments of the service.
    """

    def __init__(
        self,
        backend: Backend,
        on_events: Callable[[list[Any]], None] = lambda _: None,
        *,
        service: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        given = "disk", "remote", "snapshots", "clock", "read_memory"
        files = {name: settings.pop(name) for name in given if name in settings}
        use_anchors = settings.pop("text_anchors", True)
        info = backend.info
        tokenizer = Tokenizer(
            backend.vocab,
            info.n_ctx_slot,
            use_anchors=use_anchors and info.can_reuse and not info.adds_eos and not info.pooling,
            min_match=settings.pop("session_min_match", 0.8),
            template=info.chat_template,
            is_whole=info.embeds_whole,
        )
        if "disk" in files:
            tokenizer.add_records(files["disk"].texts.records())
        template, grammars = settings.pop("template", PLAIN_TEMPLATE), settings.pop("grammars", ())
        restore = settings.pop("restore_messages", True)
        of_requests = settings.pop("requests", SETTINGS)
        self.prompts = prompt_thread(
            tokenizer,
            info,
            template,
            grammars,
            settings=of_requests,
            restoring=backend.vocab if restore and info.can_reuse and not info.pooling else None,
            predicts=bool((service or {}).get("warm_ahead")),
        )
        own = {
            "metrics": Metrics(),
            "names": ["test"],
            "policy": of_requests,
            "max_queue": 10**6,
            **(service or {}),
        }
        if "clock" in files:
            own["clock"] = files["clock"]
        self.service = Service(info, self.prompts, **own)
        self._on_events = on_events
        self._outbox: list[Any] = []
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._asking: set[asyncio.Task[None]] = set()
        budgets = take_budgets(settings)
        settings = {"gap_ms": 100.0, "thread": model_thread(), "watch": StepWatch(0)} | settings
        self.engine = Engine(backend, self._receive, budgets, **settings, **files)
        self.service.connect(self.engine.send)

    def send(self, request: TextRequest) -> None:
        """Run a request, as the handler of an HTTP request does."""
        name = request.params.completion_id
        task = self._preparing[name] = asyncio.ensure_future(self._run(request))

        def ended(_: object) -> None:
            self._preparing.pop(name, None)
            if task.cancelled():
                # Before it had begun.
                self._emit(*(Cancelled(each.completion_id) for each in request.params.completions()))
            else:
                task.result()

        task.add_done_callback(ended)

    @property
    def is_preparing(self) -> bool:
        """True while a request has not reached the engine."""
        return bool(self._preparing)

    def cancel(self, completion_id: str) -> None:
        """Cancel a completion, or a request that is being prepared."""
        if not self.service.cancel(completion_id) and completion_id in self._preparing:
            self._preparing[completion_id].cancel()

    def ask(self, name: str, body: Any) -> None:
        """Ask the service; the answer is a `Reply` of that name."""
        task = asyncio.ensure_future(self._reply(name, body))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def stop(self) -> None:
        """End all requests, then `run`."""
        await self.service.close(5)
        self.engine.stop()

    async def run(self) -> None:
        """Run until `stop`."""
        self.prompts.worker.start()
        await self.engine.run()
        await asyncio.wait([asyncio.wrap_future(self.prompts.close())], timeout=5)

    async def _run(self, request: TextRequest) -> None:
        params = request.params
        names = [each.completion_id for each in params.completions()]
        ended: asyncio.Queue[None] = asyncio.Queue()

        def put(completion: Completion, event: Event) -> None:
            self._emit(event)
            if isinstance(event, TERMINAL):
                ended.put_nowait(None)

        try:
            async with self.service.open(Caller(params.client, request.owner)) as live:
                live.put = put  # type: ignore[method-assign, assignment]
                await self.service.prepare(live, prepare_text(request))
                self.service.start(live)
                del self._preparing[params.completion_id]
                tokens = tuple(live.prompts[0].prompt.tokens.tolist())
                self._emit()
                self._outbox[:0] = [Accepted(each, tokens) for each in names]
                for _ in names:
                    await ended.get()
        except LlamaslotError as error:
            self._emit(*(Failed(each, error.info()) for each in names))
        except asyncio.CancelledError:
            self._emit(*(Cancelled(each) for each in names))

    async def _reply(self, name: str, body: Any) -> None:
        try:
            self._emit(Reply(name, await self._answer(body)))
        except LlamaslotError as error:
            self._emit(Reply(name, error=error.info()))

    async def _answer(self, body: Any) -> Any:  # noqa: PLR0911 - one for each kind
        match body:
            case commands.InspectEngine():
                return await self.service.engine_state()
            case commands.InspectCache():
                return await self.service.cache_state(body)
            case commands.ClearCache():
                return await self.service.clear_cache()
            case DropSession():
                return await self.service.drop_session(body.session_id, body.cache_salt)
            case AnswerBody():
                return await self.service.answer(body)
            case commands.SlotAction():
                return await self.service.ask(body, commands.SlotActionDone)
        return await self.prompts.call(body)

    def _receive(self, events: list[Event]) -> None:
        self.service.receive(events)
        self._outbox += [each for each in events if isinstance(each, ModelInfoChanged | ModelLoaded | Stopped)]
        self._flush()

    def _emit(self, *events: Any) -> None:
        """Pass events on with those of the engine's step or, outside of one, after this turn of the event loop."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox += events

    def _flush(self) -> None:
        if self._outbox:
            events, self._outbox = self._outbox, []
            self._on_events(events)


class Harness:
    """An engine with its events by request.

    On the fake backend its worker goes on alone for a random number of steps: none half of the time.
    """

    is_inline = True
    """On the fake backend, tokenizer and model run on the event loop."""

    def __init__(self, backend: Backend, **settings: Any) -> None:
        self.backend = backend
        self.local = LocalEngine(backend, self._receive, **settings)
        self.engine = self.local.engine
        if isinstance(backend, FakeBackend) and self.is_inline:
            threads = self.local.prompts.worker._threads
            threads[0].shutdown()
            thread = threads[0] = Inline()
            ahead = random.Random(1)
            worker = ModelWorker(backend, thread, self.engine._clock, lambda: ahead.random() < 0.5, StepWatch(0))
            worker.run = self._watched(worker.run)
            self.engine.scheduler.plan = self._noted(self.engine.scheduler.plan)
            self.engine._worker = worker
        self.events: dict[str, list[Event]] = defaultdict(list)
        self.stopped: Stopped | None = None
        self.ends: dict[str, asyncio.Future[Event]] = {}
        self.replies: dict[str, asyncio.Future[Reply]] = {}
        self.n_batches = 0
        self.computing = False
        self.is_planned = False
        """True if operations were planned and not begun."""

    def submit(
        self, completion_id: str, prompt: str | Sequence[PromptPart], **fields: object
    ) -> asyncio.Future[Event]:
        """Send a request; the future holds its terminal event."""
        fields.setdefault("sampling", GREEDY)
        fields.setdefault("max_tokens", 8)
        return self.send(text_request(completion_id, prompt, **fields))

    def send(self, request: TextRequest) -> asyncio.Future[Event]:
        """Send a request as it is; the future holds its terminal event."""
        name = request.params.completion_id
        self.ends[name] = asyncio.get_running_loop().create_future()
        self.local.send(request)
        return self.ends[name]

    def submit_all(self, request: TextRequest) -> list[asyncio.Future[Event]]:
        """Send a request for several completions; the futures hold their terminal events."""
        names = [each.completion_id for each in request.params.completions()]
        self.ends |= {name: asyncio.get_running_loop().create_future() for name in names}
        self.local.send(request)
        return [self.ends[name] for name in names]

    async def ask(self, body: Any) -> Any:
        """Return what the engine replies to a query, an error as `ErrorInfo`."""
        reply = await self.query(body)
        return reply.body if reply.error is None else reply.error

    def query(self, body: Any) -> asyncio.Future[Reply]:
        """Send a query; the future holds its reply."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        name = f"query {len(self.replies)}"
        self.replies[name] = future
        self.local.ask(name, body)
        if self.stopped is not None:
            self._fail_replies(self.stopped)
        return future

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Admit no request inside the block; those that were sent there are admitted together behind it."""
        admission = self.engine.scheduler.admission
        admission.is_held = True
        yield
        async with asyncio.timeout(10):
            while self.local.is_preparing:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        admission.is_held = False
        self.engine._wake.set()

    def cancel(self, completion_id: str) -> None:
        """Cancel a request."""
        self.local.cancel(completion_id)

    async def wait_for(self, completion_id: str, kind: type[Event], count: int = 1) -> None:
        """Wait until a request got `count` events of a kind."""
        async with asyncio.timeout(10):
            while sum(isinstance(e, kind) for e in self.events[completion_id]) < count:
                await asyncio.sleep(0)

    def text(self, completion_id: str) -> str:
        """All text that a request produced."""
        return "".join(e.content for e in self.events[completion_id] if isinstance(e, Output | Finished))

    def tokens(self, completion_id: str) -> list[int]:
        """All tokens that a request produced."""
        return [token for e in self.events[completion_id] if isinstance(e, Output | Finished) for token in e.tokens]

    def check_events(self) -> None:
        """Every request that ended did so once, after at most one `Accepted`, which came first."""
        for completion_id, events in self.events.items():
            terminal = [e for e in events if isinstance(e, TERMINAL)]
            assert len(terminal) <= 1, completion_id
            assert not terminal or events[-1] is terminal[0], completion_id
            accepted = [i for i, e in enumerate(events) if isinstance(e, Accepted)]
            assert accepted in ([0], []), completion_id
            assert accepted or not any(isinstance(e, Output | Finished) for e in events), completion_id

    def check_cells(self) -> None:
        """The pool holds what the cache says (fake backend only).

        While the worker computes, running slots may hold more; before and after, the two agree exactly.
        """
        assert isinstance(self.backend, FakeBackend)
        check_pool(self.engine.scheduler, self.backend, computing=self.computing)

    def _noted(self, plan: Callable[[float], StepPlan]) -> Callable[[float], StepPlan]:
        def noted(now: float) -> StepPlan:
            made = plan(now)
            # Until they are carried out, cache and pool differ.
            self.is_planned = bool(made.operations)
            return made

        return noted

    def _watched(self, run: Callable[[StepPlan, OnStep], Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def watched(plan: StepPlan, on_step: OnStep) -> None:
            self.computing, self.is_planned = True, False
            await run(plan, on_step)
            self.computing = False
            self.check_cells()

        return watched

    def _fail_replies(self, stopped: Stopped) -> None:
        """Fail the queries that an engine has not answered: it answers none once it has ended."""
        for name, reply in self.replies.items():
            if not reply.done():
                reply.set_exception(AssertionError(f"the engine ended before {name}: {stopped.reason}"))
                # Without this, one that no test waits for would be logged.
                reply.exception()

    def _receive(self, events: list[Any]) -> None:
        self.n_batches += 1
        for event in events:
            if isinstance(event, Stopped):
                self.stopped = event
                self._fail_replies(event)
                continue
            if isinstance(event, ModelInfoChanged | ModelLoaded):
                continue
            if isinstance(event, Reply):
                reply = self.replies[event.query_id]
                if self.stopped is None or not reply.done():
                    reply.set_result(event)
                continue
            self.events[event.completion_id].append(event)
            end = self.ends.get(event.completion_id)
            if isinstance(event, TERMINAL) and end is not None and not end.done():
                end.set_result(event)
        self.check_events()
        died = self.stopped is not None and self.stopped.reason
        if isinstance(self.backend, FakeBackend) and self.is_inline and not died and not self.is_planned:
            self.check_cells()


class Threaded(Harness):
    """A harness whose tokenizer and model have threads, as in a server; the engine checks its cells when idle."""

    is_inline = False


@asynccontextmanager
async def running(backend: Backend, *, kind: type[Harness] = Harness, **settings: Any) -> AsyncIterator[Harness]:
    """A harness whose engine runs inside the block; the backend is closed behind it."""
    harness = kind(backend, **settings)
    task = asyncio.create_task(harness.local.run())
    try:
        async with asyncio.timeout(600 if LONG else 60):
            yield harness
    finally:
        await harness.local.stop()
        await task
        backend.close()
    has_died = harness.stopped is not None and harness.stopped.reason
    assert has_died or not harness.local.prompts.n_kept, "the prompt worker keeps prompts of ended requests"
    assert harness.stopped is not None
    for completion_id, end in harness.ends.items():
        assert end.done(), f"{completion_id} never ended"


def run_ahead(harness: Harness, n_steps: int) -> None:
    """Have the worker of a fake backend compute up to so many further steps before the engine sees the first."""
    needs_plan = itertools.cycle([False] * n_steps + [True])
    harness.engine._worker._needs_plan = lambda: next(needs_plan)


def draft_replies(harness: Harness, n_drafted: tuple[int, int], replies: dict[str, str]) -> None:
    """Draft as `draft_tokens` for each request whose reply is known by its prompt (fake backend only)."""

    def known(request: Request) -> Sequence[int]:
        prompt = bytes(token for token in request.prompt.tokens.tolist() if 0 <= token < BOS)
        return replies.get(prompt.decode(), "").encode()

    draft_tokens(harness, n_drafted, known)


def draft_tokens(
    harness: Harness, n_drafted: tuple[int, int], reply_of: Callable[[Request], Sequence[int]]
) -> None:
    """Draft so many right tokens, then so many wrong ones, for each request; `reply_of` returns its whole reply."""
    scheduler, (n_right, n_wrong) = harness.engine.scheduler, n_drafted
    plan = scheduler.plan

    def planned(now: float) -> StepPlan:
        for request in scheduler.running:
            n = request.n_generated
            known = reply_of(request)[n : n + n_right]
            if n and n_right + n_wrong:
                wrong = [known[0] ^ 1 if known else 1] * n_wrong
                request.draft = np.array([*known, *wrong], dtype=np.int32)
        return plan(now)

    scheduler.plan = planned


async def alone(prompt: str | Sequence[PromptPart], backend: FakeBackend, **fields: object) -> str:
    """The text that a request gives on a backend of its own."""
    async with running(backend) as harness:
        await harness.submit("alone", prompt, **fields)
        return harness.text("alone")
