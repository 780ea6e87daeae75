"""Constraint worker: compiles the constraints of requests on its own threads, so that no step waits.

Each constraint has already been compiled once, in the prompt worker's trial. The time that took decides which
thread compiles it here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial

import structlog

from llamaslot.base.backend import Backend, CompiledConstraint
from llamaslot.base.callers import Turns
from llamaslot.base.commands import Constraint
from llamaslot.base.errors import LlamaslotError, ServerError, UnavailableError
from llamaslot.base.threads import GRAMMAR_STACK_BYTES, close_after_queue, started_executor
from llamaslot.scheduler.request import Request, RequestState

COMPILE_TIMEOUT_S = 30.0
"""Most time from a request's arrival to its compiled constraint. Reached only if many others are compiled first."""
QUICK_S = 0.1
"""Most CPU time of a quick constraint; quick ones do not wait for those that take longer to compile."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Job:
    """A request that waits for its constraint."""

    request: Request
    constraint: Constraint
    failed: Callable[[LlamaslotError], None]
    timer: asyncio.TimerHandle = field(init=False)


@dataclass(slots=True)
class _Lane:
    """A thread, and the jobs that wait for it; clients take turns."""

    thread: Executor
    waiting: list[_Job] = field(default_factory=list)
    turns: Turns = field(default_factory=Turns)
    is_busy: bool = False


class ConstraintWorker:
    """Compiles constraints. `post` runs an action between two steps.

    All methods are called on the event loop. One thread compiles quick constraints, another all others.
    """

    def __init__(self, backend: Backend, post: Callable[[Callable[[], None]], None]) -> None:
        self._backend = backend
        self._post = post
        self._quick, self._slow = (
            _Lane(started_executor(1, "llamaslot-constraints", GRAMMAR_STACK_BYTES)) for _ in range(2)
        )

    def compile_for(self, request: Request, failed: Callable[[LlamaslotError], None]) -> None:
        """Give a queued request its compiled constraint, or call `failed`; neither if it has ended by then."""
        constraint = request.params.constraint
        if constraint is None:
            return
        lane = self._quick if constraint.seconds <= QUICK_S else self._slow
        job = _Job(request, constraint, failed)
        job.timer = asyncio.get_running_loop().call_later(COMPILE_TIMEOUT_S, self._time_out, lane, job)
        lane.waiting.append(job)
        self._compile_next(lane)

    def close(self) -> list[Future[None]]:
        """End the threads, which must not outlive the backend. The futures are done once the threads are."""
        for lane in (self._quick, self._slow):
            lane.waiting.clear()
        return [close_after_queue(lane.thread) for lane in (self._quick, self._slow)]

    def _compile_next(self, lane: _Lane) -> None:
        """Compile the next constraint of a request that has not ended, if the thread is idle."""
        while lane.waiting and not lane.is_busy:
            job = lane.turns.next(lane.waiting, lambda each: each.request.params.client)
            lane.waiting.remove(job)
            if job.request.state is not RequestState.QUEUED:
                job.timer.cancel()
                continue
            lane.turns.take(job.request.params.client)
            lane.is_busy = True
            loop = asyncio.get_running_loop()
            compiling = loop.run_in_executor(lane.thread, self._backend.compile, job.constraint)
            compiling.add_done_callback(partial(self._on_compiled, lane, job))

    def _on_compiled(self, lane: _Lane, job: _Job, done: asyncio.Future[CompiledConstraint]) -> None:
        lane.is_busy = False
        job.timer.cancel()
        error = done.exception()
        if error is None:
            self._finish(job, done.result())
        elif isinstance(error, LlamaslotError):
            self._finish(job, error)
        else:
            _log.error("constraint.failed", exc_info=error)
            param = job.constraint.param
            self._finish(job, ServerError(f"'{param}' could not be compiled", param=param))
        self._compile_next(lane)

    def _time_out(self, lane: _Lane, job: _Job) -> None:
        if job in lane.waiting:
            lane.waiting.remove(job)
        param = job.constraint.param
        message = f"'{param}' was not compiled within {COMPILE_TIMEOUT_S:g} s; simplify it, or try later"
        self._finish(job, UnavailableError(message, param=param))

    def _finish(self, job: _Job, result: CompiledConstraint | LlamaslotError) -> None:
        """Hand over a result between two steps, unless the request has ended by then."""

        def finish() -> None:
            if job.request.state is not RequestState.QUEUED:
                return
            if isinstance(result, LlamaslotError):
                job.failed(result)
            else:
                job.request.constraint = result

        self._post(finish)
