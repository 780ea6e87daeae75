"""schemathesis, which makes requests from `/openapi.json` alone, finds no 500, no hang and no undescribed reply."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.live import serving

KEY = "a-key-that-no-fuzzer-guesses"
SECONDS = 300


@pytest.mark.skipif(not LONG, reason="takes minutes")
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="make fuzz installs it")
def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    (tmp_path / "slots").mkdir()
    flags = ("-c", "1024", "-np", "4", "--metrics", "--n-predict", "4", "--slot-save-path", tmp_path / "slots")
    (tmp_path / "keys").write_text(KEY)
    command = [Path(sys.executable).parent / "schemathesis", "run", "-H", f"Authorization: Bearer {KEY}"]
    # Features that are not supported are refused although their values fit the schema.
    command += ["--exclude-checks", "positive_data_acceptance", "--warnings", "off", "--request-timeout", "60"]
    # The embedded model has no tokens for /infill, which answers 501.
    command += ["--exclude-path", "/infill"]
    command += ["--max-examples", "100", "--max-time", str(SECONDS), "--continue-on-failure"]
    with serving(tmp_path, *flags, "--api-key-file", tmp_path / "keys") as server:
        result = subprocess.run(
            [*command, f"{server.url}/openapi.json"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=4 * SECONDS,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert server.get("/health") == {"status": "ok"}
        assert not server.log_lines("request.crashed")
        assert server.stop() == 0
