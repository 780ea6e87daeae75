"""Loading: which cached KV and which partial state a prompt continues from, and how they get into the pool.

`PublicPrefix` looks up KV that an administrator deliberately shares with all tenants. A request with `cache_public`
runs in the public namespace, which belongs to the tenant `public`. What it computes is saved to segments at once.
The lookup of another tenant continues with these segments where its own prefix ends, and fills gaps between its own
segments with them. `Load` is the only operation that crosses from one namespace to another, and only in this
direction:

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

`Loader` loads segments where that is faster than computing their tokens.

`StateRestorer` is for models that have a partial state besides the KV of every token (`base/kv_ops.py`). Their
paths can be continued only from a *restore point*: a node that has a checkpoint, or in which a live sequence ends.

    [system prompt, 1,600]*-+-[Ann, 40]-[answer]    seq 0, live: a restore point
                            +-[Bob, 35]*-[answer]   seq 1, stateless: not one, but its node above is
                                                    * checkpoint

1. A match is cut at its deepest restore point (`cut`); the cached tokens after that are computed again.
2. A slot gets the cells and segments of the path up to the restore point, then the state (`begin`, `finish`).
3. If the cells and segments end earlier, it falls back to a restore point above (`fall_back`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llamaslot.base.images import before_tile
from llamaslot.base.kv_ops import Save
from llamaslot.base.namespaces import PUBLIC_TENANT, public_of, reads_public
from llamaslot.base.tokens import WIDTH, unpacked
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.match import LoadResult, LoadStatus, Match, SegmentPart
from llamaslot.kvcache.nodes import Checkpoint, Node, Segment, SegmentState, checkpoints_on
from llamaslot.kvcache.offloading import Offloader
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.sequences import Sequences
from llamaslot.kvcache.tiers.checkpoints import Checkpoints
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
        public = self._tree.match(public_of(namespace), own.tokens)
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

    def mark_used(self, namespace: str, tokens: bytes) -> None:
        """Record that a tenant uses public segments, so that they are evicted late and keep their share."""
        self._tiers.touch(self._tree.match(public_of(namespace), tokens).segments)
        self._tiers.shares.keep_active(PUBLIC_TENANT)

    def save_if_public(self, seq: int, *, has_ended: bool) -> None:
        """Save a public request's sequence to RAM: full segments while it runs, the rest once it has ended."""
        end = self._tree.end_node(seq)
        if end is not None and end.namespace == public_of(end.namespace):
            self._offloader.offload_path(seq, with_partial=has_ended)


_UNKNOWN_READ_COST = 1 / 8
"""Assumed time to read a token from disk divided by the time to compute it, until a read is measured."""


