"""Processes that a child runs in."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from llamaslot.processes import supervisor as child_module
from llamaslot.processes.supervisor import Child, Exit

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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="llama.cpp is linked to libgomp on Linux")
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({}, 30_000), ({"GOMP_SPINCOUNT": "77"}, 77), ({"OMP_WAIT_POLICY": "passive"}, 0)],
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


ZOMBIE = """
import ctypes, socket, sys, threading, time
from pathlib import Path

def go_on():
    while True:
        time.sleep(0.1)

if __name__ == "__main__":
    threading.Thread(target=go_on).start()
    Path(__file__).with_name("started").write_text("")
    if {is_dead}:
        # As after SIGKILL while another thread waits for a disk: it cannot be reaped, and its socket stays open.
        ctypes.CDLL(None).pthread_exit(None)
"""


async def started(folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_dead: bool) -> tuple[Child, list[Exit]]:
    (folder / "held_module.py").write_text(ZOMBIE.format(is_dead=is_dead))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    exits: list[Exit] = []
    child = await Child.start("held_module", None, lambda _: None, exits.append)
    async with asyncio.timeout(30):
        while not (folder / "started").exists():
            await asyncio.sleep(0.02)
    return child, exits


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="on Linux, a process may lose its main thread and go on")
async def test_a_child_of_which_only_threads_are_left_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "_HELD_S", 0.1)
    child, exits = await started(tmp_path, monkeypatch, is_dead=True)
    try:
        assert await child.ended(20)
        assert len(exits) == 1
    finally:
        child.kill()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="on Linux, a process may lose its main thread and go on")
async def test_a_child_that_a_thread_keeps_from_ending_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SIGKILL` does not end a thread in an uninterruptible wait; here it is not sent."""
    monkeypatch.setattr(child_module, "_HELD_S", 0.1)
    child, exits = await started(tmp_path, monkeypatch, is_dead=True)
    process = child._process
    with monkeypatch.context() as patch:
        patch.setattr(type(process), "kill", lambda _: None)
        assert await child.ended(20)
    [end] = exits
    assert (end.is_held, end.is_crash) == (True, False)
    assert "kernel" in end.text
    process.kill()
    await process.wait()


async def test_a_child_that_is_stopped_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "_LOOK_S", 0.02)
    child, exits = await started(tmp_path, monkeypatch, is_dead=False)
    for number, is_suspended in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
        os.kill(child.pid, number)
        async with asyncio.timeout(20):
            while child.is_suspended is not is_suspended:
                await asyncio.sleep(0.02)
    assert not exits
    child.kill()
    assert await child.ended(20)
