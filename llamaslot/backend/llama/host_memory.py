"""Free memory of the host, within what a container may use."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil


def host_memory(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> tuple[int, int]:
    """Free and all memory of the host, or of the control groups that this process is in where they allow less."""
    memory = psutil.virtual_memory()
    free, total = int(memory.available), int(memory.total)
    try:
        entries = [line.removeprefix("0::/") for line in own.read_text().splitlines() if line.startswith("0::/")]
    except OSError:
        return free, total
    for entry in entries:
        group = cgroups / entry
        for folder in (group, *group.parents):
            if not folder.is_relative_to(cgroups):
                break
            limit, used = _cgroup(folder)
            free, total = min(free, max(limit - used, 0)), min(total, limit)
    return free, total


def _cgroup(folder: Path) -> tuple[int, int]:
    """The limit of a control group and what it uses beyond files that can be read again."""
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return sys.maxsize, 0
    return limit, used - int(stat.get("inactive_file", 0)) - int(stat.get("active_file", 0))
