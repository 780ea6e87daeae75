"""The prompt worker: reads, renders and tokenizes on threads of its own, so that no step waits; clients take turns.

Jobs wait in lanes, so that long ones do not hold up prompts:

    prompt lane     prompts, what is remembered of replies, short queries           one at a time
    long lane       large bodies, long queries                                      one at a time
    grammar lane    bodies whose grammars must be compiled to be checked            four, one of each client

`PromptQueue` has the lanes, in the parent. Its jobs are carried out by `PromptThreads` in a process of their own
(`PromptSupervisor`) or, in tests, in the same one (`LocalPrompts`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from llamaslot.base.callers import Turns
from llamaslot.base.commands import AnswerBody, Prepare
from llamaslot.base.errors import (
    InvalidRequestError,
    LlamaslotError,
    QueueFullError,
    ServerError,
    UnavailableError,
)
from llamaslot.base.generation.request_context import ListItems
from llamaslot.base.stats import AnchorStats, ReplyStats, SessionStats
from llamaslot.base.text_records import RememberedReply, Session, TextAnchor
from llamaslot.base.threads import close_after_queue, started_executor
from llamaslot.prompts.prompt_jobs import Job, JobResult, PromptJobs, Release, Remember, activity_of, client_of

if TYPE_CHECKING:
    from llamaslot.prompts.tokenizer import Tokenizer
    from llamaslot.protocol.request_reader import RequestReader

_MAX_SHORT_QUERY = 2**14
"""Bytes of a body up to which a query is answered in the prompt lane."""
_MAX_SHORT_BODY_BYTES = 2**20
"""Bytes up to which the body of a request, with earlier items that it names, is read in the prompt lane: many are
conversations of agents.
"""
MAX_LONG_QUERIES = 4
"""Longer queries in progress or waiting; one more gets a 429."""

_PROMPT_LANE, _LONG_LANE, _GRAMMAR_LANE = range(3)
JOBS_AT_ONCE = (1, 1, 4)
"""Jobs of each lane that are carried out at once. Of the last one several, and one of a client at most, so that
grammars that take long hold up those of no other client: they are compiled in a process of their own.
"""
_THREAD_NAMES = ("llamaslot-tokenizer", "llamaslot-queries", "llamaslot-grammars")

_log = structlog.get_logger(__name__)


def is_long_query(job: Job) -> bool:
    """True for a query that is too long for the prompt lane."""
    return isinstance(job, AnswerBody | ListItems) and job.size > _MAX_SHORT_QUERY


def is_long(job: Job) -> bool:
    """True if a job must not hold up prompts."""
    if not isinstance(job, Prepare):
        return is_long_query(job)
    return len(job.body) + (job.earlier.size if job.earlier is not None else 0) > _MAX_SHORT_BODY_BYTES


def lane_of(job: Job) -> int:
    """Return the number of the lane that takes a job."""
    if isinstance(job, Prepare) and job.may_compile:
        return _GRAMMAR_LANE
    return _LONG_LANE if is_long(job) else _PROMPT_LANE


def invalid_unicode() -> InvalidRequestError:
    """Return the error of a text that cannot be passed on."""
    return InvalidRequestError("the text is invalid Unicode")


@dataclass(slots=True, eq=False)
class PendingJob:
    """A job that waits or runs."""

    number: int
    job: Job
    future: asyncio.Future[Any]
    lane: Lane
    client: str | None = None
    """None for a job that goes before those of clients."""
    n_tries: int = 0
    """Processes that ended while it ran."""
    is_suspect: bool = False
    """True if it, or another job that ran beside it, has crashed the process: it is tried alone."""
    timer: asyncio.TimerHandle | None = None
    """Watches the time of a running job."""
    until: float = 0.0
    """Its deadline, on the clock of the event loop."""

    def fail(self, error: LlamaslotError) -> None:
        """Answer with an error, unless it is answered or cancelled."""
        if not self.future.done():
            self.future.set_exception(error)


class Lane:
    """Jobs of which `n_at_once` are carried out at once."""

    def __init__(self, number: int, n_at_once: int) -> None:
        self.number = number
        self.waiting: OrderedDict[int, PendingJob] = OrderedDict()
        self.running: dict[int, PendingJob] = {}
        self.turns = Turns()
        self._n_at_once = n_at_once

    def next(self) -> PendingJob | None:
        """Return the job whose turn it is, if one may be carried out; of a client one at a time is."""
        if len(self.running) >= self._n_at_once:
            return None
        busy = {each.client for each in self.running.values() if each.client is not None}
        free = [each for each in self.waiting.values() if each.client not in busy and not each.future.done()]
        return self.turns.next(free, lambda each: each.client) if free else None

    def begin(self, pending: PendingJob) -> None:
        """Make a waiting job a running one."""
        del self.waiting[pending.number]
        self.running[pending.number] = pending
        if pending.client is not None:
            self.turns.take(pending.client)

    def put_back(self, pending: PendingJob) -> None:
        """Make a job the next one."""
        self.waiting[pending.number] = pending
        self.waiting.move_to_end(pending.number, last=False)

    @property
    def n_queries(self) -> int:
        """Long queries, waiting or running."""
        return sum(is_long_query(each.job) for each in (*self.waiting.values(), *self.running.values()))

    @property
    def has_replies(self) -> bool:
        """True if replies are still to be remembered."""
        return any(isinstance(each.job, Remember) for each in (*self.waiting.values(), *self.running.values()))


class PromptQueue:
    """The jobs that wait and run. All methods are called on the event loop."""

    def __init__(self) -> None:
        self.lanes = tuple(Lane(number, n) for number, n in enumerate(JOBS_AT_ONCE))
        self._numbers = itertools.count(1)

    @property
    def chat_template(self) -> str:
        """Jinja source of the chat template in use."""
        raise NotImplementedError

    @property
    def stats(self) -> tuple[AnchorStats, SessionStats, ReplyStats]:
        """Counts of what is remembered, and estimated bytes."""
        raise NotImplementedError

    def call(self, job: Job) -> asyncio.Future[Any]:
        """Start a job; the future has its result or a `LlamaslotError`. Cancelling it cancels a job that waits.

        At most `MAX_LONG_QUERIES` long queries wait; further ones fail at once.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        lane = self.lanes[lane_of(job)]
        if is_long_query(job) and lane.n_queries >= MAX_LONG_QUERIES:
            error = QueueFullError(f"{MAX_LONG_QUERIES} long texts are being tokenized; try later", retry_after=1)
            future.set_exception(error)
            return future
        pending = PendingJob(next(self._numbers), job, future, lane, client_of(job))
        lane.waiting[pending.number] = pending
        future.add_done_callback(lambda _: lane.waiting.pop(pending.number, None))
        self._run_next()
        return future

    def _run_next(self) -> None:
        """Begin what may be carried out now."""
        for lane in self.lanes:
            # A prompt finds the reply before it, which is remembered in the prompt lane.
            while not (lane is not self.lanes[0] and lane.waiting and self.lanes[0].has_replies):
                pending = lane.next()
                if pending is None:
                    break
                lane.begin(pending)
                self._run(pending)

    def _run(self, pending: PendingJob) -> None:
        """Have a job carried out, and its end reported by `_done`."""
        raise NotImplementedError

    def _done(self, number: int, result: JobResult, error: LlamaslotError | None = None) -> Job | None:
        """Answer a running job, and return it; None if nothing waits for the answer any more."""
        pending = next((ended for lane in self.lanes if (ended := lane.running.pop(number, None))), None)
        if pending is None:
            return None
        if pending.timer is not None:
            pending.timer.cancel()
        if pending.future.done():
            if isinstance(pending.job, Prepare):
                # Its request may have been released while it ran.
                self.call(Release(pending.job.context.request_id))
            return None
        if error is not None:
            pending.future.set_exception(error)
        else:
            pending.future.set_result(result)
        return pending.job


