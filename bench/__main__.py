"""`python -m bench [BENCHMARK] [options]`: the command line of all benchmarks."""

from __future__ import annotations

import argparse
import logging
import math
import shlex
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from bench import (
    adapters,
    ahead,
    busy,
    chat,
    constrained,
    decode,
    drafting,
    embed,
    gpu,
    idle,
    layouts,
    processes,
    profile,
    published_layouts,
    retokenizing,
    scenarios,
    size,
    speculate,
    steps,
    swap,
    toolloop,
    tree,
)
from bench.client import BenchmarkError
from bench.families import checkpoints, kinds
from bench.families import published as published_families
from bench.families import run as families
from bench.fleet import options as fleet_options
from bench.fleet import published as published_fleet
from bench.fleet import run as fleet
from bench.peers import baseline, compare, parity, published
from bench.peers.servers import SERVERS
from bench.peers.workloads import FEW, MANY
from bench.report import ROOT, default_threads, model_file, notes
from bench.soak import run as soak
from bench.suite import run as suite
from bench.synthetic import SHAPES
from bench.traces import run as traces
from llamaslot.app.model_files import resolve_model

QUICK = ("llama-server -kvu", "llamaslot")
"""Servers of a quick look."""


def parser() -> ArgumentParser:
    """The parser: each benchmark has the common options and its own, and the function that runs it."""
    result = ArgumentParser(prog="python -m bench", description="Benchmarks of llamaslot.")
    commands = result.add_subparsers(dest="command", required=True)

    chatting = commands.add_parser("chat", help="a four-turn chat with and without the cache")
    _common(chatting, run=_chat, repeats=(5, 2), of="conversations of each kind", shape="qwen3-0.6b")

    decoding = commands.add_parser("decode", help="decode rate against llama-batched-bench")
    _common(decoding, run=_decode, repeats=(7, 2), of="measurements of each side", flags=("--pairs", "--repeats"))
    decoding.add_argument("--tokens", type=_positive, default=128, metavar="N", help="tokens of each answer")
    _threads(decoding)

    constraining = commands.add_parser("constrained", help="decode rate with a JSON schema, and with forced tokens")
    _common(constraining, run=_constrained, repeats=(7, 2), of="measurements of each kind")
    constraining.add_argument(
        "--tokens", type=_positive, default=256, metavar="N", help="tokens of each answer (default: 256)"
    )
    _threads(constraining)

    embedding = commands.add_parser("embed", help="embeddings and reranking against llama-server")
    _common(embedding, run=_embed, repeats=(5, 1), of="measurements of each side")
    _threads(embedding)

    sharing = commands.add_parser("scenarios", help="six ways to share prompts, with and without the cache")
    _common(sharing, run=_scenarios, repeats=(3, 1), of="runs of each scenario")
    names = sorted({scenario.name for scenario in scenarios.SCENARIOS})
    sharing.add_argument("--only", choices=names, metavar="NAME", help=f"one of {', '.join(names)}")

    swapping = commands.add_parser("swap", help="the next turn of a model that had made room for another one")
    _common(swapping, run=_swap, repeats=(7, 2), of="conversations")
    _threads(swapping)

    idling = commands.add_parser("idle", help="prefill beside idle prefixes")
    _common(idling, run=_idle, repeats=(7, 2), of="prompts for each measurement")
    idling.add_argument(
        "--requests", type=_count, default=1000, metavar="N", help="mixed requests before the second part; 0: none"
    )
    _threads(idling)

    comparing = commands.add_parser("peers", help="against llama-server and llama-cpp-python's server")
    of = f"runs of each workload on each server, instead of {FEW} or {MANY}"
    _common(comparing, run=_peers, repeats=(None, 1), of=of)
    comparing.add_argument(
        "--only", action="append", choices=compare.NAMES, metavar="WORKLOAD", help=", ".join(compare.NAMES)
    )
    names = [server.name for server in SERVERS]
    comparing.add_argument("--against", action="append", choices=names, metavar="SERVER", help=", ".join(names))
    text = "begin no pair that would not end within this time"
    comparing.add_argument("--time-limit", type=_positive, default=math.inf, metavar="SECONDS", help=text)
    text = "compare with llamaslot of this checkout instead, in pairs"
    comparing.add_argument("--baseline", type=Path, metavar="FOLDER", help=text)
    _threads(comparing)

    _add_families(commands.add_parser("families", help="reuse by kind of model, beside llama-server's checkpoints"))
    _add_checkpoints(commands.add_parser("checkpoints", help="restart, a short pool, and memory, with checkpoints"))
    _add_traces(commands.add_parser("traces", help="recorded agent sessions, beside llama-server"))
    _add_fleet(commands.add_parser("fleet", help="workers behind a gateway, beside one large server"))
    _add_parity(commands.add_parser("parity", help="60 greedy requests to llama-server and llamaslot"))

    publishing = commands.add_parser("publish", help="the published comparison: one run with a fixed plan")
    publishing.add_argument("--render", action="store_true", help="only write the tables of the raw data again")
    publishing.add_argument("--quick", action="store_true", help="try it out with small prompts, publish nothing")
    publishing.add_argument("--out", type=Path, default=Path("bench/results"), metavar="DIR", help="where logs go")
    _threads(publishing)
    publishing.set_defaults(run=_publish)

    _add_parts(commands)
    return result


