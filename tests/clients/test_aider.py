"""aider: an edit of a file in a repository, over each API."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import Lead

BEFORE = "def greet():\n    return 'hello'\n"
AFTER = "def greet():\n    return 'good morning'\n"
EDIT = f"""I change the greeting.

greet.py
```python
{AFTER}```
"""
OPTIONS = (
    "--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--yes-always", "--no-pretty",
    "--edit-format", "whole", "--map-tokens", "0", "--no-auto-commits", "--no-gitignore",
)  # fmt: skip


APIS = {"openai/demo": ("OPENAI_API_BASE", "/v1"), "anthropic/demo": ("ANTHROPIC_API_BASE", "")}
"""The variable with the API's base, and its path, by the model's name."""


@pytest.mark.parametrize("model", APIS)
@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_a_file_is_edited(tmp_path: Path, lead: Lead, model: str, stream: str) -> None:
    variable, path = APIS[model]
    server = lead(EDIT)
    (tmp_path / "greet.py").write_text(BEFORE)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    keys = {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", "HOME": str(tmp_path)}
    environ = {**os.environ, **keys, variable: server.url + path}
    task = ["--message", "Say good morning.", "greet.py"]
    command = [sys.executable, "-m", "aider", "--model", model, stream, *OPTIONS, *task]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "greet.py").read_text() == AFTER, done.stdout
