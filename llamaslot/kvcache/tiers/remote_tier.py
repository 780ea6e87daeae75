"""Remote tier: KV in a store that several servers share, fetched into RAM and uploaded from RAM.

    request queued --> wanted --> store: find --> choose --> store: fetch --> add (RAM, tree) --> admitted, loaded
    segment in RAM --> upload queue --> store: upload

A request whose prompt is not cached on this server waits in the queue while the store is asked and KV is fetched.
Fetched KV becomes a segment in RAM like any other, so the rest of the cache does not know about the store. After
any failure the tokens are computed, as after a miss.

    the store answers   fetch KV if fetching is faster than computing, judged by the speed of recent fetches
    no answer in time   send nothing to the store for `RETRY_DELAY_S`, then try again
    corrupt object      count it, and fetch no further objects for this request
    invalid logits      never again look up prompts that begin like this one

Each server cuts the same tokens into segments differently. In the store all prompts are cut at the same positions,
so that a prefix is stored once, whichever server uploads it: into blocks of `BLOCK_TOKENS`, and a last block that
ends at a multiple of `GRID_TOKENS`, or at a checkpoint. An object is the stored KV of a block.

    prompt     |0 ................................. 1930|
    objects    [0 ... 512)[512 .. 1024)[1024 .. 1536)[1536 ...... 1920)
               [1536 .... 1600) + checkpoint at 1600
    index      64 128 .. 512 576 ...          1536 1600 ... 1920

The index has an entry for each multiple of `GRID_TOKENS`. Its key is a digest of all tokens before that position;
its value names the object that has the last of them. So a prompt that diverges from this one at 1700 gets the KV of
its first 1664 tokens.

Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import structs

from llamaslot.base.kv_ops import Kv, KvPart
from llamaslot.base.namespaces import is_private
from llamaslot.base.stats import RemoteStats
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.match import Match, SegmentPart, segment_parts
from llamaslot.kvcache.nodes import Segment
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.tiers import pacing
from llamaslot.kvcache.tiers.checkpoints import Checkpoints
from llamaslot.kvcache.tiers.disk_tier import DiskTier
from llamaslot.kvcache.tiers.pacing import TransferRate
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers

BLOCK_TOKENS = 512
"""Most tokens of an object. Like `GRID_TOKENS`, it must be the same for all servers of a store."""
GRID_TOKENS = 64
"""Tokens between two index entries. Fetched prefixes end at an entry, so up to 63 more tokens are recomputed."""


def block_start(end: int) -> int:
    """Return the start of the block with the token before `end`."""
    return (end - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def grid_positions(start: int, end: int) -> range:
    """Return the positions in (start, end] at which the index may have entries."""
    return range((start // GRID_TOKENS + 1) * GRID_TOKENS, end + 1, GRID_TOKENS)


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """KV of `[start, end)` in the store, and with `state_bytes` the partial state after it."""

    start: int
    end: int
    digest: bytes
    """Its name: a keyed digest of the namespace and all tokens up to its end."""
    n_bytes: int
    """Bytes of its KV."""
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Portion:
    """The part `[start, end)` of a prompt whose KV is in an object."""

    object: RemoteObject
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Found:
    """Answer to a lookup."""

    portions: tuple[Portion, ...] = ()
    """Portions that continue the cached prefix, without a gap."""
    checkpoints: tuple[RemoteObject, ...] = ()
    """Checkpoints on the prompt's path. Each object also has the KV of its block up to the checkpoint."""
    seconds: float = 0.0
    """Duration of the lookup."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The requested parts of an object."""

    kv: Kv | None = None
    state: Kv | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of both."""
        return sum(len(each) for each in (self.kv, self.state) if each is not None)


@dataclass(frozen=True, slots=True)
class Block:
    """A block to upload: the parts of segments that have its KV, and the number of a checkpoint at its end."""

    start: int
    end: int
    parts: tuple[SegmentPart, ...]
    checkpoint: int | None = None


@dataclass(frozen=True, slots=True)
class Upload:
    """Blocks to upload for segment or checkpoint `number`, which is now in RAM."""

    number: int
    namespace: str
    tokens: bytes
    """All tokens up to the end of the last block, packed."""
    blocks: tuple[Block, ...]


class CorruptObjectError(Exception):
    """An object in the store differs from what was uploaded."""


class RemoteUnavailableError(Exception):
    """The store did not answer in time, or refused the request."""


class RemoteStore(Protocol):
    """Store that several servers share. Coroutines may run concurrently on one event loop; `join` on any thread."""

    @property
    def timeout_s(self) -> float:
        """Most seconds that a lookup may take."""

    @property
    def address(self) -> str:
        """The store's URL in messages, without user and password."""

    async def ping(self) -> None:
        """Connect and wait for an answer; the caller sets a time limit. Raises `RemoteUnavailableError`."""

    async def find(self, namespace: str, tokens: bytes, start: int, *, with_checkpoints: bool) -> Found:
        """Look up what the store has of a prompt after its first `start` tokens; the caller sets a time limit.

        Raises `RemoteUnavailableError`.
        """

    async def fetch(self, wanted: RemoteObject, *, kv: bool, state: bool) -> Fetched | None:
        """Return the KV of an object, its state, or both; None if the object is gone.

        Raises `CorruptObjectError`, `RemoteUnavailableError`, `MemoryError`.
        """

    async def upload(
        self, namespace: str, tokens: bytes, start: int, parts: Sequence[KvPart], state: Kv | None
    ) -> int:
        """Store the object that begins at `start` and ends with these tokens, unless the store has it already.

        Returns the bytes sent. Raises `RemoteUnavailableError`, and `ValueError` if the parts do not fit together.
        """

    def join(self, parts: Sequence[KvPart]) -> Kv:
        """Join parts of segments, which must leave no gap, into one segment.

        Raises `ValueError` if the bytes are not those of such segments, and `MemoryError`.
        """

    async def drop(self, namespace: str, tokens: bytes, start: int) -> None:
        """Delete the objects of a prompt that have tokens after position `start`.

        Raises `RemoteUnavailableError`.
        """

    async def clear(self) -> None:
        """Delete all objects of this model. Raises `RemoteUnavailableError`."""

    async def close(self) -> None:
        """Close the connections."""


