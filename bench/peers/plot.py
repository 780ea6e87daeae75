"""A plot of the published benchmark as SVG: the TTFT of each request of the agent workload, on several servers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from bench.peers.results import RunResult

WORKLOAD = "agent"
SERVERS = {"llamaslot": "#0b7a75", "llama-server": "#c1440e", "llama-server -kvu": "#b08a00"}
"""The servers that are shown, with colours that differ in lightness too."""
_WIDTH, _HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 40, 48
"""Margins around the axes; the names of the servers are in the right one."""
_REQUESTS = ("main", "sub-agent", "sub-agent", "title")
"""Requests of one of the workload's four rounds, in the order in which they are sent."""


def svg(results: Sequence[RunResult]) -> str:
    """Return the plot of the runs of `WORKLOAD`, medians over the pairs on a logarithmic axis in milliseconds."""
    # Not all take part in a quick try.
    lines = {server: line for server in SERVERS if (line := _medians(results, server))}
    values = [value for line in lines.values() for value in line]
    low, high = (10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values))))
    n = len(lines["llamaslot"])

    def x(i: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * i / (n - 1)

    def y(value: float) -> float:
        share = math.log(value / low) / math.log(high / low)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12" role="img">',
        "<title>Time to first token of each request of an agent with sub-agents</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">Time to first token (ms, logarithmic): an agent with 10,000 '
        "tokens of tools, and its sub-agents</text>",
    ]
    tick = low
    while tick <= high:
        parts.append(f'<path d="M{_LEFT} {y(tick):.1f}H{_WIDTH - _RIGHT}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:,.0f}</text>')
        tick *= 10
    for i in range(n):
        if i % len(_REQUESTS) == 0:
            parts.append(f'<text x="{x(i):.1f}" y="{_HEIGHT - 28}" text-anchor="middle">turn {i // 4 + 1}</text>')
    parts.append(
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}" fill="#555555">four requests a turn, in order: '
        f"{', '.join(_REQUESTS)}; medians of all pairs</text>"
    )
    labels = sorted((y(line[-1]), server) for server, line in lines.items())
    last = -math.inf
    for at, server in labels:
        # Names that would overlap are moved apart.
        last = max(at, last + 15)
        parts.append(
            f'<text x="{_WIDTH - _RIGHT + 10}" y="{last + 4:.1f}" fill="{SERVERS[server]}">{server}</text>'
        )
    for server, line in lines.items():
        points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{SERVERS[server]}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(i):.1f}" cy="{y(value):.1f}" r="2.5" fill="{SERVERS[server]}"/>'
            for i, value in enumerate(line)
        ]
    return "\n".join([*parts, "</svg>", ""])


def _medians(results: Sequence[RunResult], server: str) -> list[float]:
    """Return the median TTFT of each request over all runs of a server, in milliseconds."""
    runs = [each.ttft for each in results if (each.workload, each.server) == (WORKLOAD, server)]
    return [1e3 * statistics.median(each) for each in zip(*runs, strict=True)]
