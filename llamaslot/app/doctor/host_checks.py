"""Checks of the machine: Python, CPUs, memory, swap, file descriptors."""

from __future__ import annotations

import platform
import sys

import psutil

from llamaslot import __version__
from llamaslot.api.connections import available_connections
from llamaslot.app.doctor.check import Check, ok, shown_size, warn
from llamaslot.backend.host_cpus import HostCpus

_MIN_FREE_BYTES = 2**30
"""Free memory below which too little is left for a model and a pool."""
_MAX_BUSY = 0.3
"""CPU usage by other programs above which steps take much longer and vary."""
_MIN_SWAPPED_BYTES = 2**28
"""Swapped-out memory from which the doctor warns."""


def software() -> Check:
    """Report the versions of llamaslot, Python and the system."""
    found = f"llamaslot {__version__}, Python {platform.python_version()}, {platform.platform()}"
    # A Python for x86-64 also runs on Apple silicon, under Rosetta; llama.cpp is then built for x86-64, too.
    if sys.platform == "darwin" and platform.machine() == "x86_64" and "ARM64" in platform.version():
        return warn("system", found, "use a Python for arm64: this one is emulated and cannot use Metal")
    return ok("system", found)


def cpus(host: HostCpus, n_threads: int, busy: float) -> Check:
    """Check the model's number of threads against the CPUs that this process may use.

    `n_threads` is the flag's value (not positive: the default), `busy` the fraction of the CPUs that others use.
    """
    found = f"{host.cores:,} cores, {host.logical:,} CPUs"
    if host.allowed < host.logical:
        found += f", of which this process may use {host.allowed:,}"
    if host.quota is not None:
        found += f"; the container's quota is {host.quota:,.1f} CPUs"
    used = n_threads if n_threads > 0 else host.n_threads
    found += f"; {used} threads; {busy:.0%} busy"
    most = host.allowed if host.quota is None else min(host.allowed, max(1, int(host.quota)))
    if used > most:
        return warn(
            "CPU",
            found,
            f"use --threads {min(host.n_threads, most)}: more threads than CPUs wait for each other",
        )
    if host.quota is not None and host.quota < 1:
        return warn("CPU", found, "give the container at least one whole CPU")
    if busy > _MAX_BUSY:
        advice = "end other programs or lower --threads: a thread without a CPU delays all others"
        return warn("CPU", found, advice)
    return ok("CPU", found)


def memory(free: int, total: int, model_bytes: int) -> Check:
    """Check free memory (of the container, if it has a limit) against the model's size."""
    on_host = psutil.virtual_memory().total
    where = f" (the container's limit; the host has {shown_size(on_host)})" if total < on_host else ""
    found = f"{shown_size(free)} of {shown_size(total)} free{where}"
    if model_bytes > free:
        advice = "use a smaller model or quantization, or add memory: otherwise every token reads weights from disk"
        return warn("memory", f"{found}; the model's files have {shown_size(model_bytes)}", advice)
    if free < _MIN_FREE_BYTES:
        return warn("memory", found, "end other programs or raise the container's limit")
    return ok("memory", found)


def swap(total: int, used: int, all_memory: int) -> Check:
    """Check whether KV in RAM may be swapped out, which makes it slower to load than to compute."""
    if not total:
        return ok("swap", "none")
    found = f"{shown_size(used)} of {shown_size(total)} used"
    if used > _MIN_SWAPPED_BYTES:
        return warn("swap", found, "set --cache-ram to a size that fits, or end other programs: swapped KV is slow")
    if total > 2 * all_memory:
        advice = (
            "use less swap, or set --cache-ram to a size: when memory is short, the system swaps instead of failing"
        )
        return warn("swap", f"{found}, more than twice the memory", advice)
    return ok("swap", found)


def descriptors(max_connections: int) -> Check:
    """Check whether the limit of open files allows `--max-connections`; raises this process's soft limit."""
    allowed = available_connections(max_connections)
    found = f"open files allow {allowed:,} connections (--max-connections {max_connections:,})"
    if allowed < max_connections:
        return warn(
            "descriptors", found, "raise the hard limit of open files (ulimit -Hn, LimitNOFILE= in systemd)"
        )
    return ok("descriptors", found)
