"""Results of a lookup in the radix tree, of acquiring a slot, of loading and of a plan; why no more is cached."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from itertools import takewhile

from llamaslot.base.images import before_tile
from llamaslot.base.namespaces import is_salted
from llamaslot.base.stats import Miss
from llamaslot.base.tokens import WIDTH, unpacked
from llamaslot.kvcache.ghost_list import GhostList
from llamaslot.kvcache.nodes import Node, Segment


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """Tokens `[start, end)` of a prompt, and the segment that has their KV."""

    segment: Segment
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a prompt: the part in the pool, then segments that continue it."""

    namespace: str
    tokens: bytes
    """The tokens that were looked up, packed."""
    resident_end: Node
    """Node in which the resident part ends."""
    n_resident: int
    """Tokens of the resident part."""
    matched_end: Node
    """Node in which the whole match ends; below `resident_end` if segments continue it."""
    n_matched: int
    """Leading tokens found in the tree, even if their KV is gone."""
    parts: tuple[SegmentPart, ...]
    """Segments that continue the resident part without a gap; any of them may belong to the public namespace."""
    n_cached: int
    """Tokens that need not be computed: resident ones, and those after them that are worth loading.

    For a model with a partial state the match is cut at the deepest restore point, with all of its fields.
    """
    version: int
    """Version of the tree at the lookup; the match is stale if the tree's version differs."""
    public: Match | None = None
    """Match of the same tokens in the public namespace, if any of `parts` is from there."""
    public_end: Node | None = None
    """Last node of the public namespace that these tokens match completely; None if it may not be used."""
    n_without_state: int = 0
    """Tokens after `n_cached` that have to be computed although their KV is cached, for lack of a restore point."""

    @property
    def n_idle(self) -> int:
        """Resident tokens that no running request holds."""
        nodes = self.resident_end.path_to_root()
        return sum(min(node.end, self.n_resident) - node.start for node in nodes if not node.n_pins)

    @property
    def whole_end(self) -> Node:
        """The last node of which all tokens match."""
        node = self.matched_end
        return node.parent if node.parent is not None and self.n_matched < node.end else node

    @property
    def segments(self) -> list[Segment]:
        """Segments that cover nodes of the path, from the root on."""
        found = dict.fromkeys(node.segment for node in self.matched_end.path_to_root() if node.segment is not None)
        return list(found)[::-1]

    def cut(self, n: int, parts: tuple[SegmentPart, ...]) -> Match:
        """Return the match cut to its first `n` tokens, of which `parts` are to be loaded."""
        if n >= self.n_resident:
            return replace(self, parts=parts, n_cached=n)
        node = self.resident_end
        while node.parent is not None and n <= node.start:
            node = node.parent
        return replace(self, resident_end=node, n_resident=n, parts=parts, n_cached=n)

    def before_tile(self) -> Match:
        """Return the match cut to where a tile begins within which it, or its resident part, may end.

        A tile is computed whole, and the pool has no part of one; marked tokens count as a tile. `n_cached` changes
        only with the resident part.
        """
        tokens = unpacked(self.tokens)
        n = before_tile(tokens, self.n_resident)
        if n < self.n_resident:
            return self.cut(n, ())
        end = self.parts[-1].end if self.parts else n
        n = before_tile(tokens, end)
        return replace(self, parts=self.parts_until(n)) if n < end else self

    def parts_until(self, n: int) -> tuple[SegmentPart, ...]:
        """The parts within the first `n` tokens."""
        return tuple(replace(part, end=min(part.end, n)) for part in self.parts if part.start < n)

    def parts_from(self, n: int) -> tuple[SegmentPart, ...]:
        """Segments that have the tokens from position `n` up to the first gap, resident or not."""
        return segment_parts(self.matched_end, n, self.n_matched)

    def last_fork(self) -> int:
        """Return the last position at which another path branches off, ends, or is running; 0 if there is none.

        Sequences that end with the resident part do not count as other paths: eviction may have shortened them.
        """
        node, ours = self.matched_end, self.resident_end.end_of
        if self.n_matched < node.end or node.children or node.n_pins:
            return self.n_matched
        while node.parent is not None:
            node = node.parent
            if len(node.children) > 1 or node.n_pins or not node.end_of <= ours:
                return node.end
        return 0

    def diverges_at(self, n: int) -> bool:
        """True if the first `n` tokens match, and cached paths continue them, but none with the same next token."""
        node = self.matched_end
        while node.parent is not None and n <= node.start:
            node = node.parent
        if n > self.n_matched or n > node.end:
            return False
        next_token = self.tokens[n * WIDTH : (n + 1) * WIDTH]
        if n < node.end:
            at = (n - node.start) * WIDTH
            return node.run[at : at + WIDTH] != next_token
        return any(first != next_token for first in node.children)


@dataclass(frozen=True, slots=True)
class Acquired:
    """The slot that a request got, and what is cached for it."""

    slot: int
    n_cached: int
    """Tokens that need not be computed, including those that are still to be loaded."""
    n_resident: int
    """Of `n_cached`, those that the slot holds now."""
    n_copied: int
    """Of `n_resident`, those copied from other sequences."""
    miss: Miss
    """Reason why no more is cached."""
    n_lost: int = 0
    """Tokens after `n_cached` that earlier requests had computed, and that are not usable any more."""


class LoadStatus(Enum):
    """Progress of a load."""

    DONE = "nothing more to load"
    MORE = "more in another step"
    READING = "more once a read from disk is done"


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of a load."""

    status: LoadStatus
    n_copied: int = 0
    """Tokens copied from other sequences."""
    n_loaded: int = 0
    """Tokens loaded from RAM."""
    n_read: int = 0
    """Of `n_loaded`, those that had to be read from disk first."""
    n_fetched: int = 0
    """Of `n_loaded`, those that had to be fetched from the remote tier first."""
    n_public: int = 0
    """Of `n_loaded`, those from segments of the public namespace."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Times, in seconds, at which the cache has work of its own to do; None for never."""

    idle: float | None = None
    """While nothing runs."""
    running: float | None = None
    """While requests run."""


def segment_parts(last: Node, start: int, end: int) -> tuple[SegmentPart, ...]:
    """Segments that cover `[start, end)` of the path to a node, up to the first gap."""
    path = takewhile(lambda node: node.end > start, last.path_to_root())
    covering = [node for node in path if start < end and node.start < end]
    parts: list[SegmentPart] = []
    for node in reversed(covering):
        if node.segment is None:
            break
        at = max(node.start, start)
        if parts and parts[-1].segment is node.segment:
            at = parts.pop().start
        parts.append(SegmentPart(node.segment, at, min(node.end, end)))
    return tuple(parts)


def miss_reason(match: Match, ghosts: GhostList, min_shared: int) -> Miss:
    """Return why no more of the tokens are cached; empty if all are, or if nothing explains it."""
    n = match.n_cached
    if n * WIDTH == len(match.tokens):
        return ""
    if match.n_without_state >= min_shared:
        return "no_checkpoint"
    if ghosts.continues(match.namespace, match.tokens, n + match.n_without_state):
        return "evicted"
    if n < min_shared:
        return "salted" if is_salted(match.namespace) else "cold"
    return "diverged" if any(each.diverges_at(n) for each in (match, match.public) if each is not None) else ""
