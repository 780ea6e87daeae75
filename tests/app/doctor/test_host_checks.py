"""The doctor on the machine: threads and CPUs, memory and the model, swap, descriptors."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from llamaslot.app.doctor import Outcome, machine_checks
from llamaslot.backend.host import HostCpus

GIB = 2**30


def test_this_machine_has_no_wrong_python() -> None:
    check = machine_checks.software()
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
    check = machine_checks.cpus(host, n_threads, busy)
    assert check.outcome is (Outcome.WARN if advice else Outcome.OK)
    assert check.advice.startswith(advice) or advice in check.advice
    assert ("quota is" in check.found) == (host.quota is not None)
    assert ("may use 4" in check.found) == (host.allowed == 4)


def test_a_model_that_is_larger_than_free_memory_is_warned_of() -> None:
    total = psutil.virtual_memory().total
    assert machine_checks.memory(4 * GIB, total, 2 * GIB).outcome is Outcome.OK
    larger = machine_checks.memory(4 * GIB, total, 5 * GIB)
    assert larger.outcome is Outcome.WARN
    assert "5.0 GiB" in larger.found
    assert machine_checks.memory(GIB // 2, total, 0).outcome is Outcome.WARN
    assert "container's limit" in machine_checks.memory(2 * GIB, total // 2, 0).found


def test_swap_that_is_used_or_huge_is_warned_of() -> None:
    assert machine_checks.swap(0, 0, 8 * GIB).outcome is Outcome.OK
    assert machine_checks.swap(8 * GIB, 0, 8 * GIB).outcome is Outcome.OK
    assert "--cache-ram" in machine_checks.swap(8 * GIB, GIB, 8 * GIB).advice
    assert "less swap" in machine_checks.swap(17 * GIB, 0, 8 * GIB).advice


def test_a_low_hard_limit_of_open_files_is_warned_of() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))\n"
        "from llamaslot.app.doctor.machine_checks import descriptors\n"
        "from llamaslot.app.logs import configure_logging; configure_logging('json', 'error')\n"
        "print(descriptors(300).outcome, descriptors(1024).outcome, descriptors(1024).advice)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ok warn ")
    assert "LimitNOFILE" in done.stdout
