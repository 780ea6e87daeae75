"""Executors whose threads run from the start, and are not waited for at the end.

At a limit of threads or memory, a thread that starts only with the first request fails with an error that nothing
expects. And a call that never returns must not delay the end of the server: Python joins all executor threads when
it exits, so a process with a hung one must end by `os._exit`.
"""

from __future__ import annotations

import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor

GRAMMAR_STACK_BYTES = 16 * 2**20
"""Stack of a thread that compiles and follows grammars, which llguidance does by recursion. Only what is used of it
takes memory.
"""


def started_executor(n_threads: int, name: str, stack_bytes: int = 0) -> ThreadPoolExecutor:
    """Return an executor whose threads are running, each with a stack of that size, or of the usual one for 0."""
    executor = ThreadPoolExecutor(n_threads, thread_name_prefix=name)
    usual = threading.stack_size(stack_bytes)
    all_running = threading.Barrier(n_threads + 1)
    try:
        for _ in range(n_threads):
            # An executor starts a further thread only while none is idle.
            executor.submit(all_running.wait)
    except RuntimeError:
        all_running.abort()
        executor.shutdown(wait=False)
        raise
    finally:
        threading.stack_size(usual)
    all_running.wait()
    return executor


def close_after_queue(executor: Executor) -> Future[None]:
    """Shut down an executor of one thread without waiting; return a future that is done once its queue is empty."""
    future = executor.submit(lambda: None)
    executor.shutdown(wait=False)
    return future
