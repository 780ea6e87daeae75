"""`python -m bench fleet`: conversations on three workers behind a gateway, beside one large server.

Every setup gets the same conversations, on processes of its own and with empty disks. The one large server has the
slots and cells of all workers together. It is the reference for computed tokens, since it computes no prefix twice.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

from bench.fleet import compare, failures
from bench.fleet.setups import SETUPS, Settings
from bench.peers.baseline import revision
from bench.report import console, machine, write_json
from bench.tokens import Tokens


def run(*, settings: Settings, folder: Path) -> dict[str, Any]:
    """Measure, print a table for each part, write `fleet.json` and return what it has.

    Raises `BenchmarkError` where a request failed.
    """
    facts, began = machine(), monotonic()
    content: dict[str, Any] = {"benchmark": "fleet", "commit": revision(Path.cwd()), "machine": facts}
    content["settings"] = asdict(settings) | {
        "model": settings.title,
        # Raw data that is published names no path of this machine.
        "nginx": Path(settings.nginx).name,
        "worker_flags": " ".join(settings.server_flags()),
        "one_server_flags": " ".join(settings.server_flags(settings.n_workers)),
    }
    tokens = Tokens(settings.model)
    if "compare" in settings.parts:
        results = asyncio.run(compare.compare(settings, tokens, folder))
        console.print(compare.table(results, settings))
        content["compare"] = [asdict(each) for each in results]
    for part, measure, show in (
        ("kill", failures.kill, failures.kill_table),
        ("rolling", failures.rolling, failures.rolling_table),
    ):
        if part in settings.parts:
            found = [asyncio.run(measure(settings, setup, tokens)) for setup in settings.setups if SETUPS[setup]]
            console.print(show(found, settings))
            content[part] = [asdict(each) for each in found]
    content["seconds"] = monotonic() - began
    write_json(folder / "fleet.json", content)
    return content
