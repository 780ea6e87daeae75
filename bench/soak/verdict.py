"""The verdict on a soak, from its samples alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.soak.samples import (
    ENGINE,
    MIB,
    PARENT,
    PROMPTS,
    Sample,
    engine_less_tier,
    memory_of,
    parent_less_records,
)

FULL_S = 3600
"""Seconds of a soak whose memory is judged: before, allocators and caches still fill."""
WINDOW_S = 1800
"""The last seconds, in which memory must hardly grow; half of a shorter soak."""
PARENT_GROWTH_MIB, ENGINE_GROWTH_MIB = 10, 20
MAX_HEALTH_S = 0.5
"""As long as a request may hold up the server."""
MIN_IDLE_POINTS = 4
"""Before descriptors are judged."""


@dataclass(frozen=True)
class Row:
    """A figure with its limit; `met` is None where it is not judged."""

    name: str
    figure: str
    limit: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """One word, or the reason why there is none."""
        return {True: "met", False: "missed", None: "not judged"}[self.met]


def growth(points: Sequence[tuple[float, float]], seconds: float) -> float | None:
    """Return how much a value grew in a soak's last `WINDOW_S`; None without points in all of that time.

    The medians of the first and last tenth of the window are compared: single peaks do not count.
    """
    window = min(WINDOW_S, seconds / 2)
    start = seconds - window
    first = [value for at, value in points if start <= at < start + window / 10]
    last = [value for at, value in points if at >= seconds - window / 10]
    return statistics.median(last) - statistics.median(first) if first and last else None


def verdict(samples: Sequence[Sample], idle: Sequence[Sample], seconds: float, unexpected: int) -> list[Row]:
    """Compare a soak with its limits; `idle` are the samples of its idle points."""
    restarts = max(sample["restarts"] for sample in samples)
    is_judged = seconds >= FULL_S and not restarts
    last_idle = [sample for sample in idle if sample["t"] >= seconds - min(WINDOW_S, seconds / 2)]
    stuck = sum(sample["busy_slots"] + sample["pinned_cells"] > 0 for sample in idle)
    slowest = _percentile([sample["health_s"] for sample in samples], 0.99)
    corrupt = max((sample.get("corrupt_files", 0) for sample in samples), default=0)
    return [
        _memory("parent", growth(memory_of(samples, PARENT), seconds), None, is_judged),
        _memory(
            "parent less its records", growth(parent_less_records(samples), seconds), PARENT_GROWTH_MIB, is_judged
        ),
        _memory(
            "engine less its RAM tier", growth(engine_less_tier(samples), seconds), ENGINE_GROWTH_MIB, is_judged
        ),
        _memory("prompt worker", growth(memory_of(samples, PROMPTS), seconds), None, is_judged),
        *(_descriptors(name, last_idle) for name in (PARENT, PROMPTS, ENGINE)),
        Row(
            "idle points with a busy slot or pinned cells",
            f"{stuck} of {len(idle)}",
            "0",
            not stuck if idle else None,
        ),
        Row("/health, 99%", f"{1e3 * slowest:.0f} ms", f"{1e3 * MAX_HEALTH_S:.0f} ms", slowest <= MAX_HEALTH_S),
        Row("unexpected replies", str(unexpected), "0", not unexpected),
        Row("corrupt files", str(corrupt), "0", not corrupt),
        Row("restarts", f"{restarts:.0f}", "", None),
    ]


def _memory(name: str, grown: float | None, limit: int | None, is_judged: bool) -> Row:
    if grown is None:
        return Row(f"growth of the {name}", "?", "", None)
    met = grown < limit * MIB if limit is not None and is_judged else None
    return Row(f"growth of the {name}", f"{grown / MIB:+.1f} MiB", f"< {limit} MiB" if limit else "", met)


def _descriptors(name: str, idle: Sequence[Sample]) -> Row:
    """Descriptors at idle points: medians of both halves, since a connection of a poll may be open."""
    counts = [sample["processes"][name]["descriptors"] for sample in idle if name in sample["processes"]]
    title, limit = f"descriptors of the {name} when idle", "no growth"
    if len(counts) < MIN_IDLE_POINTS:
        return Row(title, "?", limit, None)
    half = len(counts) // 2
    first, last = statistics.median(counts[:half]), statistics.median(counts[half:])
    return Row(title, f"{first:g} to {last:g}", limit, last <= first)


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
