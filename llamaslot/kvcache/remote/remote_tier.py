"""Remote tier: KV in a store that several servers share, fetched into RAM and uploaded from RAM.

    request queued --> wanted --> store: find --> choose --> store: fetch --> add (RAM, tree) --> admitted, loaded
    segment in RAM --> upload queue --> store: upload

A request whose prompt is not cached here waits in the queue while the store is asked and KV is fetched. Fetched KV
becomes a segment in RAM like any other, so the rest of the cache does not know about the store. After any failure
the tokens are computed, as after a miss.

    the store answers   fetch what takes less time to fetch than to compute, at the speed of recent fetches
    no answer in time   send it nothing for `RETRY_DELAY_S`, then try again
    corrupt object      count it, and fetch no further objects for this request
    invalid logits      look up no prompt any more that begins like this one

Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import structs

from llamaslot.base.model import CheckpointSize, SegmentSize
from llamaslot.base.namespaces import is_private
from llamaslot.base.stats import RemoteStats
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.match import Match
from llamaslot.kvcache.node import Node
from llamaslot.kvcache.offload.checkpoints import Checkpoints
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.remote.remote_io import (
    BLOCK_TOKENS,
    GRID_TOKENS,
    Block,
    BlockPart,
    Found,
    Portion,
    RemoteObject,
    Upload,
    block_start,
)
from llamaslot.kvcache.segment import Segment
from llamaslot.kvcache.tiers import pacing
from llamaslot.kvcache.tiers.pacing import TransferRate
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers

_MIN_DEADLINE_S, _MAX_DEADLINE_S = 0.5, 10.0
"""Limits of the time that a request waits for what is fetched: as long as computing it would take."""
_PIN_S = 10.0
"""Time that fetched KV is pinned in RAM for a request that waits for a slot."""
_MAX_DENIED = 32
"""Prompts with invalid logits that are remembered."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Tokens of a waiting request to look up in the store."""

    request_id: str
    namespace: str
    tokens: bytes
    """The prompt, packed."""
    start: int
    """Tokens whose KV is cached here."""
    end: int
    """Tokens up to which KV is wanted: all, or those before a segment that is cached here."""
    restore_point: int | None
    """Tokens before the deepest restore point here; None for a model without a partial state."""


@dataclass(frozen=True, slots=True)
class Choice:
    """KV to fetch within `seconds`: portions, and for a model with a partial state the checkpoint after them.

    `rest` is the portion of the checkpoint's own object before the checkpoint, if that is not cached here.
    """

    portions: tuple[Portion, ...] = ()
    checkpoint: RemoteObject | None = None
    rest: Portion | None = None
    seconds: float = 0.0
    n_tokens: int = 0
    """Tokens that need not be computed then."""

    @property
    def all_portions(self) -> tuple[Portion, ...]:
        """The portions with the rest."""
        return self.portions if self.rest is None else (*self.portions, self.rest)

    @property
    def n_bytes(self) -> int:
        """Bytes to fetch: objects are fetched whole."""
        n_state = self.checkpoint.state_bytes if self.checkpoint is not None else 0
        return n_state + sum(each.object.n_bytes for each in self.all_portions)


