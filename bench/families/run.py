"""`python -m bench families`: prefix reuse by kind of model, beside llama-server with its checkpoints.

The workloads are those of `bench.peers`, each run on a server process of its own. All servers and all kinds get the
same text. Replies become part of the history and have fixed lengths, so prompts have the same lengths everywhere.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from bench import synthetic
from bench.client import BenchmarkError
from bench.families.goals import FamilyRun, rows, table
from bench.families.kinds import Kind, state_sizes
from bench.families.oracle import needs
from bench.peers import build
from bench.peers.baseline import revision
from bench.peers.servers import OWN, SERVERS, CommonSettings, ServerSetup, llamaslot_flags
from bench.peers.workloads import WORKLOADS, Workload, WorkloadRun
from bench.progress import progress
from bench.report import console, machine, notes, write_json
from bench.server import Server, serving
from bench.tokens import Tokens

N_SLOTS = 8
NAMES = ("chat", "fan-out cold", "fan-out warm", "interleaved", "twenty", "branching", "agent")
"""Names of the workloads, of `bench.peers.workloads`."""
SAME_STEP = ServerSetup("llama-server, same step", "llama-server")
"""llama-server with llamaslot's distance of checkpoints, for models that have any."""
SETUPS = (*(each for each in SERVERS if each.is_peer and not each.workloads), SAME_STEP)
PEERS = tuple(each.name for each in SETUPS)
USUAL = ("llama-server",)
"""For a look; the published run has all of them."""
SCALE = 0.5
"""Factor for the long prompts: all of it takes about 10 minutes, and prompts stay longer than the windows."""
QUICK_KINDS = ("window 5:1", "short conv")
QUICK_WORKLOADS = ("chat", "branching")
QUICK_SCALE = 0.25
INTERVAL = 256
"""Tokens between checkpoints of a long prompt."""
CHECKPOINTS = 32
"""Checkpoints of each slot of llama-server, its default."""
COUNTER = "llamacpp:prompt_tokens_total"
"""Prompt tokens computed, a metric of both servers."""
DECODED = "llamaslot_decoded_tokens_total"
"""Tokens that llamaslot sent to `llama_decode`, without padding."""
MIB = 2**20


_SELF_TEST_S = 120
"""Time that the self-test of reuse may take."""


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark."""

    kinds: Sequence[Kind]
    workloads: Sequence[str]
    peers: Sequence[str]
    """Names of the llama-servers, may be empty."""
    scale: float
    """Factor for the long prompts."""
    interval: int
    """llamaslot's `--checkpoint-min-step`, and what goal 1 allows for a new fork."""
    seed: int
    """Seed of the text."""
    tiny: bool = False
    """Use the tiny shapes: nothing that is timed then means anything."""


def run(
    *, settings: Settings, repeats: int, threads: int, folder: Path, server_flags: Sequence[str]
) -> dict[str, Any]:
    """Measure, print a table for each kind, write `families.json` and the log of the server that ran last.

    Returns what was written.
    """
    facts = machine()
    started = monotonic()
    peers = settings.peers
    if settings.tiny and peers and not build.has_llama_server():
        notes.print("llama-server is not built, which takes minutes: a quick look leaves it out")
        peers = ()
    servers = [*(each for each in SETUPS if each.name in peers), *(each for each in SERVERS if each.name == OWN)]
    runner = Runner(settings, threads, folder, server_flags)
    results = asyncio.run(runner.measure(servers, repeats))
    compared = rows(results, settings.interval)
    for kind in settings.kinds:
        if chosen := [row for row in compared if row.kind == kind.name]:
            console.print(table(kind, chosen, f"{_shape(kind, settings)} shape, scale {settings.scale:g}"))
    content: dict[str, Any] = {"benchmark": "families", "commit": revision(Path.cwd()), "machine": facts}
    content["settings"] = asdict(settings) | {
        "repeats": repeats,
        "threads": threads,
        "slots": N_SLOTS,
        "flags": " ".join(server_flags),
    }
    content |= {"seconds": monotonic() - started, "checkpoint_bytes": runner.checkpoint_bytes}
    content |= {"commands": runner.commands, "failures": runner.failures}
    content["goals"] = [asdict(row) | {"is_ahead": row.is_ahead} for row in compared]
    content["runs"] = [asdict(each) for each in results]
    write_json(folder / "families.json", content)
    if runner.own_failures:
        raise BenchmarkError(runner.own_failures)
    return content


def _shape(kind: Kind, settings: Settings) -> str:
    return kind.tiny if settings.tiny else kind.shape