class PromptThreads:
    """Threads that carry out jobs, as many for each lane as it runs at once."""

    def __init__(self, tokenizer: Tokenizer, reader: RequestReader) -> None:
        self._jobs = PromptJobs(tokenizer, reader)
        self._reader = reader
        self._threads: list[list[Executor]] = [
            [started_executor(1, name, tokenizer.stack_bytes) for _ in range(n)]
            for n, name in zip(JOBS_AT_ONCE, _THREAD_NAMES, strict=True)
        ]
        self._idle = [list(each) for each in self._threads]
        """Threads without a job, by lane."""

    @property
    def stats(self) -> tuple[AnchorStats, SessionStats, ReplyStats]:
        """Counts of what is remembered, and estimated bytes."""
        amount = self._jobs.tokenizer.memory.amount
        return (
            AnchorStats(*amount(TextAnchor)),
            SessionStats(*amount(Session)),
            ReplyStats(*amount(RememberedReply)),
        )

    @property
    def chat_template(self) -> str:
        """Jinja source of the chat template in use."""
        return self._reader.template.source

    @property
    def n_kept(self) -> int:
        """Requests that were not released."""
        return self._jobs.n_kept

    def start(self) -> None:
        """Probe for exact cut points, so that no request need wait for that."""
        self._threads[0][0].submit(self._probe)

    def close(self) -> list[Future[None]]:
        """End the threads, which must not outlive the vocabulary; the futures are done once their jobs are."""
        return [close_after_queue(each) for lane in self._threads for each in lane]

    def carry_out(self, job: Job, lane: int, on_prompt: Callable[[], None] = lambda: None) -> Future[JobResult]:
        """Carry out a job on an idle thread of a lane. The future has its result or a `LlamaslotError`.

        `on_prompt` is that of `PromptJobs.run`.
        """
        idle = self._idle[lane]
        thread = idle.pop()

        def run() -> JobResult:
            try:
                return self._jobs.run(job, on_prompt)
            except LlamaslotError:
                raise
            except BaseException as error:
                _log.error("prompt_worker.failed", job=type(job).__name__, exc_info=error)
                raise ServerError(f"{activity_of(job)} failed") from None

        future = thread.submit(run)
        future.add_done_callback(lambda _: idle.append(thread))
        return future

    def _probe(self) -> None:
        try:
            if not self._jobs.tokenizer.prepare():
                _log.warning("text_anchors.off", reason="no control token of this vocabulary has exact cut points")
        except Exception:
            _log.exception("prompt_worker.failed", job="prepare")


