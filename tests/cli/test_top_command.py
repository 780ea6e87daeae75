"""`llamaslot top` as a process of its own against a real server, in a pipe and in a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import Command
from tests.live import Server, serving

PROMPT = {"prompt": "a prompt that comes twice", "n_predict": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    args = ("-m", tiny_model, "-c", "2048", "-np", "2", "--in-process")
    with serving(tmp_path_factory.mktemp("server"), *args) as server:
        yield server


def test_in_a_pipe_the_state_is_printed_once(server: Server, tmp_path: Path) -> None:
    for _ in range(2):
        server.post("/completion", PROMPT)
    n_prompt = server.get("/cache")["prompt_tokens"]["total"] // 2
    done = Command("top", server.url, folder=tmp_path).finish()
    assert (done.returncode, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0].endswith(f"free of {server.get('/cache')['cells']['total']:,} cells")
    assert lines[1].startswith("RAM")
    assert lines[2].endswith(
        f"{n_prompt - 1} of {2 * n_prompt} prompt tokens ({(n_prompt - 1) / 2 / n_prompt:.1%})"
    )
    assert [line.split()[:3] for line in lines[4:6]] == [["slot", "0", "idle"], ["slot", "1", "idle"]]
    latest, first = lines[-2:]
    assert f" {n_prompt} {n_prompt - 1} " in latest
    assert f" {n_prompt} 0 " in first
    assert first.endswith("limit cold")


def test_in_a_terminal_it_follows_the_server_until_ctrl_c(server: Server) -> None:
    server.post("/completion", PROMPT)
    parent, child = pty.openpty()
    environ = {**os.environ, "COLUMNS": "200", "LINES": "60", "TERM": "xterm"}
    command = [sys.executable, "-m", "llamaslot.cli.main", "top", server.url]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environ)
    os.close(child)
    try:
        read_until(parent, server.log_lines("request.done")[-1]["request_id"].encode())
        server.post("/completion", PROMPT)
        read_until(parent, server.log_lines("request.done")[-1]["request_id"].encode())
        process.send_signal(signal.SIGINT)
        read_until(parent, b"\x1b[?1049l")  # back to the screen that was there before
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def read_until(terminal: int, wanted: bytes) -> None:
    """Read what a terminal shows up to some text."""
    shown, deadline = b"", time.monotonic() + 60
    while wanted not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 65536)


def test_another_server_is_one_line(server: Server, tmp_path: Path) -> None:
    done = Command("top", f"{server.url}/nowhere", folder=tmp_path).finish()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"llamaslot: {server.url}/nowhere has no /events: it is another server or an older llamaslot"
    ]
