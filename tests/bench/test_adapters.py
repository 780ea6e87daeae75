"""The benchmark of LoRA adapters, on a real server. Never timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import adapters
from tests.bench.forked_servers import forked_servers


@pytest.mark.slow
def test_streams_with_one_and_with_two_adapters_are_measured(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "CONTEXT", 2048)
    with forked_servers():
        adapters.run(
            model=tiny_model, title="tiny", repeats=2, tokens=20, threads=1, folder=tmp_path, server_flags=()
        )
    result = json.loads((tmp_path / "adapters.json").read_text())
    assert set(result["runs"]) == set(result["summaries"]) == set(adapters.ROWS)
    assert all(len(values) == 2 and min(values) > 0 for values in result["runs"].values())
    both, in_turn = result["runs"]["two at once"], result["runs"]["two, one after the other"]
    # All figures in the file are rounded.
    ratios = [a / b for a, b in zip(both, in_turn, strict=True)]
    assert result["runs"]["ratio"] == pytest.approx(ratios, rel=1e-3)
