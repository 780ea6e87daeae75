"""CPUs and memory of the host, within the limits that control groups (v1 and v2) give to a container.

Linux: `MemAvailable`, limits of control groups, and the time that tasks wait for memory (pressure stall
information, PSI). macOS: the system's pressure level (untested). Memory for KV is allocated here too (`new_kv`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from llamaslot.backend import page_locked
from llamaslot.base.kv_ops import Kv
from llamaslot.kvcache.tiers.budget import MemoryReading

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_PRESSURE = Path("/proc/pressure/memory")
_MAC_WARNING, _MAC_CRITICAL = 2, 4
"""Values of macOS' `kern.memorystatus_vm_pressure_level`; 1 is normal."""
_BUSY_TIMES = ("user", "nice", "system", "irq", "softirq", "steal")
"""Times of a CPU (`psutil.cpu_times`) in which it did something, for this machine or another one of the host."""
_MAPPED_MIN_BYTES = 2**17
"""Smallest allocation that is mapped. Smaller segments are too few for their memory to matter."""


class Group(NamedTuple):
    """The folder of a control group, and its version of cgroups, on which the names of its files depend."""

    folder: Path
    is_v1: bool


def own_groups(controller: str) -> Iterator[Group]:
    """Yield the groups that limit a resource (`controller`) of this process, each before its parent.

    In a container the process's own group may be the root of the mount.
    """
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = _CGROUPS / controller if controllers else _CGROUPS
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            yield Group(folder, is_v1=bool(controllers))


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


def host_cpus() -> HostCpus:
    """Return the CPUs of this machine, and the limits of this process."""
    logical = psutil.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    quotas: list[float] = []
    for group in own_groups("cpu"):
        try:
            if group.is_v1:
                files = (group.folder / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
                quota, period = (int(file.read_text()) for file in files)
            else:
                quota, period = map(int, (group.folder / "cpu.max").read_text().split())
        except (OSError, ValueError):
            # Without a limit, v2 has `max` instead of a number.
            continue
        # Without a limit, v1 has -1.
        if quota > 0 and period > 0:
            quotas.append(quota / period)
    return HostCpus(psutil.cpu_count(logical=False) or logical, logical, allowed, min(quotas, default=None))


class CpuTimes(NamedTuple):
    """CPU time so far, in seconds."""

    clock: float
    """The time at which it was read."""
    n_cpus: int
    """Number of CPUs that this process may use."""
    all: float
    """Time of these CPUs that was used, by anything."""
    own: float
    """Time that this process used."""


def cpu_times() -> CpuTimes | None:
    """Read the CPU times; None where a sandbox does not let this process read them."""
    try:
        times = psutil.cpu_times(percpu=True)
    except (OSError, psutil.Error):
        return None
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    # The list has no place for a CPU that is offline, so the numbers of the CPUs may not be its indices.
    if allowed and max(allowed) < len(times):
        times = [times[cpu] for cpu in allowed]
    # Not by the idle time: a sandbox may report zeros alone, and would seem to be always busy.
    used = sum(getattr(each, name, 0.0) for each in times for name in _BUSY_TIMES)
    return CpuTimes(time.perf_counter(), len(allowed) or len(times), used, time.process_time())


def host_memory() -> tuple[int, int]:
    """Return free and total memory of the host, or of this process's control groups if they allow less."""
    memory = psutil.virtual_memory()
    free, total = int(memory.available), int(memory.total)
    for _, limit, used in _limited_groups():
        free, total = min(free, max(limit - used, 0)), min(total, limit)
    return free, total


def mapped_bytes() -> int:
    """Return the resident bytes of mapped files, such as weights; 0 if the system does not report them.

    The system counts them as free, because they can be read again, but computing a token needs all of them.
    """
    return int(getattr(psutil.Process().memory_info(), "shared", 0))


def pressure_files() -> list[Path]:
    """Return Linux's files with the time that tasks waited for memory: of the host, and of limited groups (v2)."""
    return [_PRESSURE, *(folder / "memory.pressure" for folder, _, _ in _limited_groups())]


def mac_pressure_level() -> int:
    """Return macOS' pressure level; 0 on other systems. Untested."""
    if sys.platform != "darwin":
        return 0
    level, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    name = b"kern.memorystatus_vm_pressure_level"
    failed = ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, 0)
    return 0 if failed else level.value


