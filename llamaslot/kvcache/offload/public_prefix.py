"""Public prefix: KV that an administrator deliberately shares with all tenants.

A request with `cache_public` runs in the public namespace, which belongs to the tenant `public`. What it computes
is saved to segments at once. The lookup of another tenant continues with these segments where its own prefix ends,
and fills gaps between its own segments with them. `Load` is the only operation that crosses from one namespace to
another, and only in this direction:

    public namespace       cells --Save--> segments in RAM <--> disk
                                                |
                                               Load
                                                v
    namespace of a tenant                     cells --Save--> segments of its own

    public KV                            a tenant's lookup          a public request's lookup
    in segments in RAM                   finds it, to be loaded     finds it
    in segments on disk                  finds it, to be read       finds it
    in cells only: RAM has no room       does not find it           finds it
    in cells only: less than a segment   finds it once the request  finds it
    of a running request                 has ended
    evicted                              does not find it           computes it again

Only requests with the salt of the public namespace, which no client can name, extend or replace public KV. What a
tenant has loaded counts as its own, and is evicted like everything else of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llamaslot.base.namespaces import PUBLIC_NAMESPACE, PUBLIC_TENANT, reads_public
from llamaslot.kvcache.match import Match, SegmentPart
from llamaslot.kvcache.offload.offloader import Offloader
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.tiers.disk_tier import DiskTier
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers


@dataclass(eq=False)
class PublicPrefix:
    """Public segments, and lookups of tenants that continue with them. Without a RAM tier there are none."""

    _tree: RadixTree
    _tiers: SegmentTiers
    _disk: DiskTier
    _offloader: Offloader

    def match(self, namespace: str, tokens: bytes) -> Match:
        """Look up tokens. Public segments continue a tenant's match, and fill gaps between its own segments."""
        own = self._tree.match(namespace, tokens)
        if not reads_public(namespace):
            return own
        public = self._tree.match(PUBLIC_NAMESPACE, own.tokens)
        own = replace(own, public_end=public.whole_end)
        if public.n_matched <= own.n_resident:
            return own
        parts: list[SegmentPart] = []
        is_public, end = False, own.n_resident
        readable = self._disk.readable
        while more := readable(own.parts_from(end)) or readable(public.parts_from(end)):
            is_public |= more[0].segment.is_public
            parts += more
            end = more[-1].end
        return replace(own, parts=tuple(parts), public=public) if is_public else own

    def mark_used(self, tokens: bytes) -> None:
        """Record that a tenant uses public segments, so that they are evicted late and keep their share."""
        self._tiers.touch(self._tree.match(PUBLIC_NAMESPACE, tokens).segments)
        self._tiers.shares.keep_active(PUBLIC_TENANT)

    def save_if_public(self, seq: int, *, has_ended: bool) -> None:
        """Save a public request's sequence to RAM: full segments while it runs, the rest once it has ended."""
        end = self._tree.end_node(seq)
        if end is not None and end.namespace == PUBLIC_NAMESPACE:
            self._offloader.offload_path(seq, with_partial=has_ended)
