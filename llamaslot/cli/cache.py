"""`llamaslot cache`: what a running server's prefix cache holds, as a tree in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from llamaslot.base.errors import ConfigError
from llamaslot.cli.client import DEFAULT_URL, Client, RefusedError, add_api_key

_SHOWN = 60
"""Characters of a prefix' text that are shown at most."""
_WIDTH = 200
"""Columns where the output is no terminal; what is longer is cut."""


class Cells(msgspec.Struct):
    """Cells of the pool by what uses them."""

    total: int
    used: int
    idle: int
    pinned: int
    free: int


class Sequences(msgspec.Struct):
    """Sequence ids, and how many of them hold something."""

    slots: int
    reserved: int
    used: int


class Requests(msgspec.Struct):
    """Requests by what they found."""

    hits: int
    misses: int
    hit_rate: float
    cross_slot: int
    from_ram: int
    from_disk: int
    anchored: int
    waits: int


class PromptTokens(msgspec.Struct):
    """Their prompts."""

    total: int
    matched: int
    hit_rate: float


class Prefix(msgspec.Struct):
    """A node of the tree."""

    parent: int | None
    namespace: int
    tokens: int
    edge_tokens: int
    hits: int
    holders: list[int]
    pinned: bool
    last_used: int
    text: str | None = None


class Tier(msgspec.Struct):
    """What is stored off the pool, in RAM or on disk."""

    total_bytes: int
    used_bytes: int
    tokens: int
    segments: int


class Anchors(msgspec.Struct):
    """Replies whose tokens are remembered."""

    replies: int
    bytes: int


