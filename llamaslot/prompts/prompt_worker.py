"""The prompt worker: carries out jobs on threads of its own, so that no step waits; clients take turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from llamaslot.base.commands import AnswerBody, ParseBody
from llamaslot.base.errors import InvalidRequestError, LlamaslotError, QueueFullError, ServerError
from llamaslot.base.executors import close_after_queue, started_executor
from llamaslot.base.generation.responses import ListItems
from llamaslot.base.stats import AnchorStats, ReplyStats, SessionStats
from llamaslot.base.turns import Turns
from llamaslot.prompts.prompt_jobs import (
    Job,
    JobResult,
    PromptJobs,
    Release,
    TokenizePrompt,
    activity_of,
    client_of,
)

if TYPE_CHECKING:
    from llamaslot.prompts.tokenizer import Tokenizer
    from llamaslot.protocol.request_reader import RequestReader

_MAX_SHORT_QUERY = 2**14
"""Bytes of a body up to which a query is answered on the thread of the prompts."""
_MAX_SHORT_BODY_BYTES = 2**20
"""Bytes up to which the body of a request, with earlier items that it names, is read on that thread: many are
conversations of agents.
"""
MAX_LONG_QUERIES = 4
"""Longer queries in progress or waiting; one more gets a 429."""

_PROMPT_LANE, _LONG_LANE, _GRAMMAR_LANE = range(3)
"""Numbers of the lanes for prompts and all that belongs to them, for long jobs, and for bodies whose grammars may
be compiled.
"""
JOBS_AT_ONCE = (1, 1, 4)
"""Jobs of each lane that are carried out at once. Of the last one several, and one of a client at most, so that
grammars that take long hold up those of no other client: they are compiled in a process of their own.
"""

_log = structlog.get_logger(__name__)


def is_long_query(job: Job) -> bool:
    """True if a job belongs to no completion, and is so long that it must not hold up prompts."""
    return isinstance(job, AnswerBody | ListItems) and job.size > _MAX_SHORT_QUERY


def is_long(job: Job) -> bool:
    """True if a job must not hold up prompts."""
    if not isinstance(job, ParseBody):
        return is_long_query(job)
    return len(job.body) + (job.earlier.size if job.earlier is not None else 0) > _MAX_SHORT_BODY_BYTES


def lane_of(job: Job) -> int:
    """Return the number of the lane that takes a job."""
    if isinstance(job, ParseBody) and job.may_compile:
        return _GRAMMAR_LANE
    return _LONG_LANE if is_long(job) else _PROMPT_LANE


def too_many_queries() -> QueueFullError:
    """Return the error of one long query too many."""
    return QueueFullError(f"{MAX_LONG_QUERIES} long texts are being tokenized; try later", retry_after=1)


def invalid_unicode() -> InvalidRequestError:
    """Return the error of a text that cannot be passed on."""
    return InvalidRequestError("the text has characters that are no valid Unicode")


def on_result(
    future: asyncio.Future[Any], then: Callable[[Any], None], failed: Callable[[LlamaslotError], None]
) -> None:
    """Continue with the result or the error of a job, not at all if it was cancelled."""

    def done(_: object) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            then(future.result())
        else:
            assert isinstance(error, LlamaslotError)
            failed(error)

    future.add_done_callback(done)


def _job_error(error: BaseException, job: Job) -> LlamaslotError:
    """Return the error for the client of a job; a bug is logged."""
    if isinstance(error, LlamaslotError):
        return error
    _log.error("prompt_worker.failed", job=type(job).__name__, exc_info=error)
    return ServerError(f"{activity_of(job)} failed")


class PromptWorker(Protocol):
    """Carries out the jobs of each lane, `JOBS_AT_ONCE` at a time, beside those of the others.

    Clients take turns, so that many prompts of one delay a prompt of another by one job at most.
    """

    @property
    def chat_template(self) -> str:
        """Jinja source of the chat template in use."""

    @property
    def stats(self) -> tuple[AnchorStats, SessionStats, ReplyStats]:
        """Counts of what is remembered, and estimated bytes."""

    def call(self, job: Job) -> asyncio.Future[Any]:
        """Start a job; the future has its result or a `LlamaslotError`. Cancelling it cancels the job."""


class PromptThreads(PromptWorker):
    """Carries out the jobs of each lane on threads of its own. All methods are called on the event loop."""

    def __init__(self, tokenizer: Tokenizer, reader: RequestReader) -> None:
        self._jobs = PromptJobs(tokenizer, reader)
        self._reader = reader
        self._lanes = [
            _JobLane(
                [started_executor(1, f"llamaslot-{name}", tokenizer.stack_bytes) for _ in range(n)], self._jobs
            )
            for name, n in zip(("tokenizer", "queries", "grammars"), JOBS_AT_ONCE, strict=True)
        ]
        self._n_queries = 0

    @property
    def stats(self) -> tuple[AnchorStats, SessionStats, ReplyStats]:
        """Counts of what is remembered, and estimated bytes."""
        tokenizer = self._jobs.tokenizer
        anchors, sessions, replies = tokenizer.anchors, tokenizer.sessions, tokenizer.replies
        return (
            AnchorStats(len(anchors), anchors.n_bytes),
            SessionStats(len(sessions), sessions.n_bytes),
            ReplyStats(len(replies), replies.n_bytes),
        )

    @property
    def chat_template(self) -> str:
        """Jinja source of the chat template in use."""
        return self._reader.template.source

    @property
    def n_contexts(self) -> int:
        """Requests of which replies may still be remembered."""
        return self._jobs.n_contexts

    def start(self) -> None:
        """Probe for exact cut points, so that no request need wait for that."""
        self._lanes[0].threads[0].submit(self._prepare)

    def close(self) -> list[Future[None]]:
        """End the threads, which must not outlive the vocabulary; the futures are done once their jobs are."""
        return [close_after_queue(thread) for lane in self._lanes for thread in lane.threads]

    def call(self, job: Job) -> asyncio.Future[Any]:
        """Start a job; at most `MAX_LONG_QUERIES` long queries wait, further ones fail at once."""
        lane = self._lanes[lane_of(job)]
        if not is_long_query(job):
            return asyncio.wrap_future(lane.submit(job))
        loop = asyncio.get_running_loop()
        if self._n_queries >= MAX_LONG_QUERIES:
            refused: asyncio.Future[Any] = loop.create_future()
            refused.set_exception(too_many_queries())
            return refused
        self._n_queries += 1
        future = asyncio.wrap_future(lane.submit(job))
        future.add_done_callback(self._count_query_end)
        return future

    def _count_query_end(self, _: object) -> None:
        self._n_queries -= 1

    def _prepare(self) -> None:
        try:
            if not self._jobs.tokenizer.prepare():
                _log.warning("text_anchors.off", reason="no control token of this vocabulary has exact cut points")
        except Exception:
            _log.exception("prompt_worker.failed", job="prepare")


class _JobLane:
    """Threads that carry out jobs, each chosen when one of them is free."""

    def __init__(self, threads: Sequence[Executor], jobs: PromptJobs) -> None:
        self.threads = list(threads)
        self._jobs = jobs
        self._lock = threading.Lock()
        self._waiting: dict[Future[JobResult], Job] = {}
        self._turns = Turns()
        self._busy: set[str | None] = set()
        """Clients of which a job is running."""
        self.n_jobs = 0
        """Jobs waiting or running."""

    def submit(self, job: Job) -> Future[JobResult]:
        """Add a job; one that is cancelled before it has begun is forgotten."""
        future: Future[JobResult] = Future()
        with self._lock:
            if isinstance(job, Release):
                # It goes before its prompt, whose cancellation has not reached this thread yet.
                released = [each for each, other in self._waiting.items() if _is_prompt_of(other, job.request_id)]
                for each in released:
                    del self._waiting[each]
            self._waiting[future] = job
            self.n_jobs += 1
        future.add_done_callback(self._remove)
        for thread in self.threads:
            thread.submit(self._run_next)
        return future

    def _remove(self, future: Future[JobResult]) -> None:
        with self._lock:
            self._waiting.pop(future, None)
            self.n_jobs -= 1

    def _run_next(self) -> None:
        """Carry out the job whose turn it is, if any; each thread has a call for each job, so none is left.

        While a job runs, its client's others wait; the thread that has carried it out looks for a further one.
        """
        client: str | None = None
        while True:
            with self._lock:
                self._busy.discard(client)
                free = [each for each, job in self._waiting.items() if client_of(job) not in self._busy]
                if not free:
                    return
                future = self._turns.next(free, lambda each: client_of(self._waiting[each]))
                job = self._waiting.pop(future)
                client = client_of(job)
                if client is not None:
                    self._turns.take(client)
                    self._busy.add(client)
            self._run(future, job)

    def _run(self, future: Future[JobResult], job: Job) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = self._jobs.run(job)
        except BaseException as error:
            future.set_exception(_job_error(error, job))
        else:
            future.set_result(result)


def _is_prompt_of(job: Job, request_id: str) -> bool:
    return isinstance(job, TokenizePrompt) and job.submit.request_id == request_id
