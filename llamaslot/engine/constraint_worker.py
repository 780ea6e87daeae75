"""Constraint worker: compiles the constraints of requests on its own threads, so that no step waits.

Each constraint has already been compiled once, in the prompt worker's trial. The time that took decides which
thread compiles it here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
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


class ConstraintWorker:
    """Compiles constraints. `post` runs an action between two steps.

    All methods are called on the event loop. One thread compiles quick constraints, another all others. On each,
    clients take turns.
    """

    def __init__(
        self,
        backend: Backend,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._post = post
        self._quick, self._slow = (_CompileQueue(backend) for _ in range(2))
        self._tasks: set[asyncio.Task[CompiledConstraint | LlamaslotError]] = set()
        """References that keep the tasks from being garbage-collected."""

    def prepare(self, request: Request, failed: Callable[[LlamaslotError], None]) -> None:
        """Give a queued request its compiled constraint, or call `failed`; neither if it has ended by then."""
        constraint = request.params.constraint
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

        queue = self._quick if constraint.seconds <= QUICK_S else self._slow
        task = asyncio.ensure_future(
            self._result(queue.submit(constraint, request.params.client), constraint.param)
        )
        self._tasks.add(task)
        task.add_done_callback(done)

    def close(self) -> list[Future[None]]:
        """End the threads, which must not outlive the backend. The futures are done once the threads are."""
        return [queue.close() for queue in (self._quick, self._slow)]

    async def _result(self, future: Future[CompiledConstraint], param: str) -> CompiledConstraint | LlamaslotError:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), COMPILE_TIMEOUT_S)
        except LlamaslotError as error:
            return error
        except TimeoutError:
            return UnavailableError(
                f"'{param}' was not compiled within {COMPILE_TIMEOUT_S:g} s; simplify it, or try later", param=param
            )
        except Exception:
            _log.exception("constraint.failed")
            return ServerError(f"'{param}' could not be compiled", param=param)


class _CompileQueue:
    """Queue of constraints that one thread compiles."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._thread = started_executor(1, "llamaslot-constraints", GRAMMAR_STACK_BYTES)
        self._waiting: dict[Future[CompiledConstraint], tuple[Constraint, str]] = {}
        """Constraint and client of each future."""
        self._turns = Turns()
        self._is_busy = False

    def submit(self, constraint: Constraint, client: str) -> Future[CompiledConstraint]:
        """Queue a constraint. If the future is cancelled before its turn, it is not compiled."""
        future: Future[CompiledConstraint] = Future()
        self._waiting[future] = constraint, client
        self._compile_next()
        return future

    def close(self) -> Future[None]:
        """Drop what is queued; the future is done once the thread has ended."""
        self._waiting.clear()
        return close_after_queue(self._thread)

    def _compile_next(self) -> None:
        while self._waiting and not self._is_busy:
            future = self._turns.next(self._waiting, lambda each: self._waiting[each][1])
            constraint, client = self._waiting.pop(future)
            if not future.set_running_or_notify_cancel():
                continue
            self._turns.take(client)
            self._is_busy = True
            compiling = asyncio.get_running_loop().run_in_executor(self._thread, self._backend.compile, constraint)
            compiling.add_done_callback(partial(self._finish, future))

    def _finish(self, future: Future[CompiledConstraint], done: asyncio.Future[CompiledConstraint]) -> None:
        self._is_busy = False
        if done.cancelled():
            future.cancel()
        elif (error := done.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())
        self._compile_next()
