"""The published benchmark: one run with a fixed plan, its raw data, and the tables that are generated from it.

`make bench-publish` measures every workload on every server at one commit, with the pairs of `N_PAIRS`, and writes
`bench/published/peers.json`. `bench/published/README.md` and the summary in the project's README are generated from
that file alone, so no row can be replaced without the others. A test compares them with the raw data.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import Any

from bench.peers import plot, tables
from bench.peers.baseline import clean_revision, require_revision, revision
from bench.peers.compare import engine_ratio
from bench.peers.goals import N_ALL, Ratio, Selection, compared
from bench.peers.results import RunResult
from bench.peers.runner import ENGINE, N_SLOTS, EnginePair, Runner
from bench.peers.servers import OWN, SERVERS, CommonSettings
from bench.peers.workloads import MANY, REAL, WORKLOADS
from bench.progress import duration
from bench.report import ROOT, machine, model_file, notes, replaced_part, rounded, wrapped
from bench.tokens import Tokens
from llamaslot.app.model_files import resolve_model

FOLDER = ROOT / "bench" / "published"
README = ROOT / "README.md"
BEGIN, END = "<!-- published benchmark: begin -->", "<!-- published benchmark: end -->"
"""Around the generated part of the project's README."""
COMMAND = "make bench-publish"
SHAPE = "60m"
REAL_MODEL = "smollm2-135m"
N_PAIRS = {each.name: each.n_pairs for each in (*WORKLOADS, *REAL)} | {"fan-out warm": 8, "groups": MANY}
"""The plan, fixed before the run; the whole fits into two and a half hours on 2 cores."""
N_ENGINE_PAIRS = MANY
N_REFERENCE_PAIRS = 1
"""Pairs of the servers that no goal depends on."""
DECIMALS = 5
"""Decimals of all times in the raw data, which are in seconds."""
IN_WORDS = {
    "chat": "four turns after 1,000 tokens",
    "fan-out cold": "16 users at once, one new system prompt",
    "fan-out warm": "the same with a cached system prompt",
    "interleaved": "six conversations in turn",
    "twenty": "20 conversations at once, one system prompt",
    "branching": "eight forks of a conversation at once",
    "groups": "four system prompts, six users each",
    "agent": "10,000 tokens of tools, sub-agents",
    "pressure": "prompts of four times the pool",
    "low reuse": "prompts that share nothing",
    "conversations 1": "first turns of eight at once, nothing shared",
    "conversations 2": "their second turns, one by one",
    "conversations 3": "their third turns at once",
    "decode 1": "one stream",
    "decode 4": "four streams",
    "decode 8": "eight streams",
    "sampled 8": "eight streams that are not greedy",
    "long prefill": "streams beside a prompt of 16,000 tokens",
    "SmolLM2, first turn": "700 tokens, real weights",
    "SmolLM2, six at once": "six of these at once, with replies of 80",
    "SmolLM2, decode 1": "one stream",
    "SmolLM2, decode 4": "four streams",
    ENGINE: "eight streams without HTTP",
}
"""The workloads that have goals, for the project's README."""
READY_WORKLOADS = "decode 1", "SmolLM2, decode 1"
CPU_NOTE = (
    "Ratios depend on the CPU, most of all those of chat, agent and branching, where few new tokens follow a "
    "cached prefix: llama.cpp's attention computes 64 tokens at once and fewer one by one."
)


