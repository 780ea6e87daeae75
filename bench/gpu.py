"""All figures of the project on a machine with a GPU, and the tests that are marked `gpu`, within a time limit.

Each step is a process of its own, which is ended when its time is over, and keeps each figure as soon as it is
known. A step that fails does not stop the others. Figures of earlier calls stay in their files, so that all may be
done in several calls. Most things are measured once or twice, so small differences prove nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from rich.table import Table
from rich.text import Text

from bench import speculate
from bench.client import BenchmarkError
from bench.decode import batched_bench_runs
from bench.families import goals as family_goals
from bench.families import run as families
from bench.families.kinds import KINDS
from bench.peers import build
from bench.peers.baseline import revision
from bench.peers.goals import Selection, compared
from bench.peers.results import RunResult
from bench.peers.runner import N_SLOTS, Runner, tokens_rate
from bench.peers.servers import OWN, SERVERS, CommonSettings, ServerSetup
from bench.peers.workloads import GREEDY, REPLY, WORKLOADS, WorkloadRun, decode, restart
from bench.report import ROOT, console, machine, model_file, new_table, notes, rounded
from bench.server import serving
from bench.steps import backend_settings
from bench.tokens import Tokens
from llamaslot.backend.llama import LlamaBackend, library

TIME_LIMIT_S = 720
_MIN_STEP_S = 20.0
"""No step is begun with less time."""
_END_S = 10.0
"""Time that the processes of a step get to end."""

STREAMS = (1, 8, 32)
DECODE_TOKENS = 128
CONTEXT = 16_384
REPEATS = 2
SAMPLINGS: Mapping[str, Mapping[str, float]] = {"greedy": GREEDY, "sampled": speculate.SAMPLED}
BATCHED_BENCH = "llama-batched-bench"
DEVICE_SAMPLED = "llamaslot_device_sampled_tokens_total"
"""A metric of llamaslot."""
PEERS = (
    ServerSetup("llama-server", "llama-server", ("-kvu",)),
    ServerSetup("llama-server -bs", "llama-server", ("-kvu", "--backend-sampling")),
)
OWN_SERVER = ServerSetup(OWN, "llamaslot", ("--metrics",))
FORCED = (
    ServerSetup("sampled on the device", "llamaslot", ("--backend-sampling",)),
    ServerSetup("sampled on the host", "llamaslot", ("--no-backend-sampling",)),
)
MIN_OF_BATCHED_BENCH, MIN_OF_PEER = 0.95, 1.0
MAX_READY, MAX_READY_MORE_S = 1.3, 0.3
MAX_LOAD_MS = 6.0
MAX_RESTART = 0.5
"""The goals that `bench peers` and `bench families` do not have."""
TTFT = ("agent", "chat", "fan-out warm")
TTFT_SERVERS = ("llama-server", "llama-server -kvu", OWN)
SPECULATION = (speculate.DRAFTING, speculate.WITHOUT, *speculate.PEERS[:2])
"""In order of importance."""
REUSED = ("window 5:1", "window 1:1", "short conv", "delta net", "mamba2", "mla")
"""Kinds of models, in order of importance."""
REUSE_WORKLOADS = ("branching",)

Raw = dict[str, Any]
"""What a step measured, by name."""
ABOUT = "gpu.json"
"""File with commit, machine and settings of all figures in its folder."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    figure: str
    value: str = ""
    """For what was not run, the reason."""
    goal: str = ""
    verdict: str = ""
    """`met`, `missed`, `not run`, or empty without a goal."""


@dataclass(frozen=True)
class Settings:
    """Settings of all steps."""

    small: str
    large: str
    """GGUF files or shapes."""
    threads: int
    scale: float
    """Factor for long prompts."""
    tiny: bool
    """Use tiny models for `reuse`: only to try it out."""
    flags: tuple[str, ...]
    """Of all servers."""