def portions_of(entries: dict[int, RemoteObject], start: int, end: int) -> Iterator[Portion]:
    """Yield portions of a prompt from `start` on without a gap, at most one per block.

    `entries` has the objects that the index names, by their position on the grid, up to `end`.
    """
    at = start
    while at < end:
        block = at // BLOCK_TOKENS * BLOCK_TOKENS
        names = [
            position
            for position, each in entries.items()
            if at < position <= block + BLOCK_TOKENS and each.start == block and position <= each.end
        ]
        if not names:
            return
        last = max(names)
        yield Portion(entries[last], at, last)
        at = last
        if last < block + BLOCK_TOKENS:
            return


_MIN_DEADLINE_S, _MAX_DEADLINE_S = 0.5, 10.0
"""A request waits for a fetch as long as computing the tokens would take, within these limits."""
_PIN_S = 10.0
"""How long fetched KV is pinned in RAM for a request that waits for a slot."""
_MAX_DENIED = 32
"""Most prompts with invalid logits that are remembered."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Lookup in the store for a waiting request."""

    request_id: str
    namespace: str
    tokens: bytes
    """The prompt, packed."""
    start: int
    """Number of leading tokens whose KV is cached on this server."""
    end: int
    """Position up to which KV is wanted: the end of the prompt, or the start of a later segment cached here."""
    restore_point: int | None
    """Position of the deepest restore point cached here; None for a model without a partial state."""


@dataclass(frozen=True, slots=True)
class Choice:
    """KV to fetch within `seconds`: portions, and for a model with a partial state the checkpoint after them.

    `rest` is the KV in the checkpoint's own object that precedes the checkpoint, if that is not cached here.
    """

    portions: tuple[Portion, ...] = ()
    checkpoint: RemoteObject | None = None
    rest: Portion | None = None
    seconds: float = 0.0
    n_tokens: int = 0
    """Tokens that the fetch saves from being computed."""

    @property
    def all_portions(self) -> tuple[Portion, ...]:
        """The portions, including the rest."""
        return self.portions if self.rest is None else (*self.portions, self.rest)

    @property
    def n_bytes(self) -> int:
        """Bytes to fetch: objects are fetched whole."""
        n_state = self.checkpoint.state_bytes if self.checkpoint is not None else 0
        return n_state + sum(each.object.n_bytes for each in self.all_portions)


