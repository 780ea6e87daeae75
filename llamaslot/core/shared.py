"""The ledger of a pool in which sequences share cells, and what leaves it is stored.

Ids: the slots' first, then the reserved ones, which keep idle prefixes alive. Some id behind the slots is always
free, to move a path by. The last id of all is for scratch: whatever is saved, loaded or moved goes through it.

A token that several sequences hold occupies one cell. What two sequences computed side by side is a *double* until
`settle` lets the second take the cells of the first. What leaves the cells is stored first, each token once
(`core/segments.py`), and loaded again when a request wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llamaslot.core.backend import Copy, Discard, Load, Operation, Save, Tokens
from llamaslot.core.cells import CellMap
from llamaslot.core.doubles import Doubles
from llamaslot.core.eviction import Eviction
from llamaslot.core.ledger import Ledger
from llamaslot.core.node import WIDTH, Node, packed
from llamaslot.core.segments import SegmentTree, Stored
from llamaslot.core.tree import Match


class SharedLedger(Ledger):
    """See `Ledger`. A tail shorter than `min_shared` tokens is the first to go when ids are short.

    `n_seqs` counts the one for scratch; there is none where all are slots', and then nothing is stored or moved.
    `load_cost` is the time to load a token over the time to compute it.
    """

    def __init__(
        self,
        *,
        n_slots: int,
        n_seqs: int,
        n_cells: int,
        min_shared: int,
        segments: SegmentTree,
        load_cost: float = 0.0,
    ) -> None:
        super().__init__(n_slots=n_slots, n_seqs=max(n_slots, n_seqs - 1), n_cells=n_cells)
        self.scratch = n_seqs - 1 if n_seqs > n_slots else None
        """A sequence that holds nothing before and after each operation."""
        self.cells = CellMap(n_cells, n_seqs)
        """Where the tokens lie."""
        self.segments = segments
        """What is stored."""
        self._min_shared = min_shared
        self._load_cost = load_cost
        self._doubles = Doubles(self.tree)
        self._stored_at = 0
        self._n_stored = 0
        """Tokens stored ahead of need since then: this ends where RAM holds less than the pool."""

    # --- reading ---

    def known(self, space: str, tokens: bytes) -> int:
        """See `Ledger.known`: what is in the pool, and what is stored behind it."""
        n = self.tree.match(space, tokens).n
        stored = self._worth_loading(space, tokens, n)
        return stored[-1].end if stored else n

    def _worth_loading(self, space: str, tokens: bytes, start: int) -> list[Stored]:
        """What is stored from `start` on, but for a last segment of which too little is wanted: it is loaded whole.

        Nothing, if all of it together takes longer to load than to compute.
        """
        stored = self.segments.stored(space, tokens, start)
        if stored and not self._pays(stored[-1:]):
            stored.pop()
        return stored if self._pays(stored) else []

    def _pays(self, stored: Sequence[Stored]) -> bool:
        n_wanted = sum(each.end - each.start for each in stored)
        return n_wanted > self._load_cost * sum(each.segment.n_tokens for each in stored)

    @property
    def n_used(self) -> int:
        """See `Ledger.n_used`."""
        return self.tree.n_tokens + self._doubles.n_cells

    # --- running requests ---

    def claim(self, choices: Sequence[int], space: str, tokens: bytes) -> tuple[int, int]:
        """See `Ledger.claim`: it holds the longest prefix that is in the pool. Of the slots, it is

        1. one whose whole path lies on the match, the longest (an empty slot holds 0 tokens), else
        2. one whose path others cover: nothing is lost with it, else
        3. the one that holds most of the match, least recently used first; another id gets what it holds.
        """
        match = self.tree.match(space, tokens)
        held = self.tree.shared(match, choices)
        seq = self._choose(choices, held)
        own = held[seq]
        if own < self.length(seq) and not self.tree.is_covered(seq):
            self._park(seq, own)
        self.truncate(seq, own)
        if not own:
            self.tree.hold(seq, self.tree.match(space, b""))
        self.tree.pin(seq)
        n = own + self._take_over(seq, tokens)
        self.touch(self.tree.match(space, tokens[: n * WIDTH]), hits=1)
        self.segments.touch(space, tokens)
        self._keep_an_id_free()
        return seq, n

    def _choose(self, choices: Sequence[int], held: dict[int, int]) -> int:
        whole = [seq for seq in choices if held[seq] == self.length(seq)]
        if whole:
            return max(whole, key=lambda seq: (held[seq], -seq))
        covered = [seq for seq in choices if self.tree.is_covered(seq)]
        return max(covered or choices, key=lambda seq: (held[seq], -self._last_used(seq)))

    def _take_over(self, seq: int, tokens: bytes) -> int:
        """Let a sequence see the cells of whatever others hold of `tokens` behind its own; how many."""
        start = self.length(seq)
        match = self.tree.match(self._tip(seq).space, tokens)
        if match.n <= start:
            return 0
        source = next(self.tree.holders(match.node))
        self._operations.append(Copy(source, seq, start, match.n))
        self.tree.extend(seq, tokens[start * WIDTH : match.n * WIDTH])
        self.counts.n_copied_tokens += match.n - start
        return match.n - start

    def fetch(self, seq: int, tokens: bytes, most: int | None = None) -> bool:
        """See `Ledger.fetch`: first what others hold by now, then what is stored."""
        if self._take_over(seq, tokens):
            self._release_covered()
        start = n = self.length(seq)
        for each in self._worth_loading(self._tip(seq).space, tokens, n):
            if most is not None and n - start >= most:
                return True
            if not self._make_room(each.segment.n_tokens) or each.segment.is_gone:
                break
            self._operations.append(Load(each.segment.id, seq, n, each.end, self._scratch))
            self.tree.extend(seq, tokens[n * WIDTH : each.end * WIDTH])
            self.counts.n_loaded_tokens += each.end - n
            n = each.end
        return False

    def _make_room(self, n_cells: int) -> bool:
        if self.n_free < n_cells <= self.n_free + self.n_idle:
            self.evict(n_cells - self.n_free)
        return self.n_free >= n_cells

    def append(self, seq: int, tokens: Tokens) -> None:
        """See `Ledger.append`."""
        start = self.length(seq)
        n_known = self.tree.extend(seq, packed(tokens))
        self.cells.decode([(seq, len(tokens))])
        if n_known:
            self._doubles.note(seq, start, start + n_known)

    # --- making room ---

    def settle(self) -> None:
        """Let doubles take the cells that the tree counts, and free reserved ids whose paths others cover."""
        self._operations += self._doubles.settle()
        self._release_covered()

    def _release_covered(self) -> None:
        for seq in self._reserved:
            if self.holds(seq) and self.tree.is_covered(seq):
                self.clear(seq)

    def is_in_the_way(self, n_prefill: int, life: int) -> bool:
        """See `Ledger.is_in_the_way`."""
        return self.tree.plan_eviction(1, self._used_before(n_prefill, life)).n_cells > 0

    def make_way(self, n_prefill: int, life: int, most: int | None) -> None:
        """See `Ledger.make_way`."""
        n_cells = self.n_idle if most is None else most
        self._carry_out(self.tree.plan_eviction(n_cells, self._used_before(n_prefill, life)))

    def _used_before(self, n_prefill: int, life: int) -> int:
        """The clock runs by computed prompt tokens; what was used last of all is never in the way."""
        return self.clock + min(n_prefill - life, 0)

    def store_idle(self, most: int) -> None:
        """See `Ledger.store_idle`."""
        if self._stored_at != self.clock:
            self._stored_at, self._n_stored = self.clock, 0
        if self._n_stored >= self.n_idle:
            return
        for node in self.tree.nodes():
            n = self._store(node, node.start, most) if not node.n_pins else 0
            self._n_stored += n
            most -= n
            if most <= 0:
                return
        self._n_stored = self.n_idle

    def clear_idle(self) -> int:
        """See `Ledger.clear_idle`; nothing is stored any more either."""
        self.segments.clear()
        self._note_discarded()
        return super().clear_idle()

    def forget(self, space: str) -> None:
        """See `Ledger.forget`; nothing of it is stored any more either."""
        self.segments.forget(space)
        self._note_discarded()
        super().forget(space)

    def take_operations(self) -> list[Operation]:
        """See `Ledger.take_operations`."""
        operations = super().take_operations()
        for operation in operations:
            self.cells.follow(operation)
        return operations

    def check(self, range_of: Callable[[int], range]) -> None:
        """See `Ledger.check`."""
        super().check(range_of)
        for seq in self._ids:
            assert self.cells.held(seq) == range(self.length(seq)), f"cells of {seq}"
        assert self.scratch is None or range_of(self.scratch) == range(0)
        assert 0 <= self.n_used <= self._n_cells
        assert self.cells.n_used == self.n_used
        self._doubles.check()
        self.segments.check()

    # --- inside ---

    def _tip(self, seq: int) -> Node:
        tip = self.tree.tip(seq)
        assert tip is not None
        return tip

    @property
    def _scratch(self) -> int:
        assert self.scratch is not None
        return self.scratch

    def _carry_out(self, plan: Eviction) -> int:
        for node, start in plan.cuts:
            self._leave(node, start)
        for seq, keep in plan.keeps.items():
            self._cut(seq, keep)
        self.tree.evict(plan)
        return plan.n_cells

    def _leave(self, node: Node, start: int) -> None:
        """Store the tokens of a node from `start` on, which nobody will hold any more, unless RAM is too small."""
        n_lost = n = node.end - start
        if self.segments.capacity:
            self._store(node, start)
            n_lost = sum(end - max(first, start) for first, end in self._missing(node, start))
        self.counts.n_lost_tokens += n_lost
        self.counts.n_stored_tokens += n - n_lost

    def _missing(self, node: Node, start: int) -> list[tuple[int, int]]:
        """The ranges of a node that are stored nowhere and reach beyond `start`.

        They are cut from the start of the node, so that they stay the same when its end is given up bit by bit.
        """
        ranges = self.segments.missing(node.space, node.prefix(), node.start)
        return [(first, end) for first, end in ranges if end > start]

    def _store(self, node: Node, start: int, most: int | None = None) -> int:
        """Store what is missing of a node, unless RAM is too small for the whole path to its end; about how many
        tokens.
        """
        n_stored = 0
        ranges = self._missing(node, start) if self.segments.capacity else []
        tokens = node.prefix()
        if not ranges or not self.segments.fits(node.space, tokens, self.segments.missing(node.space, tokens, 0)):
            return 0
        source = next(self.tree.holders(node))
        for first, end in ranges:
            if most is not None and n_stored >= most:
                break
            segment = self.segments.add(node.space, tokens[: end * WIDTH], first)
            self._note_discarded()
            self._operations.append(Save(segment.id, source, first, end, self._scratch))
            n_stored += end - first
        return n_stored

    def _note_discarded(self) -> None:
        self._operations += map(Discard, self.segments.take_discarded())

    def _cut(self, seq: int, keep: int) -> None:
        super()._cut(seq, keep)
        self._doubles.cut(seq, keep)

    def _drop(self, seq: int) -> None:
        super()._drop(seq)
        self._doubles.cut(seq, 0)

    def _park(self, seq: int, keep: int) -> None:
        """Let an id that holds nothing hold what an idle slot does, which is to drop all but `keep` tokens."""
        # The one spare id of a single slot would have to be freed again at once.
        spare = (each for each in self._ids if not self.holds(each)) if len(self._ids) > 2 else ()
        target = next(iter(spare), None)
        tip = self._tip(seq)
        if target is None:
            self._leave(tip, max(tip.start, keep))
            return
        self._operations.append(Copy(seq, target, 0, tip.end))
        self.tree.hold(target, Match(tip, tip.end))
        self.counts.n_parked += 1

    def _keep_an_id_free(self) -> None:
        """See to it that a reserved id is free, so that the next slot's path can be parked before it is known what
        that covers.

        If need be, the idle path that matters least is given up: those with a short tail first, then the least
        recently used.
        """
        self._release_covered()
        if not self._reserved or not all(map(self.holds, self._reserved)):
            return
        idle = [seq for seq in self._ids if self.holds(seq) and not self.tree.is_pinned(seq)]
        least: int = min(idle, key=lambda seq: (self._tail(seq) >= self._min_shared, self._last_used(seq)))
        if self._tail(least):
            self._leave(self._tip(least), self._tip(least).start)
        self.clear(least)
        self.counts.n_lost_paths += 1
        if least in self._slots:
            moved = self._reserved[-1]
            self._park(moved, 0)
            self.clear(moved)
