"""Checks of the machine: Python, CPUs, memory, swap, file descriptors, and the speed of the folders."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path

import psutil

from llamaslot import __version__
from llamaslot.api.connections import available_connections
from llamaslot.app.doctor import Check, fail, ok, shown_size, warn
from llamaslot.backend.host import HostCpus

_MIN_FREE_BYTES = 2**30
"""Free memory below which too little is left for a model and a pool; free disk space below which a disk tier holds
little.
"""
_MAX_BUSY = 0.3
"""CPU usage by other programs above which steps take much longer and vary."""
_MIN_SWAPPED_BYTES = 2**28
"""Swapped-out memory from which the doctor warns."""
_BLOCK_BYTES = 2**22
_MEASURED_BYTES = 2**26
"""Most bytes written to measure a disk."""
_MAX_WRITE_S = 2.0
"""Time after which no further block is written to a slow disk."""
_SLOW_READ = 50 * 2**20
"""Bytes per second; slower disks take over two seconds for 1,000 tokens of a model with 128 KiB of KV per token."""
_IN_MEMORY = ("tmpfs", "ramfs")
_ON_NETWORK = ("nfs", "nfs4", "cifs", "smbfs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs")


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
    advice = ""
    if used > most:
        advice = f"use --threads {min(host.n_threads, most)}: more threads than CPUs wait for each other"
    elif host.quota is not None and host.quota < 1:
        advice = "give the container at least one whole CPU"
    elif busy > _MAX_BUSY:
        advice = "end other programs or lower --threads: a thread without a CPU delays all others"
    return warn("CPU", found, advice) if advice else ok("CPU", found)


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


def cache_folder(folder: Path) -> Check:
    """Check the folder of start-up measurements; without it, each start takes some seconds to measure."""
    return _folder(
        "cache folder", folder, "without it, every start measures again (see docs/install.md)", is_needed=False
    )


def disk_tier(folder: Path) -> Check:
    """Check the folder of `--cache-disk`."""
    if _is_locked(folder / "lock"):
        return warn("--cache-disk", f"another server uses {folder}", "give each server its own --cache-disk")
    return _folder("--cache-disk", folder, "give another folder, or start without --cache-disk", is_needed=True)


def _folder(name: str, folder: Path, advice: str, *, is_needed: bool) -> Check:
    """Measure in a folder or, if it does not exist, in the parent in which it would be created."""
    parent = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    kind = _file_system_of(parent)
    try:
        if not parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file")
        free = shutil.disk_usage(parent).free
        write_rate, read_rate = measure(parent, min(_MEASURED_BYTES, free // 2))
    except OSError as error:
        found = f"{folder} cannot be written to: {error.strerror or error}"
        return fail(name, found, advice) if is_needed else warn(name, found, advice)
    found = (
        f"{folder} ({kind or 'unknown file system'}): {shown_size(free)} free, "
        f"writes {write_rate / 2**20:,.0f} MiB/s, reads {read_rate / 2**20:,.0f} MiB/s"
    )
    advice = ""
    if is_needed and kind in _IN_MEMORY:
        advice = "use a folder on a disk: this one is in memory and is lost when the machine restarts"
    elif is_needed and kind in _ON_NETWORK:
        advice = "use a folder on a local disk: locks and index are unsafe on a network's"
    elif free < _MIN_FREE_BYTES:
        advice = "free some space: little can be stored"
    elif is_needed and read_rate < _SLOW_READ:
        advice = "use a faster disk: prefixes that are slower to read than to compute are not read"
    return warn(name, found, advice) if advice else ok(name, found)


def measure(folder: Path, n_bytes: int = _MEASURED_BYTES) -> tuple[float, float]:
    """Return the bytes per second that a folder's disk writes and reads.

    Writes up to `n_bytes` to an anonymous file, synced block by block, and reads them back. Each takes about
    `_MAX_WRITE_S` at most, unless the disk hangs. Raises `OSError`.
    """
    n_written, write_s = 0, 0.0
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        while n_written == 0 or (n_written < n_bytes and write_s < _MAX_WRITE_S):
            # Random bytes, because a file system may compress.
            block = os.urandom(min(_BLOCK_BYTES, max(n_bytes - n_written, 1)))
            started = time.perf_counter()
            view = memoryview(block)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
            write_s += time.perf_counter() - started
            n_written += len(block)
        # Drop the file from the page cache.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        elif hasattr(fcntl, "F_NOCACHE"):
            fcntl.fcntl(file.fileno(), fcntl.F_NOCACHE, 1)
        file.seek(0)
        started = time.perf_counter()
        while file.read(_BLOCK_BYTES):
            pass
        read_s = time.perf_counter() - started
    return n_written / max(write_s, 1e-9), n_written / max(read_s, 1e-9)


def _is_locked(lock: Path) -> bool:
    """Return True if a server holds the lock of a disk tier."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # Held only for a moment, because a server that starts meanwhile would consider the folder in use.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _file_system_of(path: Path) -> str:
    """Return the type of the file system; empty if unknown."""
    resolved = str(path.resolve())
    mounts = {
        each.mountpoint: each.fstype
        for each in psutil.disk_partitions(all=True)
        if resolved == each.mountpoint or resolved.startswith(each.mountpoint.rstrip("/") + "/")
    }
    return mounts[max(mounts, key=len)] if mounts else ""