class State(msgspec.Struct):
    """The answer to `GET /cache`, as far as it is shown."""

    namespaces: int
    nodes: int
    leaves: int
    tokens: int
    tokens_pinned: int
    cells: Cells
    ram: Tier
    disk: Tier
    anchors: Anchors
    sequences: Sequences
    requests: Requests
    prompt_tokens: PromptTokens
    copied_tokens: int
    evicted_tokens: int
    stored_tokens: int
    loaded_tokens: int
    parked_paths: int
    lost_paths: int
    preemptions: int
    prefixes: list[Prefix]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `llamaslot cache`."""
    parser.add_argument(
        "url", nargs="?", default=DEFAULT_URL, metavar="URL", help="the server (default: %(default)s)"
    )
    parser.add_argument("--top", type=int, default=20, metavar="N", help="prefixes to show (default: %(default)s)")
    parser.add_argument("--clear", action="store_true", help="first give up everything that no request uses")
    add_api_key(parser)


def run(args: argparse.Namespace) -> int:
    """Print the state, after clearing if that is wanted. Raises ConfigError when the server cannot tell."""
    client = Client(args.url, args.api_key)
    width = None if sys.stdout.isatty() else _WIDTH
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    if args.clear:
        cleared = _asked(client, "POST", "/cache/clear")
        names = "cleared_tokens", "cleared_ram_tokens", "cleared_disk_tokens"
        n_idle, n_ram, n_disk = (_field(cleared, name, client) for name in names)
        console.print(f"cleared: {_count(n_idle, 'idle token')}, {n_ram:,} in RAM, {n_disk:,} on disk")
    state = _understood(_asked(client, "GET", f"/cache?top={args.top}"), client)
    for line in figures(state):
        console.print(line, soft_wrap=True)
    console.print(drawn(state.prefixes, n_nodes=state.nodes, n_namespaces=state.namespaces))
    return 0


def _asked(client: Client, method: str, path: str) -> dict[str, Any]:
    try:
        return client.ask(method, path)
    except RefusedError as error:
        if error.status in (404, 405):
            raise ConfigError(
                f"{client.url} has no /cache: what answers there is another server or an older llamaslot"
            ) from None
        raise


def _understood(reply: dict[str, Any], client: Client) -> State:
    try:
        return msgspec.convert(reply, State)
    except msgspec.ValidationError as error:
        raise _foreign(client, str(error)) from None


def _field(reply: dict[str, Any], name: str, client: Client) -> int:
    value = reply.get(name)
    if not isinstance(value, int):
        raise _foreign(client, f"no '{name}'")
    return value


def _foreign(client: Client, reason: str) -> ConfigError:
    return ConfigError(f"the answer of {client.url} is of another version of llamaslot ({reason})")


def _tier(name: str, tier: Tier) -> str:
    return (
        f"{name}       {_count(tier.tokens, 'token')} in {_count(tier.segments, 'segment')}, "
        f"{tier.used_bytes / 2**20:,.1f} of {tier.total_bytes / 2**20:,.0f} MiB"
    )


def figures(state: State) -> list[str]:
    """The numbers, a line for each thing."""
    cells, seqs, requests, prompt = state.cells, state.sequences, state.requests, state.prompt_tokens
    n_requests = requests.hits + requests.misses
    return [
        f"cells      {cells.used:,} of {cells.total:,} used: {cells.pinned:,} by running requests, "
        f"{cells.idle:,} idle; {cells.free:,} free",
        _tier("RAM ", state.ram),
        *([_tier("disk", state.disk)] if state.disk.total_bytes else []),
        f"sequences  {seqs.used} of {seqs.slots + seqs.reserved} used ({seqs.slots} slots', "
        f"{seqs.reserved} reserved)",
        f"tree       {_count(state.tokens, 'token')} in {_count(state.nodes, 'node')}, "
        f"{_count(state.leaves, 'leaf', 'leaves')}, {_count(state.namespaces, 'namespace')}; "
        f"{state.tokens_pinned:,} pinned",
        f"hits       {requests.hits:,} of {_count(n_requests, 'request')} ({requests.hit_rate:.1%}), "
        f"{requests.cross_slot:,} across slots, {requests.from_ram:,} from RAM, {requests.from_disk:,} from disk; "
        f"{requests.waits:,} waited for another",
        f"anchors    {_count(state.anchors.replies, 'reply', 'replies')}, {state.anchors.bytes / 2**20:,.1f} MiB; "
        f"{_count(requests.anchored, 'request')} went on from one",
        f"reused     {prompt.matched:,} of {_count(prompt.total, 'prompt token')} ({prompt.hit_rate:.1%})",
        f"moved      {state.copied_tokens:,} tokens copied, {state.stored_tokens:,} to RAM, "
        f"{state.loaded_tokens:,} from RAM; {_count(state.parked_paths, 'path')} parked",
        f"given up   {state.evicted_tokens:,} tokens evicted; "
        f"{_count(state.lost_paths, 'path')} lost for want of a sequence id; "
        f"{_count(state.preemptions, 'preemption')}",
    ]


def drawn(prefixes: Sequence[Prefix], *, n_nodes: int, n_namespaces: int) -> Tree:
    """The prefixes as a tree, in their order; those of each namespace apart where there are several."""
    title = f"prefixes   {len(prefixes)} of {n_nodes}, most hits first" if n_nodes else "prefixes   none"
    root = Tree(Text(title), guide_style="dim")
    namespaces: dict[int, Tree] = {}
    branches: list[Tree] = []
    for prefix in prefixes:
        # A parent comes before its children, else it is no parent.
        if prefix.parent is not None and 0 <= prefix.parent < len(branches):
            parent = branches[prefix.parent]
        elif n_namespaces == 1:
            parent = root
        else:
            if prefix.namespace not in namespaces:
                namespaces[prefix.namespace] = root.add(Text(f"namespace {prefix.namespace}", style="dim"))
            parent = namespaces[prefix.namespace]
        branches.append(parent.add(_label(prefix)))
    return root


def _label(prefix: Prefix) -> Text:
    size = f"+{prefix.edge_tokens:,} = {_count(prefix.tokens, 'token')}"
    label = Text(size, style="bold", no_wrap=True, overflow="ellipsis")
    held = ", ".join(map(str, prefix.holders))
    rest = f" · {_count(prefix.hits, 'hit')} · held by {held} · used #{prefix.last_used + 1} latest"
    label.append(rest, style="not bold")
    if prefix.pinned:
        label.append(" · running", style="not bold green")
    if prefix.text:
        # As a literal: whatever a prompt holds, none of it may steer the terminal.
        text = prefix.text if len(prefix.text) <= _SHOWN else prefix.text[: _SHOWN - 1] + "…"
        label.append(f" {text!r}", style="not bold dim")
    return label


def _count(n: int, one: str, many: str = "") -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"
