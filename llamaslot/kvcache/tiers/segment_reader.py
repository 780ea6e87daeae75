"""Reads of segments from disk into RAM, and adding the segments that are on disk at start.

Segments that a request is about to load are read, a few at a time. If a read is not answered in time, the disk is
unresponsive, and nothing is read until it answers. A failed read is retried after a while. A corrupt segment is
evicted from disk with its descendants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamaslot.base.model import CheckpointSize, SegmentSize
from llamaslot.base.namespaces import tenant_of
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.segment import Checkpoint, Segment
from llamaslot.kvcache.segment import SegmentEvent as E
from llamaslot.kvcache.segment import SegmentState as S
from llamaslot.kvcache.tiers import pacing
from llamaslot.kvcache.tiers.disk_io import (
    CancelReads,
    Erase,
    Read,
    SegmentMeta,
    verified_checkpoint_path,
    verified_path,
)
from llamaslot.kvcache.tiers.disk_pacing import ReadWatchdog
from llamaslot.kvcache.tiers.pacing import TransferRate
from llamaslot.kvcache.tiers.tenant_shares import exceeds_limit

if TYPE_CHECKING:
    from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers

_MAX_READS = 4
"""Most reads at a time. Few, so that the next segment is chosen as late as possible."""


class SegmentReader:
    """Reads segments of the tiers from disk."""

    def __init__(
        self, tiers: SegmentTiers, tree: RadixTree, size: SegmentSize, checkpoint_size: CheckpointSize | None
    ) -> None:
        self._tiers = tiers
        self._tree = tree
        self._size = size
        self._checkpoint_size = checkpoint_size
        self._rate = TransferRate()
        """Of reads, per token."""
        self._watchdog = ReadWatchdog()

    @property
    def us_per_token(self) -> float | None:
        """Microseconds to read a token, from recent reads; None if there were none."""
        seconds = self._rate.seconds(self._tiers.now)
        return None if seconds is None else 1e6 * seconds

    @property
    def n_pending(self) -> int:
        """Number of pending reads."""
        return sum(each.state is S.READING for each in self._tiers.busy.values())

    @property
    def may_start(self) -> bool:
        """True if another read may be started now."""
        return self.n_pending < _MAX_READS

    def may_read(self, segment: Segment) -> bool:
        """True if a segment that is only on disk can be read into RAM, evicting whatever is there if needed."""
        ram = self._tiers.ram_of(segment)
        fits = segment.n_bytes <= ram.capacity and not exceeds_limit(ram, segment.tenant, segment.n_bytes)
        return segment.state is not S.UNREADABLE and not self.is_unresponsive and fits

    @property
    def is_unresponsive(self) -> bool:
        """True if the disk does not answer, so that segments that only it has cannot be loaded."""
        return self._watchdog.is_unresponsive(self._tiers.now)

    @property
    def times_out_at(self) -> float | None:
        """Time at which the pending read times out; None if there is none."""
        return self._watchdog.times_out_at

    def tick(self) -> None:
        """Time out reads, and allow unreadable segments to be read again."""
        now = self._tiers.now
        if self._watchdog.check_timeout(now):
            for segment in [each for each in self._tiers.busy.values() if each.state is S.READING]:
                self._tiers.transition(segment, E.READ_TIMED_OUT)
            self._tiers.add_job(CancelReads())
        for segment in [each for each in self._tiers.unreadable.values() if each.retry_at <= now]:
            self._tiers.transition(segment, E.RETRY)

    def start(self, segment: Segment) -> None:
        """Start to read a segment; the caller has made room for it in RAM."""
        self._tiers.transition(segment, E.READ)
        self._tiers.add_job(Read(segment.number))

    def on_started(self) -> None:
        """Record that a read was sent to the disk."""
        self._watchdog.on_read_started(self._tiers.now)

    def on_done(self, number: int, seconds: float) -> Segment | None:
        """Handle a successful read; returns the segment if its bytes are still wanted in RAM."""
        segment = self._tiers.busy.get(number)
        is_wanted = segment is not None and segment.state is S.READING
        if segment is not None and is_wanted:
            self._tiers.transition(segment, E.READ_DONE)
            segment.source = "disk"
            self._tiers.counters.read_tokens += segment.n_tokens
            if segment.n_tokens:
                self._rate.observe(segment.n_tokens, seconds, self._tiers.now)
        self._on_answer()
        return segment if is_wanted else None

    def on_failed(self, number: int) -> None:
        """Handle a read that failed for a reason that may be temporary."""
        segment = self._tiers.disk.get(number)
        if segment is not None and segment.state not in (S.CLEAN, S.WRITING):
            segment.retry_at = self._tiers.now + pacing.RETRY_DELAY_S
            self._tiers.transition(segment, E.READ_FAILED)
        self._on_answer(failed=True)

    def on_corrupt(self, number: int) -> None:
        """Evict a corrupt segment and its descendants from disk."""
        segment = self._tiers.disk.get(number)
        gone = [segment] if segment is not None else []
        self._tiers.counters.disk.corrupt_files += len(gone)
        for each in gone:
            gone += [child for child in each.children if child.state.uses_disk]
        for each in reversed(gone):
            self._tiers.transition(each, E.EVICT_DISK)
        self._on_answer()

    def add_found(self, found: Sequence[SegmentMeta]) -> list[int]:
        """Add the segments on disk at start to the tree; returns the numbers of those too large for RAM."""
        disk = self._tiers.disk
        uses = {meta.number: i for i, meta in enumerate(found, 1)}
        too_large: set[int] = set()
        for meta in sorted(found, key=lambda meta: (meta.start, -len(meta.tokens))):
            ram = self._tiers.ram if meta.tokens else self._tiers.checkpoints
            if meta.n_bytes > ram.capacity or meta.parent in too_large:
                too_large.add(meta.number)
                continue
            parent = disk.get(meta.parent) if meta.parent is not None else None
            if not meta.tokens:
                self._add_checkpoint(meta, parent, uses[meta.number])
                continue
            tokens = verified_path(meta, parent, self._size)
            match = self._tree.match(meta.namespace, tokens or b"")
            if tokens is None or any(part.start <= meta.start < part.end for part in match.parts):
                self._tiers.add_job(Erase((meta.number,)))
                continue
            tenant = tenant_of(meta.namespace)
            segment = Segment(
                meta.number, meta.start, len(tokens) // WIDTH, meta.n_bytes, tenant=tenant, state=S.DISK
            )
            segment.last_used = uses[meta.number]
            self._tree.attach(segment, self._tree.insert(meta.namespace, tokens))
            disk.put(segment)
        for segment in sorted(disk, key=lambda segment: -segment.start):
            if segment.parent is not None:
                segment.parent.last_used = max(segment.parent.last_used, segment.last_used)
        return sorted(too_large)

    def _add_checkpoint(self, meta: SegmentMeta, parent: Segment | None, last_used: int) -> None:
        """Add a checkpoint on disk at start to the tree, or erase it if its metadata is not plausible."""
        tokens = verified_checkpoint_path(meta, parent, self._checkpoint_size)
        node = self._tree.insert(meta.namespace, tokens) if tokens is not None else None
        if node is None or node.checkpoint is not None:
            self._tiers.add_job(Erase((meta.number,)))
            return
        checkpoint = Checkpoint(meta.number, node, meta.n_bytes, state=S.DISK)
        checkpoint.last_used = last_used
        node.checkpoint = checkpoint
        self._tiers.disk.put(checkpoint)

    def _on_answer(self, *, failed: bool = False) -> None:
        self._watchdog.on_answer(self._tiers.now, has_more=self.n_pending > 0, failed=failed)
