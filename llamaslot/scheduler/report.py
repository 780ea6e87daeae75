"""Slots and prefix cache as plain data, for whoever watches; nothing here changes the cache.

Prefixes are listed by hits, then by last use, then by length. A request that goes through a node goes through its
ancestors too, so these have at least as many hits and as late a use: no node is listed without them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llamaslot.base.stats import CacheFigures, CachePrefix, CacheState, Miss, SlotReport
from llamaslot.base.tokens import WIDTH, unpacked
from llamaslot.kvcache.ledger import Ledger
from llamaslot.kvcache.node import Node
from llamaslot.kvcache.shared import SharedLedger
from llamaslot.kvcache.tiers import Tiers
from llamaslot.scheduler.admission import Admission
from llamaslot.scheduler.request import Request
from llamaslot.scheduler.settings import SchedulerSettings
from llamaslot.scheduler.slots import Slot

_SPELLED = 256
"""Tokens of an edge that are spelled out at most."""


@dataclass(slots=True)
class Traffic:
    """What ended requests found in the cache; see `CacheFigures` for which of them count."""

    n_hits: int = 0
    n_misses: int = 0
    n_cross_slot: int = 0
    n_from_ram: int = 0
    n_from_disk: int = 0
    n_anchored_hits: int = 0
    n_session_hits: int = 0
    n_prompt: int = 0
    n_matched: int = 0
    misses: dict[Miss, int] = field(default_factory=dict)

    def count(self, request: Request) -> None:
        """Note a request that has ended."""
        if request.miss and request.has_started:
            self.misses[request.miss] = self.misses.get(request.miss, 0) + 1
        if request.is_private or not request.has_started:
            return
        n_cached = request.n_cached
        self.n_hits += n_cached > 0
        self.n_misses += n_cached == 0
        self.n_cross_slot += n_cached > 0 and request.n_copied > 0 and not request.n_loaded
        self.n_from_ram += n_cached > 0 and request.n_loaded > 0 and not request.n_read
        self.n_from_disk += n_cached > 0 and request.n_read > 0
        self.n_anchored_hits += n_cached > 0 and request.prompt.n_anchored > 0
        self.n_session_hits += n_cached > 0 and request.prompt.session_match in ("exact", "extend", "diverge")
        self.n_prompt += request.n_prompt
        self.n_matched += n_cached


def slots(settings: SchedulerSettings, ledger: Ledger, slots: Sequence[Slot]) -> tuple[SlotReport, ...]:
    """What each slot holds and runs."""
    return tuple(_slot(slot, settings.n_ctx_slot, ledger.length(slot.id)) for slot in slots)


def _slot(slot: Slot, n_ctx: int, n_held: int) -> SlotReport:
    request = slot.request
    if request is None:
        return SlotReport(slot.id, n_ctx, n_held)
    return SlotReport(
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


def figures(
    settings: SchedulerSettings,
    ledger: Ledger,
    admission: Admission,
    traffic: Traffic,
    n_preempted: int,
    *,
    anchors: tuple[int, int] = (0, 0),
    sessions: tuple[int, int] = (0, 0),
) -> CacheFigures:
    """The numbers of `/cache` and `/metrics`; costs nothing to speak of. `anchors` and `sessions` are their number
    and bytes.
    """
    n_idle, n_cells = ledger.n_idle, settings.n_ctx
    if not settings.shares:
        # Each sequence has cells of its own for what the tree has once.
        n_idle = sum(ledger.length(seq) for seq in range(settings.n_seqs) if not ledger.tree.is_pinned(seq))
    if not settings.unified:
        n_cells = settings.n_ctx // settings.n_slots * settings.n_seqs
    return CacheFigures(
        cells_total=n_cells,
        cells_used=ledger.n_used,
        cells_idle=n_idle,
        cells_pinned=ledger.n_used - n_idle,
        seqs_slots=settings.n_slots,
        seqs_reserved=settings.n_reserved,
        seqs_used=ledger.n_seqs,
        seqs_total=settings.n_seqs,
        n_hits=traffic.n_hits,
        n_misses=traffic.n_misses,
        n_cross_slot=traffic.n_cross_slot,
        n_from_ram=traffic.n_from_ram,
        n_from_disk=traffic.n_from_disk,
        n_anchored_hits=traffic.n_anchored_hits,
        n_session_hits=traffic.n_session_hits,
        misses=dict(traffic.misses),
        n_anchors=anchors[0],
        anchor_bytes=anchors[1],
        n_sessions=sessions[0],
        session_bytes=sessions[1],
        n_waits=admission.n_waits,
        n_prompt=traffic.n_prompt,
        n_matched=traffic.n_matched,
        n_copied=ledger.counts.n_copied_tokens,
        n_evicted=ledger.counts.n_lost_tokens,
        n_stored=ledger.counts.n_stored_tokens,
        n_loaded=ledger.counts.n_loaded_tokens,
        n_parked=ledger.counts.n_parked,
        n_lost_paths=ledger.counts.n_lost_paths,
        n_preempted=n_preempted,
        **(_stored(ledger.tiers) if isinstance(ledger, SharedLedger) and settings.stores else {}),
    )


def _stored(tiers: Tiers) -> dict[str, int]:
    ram, disk, writing = tiers.ram, tiers.disk, tiers.writing
    return {
        "ram_total": ram.capacity,
        "ram_used": ram.n_bytes,
        "ram_tokens": ram.n_tokens,
        "ram_segments": len(ram),
        "disk_total": disk.capacity,
        "disk_used": disk.n_bytes - sum(segment.n_bytes for segment in writing),
        "disk_tokens": disk.n_tokens - sum(segment.n_tokens for segment in writing),
        "disk_segments": len(disk) - len(writing),
        "n_read": tiers.n_read,
        "n_written": tiers.n_written,
        "n_bad": tiers.n_bad,
    }


def state(
    request_id: str,
    totals: CacheFigures,
    ledger: Ledger,
    top: int,
    spell: Callable[[Sequence[int]], bytes] | None = None,
) -> CacheState:
    """The tree with its `top` prefixes; `spell` turns tokens into text. Takes time in proportion to the tree."""
    nodes = list(ledger.tree.nodes())
    uses = sorted({node.last_used for node in nodes}, reverse=True)
    ranks = {use: rank for rank, use in enumerate(uses)}
    listed = heapq.nsmallest(top, nodes, key=lambda node: (-node.hits, -node.last_used, node.end))
    spaces = dict.fromkeys(node.space for node in (*listed, *nodes))
    namespaces = {space: i for i, space in enumerate(spaces)}
    places = {id(node): i for i, node in enumerate(listed)}
    prefixes = [
        CachePrefix(
            parent=places.get(id(node.parent), -1),
            namespace=namespaces[node.space],
            n_tokens=node.end,
            n_edge=node.n_tokens,
            hits=node.hits,
            holders=tuple(sorted(ledger.tree.holders(node))),
            pinned=node.n_pins > 0,
            last_used=ranks[node.last_used],
            text=_spelled(node, spell) if spell is not None else "",
        )
        for node in listed
    ]
    return CacheState(
        request_id=request_id,
        figures=totals,
        n_namespaces=len(namespaces),
        n_nodes=len(nodes),
        n_leaves=sum(not node.children for node in nodes),
        n_tokens=ledger.tree.n_tokens,
        n_pinned_tokens=ledger.tree.n_pinned_tokens,
        prefixes=tuple(prefixes),
    )


def _spelled(node: Node, spell: Callable[[Sequence[int]], bytes]) -> str:
    return spell(unpacked(node.run[: _SPELLED * WIDTH]).tolist()).decode("utf-8", "replace")