def _add_parts(commands: Any) -> None:
    """Add the benchmarks of parts of the server."""
    profiling = commands.add_parser("profile", help="where a step's time goes")
    _common(profiling, run=_profile, repeats=(256, 64), of="tokens of each answer", flags=("--tokens",))
    _threads(profiling)

    stepping = commands.add_parser("steps", help="time of steps of few tokens, plain and padded")
    _common(stepping, run=_steps, repeats=(7, 2), of="computations of each step")
    _threads(stepping)

    placing = commands.add_parser("layouts", help="what it costs how cells lie in the pool")
    _common(placing, run=_layouts, repeats=(5, 1), of="computations of each step")
    most = max(case.n_tokens for case in layouts.CASES)
    text = f"leave out longer conversations (default: {most})"
    placing.add_argument("--max-tokens", type=_positive, default=most, metavar="N", help=text)
    text = "write the table in bench/README.md, under this name of the model"
    placing.add_argument("--publish", metavar="NAME", help=text)
    numbers = sorted({case.n for case in layouts.CASES})
    text = "only so many (default: each of these)"
    placing.add_argument("--conversations", type=int, nargs="+", choices=numbers, default=numbers, help=text)
    _threads(placing)

    splitting = commands.add_parser("processes", help="cost of other clients' load")
    _common(
        splitting, run=_processes, repeats=(8, 2), of="measurements of each side", flags=("--pairs", "--repeats")
    )
    splitting.add_argument("--tokens", type=_positive, default=256, metavar="N", help="tokens of each answer")
    _threads(splitting)

    sharing = commands.add_parser("busy", help="decode and prefill beside busy processes, and llama-server's")
    _common(sharing, run=_busy, repeats=(7, 2), of="requests of each side")
    sharing.add_argument("--tokens", type=_positive, default=32, metavar="N", help="tokens of each answer")
    _threads(sharing)

    telling = commands.add_parser("retokenizing", help="sampled conversations that come back as text")
    _common(telling, run=_retokenizing, repeats=(200, 10), of="conversations", shape="tiny-qwen2")

    looping = commands.add_parser("toolloop", help="an agent's tool loop, with and without restored messages")
    _common(looping, run=_toolloop, repeats=(6, 1), of="conversations of each kind", shape=toolloop.SHAPE)
    _threads(looping)

    _add_adapters(commands.add_parser("adapters", help="streams with two LoRA adapters, at once or in turn"))
    _add_drafting(commands.add_parser("drafting", help="what drafts would gain, replayed without noise"))
    _add_speculate(commands.add_parser("speculate", help="drafts from what a reply repeats, and llama-server's"))

    warming = commands.add_parser("ahead", help="turns that were computed ahead, and what that costs others")
    _common(warming, run=_ahead, repeats=(2, 1), of="conversations", shape=ahead.SHAPE)
    _threads(warming)

    growing = commands.add_parser("tree", help="time of the radix tree's own operations")
    _common(growing, run=_tree, repeats=(9, 2), of="trees to build", shape=None)

    _add_gpu(commands.add_parser("gpu", help="all figures and tests for a GPU, within 12 minutes"))
    _add_suite(commands.add_parser("llama-suite", help="llama-server's own tests against llamaslot"))
    _add_soak(commands.add_parser("soak", help="hours of mixed requests: does memory grow?"))

    sizing = commands.add_parser("size", help="code lines, modules, functions and comments by folder")
    sizing.add_argument("packages", nargs="*", type=Path, default=[size.PACKAGE], metavar="FOLDER")
    sizing.set_defaults(run=lambda options: size.run(options.packages))


