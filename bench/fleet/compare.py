"""Computed prompt tokens and TTFTs of the same conversations on each setup, with each API."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from rich.table import Table

from bench.client import BenchmarkError
from bench.fleet.processes import counted
from bench.fleet.setups import MODEL, N_SYSTEMS, ONE, SETUPS, Settings, fleet, ttft_cells
from bench.fleet.traffic import Api, Attempt, Target, Traffic, new_session
from bench.report import new_table, notes
from bench.server import llamaslot, serving
from bench.tokens import Tokens

COMPUTED = "llamacpp:prompt_tokens_total"
DECODED = "llamaslot_decoded_tokens_total"
GOAL = 1.1
"""Computed prompt tokens of a fleet, divided by those of one large server."""


@dataclass(frozen=True)
class Result:
    """One setup with one API."""

    setup: str
    api: str
    n_requests: int
    n_prompt_computed: int
    """Sum over the servers' metrics."""
    ttft: list[float]
    seconds: float
    by_worker: dict[str, int]
    """Requests of each worker."""
    attempts: list[Attempt]


async def compare(settings: Settings, tokens: Tokens, folder: Path) -> list[Result]:
    """Measure every setup. Raises `BenchmarkError` if a request fails or counts disagree."""
    results: list[Result] = []
    for api in settings.apis:
        for setup in settings.setups:
            if api != "chat" and SETUPS[setup] == "roundrobin":
                continue
            notes.print(f"{setup}, {api}")
            if setup == ONE:
                results.append(await _one(settings, api, tokens, folder))
            else:
                async with fleet(settings, setup) as process:
                    run = _Run(settings, setup, api, tokens)
                    results.append(await run.measure(process.url, await process.workers()))
    return results


async def _one(settings: Settings, api: Api, tokens: Tokens, folder: Path) -> Result:
    with tempfile.TemporaryDirectory() as disk:
        flags = [*settings.server_flags(settings.n_workers), "--metrics", "--cache-disk", disk]
        async with serving(llamaslot(settings.model, *flags), log=folder / "fleet-server.log") as server:
            return await _Run(settings, ONE, api, tokens).measure(server.url, [server.url])


@dataclass(frozen=True)
class _Run:
    """One run of all conversations on one setup with one API."""

    settings: Settings
    setup: str
    api: Api
    tokens: Tokens

    async def measure(self, url: str, servers: Sequence[str]) -> Result:
        """Run all turns of all conversations; all requests must succeed, and the counts agree."""
        async with new_session() as session:
            traffic = Traffic(session, Target(url, MODEL), self.api, self.tokens, self.settings.lengths)
            chosen = traffic.conversations(
                self.settings.n_conversations, N_SYSTEMS, random.Random(self.settings.seed)
            )
            before = {name: await counted(servers, name) for name in (COMPUTED, DECODED)}
            began = monotonic()
            await traffic.run(chosen, self.settings.n_turns, str(self.settings.seed), self.settings.pause_s)
            seconds = monotonic() - began
        attempts = traffic.attempts
        if failed := [each for each in attempts if each.outcome != "ok"]:
            raise BenchmarkError(
                f"{self.setup}: {len(failed)} of {len(attempts)} requests failed: {failed[0].detail}"
            )
        n_computed = sum(each.n_computed for each in attempts)
        # A reply's last token is sampled and never computed.
        expected = {COMPUTED: n_computed, DECODED: n_computed + sum(each.n_output - 1 for each in attempts)}
        for name, n in expected.items():
            by_servers = await counted(servers, name) - before[name]
            if by_servers != n:
                raise BenchmarkError(
                    f"{self.setup}, {self.api}: by the replies {name} should be {n}, it is {by_servers}"
                )
        return Result(
            setup=self.setup,
            api=self.api,
            n_requests=len(attempts),
            n_prompt_computed=n_computed,
            ttft=[each.ttft for each in attempts],
            seconds=seconds,
            by_worker=dict(Counter(each.worker for each in attempts)),
            attempts=attempts,
        )


def table(results: Sequence[Result], settings: Settings) -> Table:
    """Return a table of computed tokens and TTFTs of each setup."""
    headings = ("API", "setup", "requests", "computed tokens", f"/ {ONE}", "goal", "TTFT mean", "p95", "by worker")
    result = new_table(_title(settings), headings, ("API", "setup"), _caption(settings))
    for each in results:
        whole = next((one.n_prompt_computed for one in results if one.setup == ONE and one.api == each.api), 0)
        ratio = each.n_prompt_computed / whole if whole else 0.0
        # The goal is that of a gateway that knows prefixes; the others are there to compare.
        goal = ("met" if ratio <= GOAL else "missed") if whole and SETUPS[each.setup] == "smg" else ""
        result.add_row(
            each.api,
            each.setup,
            str(each.n_requests),
            f"{each.n_prompt_computed:,}",
            f"{ratio:.2f}" if whole else "",
            goal,
            *ttft_cells(each.ttft),
            " ".join(str(n) for n in sorted(each.by_worker.values())),
        )
    return result


def _title(settings: Settings) -> str:
    return (
        f"{settings.n_conversations} conversations of {settings.n_turns} turns on {N_SYSTEMS} system prompts of "
        f"{settings.lengths.system} tokens: {settings.title}"
    )


def _caption(settings: Settings) -> str:
    workers = f"{settings.n_workers} workers of {settings.slots} slots, {settings.cells:,} cells"
    return (
        f"{workers} and {settings.worker_threads} threads; {ONE}: {settings.n_workers * settings.slots} slots, "
        f"{settings.n_workers * settings.cells:,} cells, {settings.threads} threads. "
        "All share the cores of one machine."
    )
