"""CPUs that this process may use: its affinity, and quotas of cgroup v1 and v2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamaslot.backend import host as module
from llamaslot.backend.host import HostCpus, host_cpus


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_CGROUPS", tmp_path / "mount")
    monkeypatch.setattr(module, "_OWN_GROUPS", tmp_path / "own")


def quota_of(tmp_path: Path, lines: str) -> float | None:
    """The quota with these lines for the groups of this process."""
    (tmp_path / "own").write_text(lines)
    return host_cpus().quota


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_the_smallest_quota_of_cgroup_v2_counts(tmp_path: Path) -> None:
    write(tmp_path / "mount/a/cpu.max", "150000 100000")
    write(tmp_path / "mount/a/b/cpu.max", "max 100000")
    write(tmp_path / "mount/a/b/c/cpu.max", "800000 100000")
    assert quota_of(tmp_path, "0::/a/b/c\n") == 1.5
    write(tmp_path / "mount/a/cpu.max", "max 100000")
    assert quota_of(tmp_path, "0::/a/b\n") is None


def test_the_quota_of_cgroup_v1_counts(tmp_path: Path) -> None:
    for folder, quota in (("mount/cpu/a", -1), ("mount/cpu/a/b", 50_000)):
        write(tmp_path / folder / "cpu.cfs_quota_us", str(quota))
        write(tmp_path / folder / "cpu.cfs_period_us", "100000")
    assert quota_of(tmp_path, "4:memory:/a/b\n3:cpu,cpuacct:/a/b\n") == 0.5
    assert quota_of(tmp_path, "3:cpu,cpuacct:/a\n") is None
    assert quota_of(tmp_path, "4:memory:/a/b\n") is None


@pytest.mark.parametrize("text", ["", "garbage", "max", "0 100000", "100000 0"])
def test_what_the_kernel_does_not_say_is_no_limit(tmp_path: Path, text: str) -> None:
    write(tmp_path / "mount/cpu.max", text)
    assert quota_of(tmp_path, "0::/\n") is None
    (tmp_path / "own").unlink()
    assert host_cpus().quota is None


@pytest.mark.parametrize(
    ("cores", "allowed", "quota", "n_threads"),
    [(8, 16, None, 8), (8, 3, None, 3), (8, 16, 2.5, 2), (8, 16, 0.5, 1), (8, 16, 64.0, 8)],
)
def test_threads_are_as_many_as_can_run_at_once(
    cores: int, allowed: int, quota: float | None, n_threads: int
) -> None:
    assert HostCpus(cores, 16, allowed, quota).n_threads == n_threads


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_the_affinity_of_the_process_counts() -> None:
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "from llamaslot.backend.host import host_cpus; print(host_cpus().allowed, host_cpus().n_threads)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]