def main(arguments: list[str]) -> int:
    """Run one benchmark (`chat` if none is named); the exit status."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["chat", *arguments]
    options = parser().parse_args(arguments)
    try:
        return options.run(options) or 0
    except BenchmarkError as error:
        notes.print(f"bench: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


def _common(
    command: ArgumentParser,
    *,
    run: Callable[[Namespace], None],
    repeats: tuple[int | None, int],
    of: str,
    shape: str | None = "60m",
    flags: tuple[str, ...] = ("--repeats",),
) -> None:
    """Add the common options; `repeats` are those of a measurement and of a quick look."""
    usual = f" (default: {repeats[0]})" if repeats[0] else ""
    command.set_defaults(run=partial(_measure, run, repeats), shape=shape)
    command.add_argument(*flags, dest="repeats", type=_positive, metavar="N", help=of + usual)
    command.add_argument("--out", type=Path, default=Path("bench/results"), metavar="DIR", help="where results go")
    command.add_argument(
        "--quick", action="store_true", help="a small model, few repeats: a look, not a measurement"
    )
    if shape:
        text = f"a GGUF file, or a shape written with random weights: {', '.join(SHAPES)} (default: {shape})"
        command.add_argument("--model", metavar="MODEL", help=text)
        text = 'more flags for what is measured, such as --server="-ngl 99"'
        command.add_argument("--server", default="", metavar="FLAGS", help=text)


def _threads(command: ArgumentParser) -> None:
    text = f"threads of what is measured (default: {default_threads()})"
    command.add_argument("--threads", type=_positive, default=default_threads(), metavar="N", help=text)


def _measure(run: Callable[[Namespace], None], repeats: tuple[int | None, int], options: Namespace) -> None:
    """Run a benchmark with its own number of repeats unless told another one."""
    usual, quick = repeats
    options.repeats = options.repeats or (quick if options.quick else usual)
    options.out.mkdir(parents=True, exist_ok=True)
    run(options)


def _chat(options: Namespace) -> None:
    chat.run(**_measured(options), repeats=options.repeats)


def _decode(options: Namespace) -> None:
    decode.run(**_measured(options), pairs=options.repeats, tokens=options.tokens, threads=options.threads)


def _constrained(options: Namespace) -> None:
    constrained.run(**_measured(options), repeats=options.repeats, tokens=options.tokens, threads=options.threads)


def _add_adapters(command: ArgumentParser) -> None:
    _common(command, run=_adapters, repeats=(7, 2), of="measurements of each kind")
    command.add_argument("--tokens", type=_positive, default=128, metavar="N", help="tokens of each answer")
    _threads(command)


def _adapters(options: Namespace) -> None:
    adapters.run(**_measured(options), repeats=options.repeats, tokens=options.tokens, threads=options.threads)


def _embed(options: Namespace) -> None:
    scale = 0.25 if options.quick else 1.0
    embed.run(**_measured(options), repeats=options.repeats, scale=scale, threads=options.threads)


def _scenarios(options: Namespace) -> None:
    scenarios.run(**_measured(options), repeats=options.repeats, only=options.only)


def _idle(options: Namespace) -> None:
    n_requests = min(options.requests, 50) if options.quick else options.requests
    idle.run(**_measured(options, "-t", str(options.threads)), repeats=options.repeats, n_requests=n_requests)


def _swap(options: Namespace) -> None:
    swap.run(**_measured(options, "-t", str(options.threads)), repeats=options.repeats)


def _peers(options: Namespace) -> None:
    common = _measured(options) | {
        "repeats": options.repeats,
        "scale": 0.25 if options.quick else 1.0,
        "threads": options.threads,
        "only": options.only or (),
    }
    if options.baseline:
        baseline.run(**common, baseline=options.baseline)
    else:
        against = options.against or (QUICK if options.quick else ())
        compare.run(**common, against=against, time_limit_s=options.time_limit)


def _add_families(command: ArgumentParser) -> None:
    _common(command, run=_families, repeats=(1, 1), of="runs of each workload on each server", shape=None)
    names = [each.name for each in kinds.KINDS]
    command.add_argument("--kind", action="append", choices=names, metavar="KIND", help=", ".join(names))
    names = list(families.NAMES)
    command.add_argument("--only", action="append", choices=names, metavar="WORKLOAD", help=", ".join(names))
    text = f"{', '.join(families.PEERS)} (may be repeated; default: {', '.join(families.USUAL)})"
    command.add_argument("--against", action="append", choices=families.PEERS, metavar="SERVER", help=text)
    text = f"factor for the long prompts (default: {families.SCALE})"
    command.add_argument("--scale", type=float, default=families.SCALE, metavar="X", help=text)
    text = f"llamaslot's --checkpoint-min-step, allowed for each new fork (default: {families.INTERVAL})"
    command.add_argument("--interval", type=_positive, default=families.INTERVAL, metavar="N", help=text)
    command.add_argument("--seed", type=_count, default=1, metavar="N", help="seed of the text (default: 1)")
    command.add_argument("--server", default="", metavar="FLAGS", help="more flags for all servers")
    text = "the published run with its fixed plan, whatever else is given: 40 minutes on 2 cores, at a clean commit"
    command.add_argument("--publish", action="store_true", help=text)
    command.add_argument("--render", action="store_true", help="only write the published tables from the raw data")
    _threads(command)


def _families(options: Namespace) -> None:
    if options.render:
        published_families.render()
        return
    if options.publish:
        published_families.run(threads=options.threads, folder=options.out)
        return
    chosen = options.kind or (families.QUICK_KINDS if options.quick else [each.name for each in kinds.KINDS])
    settings = families.Settings(
        kinds=[each for each in kinds.KINDS if each.name in chosen],
        workloads=options.only or (families.QUICK_WORKLOADS if options.quick else families.NAMES),
        peers=options.against or families.USUAL,
        scale=min(options.scale, families.QUICK_SCALE) if options.quick else options.scale,
        interval=options.interval,
        seed=options.seed,
        tiny=options.quick,
    )
    flags = options.server.split()
    common = {"repeats": options.repeats, "threads": options.threads, "folder": options.out}
    families.run(settings=settings, **common, server_flags=flags)


def _add_speculate(command: ArgumentParser) -> None:
    of = f"pairs, instead of {FEW} or {speculate.MANY}"
    _common(command, run=_speculate, repeats=(None, 1), of=of, shape=None)
    _chain_or_trained(command)
    names = list(speculate.NAMES)
    command.add_argument("--only", action="append", choices=names, metavar="WORKLOAD", help=", ".join(names))
    names = [each.name for each in speculate.PEERS]
    text = "(may be repeated; default: all with trained weights, else the first three)"
    command.add_argument(
        "--against", action="append", choices=names, metavar="SERVER", help=f"{', '.join(names)} {text}"
    )
    text = "streams at once (may be repeated; default: all)"
    command.add_argument("--streams", action="append", type=int, choices=speculate.STREAMS, help=text)
    text = "begin no pair that would not end within this time"
    command.add_argument("--time-limit", type=_positive, default=math.inf, metavar="SECONDS", help=text)
    command.add_argument("--server", default="", metavar="FLAGS", help="more flags for all servers")
    _threads(command)


def _speculate(options: Namespace) -> None:
    speculate.run(
        model=options.model or ("60m" if options.quick else speculate.REAL),
        repeats=options.repeats,
        scale=speculate.QUICK_SCALE if options.quick else 1.0,
        threads=options.threads,
        folder=options.out,
        server_flags=options.server.split(),
        only=options.only or (),
        against=options.against,
        streams=options.streams or speculate.STREAMS,
        time_limit_s=options.time_limit,
    )


def _chain_or_trained(command: ArgumentParser) -> None:
    text = f"{speculate.REAL}, a GGUF file, or a shape written with weights that continue a chain (default: "
    command.add_argument("--model", metavar="MODEL", help=f"{text}{speculate.REAL})")


def _add_drafting(command: ArgumentParser) -> None:
    _common(command, run=_drafting, repeats=(8, 1), of="texts of each kind", shape=None)
    _chain_or_trained(command)
    command.add_argument("--server", default="", metavar="FLAGS", help="more flags for the backend")
    _threads(command)


def _drafting(options: Namespace) -> None:
    drafting.run(
        model=options.model or ("60m" if options.quick else speculate.REAL),
        repeats=options.repeats,
        scale=speculate.QUICK_SCALE if options.quick else 1.0,
        folder=options.out,
        server_flags=["-t", str(options.threads), *options.server.split()],
    )


def _add_checkpoints(command: ArgumentParser) -> None:
    _common(command, run=_checkpoints, repeats=(3, 1), of="runs of each measurement", shape=None)
    names = list(checkpoints.MEASUREMENTS)
    command.add_argument("--only", action="append", choices=names, metavar="NAME", help=", ".join(names))
    text = (
        f"a GGUF file, or a shape, for all measurements (default: {checkpoints.HYBRID}, and {checkpoints.WINDOW} "
        "for memory)"
    )
    command.add_argument("--model", metavar="MODEL", help=text)
    text = "factor for the long prompts (default: 1)"
    command.add_argument("--scale", type=float, default=1.0, metavar="X", help=text)
    command.add_argument("--seed", type=_count, default=1, metavar="N", help="seed of the text (default: 1)")
    command.add_argument("--server", default="", metavar="FLAGS", help="more flags for all servers")
    _threads(command)


def _checkpoints(options: Namespace) -> None:
    settings = checkpoints.Settings(
        measurements=[
            name for name in checkpoints.MEASUREMENTS if name in (options.only or checkpoints.MEASUREMENTS)
        ],
        model=options.model,
        scale=min(options.scale, checkpoints.QUICK_SCALE) if options.quick else options.scale,
        seed=options.seed,
        tiny=options.quick,
    )
    common = {"repeats": options.repeats, "threads": options.threads, "folder": options.out}
    checkpoints.run(settings=settings, **common, server_flags=options.server.split())


def _add_fleet(command: ArgumentParser) -> None:
    _common(command, run=_fleet, repeats=(1, 1), of="ignored: each setup runs once")
    fleet_options.add_to(command)
    _threads(command)


def _fleet(options: Namespace) -> None:
    if options.render:
        published_fleet.render()
        return
    if options.publish:
        given = {"remote": options.cache_remote, "nginx": options.nginx, "threads": options.threads}
        published_fleet.run(**given, folder=options.out, quick=options.quick)
        return
    measured = _measured(options)
    settings = fleet_options.settings(options, measured["model"], measured["title"], measured["server_flags"])
    fleet.run(settings=settings, folder=options.out)


def _add_traces(command: ArgumentParser) -> None:
    _common(command, run=_traces, repeats=(3, 1), of="replays on each server")
    text = "folder of recorded sessions (*.json) in the format of kv-cache-tester"
    command.add_argument("--dir", type=Path, required=True, metavar="DIR", help=text)
    for flag, usual, text in (
        ("--sessions", 12, "sessions side by side"),
        ("--requests", 240, "requests of all sessions together"),
        ("--slots", 4, "slots of each server"),
        ("--context", 4096, "tokens of each slot; a session ends at its first request that does not fit"),
        ("--seed", 1, "of the choice of sessions"),
    ):
        command.add_argument(flag, type=_positive, default=usual, metavar="N", help=f"{text} (default: {usual})")
    text = "factor for the recorded pauses, each of one minute at most (default: 0.01)"
    command.add_argument("--time-scale", type=float, default=0.01, metavar="X", help=text)
    text = "one request after another, without pauses: counts repeat exactly, times mean nothing"
    command.add_argument("--in-turn", action="store_true", help=text)
    text = f"{', '.join(traces.NAMES)} (may be repeated; default: {', '.join(traces.USUAL)})"
    command.add_argument("--against", action="append", choices=traces.NAMES, metavar="SERVER", help=text)
    _threads(command)


def _traces(options: Namespace) -> None:
    settings = traces.Settings(
        directory=options.dir,
        n_sessions=options.sessions,
        n_requests=min(options.requests, 40) if options.quick else options.requests,
        n_slots=options.slots,
        n_ctx_slot=options.context,
        time_scale=options.time_scale,
        in_turn=options.in_turn,
        seed=options.seed,
    )
    common = _measured(options) | {"repeats": options.repeats, "threads": options.threads}
    traces.run(settings=settings, **common, against=options.against or ())


def _add_parity(command: ArgumentParser) -> None:
    command.add_argument("--model", default="demo", metavar="FILE", help="GGUF file (default: the embedded model)")
    command.add_argument("--server", default="", metavar="FLAGS", help="more flags for both servers")
    command.add_argument("--out", type=Path, default=Path("bench/results"), metavar="DIR", help="where results go")
    _threads(command)
    command.set_defaults(run=_parity)


def _parity(options: Namespace) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    return parity.run(
        model=resolve_model(options.model),
        title=options.model,
        threads=options.threads,
        folder=options.out,
        server_flags=options.server.split(),
    )


def _publish(options: Namespace) -> None:
    if options.render:
        published.render()
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        published.run(threads=options.threads, logs=options.out, quick=options.quick)


def _profile(options: Namespace) -> None:
    profile.run(**_measured(options), tokens=options.repeats, threads=options.threads)


def _steps(options: Namespace) -> None:
    steps.run(**_measured(options, "-t", str(options.threads)), repeats=options.repeats)


def _layouts(options: Namespace) -> None:
    most = 500 if options.quick else options.max_tokens
    cases = [case for case in layouts.CASES if case.n_tokens <= most and case.n in options.conversations]
    measured = _measured(options)
    measured.pop("server_flags")
    commit = baseline.clean_revision(ROOT) if options.publish else ""
    layouts.run(**measured, repeats=options.repeats, threads=options.threads, cases=cases)
    if options.publish:
        baseline.require_revision(ROOT, commit)
        published_layouts.publish(options.out / "layouts.json", options.publish)


def _processes(options: Namespace) -> None:
    processes.run(**_measured(options), pairs=options.repeats, tokens=options.tokens, threads=options.threads)


def _busy(options: Namespace) -> None:
    busy.run(**_measured(options), repeats=options.repeats, tokens=options.tokens, threads=options.threads)


def _retokenizing(options: Namespace) -> None:
    retokenizing.run(**_with_qwen(options), conversations=options.repeats)


def _ahead(options: Namespace) -> None:
    ahead.run(**_with_qwen(options), repeats=options.repeats, threads=options.threads)


def _toolloop(options: Namespace) -> None:
    toolloop.run(**_with_qwen(options), repeats=options.repeats, threads=options.threads)


def _with_qwen(options: Namespace) -> dict[str, Any]:
    """As `_measured`; without `--model` the benchmark writes random weights with Qwen's vocabulary."""
    if options.model:
        return _measured(options)
    title = f"{options.shape} (random weights with Qwen's vocabulary)"
    return {"model": None, "title": title, "folder": options.out, "server_flags": options.server.split()}


