"""Run workloads on servers, each run on a server process of its own, and collect the results.

Repeats go forwards and backwards through the servers (A B B A), so that slow changes of the machine's speed affect
all of them alike. Figures are compared between runs of the same repeat, which also have the same text.
"""

from __future__ import annotations

import math
import random
import secrets
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Protocol

import numpy as np

from bench.client import BenchmarkError
from bench.decode import Commands
from bench.peers.results import RunResult
from bench.peers.servers import OWN, CommonSettings, ServerSetup
from bench.peers.workloads import REAL, WORKLOADS, Workload, WorkloadRun
from bench.progress import Estimate, duration, progress
from bench.report import decode_rate, notes
from bench.server import serving
from bench.tokens import Tokens, fewest

N_SLOTS = 8
ENGINE = "engine alone"
"""The row without a server: the engine as a library beside llama-batched-bench."""
ENGINE_SECONDS = 5.0
"""Typical time of one of its runs."""


class Servers(Protocol):
    """Chooses the servers of each pair, such as `goals.Selection`."""

    def of(self, workload: Workload, repeat: int, results: Sequence[RunResult]) -> list[ServerSetup]: ...

    def expected(self, workload: Workload, repeat: int) -> int: ...


@dataclass(frozen=True)
class EnginePair:
    """Tokens per second of 8 streams, measured one after the other."""

    engine: float
    batched_bench: float