class Task:
    """One step in its process: its settings and files."""

    def __init__(self, step: Step, folder: Path) -> None:
        self._step = step
        self.folder = folder
        self.settings = settings_in(folder)

    @property
    def model(self) -> Path:
        """The file of the step's model, written if it is missing."""
        return model_file(getattr(self.settings, self._step.model))

    def common(self, n_slots: int = max(STREAMS), n_ctx: int = CONTEXT) -> CommonSettings:
        """Settings of all servers."""
        return CommonSettings(self.model, n_slots, self.settings.threads, n_ctx, self.settings.flags)

    @property
    def log(self) -> Path:
        """The log of the step's last server."""
        return self.folder / f"gpu-{self._step.name}-server.log"

    def keep(self, name: str, value: Any) -> None:
        """Keep a figure; the step may be ended at any time."""
        path = self._step.file(self.folder)
        content = read(path)
        content["raw"][name] = value
        write(path, content)


@dataclass(frozen=True)
class Step:
    """A part of the run that may fail or be left out alone."""

    name: str
    limit_s: float
    measure: Callable[[Task], Coroutine[Any, Any, None]]
    rows: Callable[[str, Raw], list[Row]]
    """The rows of what was measured, all of it or a part, given the model's name."""
    model: str = ""
    """`small`, `large`, or empty."""

    def title(self, settings: Settings) -> str:
        """The name of the model; that of the step if it has none."""
        return Path(getattr(settings, self.model)).name if self.model else self.name

    def file(self, folder: Path) -> Path:
        """The file with how the step ended (`state`), its `seconds`, and its figures so far (`raw`).

        It is written by the step's process, and by the one that runs the steps before and after.
        """
        return folder / f"gpu-{self.name}.json"


def read(path: Path) -> Raw:
    """The content of a file; empty if there is none."""
    content: Raw = json.loads(path.read_text()) if path.is_file() else {}
    return content


