"""`llamaslot doctor`: check this machine and a configuration of `serve`, and advise what to change."""

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
"""Width of the output if it is not a terminal."""
_NEEDED = ("llama.cpp", "model", "configuration")
"""Checks that must pass for a server to start, and so for the benchmark."""
_STYLES = {Outcome.OK: "green", Outcome.WARN: "yellow", Outcome.FAIL: "bold red"}


class _Report(msgspec.Struct):
    """The output of `--json`."""

    version: str
    ok: bool
    """False if a check failed."""
    checks: list[Check]
    benchmark: BenchmarkResult | None


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `serve`, which give the configuration to check, and the doctor's own."""
    add_flags(parser)
    parser.description = "Check this machine and a configuration. Takes the flags of `serve` but does not serve."
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--no-bench",
        dest="bench",
        action="store_false",
        help="skip the benchmark, which takes about ten seconds",
    )


def run(args: argparse.Namespace) -> int:
    """Print the results of all checks; return 1 if one failed, otherwise 0."""
    configure_logging("json", "error")
    result = None
    with _progress() as on_progress:
        examination = Examination(args, os.environ, on_progress)
        checks = list(examination.checks())
        if args.bench and not any(check.outcome is Outcome.FAIL for check in checks if check.name in _NEEDED):
            on_progress("benchmark: starting a server, then measuring for ten seconds")
            try:
                result = run_benchmark(examination.config)
                checks += _measured(result)
            except BenchmarkError as error:
                advice = "see the checks above; --no-bench skips the benchmark"
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
        advice = "use --reuse-self-test on to reuse prefixes anyway; please report a failed test as an issue"
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
        yield warn("benchmark", found, "nothing was reused: see docs/models.md for reuse with this model")


def _table(checks: Sequence[Check]) -> Table:
    """Return a table with a row for each check and its advice below the finding."""
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
    """Show the current step if standard error is a terminal."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        yield lambda _text: None
        return
    with console.status("") as status:
        yield status.update
