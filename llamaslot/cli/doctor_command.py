"""`llamaslot doctor`: check this machine and a configuration of `serve`, and say what to change."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llamaslot import __version__
from llamaslot.app.doctor.benchmark import BenchmarkError, BenchmarkResult, run_benchmark
from llamaslot.app.doctor.check import Check, Outcome, fail, ok, warn
from llamaslot.app.doctor.examination import Examination
from llamaslot.app.flags import add_flags
from llamaslot.app.logs import configure_logging

_PIPE_COLUMNS = 160
"""Columns where the output is not a terminal."""
_NEEDED = ("llama.cpp", "model", "configuration")
"""Checks that a server does not start without."""
_STYLES = {Outcome.OK: "green", Outcome.WARN: "yellow", Outcome.FAIL: "bold red"}


class _Report(msgspec.Struct):
    """The output of `--json`."""

    version: str
    ok: bool
    """False if a check failed."""
    checks: list[Check]
    benchmark: BenchmarkResult | None


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `serve`, whose configuration is checked, and the doctor's own."""
    add_flags(parser)
    parser.description = "Check this machine and a configuration: takes the flags of `serve`, and starts no server."
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--no-bench",
        dest="bench",
        action="store_false",
        help="without the benchmark, which takes about ten seconds",
    )


def run(args: argparse.Namespace) -> int:
    """Print the results of all checks; 1 if one failed, else 0."""
    configure_logging("json", "error")
    result = None
    with _progress() as on_progress:
        examination = Examination(args, os.environ, on_progress)
        checks = list(examination.checks())
        if args.bench and not any(check.outcome is Outcome.FAIL for check in checks if check.name in _NEEDED):
            on_progress("benchmark: starting a server, then ten seconds")
            try:
                result = run_benchmark(examination.config)
                checks += _measured(result)
            except BenchmarkError as error:
                advice = "look at the checks above; --no-bench leaves this out"
                checks.append((warn if error.has_started else fail)("benchmark", str(error), advice))
    has_failed = any(check.outcome is Outcome.FAIL for check in checks)
    if args.json:
        report = _Report(__version__, not has_failed, checks, result)
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        width = None if sys.stdout.isatty() else _PIPE_COLUMNS
        Console(highlight=False, markup=False, emoji=False, width=width).print(_table(checks))
    return 1 if has_failed else 0


def _measured(result: BenchmarkResult) -> Iterator[Check]:
    yield ok("server", "\n".join(result.start_lines))
    if result.self_test:
        advice = "--reuse-self-test on if you trust reuse all the same; a failed test is worth an issue"
        yield warn("self-test of reuse", result.self_test, advice)
    found = (
        f"ready after {result.load_s:,.1f} s; prompt of {result.prompt_tokens:,} tokens: prefill "
        f"{result.prefill_rate:,.0f} tokens/s, decode {result.decode_rate:,.1f} tokens/s; TTFT "
        f"{result.cold_ttft_ms:,.0f} ms cold, {result.warm_ttft_ms:,.0f} ms warm "
        f"({result.warm_cached_tokens:,} tokens cached)"
    )
    if result.warm_cached_tokens:
        yield ok("benchmark", found)
    else:
        yield warn("benchmark", found, "nothing was reused: see how prefixes of this model are (docs/models.md)")


def _table(checks: Sequence[Check]) -> Table:
    """Return a row for each check, with the advice below what was found."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        text = Text(check.found)
        if check.advice:
            text.append(f"\n-> {check.advice}", style=_STYLES[check.outcome])
        table.add_row(Text(check.outcome, style=_STYLES[check.outcome]), Text(check.name), text)
    return table


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is being checked."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        yield lambda _text: None
        return
    with console.status("") as status:
        yield status.update