def write(path: Path, content: Raw) -> None:
    """Replace a file."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(rounded(content), indent=1) + "\n")
    unfinished.replace(path)


def settings_in(folder: Path) -> Settings:
    """The settings with which the figures in a folder are taken."""
    given = read(folder / ABOUT)["settings"]
    return Settings(**given | {"flags": tuple(given["flags"])})


async def write_models(task: Task) -> None:
    """Write the models that all other steps use."""
    for model in (task.settings.large, task.settings.small):
        task.keep(model, model_file(model).stat().st_size)


async def measure_decode(task: Task) -> None:
    """Tokens per second of all streams together, several times; the best counts."""
    await _measure_servers(task, [OWN_SERVER])
    common = task.common()
    bench = [str(build.batched_bench()), "-m", str(common.model), "-c", str(CONTEXT), "-fa", "on", "-kvu"]
    bench += ["-t", str(common.n_threads), "-tb", str(common.n_threads), *common.more]
    bench += ["-npp", "16", "-ntg", str(DECODE_TOKENS), "-npl", ",".join(map(str, STREAMS * REPEATS))]
    runs = batched_bench_runs(bench, len(STREAMS) * REPEATS)
    for n in STREAMS:
        task.keep(f"{BATCHED_BENCH} {n}", [each["speed_tg"] for each in runs if each["pl"] == n])
    await _measure_servers(task, PEERS)


async def measure_forced_sampling(task: Task) -> None:
    """The same of llamaslot with samplers on the device and on the host."""
    await _measure_servers(task, FORCED)


async def _measure_servers(task: Task, servers: Sequence[ServerSetup]) -> None:
    words, tokens = random.Random(), Tokens(task.model)
    for server in servers:
        async with serving(server.command(task.common()), log=task.log) as process:
            run = WorkloadRun(process, tokens, words)
            # The first steps of a size build graphs.
            await _decode_rate(run, max(STREAMS), speculate.SAMPLED)
            for kind, sampling in SAMPLINGS.items():
                for n in STREAMS:
                    rates = [await _decode_rate(run, n, sampling) for _ in range(REPEATS)]
                    task.keep(f"{server.name} {kind} {n}", rates)
            if "--metrics" in server.flags:
                task.keep("sampled on the device", await process.client.counter(DEVICE_SAMPLED))


async def _decode_rate(run: WorkloadRun, n: int, sampling: Mapping[str, float]) -> float:
    run.answered.clear()
    await decode(run, n_streams=n, sampling=sampling)
    return tokens_rate([each.answer.arrivals for each in run.answered], n * DECODE_TOKENS)


def decode_rows(title: str, raw: Raw) -> list[Row]:
    """Ratios to llama-batched-bench, and to the best llama-server."""
    rows = []
    for kind in SAMPLINGS:
        for n in STREAMS:
            own = _best(raw, f"{OWN} {kind} {n}")
            others = [(BATCHED_BENCH, _best(raw, f"{BATCHED_BENCH} {n}"), MIN_OF_BATCHED_BENCH)]
            peers = [(each.name, _best(raw, f"{each.name} {kind} {n}"), MIN_OF_PEER) for each in PEERS]
            if all(rate for _, rate, _ in peers):
                others.append(max(peers, key=lambda each: each[1]))
            for name, rate, goal in others:
                if own and rate:
                    value = f"{own:,.0f} / {rate:,.0f} tokens/s"
                    figure = f"{title}, decode {n}, {kind} / {name}"
                    rows.append(_judged_ratio(figure, own / rate, goal, at_least=True, value=value))
    if (n_sampled := raw.get("sampled on the device")) is not None:
        rows.append(Row(f"{title}, decode: tokens sampled on the device by default", f"{n_sampled:,.0f}"))
    return rows


def _best(raw: Raw, name: str) -> float:
    return max(raw.get(name, ()), default=0.0)


def forced_rows(title: str, raw: Raw) -> list[Row]:
    """Rates by where tokens are sampled."""
    rows = []
    for kind in SAMPLINGS:
        for n in STREAMS:
            rates = [_best(raw, f"{each.name} {kind} {n}") for each in FORCED]
            if all(rates):
                value = " / ".join(f"{rate:,.0f}" for rate in rates) + " tokens/s"
                rows.append(Row(f"{title}, decode {n}, {kind}: on the device / on the host", value))
    return rows


async def measure_ready(task: Task) -> None:
    """Seconds until `/health` answers 200; llamaslot with nothing known of the model, and with known costs."""
    with tempfile.TemporaryDirectory() as cache:
        for own in ("first start", "later start"):
            for name, server in (("llama-server", PEERS[0]), (own, OWN_SERVER)):
                command = server.command(task.common())
                if server is OWN_SERVER:
                    command = ["env", f"XDG_CACHE_HOME={cache}", *command]
                async with serving(command, log=task.log) as process:
                    task.keep(name, process.ready_s)


def ready_rows(title: str, raw: Raw) -> list[Row]:
    """llamaslot's times beside the latest of llama-server."""
    rows = []
    for name in ("first start", "later start"):
        if name in raw:
            own, peer = raw[name], raw["llama-server"]
            limit = MAX_READY * peer + MAX_READY_MORE_S
            value = f"{own:.2f} s, llama-server {peer:.2f} s"
            rows.append(_judged(f"{title}, ready: {name}", value, f"at most {limit:.2f} s", is_met=own <= limit))
    return rows


async def measure_kv(task: Task) -> None:
    """Microseconds to compute, save and load a token, by llamaslot's own measurement."""
    common = task.common()
    flags = ["-c", str(common.n_ctx), "-np", str(common.n_slots), "-t", str(common.n_threads), "-fa", "on"]
    backend = LlamaBackend(backend_settings(common.model, [*flags, *common.more]))
    for _ in range(5):
        if backend.measure_costs():
            break
    else:
        raise BenchmarkError(f"costs could not be measured: {backend.info.costs_pending}")
    cost, size = backend.info.kv_cost, backend.info.segment_size
    if cost is None or size is None:
        raise BenchmarkError("nothing is saved of this model on this device")
    task.keep("bytes", size.per_token)
    for name in ("load_us", "save_us", "first_save_us", "prefill_us"):
        task.keep(name, getattr(cost, name))
    backend.close()


