"""Threads for calls that wait: those of `asyncio.to_thread`, and one for a call that may never return."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from llamaslot.base.threads import started_executor

_N_THREADS = 4
T = TypeVar("T")


def start_default_executor() -> None:
    """Start the threads of `asyncio.to_thread` for the running loop: later there may be a limit of threads."""
    asyncio.get_running_loop().set_default_executor(started_executor(_N_THREADS, "llamaslot-io"))


def in_daemon_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a function that may wait for a file system, on a thread that the end of the process does not wait for.

    Whoever does not wait for the result cancels it, since the loop may be closed by then.
    """
    result: Future[T] = Future()
    # Else it could be cancelled, and then not be set.
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            value = function()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(value)

    threading.Thread(target=run, name="llamaslot-files", daemon=True).start()
    return asyncio.wrap_future(result)
