"""What every sequence holds, and what that takes of ids and cells: what all pools have in common.

The ledger leads and the backend follows: each change is noted as an operation, and the next step carries all of
them out, in order, before it decodes. What a decode really did comes back through `append` and `spoil`.

How a request comes by a known prefix depends on the pool: `kvcache/shared.py` where sequences share cells,
`kvcache/separate.py` where each has its own. Nothing here knows of requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from llamaslot.base.kv_ops import Move, Operation, Remove
from llamaslot.base.tokens import WIDTH, Tokens, packed
from llamaslot.kvcache.disk import Job
from llamaslot.kvcache.eviction import Eviction
from llamaslot.kvcache.tree import Match, Tree


@dataclass(slots=True)
class Counts:
    """What has happened so far, for whoever watches."""

    n_copied_tokens: int = 0
    """Tokens that a sequence took over from another one instead of computing them."""
    n_lost_tokens: int = 0
    """Idle tokens that left the pool and are stored nowhere."""
    n_stored_tokens: int = 0
    """Idle tokens that left the pool and are stored."""
    n_loaded_tokens: int = 0
    """Stored tokens that were loaded instead of computed."""
    n_read_tokens: int = 0
    """Those of them that were read from disk first."""
    n_parked: int = 0
    """Idle paths that moved from a slot to a reserved id."""
    n_lost_paths: int = 0
    """Idle paths given up because no sequence id was left."""


class Fetched(Enum):
    """What came of a `fetch`."""

    ALL = "all"
    """There is nothing more to be had."""
    SOME = "some"
    """There is more, for another step."""
    WAITS = "waits"
    """There is more, and something is read from the disk: an answer will come."""


class GivenUp(NamedTuple):
    """Tokens that are gone, by where they were."""

    n_cells: int
    n_ram: int = 0
    n_disk: int = 0


class Ledger(ABC):
    """A pool of `n_cells` for `n_seqs` sequences: the first `n_slots` are to run in, the others reserved."""

    def __init__(self, *, n_slots: int, n_seqs: int, n_cells: int) -> None:
        self.tree = Tree()
        self.counts = Counts()
        self._n_cells = n_cells
        self._slots = range(n_slots)
        self._reserved = range(n_slots, n_seqs)
        self._ids = range(n_seqs)
        self._operations: list[Operation] = []
        self._clock = 0

    # --- reading ---

    def length(self, seq: int) -> int:
        """Tokens that a sequence holds."""
        return self.tree.length(seq)

    def holds(self, seq: int) -> bool:
        """Whether a sequence is in use, if only to hold nothing yet."""
        return self.tree.tip(seq) is not None

    def known(self, space: str, tokens: bytes) -> int:
        """How many of some tokens need not be computed, counted from the first."""
        return self.tree.match(space, tokens).n

    def branches(self, space: str, tokens: bytes, n: int) -> bool:
        """Whether something goes on in another way behind the first `n` of these tokens, all that is known."""
        match = self.tree.match(space, tokens[: n * WIDTH])
        return match.n == n and (n < match.node.end or bool(match.node.children))

    @property
    def n_seqs(self) -> int:
        """Sequence ids in use."""
        return sum(map(self.holds, self._ids))

    @property
    def is_settled(self) -> bool:
        """Whether the backend has carried out everything."""
        return not self._operations

    @property
    @abstractmethod
    def n_used(self) -> int:
        """Cells in use, once the operations noted so far are carried out."""

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

    # --- running requests ---

    @abstractmethod
    def claim(self, choices: Sequence[int], space: str, tokens: bytes) -> tuple[int, int]:
        """Let one of `choices`, all idle or empty slots, hold a known prefix of `tokens`, pinned.

        Returns the slot and the tokens that it starts with.
        """

    def copy_pays(self, _n_tokens: int) -> bool:
        """Whether copying a whole sequence beats computing so many tokens."""
        return False

    def waits_for_copy(self, _choices: Sequence[int], _space: str, _tokens: bytes) -> bool:
        """Whether a prefix will be worth copying, but not before the next decode."""
        return False

    def fetch(self, _seq: int, _tokens: bytes, _most: int | None = None) -> Fetched:
        """Let a running sequence hold more of `tokens`, which begin with what it holds, without computing it.

        About `most` of them are loaded at once.
        """
        return Fetched.ALL

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
        self.tree.extend(seq, packed(tokens))

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
        """Tidy up what the last step left."""
        return

    def evict(self, n_cells: int) -> int:
        """Give up so many idle cells, or all there are; how many."""
        return self._carry_out(self.tree.plan_eviction(n_cells))

    def is_in_the_way(self, _n_prefill: int, _life: int) -> bool:
        """Whether something idle is better stored before so many prompt tokens are computed beside it.

        Each of them takes longer for every idle cell, as did those computed since its last use. Once they are more
        than `life` in all, that has cost more time than to store the cell and to load it again.
        """
        return False

    def make_way(self, _n_prefill: int, _life: int, _most: int | None) -> None:
        """Let what is in the way leave the pool, at most `most` tokens of it."""
        return

    def store_ahead(self, _most: int, *, pinned: bool) -> None:
        """Store about so many tokens that are stored nowhere yet; they stay in the pool.

        With `pinned` also what running requests go through, but for the last tokens of those, which grow still.
        """
        return

    def truncate(self, seq: int, keep: int) -> None:
        """Let a sequence drop all but its first `keep` tokens."""
        if keep >= self.length(seq):
            return
        if keep == 0:
            self.clear(seq)
            return
        self.tree.truncate(seq, keep)
        self._cut(seq, keep)

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

    def give_up(self, space: str, tokens: bytes) -> GivenUp:
        """Give up what is idle on the path of some tokens, from its end back to where another path goes on, ends or
        runs.
        """
        return GivenUp(self._give_up(space, tokens, self.tree.last_fork(self.tree.match(space, tokens))))

    def tend(self, now: float) -> None:
        """Let it be so late for what is stored; called once a plan, before anything is fetched."""
        return

    def was_not_saved(self, number: int) -> None:
        """There was no memory for a segment that the last plan was to store."""
        raise AssertionError(f"segment {number} was never stored")

    def take_jobs(self) -> list[Job]:
        """What the disk has to do, once the operations are done that were taken before."""
        return []

    def forget(self, space: str) -> None:
        """Let every sequence drop what it holds in a namespace."""
        for seq in self.tree.sequences(space):
            self.clear(seq)

    def move(self, move: Move) -> None:
        """Note a move within the pool, which changes nothing that anybody holds."""
        self._operations.append(move)

    def take_operations(self) -> list[Operation]:
        """What the backend has to do before it decodes, in this order."""
        operations, self._operations = self._operations, []
        return operations

    def check(self, range_of: Callable[[int], range]) -> None:
        """Prove what must always hold, while no operation is pending; raises `AssertionError`.

        `range_of` asks the backend for the positions that a sequence holds.
        """
        assert not self._operations
        self.tree.check()
        for seq in self._ids:
            assert range_of(seq) == range(self.length(seq)), f"sequence {seq}"
            assert seq in self._slots or not self.tree.is_pinned(seq)

    # --- for all pools ---

    def _give_up(self, space: str, tokens: bytes, fork: int) -> int:
        """Let go of what lies behind a fork on the path of some tokens, if nothing else does; how many tokens."""
        n_before = self.tree.n_tokens
        match = self.tree.match(space, tokens)
        if self.tree.last_fork(match) <= fork < match.n:
            for seq in list(match.node.tips):
                self.truncate(seq, fork)
                if self.holds(seq) and self.tree.is_covered(seq):
                    self.clear(seq)
        return n_before - self.tree.n_tokens

    def _carry_out(self, plan: Eviction) -> int:
        for seq, keep in plan.keeps.items():
            self._cut(seq, keep)
        self.tree.evict(plan)
        self.counts.n_lost_tokens += plan.n_cells
        return plan.n_cells

    def _cut(self, seq: int, keep: int) -> None:
        """Note that the backend is to drop all but the first `keep` tokens of a sequence."""
        self._operations.append(Remove(seq, keep))

    def _drop(self, seq: int) -> None:
        if self.holds(seq):
            self.tree.release(seq)

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