def kv_rows(title: str, raw: Raw) -> list[Row]:
    """Milliseconds for 1,000 tokens: of these units, the same as microseconds for one."""
    if "prefill_us" not in raw:
        return []

    def value(name: str) -> str:
        return f"{raw[name]:.1f} ms, {raw['bytes'] / raw[name] / 1e3:.1f} GB/s"

    goal, is_met = f"at most {MAX_LOAD_MS:.1f} ms", raw["load_us"] <= MAX_LOAD_MS
    return [
        _judged(f"{title}, 1,000 tokens: load", value("load_us"), goal, is_met=is_met),
        Row(f"{title}, 1,000 tokens: save", f"{value('save_us')}; first {raw['first_save_us']:.1f} ms"),
        Row(f"{title}, 1,000 tokens: compute", f"{raw['prefill_us']:.1f} ms"),
    ]


async def measure_restart(task: Task) -> None:
    """TTFT of a conversation after `kill -9` and a start, and of the same prompt computed."""
    workload = next(each for each in WORKLOADS if each.name == "restart")
    scale, tokens = task.settings.scale, Tokens(task.model)
    ratios = []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            command = OWN_SERVER.command(task.common(workload.n_slots, workload.n_ctx(scale)))
            command += ["--cache-disk", folder]
            async with serving(command, log=task.log) as process:
                run = WorkloadRun(process, tokens, random.Random(), scale)
                await restart(run)
                last = run.requests[-1]
                parameters = {**GREEDY, "max_tokens": REPLY, "ignore_eos": True, "cache_prompt": False}
                computed = [await process.client.chat(last.messages, **parameters) for _ in range(REPEATS)]
        task.keep("prompt_tokens", last.answer.prompt_tokens)
        task.keep("cached_tokens", last.answer.prompt_tokens - last.answer.computed)
        ratios.append((last.answer.ttft, min(each.ttft for each in computed)))
        task.keep("ttft", ratios)


def restart_rows(title: str, raw: Raw) -> list[Row]:
    """TTFT after the restart, divided by the time to compute the prompt."""
    if "ttft" not in raw:
        return []
    after, computed = (statistics.median(times) for times in zip(*raw["ttft"], strict=True))
    value = f"{1e3 * after:.0f} / {1e3 * computed:.0f} ms, "
    value += f"{raw['cached_tokens']:,} of {raw['prompt_tokens']:,} tokens read"
    figure = f"{title}, TTFT after a restart / computing"
    return [_judged_ratio(figure, after / computed, MAX_RESTART, value=value)]


async def measure_ttft(task: Task) -> None:
    """One run of workloads of `bench peers` on each server."""
    servers = [each for each in SERVERS if each.name in TTFT_SERVERS]
    runner = Runner(Tokens(task.model), task.common(N_SLOTS, 0), task.settings.scale, task.folder)
    for workload in (each for name in TTFT for each in WORKLOADS if each.name == name):
        results = await runner.measure({workload.name: 1}, [workload], Selection(servers))
        task.keep(workload.name, [asdict(each) for each in results])
    if runner.failures:
        raise BenchmarkError("; ".join(f"{name}: {reason}" for name, reason in runner.failures.items()))


def ttft_rows(title: str, raw: Raw) -> list[Row]:
    """Ratios to the best llama-server, with the goals of `bench peers`."""
    ratios = [
        ratio
        for workload in WORKLOADS
        if workload.name in raw
        for ratio in compared(workload, [RunResult(**each) for each in raw[workload.name]])
    ]
    return [
        _judged_ratio(f"{title}, {each.workload}: {each.metric} / {each.peer}", each.median, each.goal)
        for each in ratios
    ]