class LocalPrompts(PromptQueue):
    """A prompt worker whose threads are in this process."""

    def __init__(self, threads: PromptThreads) -> None:
        super().__init__()
        self.threads = threads
        self._is_closed = False

    def call(self, job: Job) -> asyncio.Future[Any]:
        """Start a job, unless the threads have ended."""
        if self._is_closed:
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            future.set_exception(UnavailableError("the server is shutting down"))
            return future
        return super().call(job)

    def close(self) -> list[Future[None]]:
        """Fail the jobs that wait, and end the threads; the futures are done once their jobs are."""
        self._is_closed = True
        for lane in self.lanes:
            for pending in list(lane.waiting.values()):
                pending.fail(UnavailableError("the server is shutting down"))
        return self.threads.close()

    @property
    def stats(self) -> tuple[AnchorStats, SessionStats, ReplyStats]:
        """Counts of what is remembered, and estimated bytes."""
        return self.threads.stats

    @property
    def chat_template(self) -> str:
        """Jinja source of the chat template in use."""
        return self.threads.chat_template

    def _run(self, pending: PendingJob) -> None:
        loop = asyncio.get_running_loop()

        def ended(future: Future[JobResult]) -> None:
            error = future.exception()
            assert error is None or isinstance(error, LlamaslotError)
            result = None if error is not None else future.result()
            # The loop may be closed by the time a job ends that nobody waits for.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._has_ended, pending.number, result, error)

        self.threads.carry_out(pending.job, pending.lane.number).add_done_callback(ended)

    def _has_ended(self, number: int, result: JobResult, error: LlamaslotError | None) -> None:
        self._done(number, result, error)
        if not self._is_closed:
            self._run_next()