@dataclass(eq=False)
class Loader:
    """Extends sequences by segments, if loading these is faster than computing their tokens."""

    _tree: RadixTree
    _sequences: Sequences
    _tiers: SegmentTiers
    _disk: DiskTier
    _offloader: Offloader
    _settings: CacheSettings

    def worth_loading(self, match: Match) -> Sequence[SegmentPart]:
        """Segments after the resident part of a match that are worth loading.

        These are the leading parts that save most time: a segment is loaded whole, so the last one is left out if
        too little of it is needed, and the rest of a path if it is only on a disk that is slower than computing.
        They do not end within a tile, of which the pool has no parts. For models with a partial state it is all
        parts or none, since the state may have to be restored at their end. In a partitioned pool the resident part
        is saved and loaded along with them.
        """
        parts = self._disk.readable(match.parts) if match.parts else []
        # In tokens computed meanwhile.
        gain = 0.0 if self._settings.unified else -self._settings.load_cost * 2 * match.n_resident
        n_worth, best = 0, 0.0
        for n_parts, part in enumerate(parts, 1):
            gain += part.end - part.start - self._cost(part.segment)
            may_end = n_parts == len(parts) if self._settings.has_states else _is_whole(match, part.end)
            if gain > best and may_end:
                n_worth, best = n_parts, gain
        return parts[:n_worth]

    def load(self, seq: int, match: Match, max_tokens: int | None, *, loads_all: bool = False) -> LoadResult:
        """Extend a sequence by the segments that are worth loading, about `max_tokens` at most.

        With `loads_all` it is all segments of the match, because the sequence waits for a checkpoint at its end,
        and a small rest would not be worth loading by itself.
        """
        parts = self._disk.readable(match.parts) if loads_all else self.worth_loading(match)
        if not parts:
            self._tiers.load_pins.pop(seq, None)
            self._disk.probe_speed(match.parts)
            return LoadResult(LoadStatus.DONE)
        self._disk.prefetch(seq, parts)
        self._offloader.free_evicted()
        status = LoadStatus.DONE
        # Segments with a planned save cannot be loaded yet, because the save may fail for lack of memory.
        saving = {each.segment for each in self._sequences.operations if isinstance(each, Save)}
        n_loaded = n_read = n_fetched = n_public = 0
        if not self._settings.unified:
            # Each load would load the whole sequence again (fact 3), so this waits until all parts are in RAM.
            if any(part.segment.number in saving for part in parts):
                return LoadResult(LoadStatus.MORE)
            if self._disk.reading and not all(part.segment.state.is_loadable for part in parts):
                return LoadResult(LoadStatus.READING)
        for group in _between_tiles(match, parts):
            segments = [part.segment for part in group]
            is_saving = any(segment.number in saving for segment in segments)
            if (max_tokens is not None and n_loaded >= max_tokens) or is_saving:
                status = LoadStatus.MORE
                break
            if not all(segment.state.is_loadable for segment in segments):
                status = LoadStatus.READING if self._disk.reading else LoadStatus.DONE
                break
            has_room = self._offloader.free_cells(sum(segment.n_tokens for segment in segments))
            if not has_room or not all(segment.state.is_loadable for segment in segments):
                break
            for part, segment in zip(group, segments, strict=True):
                start = self._tree.length(seq)
                self._sequences.load(segment.number, seq, part.end, match.tokens)
                n_loaded += part.end - start
                if match.public is not None and segment.is_public:
                    n_public += part.end - start
                n_read += (part.end - start) * (segment.source == "disk")
                n_fetched += (part.end - start) * (segment.source == "remote")
                segment.source = ""
        if status is LoadStatus.DONE:
            self._tiers.load_pins.pop(seq, None)
            self._disk.probe_speed(match.parts[len(parts) :])
        self._tiers.counters.public_tokens += n_public
        return LoadResult(status, 0, n_loaded, n_read, n_fetched, n_public)

    def _cost(self, segment: Segment) -> float:
        """Time to load a segment, after reading it if it is only on disk, in tokens computed meanwhile."""
        read_cost, prefill_us = 0.0, self._settings.cost.prefill_us
        if not segment.state.is_loadable:
            read_us = self._disk.read_us(segment)
            if read_us is None or not prefill_us:
                read_cost = _UNKNOWN_READ_COST * segment.n_tokens
            else:
                read_cost = read_us / prefill_us
        return self._settings.load_cost * segment.n_tokens + read_cost


def _is_whole(match: Match, n: int) -> bool:
    """Return True if the first `n` tokens do not end within a tile, as far as that is known."""
    return before_tile(unpacked(match.tokens), n) == n


def _between_tiles(match: Match, parts: Sequence[SegmentPart]) -> Iterator[Sequence[SegmentPart]]:
    """Yield the parts that must be loaded together, since the parts before do not end within a tile."""
    first = 0
    for i, part in enumerate(parts, 1):
        # A match with a partial state is cut where it is to be restored.
        if i == len(parts) or _is_whole(match, part.end):
            yield parts[first:i]
            first = i