async def measure_reuse(task: Task) -> None:
    """Prompt tokens that are computed, by kind of model."""
    settings, failures = task.settings, {}
    for kind in (each for name in REUSED for each in KINDS if each.name == name):
        chosen = families.Settings(
            kinds=[kind],
            workloads=REUSE_WORKLOADS,
            peers=(),
            scale=families.SCALE * settings.scale,
            interval=families.INTERVAL,
            seed=1,
            tiny=settings.tiny,
        )
        runner = families.Runner(chosen, settings.threads, task.folder, settings.flags)
        runs = await runner.measure([each for each in SERVERS if each.name == OWN], 1)
        rows = [asdict(each) for each in family_goals.rows(runs, families.INTERVAL)]
        task.keep(kind.name, {"rows": rows, "failures": runner.failures})
        failures |= runner.failures
    if failures:
        raise BenchmarkError("; ".join(f"{name}: {reason}" for name, reason in failures.items()))


def reuse_rows(_title: str, raw: Raw) -> list[Row]:
    """Computed tokens, and the most that goal 1 of `bench families` allows."""
    rows = []
    for kind, found in raw.items():
        measured = [family_goals.Row(**each) for each in found["rows"]]
        prompt, computed, limit = (
            sum(getattr(each, name) for each in measured) for name in ("prompt", "computed", "limit")
        )
        is_met = len(measured) == len(REUSE_WORKLOADS) and all(each.is_frugal for each in measured)
        value = f"{computed:,.0f} of {prompt:,.0f} prompt tokens computed" if measured else "failed"
        goal = f"at most {limit:,.0f}" if measured else ""
        rows.append(_judged(f"reuse, {kind}", value, goal, is_met=is_met))
    return rows


async def measure_speculation(task: Task) -> None:
    """One run of the workloads of `bench speculate`, on one server after another: memory for one is enough."""
    settings = task.settings
    model = settings.large
    path, title = speculate.model_of(model)
    task.keep("model", title)
    prompts = speculate.prompts_for(path, model, settings.scale)
    common = CommonSettings(path, N_SLOTS, settings.threads, speculate.context(settings.scale), settings.flags)
    bench = speculate.Bench(prompts, common, task.folder, SPECULATION)
    for setup in SPECULATION:
        async with bench.serving(setup) as process:
            for workload in speculate.WORKLOADS:
                if workload.has_peers or not setup.is_peer:
                    for n in workload.streams:
                        await bench.run(process.client, setup, workload, n, 0)
                        task.keep("runs", [asdict(each) for each in bench.runs])
    if bench.failures:
        raise BenchmarkError("; ".join(f"{name}: {reason}" for name, reason in bench.failures.items()))


def speculation_rows(title: str, raw: Raw) -> list[Row]:
    """Ratios with the goals of `bench speculate`, and how many drafted tokens were right."""
    runs = [speculate.Run(**each) for each in raw.get("runs", ())]
    rows = []
    for each in speculate.ratios(runs):
        figure = f"{title}, {each.workload}: {each.metric} / {each.peer}"
        rows.append(_judged_ratio(figure, each.median, each.goal, at_least=each.at_least))
    own = [each for each in runs if each.server == OWN]
    n_drafted, n_accepted = (sum(getattr(each, name) for each in own) for name in ("n_drafted", "n_accepted"))
    if own:
        rows.append(Row(f"{title}, drafted tokens that were right", f"{n_accepted:,} of {n_drafted:,}"))
    return rows


PYTEST = (sys.executable, "-X", "faulthandler", "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider")


async def run_tests(task: Task) -> None:
    """Run `pytest -m gpu`, each file in a process with a log: what llama.cpp says as it aborts is not lost."""
    files = _files_of_tests()
    folder = task.folder / "gpu-tests"
    folder.mkdir(exist_ok=True)
    task.keep("n_files", len(files))
    found: Raw = {}
    with ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) // 2))) as pool:
        running = [pool.submit(_run_file, file, folder / f"{Path(file).stem}.log") for file in files]
        for done in as_completed(running):
            file, result = done.result()
            found[file] = result
            task.keep("files", found)


