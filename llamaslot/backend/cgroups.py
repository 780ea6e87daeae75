"""Control groups that this process is in, of cgroup v1 and v2: where a container's limits are read from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


class Group(NamedTuple):
    """The folder of a control group, and its version of cgroups, which decides how its files are named."""

    folder: Path
    is_v1: bool


def own_groups(controller: str, cgroups: Path = CGROUPS, own: Path = OWN_GROUPS) -> Iterator[Group]:
    """Yield the groups that limit this process in what a controller counts, each before the one around it.

    In a container its own group may be the root of the mount.
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