def _tree(options: Namespace) -> None:
    tree.run(repeats=options.repeats, folder=options.out)


def _soak(options: Namespace) -> int:
    return soak.run(minutes=options.minutes, faults=options.faults, folder=options.out, seed=options.seed)


def _add_suite(command: ArgumentParser) -> None:
    command.add_argument("files", nargs="*", metavar="FILE", help=f"of {', '.join(suite.FILES)} (default: all)")
    names = [suite.OWN, suite.PEER]
    text = "run only this one (default: both)"
    command.add_argument("--on", choices=names, metavar="SERVER", help=f"{' or '.join(names)}: {text}")
    text = "let any text pass for the words of a trained model; counts and formats are still compared"
    command.add_argument("--any-words", action="store_true", help=text)
    text = 'more options for pytest, such as --pytest="-k logprobs" (slow tests run with "-m slow")'
    command.add_argument("--pytest", default="", metavar="OPTIONS", help=text)
    command.add_argument("--out", type=Path, default=Path("bench/results"), metavar="DIR", help="where results go")
    command.set_defaults(run=_suite)


def _suite(options: Namespace) -> int:
    servers = [options.on] if options.on else [suite.OWN, suite.PEER]
    more = ["-m", "not slow", *shlex.split(options.pytest)]
    return suite.run(
        servers=servers,
        files=options.files or suite.FILES,
        options=more,
        any_words=options.any_words,
        out=options.out,
    )


