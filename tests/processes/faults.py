"""Faults for child processes: Python source that each of them runs first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def inject(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every Python that is started from now on run `source` first."""
    (folder / "sitecustomize.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
