"""A soak as one plot of small multiples, which share the axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.soak.samples import ENGINE, MIB, PARENT, PROMPTS, Sample, engine_less_tier, memory_of
from bench.soak.verdict import WINDOW_S

_COLUMNS = 3


def draw(samples: Sequence[Sample], idle: Sequence[Sample], seconds: float, path: Path, title: str) -> None:
    """Write the plot; the window in which memory is judged is shaded, idle points are dots."""
    figure = Figure(figsize=(13, 9), layout="constrained")
    axes = [axis for row in figure.subplots(3, _COLUMNS, sharex=True) for axis in row]
    for axis, (name, process) in zip(axes, (("parent", PARENT), ("prompt worker", PROMPTS)), strict=False):
        _line(axis, memory_of(samples, process), f"{name}: memory, MiB", scale=MIB)
    _line(axes[2], engine_less_tier(samples), "engine less its RAM tier: memory, MiB", scale=MIB)
    for name in (PARENT, PROMPTS, ENGINE):
        _line(axes[3], _of_process(samples, name, "descriptors"), "descriptors; dots: when idle", label=name)
        dots = _of_process(idle, name, "descriptors")
        axes[3].plot([at / 60 for at, _ in dots], [value for _, value in dots], "k.", markersize=3)
        _line(axes[4], _of_process(samples, name, "threads"), "threads", label=name)
    _line(axes[5], _of(samples, "health_s"), "/health, ms", scale=1e-3)
    _line(axes[6], _of(samples, "gap_p50_s"), "time between stream events, ms", scale=1e-3, label="median")
    _line(axes[6], _of(samples, "gap_p99_s"), "time between stream events, ms", scale=1e-3, label="99%")
    _line(axes[7], _of(samples, "hit_rate"), "prompt tokens reused, share")
    _line(axes[8], _of(samples, "queued"), "queued requests, busy slots", label="queued")
    _line(axes[8], _of(samples, "busy_slots"), "queued requests, busy slots", label="busy")
    axes[7].set_ylim(0, 1)
    for axis in (axes[5], axes[6]):
        axis.set_yscale("log")
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    for axis in axes[:3]:
        axis.axvspan((seconds - min(WINDOW_S, seconds / 2)) / 60, seconds / 60, color="tab:green", alpha=0.08)
    for axis in axes[-_COLUMNS:]:
        axis.set_xlabel("minutes")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _line(
    axis: Any, points: Sequence[tuple[float, float]], title: str, *, scale: float = 1, label: str = ""
) -> None:
    axis.plot([at / 60 for at, _ in points], [value / scale for _, value in points], linewidth=0.9, label=label)
    axis.set_title(title, fontsize=9)


def _of(samples: Sequence[Sample], name: str) -> list[tuple[float, float]]:
    return [(sample["t"], sample[name]) for sample in samples if sample.get(name) is not None]


def _of_process(samples: Sequence[Sample], process: str, name: str) -> list[tuple[float, float]]:
    return [(s["t"], s["processes"][process][name]) for s in samples if process in s["processes"]]
