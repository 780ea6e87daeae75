"""A node of the radix tree."""

from __future__ import annotations

from collections.abc import Iterator

from llamaslot.base.tokens import WIDTH


class Node:
    """A run of tokens that all its holders share, and what branches off behind it; a root has neither."""

    __slots__ = ("children", "hits", "last_used", "n_pins", "parent", "run", "space", "start", "tips")

    def __init__(self, run: bytearray, parent: Node | None, start: int, space: str) -> None:
        self.run = run
        self.parent = parent
        self.start = start
        """Tokens in front of this run."""
        self.space = space
        """The namespace."""
        self.children: dict[bytes, Node] = {}
        """By the first token."""
        self.tips: set[int] = set()
        """Sequences whose path ends here."""
        self.n_pins = 0
        """Pinned sequences whose path goes through here or ends here: the reference count."""
        self.last_used = 0
        self.hits = 0

    @property
    def n_tokens(self) -> int:
        """Tokens of the run."""
        return len(self.run) // WIDTH

    @property
    def end(self) -> int:
        """Tokens from the root to the end of this run."""
        return self.start + self.n_tokens

    @property
    def is_root(self) -> bool:
        """Whether this is the start of a namespace."""
        return self.parent is None

    @property
    def is_idle_leaf(self) -> bool:
        """Whether nothing branches off behind it and no request runs on it."""
        return self.parent is not None and not self.children and not self.n_pins

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def prefix(self) -> bytes:
        """All tokens from the root to the end of this run."""
        return b"".join(reversed([bytes(node.run) for node in self.path()]))
