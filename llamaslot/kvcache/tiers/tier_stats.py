"""Statistics of the RAM and disk tiers."""

from __future__ import annotations

from msgspec import structs

from llamaslot.base.stats import DiskStats, RamStats, TenantStats
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.tiers.ram_budget import RamBudget
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers


def ram_stats(tiers: SegmentTiers, budget: RamBudget) -> RamStats:
    """Return what the RAM tier holds, its budget, and the reason if that is reduced."""
    return RamStats(
        total_bytes=budget.n_bytes,
        used_bytes=tiers.ram.n_bytes,
        tokens=tiers.ram.n_tokens,
        segments=len(tiers.ram),
        max_bytes=budget.max_bytes,
        saved_bytes=tiers.counters.ram.saved_bytes,
        state=budget.state.value,
        reason=budget.reason,
    )


def disk_stats(tiers: SegmentTiers) -> DiskStats:
    """Return what is on disk, without segments that are still being written."""
    disk, writing = tiers.disk, tiers.writer.writing
    return structs.replace(
        tiers.counters.disk,
        total_bytes=disk.capacity,
        used_bytes=disk.n_bytes - sum(segment.n_bytes for segment in writing),
        tokens=disk.n_tokens - sum(segment.n_tokens for segment in writing),
        segments=len(disk) - len(writing),
    )


def tenant_stats(tree: RadixTree, tiers: SegmentTiers) -> tuple[TenantStats, ...]:
    """Return what each tenant has in the pool and in the tiers."""
    n_requests = tiers.shares.n_requests
    cells, ram, disk = tree.n_tokens_of, tiers.ram.used, tiers.disk.used
    names = sorted({*n_requests, *+cells, *ram, *disk})
    return tuple(TenantStats(each, cells[each], ram[each], disk[each], n_requests[each]) for each in names)