@dataclass(eq=False)
class StateRestorer:
    """Gives sequences their partial states. For a model without one it does nothing."""

    _tree: RadixTree
    _sequences: Sequences
    _tiers: SegmentTiers
    _disk: DiskTier
    _checkpoints: Checkpoints
    _loader: Loader
    _settings: CacheSettings

    # --- lookups ---

    def lacks_state(self, seq: int) -> bool:
        """Return True if a running sequence cannot be decoded yet: it waits for a checkpoint, or has no state."""
        return self._settings.has_states and (
            self._pending(seq) is not None or not self._sequences.states.is_live(seq)
        )

    def is_waiting(self, seq: int) -> bool:
        """Return True if a sequence waits for a checkpoint to be restored."""
        return self._pending(seq) is not None

    def cut(self, match: Match) -> Match:
        """Cut a match to what is worth loading, and at its deepest restore point."""
        worth_loading = self._loader.worth_loading
        if not self._settings.has_states:
            match = match.before_tile()
            parts = worth_loading(match)
            return replace(match, n_cached=parts[-1].end) if parts else match
        # No restore point is within a tile.
        parts = worth_loading(match)
        n_covered = parts[-1].end if parts else match.n_resident
        for node in self._restore_points(match, n_covered):
            n = node.end
            parts = worth_loading(replace(match, parts=match.parts_until(n))) if n > match.n_resident else ()
            if n <= match.n_resident or (parts and parts[-1].end == n):
                return replace(match.cut(n, tuple(parts)), n_without_state=n_covered - n)
        return replace(match.cut(0, ()), n_without_state=n_covered)

    # --- a sequence gets a state ---

    def begin(self, seq: int, n_own: int, match: Match) -> None:
        """Choose the checkpoint that `seq` needs after the matched tokens, of which it keeps `n_own` itself.

        Must be called before the sequence or the pool is changed.
        """
        if not self._settings.has_states:
            return
        self._checkpoints.pending_restores.pop(seq, None)
        keeps_all = n_own == self._tree.length(seq)
        points = self._restore_points(match, match.n_cached)
        # There may be no restore point any more, if memory ran short since the lookup. And a live sequence that
        # already ends with the match needs no checkpoint.
        if not points or (keeps_all and n_own == match.n_cached and self._sequences.states.is_live(seq)):
            return
        node = points[0]
        # A sequence of the public namespace gives no state: its cells are not copied, only its segments are loaded.
        donor = None
        if node.namespace == match.namespace:
            donor = next(filter(self._sequences.states.is_live, node.end_of), None)
        if donor is not None and self._sequences.states.copies_live and n_own < node.end <= match.n_resident:
            # A copy of a whole live sequence is live itself.
            return
        checkpoint = node.checkpoint
        if checkpoint is not None and not self._is_readable(checkpoint):
            if checkpoint.state is not SegmentState.UNREADABLE:
                return
            self._tiers.drop([checkpoint])
            checkpoint = None
        if checkpoint is None and donor is not None:
            checkpoint = self._checkpoints.take(donor)
        if checkpoint is None:
            return
        self._checkpoints.pending_restores[seq] = checkpoint
        self._tiers.touch(checkpoint.path_from_root)
        if keeps_all and match.parts:
            # Loading into the sequence destroys its state, and may not get as far as the chosen checkpoint.
            self._checkpoints.take_at_end(seq)

    def may_load(self, seq: int) -> bool:
        """Return True if cells or segments may be added to a running sequence.

        Not to one that is live and waits for no checkpoint: it would lose its state.
        """
        return not self._settings.has_states or self.lacks_state(seq)

    def cut_to_pending(self, seq: int, match: Match) -> Match:
        """Cut a match at the position of the checkpoint that a sequence waits for."""
        if not self._settings.has_states:
            return match.before_tile()
        pending = self._pending(seq)
        n = pending.end if pending is not None else self._tree.length(seq)
        return match.cut(n, match.parts_until(n))

    def finish(self, seq: int) -> None:
        """Restore a sequence's state if the sequence now holds all tokens before it."""
        pending = self._pending(seq)
        if pending is not None and self._tree.length(seq) == pending.end and pending.state.is_loadable:
            self._restore(seq, pending)
            del self._checkpoints.pending_restores[seq]

    def is_reading(self, seq: int) -> bool:
        """Return True while a sequence waits for a checkpoint that is read from disk; starts the read if needed."""
        pending = self._pending(seq)
        if pending is None or pending.state.is_loadable:
            return False
        if not pending.state.uses_ram and self._disk.may_read(pending):
            if not self._disk.may_start_read:
                return True
            if self._checkpoints.evict_for(pending.n_bytes, pending.tenant):
                self._disk.start_read(pending)
        return pending.state.uses_ram

    def fall_back(self, seq: int) -> None:
        """Truncate a sequence without state to the deepest checkpoint in RAM on its path, or empty it.

        Afterwards it waits for no checkpoint.
        """
        self._checkpoints.pending_restores.pop(seq, None)
        if self._sequences.states.is_live(seq):
            return
        on_path = checkpoints_on(self._sequences.end(seq))
        found = next((each for each in on_path if each.state.is_loadable), None)
        if found is not None:
            self._restore(seq, found)
        else:
            self._sequences.empty(seq)

    def check(self) -> None:
        """Verify all invariants while no operation is pending; raises `AssertionError`."""
        assert not self._tree.lost_checkpoints
        for seq, pending in self._checkpoints.pending_restores.items():
            assert self._tree.is_pinned(seq)
            assert self._tree.length(seq) <= pending.end

    # --- inside ---

    def _pending(self, seq: int) -> Checkpoint | None:
        """Return the checkpoint that a sequence waits for, unless it has been dropped meanwhile."""
        pending = self._checkpoints.pending_restores.get(seq)
        if pending is not None and pending.state is SegmentState.DROPPED:
            del self._checkpoints.pending_restores[seq]
            return None
        return pending

    def _restore_points(self, match: Match, n_covered: int) -> list[Node]:
        """Return the restore points within the first `n_covered` tokens, the deepest first."""
        found = [
            node
            for node in match.whole_end.path_to_root()
            if node.end <= n_covered and (self._is_readable(node.checkpoint) or self._gives_state(node))
        ]
        if match.public_end is not None:
            public = checkpoints_on(match.public_end)
            found += [each.node for each in public if each.end <= n_covered and self._is_readable(each)]
            found.sort(key=lambda node: -node.end)
        return [node for node in found if self._pays_to_restore(match, node.end) or self._gives_state(node)]

    def _pays_to_restore(self, match: Match, n: int) -> bool:
        """True if a checkpoint after `n` tokens is restored faster than they are computed.

        With an image always, for it would have to be encoded as well. Marked tokens (`cache_ids.py`) count as one
        here, by their negative ids.
        """
        return n >= self._settings.min_restored or unpacked(match.tokens[: n * WIDTH]).min(initial=0) < 0

    def _is_readable(self, checkpoint: Checkpoint | None) -> bool:
        """True if a checkpoint can be restored, now or after reading it from disk."""
        return checkpoint is not None and self._disk.is_readable(checkpoint)

    def _gives_state(self, node: Node) -> bool:
        """True if a live sequence ends in a node, and its state can be copied, or its slot given to the request."""
        live = [seq for seq in node.end_of if self._sequences.states.is_live(seq)]
        if self._sequences.states.copies_live or self._checkpoints.can_take(node.end):
            return bool(live)
        return any(seq in self._sequences.slots and not self._tree.is_pinned(seq) for seq in live)

    def _restore(self, seq: int, checkpoint: Checkpoint) -> None:
        self._tiers.touch(checkpoint.path_from_root)
        self._sequences.restore(seq, checkpoint.number, checkpoint.end)
        self._checkpoints.counters.restored += 1
