"""The short form of the tests draws the same examples in every run, in whatever order; the long form does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import new_seed

RECORD = "LLAMASLOT_TEST_DRAWN"
"""Set for a run of which `test_drawing` records the examples: the file."""


@pytest.mark.skipif(RECORD not in os.environ, reason="the tests below run it")
def test_drawing() -> None:
    drawn: list[object] = [new_seed()]

    @settings(max_examples=20)
    @given(st.lists(st.integers(), min_size=20, max_size=40))
    def draw(numbers: list[int]) -> None:
        drawn.append(numbers)

    draw()
    Path(os.environ[RECORD]).write_text(repr(drawn))


def run(path: Path, *args: str, long: bool = False) -> str:
    """What a run with these arguments drew."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *args]
    env = os.environ | {RECORD: str(path), "LLAMASLOT_TESTS": "long" if long else ""}
    env.pop("PYTEST_ADDOPTS", None)
    subprocess.run([*command, f"{__file__}::test_drawing"], env=env, check=True, capture_output=True)
    return path.read_text()


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the short form draws."""
    return run(tmp_path_factory.mktemp("short") / "drawn")


@pytest.mark.slow
def test_the_short_form_draws_the_same_examples_whatever_was_imported_before(short: str, tmp_path: Path) -> None:
    assert run(tmp_path / "drawn", "-p", "tests.api.test_limits", "-p", "tests.formats.messages") == short


@pytest.mark.slow
def test_another_seed_draws_other_examples(short: str, tmp_path: Path) -> None:
    assert run(tmp_path / "drawn", "--hypothesis-seed=1") != short


@pytest.mark.slow
def test_the_long_form_draws_other_examples(short: str, tmp_path: Path) -> None:
    assert run(tmp_path / "drawn", long=True) != short
