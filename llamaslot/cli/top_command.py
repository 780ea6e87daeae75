"""`llamaslot top`: slots, cache and requests of a running server, once a second."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterable
from contextlib import closing, nullcontext
from datetime import datetime

import msgspec
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from llamaslot.cli.client import Client, add_access, plain_console
from llamaslot.service.activity import RequestUpdate, StateUpdate, Update

_MIB = 2**20
_MAX_REQUESTS = 200
_BAR_COLUMNS = 40
_STYLES = {"idle": "dim", "loading": "green", "prefill": "red", "decode": "blue"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `llamaslot top`."""
    add_access(parser)


def run(args: argparse.Namespace) -> int:
    """Show the server until Ctrl-C, or once in a pipe. Raises ConfigError if it has no /events."""
    client = Client(args.url, args.api_key, args.cacert)
    console = plain_console()
    requests: deque[RequestUpdate] = deque(maxlen=_MAX_REQUESTS)
    screen = Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else nullcontext()
    with (
        client.explaining("/events"),
        closing(client.connect()) as connection,
        client.send(connection, "GET", "/events") as response,
        screen as live,
    ):
        for event in client.events(response):
            update: Update = msgspec.convert(event, Update)
            if isinstance(update, RequestUpdate):
                requests.appendleft(update)
            elif isinstance(update, StateUpdate) and live is not None:
                live.update(view(update, requests), refresh=True)
            elif isinstance(update, StateUpdate):
                console.print(view(update, requests))
                break
    return 0


def view(state: StateUpdate, requests: Iterable[RequestUpdate]) -> Group:
    """Return the server's memory, its slots, and the requests that have ended, latest first."""
    return Group(_memory(state), Text(), _slots(state), Text(), _ended(requests))


def _memory(state: StateUpdate) -> Table:
    cells, prompts = state.cache.cells, state.cache.prompt_tokens
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        "KV pool",
        _bar(cells.used, cells.total),
        f"{cells.pinned:,} in use, {cells.idle:,} idle, {cells.free:,} free of {cells.total:,} cells",
    )
    for name, tier in (("RAM", state.cache.ram), ("disk", state.cache.disk), ("states", state.cache.checkpoints)):
        if tier.total_bytes:
            text = f"{tier.used_bytes / _MIB:,.0f} of {tier.total_bytes / _MIB:,.0f} MiB"
            grid.add_row(name, _bar(tier.used_bytes, tier.total_bytes), text)
    text = f"{prompts.matched:,} of {prompts.total:,} prompt tokens ({prompts.hit_rate:.1%})"
    grid.add_row("reused", _bar(prompts.matched, prompts.total), text)
    return grid


def _slots(state: StateUpdate) -> Table:
    grid = Table.grid(padding=(0, 2))
    for slot in state.slots:
        done, text = 0, f"holds {slot.n_held:,} tokens"
        if slot.request_id:
            done = slot.n_prompt_computed if slot.state == "prefill" else slot.n_prompt
            text = f"{slot.n_prompt:,} prompt tokens, {slot.n_generated:,} generated  {slot.request_id}"
        grid.add_row(f"slot {slot.id}", Text(slot.state, _STYLES[slot.state]), _bar(done, slot.n_prompt), text)
    grid.add_row("waiting", "", "", f"{state.queued:,} requests")
    return grid


def _ended(requests: Iterable[RequestUpdate]) -> Table:
    table = Table("ended", "request", box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("prompt", "reused", "TTFT ms", "tokens/s"):
        table.add_column(name, justify="right")
    table.add_column("end")
    table.add_column("why no more was reused", no_wrap=True)
    for each in requests:
        fields = each.fields
        table.add_row(
            datetime.fromtimestamp(each.time).strftime("%H:%M:%S"),
            each.request_id,
            *(
                _number(fields.get(name))
                for name in ("prompt_tokens", "prefix_cache_tokens", "ttft_ms", "tokens_per_second")
            ),
            each.finish_reason,
            str(fields.get("prefix_miss") or ""),
        )
    return table


def _bar(n: float, total: float) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=n, width=_BAR_COLUMNS)


def _number(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) else ""
