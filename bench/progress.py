"""Progress of long work: a bar on a terminal, lines anywhere else, so that a log shows that work goes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

from rich.progress import Progress

from bench.report import notes


class Advance(Protocol):
    """Report one finished step; a text beside it, and a corrected total where that has changed."""

    def __call__(self, text: str = "", *, total: int | None = None) -> None: ...


@contextmanager
def progress(title: str, total: int, *, interval_s: float = 0.0) -> Iterator[Advance]:
    """Show the progress of `total` steps; without a terminal a line per step, but at most one in `interval_s`."""
    if notes.is_terminal:
        with Progress(console=notes) as bar:
            task = bar.add_task(title, total=total)

            def move(text: str = "", *, total: int | None = None) -> None:
                bar.update(task, advance=1, total=total, description=f"{title} {text}".strip())

            yield move
        return

    started = last = monotonic()
    n_done, n_total = 0, total

    def write(text: str = "", *, total: int | None = None) -> None:
        nonlocal n_done, n_total, last
        n_done, n_total = n_done + 1, total or n_total
        now = monotonic()
        if n_done == n_total or now - last >= interval_s:
            last = now
            notes.print(f"{title} {n_done}/{n_total} {text or clock(now - started)}")

    yield write


class Estimate:
    """Expected seconds of runs: the mean of those measured, before that a typical time scaled to this machine."""

    def __init__(self, typical: Mapping[str, float]) -> None:
        self._typical = typical
        self._measured: dict[str, list[float]] = defaultdict(list)

    def add(self, workload: str, seconds: float) -> None:
        """Take the time of a finished run into account."""
        self._measured[workload].append(seconds)

    def of(self, runs: Mapping[str, int]) -> float:
        """Seconds that so many runs of each workload will take."""
        return sum(n * self._seconds(workload) for workload, n in runs.items())

    def _seconds(self, workload: str) -> float:
        if measured := self._measured.get(workload):
            return sum(measured) / len(measured)
        typical = sum(self._typical[name] * len(times) for name, times in self._measured.items())
        scale = sum(map(sum, self._measured.values())) / typical if typical else 1.0
        return self._typical[workload] * scale


def duration(seconds: float) -> str:
    """A time to come, rounded to minutes."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def clock(seconds: float) -> str:
    """A time that has passed, as minutes:seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