def _files_of_tests() -> list[str]:
    command = [*PYTEST, "--collect-only", "tests/backend", "tests/demo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    files = sorted(set(re.findall(r"^(tests/\S+\.py)\b", done.stdout, re.MULTILINE)))
    if not files:
        raise BenchmarkError(f"no tests were found: {done.stdout[-500:]}{done.stderr[-500:]}")
    return files


def _run_file(file: str, log: Path) -> tuple[str, Raw]:
    with log.open("wb") as output:
        command = [*PYTEST, "--capture=no", file]
        status = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, check=False).returncode
    text = log.read_text(errors="replace")
    counts = {name: int(n) for n, name in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", _last(text))}
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/\S+)", text, re.MULTILINE)
    return file, {"status": status, "counts": counts, "failed": failed, "end": text[-300:]}


def _last(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def tests_rows(_title: str, raw: Raw) -> list[Row]:
    """How many passed, and which files did not."""
    files: Raw = raw.get("files", {})
    rows = []
    n_passed = sum(each["counts"].get("passed", 0) for each in files.values())
    bad = {name: each for name, each in files.items() if each["status"] != 0}
    if files:
        verdict = "missed" if bad else "met" if len(files) == raw["n_files"] else ""
        value = f"{n_passed} passed, {len(files) - len(bad)} of {raw['n_files']} files without a failure"
        rows.append(Row("tests marked gpu", value, "all pass", verdict))
    for name, each in bad.items():
        what = (
            ", ".join(test.partition("::")[2] for test in each["failed"]) or f"ended with status {each['status']}"
        )
        rows.append(Row(f"  {name}", what, "", "missed"))
    return rows


STEPS = (
    Step("models", 120, write_models, lambda _title, _raw: []),
    Step("decode-large", 180, measure_decode, decode_rows, "large"),
    Step("decode-small", 120, measure_decode, decode_rows, "small"),
    Step("kv-large", 60, measure_kv, kv_rows, "large"),
    Step("ready-large", 60, measure_ready, ready_rows, "large"),
    Step("ready-small", 45, measure_ready, ready_rows, "small"),
    Step("restart-large", 90, measure_restart, restart_rows, "large"),
    Step("tests", 180, run_tests, tests_rows),
    Step("ttft-large", 150, measure_ttft, ttft_rows, "large"),
    Step("reuse", 120, measure_reuse, reuse_rows),
    Step("ttft-small", 90, measure_ttft, ttft_rows, "small"),
    Step("speculate", 360, measure_speculation, speculation_rows, "large"),
    Step("sampling-large", 100, measure_forced_sampling, forced_rows, "large"),
    Step("sampling-small", 80, measure_forced_sampling, forced_rows, "small"),
)
"""In order of importance; not all fit into `TIME_LIMIT_S`. Limits are guesses until it ran on a GPU."""
DONE = "done"


def run(*, settings: Settings, steps: Sequence[str], time_limit_s: float, commit: str, folder: Path) -> int:
    """Run steps, all that are not done if none is named, and print the table of all; the exit status."""
    library.initialise()
    gpus = [each.description for each in library.gpus()]
    about = {name: value for name, value in machine().items() if name not in ("date", "load_before", "memory_gib")}
    facts = {"commit": commit or revision(ROOT) or "unknown", "gpus": gpus, "machine": about}
    facts["settings"] = asdict(settings) | {"flags": list(settings.flags)}
    folder.mkdir(parents=True, exist_ok=True)
    begin(folder, facts)
    # So that no process of a step is left when this one is told to end.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_steps(folder, steps, time_limit_s, _command)
    console.print(table(folder))
    return int(any(read(each.file(folder)).get("state", DONE) != DONE for each in STEPS))


def begin(folder: Path, facts: Raw) -> None:
    """Write `gpu.json`, unless it is there; drop the figures of another commit, machine or settings."""
    earlier = read(folder / ABOUT)
    if any(earlier.get(name) != value for name, value in facts.items()):
        if earlier:
            notes.print("earlier results are dropped: another commit, machine or settings")
        for each in folder.glob("gpu-*.json"):
            each.unlink()
        date = datetime.now(UTC).isoformat(timespec="seconds")
        write(folder / ABOUT, {"benchmark": "gpu", "date": date, **facts})


def _command(step: Step, folder: Path) -> list[str]:
    return [sys.executable, "-m", "bench", "gpu", "--run-step", step.name, "--out", str(folder.resolve())]


def run_steps(
    folder: Path,
    names: Sequence[str],
    time_limit_s: float,
    command: Callable[[Step, Path], list[str]],
    steps: Sequence[Step] = STEPS,
) -> None:
    """Run the named steps, or those that are not done, one after another, while time is left."""
    ends_at = monotonic() + time_limit_s
    for step in steps:
        file = step.file(folder)
        is_done = read(file).get("state") == DONE
        left_s = ends_at - monotonic()
        if (names and step.name not in names) or (is_done and not names) or left_s < min(_MIN_STEP_S, time_limit_s):
            continue
        limit_s = min(step.limit_s, left_s)
        notes.print(f"{step.name}: at most {limit_s:.0f} s, {left_s:.0f} s are left")
        write(file, {"state": "interrupted", "raw": {}})
        started = monotonic()
        state = _ended(command(step, folder), folder / f"gpu-{step.name}.log", limit_s)
        seconds = monotonic() - started
        write(file, read(file) | {"state": state, "seconds": round(seconds, 1)})
        notes.print(f"{step.name}: {state}, {seconds:.0f} s")


def _ended(command: Sequence[str], log: Path, limit_s: float) -> str:
    """Run a command with its own process group, of which nothing is left; return how it ended."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
    try:
        status = process.wait(limit_s)
        state = DONE if status == 0 else f"failed: {_reason(log, status)}"
    except subprocess.TimeoutExpired:
        state = f"stopped after {limit_s:.0f} s"
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
                if number == signal.SIGTERM:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_END_S)
    return state


def _reason(log: Path, status: int) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    told = [line.removeprefix("bench: ") for line in lines if line.startswith("bench: ")]
    return (told or lines or [f"status {status}"])[-1][:300]


def run_step(name: str, folder: Path) -> int:
    """Run one step in this process; `run` starts it."""
    step = next(each for each in STEPS if each.name == name)
    asyncio.run(step.measure(Task(step, folder)))
    return 0


def table(folder: Path, steps: Sequence[Step] = STEPS) -> Table:
    """All figures with goals and verdicts, and what was not run."""
    about = read(folder / ABOUT)
    gpus = ", ".join(about["gpus"]) or "no GPU"
    commit, changes, _ = about["commit"].partition(" with changes")
    title = f"{gpus}, commit {commit[:10]}{changes}, flags {' '.join(about['settings']['flags']) or 'none'}"
    found = new_table(title, ("figure", "value", "goal", "verdict"), ("figure", "value", "goal", "verdict"))
    for row in rows(folder, steps):
        found.add_row(*(Text(cell) for cell in (row.figure, row.value, row.goal, row.verdict)))
    return found


def rows(folder: Path, steps: Sequence[Step] = STEPS) -> list[Row]:
    """The rows of all steps; one for each that has not ended well."""
    settings = settings_in(folder)
    found = []
    for step in steps:
        begun = read(step.file(folder))
        raw, state = begun.get("raw", {}), begun.get("state", "")
        found += step.rows(step.title(settings), raw)
        if state != DONE:
            found.append(Row(f"{step.name}{': the rest' if raw else ''}", state, "", "not run"))
    return found


def _judged(figure: str, value: str, goal: str, *, is_met: bool) -> Row:
    return Row(figure, value, goal, "met" if is_met else "missed")


def _judged_ratio(figure: str, ratio: float, goal: float, *, at_least: bool = False, value: str = "") -> Row:
    is_met = ratio >= goal if at_least else ratio <= goal
    text = f"{ratio:.2f} ({value})" if value else f"{ratio:.2f}"
    return _judged(figure, text, f"at {'least' if at_least else 'most'} {goal:.2f}", is_met=is_met)
