"""The benchmark of constrained replies, on a real server. Never timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import constrained
from tests.bench.forked_servers import forked_servers


@pytest.mark.slow
def test_all_kinds_of_replies_are_measured(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constrained, "CONTEXT", 2048)
    with forked_servers():
        constrained.run(
            model=tiny_model, title="tiny", repeats=1, tokens=40, threads=1, folder=tmp_path, server_flags=()
        )
    result = json.loads((tmp_path / "constrained.json").read_text())
    assert set(result["runs"]) == set(result["ratios"]) == {"free", "text", "records"}
    assert all(rate > 0 for rates in result["runs"].values() for rate in rates)
    assert result["ratios"]["free"]["median"] == 1
