"""Children that end with their supervisor, even if it is killed.

On Linux the kernel terminates them. Everywhere a file lists them, and the next `up` or `down` ends those that run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

POLL_S = 0.1
SAME_START_S = 2.0
"""Difference between two readings of one process' start time at most: the system's clock may be put right."""
SUPERVISOR = "supervisor"
PR_SET_PDEATHSIG = 1

# Another program between supervisor and child, since code between fork and exec may deadlock in a process with
# threads. Python ignores SIGPIPE, which the child would inherit.
BOUND = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, signal.SIGTERM)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
if os.getppid() == int(sys.argv[1]):
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{{sys.argv[2]}}: {{error.strerror}}")
"""


def bound(command: list[str]) -> list[str]:
    """Return a command whose process gets SIGTERM when this one ends, where the system can do that."""
    if not sys.platform.startswith("linux"):
        return command
    return [sys.executable, "-ISc", BOUND, str(os.getpid()), *command]


class Children:
    """The file that lists the supervisor and its children, each with its start time: process ids are used again."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._started: dict[str, tuple[int, float]] = {}

    def add(self, name: str, pid: int) -> None:
        """List a process, in place of an earlier one of the same name; it runs all the same if that fails."""
        with contextlib.suppress(psutil.Error, OSError):
            self._started[SUPERVISOR] = os.getpid(), psutil.Process().create_time()
            self._started[name] = pid, psutil.Process(pid).create_time()
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps(self._started))
            new.replace(self._file)

    def clear(self) -> None:
        """List nothing: all have ended."""
        self._file.unlink(missing_ok=True)


def running(file: Path) -> dict[str, psutil.Process]:
    """Return those of the listed processes that run, by name."""
    try:
        listed = {str(name): (int(pid), float(at)) for name, (pid, at) in json.loads(file.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return {name: process for name, each in listed.items() if (process := same_process(*each)) is not None}


def end_left_over(file: Path, seconds: float, say: Callable[[str], None]) -> bool:
    """End the children of a supervisor that was killed; kill them after some time. False if there are none."""
    found = running(file)
    if SUPERVISOR in found:
        # It is ending them itself.
        return False
    if found:
        say(f"ending what a supervisor that was killed has left: {', '.join(sorted(found))}")
    deadline = time.monotonic() + seconds
    # Twice: the second signal cuts a worker's drain delay short.
    for _ in range(2):
        send(found.values(), signal.SIGTERM)
        time.sleep(POLL_S)
    while any(map(runs, found.values())) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    send(found.values(), signal.SIGKILL)
    file.unlink(missing_ok=True)
    return bool(found)


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to those that run still."""
    for each in processes:
        with contextlib.suppress(psutil.Error):
            each.send_signal(number)


def same_process(pid: int, started: float) -> psutil.Process | None:
    """Return the process with this id if it is the one that started then, and runs."""
    with contextlib.suppress(psutil.Error, ValueError):
        process = psutil.Process(pid)
        if abs(process.create_time() - started) < SAME_START_S and runs(process):
            return process
    return None


def runs(process: psutil.Process) -> bool:
    """Return False once a process has ended, also if its parent has not asked for its status."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
