"""`llamaslot pull NAME`: show facts about a model, then download it into the Hugging Face cache."""

from __future__ import annotations

import argparse
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

from llamaslot.app.models import Model, check_digest, find_model, known_models, resolve_model
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
    if not model.repo:
        path = resolve_model(model.name)
        check_digest(model, path)
        print(path)
        return 0
    console = Console(stderr=True, highlight=False)
    try:
        path = _pull(model, console)
    except KeyboardInterrupt:
        console.print("Stopped. The received bytes are kept: run the same command again to continue.")
        return _INTERRUPTED
    print(path)
    return 0


def _listing() -> Table:
    table = Table("NAME", "CHECKED", Column("SOURCE", overflow="fold"), "NOTE", box=None, pad_edge=False)
    for model in known_models().values():
        source = f"{model.repo}:{model.file}" if model.repo else "in the package"
        table.add_row(model.name, model.checked, source, model.note)
    return table


def _pull(model: Model, console: Console) -> Path:
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
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bars: dict[hub.Stage, TaskID] = {}

        def report(stage: hub.Stage, done: int) -> None:
            if stage not in bars:
                bars[stage] = progress.add_task(stage, total=remote.size, completed=done)
            progress.update(bars[stage], completed=done)

        path = hub.download(remote, report)
    if was_here:
        # A download has been verified; a file that was already in the cache has not.
        check_digest(model, path)
    return path