def run(*, threads: int, logs: Path, quick: bool) -> None:
    """Measure, write raw data and tables below `logs`, and publish them unless the checkout has changed.

    `quick` tries this out with small prompts and one pair, and publishes nothing.
    """
    commit = revision(ROOT) if quick else clean_revision(ROOT)
    servers = [each for each in SERVERS if not quick or each.name in (OWN, "llama-server -kvu")]
    n_pairs = dict.fromkeys(N_PAIRS, 1) if quick else N_PAIRS
    facts = machine()
    model, real = model_file(SHAPE), resolve_model(REAL_MODEL)
    common = CommonSettings(model, N_SLOTS, threads, 0)
    started = monotonic()
    scale = 0.25 if quick else 1.0
    runner = Runner(Tokens(model), common, scale, logs)
    real_runner = Runner(Tokens(real), replace(common, model=real), scale, logs, runner.seed)
    engine = runner.measure_engine(1 if quick else N_ENGINE_PAIRS)
    selection = Selection(servers, N_REFERENCE_PAIRS)
    results = [
        *asyncio.run(runner.measure({each.name: n_pairs[each.name] for each in WORKLOADS}, WORKLOADS, selection)),
        *asyncio.run(real_runner.measure({each.name: n_pairs[each.name] for each in REAL}, REAL, selection)),
    ]
    settings = {
        "model": f"{SHAPE} shape (random weights, Q8_0), and SmolLM2-135M in Q4_1",
        "slots": N_SLOTS,
        "threads": threads,
    }
    content: dict[str, Any] = {
        "commit": commit,
        "command": COMMAND,
        "machine": facts,
        "settings": settings,
        "seed": runner.seed,
        "pairs": n_pairs,
        "reference_pairs": N_REFERENCE_PAIRS,
        "seconds": monotonic() - started,
        "failures": runner.failures | real_runner.failures,
        "engine": [asdict(each) for each in engine],
        "runs": [asdict(each) for each in results],
    }
    publish(content, logs / "published", None)
    # What failed here is listed as a missed goal. Running all of it again until nothing fails would be a choice.
    require_revision(ROOT, commit)
    if not quick:
        publish(content, FOLDER, README)


def publish(content: Mapping[str, Any], folder: Path, readme: Path | None) -> None:
    """Write the raw data and the tables into a folder, and the tables of the project's README."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "peers.json", content)
    render(folder, readme)


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write the raw data: a line for each run, so that differences between two versions can be read."""
    lines = []
    for key, value in rounded(content, DECIMALS).items():
        if isinstance(value, list):
            rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in value)
            lines.append(f'"{key}": [\n{rows}\n]')
        else:
            lines.append(f'"{key}": {json.dumps(value)}')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    notes.print(f"raw data: {path}")


def render(folder: Path = FOLDER, readme: Path | None = README) -> None:
    """Write the tables of a folder's raw data, and those of the project's README."""
    content = json.loads((folder / "peers.json").read_text())
    (folder / "README.md").write_text(page(content))
    (folder / "ttft.svg").write_text(plot.svg(_results(content)))
    if readme is not None and (text := replaced(readme.read_text(), content)):
        readme.write_text(text)


def replaced(text: str, content: Mapping[str, Any]) -> str | None:
    """The README with its generated part renewed; None if it has no such part."""
    return replaced_part(text, BEGIN, END, summary(content))


def ratios_of(content: Mapping[str, Any]) -> list[Ratio]:
    """The goals' ratios, computed from the raw data."""
    results = _results(content)
    ratios = [ratio for each in (*WORKLOADS, *REAL) for ratio in compared(each, results)]
    return ratios + engine_ratio([EnginePair(**each) for each in content["engine"]])


def summary(content: Mapping[str, Any]) -> str:
    """The generated part of the project's README: the first goal of each workload, then all that were missed."""
    facts, ratios = content["machine"], ratios_of(content)
    first: dict[str, Ratio] = {}
    for each in ratios:
        first.setdefault(each.workload, each)
    rows = [
        [
            f"{each.workload}: {IN_WORDS[each.workload]}",
            each.metric,
            f"{each.median:.2f}",
            f"{'at least' if each.at_least else 'at most'} {each.goal:.2f}",
            each.verdict,
        ]
        for each in first.values()
    ]
    origin = wrapped(
        f"One run at commit `{content['commit'][:10]}`, {facts['date'][:10]}, on {facts['processor']} "
        f"({facts['threads']} threads, {facts['memory_gib']} GiB), {content['settings']['model']}:"
    )
    missed = wrapped(
        f"**Goals missed:** {_missed(ratios, content) or 'none'}. "
        f"**Not decided:** {_named(ratios, 'open', 'few pairs') or 'none'}."
    )
    heading = ("workload", "figure", "ratio", "goal", "")
    return "\n".join([*origin, "", *tables.markdown_table(heading, rows), "", *missed, ""])


def page(content: Mapping[str, Any]) -> str:
    """`bench/published/README.md`."""
    ratios = ratios_of(content)
    results = _results(content)
    parts = [
        "# The published benchmark",
        "",
        "Generated by `python -m bench publish` from [peers.json](peers.json), which has every run; do not edit.",
        "",
        *_origin(content),
        "",
        *tables.markdown_table(tables.GOALS, tables.goal_rows(ratios)),
        "",
        *_remarks(ratios, content),
        "",
        "## How it was measured",
        "",
        *_method(content, results),
        "",
        *_ready(results),
        "## Medians by server",
        "",
        "Times in ms, rates in tokens/s; computed: prompt tokens; x: computed / fewest possible.",
    ]
    for workload in dict.fromkeys(each.workload for each in results):
        parts += ["", f"### {workload}", ""]
        parts += tables.markdown_table(tables.FIGURES, tables.rows(workload, results))
    return "\n".join([*parts, ""])


