"""`llamaslot cache`: print the prefix cache of a running server, with its radix tree."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TypeVar
from urllib.parse import quote

import msgspec
from msgspec import UNSET
from rich.text import Text
from rich.tree import Tree

from llamaslot.base.commands import CacheCleared
from llamaslot.base.stats import CachePrefix, CacheState, CheckpointStats, TierStats
from llamaslot.cli.client import Client, add_access, counted, plain_console

_MAX_TEXT_CHARS = 60
"""Most characters of a prefix's text that are shown."""


_R = TypeVar("_R", bound=msgspec.Struct)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `llamaslot cache`."""
    add_access(parser)
    parser.add_argument(
        "-m", "--model", default="", metavar="NAME", help="one of the models of a server that has several"
    )
    parser.add_argument("--top", type=int, default=20, metavar="N", help="prefixes to show (default: %(default)s)")
    parser.add_argument("--clear", action="store_true", help="first drop everything not used by running requests")


def run(args: argparse.Namespace) -> int:
    """Clear the cache if requested, then print its state. Raises ConfigError if the server has no such endpoint."""
    client = Client(args.url, args.api_key, args.cacert)
    console = plain_console()
    of_model = f"model={quote(args.model, safe='')}" if args.model else ""
    if args.clear:
        cleared = client.fetch("POST", f"/cache/clear?{of_model}", CacheCleared)
        console.print(
            f"cleared: {counted(cleared.cleared_tokens, 'idle token')}, {cleared.cleared_ram_tokens:,} in RAM, "
            f"{cleared.cleared_disk_tokens:,} on disk"
        )
    state = client.fetch("GET", f"/cache?top={args.top}&{of_model}", CacheState)
    for line in summary(state):
        console.print(line, soft_wrap=True)
    console.print(tree(state.prefixes, n_namespaces=state.namespaces))
    return 0


def _tier(name: str, tier: TierStats) -> str:
    return (
        f"{name}       {counted(tier.tokens, 'token')} in {counted(tier.segments, 'segment')}, "
        f"{tier.used_bytes / 2**20:,.1f} of {tier.total_bytes / 2**20:,.0f} MiB"
    )


def _checkpoints(stats: CheckpointStats) -> list[str]:
    """Return a line about checkpoints; no line if the model needs none."""
    if not stats.total_bytes:
        return []
    return [
        f"states     {counted(stats.count, 'checkpoint')}, {stats.used_bytes / 2**20:,.1f} of "
        f"{stats.total_bytes / 2**20:,.0f} MiB; {stats.taken:,} taken, {stats.restored:,} restored, "
        f"{stats.evicted:,} evicted"
    ]


def summary(state: CacheState) -> list[str]:
    """Return the statistics as lines."""
    cells, seqs, requests, prompt = state.cells, state.sequences, state.requests, state.prompt_tokens
    n_requests = requests.hits + requests.misses
    return [
        f"cells      {cells.used:,} of {cells.total:,} used: {cells.pinned:,} by running requests, "
        f"{cells.idle:,} idle; {cells.free:,} free",
        _tier("RAM ", state.ram) + (f"; {state.ram.state}: {state.ram.reason}" if state.ram.reason else ""),
        *([_tier("disk", state.disk)] if state.disk.total_bytes else []),
        *_checkpoints(state.checkpoints),
        f"sequences  {seqs.used} of {seqs.slots + seqs.reserved} used ({seqs.slots} slots', {seqs.reserved} spare)",
        f"tree       {counted(state.tokens, 'token')} in {counted(state.nodes, 'node')}, "
        f"{counted(state.leaves, 'leaf', 'leaves')}, {counted(state.namespaces, 'namespace')}; "
        f"{state.tokens_pinned:,} pinned",
        f"hits       {requests.hits:,} of {counted(n_requests, 'request')} ({requests.hit_rate:.1%}), "
        f"{requests.cross_slot:,} across slots, {requests.from_ram:,} from RAM, {requests.from_disk:,} from disk; "
        f"{requests.waits:,} waited for another",
        f"anchors    {counted(state.anchors.replies, 'reply', 'replies')}, {state.anchors.bytes / 2**20:,.1f} MiB; "
        f"{counted(requests.anchored, 'request')} continued from one",
        f"reused     {prompt.matched:,} of {counted(prompt.total, 'prompt token')} ({prompt.hit_rate:.1%})",
        f"moved      {state.copied_tokens:,} tokens copied, {state.offloaded_tokens:,} to RAM, "
        f"{state.loaded_tokens:,} from RAM; "
        f"{counted(state.moved_prefixes, 'prefix', 'prefixes')} moved to spare sequences",
        f"evicted    {state.evicted_tokens:,} tokens; "
        f"{counted(state.dropped_prefixes, 'prefix', 'prefixes')} dropped for lack of a sequence id; "
        f"{counted(state.preemptions, 'preemption')}",
        f"drafts     {state.speculation.accepted_tokens:,} of "
        f"{counted(state.speculation.drafted_tokens, 'drafted token')} accepted",
    ]


def tree(prefixes: Sequence[CachePrefix], *, n_namespaces: int) -> Tree:
    """Return the prefixes as a tree, in the given order, with a branch for each namespace if there are several."""
    title = f"prefixes   {len(prefixes)}, most hits first" if prefixes else "prefixes   none"
    root = Tree(Text(title), guide_style="dim")
    namespaces: dict[int, Tree] = {}
    branches: list[Tree] = []
    for prefix in prefixes:
        # The server lists parents before their children; ignore a parent index that does not fit this.
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


def _label(prefix: CachePrefix) -> Text:
    size = f"+{prefix.edge_tokens:,} = {counted(prefix.tokens, 'token')}"
    label = Text(size, style="bold", no_wrap=True, overflow="ellipsis")
    places = [f"held by {', '.join(map(str, prefix.holders))}"] if prefix.holders else []
    places += [f"{counted(prefix.ram_tokens, 'token')} in RAM"] if prefix.ram_tokens else []
    places += [f"{counted(prefix.disk_tokens, 'token')} on disk"] if prefix.disk_tokens else []
    rest = f" · {counted(prefix.hits, 'hit')} · {', '.join(places)} · used #{prefix.last_used + 1} latest"
    label.append(rest, style="not bold")
    if prefix.checkpoint is not None:
        label.append(f" · checkpoint of {prefix.checkpoint / 2**20:,.1f} MiB", style="not bold")
    if prefix.evicted_last:
        label.append(" · evicted last", style="not bold")
    if prefix.pinned:
        label.append(" · running", style="not bold green")
    if prefix.text is not UNSET and prefix.text:
        # Shown as a Python literal, so that control characters of a prompt do not reach the terminal.
        text = prefix.text if len(prefix.text) <= _MAX_TEXT_CHARS else prefix.text[: _MAX_TEXT_CHARS - 1] + "…"
        label.append(f" {text!r}", style="not bold dim")
    return label
