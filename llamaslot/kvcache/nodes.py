"""Nodes of the radix tree, and what is attached to them: segments and checkpoints.

A node is a run of tokens. A segment is KV of a range of a path outside of the pool. Prefixes that conversations
share are kept once:

    [0 .............. 8000) in 16 segments of 500 ---+--- [8000 .. 8100)   conversation 1
                                                     +--- [8000 .. 8250)   conversation 2

A segment does not know whether its tokens are also in the pool: that is recorded in the nodes that it covers.

A checkpoint is a segment without tokens: the partial state at one position of a path. It goes through the same
states (`SEGMENT_TABLE`), and is the child of the segment that has the token before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from enum import Enum
from typing import Literal, NamedTuple

import numpy as np

from llamaslot.base.errors import next_state
from llamaslot.base.namespaces import PUBLIC_TENANT, tenant_of
from llamaslot.base.tokens import WIDTH


class SegmentState(Enum):
    """Where the bytes of a segment are."""

    RAM = "in RAM"
    DIRTY = "in RAM, queued to be written"
    WRITING = "in RAM, being written"
    CLEAN = "in RAM and on disk"
    DISK = "on disk"
    READING = "on disk, being read"
    UNREADABLE = "on disk, but the last read failed"
    DROPPED = "dropped"

    @property
    def is_loadable(self) -> bool:
        """True if the bytes are in RAM now."""
        return self in _LOADABLE

    @property
    def uses_ram(self) -> bool:
        """True if it counts against the RAM budget. A read reserves its bytes at the start."""
        return self in _LOADABLE or self is SegmentState.READING

    @property
    def uses_disk(self) -> bool:
        """True if it counts against the disk budget. A write reserves its bytes at the start."""
        return self in _USES_DISK

    @property
    def is_busy(self) -> bool:
        """True while it is being read or written."""
        return self in _BUSY


class SegmentEvent(Enum):
    """Events that change the state of a segment."""

    QUEUE = "queue to be written"
    UNQUEUE = "leave the write queue"
    WRITE = "start to write"
    WRITTEN = "written"
    WRITE_FAILED = "write failed"
    READ = "start to read"
    READ_DONE = "read"
    READ_FAILED = "read failed"
    READ_TIMED_OUT = "no answer to a read"
    RETRY = "may be read again"
    EVICT_RAM = "evict from RAM"
    EVICT_DISK = "evict from disk"
    DROP = "drop everywhere"


S, E = SegmentState, SegmentEvent
_LOADABLE = frozenset({S.RAM, S.DIRTY, S.WRITING, S.CLEAN})
_BUSY = frozenset({S.WRITING, S.READING})
_USES_DISK = frozenset({S.WRITING, S.CLEAN, S.DISK, S.READING, S.UNREADABLE})

SEGMENT_TABLE: dict[tuple[SegmentState, SegmentEvent], SegmentState] = {
    (S.RAM, E.QUEUE): S.DIRTY,
    (S.RAM, E.EVICT_RAM): S.DROPPED,
    (S.DIRTY, E.UNQUEUE): S.RAM,
    (S.DIRTY, E.WRITE): S.WRITING,
    (S.DIRTY, E.EVICT_RAM): S.DROPPED,
    (S.WRITING, E.WRITTEN): S.CLEAN,
    (S.WRITING, E.WRITE_FAILED): S.RAM,
    (S.WRITING, E.EVICT_DISK): S.RAM,
    (S.CLEAN, E.EVICT_RAM): S.DISK,
    (S.CLEAN, E.EVICT_DISK): S.RAM,
    (S.DISK, E.READ): S.READING,
    (S.DISK, E.READ_FAILED): S.UNREADABLE,  # the answer to a read that had timed out
    (S.DISK, E.EVICT_DISK): S.DROPPED,
    (S.READING, E.READ_DONE): S.CLEAN,
    (S.READING, E.READ_FAILED): S.UNREADABLE,
    (S.READING, E.READ_TIMED_OUT): S.DISK,
    (S.READING, E.EVICT_DISK): S.DROPPED,
    (S.UNREADABLE, E.RETRY): S.DISK,
    (S.UNREADABLE, E.READ_FAILED): S.UNREADABLE,
    (S.UNREADABLE, E.EVICT_DISK): S.DROPPED,
    **{(state, E.DROP): S.DROPPED for state in SegmentState if state is not S.DROPPED},
}
"""Every legal transition; any other pair raises and changes nothing."""


class Node:
    """Tokens `[start, end)` of every path through this node; a root is empty and starts a namespace.

    A node is *resident* while a sequence holds it, and *offloaded* while a segment covers it. It can be both.
    """

    __slots__ = (
        "checkpoint",
        "children",
        "end_of",
        "hits",
        "last_used",
        "n_pins",
        "n_resident_children",
        "namespace",
        "parent",
        "run",
        "segment",
        "start",
        "tenant",
    )

    def __init__(self, run: bytearray, parent: Node | None, start: int, namespace: str) -> None:
        self.run = run
        """The node's own tokens, packed."""
        self.parent = parent
        self.start = start
        """Tokens on the path above this node."""
        self.namespace = namespace
        self.tenant: str = parent.tenant if parent is not None else tenant_of(namespace)
        self.children: dict[bytes, Node] = {}
        """By their first token, packed."""
        self.end_of: set[int] = set()
        """Sequences whose path ends here."""
        self.n_resident_children = 0
        self.n_pins = 0
        """Running requests whose path goes through here: the reference count that protects from eviction."""
        self.segment: Segment | None = None
        """The segment that covers this node; a segment may cover several nodes in a row."""
        self.checkpoint: Checkpoint | None = None
        """The partial state after its last token, if there is a copy of it."""
        self.last_used = 0
        """Logical time of the last use, never earlier than that of a resident child. The least recently used node
        is evicted from the pool first.
        """
        self.hits = 0
        """Requests that reused this node."""

    @property
    def n_tokens(self) -> int:
        """Length of the run."""
        return len(self.run) // WIDTH

    @property
    def end(self) -> int:
        """Tokens on the path to the end of this node."""
        return self.start + len(self.run) // WIDTH

    @property
    def is_root(self) -> bool:
        """True for the start of a namespace."""
        return self.parent is None

    @property
    def is_idle_leaf(self) -> bool:
        """True if this node can be evicted: it is resident and not pinned, and no child is resident."""
        is_leaf = bool(self.end_of) and not self.n_resident_children
        return is_leaf and not self.n_pins and self.parent is not None

    @property
    def is_resident(self) -> bool:
        """True if the KV is in the pool: a sequence ends here or below."""
        return bool(self.end_of) or self.n_resident_children > 0

    @property
    def is_shared(self) -> bool:
        """True if several sequences hold this node, or if it is a root, which has no tokens."""
        return self.parent is None or len(self.end_of) + self.n_resident_children > 1

    def path_to_root(self) -> Iterator[Node]:
        """Yield this node and its ancestors except for the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def prefix(self) -> bytes:
        """All tokens from the root to the end of this node, packed."""
        return b"".join(reversed([bytes(node.run) for node in self.path_to_root()]))

    def text_from(self, at: int, n: int) -> bytes:
        """Return up to `n` tokens, packed, from the byte `at` of the run on; fewer only where the path ends.

        Where paths branch, the one that was used last is followed.
        """
        found, node = self.run[at : at + n * WIDTH], self
        while len(found) < n * WIDTH and node.children:
            node = max(node.children.values(), key=lambda each: each.last_used)
            found += node.run[: n * WIDTH]
        return bytes(found[: n * WIDTH])

    def subtree(self) -> Iterator[Node]:
        """Yield this node and all below it, parents first."""
        rest = [self]
        while rest:
            node = rest.pop()
            yield node
            rest += node.children.values()

    def check(self, pinned: Set[int]) -> None:
        """Verify the invariants of a node and its neighbours; `pinned` are the pinned sequences."""
        parent, children = self.parent, self.children.values()
        assert parent is not None
        assert parent.children[bytes(self.run[:WIDTH])] is self
        assert (self.start, self.namespace) == (parent.end, parent.namespace)
        assert self.n_tokens > 0
        assert self.children or self.end_of or self.segment, "a leaf without KV"
        (only,) = children if len(children) == 1 else (None,)
        is_one = only is not None and only.segment is self.segment
        assert not is_one or self.end_of or self.checkpoint, "a chain that could be one node"
        assert self.checkpoint is None or self.checkpoint.node is self
        assert self.n_resident_children == sum(child.is_resident for child in children)
        assert self.n_pins == sum(child.n_pins for child in children) + len(self.end_of & pinned)
        assert all(self.last_used >= child.last_used for child in children)

    def holders(self) -> Iterator[int]:
        """Yield the sequences that hold this node."""
        rest = [self]
        while rest:
            node = rest.pop()
            yield from sorted(node.end_of)
            rest += [child for child in node.children.values() if child.is_resident]


def walk(node: Node, tokens: bytes) -> Iterator[tuple[Node, int]]:
    """Yield the nodes below `node` that `tokens` lead to, and the position up to which each matches them."""
    at = 0
    while (child := node.children.get(tokens[at : at + WIDTH])) is not None:
        if not tokens.startswith(child.run, at):
            yield child, child.start + n_equal(child.run, tokens, at)
            return
        at += len(child.run)
        yield child, child.end
        node = child


def n_equal(run: bytearray, tokens: bytes, at: int) -> int:
    """Return the number of leading tokens that `run` shares with `tokens[at:]`, which share at least one."""
    n = min(len(run), len(tokens) - at) // WIDTH
    same = np.frombuffer(run, "<i4", n) == np.frombuffer(tokens, "<i4", n, at)
    return n if same.all() else int(same.argmin())


class SegmentRank(NamedTuple):
    """Place of a segment in the order of eviction: the lowest is evicted first."""

    last_used: int
    minus_start: int
    """Of segments used together, the one furthest from the root goes first."""
    number: int


class Segment:
    """KV of positions `[start, end)` of a path. Compared by identity."""

    __slots__ = (
        "end",
        "last_used",
        "n_bytes",
        "nodes",
        "number",
        "offloaded_at",
        "ram_put_before",
        "replaces",
        "retry_at",
        "source",
        "start",
        "state",
        "tenant",
    )

    is_checkpoint = False

    def __init__(
        self,
        number: int,
        start: int,
        end: int,
        n_bytes: int,
        *,
        tenant: str = "",
        now: float = 0.0,
        state: SegmentState = SegmentState.RAM,
    ) -> None:
        self.number = number
        """Names the segment to the backend and on disk."""
        self.start = start
        self.end = end
        self.n_bytes = n_bytes
        self.tenant = tenant
        """Tenant against whose share it counts."""
        self.state = state
        self.nodes: list[Node] = []
        """Nodes of the radix tree that it covers, parents first; empty once it is dropped."""
        self.last_used = 0
        """Logical time of the last use."""
        self.offloaded_at = now
        """Time at which it was created, in seconds."""
        self.ram_put_before = 0
        """Bytes ever put into its part of RAM up to its creation, including its own: tells what came after it."""
        self.source: Literal["", "disk", "remote"] = ""
        """Tier it was read or fetched from, if it was not loaded since: the first load counts for that tier."""
        self.retry_at = 0.0
        """Time at which an unreadable segment may be read again, in seconds."""
        self.replaces: list[int] = []
        """Numbers of the files on disk that it replaces once it is written itself."""

    def handle(self, event: SegmentEvent) -> SegmentState:
        """Go to the next state and return the previous one. An illegal event raises and changes nothing."""
        before = self.state
        self.state = next_state(SEGMENT_TABLE, before, event, f"segment {self.number}")
        return before

    @property
    def n_tokens(self) -> int:
        """Number of tokens whose KV it has."""
        return self.end - self.start

    @property
    def rank(self) -> SegmentRank:
        """Its place in the order of eviction."""
        return SegmentRank(self.last_used, -self.start, self.number)

    @property
    def parent(self) -> Segment | None:
        """The segment that has the token before its first one."""
        above = self.nodes[0].parent
        return above.segment if above is not None else None

    @property
    def children(self) -> list[Segment]:
        """Segments whose first token follows one of its tokens, and checkpoints after one of its tokens."""
        below = [child.segment for node in self.nodes for child in node.children.values()]
        below += [node.checkpoint for node in self.nodes]
        return list(dict.fromkeys(each for each in below if each is not None and each is not self))

    @property
    def path_from_root(self) -> list[Segment]:
        """All segments on its path, from the root to itself."""
        above = [node.segment for node in self.nodes[-1].path_to_root() if node.segment is not None]
        return list(dict.fromkeys(reversed(above)))

    @property
    def is_end_of_path(self) -> bool:
        """True if no other segment continues it."""
        rest = list(self.nodes)
        while rest:
            node = rest.pop()
            if node.segment is not None and node.segment is not self:
                return False
            rest += [child for child in node.children.values() if child.segment is not self]
        return True

    def is_partial(self, max_tokens: int) -> bool:
        """True if it is not full and ends its path, so that a longer segment replaces it when the path grows."""
        return self.n_tokens < max_tokens and self.is_end_of_path

    @property
    def namespace(self) -> str:
        """The namespace of its tokens."""
        return self.nodes[0].namespace

    @property
    def is_public(self) -> bool:
        """True if it belongs to the public namespace."""
        return self.tenant == PUBLIC_TENANT

    @property
    def prefix(self) -> bytes:
        """All tokens from the root to its end, packed."""
        return self.nodes[-1].prefix()


class Checkpoint(Segment):
    """The partial state after the last token of a node. A sequence that gets it can be continued from there.

    It does not include the KV of the tokens before it, which is in cells or segments.
    """

    __slots__ = ("ends_images", "ends_message", "precedes_reply")

    is_checkpoint = True

    def __init__(
        self, number: int, node: Node, n_bytes: int, *, now: float = 0.0, state: SegmentState = SegmentState.RAM
    ) -> None:
        super().__init__(number, node.end, node.end, n_bytes, tenant=node.tenant, now=now, state=state)
        self.nodes = [node]
        self.ends_images = False
        """True if it was taken after the last image of a prompt: others may ask something else about it."""
        self.ends_message = False
        """True if it was taken at the end of a message, such as the system prompt."""
        self.precedes_reply = False
        """True if a prompt ends a few tokens after it, so that the same prompt, sent again, continues from it."""

    @property
    def node(self) -> Node:
        """The node that ends at its position. Must not be used once the checkpoint is dropped."""
        return self.nodes[0]

    @property
    def parent(self) -> Segment | None:
        """The segment that has the token before its position."""
        return self.node.segment

    @property
    def children(self) -> list[Segment]:
        """Always empty, since it has no tokens."""
        return []

    @property
    def path_from_root(self) -> list[Segment]:
        """All segments on its path, then itself."""
        return [*(self.node.segment.path_from_root if self.node.segment is not None else ()), self]

    def is_partial(self, max_tokens: int) -> bool:
        """True if it is no fork, so that a deeper checkpoint may soon make it useless."""
        return not self.is_fork

    @property
    def is_fork(self) -> bool:
        """True if several paths continue from here."""
        return len(self.node.children) + len(self.node.end_of) > 1

    @property
    def ends_first_message(self) -> bool:
        """True if it is the first on its path that ends a message: other conversations may begin with that."""
        return self.ends_message and not any(each.ends_message for each in checkpoints_on(self.node)[1:])

    @property
    def is_deepest(self) -> bool:
        """True if no checkpoint is below it."""
        return next(self._below(), None) is None

    @property
    def is_worth_storing(self) -> bool:
        """True if it is written to disk and uploaded, because other prompts are likely to continue from it.

        That holds for forks, the deepest of a path, the one after the last image, the one at the end of the first
        message, and the one before the last reply, from which the last prompt continues if it is sent again.
        """
        if self.is_fork or self.is_deepest or self.ends_first_message:
            return True
        if self.ends_images and not any(each.ends_images for each in self._below()):
            return True
        return self.precedes_reply and not any(each.precedes_reply for each in self._below())

    def _below(self) -> Iterator[Checkpoint]:
        """Yield the checkpoints below it, on all paths."""
        found = (node.checkpoint for node in self.node.subtree() if node is not self.node)
        return (each for each in found if each is not None)


def checkpoints_on(node: Node) -> list[Checkpoint]:
    """Return the checkpoints on the path to a node, the deepest first."""
    return [each.checkpoint for each in node.path_to_root() if each.checkpoint is not None]
