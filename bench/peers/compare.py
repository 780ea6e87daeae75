"""llamaslot beside the servers that a user would run instead: same workloads, machine, model and libraries.

Every llama-server is built to run the very library files that llamaslot loads.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.client import BenchmarkError
from bench.peers import tables
from bench.peers.goals import Ratio, Selection, compared
from bench.peers.plots import draw
from bench.peers.results import RunResult
from bench.peers.runner import ENGINE, N_SLOTS, EnginePair, Runner
from bench.peers.servers import SERVERS, CommonSettings
from bench.peers.workloads import EXTRA, MANY, WORKLOADS
from bench.report import console, machine, notes, write_json
from bench.tokens import Tokens

ENGINE_GOAL = 0.97
NAMES = (*(each.name for each in WORKLOADS + EXTRA), ENGINE)


def run(
    *,
    model: Path,
    title: str,
    repeats: int | None,
    scale: float,
    threads: int,
    only: Sequence[str],
    against: Sequence[str],
    folder: Path,
    server_flags: Sequence[str],
    time_limit_s: float = math.inf,
) -> None:
    """Measure, print a table for each workload and the ratios; write `peers.json`, `peers.md` and the plots."""
    facts = machine()
    notes.print(f"all run the same libraries: {facts['llama_system_info']}")
    workloads = [each for each in WORKLOADS + EXTRA if each.name in only] if only else list(WORKLOADS)
    servers = [each for each in SERVERS if not against or each.name in against]
    common = CommonSettings(model, N_SLOTS, threads, 0, tuple(server_flags))
    runner = Runner(Tokens(model), common, scale, folder)
    n_pairs = {each.name: repeats or each.n_pairs for each in workloads}
    results: list[RunResult] = []
    if workloads:
        results = asyncio.run(runner.measure(n_pairs, workloads, Selection(servers), time_limit_s))
    engine = runner.measure_engine(repeats or MANY) if not only or ENGINE in only else []
    ratios = [ratio for each in workloads for ratio in compared(each, results)] + engine_ratio(engine)
    for name in dict.fromkeys(each.workload for each in results):
        console.print(tables.table(name, results, title))
    console.print(tables.goals(ratios))
    settings = {"model": title, "slots": N_SLOTS, "threads": threads, "repeats": repeats, "scale": scale}
    settings |= {"flags": " ".join(server_flags), "seed": runner.seed}
    content: dict[str, Any] = {"benchmark": "peers", "settings": settings, "machine": facts}
    content |= {"failures": runner.failures}
    content |= {"ratios": [asdict(each) | {"verdict": each.verdict} for each in ratios]}
    content |= {"runs": [asdict(each) for each in results], "engine": [asdict(each) for each in engine]}
    write_json(folder / "peers.json", content)
    (folder / "peers.md").write_text(tables.markdown(results, ratios, title))
    draw(results, folder, f"{title}, {facts['processor']}")
    if runner.own_failures:
        raise BenchmarkError(runner.own_failures)


def engine_ratio(pairs: Sequence[EnginePair]) -> list[Ratio]:
    """The row of the engine alone in the table of goals, if it was measured."""
    shares = [each.engine / each.batched_bench for each in pairs]
    of = (ENGINE, "decode 8", "llama-batched-bench")
    return [Ratio.of(*of, pairs=shares, goal=ENGINE_GOAL, n_needed=MANY, at_least=True)] if shares else []