def _add_gpu(command: ArgumentParser) -> None:
    text = "run these, also if they are done (default: all that are not done in --out)"
    names = [each.name for each in gpu.STEPS]
    command.add_argument("--steps", nargs="+", choices=names, default=[], metavar="STEP", help=f"{names}: {text}")
    text = f"time for all steps of this call (default: {gpu.TIME_LIMIT_S})"
    command.add_argument("--time-limit", type=_positive, default=gpu.TIME_LIMIT_S, metavar="SECONDS", help=text)
    for flag, usual in (("--large", "qwen3-8b"), ("--small", "qwen3-0.6b")):
        text = f"a GGUF file, or a shape written with random weights (default: {usual})"
        command.add_argument(flag, default=usual, metavar="MODEL", help=text)
    command.add_argument(
        "--server", default="-ngl 99", metavar="FLAGS", help="flags of all servers (default: -ngl 99)"
    )
    command.add_argument("--quick", action="store_true", help="short prompts and tiny models: only to try it out")
    text = "commit to name in the results, for a copy of the checkout without .git"
    command.add_argument("--commit", default="", metavar="COMMIT", help=text)
    text = "where results go (default: bench/results/gpu)"
    command.add_argument("--out", type=Path, default=Path("bench/results/gpu"), metavar="DIR", help=text)
    command.add_argument("--run-step", default="", help=argparse.SUPPRESS)
    _threads(command)
    command.set_defaults(run=_gpu)


