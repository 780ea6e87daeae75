"""The doctor on the machine: threads and CPUs, memory and the model, swap, descriptors; folders and their disks."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from llamaslot.app.doctor import Outcome, checks
from llamaslot.backend.disk import DiskStore
from llamaslot.backend.host import HostCpus

GIB = 2**30


def test_this_machine_has_no_wrong_python() -> None:
    check = checks.software()
    assert check.outcome is Outcome.OK
    assert sys.version.split()[0] in check.found


@pytest.mark.parametrize(
    ("host", "n_threads", "busy", "advice"),
    [
        (HostCpus(8, 16, 16, None), -1, 0.0, ""),
        (HostCpus(8, 16, 16, None), 16, 0.0, ""),
        (HostCpus(8, 16, 16, None), 17, 0.0, "--threads 8"),
        (HostCpus(8, 16, 4, None), 8, 0.0, "--threads 4"),
        (HostCpus(8, 16, 16, 2.5), 8, 0.0, "--threads 2"),
        (HostCpus(8, 16, 16, 2.5), -1, 0.0, ""),
        (HostCpus(8, 16, 16, 0.5), -1, 0.0, "at least one whole CPU"),
        (HostCpus(8, 16, 16, None), -1, 0.6, "end other programs"),
    ],
)
def test_more_threads_than_cpus_are_warned_of(host: HostCpus, n_threads: int, busy: float, advice: str) -> None:
    check = checks.cpus(host, n_threads, busy)
    assert check.outcome is (Outcome.WARN if advice else Outcome.OK)
    assert check.advice.startswith(advice) or advice in check.advice
    assert ("quota is" in check.found) == (host.quota is not None)
    assert ("may use 4" in check.found) == (host.allowed == 4)


def test_a_model_that_is_larger_than_free_memory_is_warned_of() -> None:
    total = psutil.virtual_memory().total
    assert checks.memory(4 * GIB, total, 2 * GIB).outcome is Outcome.OK
    larger = checks.memory(4 * GIB, total, 5 * GIB)
    assert larger.outcome is Outcome.WARN
    assert "5.0 GiB" in larger.found
    assert checks.memory(GIB // 2, total, 0).outcome is Outcome.WARN
    assert "container's limit" in checks.memory(2 * GIB, total // 2, 0).found


def test_swap_that_is_used_or_huge_is_warned_of() -> None:
    assert checks.swap(0, 0, 8 * GIB).outcome is Outcome.OK
    assert checks.swap(8 * GIB, 0, 8 * GIB).outcome is Outcome.OK
    assert "--cache-ram" in checks.swap(8 * GIB, GIB, 8 * GIB).advice
    assert "less swap" in checks.swap(17 * GIB, 0, 8 * GIB).advice


def test_a_low_hard_limit_of_open_files_is_warned_of() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))\n"
        "from llamaslot.app.doctor.checks import descriptors\n"
        "from llamaslot.app.logs import configure_logging; configure_logging('json', 'error')\n"
        "print(descriptors(300).outcome, descriptors(1024).outcome, descriptors(1024).advice)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ok warn ")
    assert "LimitNOFILE" in done.stdout


def test_the_speed_of_a_folder_is_measured_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    write_rate, read_rate = checks.measure(tmp_path, 2**23)
    assert write_rate > 0
    assert read_rate > 0
    check = checks.disk_tier(tmp_path / "not" / "yet")
    assert check.outcome in (Outcome.OK, Outcome.WARN), "a slow disk, or a full one"
    assert "MiB/s" in check.found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux'")
def test_a_folder_that_cannot_be_written_to_fails_for_the_disk_tier_alone() -> None:
    folder = Path("/proc/self")
    check = checks.disk_tier(folder)
    assert check.outcome is Outcome.FAIL
    assert "cannot be written to" in check.found
    assert checks.cache_folder(folder / "cache").outcome is Outcome.WARN


def test_a_file_in_the_place_of_the_folder_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        assert checks.disk_tier(path).outcome is Outcome.FAIL


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_fails(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in checks.disk_tier(tmp_path).found


def test_a_full_disk_fails(tmp_path: Path) -> None:
    def limited() -> None:
        # Where the system allows no larger file, writing fails as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    code = (
        "import pathlib, sys; from llamaslot.app.doctor.checks import disk_tier\n"
        "check = disk_tier(pathlib.Path(sys.argv[1])); print(check.outcome, check.found)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=limited)
    assert done.stdout.startswith("fail ")
    assert "cannot be written to: File too large" in done.stdout


@pytest.mark.skipif(
    not any(each.mountpoint == "/dev/shm" and each.fstype == "tmpfs" for each in psutil.disk_partitions(all=True)),
    reason="there is no /dev/shm",
)
def test_a_folder_in_memory_is_warned_of() -> None:
    check = checks.disk_tier(Path("/dev/shm"))
    assert check.outcome is Outcome.WARN
    assert "in memory" in check.advice


def test_a_folder_that_a_server_uses_is_named(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path / "disk")
    check = checks.disk_tier(tmp_path / "disk")
    assert check.outcome is Outcome.WARN
    assert "another server uses" in check.found
    disk.close()
    assert "another server uses" not in checks.disk_tier(tmp_path / "disk").found