class MemoryReader:
    """Reads free memory and pressure, in less than a millisecond. Used by one thread at a time.

    `mapped` are the bytes that the system counts as free, although they are in use.
    """

    def __init__(
        self, *, mapped: Callable[[], int] = mapped_bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._mapped, self._clock = mapped, clock
        self._read_at = clock()
        self._waited: dict[Path, tuple[float, float]] = {}
        """Seconds that some tasks, and all tasks, have waited for memory since boot, by file."""

    def read(self) -> MemoryReading:
        """Return the current state of memory; waiting times are those since the last call."""
        now = self._clock()
        free, total = host_memory()
        before, self._waited = self._waited, _waited(pressure_files())
        seconds, self._read_at = now - self._read_at, now
        grown = [
            ((some - before[path][0]) / seconds, (everything - before[path][1]) / seconds)
            for path, (some, everything) in self._waited.items()
            if path in before and seconds > 0
        ]
        level = mac_pressure_level()
        return MemoryReading(
            free=max(free - self._mapped(), 0),
            total=total,
            some_waiting=max((some for some, _ in grown), default=0.0),
            all_waiting=max((everything for _, everything in grown), default=0.0),
            is_warned=level >= _MAC_WARNING,
            is_critical=level >= _MAC_CRITICAL,
            locked=page_locked.n_bytes(),
        )


def _limited_groups() -> Iterator[tuple[Path, int, int]]:
    """Yield the folders of the control groups of this process that limit memory, with limit and bytes in use.

    Cached files, which can be read again, are not in use.
    """
    for folder, is_v1 in own_groups("memory"):
        try:
            if is_v1:
                limit, used = (int((folder / f"memory.{name}_in_bytes").read_text()) for name in ("limit", "usage"))
            else:
                limits = [(folder / name).read_text().strip() for name in ("memory.max", "memory.high")]
                limit = min((int(each) for each in limits if each != "max"), default=sys.maxsize)
                used = int((folder / "memory.current").read_text())
            # Without a limit, v1 has a number of about that size.
            if limit < sys.maxsize // 2:
                yield folder, limit, used - _file_bytes(folder, "total_" if is_v1 else "")
        except (OSError, ValueError):
            continue


def _file_bytes(folder: Path, prefix: str) -> int:
    """Return the bytes of cached files in a group."""
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return sum(int(stat.get(f"{prefix}{name}_file", 0)) for name in ("inactive", "active"))


def _waited(paths: Sequence[Path]) -> dict[Path, tuple[float, float]]:
    """Return the seconds that some tasks, and all tasks, have waited since boot, for those files that exist."""
    waited = {}
    for path in paths:
        try:
            lines = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
            some, everything = (int(lines[kind].rpartition("total=")[2]) / 1e6 for kind in ("some", "full"))
        except (OSError, ValueError, KeyError):
            continue
        waited[path] = some, everything
    return waited


def new_kv(n_bytes: int) -> Kv:
    """Allocate `n_bytes` of uninitialized memory for KV, page-locked if a GPU is used. Raises `MemoryError`.

    Other large arrays are mapped in ordinary pages, for two reasons:
    - The C library puts blocks of up to 32 MiB among others, so freeing them may not shrink the process: after
      freeing nine tenths of 350 MiB, nothing had gone back to the system. Mapped memory goes back at once.
    - numpy requests huge pages for 4 MiB and more. The system has to find and clear each of them before its first
      byte is written. If free memory is fragmented, as on many virtual machines, that takes several times as long
      as with ordinary pages, while streams wait for the step.
    """
    if (locked := page_locked.take(n_bytes)) is not None:
        return locked
    if n_bytes >= _MAPPED_MIN_BYTES:
        try:
            return np.frombuffer(mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
        except OSError:
            # The number of mappings is limited (Linux: 65,530).
            pass
    return np.empty(n_bytes, dtype=np.uint8)


def trim_heap() -> None:
    """Return freed memory to the system. Called after the start and after a self-test, which free much memory.

    glibc keeps freed pages that lie below blocks in use, such as those of the logits that the self-test has read.
    Other C libraries have no such function.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
