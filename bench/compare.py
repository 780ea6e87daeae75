"""llamaslot beside what a user would run instead: the same workloads, machine, model and libraries, in turn.

Each contender plays each workload on a server of its own, started for it; repeats go forwards and backwards through
the contenders (A B B A), so that a change of the machine's mood meets all. What is compared is paired within a
repeat. Every llama-server is built to run the very library files that llamaslot loads.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench import tables
from bench.client import BenchmarkError
from bench.contenders import CONTENDERS, OWN, Contender, Load
from bench.decode import Commands
from bench.figures import Run
from bench.goals import Ratio, compared, players
from bench.memory import Memory, weigh
from bench.plots import draw
from bench.report import console, decode_rate, machine, notes, write_json
from bench.server import serving
from bench.tokens import Tokens, fewest
from bench.workloads import MANY, WORKLOADS, Play, Workload

N_SLOTS = 8
ENGINE, ENGINE_GOAL = "engine alone", 0.95
"""The row that nobody plays: the engine as a library against llama-batched-bench, and its goal."""
NAMES = (*(each.name for each in WORKLOADS), ENGINE)


@dataclass(frozen=True)
class EnginePair:
    """Tokens per second of 8 streams, measured one after the other."""

    engine: float
    batched_bench: float


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
) -> None:
    """Measure, print a table for each workload and the ratios; write `peers.json`, `peers.md` and the plots."""
    facts = machine()
    notes.print(f"all run the same libraries: {facts['llama_system_info']}")
    workloads = [each for each in WORKLOADS if not only or each.name in only]
    contenders = [each for each in CONTENDERS if not against or each.name in against]
    bench = Bench(Tokens(model), Load(model, N_SLOTS, threads, 0, tuple(server_flags)), scale, folder)
    runs = asyncio.run(bench.measure(workloads, contenders, repeats)) if workloads else []
    engine = bench.measure_engine(repeats or MANY) if not only or ENGINE in only else []
    ratios = [ratio for each in workloads for ratio in compared(each, runs)] + engine_ratio(engine)
    for name in dict.fromkeys(each.workload for each in runs):
        console.print(tables.table(name, runs, title))
    if any(each.memory for each in runs):
        console.print(tables.memory(runs))
    console.print(tables.goals(ratios))
    settings = {"model": title, "slots": N_SLOTS, "threads": threads, "repeats": repeats, "scale": scale}
    settings |= {"flags": " ".join(server_flags), "seed": bench.seed}
    content: dict[str, Any] = {"benchmark": "peers", "settings": settings, "machine": facts, "cannot": bench.cannot}
    content |= {"ratios": [asdict(each) | {"verdict": each.verdict} for each in ratios]}
    content |= {"runs": [asdict(each) for each in runs], "engine": [asdict(each) for each in engine]}
    write_json(folder / "peers.json", content)
    (folder / "peers.md").write_text(tables.markdown(runs, ratios, title))
    draw(runs, folder, f"{title}, {facts['processor']}")
    if failed := [f"{name}: {reason}" for name, reason in bench.cannot.items() if name.startswith(OWN)]:
        raise BenchmarkError("; ".join(failed))


def engine_ratio(pairs: Sequence[EnginePair]) -> list[Ratio]:
    """Its row in the table of goals, where there are any."""
    shares = [each.engine / each.batched_bench for each in pairs]
    of = (ENGINE, "decode 8", "llama-batched-bench")
    return [Ratio.of(*of, pairs=shares, goal=ENGINE_GOAL, n_needed=MANY, at_least=True)] if shares else []


class Bench:
    """Plays workloads; `cannot` keeps what a contender refused."""

    def __init__(self, tokens: Tokens, load: Load, scale: float, folder: Path) -> None:
        self._tokens = tokens
        self._load = load
        self._scale = scale
        self._folder = folder
        self.seed = secrets.token_hex(8)
        self.cannot: dict[str, str] = {}

    async def measure(
        self, workloads: Sequence[Workload], contenders: Sequence[Contender], repeats: int | None = None
    ) -> list[Run]:
        """So many repeats of each workload, or as many as it needs."""
        runs: list[Run] = []
        needed = {each.name: repeats or each.n_pairs for each in workloads}
        with Progress(console=notes) as progress:
            task = progress.add_task("comparing", total=sum(needed.values()))
            for repeat in range(max(needed.values())):
                for workload in [each for each in workloads if repeat < needed[each.name]]:
                    for contender in players(workload, contenders, repeat, runs):
                        progress.update(task, description=f"{workload.name}: {contender.name}")
                        runs += await self._tried(workload, contender, repeat)
                    progress.advance(task)
        return runs

    def measure_engine(self, n_pairs: int) -> list[EnginePair]:
        """The engine alone and llama-batched-bench in turn (A B B A)."""
        pairs: list[EnginePair] = []
        load = self._load
        commands = Commands.of(load.model, tokens=128, threads=load.n_threads, more=load.more)
        sides = {"engine": commands.engine_rate, "batched_bench": commands.peer_rate}
        with Progress(console=notes) as progress:
            for i in progress.track(range(n_pairs), description=ENGINE):
                order = list(sides) if i % 2 == 0 else list(sides)[::-1]
                try:
                    pairs.append(EnginePair(**{side: sides[side](N_SLOTS) for side in order}))
                except BenchmarkError as error:
                    self._note(f"{OWN}, {ENGINE}", error)
                    break
        return pairs

    async def _tried(self, workload: Workload, contender: Contender, repeat: int) -> list[Run]:
        try:
            return [await self.play(workload, contender, repeat)]
        except BenchmarkError as error:
            self._note(f"{contender.name}, {workload.name}", error)
            return []

    def _note(self, what: str, error: BenchmarkError) -> None:
        self.cannot[what] = str(error).splitlines()[0]
        notes.print(f"{what}: {error}")

    async def play(self, workload: Workload, contender: Contender, repeat: int) -> Run:
        """One play on a server of its own, with words of its own that are the same for all contenders."""
        load = replace(self._load, n_ctx=workload.n_ctx(N_SLOTS, self._scale))
        words = random.Random(f"{self.seed} {repeat} {workload.name}")
        weighed: Memory | None = None
        with tempfile.TemporaryDirectory() as folder:
            command = contender.command(load, workload.flags.get(contender.kind, ()), Path(folder))
            async with serving(command, log=self._folder / "peers-server.log") as server:
                play = Play(server, self._tokens, words, self._scale, contender.saves_slots)
                await play.ask({"role": "user", "content": play.text(8)}, n_reply=4, measured=False)
                await workload.script(play)
                if workload.weighs:
                    weighed = await weigh(server, contender, load, self._tokens)
        return replace(self._run_of(workload, contender, repeat, play), memory=weighed)

    def _run_of(self, workload: Workload, contender: Contender, repeat: int, play: Play) -> Run:
        asked = play.asked
        measured = [each for each in asked if each.measured]
        answers = [each.answer for each in measured]
        requests = [(self._tokens.prompt(each.messages), self._tokens.of(each.answer.text)) for each in asked]
        for each, (prompt, _) in zip(asked, requests, strict=True):
            if each.answer.prompt_tokens not in (0, len(prompt)):
                raise BenchmarkError(
                    f"a prompt of {len(prompt)} tokens has {each.answer.prompt_tokens} by the server's count"
                )
        counts = [int(each.answer.timings["prompt_n"]) for each in asked if "prompt_n" in each.answer.timings]
        n_output = sum(each.n_reply for each in measured)
        return Run(
            workload=workload.name,
            contender=contender.name,
            repeat=repeat,
            ttft=[answer.ttft for answer in answers],
            gaps=[gap for answer in answers for gap in answer.gaps],
            wall=max(answer.ended for answer in answers) - min(answer.started for answer in answers),
            decode_rate=_tokens_rate([answer.arrivals for answer in answers], n_output),
            n_output=n_output,
            n_prompt=sum(len(prompt) for prompt, _ in requests),
            n_computed=sum(counts) if len(counts) == len(asked) else None,
            n_fewest=fewest(requests),
        )


def _tokens_rate(streams: Sequence[Sequence[float]], n_tokens: int) -> float:
    """Tokens per second while all streams run, 0 where they never do; all chunks count alike."""
    try:
        return decode_rate(streams) * n_tokens / sum(map(len, streams))
    except BenchmarkError:
        return 0.0