def _origin(content: Mapping[str, Any]) -> list[str]:
    facts = content["machine"]
    return wrapped(
        f"One run of `{content['command']}` at commit `{content['commit'][:10]}`, {facts['date'][:10]}, on "
        f"{facts['processor']} ({facts['threads']} threads, {facts['memory_gib']} GiB), "
        f"{content['settings']['model']}: medians of paired ratios to the best llama-server, with the 95% "
        f"bootstrap interval of the median; {len(content['runs'])} runs in {duration(content['seconds'])}."
    )


def _method(content: Mapping[str, Any], results: Sequence[RunResult]) -> list[str]:
    names = ", ".join(f"`{each.name}`" for each in SERVERS if any(run.server == each.name for run in results))
    pairs = ", ".join(f"{name} {n}" for name, n in content["pairs"].items())
    settings, facts = content["settings"], content["machine"]
    n_engine = len(content["engine"]) or f"{N_ENGINE_PAIRS}, which failed"
    return [
        *_item(f"Servers: {names}."),
        *_item(f"Pairs, fixed beforehand: {pairs}, {ENGINE} {n_engine}."),
        *_item(
            f"All servers run the first {N_ALL} pairs, but those that no goal depends on only "
            f"{content['reference_pairs']}. The other pairs are run by llamaslot and by the llama-server that was "
            "best at the figure in the first ones."
        ),
        *_item(
            f"{settings['slots']} slots, {settings['threads']} threads, llama-cpp-python "
            f"{facts['llama_cpp_python']} for all; load average before the run: {facts['load_before']}."
        ),
        *_item("Workloads, figures and verdicts are explained in [bench/README.md](../README.md)."),
        *(line for name, reason in content["failures"].items() for line in _item(f"Failed: {name}: {reason}")),
    ]


def _ready(results: Sequence[RunResult]) -> list[str]:
    """The times until servers were ready; nothing for raw data without them."""
    names = {"60m": READY_WORKLOADS[0], "SmolLM2": READY_WORKLOADS[1]}
    rows = []
    for server in SERVERS:
        times = [
            [run.ready for run in results if (run.server, run.workload) == (server.name, name) and run.ready]
            for name in names.values()
        ]
        if any(times):
            rows.append([server.name, *(f"{1e3 * statistics.median(each):,.0f}" if each else "" for each in times)])
    if not rows:
        return []
    return [
        "## Time until ready",
        "",
        *wrapped(
            "From the start of the process until `/health` answers 200, in ms; medians of the runs of two "
            f"workloads ({', '.join(READY_WORKLOADS)}), with the pool that each of them asks for."
        ),
        "",
        *tables.markdown_table(("", *names), rows),
        "",
    ]


def _missed(ratios: Sequence[Ratio], content: Mapping[str, Any]) -> str:
    """Return the missed goals, and the workloads that failed."""
    own = [name.removeprefix(f"{OWN}, ") for name in content["failures"] if name.startswith(f"{OWN}, ")]
    failed = [f"{name} (failed)" for name in own if name in IN_WORDS]
    return ", ".join(filter(None, [_named(ratios, "missed"), *failed]))


def _remarks(ratios: Sequence[Ratio], content: Mapping[str, Any]) -> list[str]:
    lines = wrapped(f"**Goals missed:** {_missed(ratios, content) or 'none'}.")
    if undecided := _named(ratios, "open", "few pairs"):
        lines += [
            "",
            *wrapped(f"**Not decided** (the interval reaches across the goal, or few pairs): {undecided}."),
        ]
    return [*lines, "", *wrapped(CPU_NOTE)]


def _named(ratios: Sequence[Ratio], *verdicts: str) -> str:
    return ", ".join(f"{each.workload} ({each.metric})" for each in ratios if each.verdict in verdicts)


def _results(content: Mapping[str, Any]) -> list[RunResult]:
    return [RunResult(**each) for each in content["runs"]]


def _item(text: str) -> list[str]:
    first, *rest = wrapped(text)
    return [f"- {first}", *(f"  {line}" for line in rest)]
