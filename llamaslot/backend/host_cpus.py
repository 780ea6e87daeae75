"""CPUs of the host, and how many of them this process may use, by its affinity and its container's quota."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from llamaslot.backend.cgroups import CGROUPS, OWN_GROUPS, Group, own_groups


@dataclass(frozen=True, slots=True)
class HostCpus:
    """Counts of CPUs."""

    cores: int
    """Physical cores; logical CPUs if the system does not report physical ones."""
    logical: int
    allowed: int
    """Logical CPUs in the affinity of this process, which `taskset` or a container's CPU set may reduce."""
    quota: float | None
    """CPU time that control groups allow, in CPUs; None without a limit."""

    @property
    def n_threads(self) -> int:
        """Default number of threads to compute with.

        Threads wait for each other in each layer, so one thread more than can run at once slows all of them down.
        """
        quota = self.logical if self.quota is None else int(self.quota)
        return max(1, min(self.cores, self.allowed, quota))

    @property
    def n_at_once(self) -> float:
        """Number of threads that can run at the same time."""
        return self.allowed if self.quota is None else min(self.allowed, self.quota)


def host_cpus(cgroups: Path = CGROUPS, own: Path = OWN_GROUPS) -> HostCpus:
    """Return the CPUs of this machine, and the limits of this process."""
    logical = psutil.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    quotas = list(_quotas(cgroups, own))
    return HostCpus(psutil.cpu_count(logical=False) or logical, logical, allowed, min(quotas, default=None))


def _quotas(cgroups: Path, own: Path) -> Iterator[float]:
    for group in own_groups("cpu", cgroups, own):
        try:
            quota, period = _quota_v1(group) if group.is_v1 else _quota_v2(group)
        except (OSError, ValueError):
            continue
        if quota > 0 and period > 0:
            yield quota / period


def _quota_v2(group: Group) -> tuple[int, int]:
    """Return quota and period in microseconds; raises `ValueError` for `max`, which means no limit."""
    quota, period = (group.folder / "cpu.max").read_text().split()
    return int(quota), int(period)


def _quota_v1(group: Group) -> tuple[int, int]:
    """Return quota and period in microseconds; a quota of -1 means no limit."""
    quota, period = (int((group.folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    return quota, period
