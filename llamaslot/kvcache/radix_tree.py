"""Radix tree over every token whose KV exists: in cells, held by sequences, or outside the pool, in a segment.

A sequence holds a path: all tokens from the root down to its *end node*. So the holders of a node are the sequences
that end in its subtree, and a split moves no holder. A node that no sequence holds stays as long as a segment
covers it; a leaf without either is removed at once.

    sequence 0 holds 7 tokens, sequence 1 the first 4 of them and 2 others; two more tokens are in a segment only:

        root
          |
        [a b c d]              held by 0 and 1
         /      \
      [e f g]   [x y]          0 ends in the left node, 1 in the right one
        |
      [h i]                    offloaded only

Segments cannot be cut, so when a node is split, both halves belong to the same segment. Nothing here knows
llama.cpp, time or requests; `now` is a logical clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import count, islice, pairwise

from llamaslot.base.tokens import WIDTH, n_common, unpacked
from llamaslot.kvcache.eviction import EvictionQueue
from llamaslot.kvcache.match import Match, segment_parts
from llamaslot.kvcache.nodes import Checkpoint, Node, Segment, n_equal, walk

_MAX_SEARCHED = 2**18
"""Tokens after which `search` goes no further: it delays a step by about 0.2 ms."""
_NODE_COST = 2048
"""Tokens that are searched in the time that a node takes besides, or an occurrence that is of no use."""
_CHILD_COST = 64
"""The same for each child of a node: there may be thousands behind a system prompt."""
_MAX_CHILDREN = 1024
"""Most children of a node that are searched, the newest ones."""


class RadixTree:
    """Paths of all namespaces. Sequence ids are integers from 0 on."""

    def __init__(self) -> None:
        self._roots: dict[str, Node] = {}
        self._ends: dict[int, Node] = {}
        self._pinned: set[int] = set()
        self.eviction = EvictionQueue()
        self.n_tokens = 0
        """Tokens of resident nodes, which is the number of cells without duplicates."""
        self.n_tokens_of: Counter[str] = Counter()
        """The same for each tenant."""
        self.n_pinned_tokens = 0
        """Of `n_tokens`, those that running requests hold."""
        self.version = 0
        """Changes whenever a lookup might have another result, also for reasons outside of the tree."""
        self.lost_checkpoints: list[Checkpoint] = []
        """Checkpoints whose nodes were removed and that are still to be dropped (`SegmentTiers.drop_lost`)."""

    @property
    def n_idle_tokens(self) -> int:
        """Resident tokens that no running request holds."""
        return self.n_tokens - self.n_pinned_tokens

    # --- lookups; they change nothing ---

    def match(self, namespace: str, tokens: bytes) -> Match:
        """Return the longest cached prefix of `tokens` in a namespace."""
        node = resident = self._roots.get(namespace) or Node(bytearray(), None, 0, namespace)
        at = resident_until = 0  # in bytes
        # The same loop as in `walk`, without a generator, for speed: a prompt's path can have hundreds of nodes.
        while (child := node.children.get(tokens[at : at + WIDTH])) is not None:
            node, run = child, child.run
            is_whole = tokens.startswith(run, at)
            at += len(run) if is_whole else n_equal(run, tokens, at) * WIDTH
            if node.end_of or node.n_resident_children:
                resident, resident_until = node, at
            if not is_whole:
                break
        n_resident, n_matched = resident_until // WIDTH, at // WIDTH
        parts = segment_parts(node, n_resident, n_matched)
        return Match(namespace, tokens, resident, n_resident, node, n_matched, parts, n_resident, self.version)

    def end_node(self, seq: int) -> Node | None:
        """Return the node where the path of a sequence ends; None if the sequence is not in use."""
        return self._ends.get(seq)

    def length(self, seq: int) -> int:
        """Number of tokens that a sequence holds."""
        node = self._ends.get(seq)
        return node.end if node is not None else 0

    def continuation(self, seq: int, token: bytes, n: int) -> bytes:
        """Return up to `n` tokens that follow the path of a sequence and one token more; empty if none are known.

        Where paths branch, the one that was used last is followed.
        """
        end = self._ends.get(seq)
        node = end.children.get(token) if end is not None else None
        return node.text_from(WIDTH, n) if node is not None else b""

    def search(self, namespace: str, last: bytes, n_least: int, n: int) -> tuple[int, bytes]:
        """Return how many of the `last` tokens of a text occur in a namespace, and up to `n` that follow there.

        (0, b"") if fewer than `n_least` of them occur. Nodes that were used last are searched first, until one has
        the tokens or `_MAX_SEARCHED` tokens were searched.
        """
        wanted = last[-n_least * WIDTH :]
        root = self._roots.get(namespace)
        order = count()
        # Nodes that are still to be searched, after their parents; `order` decides between equal times of use. Each
        # has the end of the text before it, in which an occurrence may begin.
        rest = [(0, next(order), root, b"")] if root is not None else []
        n_left = _MAX_SEARCHED
        while rest and n_left > 0:
            _, _, node, before = heappop(rest)
            text = before + node.run
            at = len(text)
            # Bytes of other tokens may be the same at other places: 256 and 65536, each many times in a row.
            while n_left > 0 and (at := text.rfind(wanted, 0, at)) >= 0:
                n_left -= _NODE_COST
                end = at + len(wanted)
                # Bytes may also be equal between two tokens. An occurrence that ends in `before` was found already,
                # in a parent. One that ends the text of a leaf is followed by nothing.
                if at % WIDTH == 0 and (follows := node.text_from(end - len(before), n)):
                    return n_common(unpacked(text[:end])[::-1], unpacked(last)[::-1]), follows
                at = end - 1
            n_left -= _NODE_COST + node.n_tokens + _CHILD_COST * min(len(node.children), _MAX_CHILDREN)
            before = text[-len(last) :]
            for child in islice(reversed(node.children.values()), _MAX_CHILDREN):
                heappush(rest, (-child.last_used, next(order), child, before))
        return 0, b""

    def is_pinned(self, seq: int) -> bool:
        """True while a request runs in the sequence."""
        return seq in self._pinned

    def roots(self) -> Iterable[Node]:
        """Return the root of each namespace."""
        return self._roots.values()

    def nodes(self, namespace: str | None = None) -> Iterator[Node]:
        """Yield every node of a namespace (None for all) except for roots, parents first."""
        roots = self._roots.values() if namespace is None else filter(None, [self._roots.get(namespace)])
        for root in reversed([*roots]):
            yield from (node for node in root.subtree() if node is not root)

    # --- sequences ---

    def hold(self, seq: int, namespace: str, node: Node | None = None, n: int = 0) -> None:
        """Give an unused sequence the first `n` tokens of the path to `node`; an empty path without a node."""
        if seq in self._ends:
            raise AssertionError(f"sequence {seq} is in use")
        root = self._roots.setdefault(namespace, Node(bytearray(), None, 0, namespace))
        end = self._split(node, n) if node is not None and n else root
        self._end_in(seq, end, root)

    def extend(self, seq: int, tokens: bytes) -> int:
        """Append tokens to the path of a sequence; returns how many of them other sequences hold already.

        Nodes that only segments cover become resident.
        """
        self.version += 1
        end = self._ends[seq]
        n_held = 0
        for node, at in walk(end, tokens):
            end = self._split(node, at)
            n_held = at if end.is_resident else n_held
        n_held = max(n_held - self._ends[seq].end, 0)
        rest = tokens[(end.end - self._ends[seq].end) * WIDTH :]
        is_own = not end.is_root and not end.children and end.end_of == {seq}
        if rest and is_own and end.segment is None and end.checkpoint is None:
            end.run += rest
            self.n_tokens += len(rest) // WIDTH
            self.n_tokens_of[end.tenant] += len(rest) // WIDTH
            self.n_pinned_tokens += len(rest) // WIDTH * bool(end.n_pins)
            return n_held
        if rest:
            child = Node(bytearray(rest), end, end.end, end.namespace)
            end.children[rest[:WIDTH]] = child
            end = child
        if end is not self._ends[seq]:
            start = self._ends[seq]
            self._end_in(seq, end, start)
            start.end_of.discard(seq)
            self._join(start)
        return n_held

    def truncate(self, seq: int, keep: int) -> None:
        """Truncate the path of a sequence to its first `keep` tokens."""
        old = self._ends[seq]
        if keep >= old.end:
            return
        node = old
        while node.parent is not None and keep <= node.start:
            node = node.parent
        new = self._split(node, keep)
        new.end_of.add(seq)
        self._ends[seq] = new
        self._shorten(seq, old, new)

    def release(self, seq: int) -> None:
        """Take a sequence id out of use; what only this sequence held is no longer resident."""
        end = self._ends.pop(seq)
        self._shorten(seq, end, None)
        self._pinned.discard(seq)

    def pin(self, seq: int) -> None:
        """Protect the path of a sequence from eviction while a request runs in it."""
        if seq in self._pinned:
            raise AssertionError(f"sequence {seq} is pinned already")
        # Lookups are stale: the sequence, and its state, can no longer be given to another request.
        self.version += 1
        self._pinned.add(seq)
        self._count_pins(self._ends[seq], None, +1)

    def unpin(self, seq: int, now: int) -> None:
        """Allow the eviction of a sequence's path again; it was used at `now`."""
        self.version += 1
        self._pinned.remove(seq)
        end = self._ends[seq]
        self._count_pins(end, None, -1)
        self.touch(end, now)

    def touch(self, node: Node, now: int, hits: int = 0) -> None:
        """Record that `hits` requests use the path to a node at `now`."""
        for each in node.path_to_root():
            each.last_used = now
            each.hits += hits
        self.eviction.offer(node)

    # --- segments ---

    def insert(self, namespace: str, tokens: bytes) -> Node:
        """Return the node that ends where `tokens` do; if it is new, the caller must attach a segment at once."""
        root = self._roots.setdefault(namespace, Node(bytearray(), None, 0, namespace))
        node = root
        for each, end in walk(root, tokens):
            node = self._split(each, end)
        if node.end < len(tokens) // WIDTH:
            child = Node(bytearray(tokens[node.end * WIDTH :]), node, node.end, namespace)
            node.children[bytes(child.run[:WIDTH])] = child
            node = child
        return node

    def attach(self, segment: Segment, node: Node) -> list[Segment]:
        """Make a segment cover its range of the path to `node`; returns the segments that it replaces."""
        while node.parent is not None and segment.end <= node.start:
            node = node.parent
        covered = [each for each in node.path_to_root() if each.end > segment.start and each.segment is not None]
        replaced = list(dict.fromkeys(each.segment for each in reversed(covered) if each.segment is not None))
        for old in replaced:
            if not (segment.start <= old.start and old.end <= segment.end and old.nodes[-1] in covered):
                raise AssertionError(f"[{segment.start}, {segment.end}) has a part of [{old.start}, {old.end})")
        for old in replaced:
            old.nodes = []
        self.version += 1
        node = self._split(node, segment.end)
        nodes = [node]
        while nodes[-1].start > segment.start:
            assert nodes[-1].parent is not None
            nodes.append(nodes[-1].parent)
        if nodes[-1].start < segment.start:
            self._split(nodes[-1], segment.start)
        segment.nodes = nodes[::-1]
        for each in nodes:
            each.segment = segment
        for each in nodes:
            self._join(each)
        return replaced

    def detach(self, segment: Segment) -> None:
        """Remove a segment from the nodes that it covers."""
        self.version += 1
        nodes, segment.nodes = segment.nodes, []
        if segment.is_checkpoint:
            (node,) = nodes
            node.checkpoint = None
            if node.parent is not None:
                self._join(node)
            return
        for node in nodes:
            node.segment = None
        if not nodes:
            return
        above = nodes[0].parent
        self._prune(nodes[-1])
        for each in (above, *nodes[:-1]):
            if each is not None and each.parent is not None:
                self._join(each)

    # --- invariants ---

    def check(self) -> set[Segment]:
        """Verify all invariants, in time proportional to the tree; raises `AssertionError`.

        Returns all segments and checkpoints.
        """
        n_tokens, n_pinned = Counter[str](), 0
        covered: dict[Segment, list[Node]] = {}
        nodes = list(self.nodes())
        for node in nodes:
            node.check(self._pinned)
            assert not node.is_idle_leaf or node in self.eviction, "a leaf that cannot be evicted"
            n_tokens[node.tenant] += node.n_tokens * node.is_resident
            n_pinned += node.n_tokens * bool(node.n_pins)
            if node.segment is not None:
                covered.setdefault(node.segment, []).append(node)
        assert (n_tokens, n_pinned) == (self.n_tokens_of, self.n_pinned_tokens)
        assert n_tokens.total() == self.n_tokens
        assert self._pinned <= self._ends.keys()
        assert all(seq in node.end_of for seq, node in self._ends.items())
        roots = self._roots.values()
        assert sum(len(node.end_of) for node in (*nodes, *roots)) == len(self._ends)
        assert all(root.children or root.end_of for root in roots), "a namespace without KV"
        for segment, covering in covered.items():
            assert covering == segment.nodes
            assert (covering[0].start, covering[-1].end) == (segment.start, segment.end)
            assert all(b.parent is a for a, b in pairwise(covering)), "a segment that branches"
        return {*covered, *(node.checkpoint for node in nodes if node.checkpoint is not None)}

    # --- inside ---

    def _split(self, node: Node, n: int) -> Node:
        """Split a node at position `n` and return the new upper half; `node` becomes the lower half."""
        if n == node.end:
            return node
        if node.parent is None or not node.start < n < node.end:
            raise AssertionError(f"{n} is not within [{node.start}, {node.end}]")
        self.version += 1
        at = (n - node.start) * WIDTH
        upper = Node(node.run[:at], node.parent, node.start, node.namespace)
        upper.n_resident_children, upper.n_pins = int(node.is_resident), node.n_pins
        upper.last_used, upper.hits, upper.segment = node.last_used, node.hits, node.segment
        node.parent.children[bytes(upper.run[:WIDTH])] = upper
        del node.run[:at]
        node.start, node.parent = n, upper
        upper.children[bytes(node.run[:WIDTH])] = node
        if node.segment is not None:
            node.segment.nodes.insert(node.segment.nodes.index(node), upper)
        return upper

    def _end_in(self, seq: int, node: Node, above: Node) -> None:
        """Move the end of a sequence from `above` down to its descendant `node`, or set its first end."""
        self.version += 1
        was_resident = node.is_resident
        self._ends[seq] = node
        node.end_of.add(seq)
        child = node
        while child.parent is not None and not was_resident:
            self.n_tokens += child.n_tokens
            self.n_tokens_of[child.tenant] += child.n_tokens
            was_resident = child.parent.is_resident
            child.parent.n_resident_children += 1
            child = child.parent
        if seq in self._pinned:
            self._count_pins(node, above, +1)
        self.eviction.offer(node)

    def _shorten(self, seq: int, old: Node, new: Node | None) -> None:
        """Move the end of a sequence up from `old` to its ancestor `new`; None removes it."""
        self.version += 1
        if seq in self._pinned:
            self._count_pins(old, new, -1)
        old.end_of.discard(seq)
        node = old
        while node.parent is not None and not node.is_resident:
            self.n_tokens -= node.n_tokens
            self.n_tokens_of[node.tenant] -= node.n_tokens
            node.parent.n_resident_children -= 1
            node = node.parent
        self._prune(old)
        self.eviction.offer(node)

    def _count_pins(self, node: Node, above: Node | None, by: int) -> None:
        """Add `by` to the pins of a node and its ancestors below `above` (None for all but the root)."""
        n_changed = 0  # bytes of the tokens whose pinned state changed
        while node is not above and node.parent is not None:
            n_before = node.n_pins
            node.n_pins = n_after = n_before + by
            if n_after < 0:
                raise AssertionError(f"[{node.start}, {node.end}) was not pinned")
            if not (n_before and n_after):
                n_changed += len(node.run)
            node = node.parent
        self.n_pinned_tokens += n_changed // WIDTH * by

    def _prune(self, node: Node) -> None:
        """Remove a node and its ancestors as far as they have no KV; join what nothing separates any more."""
        while node.parent is not None and not node.children and not node.end_of and node.segment is None:
            parent = node.parent
            del parent.children[bytes(node.run[:WIDTH])]
            node.parent, node.last_used = None, -1
            if node.checkpoint is not None:
                self.lost_checkpoints.append(node.checkpoint)
            node = parent
        if node.parent is not None:
            self._join(node)
        elif not node.children and not node.end_of:
            self._roots.pop(node.namespace, None)

    def _join(self, node: Node) -> None:
        """Join a node with its only child, unless the end of a sequence, a segment or a checkpoint separates them.

        The child remains, because sequences refer to it as their end node.
        """
        self.eviction.offer(node)
        if node.parent is None or node.end_of or node.checkpoint is not None or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if child.segment is not node.segment:
            return
        self.version += 1
        node.parent.children[bytes(node.run[:WIDTH])] = child
        child.run[:0] = node.run
        child.start, child.parent = node.start, node.parent
        child.hits = max(child.hits, node.hits)
        child.last_used = max(child.last_used, node.last_used)
        if node.segment is not None:
            node.segment.nodes.remove(node)
        node.parent, node.last_used = None, -1
        self.eviction.offer(child)
