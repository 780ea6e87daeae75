"""`llamaslot` in processes forked from one that has imported its libraries, which takes longer than most tests.

Such a process has its own environment, output, signals and exit status, like one from a shell, but does not import
the program; `tests/app/test_serve.py` and the tests that inject faults start real ones.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

ONE_PROCESS = "--in-process"
"""A flag of forked servers: one process starts in half a second, and most tests are not about processes."""
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preloaded"])


def _run(argv: Sequence[str], environ: Mapping[str, str], out: str, err: str, fault: str) -> None:
    """Run `fault`, Python source, and then be the program."""
    os.environ.clear()
    os.environ.update(environ)
    for path, fd in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, fd)
        os.close(file)
    exec(fault, {})
    from llamaslot.cli.main import main  # noqa: PLC0415

    words = list(argv)
    if ONE_PROCESS in words:
        words.remove(ONE_PROCESS)
        _use_one_process()
    sys.exit(main(words))


def _use_one_process() -> None:
    """Run engine and prompt worker in the server's own process, as a test's engine without a server does."""
    from llamaslot.app import composition  # noqa: PLC0415
    from tests.in_process_runtime import InProcessRuntime  # noqa: PLC0415

    composition.Runtime = partial(InProcessRuntime, backend=None)  # type: ignore[assignment, misc]


class ForkedProcess:
    """The part of `subprocess.Popen` that tests use."""

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], out: Path, err: Path, fault: str = ""
    ) -> None:
        args = (list(argv), dict(environ), str(out), str(err), fault)
        self._process = _CONTEXT.Process(target=_run, args=args, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, or the negative number of a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("llamaslot", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal if it still runs."""
        if self._process.exitcode is None:
            # The fork server may have reaped it and not told yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


class Command:
    """A command whose output is read at its end."""

    def __init__(
        self, *argv: str | Path, folder: Path, environ: Mapping[str, str] | None = None, fault: str = ""
    ) -> None:
        number = time.monotonic_ns()
        self._out, self._err = folder / f"{number}.out", folder / f"{number}.err"
        self.process = ForkedProcess(
            list(map(str, argv)), os.environ if environ is None else environ, self._out, self._err, fault
        )

    def finish(self, seconds: float = 60) -> Ended:
        """Wait for its end; kill it if that does not come."""
        try:
            self.process.wait(seconds)
        finally:
            self.process.kill()
        return Ended(self.process.wait(), self._out.read_text(), self._err.read_text())
