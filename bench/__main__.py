"""`python -m bench [chat|decode|idle|peers|scenarios|tree] [options]`: the command line of all benchmarks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench import chat, compare, decode, idle, scenarios, tree
from bench.client import BenchmarkError
from bench.contenders import CONTENDERS
from bench.report import default_threads, model_file, notes
from bench.synthetic import SHAPES
from bench.workloads import WORKLOADS

QUICK = ("llama-server -kvu", "llamaslot")
"""Contenders of a quick look."""


def parser() -> argparse.ArgumentParser:
    """All options; each benchmark has the common ones and its own."""
    results = argparse.ArgumentParser(add_help=False)
    results.add_argument("--out", type=Path, default=Path("bench/results"), metavar="DIR", help="where results go")
    results.add_argument(
        "--quick", action="store_true", help="a small model, few repeats: a look, not a measurement"
    )
    common = argparse.ArgumentParser(add_help=False, parents=[results])
    common.add_argument(
        "--model", metavar="MODEL", help=f"a GGUF file, or a shape written with random weights: {', '.join(SHAPES)}"
    )
    common.add_argument(
        "--server", default="", metavar="FLAGS", help='more flags for what is measured, such as --server="-ngl 99"'
    )
    result = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks of llamaslot.")
    commands = result.add_subparsers(dest="command", required=True)
    chatting = commands.add_parser("chat", parents=[common], help="a four-turn chat with and without the cache")
    chatting.add_argument("--repeats", type=_positive, metavar="N", help="conversations of each kind (default: 5)")
    decoding = commands.add_parser("decode", parents=[common], help="decode rate against llama-batched-bench")
    decoding.add_argument("--pairs", type=_positive, metavar="N", help="measurements of each side (default: 7)")
    decoding.add_argument("--tokens", type=_positive, default=128, metavar="N", help="tokens of each answer")
    decoding.add_argument("--threads", type=_positive, default=default_threads(), metavar="N", help="of each side")
    text = "six ways to share prompts: no cache, flat blocks, the tree"
    sharing = commands.add_parser("scenarios", parents=[common], help=text)
    sharing.add_argument("--repeats", type=_positive, metavar="N", help="runs of each scenario (default: 3)")
    names = sorted({scenario.name for scenario in scenarios.SCENARIOS})
    sharing.add_argument("--only", choices=names, metavar="NAME", help=f"one of {', '.join(names)}")
    idling = commands.add_parser("idle", parents=[common], help="what idle prefixes cost")
    idling.add_argument("--repeats", type=_positive, metavar="N", help="prompts for each figure (default: 7)")
    idling.add_argument(
        "--requests", type=_count, default=1000, metavar="N", help="mixed requests before the second part; 0: none"
    )
    idling.add_argument("--threads", type=_positive, default=default_threads(), metavar="N")
    text = "against llama-server and llama-cpp-python's server"
    comparing = commands.add_parser("peers", parents=[common], help=text)
    comparing.add_argument("--repeats", type=_positive, metavar="N", help="of each workload (default: 5)")
    comparing.add_argument(
        "--threads", type=_positive, default=default_threads(), metavar="N", help="of each server"
    )
    names = [workload.name for workload in WORKLOADS]
    comparing.add_argument("--only", action="append", choices=names, metavar="WORKLOAD", help=", ".join(names))
    names = [contender.name for contender in CONTENDERS]
    comparing.add_argument("--against", action="append", choices=names, metavar="SERVER", help=", ".join(names))
    growing = commands.add_parser("tree", parents=[results], help="what the radix tree's own work costs")
    growing.add_argument("--repeats", type=_positive, metavar="N", help="trees to build (default: 9)")
    return result


def main(arguments: list[str]) -> int:
    """Run one benchmark (`chat` if none is named); the exit status."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["chat", *arguments]
    options = parser().parse_args(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if options.command == "chat":
            model = options.model or ("60m" if options.quick else "qwen3-0.6b")
            chat.run(
                model=model_file(model),
                title=_title(model),
                repeats=options.repeats or (2 if options.quick else 5),
                folder=options.out,
                server_flags=options.server.split(),
            )
        elif options.command == "scenarios":
            model = options.model or "60m"
            scenarios.run(
                model=model_file(model),
                title=_title(model),
                repeats=options.repeats or (1 if options.quick else 3),
                folder=options.out,
                server_flags=options.server.split(),
                only=options.only,
            )
        elif options.command == "idle":
            model = options.model or "60m"
            idle.run(
                model=model_file(model),
                title=_title(model),
                repeats=options.repeats or (2 if options.quick else 7),
                n_requests=min(options.requests, 50) if options.quick else options.requests,
                folder=options.out,
                server_flags=["-t", str(options.threads), *options.server.split()],
            )
        elif options.command == "peers":
            model = options.model or "60m"
            compare.run(
                model=model_file(model),
                title=_title(model),
                repeats=options.repeats or (1 if options.quick else 5),
                scale=0.25 if options.quick else 1.0,
                threads=options.threads,
                only=options.only or (),
                against=options.against or (QUICK if options.quick else ()),
                folder=options.out,
                more_flags=options.server.split(),
            )
        elif options.command == "tree":
            tree.run(repeats=options.repeats or (2 if options.quick else 9), folder=options.out)
        else:
            model = options.model or "60m"
            decode.run(
                model=model_file(model),
                title=_title(model),
                pairs=options.pairs or (2 if options.quick else 7),
                tokens=options.tokens,
                threads=options.threads,
                folder=options.out,
                server_flags=options.server.split(),
            )
    except BenchmarkError as error:
        notes.print(f"bench: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _title(model: str) -> str:
    return f"{model} shape (random weights, Q8_0)" if model in SHAPES else Path(model).name


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
    sys.exit(main(sys.argv[1:]))
