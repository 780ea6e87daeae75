"""Ending threads without waiting for them: a call that never returns must not hold up the end of the server.

Python joins all executor threads when it exits, so a process with a hung one must end by `os._exit`.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future


def close_after_queue(executor: Executor) -> Future[None]:
    """Shut down an executor of one thread without waiting; return a future that is done once its queue is empty."""
    future = executor.submit(lambda: None)
    executor.shutdown(wait=False)
    return future
