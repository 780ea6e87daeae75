"""A start must not import slow packages; `test_serve.py` checks the imports of a server when it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.live import serving

SERVE = "llamaslot.cli.serve_command"
DOCTOR = "llamaslot.cli.doctor_command"


@pytest.mark.parametrize(
    ("program", "unwanted", "commands"),
    [
        (
            f"{SERVE}, llamaslot.app.composition, llamaslot.api.http_server",
            ("rich", "numpy", "llguidance", "redis"),
            [SERVE],
        ),
        (DOCTOR, ("redis",), [DOCTOR]),
        ("llamaslot.app.runtime.engine_main", ("rich", "aiohttp", "redis", "jinja2", "diskcache"), []),
        ("llamaslot.app.runtime.prompt_main", ("rich", "aiohttp", "redis", "diskcache"), []),
    ],
    ids=["server", "doctor", "engine", "prompt worker"],
)
def test_processes_import_only_what_they_need(program: str, unwanted: tuple[str, ...], commands: list[str]) -> None:
    code = (
        f"import sys; import {program}; print(*[name for name in sys.modules "
        f"if name.split('.')[0] in {unwanted} or name.endswith('_command')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == commands


def test_garbage_is_collected_in_the_children_once_they_are_ready(tmp_path: Path) -> None:
    """Their imports are faster without, but a server that never collects grows."""
    asks = f"""
import gc, os, signal
from pathlib import Path

def write(*_):
    Path({str(tmp_path)!r}, str(os.getpid())).write_text(str(gc.isenabled()))

signal.signal(signal.SIGUSR2, write)
"""
    with serving(tmp_path, fault=asks, is_forked=False) as server:
        children = psutil.Process(server.process.pid).children()
        assert len(children) == 2
        for child in children:
            child.send_signal(signal.SIGUSR2)
        deadline = time.monotonic() + 30
        answers = [tmp_path / str(child.pid) for child in children]
        while not all(each.exists() and each.read_text() for each in answers):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert [each.read_text() for each in answers] == ["True", "True"]