class Runner:
    """Runs workloads by kind of model; `failures` has the reason for each run that failed."""

    def __init__(self, settings: Settings, threads: int, folder: Path, server_flags: Sequence[str]) -> None:
        self._settings = settings
        self._threads = threads
        self._folder = folder
        self._flags = tuple(server_flags)
        self.commands: dict[str, str] = {}
        """Flags by server, kind and workload."""
        self.checkpoint_bytes: dict[str, int] = {}
        """Bytes of the largest checkpoint, by kind."""
        self.failures: dict[str, str] = {}

    async def measure(self, servers: Sequence[ServerSetup], repeats: int) -> list[FamilyRun]:
        """Run all workloads on all servers with all kinds; repeats go forwards and backwards (A B B A)."""
        workloads = [each for each in WORKLOADS if each.name in self._settings.workloads]
        kinds = [self._load(kind) for kind in self._settings.kinds]
        by_kind = [[each for each in servers if one.checkpoint_bytes or each is not SAME_STEP] for one in kinds]
        results: list[FamilyRun] = []
        with progress("run", sum(map(len, by_kind)) * len(workloads) * repeats) as advance:
            for one, chosen in zip(kinds, by_kind, strict=True):
                for workload, repeat in itertools.product(workloads, range(repeats)):
                    for server in chosen if repeat % 2 == 0 else chosen[::-1]:
                        started = monotonic()
                        what = f"{server.name}, {one.kind.name}, {workload.name}"
                        try:
                            results.append(await self._run(one, workload, server, repeat))
                        except BenchmarkError as error:
                            self.failures[what] = str(error).splitlines()[0]
                            notes.print(f"{what}: {error}")
                        advance(f"{what}: {monotonic() - started:.1f} s")
        return results

    @property
    def own_failures(self) -> str:
        """The failures of llamaslot, empty for none."""
        return "; ".join(f"{name}: {why}" for name, why in self.failures.items() if name.startswith(f"{OWN}, "))

    def _load(self, kind: Kind) -> _OfKind:
        model = synthetic.ensure(_shape(kind, self._settings))
        n_bytes = self.checkpoint_bytes[kind.name] = state_sizes(model, self._threads).checkpoint_bytes
        return _OfKind(kind, model, Tokens(model), n_bytes)

    async def _run(self, one: _OfKind, workload: Workload, server: ServerSetup, repeat: int) -> FamilyRun:
        """Run a workload on a new server process."""
        settings = self._settings
        mib = math.ceil(N_SLOTS * CHECKPOINTS * one.checkpoint_bytes / MIB)
        common = CommonSettings(one.model, N_SLOTS, self._threads, workload.n_ctx(settings.scale))
        common = replace(common, more=("--metrics", *self._checkpoint_flags(server, mib), *self._flags))
        command = server.command(common)
        flags = command[command.index(str(one.model)) + 1 :]
        self.commands[f"{server.name}, {one.kind.name}, {workload.name}"] = " ".join(flags)
        words = random.Random(f"{settings.seed} {repeat} {workload.name}")
        log = self._folder / "families-server.log"
        async with serving(command, log=log, needs_costs=not settings.tiny) as process:
            run = WorkloadRun(process, one.tokens, words, settings.scale)
            await run.ask({"role": "user", "content": run.text(8)}, n_reply=4, measured=False)
            if server.name == OWN:
                await self_test_ended(process)
            await workload.script(run)
            computed = await computed_tokens(process, run, is_own=server.name == OWN)
        sent = run.requests
        requests = [(one.tokens.prompt(each.messages), one.tokens.of(each.answer.text)) for each in sent]
        return FamilyRun(
            kind=one.kind.name,
            workload=workload.name,
            server=server.name,
            repeat=repeat,
            checkpoint_mib=mib,
            ttft=[each.answer.ttft for each in sent if each.measured],
            prompt_tokens=_checked([len(prompt) for prompt, _ in requests], run),
            computed_tokens=computed,
            needs=needs(requests),
        )

    def _checkpoint_flags(self, server: ServerSetup, mib: int) -> list[str]:
        """The flags with which checkpoints may take the same bytes in both servers."""
        if not mib:
            return []
        step = {"--checkpoint-min-step": str(self._settings.interval)}
        if server.is_peer:
            flags = {"--ctx-checkpoints": str(CHECKPOINTS)} | (step if server is SAME_STEP else {})
            return [word for item in flags.items() for word in item]
        flags = {"--checkpoint-ram": str(mib)} | step
        known = llamaslot_flags()
        return [word for flag, value in flags.items() if flag in known for word in (flag, value)]


@dataclass(frozen=True)
class _OfKind:
    """A kind of model with its file."""

    kind: Kind
    model: Path
    tokens: Tokens
    checkpoint_bytes: int


async def self_test_ended(server: Server) -> None:
    """Wait until the self-test of reuse has ended; a slow machine runs it after the start, while idle.

    Raises `BenchmarkError` if it takes too long or fails.
    """
    for _ in range(_SELF_TEST_S * 10):
        outcome = (await server.client.get("/props"))["prefix_reuse"]["self_test"]
        if outcome == "failed":
            raise BenchmarkError("the self-test of reuse has failed")
        if outcome != "pending":
            return
        await asyncio.sleep(0.1)
    raise BenchmarkError(f"the self-test of reuse takes more than {_SELF_TEST_S} s")


async def computed_tokens(server: Server, run: WorkloadRun, *, is_own: bool) -> list[int]:
    """Return the prompt tokens computed for each request; raises `BenchmarkError` if the metrics differ.

    llamaslot also counts what it sent to `llama_decode`: computed prompts, and replies without their last token.
    """
    counts = [each.answer.computed for each in run.requests]
    expected = {COUNTER: sum(counts)}
    if is_own:
        expected[DECODED] = sum(counts) + sum(each.n_reply - 1 for each in run.requests)
    for name, n in expected.items():
        counted = await server.client.counter(name)
        if counted != n:
            raise BenchmarkError(f"by the replies {n} tokens were computed, {name} is {counted:.0f}")
    return counts


def _checked(prompt_tokens: list[int], run: WorkloadRun) -> list[int]:
    """Return the lengths of the prompts, which must be those that the server counts.

    Computed and reused tokens are all of them, or more where a request was preempted and computed again.
    """
    for length, each in zip(prompt_tokens, run.requests, strict=True):
        answer = each.answer
        reused = int(answer.timings["cache_n"])
        if answer.prompt_tokens != length or answer.computed + reused < length:
            raise BenchmarkError(
                f"a prompt of {length} tokens has {answer.prompt_tokens} by the server's count: "
                f"{answer.computed} computed and {reused} reused"
            )
    return prompt_tokens
