"""The benchmark of processes, on real servers: streams are measured beside a load. Never timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import processes
from bench.synthetic import ensure
from tests.conftest import LONG


@pytest.mark.skipif(not LONG, reason="starts five processes for something that is no part of the server")
def test_both_sides_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PREFIXES", 20)
    model = ensure("60m")
    processes.run(model=model, title="60m", pairs=1, tokens=16, threads=1, folder=tmp_path, server_flags=())
    result = json.loads((tmp_path / "processes.json").read_text())
    assert len(result["runs"]) == 3
    assert all(value > 0 for runs in result["runs"].values() for pair in runs for value in pair)
