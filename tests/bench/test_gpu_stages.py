"""`bench/gpu.sh` knows all its stages, and runs one again only if it is not done. Nothing is built here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("bench/gpu.sh", ".ci/constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(checkout: Path, *arguments: str, **environ: str) -> tuple[int, str]:
    command = ["bash", str(checkout / "bench/gpu.sh"), *arguments]
    variables = {name: value for name, value in os.environ.items() if name != "OUT"} | environ
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    return done.returncode, done.stdout + done.stderr


def test_every_stage_has_its_function(checkout: Path) -> None:
    status, text = run(checkout, "status")
    assert status == 0
    script = (checkout / "bench/gpu.sh").read_text()
    stages = [line.removesuffix(": open") for line in text.splitlines()]
    assert len(stages) > 10
    assert [stage for stage in stages if f"\nstage_{stage}() {{" not in script] == []
    status, text = run(checkout, "no-such-stage")
    assert status == 2
    assert "bench/gpu.sh prepare" in text


def test_a_finished_stage_is_not_run_again(checkout: Path) -> None:
    status, text = run(checkout, "info")
    assert status == 0
    assert "next: bench/gpu.sh venv" in text
    assert (checkout / ".gpu/results/info.log").is_file()
    status, text = run(checkout, "info")
    assert (status, "is done already" in text) == (0, True)


@pytest.mark.slow
def test_a_stage_that_fails_or_takes_too_long_is_not_done(checkout: Path) -> None:
    (checkout / ".gpu/state/venv/bin").mkdir(parents=True)
    python = checkout / ".gpu/state/venv/bin/python"
    for script, expected, words in (("exit 7", 1, "failed with status 7"), ("sleep 20", 3, "run it again")):
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        status, text = run(checkout, "peers", GPU_SECONDS="1")
        assert status == expected
        assert words in text
    assert not (checkout / ".gpu/state/done/peers").exists()
