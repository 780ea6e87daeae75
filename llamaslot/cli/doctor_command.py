"""`llamaslot doctor`: check this machine and a configuration of `serve`, and advise what to change."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import platformdirs
import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llamaslot import __version__
from llamaslot.app.cache_tiers import remote_settings
from llamaslot.app.config import Config
from llamaslot.app.config_reader import add_flags
from llamaslot.app.doctor import Check, Outcome, checks, fail, ok, warn
from llamaslot.app.doctor.benchmark import BenchmarkError, BenchmarkResult, run_benchmark
from llamaslot.app.doctor.llama_checks import default_model, llama_checks, model_file
from llamaslot.app.logs import configure_logging
from llamaslot.app.model_files import AUTO
from llamaslot.app.start_lines import host_gpus
from llamaslot.backend.host import host_cpus, host_memory
from llamaslot.base.errors import ConfigError
from llamaslot.base.files import parts

_BUSY_S = 0.3
"""Time over which CPU usage is measured."""
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
        config, configuration = checks.configuration(args, os.environ)
        found = list(_checks(config, configuration, on_progress))
        if args.bench and not any(check.outcome is Outcome.FAIL for check in found if check.name in _NEEDED):
            on_progress("benchmark: starting a server, then measuring for ten seconds")
            try:
                result = run_benchmark(config)
                found += _measured(result)
            except BenchmarkError as error:
                advice = "see the checks above; --no-bench skips the benchmark"
                found.append((warn if error.has_started else fail)("benchmark", str(error), advice))
    has_failed = any(check.outcome is Outcome.FAIL for check in found)
    if args.json:
        report = _Report(__version__, not has_failed, found, result)
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        width = None if sys.stdout.isatty() else _PIPE_COLUMNS
        Console(highlight=False, markup=False, emoji=False, width=width).print(_table(found))
    return 1 if has_failed else 0


def _checks(config: Config, configuration: Check, on_progress: Callable[[str], None]) -> Iterator[Check]:
    """Yield the results of all checks; `on_progress` gets the name of each slow one before it begins."""
    yield checks.software()
    if config.model == AUTO and (default := default_model(config.offline)):
        yield default
    model = model_file(config)
    if isinstance(model, Check):
        yield model
    path = model if isinstance(model, Path) else None
    on_progress("loading llama.cpp")
    yield from llama_checks(path, config.wanted_gpu_layers, host_gpus())
    free, total = host_memory()
    swap = psutil.swap_memory()
    yield checks.cpus(host_cpus(), config.threads, psutil.cpu_percent(_BUSY_S) / 100)
    yield checks.memory(free, total, sum(part.stat().st_size for part in parts(path)) if path else 0)
    yield checks.swap(int(swap.total), int(swap.used), total)
    yield checks.descriptors(config.max_connections)
    cache = platformdirs.user_cache_path("llamaslot")
    on_progress(f"measuring {cache}")
    yield checks.cache_folder(cache)
    if config.cache_disk:
        disk = Path(config.cache_disk).expanduser()
        on_progress(f"measuring {disk}")
        yield checks.disk_tier(disk)
    yield configuration
    yield from _remote_checks(config, on_progress)
    yield checks.access(config)
    yield checks.port(config)


def _remote_checks(config: Config, on_progress: Callable[[str], None]) -> Sequence[Check]:
    try:
        settings = remote_settings(config)
    except ConfigError:
        # The configuration check has reported this.
        return ()
    if settings is None:
        return ()
    # Imported only if needed, because nothing else uses the redis package.
    from llamaslot.app.doctor.remote_checks import remote_checks  # noqa: PLC0415

    on_progress(f"asking {settings.address}")
    return remote_checks(settings, config)


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


def _table(found: Sequence[Check]) -> Table:
    """Return a table with a row for each check and its advice below the finding."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in found:
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
