"""Requests that fail when a worker is killed, and during a rolling restart."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np
from rich.table import Table

from bench.client import BenchmarkError
from bench.fleet.processes import FleetProcess
from bench.fleet.setups import MODEL, N_SYSTEMS, Settings, fleet, median_cell, ttft_cells
from bench.fleet.traffic import Attempt, Conversation, Target, Traffic, new_session
from bench.report import new_table, notes
from bench.tokens import Tokens

FIRST_TURNS = 3
"""Turns of all conversations before a worker is killed."""
WRITE_BACK_S = 4.0
"""Time to write or upload what was computed: the partial segment at the end of a conversation waits 2 s."""
TIMEOUT_S = 600.0
"""A request that has not ended then is counted as hung."""
OUTCOMES = ("ok", "broken", "refused", "unreachable")


@dataclass(frozen=True)
class Killed:
    """One run with a worker killed; times to the first token in seconds, measured one request at a time."""

    setup: str
    victim: str
    n_in_flight: int
    """Streams that the worker had begun when it was killed."""
    outcomes: dict[str, int]
    """Attempts during and after the kill by how they ended."""
    n_turns: int
    n_turns_lost: int
    """Turns that failed even when they were tried again."""
    moved_to_victim: int
    """Requests that were sent to the killed worker after its end; none should be."""
    moved: list[float]
    """First turn on another worker."""
    moved_computed: list[int]
    stayed: list[float]
    """A turn of a conversation whose worker lives."""
    cold: list[float]
    """A conversation of the same length whose text is new."""
    attempts: list[Attempt]


@dataclass(frozen=True)
class Rolled:
    """One rolling restart under traffic."""

    setup: str
    seconds: float
    outcomes: dict[str, int]
    ttft: list[float]
    n_prompt_computed: int
    attempts: list[Attempt]


async def kill(settings: Settings, setup: str, tokens: Tokens) -> Killed:
    """Kill the busiest worker while half of the conversations stream; the others go on afterwards, one by one."""
    notes.print(f"{setup}: a worker is killed")
    words = random.Random(settings.seed)
    async with fleet(settings, setup, "--no-restart") as process, new_session() as session:
        traffic = Traffic(session, Target(process.url, MODEL), "chat", tokens, settings.lengths)
        chosen = traffic.conversations(settings.n_conversations, N_SYSTEMS, words)
        await traffic.run(chosen, FIRST_TURNS, str(settings.seed), settings.pause_s)
        await asyncio.sleep(WRITE_BACK_S)
        victim = Counter(each.worker for each in chosen).most_common(1)[0][0]
        on_victim = [each for each in chosen if each.worker == victim]
        others = [each for each in chosen if each.worker != victim]
        # Half of each: those that stream when it happens, and those that are between two turns.
        busy = on_victim[::2] + others[::2]
        n_before = len(traffic.attempts)
        n_in_flight = await _with_kill(settings, process, traffic, busy, victim)
        during = traffic.attempts[n_before:]
        n_before = len(traffic.attempts)
        moved, computed, cold = await _one_by_one(settings, traffic, on_victim[1::2], words)
        stayed, _, _ = await _one_by_one(settings, traffic, others[1::2][: len(moved)], words, with_cold=False)
        after = traffic.attempts[n_before:]
    n_turns = len({(each.conversation, each.turn) for each in during})
    n_done = len({(each.conversation, each.turn) for each in during if each.outcome == "ok"})
    return Killed(
        setup=setup,
        victim=victim,
        n_in_flight=n_in_flight,
        outcomes=_outcomes([*during, *after]),
        n_turns=n_turns,
        n_turns_lost=n_turns - n_done,
        moved_to_victim=sum(each.worker == victim for each in after),
        moved=moved,
        moved_computed=computed,
        stayed=stayed,
        cold=cold,
        attempts=traffic.attempts,
    )


async def _with_kill(
    settings: Settings, process: FleetProcess, traffic: Traffic, busy: Sequence[Conversation], victim: str
) -> int:
    """Take the remaining turns of conversations; kill the worker once it streams. Returns how many it streamed."""
    streaming: set[int] = set()
    has_begun = asyncio.Event()

    def on_text(one: Conversation, worker: str) -> None:
        if worker == victim:
            streaming.add(one.number)
            has_begun.set()

    traffic.on_text = on_text
    n_turns = max(1, settings.n_turns - FIRST_TURNS)
    # Without pauses, so that several requests are under way when it happens.
    talking = asyncio.create_task(traffic.run(busy, n_turns, f"{settings.seed} busy", 0.0))
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.wait(
            [talking, beginning := asyncio.create_task(has_begun.wait())], return_when="FIRST_COMPLETED"
        )
        beginning.cancel()
        if not has_begun.is_set():
            raise BenchmarkError("the worker that was to be killed got no request")
        await process.kill(victim)
        n_streaming = len(streaming)
        await talking
    traffic.on_text = lambda _one, _worker: None
    return n_streaming


async def _one_by_one(
    settings: Settings,
    traffic: Traffic,
    chosen: Sequence[Conversation],
    words: random.Random,
    *,
    with_cold: bool = True,
) -> tuple[list[float], list[int], list[float]]:
    """Take one turn of each conversation, and beside each one of the same length with new text.

    Returns times to the first token and computed tokens of the turns, and times of those with new text.
    """
    ttft: list[float] = []
    computed: list[int] = []
    cold: list[float] = []
    for each in chosen:
        if not await traffic.turn(each, words):
            raise BenchmarkError(f"a conversation could not go on: {traffic.attempts[-1].detail}")
        ttft.append(traffic.attempts[-1].ttft)
        computed.append(traffic.attempts[-1].n_computed)
        if not with_cold:
            continue
        [new] = traffic.conversations(1, 1, words, start=10_000 + each.number)
        new.messages = [
            {"role": message["role"], "content": traffic.draw_like(message["content"], words)}
            for message in each.messages[:-2]
        ]
        if not await traffic.turn(new, words):
            raise BenchmarkError(f"a new conversation failed: {traffic.attempts[-1].detail}")
        if (n_computed := traffic.attempts[-1].n_computed) < settings.lengths.system:
            raise BenchmarkError(f"a new conversation computed only {n_computed:,} tokens: its text was known")
        cold.append(traffic.attempts[-1].ttft)
    return ttft, computed, cold


async def rolling(settings: Settings, setup: str, tokens: Tokens) -> Rolled:
    """Restart all workers one after the other while conversations go on; new ones follow those that are over."""
    notes.print(f"{setup}: a rolling restart")
    words = random.Random(settings.seed)
    async with fleet(settings, setup) as process, new_session() as session:
        traffic = Traffic(session, Target(process.url, MODEL), "chat", tokens, settings.lengths)
        is_over = asyncio.Event()

        async def talk(number: int) -> None:
            chosen = traffic.conversations(1, 1, random.Random(f"{settings.seed} {number % N_SYSTEMS}"), number)
            for repeat in range(1000):
                await traffic.run(chosen, settings.n_turns, f"{settings.seed} {repeat}", settings.pause_s)
                if is_over.is_set():
                    return
                system = chosen[0].system
                chosen = [Conversation(number, f"{number}-{repeat}-{words.getrandbits(32):x}", system)]

        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            for number in range(settings.n_conversations):
                group.create_task(talk(number))
            await asyncio.sleep(2 * settings.pause_s)
            began = monotonic()
            await process.command("rolling-restart")
            seconds = monotonic() - began
            is_over.set()
    attempts = traffic.attempts
    return Rolled(
        setup=setup,
        seconds=seconds,
        outcomes=_outcomes(attempts),
        ttft=[each.ttft for each in attempts if each.outcome == "ok"],
        n_prompt_computed=sum(each.n_computed for each in attempts),
        attempts=attempts,
    )


def _outcomes(attempts: Sequence[Attempt]) -> dict[str, int]:
    counts = Counter(each.outcome for each in attempts)
    return {name: counts[name] for name in OUTCOMES}


def kill_table(results: Sequence[Killed], settings: Settings) -> Table:
    """Return a table of outcomes, and of TTFTs on and off the killed worker."""
    headings = ("setup", "had text", *OUTCOMES, "turns lost", "TTFT stayed", "moved", "cold", "moved / cold")
    result = new_table(f"A worker killed (kill -9) while it streams: {settings.title}", headings, ("setup",))
    for each in results:
        ratio = np.median(each.moved) / np.median(each.cold) if each.moved and each.cold else None
        result.add_row(
            each.setup,
            str(each.n_in_flight),
            *(str(each.outcomes[name]) for name in OUTCOMES),
            f"{each.n_turns_lost} of {each.n_turns}",
            *map(median_cell, (each.stayed, each.moved, each.cold)),
            f"{ratio:.2f}" if ratio is not None else "",
        )
    return result


def rolling_table(results: Sequence[Rolled], settings: Settings) -> Table:
    """Return a table of outcomes and TTFTs during rolling restarts."""
    headings = ("setup", "took", *OUTCOMES, "TTFT mean", "p95")
    result = new_table(f"A rolling restart of {settings.n_workers} workers: {settings.title}", headings, ("setup",))
    for each in results:
        result.add_row(
            each.setup,
            f"{each.seconds:.0f} s",
            *(str(each.outcomes[name]) for name in OUTCOMES),
            *ttft_cells(each.ttft),
        )
    return result
