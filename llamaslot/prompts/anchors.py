"""Which tokens a text came from, for texts that would not give them when tokenized again.

A conversation comes back as text. What was generated need not be what the vocabulary's own rules make of it, so the
token match would end at the reply and all behind it be computed again. An *anchor* names the text of a prompt and
its reply (`prompts/cuts.py`), and holds their tokens. It continues an earlier one where its prompt did, so that
each token of a conversation is kept once.

Anchors never decide anything about KV: whether the tokens that they give are in a tier is the tree's to say. They
belong to one thread, once the server serves; others may ask how many there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from llamaslot.base.tokens import WIDTH, Tokens, packed, unpacked

MOST_BYTES = 32 * 2**20
"""About what all anchors may take, in memory and again on disk."""
OVERHEAD = 200
"""Bytes that an anchor takes about, beside its tokens."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A name, and the tokens of the text that it names."""

    name: bytes
    front: bytes
    """The name of the anchor that it continues; empty for none."""
    start: int
    """Tokens of that one."""
    tokens: bytes
    """Its own, packed."""

    @property
    def end(self) -> int:
        """Tokens in all."""
        return self.start + len(self.tokens) // WIDTH

    @property
    def n_bytes(self) -> int:
        """About what it takes of memory."""
        return len(self.tokens) + OVERHEAD


class Anchors:
    """The anchors of all namespaces, at most `most_bytes` of them: the least recently used goes first."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._anchors: OrderedDict[bytes, Anchor] = OrderedDict()
        """By last use; none is used before what it continues, so that this never goes first."""
        self.n_bytes = 0

    def __len__(self) -> int:
        """Number of anchors."""
        return len(self._anchors)

    def __contains__(self, name: bytes) -> bool:
        """Whether there is one of that name."""
        return name in self._anchors

    def find(self, name: bytes) -> Tokens | None:
        """The tokens of a text, int32; None where it is not known."""
        chain = list(self._chain(name))
        if not chain:
            return None
        for anchor in chain:
            self._anchors.move_to_end(anchor.name)
        return unpacked(b"".join(anchor.tokens for anchor in reversed(chain)))

    def add(self, name: bytes, tokens: Tokens, front: bytes) -> Anchor | None:
        """Let a name stand for tokens; those that an anchor called `front` has, if they begin with it, are its own.

        None where the name stands for something already, where nothing is left of the tokens, or where the anchor
        and those that it continues are too large.
        """
        run = packed(tokens)
        begun = b"".join(anchor.tokens for anchor in reversed(list(self._chain(front))))
        # Meanwhile the name may have been forgotten, and given to other tokens.
        if not begun or not run.startswith(begun):
            front, begun = b"", b""
        anchor = Anchor(name, front, len(begun) // WIDTH, run[len(begun) :])
        return anchor if self.put(anchor) else None

    def put(self, anchor: Anchor) -> bool:
        """Add an anchor; whether that could be done: what it continues must be there, and it must not."""
        front = self._anchors.get(anchor.front)
        if anchor.name in self._anchors or anchor.start != (front.end if front is not None else 0):
            return False
        n_bytes = anchor.n_bytes + sum(each.n_bytes for each in self._chain(anchor.front))
        if not anchor.tokens or n_bytes > self._most_bytes:
            return False
        self._anchors[anchor.name] = anchor
        self.n_bytes += anchor.n_bytes
        for each in self._chain(anchor.name):
            self._anchors.move_to_end(each.name)
        while self.n_bytes > self._most_bytes:
            _, gone = self._anchors.popitem(last=False)
            self.n_bytes -= gone.n_bytes
        return True

    def clear(self) -> None:
        """Forget all."""
        self._anchors.clear()
        self.n_bytes = 0

    def _chain(self, name: bytes) -> Iterator[Anchor]:
        """An anchor and those that it continues."""
        anchor = self._anchors.get(name)
        while anchor is not None:
            yield anchor
            anchor = self._anchors.get(anchor.front)
