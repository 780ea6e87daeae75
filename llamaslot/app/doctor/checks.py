"""Checks of the machine and the configuration.

Python, CPUs, memory, swap, file descriptors, and the speed of the folders; is the configuration valid, who can
reach the server, is its port free?
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import http.client
import os
import platform
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from llamaslot import __version__
from llamaslot.api.connections import available_connections
from llamaslot.api.credentials import ApiKeys, certificate
from llamaslot.api.middleware import is_loopback
from llamaslot.app.cache_tiers import remote_settings
from llamaslot.app.config import Config
from llamaslot.app.config_reader import listed, read_config, read_models, read_template
from llamaslot.app.doctor import Check, fail, ok, shown_size, warn
from llamaslot.app.http_config import api_settings
from llamaslot.app.model_config import check_projector, with_hub_model
from llamaslot.backend.host import HostCpus
from llamaslot.base.errors import ConfigError

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
_ASK_TIMEOUT_S = 1.0
_FIX_CONFIG = "correct it: `llamaslot serve` would exit with this message"


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
    """Check the folder of measurements; without it, they are repeated after each start."""
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


def configuration(flags: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Config, Check]:
    """Return the configuration and a check of its validity; the default configuration if it cannot be read."""
    file = flags.config or environ.get("LLAMASLOT_CONFIG")
    config = Config()
    try:
        config = read_config(flags, environ)
        read_models(flags, environ)
        if config.hf_repo:
            config = with_hub_model(config, offline=True)
        check_projector(config)
        read_template(config)
        api_settings(config)
        certificate(config.ssl_cert_file, config.ssl_key_file)
        remote_settings(config)
    except ConfigError as error:
        return config, fail("configuration", error.message, _FIX_CONFIG)
    changed = sum(getattr(config, name) != getattr(Config(), name) for name in Config.__slots__)
    found = f"{changed} settings other than the default" + (f"; file {file}" if file else "")
    return config, ok("configuration", found)


def access(config: Config) -> Check:
    """Check who can use the server: other machines, and other users of this one."""
    outside = [host for host in listed(config.host) if not is_loopback(host)]
    where = f"listens on {config.host}"
    try:
        has_keys = bool(ApiKeys(listed(config.api_key), config.api_key_file))
    except ConfigError as error:
        return fail("access", error.message, _FIX_CONFIG)
    if outside and not has_keys:
        advice = "use --api-key-file: anyone who reaches the port can use the model and clear the cache"
        return warn("access", f"{where}, without API keys (--insecure)", f"{advice} (docs/security.md)")
    if config.api_key_file and others_can_read(Path(config.api_key_file)):
        return warn("access", f"other users may read {config.api_key_file}", f"chmod 600 {config.api_key_file}")
    if outside and not config.ssl_cert_file:
        advice = (
            "use --ssl-cert-file and --ssl-key-file, or a TLS proxy in front: keys and prompts are sent unencrypted"
        )
        return warn("access", f"{where}, with API keys, without TLS", advice)
    if not has_keys:
        return ok("access", f"{where}: all users of this machine, without API keys")
    return ok("access", f"{where}, with API keys{', over TLS' if config.ssl_cert_file else ''}")


def port(config: Config) -> Check:
    """Check whether the addresses are free and, if not, who uses them."""
    for host in listed(config.host):
        try:
            _bind(host, config.port)
        except OSError as error:
            return _not_bound(host, config.port, error)
    if config.port == 0:
        return ok("port", "the server will choose a free one")
    return ok("port", f"{config.port} is free")


def _bind(host: str, number: int) -> None:
    """Listen on an address for a moment, as the server would. Raises `OSError`."""
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(1)


def _not_bound(host: str, number: int, error: OSError) -> Check:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return fail("port", f"{host} is not an address of this machine ({error.strerror})", "give another --host")
    if isinstance(error, PermissionError):
        advice = "give a --port of 1024 or higher, or use a proxy"
        return fail("port", f"this user may not listen on port {number}", advice)
    if error.errno != errno.EADDRINUSE:
        return fail("port", f"cannot listen on {host}:{number}: {error.strerror}", "give another --host or --port")
    name = _asked(host, number)
    found = f"{number} is in use by {' '.join(_listeners(number)) or 'another program'}"
    if name == "llamaslot":
        return warn("port", f"{found}: a llamaslot server", "give another --port for a second server")
    answers = f", which answers as {name}" if name else ""
    return fail("port", found + answers, "give another --port or end that program")


def _asked(host: str, number: int) -> str:
    """Return the name that the HTTP server on a port gives itself; empty if there is none."""
    nearby = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = http.client.HTTPConnection(nearby, number, timeout=_ASK_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().headers.get("Server", "") or "an HTTP server"
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()


def _listeners(number: int) -> Iterator[str]:
    """Yield the processes that listen on a port, as far as this user can see them."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return
    listening = (each for each in connections if each.status == "LISTEN" and each.laddr.port == number)
    for pid in sorted({each.pid for each in listening if each.pid is not None}):
        try:
            yield f"{psutil.Process(pid).name()} (process {pid})"
        except psutil.Error:
            continue


def others_can_read(path: Path) -> bool:
    """Return True if users outside the file's group have any access to it or its group may write to it."""
    try:
        return bool(path.stat().st_mode & (stat.S_IRWXO | stat.S_IWGRP)) and os.name == "posix"
    except OSError:
        return False
