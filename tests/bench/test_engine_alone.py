"""The engine's decode rate as the benchmark takes it: a process of its own, on a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import decode, synthetic
from bench.client import BenchmarkError

COUNTS = ("--streams", "2", "--tokens", "500", "--prompt-tokens", "4")
"""Long enough that the second stream begins in time, on a busy machine too."""


@pytest.mark.slow
def test_the_engine_alone_gives_a_rate(tmp_path: Path) -> None:
    model = synthetic.ensure("tiny", folder=tmp_path)
    flags = ("-m", str(model), "-c", "4096", "-np", "2", "-t", "1")
    assert decode.engine_rate([sys.executable, "-m", "bench.engine", *flags, *COUNTS]) > 0


@pytest.mark.slow
def test_what_cannot_be_measured_is_said_in_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.engine", "-m", str(tmp_path / "none.gguf"), *COUNTS]
    with pytest.raises(BenchmarkError, match=r"none\.gguf"):
        decode.engine_rate(command)
