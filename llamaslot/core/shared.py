"""The ledger of a pool in which sequences share cells, and what leaves it is stored.

Ids: the slots' first, then the reserved ones, which keep idle prefixes alive. Some id behind the slots is always
free, to move a path by. The last id of all is for scratch: whatever is saved, loaded or moved goes through it.

A token that several sequences hold occupies one cell. What two sequences computed side by side is a *double* until
`settle` lets the second take the cells of the first. What leaves the cells is stored first, each token once
(`core/segments.py`), and loaded again when a request wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llamaslot.core.backend import Copy, Discard, Load, Move, Operation, Save, Tokens
from llamaslot.core.cells import CellMap
from llamaslot.core.doubles import Doubles
from llamaslot.core.eviction import Eviction
from llamaslot.core.ledger import Ledger
from llamaslot.core.node import WIDTH, Node, packed
from llamaslot.core.segments import Segments
from llamaslot.core.tree import Match


class SharedLedger(Ledger):
    """See `Ledger`. A tail shorter than `min_shared` tokens is the first to go when ids are short.

    `n_seqs` counts the one for scratch; there is none where all are slots', and then nothing is stored or moved.
    """

    def __init__(self, *, n_slots: int, n_seqs: int, n_cells: int, min_shared: int, segments: Segments) -> None:
        super().__init__(n_slots=n_slots, n_seqs=max(n_slots, n_seqs - 1), n_cells=n_cells)
        self.scratch = n_seqs - 1 if n_seqs > n_slots else None
        """A sequence that holds nothing before and after each operation."""
        self.cells = CellMap(n_cells, n_seqs)
        """Where the tokens lie."""
        self.segments = segments
        """What is stored."""
        self._min_shared = min_shared
        self._doubles = Doubles(self.tree)

    # --- reading ---

    def known(self, space: str, tokens: bytes) -> int:
        """See `Ledger.known`: what is in the pool, and what is stored behind it."""
        n = self.tree.match(space, tokens).n
        stored = self.segments.stored(space, tokens, n)
        return stored[-1].end if stored else n

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
        for each in self.segments.stored(self._tip(seq).space, tokens, n):
            if most is not None and n - start >= most:
                return True
            if not self._make_room(each.segment.n_tokens) or not each.segment.nodes:
                break
            self._operations.append(Load(each.segment.id, seq, n, each.end, self._scratch))
            self.tree.extend(seq, tokens[n * WIDTH : each.end * WIDTH])
            self.counts.n_restored_tokens += each.end - n
            n = each.end
        return False

    def _make_room(self, n_cells: int) -> bool:
        if self.n_free < n_cells:
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

    def has_idle(self, before: int) -> bool:
        """Whether something idle was last used before a time on the clock."""
        return self.tree.plan_eviction(1, before).n_cells > 0

    def demote(self, before: int) -> None:
        """Let everything idle leave the pool that was last used before a time on the clock."""
        self._carry_out(self.tree.plan_eviction(self.n_idle, before))

    def store_idle(self, n_tokens: int) -> None:
        """Store about so many tokens that are idle and not stored yet; they stay in the pool."""
        for node in self.tree.nodes():
            if node.n_pins:
                continue
            tokens = node.prefix()
            for start, end in self.segments.missing(node.space, tokens, node.start):
                if n_tokens <= 0 or not self._save(node, tokens, start, end):
                    return
                n_tokens -= end - start

    def clear_idle(self) -> int:
        """See `Ledger.clear_idle`; nothing is stored any more either."""
        self.segments.clear()
        self._discard()
        return super().clear_idle()

    def forget(self, space: str) -> None:
        """See `Ledger.forget`; nothing of it is stored any more either."""
        self.segments.forget(space)
        self._discard()
        super().forget(space)

    def move(self, move: Move) -> None:
        """Note a move within the pool, which changes nothing that anybody holds."""
        self._operations.append(move)

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
        """Store the tokens of a node from `start` on, which nobody will hold any more, as far as there is room."""
        if not self.segments.capacity:
            self.counts.n_evicted_tokens += node.end - start
            return
        tokens = node.prefix()
        n_lost = 0
        for first, end in self.segments.missing(node.space, tokens, node.start):
            if end > start and not self._save(node, tokens, first, end):
                n_lost += end - max(first, start)
        self.counts.n_evicted_tokens += n_lost
        self.counts.n_demoted_tokens += node.end - start - n_lost

    def _save(self, node: Node, tokens: bytes, start: int, end: int) -> bool:
        """Store a range of the path to a node, which are `tokens`; whether there is room for it."""
        segment = self.segments.add(node.space, tokens[: end * WIDTH], start)
        self._discard()
        if segment is not None:
            source = next(self.tree.holders(node))
            self._operations.append(Save(segment.id, source, start, end, self._scratch))
        return segment is not None

    def _discard(self) -> None:
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