class RemoteTier:
    """Decides what to look up, fetch and upload. `seconds_to_compute` estimates the prefill time of n tokens."""

    def __init__(
        self,
        tree: RadixTree,
        tiers: SegmentTiers,
        checkpoints: Checkpoints,
        *,
        size: SegmentSize,
        checkpoint_size: CheckpointSize | None,
        seconds_to_compute: Callable[[int], float],
    ) -> None:
        self._tree = tree
        self._tiers = tiers
        self.uploads = tiers.uploads
        """Segments to upload."""
        self._checkpoints = checkpoints
        self._size = size
        self._checkpoint_size = checkpoint_size
        self._seconds_to_compute = seconds_to_compute
        self._rate = TransferRate()
        """Of fetches, per byte; without it a fetch is tried, whatever it may take."""
        self._unavailable_until = 0.0
        self._pinned_until: dict[str, float] = {}
        self._denied: deque[tuple[str, bytes]] = deque(maxlen=_MAX_DENIED)
        """Namespaces and prompts whose logits were invalid."""
        self._stats = RemoteStats()

    @property
    def is_on(self) -> bool:
        """True if there is a store."""
        return self._tiers.uploads.is_on

    @property
    def stats(self) -> RemoteStats:
        """Counters since the start, and whether the store answers."""
        return structs.replace(self._stats, is_available=self.is_on and self._tiers.now >= self._unavailable_until)

    def tick(self) -> None:
        """Begin a plan: unpin KV that was fetched over `_PIN_S` ago for requests that still wait for a slot."""
        for request_id, until in list(self._pinned_until.items()):
            if until <= self._tiers.now:
                self.unpin(request_id)

    # --- fetching for a request that waits ---

    def wanted(self, request_id: str, match: Match, tokens: bytes, now: float) -> Lookup | None:
        """Return the lookup for a request with this match; None if the store need not be asked."""
        namespace = match.namespace
        if not self.is_on or self._tiers.is_on_trial or is_private(namespace) or now < self._unavailable_until:
            return None
        if any(denied == namespace and tokens.startswith(prompt) for denied, prompt in self._denied):
            return None
        found = self._tree.match(namespace, tokens)
        start = self._covered(found)
        # After a gap, segments of this server may continue the prompt; between both nothing can be added twice.
        later = [node.start for node in found.matched_end.path_to_root() if node.segment and node.start >= start]
        end = min([*later, len(tokens) // WIDTH])
        restore_point = match.n_cached if self._checkpoints.has_states else None
        if end - (start if restore_point is None else min(restore_point, start)) < GRID_TOKENS:
            return None
        self._stats.lookups += 1
        return Lookup(request_id, namespace, tokens, start, end, restore_point)

    def choose(self, lookup: Lookup, found: Found) -> Choice:
        """Return the part of an answer that is faster to fetch than to compute, and fits into RAM."""
        if lookup.restore_point is not None:
            return self._choose_checkpoint(lookup, found)
        portions = tuple(each for each in found.portions if each.end <= lookup.end)
        while portions:
            choice = Choice(portions)
            if self._fits(lookup, choice) and (
                seconds := self._pays(choice, found, lookup.start, portions[-1].end)
            ):
                return Choice(portions, seconds=seconds, n_tokens=portions[-1].end - lookup.start)
            portions = portions[:-1]
        return Choice()

    def add(self, lookup: Lookup, portion: Portion, n_bytes: int) -> int | None:
        """Add a fetched portion to tree and RAM; returns the number of its segment, whose KV the backend must get.

        None if it is not needed any more: it is cached by now, the KV before it is gone, or RAM has no room.
        """
        path = lookup.tokens[: portion.end * WIDTH]
        match = self._tree.match(lookup.namespace, path)
        nodes = match.matched_end.path_to_root()
        has_segment = any(node.segment and min(node.end, match.n_matched) > portion.start for node in nodes)
        if (
            has_segment
            or self._covered(match) < portion.start
            or n_bytes != self._size.of(portion.end - portion.start)
        ):
            return None
        if not self._tiers.fits(match.matched_end, [(portion.start, portion.end)]):
            return None
        segment = self._tiers.add(self._tree.insert(lookup.namespace, path), portion.start, portion.end)
        segment.source = "remote"
        self._pin(lookup, segment)
        self._stats.fetched_tokens += segment.n_tokens
        return segment.number

    def add_checkpoint(self, lookup: Lookup, checkpoint: RemoteObject, n_bytes: int) -> int | None:
        """Add a fetched checkpoint; returns its number, or None if it is not needed any more."""
        end, size = checkpoint.end, self._checkpoint_size
        path = lookup.tokens[: end * WIDTH]
        match = self._tree.match(lookup.namespace, path)
        if size is None or n_bytes not in size.all_of(end) or self._covered(match) < end:
            return None
        last = match.whole_end if match.whole_end.end == end else None
        has_one = last is not None and last.checkpoint is not None
        if has_one or not self._checkpoints.can_take(end):
            return None
        if not self._checkpoints.evict_for(n_bytes, match.matched_end.tenant):
            return None
        added = self._tiers.add_checkpoint(self._tree.insert(lookup.namespace, path), n_bytes)
        self._pin(lookup, added)
        return added.number

    def unpin(self, request_id: str) -> None:
        """Allow the eviction of KV that was fetched for a request: it was loaded, or waits for too long."""
        if self._pinned_until.pop(request_id, None) is not None:
            self._tiers.load_pins.pop(request_id, None)

    def deny(self, namespace: str, tokens: bytes) -> None:
        """Look up no prompts any more that begin like this one: its logits were invalid."""
        if self.is_on:
            self._denied.append((namespace, tokens[: BLOCK_TOKENS * WIDTH]))

    def on_fetched(self, n_bytes: int, seconds: float, now: float) -> None:
        """Record a fetch, and learn the speed of the store from it."""
        self._stats.fetched_bytes += n_bytes
        self._rate.observe(n_bytes, seconds, now)

    def on_corrupt(self) -> None:
        """Count an object that differs from the uploaded one."""
        self._stats.corrupt_objects += 1

    def on_late(self, choice: Choice, now: float) -> None:
        """Record a fetch that took longer than computing; none of its size is tried for `RETRY_DELAY_S`."""
        self._stats.failures += 1
        # No request waits longer than `_MAX_DEADLINE_S`, but the next one like it must not wait again.
        seconds = max(choice.seconds, self._seconds_to_compute(choice.n_tokens))
        self._rate.at_least(choice.n_bytes, seconds, now)

    def on_unavailable(self, now: float) -> None:
        """Send the store nothing for `RETRY_DELAY_S`: it did not answer, or refused."""
        self._stats.failures += 1
        self._unavailable_until = now + pacing.RETRY_DELAY_S
        self._tiers.uploads.pause(self._unavailable_until)
        # Its speed may be another one by then.
        self._rate.reset()

    # --- uploading ---

    def take_uploads(self) -> list[Upload]:
        """Return the uploads to start now, after the KV operations of the same plan."""
        uploads = []
        for segment in self._tiers.uploads.take_due(self._tiers.now):
            upload = self._upload(segment)
            if upload is not None:
                uploads.append(upload)
            else:
                self._tiers.uploads.postpone(segment, self._tiers.now)
        return uploads

    def on_cleared(self) -> None:
        """Offer every segment again once it is used: all objects of this model are being deleted."""
        self._tiers.uploads.offer_all_again()

    def on_uploaded(self, number: int, now: float, n_bytes: int | None) -> None:
        """Handle the end of an upload; `n_bytes` were sent, 0 if the store had them, None if it failed."""
        self._tiers.uploads.on_uploaded(number, now, ok=n_bytes is not None)
        self._stats.uploaded_bytes += n_bytes or 0
        self._stats.uploads += bool(n_bytes)
        self._stats.failed_uploads += n_bytes is None

    # --- inside ---

    def _choose_checkpoint(self, lookup: Lookup, found: Found) -> Choice:
        """Return the deepest checkpoint that pays, with the KV before it, which is of no use without it."""
        assert lookup.restore_point is not None
        covered = found.portions[-1].end if found.portions else lookup.start
        for each in sorted(found.checkpoints, key=lambda each: -each.end):
            if not lookup.restore_point < each.end <= lookup.end or each.start > covered:
                continue
            # The list of checkpoints, unlike the index, has no authentication codes.
            if self._checkpoint_size is None or each.state_bytes not in self._checkpoint_size.all_of(each.end):
                continue
            portions = tuple(
                Portion(one.object, one.start, min(one.end, each.start))
                for one in found.portions
                if one.start < each.start
            )
            start = max(lookup.start, each.start)
            rest = Portion(each, start, each.end) if start < each.end else None
            choice = Choice(portions, each, rest)
            first = min(lookup.restore_point, lookup.start)
            seconds = self._pays(choice, found, first, each.end)
            if seconds and self._fits(lookup, choice):
                return Choice(portions, each, rest, seconds, each.end - first)
        return Choice()

    def _pays(self, choice: Choice, found: Found, start: int, end: int) -> float:
        """Return how long a request may wait for a fetch; 0 if computing `[start, end)` is faster."""
        to_compute = self._seconds_to_compute(end - start)
        to_fetch = found.seconds + choice.n_bytes * (self._rate.seconds(self._tiers.now) or 0.0)
        # Without a speed that was measured lately, it is tried.
        if to_compute and to_fetch >= to_compute:
            return 0.0
        return min(max(to_compute, _MIN_DEADLINE_S), _MAX_DEADLINE_S)

    def _fits(self, lookup: Lookup, choice: Choice) -> bool:
        wanted = choice.all_portions
        match = self._tree.match(lookup.namespace, lookup.tokens)
        return not wanted or self._tiers.fits(match.matched_end, [(each.start, each.end) for each in wanted])

    def _covered(self, match: Match) -> int:
        """Return the leading tokens of a match whose KV is in the pool or can be loaded."""
        parts = self._tiers.readable(match.parts)
        return parts[-1].end if parts else match.n_resident

    def _pin(self, lookup: Lookup, segment: Segment) -> None:
        request_id, pins = lookup.request_id, self._tiers.load_pins
        pins[request_id] = pins.get(request_id, frozenset()) | {segment}
        self._pinned_until[request_id] = self._tiers.now + _PIN_S

    def _upload(self, segment: Segment) -> Upload | None:
        """Return the blocks that a segment completes, with the last one of a path, or that of a checkpoint.

        None if the KV of one of them is not completely in RAM.
        """
        end, number = segment.end, segment.number if segment.is_checkpoint else None
        n_whole = end // BLOCK_TOKENS * BLOCK_TOKENS
        ends = list(range(block_start(segment.start + 1) + BLOCK_TOKENS, n_whole + 1, BLOCK_TOKENS))
        last = end // GRID_TOKENS * GRID_TOKENS
        if number is not None:
            ends = [end]
        elif segment.is_end_of_path and last > max(n_whole, segment.start):
            ends.append(last)
        path = list(segment.nodes[-1].path_to_root())
        blocks = tuple(Block(block_start(at), at, _parts(path, block_start(at), at), number) for at in ends)
        if not all(block.parts for block in blocks):
            return None
        tokens = segment.prefix[: ends[-1] * WIDTH] if ends else b""
        return Upload(segment.number, segment.namespace, tokens, blocks)


def _parts(path: Sequence[Node], start: int, end: int) -> tuple[BlockPart, ...]:
    """Return the parts of segments in RAM with `[start, end)` of a path, which is given from its end to the root.

    Empty if KV of any position is not in RAM.
    """
    parts: list[BlockPart] = []
    for node in reversed(path):
        low, high = max(node.start, start), min(node.end, end)
        if low >= high:
            continue
        segment = node.segment
        if segment is None or not segment.state.is_loadable:
            return ()
        if parts and parts[-1].number == segment.number:
            low = parts.pop().wanted.start
        parts.append(BlockPart(segment.number, range(segment.start, segment.end), range(low, high)))
    return tuple(parts)
