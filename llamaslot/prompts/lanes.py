"""Lanes in which jobs of the prompt worker wait in the parent, so that long jobs do not delay prompts.

    prompt lane     prompts, what is remembered of replies, short queries           one at a time
    long lane       large bodies, long queries                                      one at a time
    grammar lane    bodies whose grammars must be compiled to be checked            four, one of each client

In each lane clients take turns (`client_of`); otherwise jobs are carried out in order.
`processes/prompt_supervisor.py` sends them to the worker's process.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any

import msgspec

from llamaslot.base.callers import Turns
from llamaslot.base.errors import LlamaslotError, QueueFullError
from llamaslot.base.prompt_jobs import (
    AnswerBody,
    ClearTexts,
    DropSession,
    Job,
    ListItems,
    Locate,
    NextTurn,
    Prepare,
    Release,
    Remember,
)

_MAX_SHORT_QUERY = 2**14
"""Bytes of a body up to which a query is answered in the prompt lane."""
_MAX_SHORT_BODY_BYTES = 2**20
"""Bytes up to which the body of a request, with earlier items that it names, is read in the prompt lane: many are
conversations of agents.
"""
MAX_LONG_QUERIES = 4
"""Longer queries in progress or waiting; one more gets a 429."""

PROMPT_LANE, LONG_LANE, GRAMMAR_LANE = range(3)
JOBS_AT_ONCE = (1, 1, 4)
"""Jobs of each lane that are carried out at once. Several grammars at once, at most one per client, so that one
client's slow grammars do not delay another's: they are compiled in a process of their own.
"""


def client_of(job: Job) -> str | None:
    """Return the client that waits for a job; None for a job that goes before all those, such as `Remember`.

    The prompt that comes after a reply finds what was remembered of it.
    """
    match job:
        case Prepare():
            # The session in its body is not known yet.
            return job.context.caller.client()
        case AnswerBody() | ListItems():
            return job.client
        case _:
            return None


_ACTIVITIES: dict[type[msgspec.Struct] | str, str] = {
    Locate: "finding where the prompt diverges",
    DropSession: "dropping the session",
    ClearTexts: "dropping records of the token memory",
    ListItems: "listing the items",
    **dict.fromkeys(("text", "native", "infill", "ollama_generate"), "tokenizing the prompt"),
    **dict.fromkeys(("embedding", "embeddings", "ollama_embed", "ollama_embeddings"), "tokenizing the inputs"),
    "rerank": "tokenizing the documents",
    **dict.fromkeys(
        ("chat", "messages", "responses", "compact", "ollama_chat", "any"), "rendering and tokenizing the messages"
    ),
    "apply_template": "rendering the messages",
    "tokenize": "tokenizing the text",
    "detokenize": "detokenizing the tokens",
}
"""By type, or by the kind of a body."""


def activity_of(job: Job) -> str:
    """Return the words for what a job does, for the error message of its client."""
    kind = job.kind if isinstance(job, Prepare | AnswerBody) else type(job)
    return _ACTIVITIES.get(kind, "remembering replies")


def is_long_query(job: Job) -> bool:
    """True for a query that is too long for the prompt lane."""
    return isinstance(job, AnswerBody | ListItems) and job.size > _MAX_SHORT_QUERY


def lane_of(job: Job) -> int:
    """Return the lane that takes a job."""
    if not isinstance(job, Prepare):
        return LONG_LANE if is_long_query(job) else PROMPT_LANE
    if job.may_compile:
        return GRAMMAR_LANE
    return PROMPT_LANE if is_short(job) else LONG_LANE


def is_short(job: Prepare) -> bool:
    """True if a body, with the earlier items that it names, is short enough for the prompt lane."""
    return len(job.body) + (job.earlier.size if job.earlier is not None else 0) <= _MAX_SHORT_BODY_BYTES


@dataclass(slots=True, eq=False)
class PendingJob:
    """A job that waits or runs."""

    number: int
    job: Job
    future: asyncio.Future[Any]
    lane: int
    client: str | None
    """None for a job that goes before those of clients."""
    is_running: bool = False
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


class Lanes:
    """The jobs that wait and run. All methods are called on the event loop."""

    def __init__(self) -> None:
        self.jobs: dict[int, PendingJob] = {}
        """By number, in the order in which they came."""
        self._turns = tuple(Turns() for _ in JOBS_AT_ONCE)
        self._numbers = itertools.count(1)

    @property
    def running(self) -> list[PendingJob]:
        """The jobs that were begun and have not ended."""
        return [each for each in self.jobs.values() if each.is_running]

    def add(self, job: Job) -> asyncio.Future[Any]:
        """Add a job; the future has its result or a `LlamaslotError`. Cancelling it cancels a job that waits.

        At most `MAX_LONG_QUERIES` long queries wait; further ones fail at once.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if is_long_query(job) and sum(is_long_query(each.job) for each in self.jobs.values()) >= MAX_LONG_QUERIES:
            error = QueueFullError(f"{MAX_LONG_QUERIES} long texts are being tokenized; try later", retry_after=1)
            future.set_exception(error)
            return future
        pending = PendingJob(next(self._numbers), job, future, lane_of(job), client_of(job))
        self.jobs[pending.number] = pending

        def forget(_: object) -> None:
            if not pending.is_running:
                self.jobs.pop(pending.number, None)

        future.add_done_callback(forget)
        return future

    def begin_next(self) -> PendingJob | None:
        """Make the job whose turn it is a running one, and return it; None if none may run now."""
        running = self.running
        waiting = [each for each in self.jobs.values() if not each.is_running and not each.future.done()]
        suspect = next((each for each in waiting if each.is_suspect), None)
        if suspect is not None or any(each.is_suspect for each in running):
            # If it crashes the process again, it must be the only one.
            return self._begin(suspect) if suspect is not None and not running else None
        has_replies = any(isinstance(each.job, Remember) for each in self.jobs.values())
        for lane, n_at_once in enumerate(JOBS_AT_ONCE):
            # A prompt finds the reply before it, which is remembered in the prompt lane.
            if lane != PROMPT_LANE and has_replies:
                break
            beside = [each.client for each in running if each.lane == lane]
            # Of a client one at a time; other jobs are of no client, and only in the prompt lane.
            free = [each for each in waiting if each.lane == lane and each.client not in beside]
            # Nobody waits for what is predicted.
            free = [each for each in free if not isinstance(each.job, NextTurn)] or free
            if free and len(beside) < n_at_once:
                return self._begin(self._turns[lane].next(free, lambda each: each.client))
        return None

    def _begin(self, pending: PendingJob) -> PendingJob:
        pending.is_running = True
        if pending.client is not None:
            self._turns[pending.lane].take(pending.client)
        return pending

    def end(self, number: int) -> PendingJob:
        """Remove a running job, and return it for its answer."""
        pending = self.jobs.pop(number)
        if pending.future.done() and isinstance(pending.job, Prepare):
            # Its request may have been released while it ran, by a job of another lane.
            self.add(Release(pending.job.context.request_id))
        return pending
