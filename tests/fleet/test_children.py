"""A supervisor that is killed: its children end, by the kernel or by the next `up` or `down`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.fleet.processes import PROGRAM

STAND_IN = "import time; time.sleep(600)"
SUPERVISOR = """
import subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from children import Children, bound
command = [sys.executable, "-c", sys.argv[4]]
child = subprocess.Popen(bound(command) if sys.argv[3] == "bound" else command, start_new_session=True)
Children(Path(sys.argv[2]) / "children.json").add("worker 1", child.pid)
print(child.pid, flush=True)
time.sleep(600)
"""


def killed_supervisor(folder: Path, how: str) -> int:
    """Start a supervisor of one stand-in, kill it, and return the stand-in's process id."""
    command = [sys.executable, "-c", SUPERVISOR, str(PROGRAM.parent), str(folder), how, STAND_IN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        supervisor.kill()
    return pid


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until_ended(pid: int) -> None:
    deadline = time.monotonic() + 30
    while runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def fleet(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), "--dir", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux signals the end of a parent")
def test_a_child_ends_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    until_ended(killed_supervisor(tmp_path, "bound"))


def test_down_ends_what_a_killed_supervisor_has_left(tmp_path: Path) -> None:
    pid = killed_supervisor(tmp_path, "left")
    assert runs(pid)
    done = fleet(tmp_path, "down")
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    assert "has left: worker 1" in done.stderr
    assert not runs(pid)
    assert "no fleet runs" in fleet(tmp_path, "down").stderr


def test_what_does_not_end_is_killed_after_a_while(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    import children  # noqa: PLC0415

    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        file = tmp_path / "children.json"
        file.write_text(json.dumps({"worker 1": (process.pid, psutil.Process(process.pid).create_time())}))
        try:
            said: list[str] = []
            assert children.end_left_over(file, 0.5, said.append)
            assert process.wait(10) == -signal.SIGKILL
            assert len(said) == 1
            assert not file.exists()
        finally:
            process.kill()


def test_a_child_has_the_signals_of_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ignores SIGPIPE and SIGXFSZ, and what it starts would too."""
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    import children  # noqa: PLC0415

    shell = ["sh", "-c", "kill -PIPE $$; echo ignored"]
    done = subprocess.run(children.bound(shell), capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGPIPE, b"")


def test_up_ends_what_a_killed_supervisor_has_left(tmp_path: Path) -> None:
    pid = killed_supervisor(tmp_path, "left")
    done = fleet(tmp_path, "up", "--gateway-program", "nosuch")
    assert "has left: worker 1" in done.stderr
    assert not runs(pid)


def test_up_is_refused_while_a_supervisor_ends(tmp_path: Path) -> None:
    """It serves no commands any more, and removes its files at the end: they would be those of the new one."""
    me = os.getpid(), psutil.Process().create_time()
    listed = json.dumps({"supervisor": me})
    (tmp_path / "children.json").write_text(listed)
    (tmp_path / "fleet.sock").touch()
    done = fleet(tmp_path, "up", "--gateway-program", "nosuch")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "is still ending" in done.stderr
    assert (tmp_path / "children.json").read_text() == listed
    assert (tmp_path / "fleet.sock").exists()


@pytest.mark.slow
def test_a_process_that_got_the_same_id_later_is_left_alone(tmp_path: Path) -> None:
    pid = killed_supervisor(tmp_path, "left")
    file = tmp_path / "children.json"
    listed = json.loads(file.read_text())
    try:
        for wrong in (
            {**listed, "worker 1": [pid, listed["worker 1"][1] - 60]},
            {**listed, "worker 1": "?"},
            {**listed, "supervisor": [os.getpid(), psutil.Process().create_time()]},
            [],
        ):
            file.write_text(json.dumps(wrong))
            assert "no fleet runs" in fleet(tmp_path, "down").stderr
            assert runs(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        until_ended(pid)