def _gpu(options: Namespace) -> int:
    if options.run_step:
        return gpu.run_step(options.run_step, options.out)
    settings = gpu.Settings(
        small=options.small,
        large=options.large,
        threads=options.threads,
        scale=0.25 if options.quick else 1.0,
        tiny=options.quick,
        flags=tuple(options.server.split()),
    )
    common = {"steps": options.steps, "time_limit_s": options.time_limit, "commit": options.commit}
    return gpu.run(settings=settings, **common, folder=options.out)


def _add_soak(command: ArgumentParser) -> None:
    command.add_argument("--minutes", type=float, default=60.0, metavar="N", help="at most 1440 (default: 60)")
    command.add_argument("--faults", action="store_true", help="kill engine and prompt worker now and then")
    command.add_argument("--seed", type=_count, default=1, metavar="N", help="of the requests (default: 1)")
    usual = Path(tempfile.gettempdir()) / "llamaslot-soak"
    command.add_argument(
        "--out", type=Path, default=usual, metavar="DIR", help=f"where data goes (default: {usual})"
    )
    command.set_defaults(run=_soak)


def _measured(options: Namespace, *flags: str) -> dict[str, Any]:
    """The model, flags and folder of a measurement; a quick look takes a small shape."""
    model = options.model or ("60m" if options.quick else options.shape)
    title = f"{model} shape (random weights, Q8_0)" if model in SHAPES else Path(model).name
    server_flags = [*flags, *options.server.split()]
    return {"model": model_file(model), "title": title, "folder": options.out, "server_flags": server_flags}


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    # llama.cpp's own lines about the vocabulary that is loaded here are of no interest.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    sys.exit(main(sys.argv[1:]))
