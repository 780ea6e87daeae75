"""Statistics and state of slots and prefix cache, for `/cache`, `/slots` and `/metrics`; nothing here changes them.

Prefixes are listed by hits, then by last use, then by length. A request that goes through a node goes through its
ancestors too, so these have at least as many hits and as late a use: no node is listed without them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from msgspec import UNSET
from msgspec.structs import asdict, replace

from llamaslot.base.stats import (
    AnchorStats,
    CachePrefix,
    CacheState,
    CacheStats,
    CellStats,
    DiskStats,
    Miss,
    PromptStats,
    RamStats,
    RequestStats,
    SequenceStats,
    SessionStats,
    SlotState,
)
from llamaslot.base.tokens import WIDTH, unpacked
from llamaslot.kvcache.ledger import Ledger
from llamaslot.kvcache.node import Node
from llamaslot.kvcache.shared import SharedLedger
from llamaslot.scheduler.admission import Admission
from llamaslot.scheduler.request import Request
from llamaslot.scheduler.settings import SchedulerSettings
from llamaslot.scheduler.slots import Slot

_MAX_TEXT_TOKENS = 256
"""Tokens of an edge that are shown as text."""


class Traffic:
    """Counts what ended requests found in the cache."""

    def __init__(self) -> None:
        self.requests = RequestStats()
        self.prompt_tokens = PromptStats()
        self.miss_reasons: dict[Miss, int] = {}

    def count(self, request: Request) -> None:
        """Count a request that has ended."""
        if request.miss and request.has_started:
            self.miss_reasons[request.miss] = self.miss_reasons.get(request.miss, 0) + 1
        if request.is_private or not request.has_started:
            return
        n_cached, requests, tokens = request.n_cached, self.requests, self.prompt_tokens
        tokens.total += request.n_prompt
        tokens.matched += n_cached
        tokens.hit_rate = tokens.matched / max(tokens.total, 1)
        if n_cached:
            requests.hits += 1
            if request.n_read:
                requests.from_disk += 1
            elif request.n_loaded:
                requests.from_ram += 1
            elif request.n_copied:
                requests.cross_slot += 1
            else:
                requests.same_slot += 1
            requests.anchored += request.prompt.n_anchored > 0
            requests.in_session += request.prompt.session_match in ("exact", "extend", "diverge")
        else:
            requests.misses += 1
        requests.hit_rate = requests.hits / (requests.hits + requests.misses)


def slots(settings: SchedulerSettings, ledger: Ledger, slots: Sequence[Slot]) -> tuple[SlotState, ...]:
    """Return what each slot holds and runs."""
    return tuple(_slot(slot, settings.n_ctx_slot, ledger.length(slot.id)) for slot in slots)


def _slot(slot: Slot, n_ctx: int, n_held: int) -> SlotState:
    request = slot.request
    if request is None:
        return SlotState(slot.id, n_ctx, n_held)
    return SlotState(
        id=slot.id,
        n_ctx=n_ctx,
        n_held=n_held,
        request_id=request.id,
        n_prompt=request.n_prompt,
        n_prompt_computed=request.n_prompt_computed,
        n_generated=request.n_generated,
        max_tokens=request.submit.max_tokens,
        sampling=request.submit.sampling,
    )


def cache_stats(
    settings: SchedulerSettings,
    ledger: Ledger,
    admission: Admission,
    traffic: Traffic,
    n_preempted: int,
    *,
    anchors: AnchorStats | None = None,
    sessions: SessionStats | None = None,
) -> CacheStats:
    """Return the statistics as of now, in constant time."""
    n_idle, n_cells = ledger.n_idle, settings.n_ctx
    if not settings.shares:
        # Each sequence has cells of its own for what the tree has once.
        n_idle = sum(ledger.length(seq) for seq in range(settings.n_seqs) if not ledger.tree.is_pinned(seq))
    if not settings.unified:
        n_cells = settings.n_ctx // settings.n_slots * settings.n_seqs
    stats = CacheStats(
        cells=CellStats(n_cells, ledger.n_used, n_idle, ledger.n_used - n_idle, n_cells - ledger.n_used),
        anchors=anchors or AnchorStats(),
        sessions=sessions or SessionStats(),
        sequences=SequenceStats(settings.n_slots, settings.n_reserved, ledger.n_seqs, settings.n_seqs),
        requests=replace(traffic.requests, waits=admission.n_waits),
        prompt_tokens=replace(traffic.prompt_tokens),
        miss_reasons=dict(traffic.miss_reasons),
        copied_tokens=ledger.counts.n_copied_tokens,
        evicted_tokens=ledger.counts.n_lost_tokens,
        offloaded_tokens=ledger.counts.n_stored_tokens,
        loaded_tokens=ledger.counts.n_loaded_tokens,
        moved_prefixes=ledger.counts.n_parked,
        dropped_prefixes=ledger.counts.n_lost_paths,
        preemptions=n_preempted,
    )
    if isinstance(ledger, SharedLedger) and settings.stores:
        tiers = ledger.tiers
        ram, disk, writing = tiers.ram, tiers.disk, tiers.writing
        stats.ram = RamStats(ram.capacity, ram.n_bytes, ram.n_tokens, len(ram))
        stats.disk = DiskStats(
            total_bytes=disk.capacity,
            used_bytes=disk.n_bytes - sum(segment.n_bytes for segment in writing),
            tokens=disk.n_tokens - sum(segment.n_tokens for segment in writing),
            segments=len(disk) - len(writing),
            corrupt_files=tiers.n_bad,
        )
        stats.read_tokens, stats.written_tokens = tiers.n_read, tiers.n_written
    return stats


def cache_state(
    stats: CacheStats, ledger: Ledger, top: int, detokenize: Callable[[Sequence[int]], bytes] | None = None
) -> CacheState:
    """Return the statistics with the tree's `top` prefixes, in time proportional to the tree."""
    nodes = list(ledger.tree.nodes())
    uses = sorted({node.last_used for node in nodes}, reverse=True)
    ranks = {use: rank for rank, use in enumerate(uses)}
    listed = heapq.nsmallest(top, nodes, key=lambda node: (-node.hits, -node.last_used, node.end))
    namespaces = {name: i for i, name in enumerate(dict.fromkeys(node.space for node in (*listed, *nodes)))}
    places = {id(node): i for i, node in enumerate(listed)}
    prefixes = [
        CachePrefix(
            parent=places.get(id(node.parent)),
            namespace=namespaces[node.space],
            tokens=node.end,
            edge_tokens=node.n_tokens,
            hits=node.hits,
            holders=tuple(sorted(ledger.tree.holders(node))),
            pinned=node.n_pins > 0,
            last_used=ranks[node.last_used],
            text=_edge_text(node, detokenize) if detokenize is not None else UNSET,
        )
        for node in listed
    ]
    return CacheState(
        **asdict(stats),
        namespaces=len(namespaces),
        nodes=len(nodes),
        leaves=sum(not node.children for node in nodes),
        tokens=ledger.tree.n_tokens,
        tokens_pinned=ledger.tree.n_pinned_tokens,
        prefixes=tuple(prefixes),
    )


def _edge_text(node: Node, detokenize: Callable[[Sequence[int]], bytes]) -> str:
    return detokenize(unpacked(node.run[: _MAX_TEXT_TOKENS * WIDTH]).tolist()).decode("utf-8", "replace")
