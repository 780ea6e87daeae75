"""Threads: executors whose threads run from the start, and how long the threads of a process ran or waited.

At a limit of threads or memory, a thread that starts only with the first request fails with an error that nothing
expects. And a call that never returns must not delay the end of the server: Python joins all executor threads when
it exits, so a process with a hung one must end by `os._exit`.

A limit on wall time alone takes a process for hung that other programs keep from running. Limits that use
`starved_seconds` do not count that time:

    thread                              its time in the kernel's accounts           counts
    runs                                running                                     yes
    waits for a CPU                     waiting on a run queue                      no
    is stopped, as by a debugger        none                                        no
    waits for a disk, a driver, a lock  none                                        yes
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

GRAMMAR_STACK_BYTES = 16 * 2**20
"""Stack of a thread that compiles and follows grammars, which llguidance does by recursion. Only what is used of it
takes memory.
"""
_NS = 1e-9
_READY = "RTt"
"""States of threads that run, wait for a CPU, or are stopped."""
_MIN_SHARE = 0.01
"""Without accounts of waiting: a process that uses less of a CPU than this waits for something else."""


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


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """CPU accounting of a thread at one moment."""

    state: str
    """R, S, D, T, ... as in /proc."""
    ran_s: float
    waited_s: float
    """Time that it waited for a CPU."""


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """CPU accounting of a process at one moment."""

    at: float
    threads: dict[int, ThreadTimes]
    """By id; empty where the system does not tell how long they waited."""
    cpu_s: float = 0.0
    """CPU time of all threads, where `threads` is empty."""
    is_suspended: bool = False


def thread_times(pid: int) -> dict[int, ThreadTimes]:
    """Return the CPU accounting of each thread of a process by id; empty where the system does not keep them."""
    found: dict[int, ThreadTimes] = {}
    tasks = Path("/proc", str(pid), "task")
    try:
        for tid in os.listdir(tasks):
            try:
                ran, waited, _ = (tasks / tid / "schedstat").read_text().split()
                state = (tasks / tid / "stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                # The kernel does not keep the first, or the thread has ended.
                continue
            found[int(tid)] = ThreadTimes(state, int(ran) * _NS, int(waited) * _NS)
    except (OSError, ValueError, IndexError):
        pass
    # Some kernels have the file, but only zeros in it.
    return found if any(each.ran_s for each in found.values()) else {}


def process_times(pid: int, at: float) -> ProcessTimes:
    """Return the CPU accounting of a process now, at `at` seconds; empty for one that has ended.

    For the calling process, the calling thread is left out.
    """
    threads = thread_times(pid)
    threads.pop(threading.get_native_id(), None)
    if threads:
        return ProcessTimes(at, threads)
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return ProcessTimes(at, {}, times.user + times.system, process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return ProcessTimes(at, {})


def starved_seconds(before: ProcessTimes, after: ProcessTimes) -> float:
    """Return for how many seconds between both the thread of the process that waited longest got no CPU.

    All threads of a step wait for the slowest one. 0 for a process whose threads all waited for something else.
    """
    elapsed = after.at - before.at
    if not after.threads:
        if after.is_suspended:
            return elapsed
        ran = after.cpu_s - before.cpu_s
        return max(elapsed - ran, 0.0) if ran >= _MIN_SHARE * elapsed else 0.0
    starved = 0.0
    for tid, thread in after.threads.items():
        earlier = before.threads.get(tid)
        ran = thread.ran_s - (earlier.ran_s if earlier is not None else 0.0)
        waited = thread.waited_s - (earlier.waited_s if earlier is not None else 0.0)
        # The kernel adds a wait to the accounts once it has ended, which with a low priority may take seconds.
        is_ready = earlier is not None and earlier.state in _READY and thread.state in _READY
        starved = max(starved, elapsed - ran if is_ready else waited)
    return min(starved, elapsed)


def has_ended(pid: int) -> bool:
    """Return True for a process whose main thread has ended, even if others keep it from being reaped."""
    return _status(pid) in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD, "")


def is_suspended(pid: int) -> bool:
    """Return True for a process that a signal or a debugger suspends."""
    return _status(pid) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def _status(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return ""
