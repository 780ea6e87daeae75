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

_log = structlog.get_logger(__name__)


class ConstraintWorker:
    """Compiles one constraint after the other; `post` runs an action between two steps.

    All methods are called on the event loop. After the time limit the thread may still be busy, but no request
    waits for it.
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
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="llamaslot-constraints")
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

        future = asyncio.wrap_future(self._executor.submit(self._backend.compile, constraint))
        task = asyncio.ensure_future(self._result(future, constraint.param))
        self._tasks.add(task)
        task.add_done_callback(done)

    def close(self) -> Future[None]:
        """End the thread, which must not outlive the backend; the future is done once its queue is."""
        return close_after_queue(self._executor)

    async def _result(
        self, future: asyncio.Future[CompiledConstraint], param: str
    ) -> CompiledConstraint | LlamaslotError:
        try:
            return await asyncio.wait_for(future, self._timeout_s)
        except LlamaslotError as error:
            return error
        except TimeoutError:
            return UnavailableError(
                f"'{param}' was not compiled within {self._timeout_s:g} s; simplify it, or try later", param=param
            )
        except Exception:
            _log.exception("constraint.failed")
            return ServerError(f"'{param}' could not be compiled", param=param)
