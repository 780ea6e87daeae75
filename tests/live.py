"""A real server process on a free port, for tests that must see what a user sees."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.forked import ForkedProcess

_TIMEOUT_S = 120
"""A server that does not answer fails the test instead of holding it up."""
WRITE_SOON = """
import sys
if "llamaslot.app.runtime.prompt_main" not in sys.orig_argv:
    from llamaslot.kvcache.tiers import pacing
    pacing.PARTIAL_DELAY_S = 0.1
"""
"""Fault for servers whose test waits until the end of a prompt is on disk, which otherwise takes a second."""


class Server:
    """A running `llamaslot serve`; all that it prints goes to `log`."""

    def __init__(self, process: subprocess.Popen[bytes] | ForkedProcess, log: Path) -> None:
        self.process = process
        self.log = log
        self.url = ""

    def wait_until_ready(self, seconds: float = 60) -> None:
        """Wait for the line that tells the address."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = re.search(r"listening on (\S+)", self.log.read_text())
            if found:
                self.url = found[1]
                return
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=_TIMEOUT_S) as reply:
            return json.load(reply)

    def post(self, path: str, body: Any) -> Any:
        """The JSON answer to a JSON body."""
        data = json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}{path}", data), timeout=_TIMEOUT_S) as reply:
            return json.load(reply)

    def delete(self, path: str) -> Any:
        """The JSON answer to a deletion."""
        request = urllib.request.Request(f"{self.url}{path}", method="DELETE")
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            return json.load(reply)

    def log_lines(self, event: str) -> list[dict[str, Any]]:
        """The log's JSON lines of one event."""
        # What follows the last newline is still being written.
        complete = self.log.read_text().split("\n")[:-1]
        lines = [json.loads(line) for line in complete if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    def stop(self, number: int = signal.SIGTERM, within: float = 15) -> int:
        """Send a signal and return the exit status, which must come within that many seconds.

        A disk or a thread that hangs may take 5 s each.
        """
        self.process.send_signal(number)
        return self.process.wait(within)


@contextmanager
def serving(
    folder: Path,
    *args: str | Path,
    environ: dict[str, str] | None = None,
    fault: str = "",
    is_forked: bool = True,
    prefix: Sequence[str] = (),
) -> Iterator[Server]:
    """A server with these arguments, ended by its process id.

    What it measures at start is kept for other tests, those of other test processes too, and not in the user's own
    folder. `fault` is Python source that each of the server's processes runs first, to inject a fault.
    Unless the arguments name a model it is the embedded one. `--in-process` is the flag of `tests/forked.py`;
    without `is_forked` the server starts as a user starts it, by a command after `prefix`, if there is one, which
    must leave it the process id.
    """
    log = folder / "server.log"
    run = folder.parent.parent if "PYTEST_XDIST_WORKER" in os.environ else folder.parent
    own = {"XDG_CACHE_HOME": str(run / "cache"), **(environ or {})}
    if fault:
        # Python imports a module of this name at its start.
        (folder / "fault").mkdir(exist_ok=True)
        (folder / "fault" / "sitecustomize.py").write_text(fault)
        own["PYTHONPATH"] = f"{folder / 'fault'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    given = [*map(str, args)]
    model = [] if {"-m", "--models-dir", "--models-preset"} & {*given} else ["-m", "demo"]
    command = ["serve", *model, "--port", "0", "-t", "1", *given]
    log.write_bytes(b"")
    process: subprocess.Popen[bytes] | ForkedProcess
    if is_forked:
        process = ForkedProcess(command, {**os.environ, **own}, log, log, fault=fault)
    else:
        program = [*prefix, sys.executable, "-m", "llamaslot.cli.main"]
        with log.open("wb") as file:
            process = subprocess.Popen([*program, *command], stdout=file, stderr=file, env={**os.environ, **own})
    server = Server(process, log)
    try:
        server.wait_until_ready()
        yield server
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
