"""Checks of folders: are they writable, do they have space, and how fast is the disk?"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from llamaslot.app.doctor.check import Check, fail, ok, shown_size, warn

_BLOCK_BYTES = 2**22
_MEASURED_BYTES = 2**26
"""Most bytes written to measure a disk."""
_MAX_WRITE_S = 2.0
"""Time after which no further block is written to a slow disk."""
_MIN_FREE_BYTES = 2**30
"""Free space below which a disk tier holds little."""
_SLOW_READ = 50 * 2**20
"""Bytes per second; slower disks take over two seconds for 1,000 tokens of a model with 128 KiB of KV per token."""
_IN_MEMORY = ("tmpfs", "ramfs")
_ON_NETWORK = ("nfs", "nfs4", "cifs", "smbfs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs")


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Measured speed in bytes per second."""

    write: float
    read: float


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
    bad = fail if is_needed else warn
    parent = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    kind = _kind_of(parent)
    try:
        if not parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file")
        free = shutil.disk_usage(parent).free
        speed = measure(parent, min(_MEASURED_BYTES, free // 2))
    except OSError as error:
        return bad(name, f"{folder} cannot be written to: {error.strerror or error}", advice)
    found = (
        f"{folder} ({kind or 'unknown file system'}): {shown_size(free)} free, writes {_rate(speed.write)}, "
        f"reads {_rate(speed.read)}"
    )
    if is_needed and kind in _IN_MEMORY:
        return warn(
            name, found, "use a folder on a disk: this one is in memory and is lost when the machine restarts"
        )
    if is_needed and kind in _ON_NETWORK:
        return warn(name, found, "use a folder on a local disk: locks and index are unsafe on a network's")
    if free < _MIN_FREE_BYTES:
        return warn(name, found, "free some space: little can be stored")
    if is_needed and speed.read < _SLOW_READ:
        return warn(name, found, "use a faster disk: prefixes that are slower to read than to compute are not read")
    return ok(name, found)


def measure(folder: Path, n_bytes: int = _MEASURED_BYTES) -> DiskSpeed:
    """Write up to `n_bytes` to an anonymous file, synced block by block, and read them back from the disk.

    Writing and reading take about `_MAX_WRITE_S` each at most, unless the disk hangs. Raises `OSError`.
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
        _drop_from_page_cache(file.fileno())
        file.seek(0)
        started = time.perf_counter()
        while file.read(_BLOCK_BYTES):
            pass
        read_s = time.perf_counter() - started
    return DiskSpeed(n_written / max(write_s, 1e-9), n_written / max(read_s, 1e-9))


def wheel_cache(folder: Path) -> Check:
    """Report the builds of llama-cpp-python that `make` has cached."""
    wheels = sorted(folder.glob("*/*.whl"))
    if not wheels:
        return ok("wheel cache", f"no builds by `make` in {folder}")
    builds = [f"{wheel.name.split('-')[1]} ({_cmake_args(wheel.parent) or 'default build'})" for wheel in wheels]
    size = shown_size(sum(wheel.stat().st_size for wheel in wheels))
    return ok("wheel cache", f"{size} in {folder}: {', '.join(builds)}")


def _cmake_args(entry: Path) -> str:
    try:
        return str(json.loads((entry / "key.json").read_text(encoding="utf-8")).get("CMAKE_ARGS", ""))
    except (OSError, ValueError, AttributeError):
        return "build unknown"


def _is_locked(lock: Path) -> bool:
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


def _drop_from_page_cache(descriptor: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    elif hasattr(fcntl, "F_NOCACHE"):
        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)


def _kind_of(path: Path) -> str:
    """Return the type of the file system; empty if unknown."""
    resolved = str(path.resolve())
    mounts = {
        each.mountpoint: each.fstype
        for each in psutil.disk_partitions(all=True)
        if resolved == each.mountpoint or resolved.startswith(each.mountpoint.rstrip("/") + "/")
    }
    return mounts[max(mounts, key=len)] if mounts else ""


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 2**20:,.0f} MiB/s"
