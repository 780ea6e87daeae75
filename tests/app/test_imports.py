"""A start must not import slow packages; `test_serve.py` checks the imports of a server when it ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
