"""Control groups (v1 and v2) of this process, from which a container's limits are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


class Group(NamedTuple):
    """The folder of a control group, and its version of cgroups, on which the names of its files depend."""

    folder: Path
    is_v1: bool


def own_groups(controller: str, cgroups: Path = CGROUPS, own: Path = OWN_GROUPS) -> Iterator[Group]:
    """Yield the groups that limit a resource (`controller`) of this process, each before its parent.

    In a container the process's own group may be the root of the mount.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = cgroups / controller if controllers else cgroups
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            yield Group(folder, is_v1=bool(controllers))
