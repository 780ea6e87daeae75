"""Processes that a child runs in."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from llamaslot.processes.child import Child, Exit

MODULE = """
import os
from pathlib import Path
Path(__file__).with_name("arenas").write_text(os.environ.get("MALLOC_ARENA_MAX", ""))
"""


@pytest.mark.parametrize(("chosen", "expected"), [(None, "2"), ("7", "7")])
async def test_a_child_has_few_arenas_unless_the_operator_chose_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, expected: str
) -> None:
    (tmp_path / "child_module.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if chosen is None:
        monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    else:
        monkeypatch.setenv("MALLOC_ARENA_MAX", chosen)
    ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
    await Child.start("child_module", None, lambda _: None, ended.set_result)
    async with asyncio.timeout(30):
        assert (await ended).status == 0
    assert (tmp_path / "arenas").read_text() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="llama.cpp is linked to libgomp on Linux")
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({}, 10_000), ({"GOMP_SPINCOUNT": "77"}, 77), ({"OMP_WAIT_POLICY": "passive"}, 0)],
    ids=["nothing chosen", "a count", "a policy"],
)
async def test_threads_of_a_child_spin_briefly_unless_the_operator_chose_how_long(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    chosen: dict[str, str],
    expected: int,
) -> None:
    """By what libgomp itself says of its settings when it is loaded."""
    (tmp_path / "child_module.py").write_text("import llama_cpp")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_DISPLAY_ENV", "verbose")
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
    await Child.start("child_module", None, lambda _: None, ended.set_result)
    async with asyncio.timeout(30):
        assert (await ended).status == 0
    assert f"GOMP_SPINCOUNT = '{expected}'" in capfd.readouterr().err
