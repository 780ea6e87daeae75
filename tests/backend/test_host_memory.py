"""Reading memory limits and pressure from the system: cgroup v1 and v2, PSI, mapped weights."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llamaslot.backend import host as module
from llamaslot.backend.host import MemoryReader, host_memory, mac_pressure_level, new_kv, pressure_files

NO_LIMIT = 9223372036854771712
"""The value that cgroup v1 reports for no limit."""


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = SimpleNamespace(available=800, total=1000)
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr(module, "_CGROUPS", tmp_path / "mount")
    monkeypatch.setattr(module, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(module, "_PRESSURE", tmp_path / "host")


def group_v1(folder: Path, limit: int, used: int, files: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"inactive_file 1\ntotal_inactive_file {files - 10}\ntotal_active_file 10\n"
    )


def group_v2(folder: Path, limit: str, high: str, used: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"max": limit, "high": high, "current": used, "stat": "inactive_file 0"}.items():
        (folder / f"memory.{name}").write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        ((NO_LIMIT, 500, 100), (600, 500, 300), (400, 600)),
        ((700, 650, 100), (600, 100, 10), (150, 600)),
        ((NO_LIMIT, 500, 100), (NO_LIMIT, 500, 300), (800, 1000)),
        ((600, 900, 10), (NO_LIMIT, 500, 300), (0, 600)),
    ],
)
def test_limits_of_cgroup_v1_count(
    tmp_path: Path, outer: tuple[int, int, int], inner: tuple[int, int, int], expected: tuple[int, int]
) -> None:
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/x\n4:cpu,memory:/a/b\n0::/\n")
    group_v1(tmp_path / "mount/memory/a", *outer)
    group_v1(tmp_path / "mount/memory/a/b", *inner)
    assert host_memory() == expected


def test_in_a_container_of_cgroup_v1_its_own_group_is_the_mount(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/docker/1234\n")
    group_v1(tmp_path / "mount/memory", 600, 500, 300)
    assert host_memory() == (400, 600)


def test_a_group_that_is_throttled_from_a_size_on_is_limited_to_it(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/a\n")
    group_v2(tmp_path / "mount/a", "700", "500", 100)
    assert host_memory() == (400, 500)
    group_v2(tmp_path / "mount/a", "max", "max", 100)
    assert host_memory() == (800, 1000)


def test_waiting_is_read_of_the_host_and_of_groups_with_a_limit(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/a/b/c\n")
    mount = tmp_path / "mount"
    group_v2(mount / "a", "700", "max", 100)
    group_v2(mount / "a/b", "max", "max", 100)
    group_v2(mount / "a/b/c", "600", "max", 100)
    assert pressure_files() == [tmp_path / "host", mount / "a/b/c/memory.pressure", mount / "a/memory.pressure"]


def waited(path: Path, some: int, everything: int) -> None:
    averages = "avg10=0.00 avg60=0.00 avg300=0.00"
    path.write_text(f"some {averages} total={some}\nfull {averages} total={everything}\n")


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Callable[..., MemoryReader]:
    def make(
        *files: Path, ticks: Iterable[float] = (0.0, 1.0, 2.0), mapped: int = 0, mac_level: int = 0
    ) -> MemoryReader:
        times = iter(ticks)
        monkeypatch.setattr(module, "pressure_files", lambda: files)
        monkeypatch.setattr(module, "mac_pressure_level", lambda: mac_level)
        return MemoryReader(mapped=lambda: mapped, clock=lambda: next(times))

    return make


def test_waiting_is_counted_since_the_last_reading(tmp_path: Path, reader: Any) -> None:
    host, group = tmp_path / "host", tmp_path / "group"
    waited(host, 7_000_000, 3_000_000)
    memory = reader(host, group, tmp_path / "gone", ticks=[0.0, 2.0, 4.0, 6.0, 6.0, 8.0])
    first = memory.read()
    assert (first.some_waiting, first.all_waiting) == (0.0, 0.0), "since the boot"
    waited(host, 7_500_000, 3_100_000)
    second = memory.read()
    assert (second.some_waiting, second.all_waiting) == pytest.approx((0.25, 0.05))
    waited(group, 1_000_000, 0)
    assert memory.read().some_waiting == 0.0, "of a group that was not known before"
    assert memory.read().some_waiting == 0.0, "no time has passed"
    waited(group, 3_000_000, 1_000_000)
    last = memory.read()
    assert (last.some_waiting, last.all_waiting) == (1.0, 0.5), "the most of all counts"


@pytest.mark.parametrize("text", ["", "garbage", "some total=x\nfull total=1\n", "some total=1\n"])
def test_a_kernel_that_does_not_count_waiting_is_no_error(tmp_path: Path, reader: Any, text: str) -> None:
    (tmp_path / "host").write_text(text)
    memory = reader(tmp_path / "host")
    assert memory.read().some_waiting == memory.read().some_waiting == 0.0


def test_mapped_weights_in_use_are_not_free(reader: Any) -> None:
    assert reader(mapped=300).read().free == 500
    assert reader(mapped=900).read().free == 0


@pytest.mark.parametrize(("level", "told"), [(0, (0, 0)), (1, (0, 0)), (2, (1, 0)), (4, (1, 1))])
def test_levels_of_macos(reader: Any, level: int, told: tuple[int, int]) -> None:
    reading = reader(mac_level=level).read()
    assert (reading.is_warned, reading.is_critical) == told


def test_the_real_sources_are_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    memory = MemoryReader()
    for reading in (memory.read(), memory.read()):
        assert 0 <= reading.free < reading.total
        assert reading.total > 2**26
        assert 0 <= reading.all_waiting <= reading.some_waiting
    assert mac_pressure_level() in ((1, 2, 4) if sys.platform == "darwin" else (0,))
    assert module.mapped_bytes() > 2**20 or sys.platform == "darwin"


FREEING = """
import random, psutil, numpy as np
from llamaslot.backend.host import new_kv
rss = lambda: psutil.Process().memory_info().rss / 2**20
big = np.ones(30 * 2**20, dtype=np.uint8)
del big  # raises the size from which on the C library maps blocks
chance, kept, others, before = random.Random(1), [], [], rss()
for _ in range(200):
    kept.append(new_kv(chance.randrange(2**17, 2**20)))
    kept[-1][:] = 1
    others.append(bytes(chance.randrange(600, 3000)))
held = rss() - before
chance.shuffle(kept)
del kept[20:]
print(held, rss() - before, sum(map(len, kept)) / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count resident memory differently")
def test_freed_segments_go_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", FREEING], capture_output=True, text=True, check=True)
    held, left, kept = map(float, done.stdout.split())
    assert held > 100
    assert left < kept + 15, "freed segments stay with the process"


def test_where_nothing_more_can_be_mapped_memory_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    fake = SimpleNamespace(mmap=refuse, MAP_PRIVATE=mmap.MAP_PRIVATE, MAP_ANONYMOUS=mmap.MAP_ANONYMOUS)
    monkeypatch.setattr(module, "mmap", fake)
    kv = new_kv(2**20)
    kv[:] = 3
    assert (kv.nbytes, kv.dtype) == (2**20, np.uint8)
