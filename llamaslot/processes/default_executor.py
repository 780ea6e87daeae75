"""The threads of `asyncio.to_thread`, started at start: later there may be a limit of threads."""

from __future__ import annotations

import asyncio

from llamaslot.base.executors import started_executor

_N_THREADS = 4


def start_default_executor() -> None:
    """Start the threads that the running loop uses."""
    asyncio.get_running_loop().set_default_executor(started_executor(_N_THREADS, "llamaslot-io"))
