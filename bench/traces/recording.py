"""Recorded agent sessions, in the JSON format of kv-cache-tester, and their plan: who asks when, after what.

A file has one session. Each of its requests has a time, the number of tokens of its reply, and a list of ids that
stand for the blocks of 64 tokens of its prompt. Ids are chained: an id stands for its block and all blocks before
it, so two prompts share as many blocks as their lists have ids in common. An entry of the type `subagent` has the
requests of a context of its own: sub-agents that stand side by side run at once, and the session goes on once they
have ended.

    {"id": "s1", "block_size": 64, "hash_id_scope": "local", "requests": [
      {"t": 0.0, "in": 200, "out": 90, "hash_ids": [1, 2, 3], "think_time": 0.0, "api_time": 2.5},
      {"t": 4.0, "type": "subagent", "agent_id": "a1", "requests": [{"t": 0.0, "in": 70, "out": 9, ...}]},
      {"t": 30.0, "in": 400, "out": 60, "hash_ids": [1, 2, 3, 4, 5, 6], "think_time": 1.5}]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from bench.client import BenchmarkError

MAX_DELAY_S = 60.0
"""Longer pauses count as this, so that a session is not over before another one that was left for the night."""


@dataclass(frozen=True)
class Recorded:
    """One request of a context."""

    delay_s: float
    """From the reply before it in its context, or the start of the context, to this request."""
    service_s: float
    """Time that the reply took when it was recorded; 0 where that is not known."""
    reply_blocks: float
    """Length of the reply."""
    blocks: tuple[int, ...]
    """Ids of the blocks of its prompt."""


@dataclass(frozen=True)
class Context:
    """The requests of an agent or a sub-agent in order, with its sub-agents where they were started."""

    name: str
    scope: str
    """Equal ids are equal blocks within this scope."""
    steps: tuple[Recorded | Context, ...]


@dataclass(frozen=True)
class Planned:
    """A request of the plan."""

    at_s: float
    """When it would come if every reply took as long as it did when it was recorded."""
    context: str
    scope: str
    request: Recorded
    previous: int | None
    """Number of the request before it in its context."""
    after: tuple[int, ...]
    """Numbers of the requests that must be answered before its delay begins."""

    def renumbered(self, number: Mapping[int, int]) -> Planned:
        """Return the same with other numbers for other requests."""
        previous = number[self.previous] if self.previous is not None else None
        return replace(self, previous=previous, after=tuple(sorted(number[i] for i in self.after)))


class _Entry(msgspec.Struct):
    """A request, or a sub-agent with its `requests`."""

    t: float = 0.0
    type: str = ""
    out: int = 0
    hash_ids: tuple[int, ...] = ()
    think_time: float | None = None
    api_time: float | None = None
    agent_id: str = ""
    requests: list[Any] | None = None


class _Trace(msgspec.Struct):
    requests: list[Any]
    id: str = ""
    block_size: int = 64


def read(path: Path) -> Context:
    """Return the session in a file; raises `BenchmarkError`."""
    try:
        trace = msgspec.json.decode(path.read_bytes(), type=_Trace)
        name = trace.id or path.stem
        return _context(name, name, trace.requests, max(trace.block_size, 1))
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BenchmarkError(f"{path} is not a recorded session: {error}") from error


def _context(name: str, scope: str, entries: Sequence[Any], block_size: int) -> Context:
    steps: list[Recorded | Context] = []
    before: _Entry | None = None
    for number, raw in enumerate(entries):
        entry = msgspec.convert(raw, _Entry)
        if entry.type == "subagent":
            agent = f"{name}/{entry.agent_id or number}"
            steps.append(_context(agent, scope, entry.requests or (), block_size))
            continue
        delay = entry.think_time
        if delay is None:
            delay = entry.t - before.t - (before.api_time or 0.0) if before is not None else 0.0
        steps.append(
            Recorded(
                delay_s=min(max(delay, 0.0), MAX_DELAY_S),
                service_s=min(max(entry.api_time or 0.0, 0.0), MAX_DELAY_S),
                reply_blocks=max(entry.out, 1) / block_size,
                blocks=entry.hash_ids,
            )
        )
        before = entry
    return Context(name, scope, tuple(steps))


def fitting(context: Context, fits: Callable[[Recorded], bool]) -> Context:
    """Return a context up to its first request that does not fit."""
    steps: list[Recorded | Context] = []
    for step in context.steps:
        if isinstance(step, Context):
            steps.append(fitting(step, fits))
        elif fits(step):
            steps.append(step)
        else:
            break
    return Context(context.name, context.scope, tuple(steps))


def requests_of(context: Context) -> Iterator[Recorded]:
    """Yield the requests of a context and of its sub-agents."""
    for step in context.steps:
        if isinstance(step, Context):
            yield from requests_of(step)
        else:
            yield step


def plan(sessions: Sequence[tuple[float, Context]], n_requests: int) -> list[Planned]:
    """Plan the first `n_requests` requests of sessions, each with the time at which it starts.

    They are in the order of their times, so each comes after those that it waits for.
    """
    planned: list[Planned] = []
    for start, session in sessions:
        _add(planned, session, start, ())
    order = sorted(range(len(planned)), key=lambda i: (planned[i].at_s, i))[:n_requests]
    number = {old: new for new, old in enumerate(order)}
    return [planned[i].renumbered(number) for i in order]


def _add(planned: list[Planned], context: Context, start: float, after: tuple[int, ...]) -> tuple[float, list[int]]:
    """Add the requests of a context that starts `after` some; returns its end, and what is last in it."""
    at, previous, waits_for = start, None, list(after)
    ends = at
    lasts: list[int] = []  # of the sub-agents that the next request waits for
    for step in context.steps:
        if isinstance(step, Context):
            end, last = _add(planned, step, at, tuple(waits_for))
            ends, lasts = max(ends, end), [*lasts, *last]
            continue
        at = max(at, ends)
        waits_for = lasts or waits_for
        planned.append(Planned(at + step.delay_s, context.name, context.scope, step, previous, tuple(waits_for)))
        previous = len(planned) - 1
        waits_for, lasts = [previous], []
        at = ends = at + step.delay_s + step.service_s
    return max(at, ends), lasts or (waits_for if previous is not None else [])
