"""Constraint worker: compiles the constraints of requests on a thread of its own, so that no step waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import structlog

from llamaslot.base.backend import Backend, CompiledConstraint
from llamaslot.base.errors import LlamaslotError, ServerError, UnavailableError
from llamaslot.base.executors import close_after_queue
from llamaslot.scheduler.request import Request, RequestState

COMPILE_TIMEOUT_S = 30.0
"""Time from a request's arrival to its compiled constraint.

The prompt worker has compiled it before, on a small vocabulary and with a time limit of its own, so this is long
only where many others come first.
"""

MAX_BUSY_THREADS = 2
"""Threads that may go on compiling after the time limit; with one more, later requests wait for the last one."""

_log = structlog.get_logger(__name__)


class ConstraintWorker:
    """Compiles one constraint after the other; `post` runs an action between two steps.

    All methods are called on the event loop. llguidance cannot be interrupted: a thread that is busy at the time
    limit goes on, and another one takes its place, unless `MAX_BUSY_THREADS` are busy already.
    """

    def __init__(
        self,
        backend: Backend,
        post: Callable[[Callable[[], None]], None],
        *,
        executor: Executor | None = None,
        timeout_s: float = COMPILE_TIMEOUT_S,
    ) -> None:
        self._backend = backend
        self._post = post
        self._timeout_s = timeout_s
        self._executor = executor or _thread()
        self._overdue: list[Future[CompiledConstraint]] = []
        """Constraints that are still being compiled after the time limit, each on a thread of its own."""
        self._ends: list[Future[None]] = []
        """Done once their threads have ended."""
        self._tasks: set[asyncio.Task[CompiledConstraint | LlamaslotError]] = set()
        """Kept from being collected while they wait."""

    def prepare(self, request: Request, failed: Callable[[LlamaslotError], None]) -> None:
        """Give a queued request its compiled constraint, or call `failed`, unless it has ended by then."""
        constraint = request.submit.constraint
        if constraint is None:
            return

        def finish(result: CompiledConstraint | LlamaslotError) -> None:
            if request.state is not RequestState.QUEUED:
                return
            if isinstance(result, LlamaslotError):
                failed(result)
            else:
                request.constraint = result

        def done(task: asyncio.Task[CompiledConstraint | LlamaslotError]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                self._post(lambda: finish(task.result()))

        future = self._executor.submit(self._backend.compile, constraint)
        task = asyncio.ensure_future(self._result(future, constraint.param))
        self._tasks.add(task)
        task.add_done_callback(done)

    def close(self) -> list[Future[None]]:
        """End the threads, which must not outlive the backend; the futures are done once their queues are."""
        return [*self._ends, close_after_queue(self._executor)]

    def _replace_thread(self, future: Future[CompiledConstraint]) -> None:
        """Have another thread compile what comes next, if this constraint is still being compiled."""
        self._overdue = [each for each in self._overdue if not each.done()]
        self._ends = [each for each in self._ends if not each.done()]
        if future.running() and len(self._overdue) < MAX_BUSY_THREADS:
            self._overdue.append(future)
            self._ends.append(close_after_queue(self._executor))
            self._executor = _thread()
            _log.warning("constraint.overdue", seconds=self._timeout_s, threads=len(self._overdue))

    async def _result(self, future: Future[CompiledConstraint], param: str) -> CompiledConstraint | LlamaslotError:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._timeout_s)
        except LlamaslotError as error:
            return error
        except TimeoutError:
            self._replace_thread(future)
            return UnavailableError(
                f"'{param}' was not compiled within {self._timeout_s:g} s; simplify it, or try later", param=param
            )
        except Exception:
            _log.exception("constraint.failed")
            return ServerError(f"'{param}' could not be compiled", param=param)


def _thread() -> Executor:
    return ThreadPoolExecutor(1, thread_name_prefix="llamaslot-constraints")
