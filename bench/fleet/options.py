"""Options of `python -m bench fleet`."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.fleet.setups import APIS, LENGTHS, PARTS, SETUPS, Settings, available, shortened


def add_to(command: ArgumentParser) -> None:
    """Add the options of this benchmark."""
    texts = "computed tokens and TTFT", "a worker killed (kill -9)", "a rolling restart"
    for part, text in zip(PARTS, texts, strict=True):
        command.add_argument(f"--{part}", action="store_true", help=f"{text} (without any of these: all)")
    # Names of setups have commas.
    text = f"may be given several times: {'; '.join(SETUPS)} (default: all)"
    command.add_argument("--only", action="append", choices=list(SETUPS), metavar="SETUP", help=text)
    text = f"may be given several times: {'; '.join(APIS)} (default: all)"
    command.add_argument("--api", action="append", choices=APIS, metavar="API", help=text)
    text = "nginx, if it is not in PATH; without any, its setup is left out"
    command.add_argument("--nginx", default="", metavar="FILE", help=text)
    command.add_argument("--cache-remote", default="", metavar="URL", help="store by which workers share prefixes")
    command.add_argument(
        "--fleet", type=shlex.split, default=[], metavar="FLAGS", help="more flags for fleet.py up"
    )
    for flag, usual, text in (
        ("--workers", 3, "workers"),
        ("--conversations", 24, "conversations at once"),
        ("--system-tokens", LENGTHS.system, "tokens of a system prompt"),
        ("--seed", 1, "seed of the text"),
    ):
        command.add_argument(flag, type=int, default=usual, metavar="N", help=f"{text} (default: {usual})")
    text = "mean seconds between an answer and the next turn (default: 1)"
    command.add_argument("--pause", type=float, default=1.0, metavar="S", help=text)
    text = "the published run with its fixed plan, whatever else is given: an hour on 2 cores, at a clean commit"
    command.add_argument(
        "--publish", action="store_true", help=f"{text}; with --quick a trial that publishes nothing"
    )
    command.add_argument("--render", action="store_true", help="only write the published tables from the raw data")


def settings(options: Namespace, model: Path, title: str, flags: Sequence[str]) -> Settings:
    """Return what the command line asks for."""
    remote = ("--cache-remote", options.cache_remote) if options.cache_remote else ()
    chosen = Settings(
        model=model,
        title=title,
        parts=[part for part in PARTS if getattr(options, part)] or PARTS,
        setups=available(options.only or (), options.nginx),
        apis=options.api or APIS,
        n_workers=options.workers,
        n_conversations=options.conversations,
        lengths=replace(LENGTHS, system=options.system_tokens),
        threads=options.threads,
        pause_s=options.pause,
        seed=options.seed,
        flags=tuple(flags),
        fleet_flags=(*options.fleet, *remote),
        nginx=options.nginx,
    )
    return shortened(chosen) if options.quick else chosen
