"""Node of the radix tree: a run of tokens, and where its KV is."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import TYPE_CHECKING

import numpy as np

from llamaslot.base.namespaces import tenant_of
from llamaslot.base.tokens import WIDTH

if TYPE_CHECKING:
    from llamaslot.kvcache.segment import Checkpoint, Segment


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