class Runner:
    """Runs workloads; `failures` has the reason for each run that failed, by server and workload."""

    def __init__(
        self, tokens: Tokens, common: CommonSettings, scale: float, folder: Path, seed: str | None = None
    ) -> None:
        self._tokens = tokens
        self._common = common
        self._scale = scale
        self._folder = folder
        self.seed = seed or secrets.token_hex(8)
        self.failures: dict[str, str] = {}

    async def measure(
        self,
        n_pairs: Mapping[str, int],
        workloads: Sequence[Workload],
        servers: Servers,
        time_limit_s: float = math.inf,
    ) -> list[RunResult]:
        """Run `n_pairs` repeats of each workload; say beforehand how long that will take.

        A pair that would not end within the time limit is not begun.
        """
        results: list[RunResult] = []
        pairs = [
            (repeat, workload)
            for repeat in range(max(n_pairs.values()))
            for workload in workloads
            if repeat < n_pairs[workload.name]
        ]
        estimate = Estimate({each.name: each.seconds for each in workloads})
        planned = Counter({each.name: 0 for each in workloads})
        for repeat, workload in pairs:
            planned[workload.name] += servers.expected(workload, repeat)
        took = duration(estimate.of(planned))
        for server in servers.of(workloads[0], 0, ()):
            server.command(self._common)  # Builds llama-server where that was not done yet: no estimate has that.
        notes.print(f"{planned.total()} runs of {len(workloads)} workloads: about {took} (on 2 cores)")
        n_done, began = 0, monotonic()
        with progress("run", planned.total()) as advance:
            for repeat, workload in pairs:
                chosen = servers.of(workload, repeat, results)
                if monotonic() - began + estimate.of({workload.name: len(chosen)}) > time_limit_s:
                    notes.print(f"stopped before pair {repeat + 1} of {workload.name}: the time limit is near")
                    break
                planned[workload.name] += len(chosen) - servers.expected(workload, repeat)
                for server in chosen:
                    started = monotonic()
                    results += await self._try(workload, server, repeat)
                    seconds = monotonic() - started
                    estimate.add(workload.name, seconds)
                    planned[workload.name] -= 1
                    n_done += 1
                    text = f"{workload.name}, {server.name}, pair {repeat + 1} of {n_pairs[workload.name]}"
                    left = duration(estimate.of(planned))
                    advance(f"{text}: {seconds:.1f} s; about {left} left", total=n_done + planned.total())
        return results

    def measure_engine(self, n_pairs: int) -> list[EnginePair]:
        """Run the engine alone and llama-batched-bench in turn (A B B A)."""
        pairs: list[EnginePair] = []
        common = self._common
        commands = Commands.of(common.model, tokens=128, threads=common.n_threads, more=common.more)
        sides = {"engine": commands.engine_rate, "batched_bench": commands.peer_rate}
        notes.print(f"{n_pairs} pairs of {ENGINE}: about {duration(2 * n_pairs * ENGINE_SECONDS)}")
        with progress(f"{ENGINE}, pair", n_pairs) as advance:
            for i in range(n_pairs):
                order = list(sides) if i % 2 == 0 else list(sides)[::-1]
                try:
                    pairs.append(EnginePair(**{side: sides[side](N_SLOTS) for side in order}))
                except BenchmarkError as error:
                    self._fail(f"{OWN}, {ENGINE}", error)
                    break
                advance()
        return pairs

    @property
    def own_failures(self) -> str:
        """The failures of llamaslot at its defaults, empty for none.

        Servers with other flags fail where a workload does not fit them, such as a long prompt in a divided pool.
        """
        own = {f"{OWN}, {name}" for name in (ENGINE, *(each.name for each in (*WORKLOADS, *REAL)))}
        return "; ".join(f"{name}: {reason}" for name, reason in self.failures.items() if name in own)

    async def _try(self, workload: Workload, server: ServerSetup, repeat: int) -> list[RunResult]:
        try:
            return [await self.run(workload, server, repeat)]
        except BenchmarkError as error:
            self._fail(f"{server.name}, {workload.name}", error)
            return []

    def _fail(self, what: str, error: BenchmarkError) -> None:
        # Without the path of its log.
        self.failures[what] = str(error).splitlines()[0].partition("; the end of")[0]
        notes.print(f"{what}: {error}")

    async def run(self, workload: Workload, server: ServerSetup, repeat: int) -> RunResult:
        """Run a workload on a new server process; all servers get the same text in the same repeat."""
        common = replace(self._common, n_slots=workload.n_slots, n_ctx=workload.n_ctx(self._scale))
        words = random.Random(f"{self.seed} {repeat} {workload.name}")
        with tempfile.TemporaryDirectory() as folder:
            command = server.command(common, workload.flags.get(server.kind, ()), Path(folder))
            async with serving(command, log=self._folder / "peers-server.log") as process:
                ready = process.ready_s
                run = WorkloadRun(process, self._tokens, words, self._scale, server.saves_slots)
                await run.ask({"role": "user", "content": run.text(8)}, n_reply=4, measured=False)
                await workload.script(run)
        return self._result(workload, server, repeat, run, ready)

    def _result(
        self, workload: Workload, server: ServerSetup, repeat: int, run: WorkloadRun, ready: float
    ) -> RunResult:
        sent = run.requests
        measured = [each for each in sent if each.measured]
        answers = [each.answer for each in measured]
        requests = [(self._tokens.prompt(each.messages), self._tokens.of(each.answer.text)) for each in sent]
        for each, (prompt, _) in zip(sent, requests, strict=True):
            if each.answer.prompt_tokens not in (0, len(prompt)):
                raise BenchmarkError(
                    f"a prompt of {len(prompt)} tokens has {each.answer.prompt_tokens} by the server's count"
                )
        counts = [int(each.answer.timings["prompt_n"]) for each in sent if "prompt_n" in each.answer.timings]
        gaps = [gap for answer in answers for gap in answer.gaps]
        n_output = sum(each.n_reply for each in measured)
        return RunResult(
            workload=workload.name,
            server=server.name,
            repeat=repeat,
            ttft=[answer.ttft for answer in answers],
            gap_p50=float(np.percentile(gaps, 50)),
            gap_p99=float(np.percentile(gaps, 99)),
            wall=max(answer.ended for answer in answers) - min(answer.started for answer in answers),
            decode_rate=_rate_or_none([answer.arrivals for answer in answers], n_output),
            n_output=n_output,
            n_prompt=sum(len(prompt) for prompt, _ in requests),
            n_computed=sum(counts) if len(counts) == len(sent) else None,
            n_fewest=fewest(requests),
            ready=ready,
        )


def tokens_rate(streams: Sequence[Sequence[float]], n_tokens: int) -> float:
    """Tokens per second while all streams run; all chunks count alike. Raises `BenchmarkError` if they never do."""
    return decode_rate(streams) * n_tokens / sum(map(len, streams))


def _rate_or_none(streams: Sequence[Sequence[float]], n_tokens: int) -> float:
    """The same, but 0 where streams never run side by side."""
    try:
        return tokens_rate(streams, n_tokens)
    except BenchmarkError:
        return 0.0