class RemoteTier:
    """Decides what to look up, fetch and upload. `prefill_seconds` estimates a prefill if its cost is unknown."""

    def __init__(
        self,
        tree: RadixTree,
        tiers: SegmentTiers,
        disk: DiskTier,
        checkpoints: Checkpoints,
        *,
        settings: CacheSettings,
        prefill_seconds: Callable[[int], float],
    ) -> None:
        self._tree = tree
        self._tiers = tiers
        self._disk = disk
        self._checkpoints = checkpoints
        self._settings = settings
        self._prefill_seconds = prefill_seconds
        self._rate = TransferRate()
        """Of fetches, per byte. While it is unknown, a fetch is tried however long it may take."""
        self._unavailable_until = 0.0
        self._pinned_until: dict[str, float] = {}
        self._denied: deque[tuple[str, bytes]] = deque(maxlen=_MAX_DENIED)
        """Namespace and start of prompts whose logits were invalid."""
        self._stats = RemoteStats()
        self.uploads = tiers.uploads

    @property
    def stats(self) -> RemoteStats:
        """Counters since the start, and `is_available` unless the store failed to answer lately."""
        is_available = self._settings.uploads and self._tiers.now >= self._unavailable_until
        return structs.replace(self._stats, is_available=is_available)

    def tick(self) -> None:
        """Begin a plan: unpin KV that was fetched more than `_PIN_S` ago for requests still waiting for a slot."""
        for request_id, until in list(self._pinned_until.items()):
            if until <= self._tiers.now:
                self.unpin(request_id)

    # --- fetching for a request that waits ---

    def wanted(self, request_id: str, match: Match, tokens: bytes, now: float) -> Lookup | None:
        """Return the lookup for a request with this match; None if the store need not be asked."""
        namespace, settings = match.namespace, self._settings
        if not settings.uploads or settings.is_on_trial or is_private(namespace) or now < self._unavailable_until:
            return None
        if any(denied == namespace and tokens.startswith(prompt) for denied, prompt in self._denied):
            return None
        found = self._tree.match(namespace, tokens)
        start = self._covered(found)
        # Segments of this server may continue the prompt after a gap. Only the gap is wanted, since no token may
        # have two segments.
        later = [node.start for node in found.matched_end.path_to_root() if node.segment and node.start >= start]
        end = min([*later, len(tokens) // WIDTH])
        restore_point = match.n_cached if self._checkpoints.has_states else None
        if end - (start if restore_point is None else min(restore_point, start)) < GRID_TOKENS:
            return None
        self._stats.lookups += 1
        return Lookup(request_id, namespace, tokens, start, end, restore_point)

    def choose(self, lookup: Lookup, found: Found) -> Choice:
        """Return the part of the KV found that is faster to fetch than to compute and fits into RAM."""
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
        """Add a fetched portion to tree and RAM; returns its segment's number, with which the backend gets the KV.

        None if it is of no use any more: it is cached by now, the KV before it is gone, or RAM is full.
        """
        path = lookup.tokens[: portion.end * WIDTH]
        match = self._tree.match(lookup.namespace, path)
        nodes = match.matched_end.path_to_root()
        has_segment = any(node.segment and min(node.end, match.n_matched) > portion.start for node in nodes)
        if (
            has_segment
            or self._covered(match) < portion.start
            or n_bytes != self._tiers.size.of(portion.end - portion.start)
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
        """Add a fetched checkpoint; returns its number, or None if it is of no use any more."""
        end = checkpoint.end
        path = lookup.tokens[: end * WIDTH]
        match = self._tree.match(lookup.namespace, path)
        if n_bytes not in self._checkpoints.settings.size.all_of(end) or self._covered(match) < end:
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
        """Allow the eviction of KV that was fetched for a request, which has loaded it or waits for too long."""
        if self._pinned_until.pop(request_id, None) is not None:
            self._tiers.load_pins.pop(request_id, None)

    def deny(self, namespace: str, tokens: bytes) -> None:
        """Never again look up prompts that begin like this one, because its logits were invalid."""
        if self._settings.uploads:
            self._denied.append((namespace, tokens[: BLOCK_TOKENS * WIDTH]))

    def on_fetched(self, n_bytes: int, seconds: float, now: float) -> None:
        """Record a fetch, and learn the store's speed from it."""
        self._stats.fetched_bytes += n_bytes
        self._rate.observe(n_bytes, seconds, now)

    def on_corrupt(self) -> None:
        """Count an object that differs from the uploaded one."""
        self._stats.corrupt_objects += 1

    def on_late(self, choice: Choice, now: float) -> None:
        """Record a fetch that missed its deadline; none of its size is tried for `RETRY_DELAY_S`."""
        self._stats.failures += 1
        # The deadline is at most `_MAX_DEADLINE_S`. Assuming at least the time to compute the tokens keeps the next
        # request like this one from waiting again.
        seconds = max(choice.seconds, self._seconds_to_compute(choice.n_tokens))
        self._rate.at_least(choice.n_bytes, seconds, now)

    def on_unavailable(self, now: float) -> None:
        """Send nothing to the store for `RETRY_DELAY_S`, because it did not answer, or refused."""
        self._stats.failures += 1
        self._unavailable_until = now + pacing.RETRY_DELAY_S
        self.uploads.pause(self._unavailable_until)
        # By then its speed may have changed.
        self._rate.reset()

    # --- uploading ---

    def take_uploads(self) -> list[Upload]:
        """Return the uploads to start now, after the KV operations of the same plan."""
        uploads = []
        for segment in self.uploads.take_due(self._tiers.now):
            upload = self._upload(segment)
            if upload is not None:
                uploads.append(upload)
            else:
                self.uploads.postpone(segment, self._tiers.now)
        return uploads

    def on_uploaded(self, number: int, now: float, n_bytes: int | None) -> None:
        """Handle the end of an upload: `n_bytes` were sent, 0 if the store had it already, None if it failed."""
        self.uploads.on_uploaded(number, now, ok=n_bytes is not None)
        self._stats.uploaded_bytes += n_bytes or 0
        self._stats.uploads += bool(n_bytes)
        self._stats.failed_uploads += n_bytes is None

    # --- inside ---

    def _choose_checkpoint(self, lookup: Lookup, found: Found) -> Choice:
        """Return the deepest checkpoint worth fetching, with the missing KV before it.

        Without the checkpoint that KV would be of no use, so it counts towards the cost.
        """
        assert lookup.restore_point is not None
        covered = found.portions[-1].end if found.portions else lookup.start
        for each in sorted(found.checkpoints, key=lambda each: -each.end):
            if not lookup.restore_point < each.end <= lookup.end or each.start > covered:
                continue
            # Unlike the index, the list of checkpoints has no authentication codes, so its sizes are checked here.
            if each.state_bytes not in self._checkpoints.settings.size.all_of(each.end):
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
        # If no fetch was measured lately, the rate is None and the fetch is tried.
        if to_compute and to_fetch >= to_compute:
            return 0.0
        return min(max(to_compute, _MIN_DEADLINE_S), _MAX_DEADLINE_S)

    def _seconds_to_compute(self, n_tokens: int) -> float:
        return n_tokens * self._settings.cost.prefill_us / 1e6 or self._prefill_seconds(n_tokens)

    def _fits(self, lookup: Lookup, choice: Choice) -> bool:
        wanted = choice.all_portions
        match = self._tree.match(lookup.namespace, lookup.tokens)
        return not wanted or self._tiers.fits(match.matched_end, [(each.start, each.end) for each in wanted])

    def _covered(self, match: Match) -> int:
        """Return the number of leading tokens of a match whose KV is in the pool or can be loaded."""
        parts = self._disk.readable(match.parts)
        return parts[-1].end if parts else match.n_resident

    def _pin(self, lookup: Lookup, segment: Segment) -> None:
        request_id, pins = lookup.request_id, self._tiers.load_pins
        pins[request_id] = pins.get(request_id, frozenset()) | {segment}
        self._pinned_until[request_id] = self._tiers.now + _PIN_S

    def _upload(self, segment: Segment) -> Upload | None:
        """Return the blocks that a segment completes, including the last of its path, or the block of a checkpoint.

        None if RAM does not have all of their KV.
        """
        end, number = segment.end, segment.number if segment.is_checkpoint else None
        n_whole = end // BLOCK_TOKENS * BLOCK_TOKENS
        ends = list(range(block_start(segment.start + 1) + BLOCK_TOKENS, n_whole + 1, BLOCK_TOKENS))
        last = end // GRID_TOKENS * GRID_TOKENS
        if number is not None:
            ends = [end]
        elif segment.is_end_of_path and last > max(n_whole, segment.start):
            ends.append(last)
        last_node = segment.nodes[-1]
        blocks = []
        for at in ends:
            start = block_start(at)
            parts = segment_parts(last_node, start, at)
            is_whole = bool(parts) and (parts[0].start, parts[-1].end) == (start, at)
            if not is_whole or not all(part.segment.state.is_loadable for part in parts):
                return None
            blocks.append(Block(start, at, parts, number))
        tokens = segment.prefix[: ends[-1] * WIDTH] if ends else b""
        return Upload(segment.number, segment.namespace, tokens, tuple(blocks))
