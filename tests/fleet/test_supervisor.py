"""A child that cannot be started: at first that is an error, later it is tried again. A terminal that is closed."""

from __future__ import annotations

import asyncio
import errno
import io
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.fleet.processes import PROGRAM

SERVER = """
import http.server, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, which is no package."""
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    import supervisor as module  # noqa: PLC0415

    return module


def child(supervisor: Any, folder: Path, port: int, failures: list[Exception]) -> Any:
    """A child whose start raises each of `failures` in turn."""

    def command() -> list[str]:
        if failures:
            raise failures.pop(0)
        return [sys.executable, "-c", SERVER, str(port)]

    children = supervisor.Children(folder / "children.json")
    return supervisor.Child("worker 1", command, f"http://127.0.0.1:{port}", folder / "log", children)


@pytest.mark.slow
async def test_a_start_that_fails_later_is_logged_and_tried_again(
    supervisor: Any, tmp_path: Path, unused_tcp_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    failures: list[Exception] = []
    one = child(supervisor, tmp_path, unused_tcp_port, failures)
    one.begin()
    try:
        await one.until_ready(30)
        failures += [OSError("no memory"), supervisor.FleetError("no gateway")]
        one.process.kill()
        await one.process.wait()
        async with asyncio.timeout(30):
            while failures:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.05)
        await one.until_ready(30)
    finally:
        await one.end()
    lines = capsys.readouterr().err
    assert "cannot be started: no memory; tried again in" in lines
    assert "cannot be started: no gateway; tried again in" in lines


async def test_a_worker_that_was_ready_once_fails_at_once_if_it_cannot_be_started_again(
    supervisor: Any, tmp_path: Path, unused_tcp_port: int
) -> None:
    failures: list[Exception] = []
    one = child(supervisor, tmp_path, unused_tcp_port, failures)
    try:
        one.begin()
        await one.until_ready(30)
        await one.end()
        failures.append(OSError("no memory"))
        one.begin()
        with pytest.raises(supervisor.FleetError, match="cannot be started: no memory"):
            await one.until_ready(30)
        assert not one.wanted, "so that `start` may be asked for again"
        one.begin()
        await one.until_ready(30)
    finally:
        await one.end()


def test_a_closed_terminal_does_not_stop_the_supervisor(supervisor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it ends before it ends its children."""

    class Closed(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Closed())
    supervisor.say("ending")
