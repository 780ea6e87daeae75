"""What every sequence holds, and what that takes of ids and cells.

The ledger leads and the backend follows: each change is noted as an operation, and the next step carries all of
them out, in order, before it decodes. What a decode really did comes back through `append` and `spoil`.

Ids: the slots' first, then the reserved ones, which keep idle prefixes alive, and one more: some id behind the
slots is always free, to move a path by. A token that is held by several sequences occupies one cell in a unified
pool. What two sequences computed side by side is a *double* until `settle` lets the second take the cells of the
first. Nothing here knows of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llamaslot.core.backend import Copy, CopyStream, Move, Operation, Remove, Tokens
from llamaslot.core.cells import CellMap
from llamaslot.core.doubles import Doubles
from llamaslot.core.eviction import Eviction
from llamaslot.core.node import WIDTH, packed
from llamaslot.core.tree import Match, Tree


@dataclass(slots=True)
class Counts:
    """What has happened so far, for whoever watches."""

    n_copied_tokens: int = 0
    """Tokens that a sequence took over from another one instead of computing them."""
    n_evicted_tokens: int = 0
    """Idle tokens given up because cells or an id were needed."""
    n_expired_tokens: int = 0
    """Idle tokens given up because they were not used for too long."""
    n_parked: int = 0
    """Idle paths that moved from a slot to a reserved id."""
    n_lost_paths: int = 0
    """Idle paths given up because no sequence id was left."""


class Ledger:
    """The pool of one context with `n_seqs` sequences: the first `n_slots` are to run in, the others are reserved.

    `shares` says whether cells can be shared (a unified pool, and a model whose sequences can be cut); a tail
    shorter than `min_shared` tokens is the first to go when ids are short. Where cells are not shared, `copy_pays`
    says whether copying a whole sequence beats computing so many tokens.
    """

    def __init__(
        self,
        *,
        n_slots: int,
        n_seqs: int,
        n_cells: int,
        shares: bool,
        min_shared: int,
        copy_pays: Callable[[int], bool] = lambda _n: False,
    ) -> None:
        self.tree = Tree()
        self.counts = Counts()
        self.shares = shares
        self._n_cells = n_cells
        self._min_shared = min_shared
        self._slots = range(n_slots)
        self._reserved = range(n_slots, n_seqs)
        self._ids = range(n_seqs)
        self.cells = CellMap(n_cells, len(self._ids)) if shares else None
        """Where the tokens lie; None where cells are not shared."""
        self._operations: list[Operation] = []
        self._copy_pays = copy_pays
        self._copying: set[int] = set()
        """Sequences that take part in a copy of a stream before the next decode."""
        self._doubles = Doubles(self.tree)
        self._clock = 0

    # --- reading ---

    def length(self, seq: int) -> int:
        """Tokens that a sequence holds."""
        return self.tree.length(seq)

    def holds(self, seq: int) -> bool:
        """Whether a sequence is in use, if only to hold nothing yet."""
        return self.tree.tip(seq) is not None

    @property
    def n_seqs(self) -> int:
        """Sequence ids in use."""
        return sum(map(self.holds, self._ids))

    @property
    def is_settled(self) -> bool:
        """Whether the backend has carried out everything."""
        return not self._operations

    @property
    def n_used(self) -> int:
        """Cells in use, once the operations noted so far are carried out."""
        if not self.shares:
            return sum(self.length(seq) for seq in self._ids)
        return self.tree.n_tokens + self._doubles.n_cells

    @property
    def n_free(self) -> int:
        """Cells that nothing uses."""
        return self._n_cells - self.n_used

    @property
    def n_idle(self) -> int:
        """Cells that only idle sequences use."""
        return self.tree.n_tokens - self.tree.n_pinned_tokens

    @property
    def n_pinned(self) -> int:
        """Cells that running requests use."""
        return self.n_used - self.n_idle

    @property
    def clock(self) -> int:
        """Counts the uses, that is claims, ends and lookups by new requests, and computed prompt tokens."""
        return self._clock

    @property
    def scratch(self) -> int | None:
        """A reserved id that holds nothing: there is one where cells are shared, unless all ids are slots'."""
        return next((seq for seq in self._reserved if not self.holds(seq)), None)

    @property
    def high_water(self) -> int:
        """The highest used cell + 1, as far as it is known."""
        return self.cells.high_water if self.cells is not None else 0

    # --- running requests ---

    def claim(self, choices: Sequence[int], space: str, tokens: bytes) -> tuple[int, int]:
        """Let one of `choices`, all idle or empty slots, hold the longest known prefix of `tokens`, pinned.

        Returns the slot and the tokens that it starts with. Where cells are shared, it is

        1. one whose whole path lies on the match, the longest (an empty slot holds 0 tokens), else
        2. one whose path others cover: nothing is lost with it, else
        3. the one that holds most of the match, least recently used first; another id gets what it holds.
        """
        match = self.tree.match(space, tokens)
        held = self.tree.shared(match, choices)
        seq = self._choose(choices, held) if self.shares else self._choose_partitioned(choices, held)
        own = held[seq]
        stream = self._stream_to_copy(match, own) if seq not in self._copying else None
        if own < self.length(seq) and not self.tree.is_covered(seq):
            # A slot takes part in one copy at a time: what is wanted now goes before what may be.
            self._park(seq, self.length(seq) - own, is_copying=stream is not None)
        if stream is not None:
            own = 0
        self.truncate(seq, own)
        n = match.n if self.shares or stream is not None else own
        match = self.tree.match(space, tokens[: n * WIDTH])
        if stream is not None:
            self._copy_stream(stream, seq, n)
        elif own < n:
            source = next(self.tree.holders(match.node))
            self._operations.append(Copy(source, seq, own, n))
            self.counts.n_copied_tokens += n - own
        if own:
            self.tree.extend(seq, tokens[own * WIDTH : n * WIDTH])
        else:
            self.tree.hold(seq, match)
        self.tree.pin(seq)
        self.touch(self.tree.match(space, tokens[: n * WIDTH]), hits=1)
        self._keep_an_id_free()
        return seq, n

    def _choose(self, choices: Sequence[int], held: dict[int, int]) -> int:
        whole = [seq for seq in choices if held[seq] == self.length(seq)]
        if whole:
            return max(whole, key=lambda seq: (held[seq], -seq))
        covered = [seq for seq in choices if self.tree.is_covered(seq)]
        return max(covered or choices, key=lambda seq: (held[seq], -self._last_used(seq)))

    def _choose_partitioned(self, choices: Sequence[int], held: dict[int, int]) -> int:
        """Where no cells are shared: the longest match; while a slot is empty, none that would lose over half."""
        empty = [seq for seq in choices if not self.length(seq)]
        kept = [seq for seq in choices if held[seq] and 2 * held[seq] >= self.length(seq)]
        candidates = (kept or empty) if empty else choices
        return max(candidates, key=lambda seq: (held[seq], -self._last_used(seq), -seq))

    def waits_for_copy(self, choices: Sequence[int], space: str, tokens: bytes) -> bool:
        """Whether a stream is worth copying, but each that could be is in another copy until the next decode."""
        match = self.tree.match(space, tokens)
        own = max(self.tree.shared(match, choices).values())
        return self.copy_pays(match.n - own) and self._stream_to_copy(match, own) is None

    def copy_pays(self, n_tokens: int) -> bool:
        """Whether copying a stream beats computing so many tokens; False where cells are shared."""
        return not self.shares and n_tokens > 0 and self._copy_pays(n_tokens)

    def _stream_to_copy(self, match: Match, own: int) -> int | None:
        """A sequence from which to copy the whole match, if that beats computing what is behind `own`."""
        if not self.copy_pays(match.n - own):
            return None
        return next((seq for seq in self.tree.holders(match.node) if seq not in self._copying), None)

    def _copy_stream(self, src: int, dst: int, keep: int) -> None:
        self._operations.append(CopyStream(src, dst, keep))
        self._copying |= {src, dst}
        self.counts.n_copied_tokens += keep

    def touch(self, *matches: Match, hits: int = 0) -> None:
        """Note that prefixes are wanted now."""
        now = self._tick()
        for match in matches:
            self.tree.touch(match.node, now, hits)

    def grow_older(self, n_tokens: int) -> None:
        """So many prompt tokens were computed, whoever's."""
        self._clock += n_tokens

    def append(self, seq: int, tokens: Tokens) -> None:
        """A running sequence computed these tokens behind those that it holds."""
        start = self.length(seq)
        n_known = self.tree.extend(seq, packed(tokens))
        if self.cells is not None:
            self.cells.decode([(seq, len(tokens))])
        if n_known and self.shares:
            self._doubles.note(seq, start, start + n_known)

    def unpin(self, seq: int) -> None:
        """The request in a slot has ended or is preempted; what it computed stays, idle."""
        if self.length(seq):
            self.tree.unpin(seq, self._tick())
        elif self.holds(seq):
            self.tree.release(seq)

    def spoil(self, seq: int) -> None:
        """A failed decode left the sequence in a state that nobody knows: forget and clear it."""
        tip = self.tree.tip(seq)
        if tip is not None:
            self.tree.touch(tip, self._tick())
        self._drop(seq)
        self._operations.append(Remove(seq, 0))

    # --- making room ---

    def settle(self) -> None:
        """Let doubles take the cells that the tree counts, and free reserved ids whose paths others cover."""
        self._operations += self._doubles.settle()
        self._release_covered()

    def _release_covered(self) -> None:
        for seq in self._reserved:
            if self.holds(seq) and self.tree.is_covered(seq):
                self.clear(seq)

    def evict(self, n_cells: int) -> int:
        """Give up so many idle cells, or all there are; how many."""
        n_evicted = self._carry_out(self.tree.plan_eviction(n_cells))
        self.counts.n_evicted_tokens += n_evicted
        return n_evicted

    def has_idle(self, before: int) -> bool:
        """Whether something idle was last used before a time on the clock."""
        return self.tree.plan_eviction(1, before).n_cells > 0

    def expire(self, before: int) -> int:
        """Give up everything idle that was last used before a time on the clock; how many cells."""
        n_expired = self._carry_out(self.tree.plan_eviction(self.n_idle, before))
        self.counts.n_expired_tokens += n_expired
        return n_expired

    def _carry_out(self, plan: Eviction) -> int:
        for seq, keep in plan.keeps.items():
            self._doubles.cut(seq, keep)
            self._operations.append(Remove(seq, keep))
        self.tree.evict(plan)
        return plan.n_cells

    def truncate(self, seq: int, keep: int) -> None:
        """Let a sequence drop all but its first `keep` tokens."""
        if keep >= self.length(seq):
            return
        if keep == 0:
            self.clear(seq)
            return
        self.tree.truncate(seq, keep)
        self._doubles.cut(seq, keep)
        self._operations.append(Remove(seq, keep))

    def clear(self, seq: int) -> None:
        """Let a sequence drop everything."""
        if self.holds(seq):
            self._drop(seq)
            self._operations.append(Remove(seq, 0))

    def clear_idle(self) -> int:
        """Let every idle sequence drop everything; the tokens that the tree has no more."""
        n_before = self.tree.n_tokens
        for seq in self._ids:
            if not self.tree.is_pinned(seq):
                self.clear(seq)
        return n_before - self.tree.n_tokens

    def forget(self, space: str) -> None:
        """Let every sequence drop what it holds in a namespace."""
        for seq in self.tree.sequences(space):
            self.clear(seq)

    def take_operations(self) -> list[Operation]:
        """What the backend has to do before it decodes, in this order."""
        operations, self._operations = self._operations, []
        self._copying.clear()
        if self.cells is not None:
            for operation in operations:
                self.cells.follow(operation)
        return operations

    def move(self, move: Move) -> None:
        """Note a move within the pool, which changes nothing that anybody holds."""
        self._operations.append(move)

    def check(self, range_of: Callable[[int], range]) -> None:
        """Prove what must always hold, while no operation is pending; raises `AssertionError`.

        `range_of` asks the backend for the positions that a sequence holds.
        """
        assert not self._operations
        self.tree.check()
        for seq in self._ids:
            assert range_of(seq) == range(self.length(seq)), f"sequence {seq}"
            assert seq in self._slots or not self.tree.is_pinned(seq)
            assert self.cells is None or self.cells.held(seq) == range(self.length(seq)), f"cells of {seq}"
        assert not self.shares or 0 <= self.n_used <= self._n_cells
        assert self.cells is None or self.cells.n_used == self.n_used
        self._doubles.check()

    # --- inside ---

    def _drop(self, seq: int) -> None:
        if self.holds(seq):
            self.tree.release(seq)
        self._doubles.cut(seq, 0)

    def _park(self, seq: int, n_tokens: int, *, is_copying: bool = False) -> None:
        """Let an id that holds nothing hold what an idle slot holds, of which so many tokens would be lost."""
        if self.shares:
            # The one spare id of a single slot would have to be freed again at once.
            spare = (each for each in self._ids if not self.holds(each)) if len(self._ids) > 2 else ()
            target = next(iter(spare), None)
        else:
            may_copy = not is_copying and seq not in self._copying and self.copy_pays(n_tokens)
            target = self._stream_to_replace() if may_copy else None
        tip = self.tree.tip(seq)
        assert tip is not None
        if target is None:
            self.counts.n_evicted_tokens += n_tokens
            return
        if self.shares:
            self._operations.append(Copy(seq, target, 0, tip.end))
        else:
            self._give_up(target)
            self._copy_stream(seq, target, tip.end)
        self.tree.hold(target, Match(tip, tip.end))
        self.counts.n_parked += 1

    def _stream_to_replace(self) -> int | None:
        """The reserved sequence whose path matters least, where each has cells of its own."""
        idle = [seq for seq in self._reserved if seq not in self._copying]
        return min(idle, key=lambda seq: (self._tail(seq), self._last_used(seq)), default=None)

    def _keep_an_id_free(self) -> None:
        """Where cells are shared, see to it that a reserved id is free, so that the next slot's path can be parked
        before it is known what that covers.

        If need be, the idle path that matters least is given up: those with a short tail first, then the least
        recently used.
        """
        self._release_covered()
        if not self.shares or not self._reserved or not all(map(self.holds, self._reserved)):
            return
        idle = [seq for seq in self._ids if self.holds(seq) and not self.tree.is_pinned(seq)]
        least: int = min(idle, key=lambda seq: (self._tail(seq) >= self._min_shared, self._last_used(seq)))
        self._give_up(least)
        self.counts.n_lost_paths += 1
        if least in self._slots:
            moved = self._reserved[-1]
            self._park(moved, 0)
            self.clear(moved)

    def _give_up(self, seq: int) -> None:
        """Clear an idle sequence because its id is needed."""
        self.counts.n_evicted_tokens += self._tail(seq)
        self.clear(seq)

    def _tail(self, seq: int) -> int:
        """Tokens that nobody else holds."""
        tip = self.tree.tip(seq)
        return tip.n_tokens if tip is not None and not self.tree.is_covered(seq) else 0

    def _last_used(self, seq: int) -> int:
        tip = self.tree.tip(seq)
        return tip.last_used if tip is not None else 0

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
