"""The ledger of a pool in which sequences share cells, and what leaves it is stored.

Ids: the slots' first, then the reserved ones, which keep idle prefixes alive. Some id behind the slots is always
free, to move a path by. The last id of all is for scratch: whatever is saved, loaded or moved goes through it.

A token that several sequences hold occupies one cell. What two sequences computed side by side is a *double* until
`settle` lets the second take the cells of the first. What leaves the cells is stored first, each token once
(`kvcache/tiers.py`), and loaded again when a request wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from llamaslot.base.kv_ops import Copy, Discard, Load, Operation, Save
from llamaslot.base.namespaces import is_private
from llamaslot.base.tokens import WIDTH, Tokens, packed
from llamaslot.kvcache.cells import CellMap
from llamaslot.kvcache.disk import Job, Write
from llamaslot.kvcache.doubles import Doubles
from llamaslot.kvcache.eviction import Eviction
from llamaslot.kvcache.ledger import Fetched, GivenUp, Ledger
from llamaslot.kvcache.node import Node
from llamaslot.kvcache.segments import Stored
from llamaslot.kvcache.slot_store import SavedSegment, SavedSlot
from llamaslot.kvcache.tiers import Tiers
from llamaslot.kvcache.tree import Match

_READ_COST = 1 / 8
"""The time to read a token from disk over the time to compute it, as long as it is not known."""


class SharedLedger(Ledger):
    """See `Ledger`. A tail shorter than `min_shared` tokens is the first to go when ids are short.

    `n_seqs` counts the one for scratch; there is none where all are slots', and then nothing is stored or moved.
    `load_cost` is the time to load a token over the time to compute it, `prefill_us` the latter in microseconds.
    """

    def __init__(
        self,
        *,
        n_slots: int,
        n_seqs: int,
        n_cells: int,
        min_shared: int,
        tiers: Tiers,
        load_cost: float = 0.0,
        prefill_us: float = 0.0,
    ) -> None:
        super().__init__(n_slots=n_slots, n_seqs=max(n_slots, n_seqs - 1), n_cells=n_cells)
        self.scratch = n_seqs - 1 if n_seqs > n_slots else None
        """A sequence that holds nothing before and after each operation."""
        self.cells = CellMap(n_cells, n_seqs)
        """Where the tokens lie."""
        self.tiers = tiers
        """What is stored."""
        self._min_shared = min_shared
        self._load_cost = load_cost
        self._prefill_us = prefill_us
        self._doubles = Doubles(self.tree)
        self._n_numbers = 0
        self._saving: set[int] = set()
        """Segments that the plan stores, so that none may be loaded before it is known that they are."""
        self._stored_at = 0
        self._n_stored = 0
        """Tokens stored ahead of need since then: this ends where RAM holds less than the pool."""

    # --- reading ---

    def known(self, space: str, tokens: bytes) -> int:
        """See `Ledger.known`: what is in the pool, and what is stored behind it."""
        n = self.tree.match(space, tokens).n
        stored = self._worth_loading(space, tokens, n)
        return stored[-1].end if stored else n

    def branches(self, space: str, tokens: bytes, n: int) -> bool:
        """See `Ledger.branches`: in the pool, or in what is stored."""
        return super().branches(space, tokens, n) or self.tiers.tree.branches(space, tokens, n)

    def _worth_loading(self, space: str, tokens: bytes, start: int) -> list[Stored]:
        """What is stored from `start` on, but for a last segment of which too little is wanted: it is loaded whole.

        Nothing, if all of it together takes longer to load than to compute.
        """
        stored = self.tiers.stored(space, tokens, start)
        if stored and not self._pays(stored[-1:]):
            stored.pop()
        return stored if self._pays(stored) else []

    def _pays(self, stored: Sequence[Stored]) -> bool:
        n_wanted = sum(each.end - each.start for each in stored)
        n_loaded = sum(each.segment.n_tokens for each in stored)
        n_read = sum(each.segment.n_tokens for each in stored if not self.tiers.is_at_hand(each.segment))
        return n_wanted > self._load_cost * n_loaded + self._read_cost * n_read

    @property
    def _read_cost(self) -> float:
        """The time to read a token over the time to compute it."""
        read_us = self.tiers.read_us
        return read_us / self._prefill_us if read_us and self._prefill_us else _READ_COST

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
        self.tiers.touch(space, tokens)
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

    def fetch(self, seq: int, tokens: bytes, most: int | None = None) -> Fetched:
        """See `Ledger.fetch`: first what others hold by now, then what is stored."""
        if self._take_over(seq, tokens):
            self._release_covered()
        start = n = self.length(seq)
        stored = self._worth_loading(self._tip(seq).space, tokens, n)
        self.tiers.want([each.segment for each in stored])
        self._note_discarded()
        for each in stored:
            if (most is not None and n - start >= most) or each.segment.number in self._saving:
                return Fetched.SOME
            if not self.tiers.is_at_hand(each.segment):
                return Fetched.WAITS if self.tiers.reading else Fetched.ALL
            if not self._make_room(each.segment.n_tokens) or not self.tiers.is_at_hand(each.segment):
                break
            self._operations.append(Load(each.segment.number, seq, n, each.end, self._scratch))
            self.tree.extend(seq, tokens[n * WIDTH : each.end * WIDTH])
            self.counts.n_loaded_tokens += each.end - n
            self.counts.n_read_tokens += (each.end - n) * each.segment.is_fresh
            each.segment.is_fresh = False
            n = each.end
        return Fetched.ALL

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

    def store_ahead(self, most: int, *, pinned: bool) -> None:
        """See `Ledger.store_ahead`."""
        if self._stored_at != self.clock:
            self._stored_at, self._n_stored = self.clock, 0

        def may_be(node: Node) -> bool:
            return not node.n_pins or (pinned and not is_private(node.space))

        n_all = self.tree.n_tokens if pinned else self.n_idle
        if self._n_stored >= n_all:
            return
        for node in self.tree.nodes():
            if not may_be(node) or any(map(may_be, node.children.values())):
                continue
            ranges = self._missing(node, 0)
            if node.n_pins and not node.children:
                # It grows still: what is not full would be replaced again and again.
                ranges = [(first, end) for first, end in ranges if end - first == self.tiers.tree.largest]
            n = self._store(node, ranges, most)
            self._n_stored += n
            most -= n
            if most <= 0:
                return
        self._n_stored = n_all

    def tend(self, now: float) -> None:
        """See `Ledger.tend`."""
        self.tiers.tend(now)

    def take_jobs(self) -> list[Job]:
        """See `Ledger.take_jobs`."""
        return [self._ordered(job) if isinstance(job, Write) else job for job in self.tiers.take_jobs()]

    def _ordered(self, job: Write) -> Write:
        """A segment's order is known once its `Save` was taken."""
        segment = self.tiers.disk.get(job.record.number)
        if segment is None:
            return job
        segment.cell_order = self.cells.cell_order(segment.number)
        return Write(replace(job.record, cell_order=segment.cell_order))

    def was_not_saved(self, number: int) -> None:
        """See `Ledger.was_not_saved`."""
        self.cells.discard(number)
        self.tiers.was_not_saved(number)

    def was_read(self, number: int, seconds: float, now: float) -> range | None:
        """The bytes for a `Read` are there: the positions that they are for, if they are still wanted."""
        segment = self.tiers.was_read(number, seconds, now)
        if segment is None:
            return None
        self.cells.put(number, segment.start, segment.n_tokens, segment.cell_order)
        return range(segment.start, segment.end)

    def save(self, seq: int) -> list[Save]:
        """Have stored all that an idle sequence holds, outside of the tiers, until `discard`."""
        n_tokens, size = self.length(seq), self.tiers.tree.largest
        ranges = [(at, min(at + size, n_tokens)) for at in range(0, n_tokens, size)]
        saves = [Save(self._new_number(), seq, start, end, self._scratch) for start, end in ranges]
        self._operations += saves
        return saves

    def discard(self, saves: Sequence[Save]) -> None:
        """Have forgotten what was stored so."""
        self._operations += [Discard(save.segment) for save in saves]

    def restore(self, seq: int, saved: SavedSlot) -> dict[int, SavedSegment] | None:
        """Let an idle slot hold what was saved; None where running requests leave no room for it.

        What it held before is parked, and what the pool has of the tokens is taken over. Returns what the backend
        has to be given first, by number.
        """
        tokens = saved.tokens
        match = self.tree.match(saved.space, tokens)
        n_wanted = sum(segment.end - segment.start for segment in saved.segments if segment.end > match.n)
        if n_wanted > self.n_free + self.n_idle - self.tree.n_idle(match):
            return None
        if self.holds(seq):
            if not self.tree.is_covered(seq):
                self._park(seq, 0)
            self.clear(seq)
        self.tree.hold(seq, self.tree.match(saved.space, b""))
        self.tree.pin(seq)
        self._take_over(seq, tokens)
        given: dict[int, SavedSegment] = {}
        for segment in saved.segments:
            n = self.length(seq)
            if n >= segment.end:
                continue
            if not self._make_room(segment.end - segment.start):
                raise AssertionError("there was room")
            number = self._new_number()
            given[number] = segment
            self.cells.put(number, segment.start, segment.end - segment.start, segment.cell_order)
            self._operations += [Load(number, seq, n, segment.end, self._scratch), Discard(number)]
            self.tree.extend(seq, tokens[n * WIDTH : segment.end * WIDTH])
        self._keep_an_id_free()
        self.unpin(seq)
        return given

    def _new_number(self) -> int:
        """A number below 0: no segment of the tiers has one."""
        self._n_numbers += 1
        return -self._n_numbers

    def clear_idle(self) -> int:
        """See `Ledger.clear_idle`; nothing is stored any more either."""
        self.tiers.clear()
        self._note_discarded()
        return super().clear_idle()

    def give_up(self, space: str, tokens: bytes) -> GivenUp:
        """See `Ledger.give_up`; it ends where another path goes on in RAM or on disk, too, and leaves those."""
        fork = max(self.tree.last_fork(self.tree.match(space, tokens)), self.tiers.tree.last_fork(space, tokens))
        n_cells = self._give_up(space, tokens, fork)
        n_ram, n_disk = self.tiers.give_up(space, tokens, fork)
        self._note_discarded()
        return GivenUp(n_cells, n_ram, n_disk)

    def forget(self, space: str) -> None:
        """See `Ledger.forget`; nothing of it is stored any more either."""
        self.tiers.forget(space)
        self._note_discarded()
        super().forget(space)

    def take_operations(self) -> list[Operation]:
        """See `Ledger.take_operations`."""
        operations = super().take_operations()
        self._saving.clear()
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
        self.tiers.check()
        at_hand = {segment.number for segment in self.tiers.ram if self.tiers.is_at_hand(segment)}
        assert set(self.cells.segments) == at_hand

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
        if self.tiers.ram.capacity:
            # Cut from the start of the node, so that the ranges stay the same when its end is given up bit by bit.
            self._store(node, self._missing(node, node.start, start))
            n_lost = sum(end - max(first, start) for first, end in self._missing(node, node.start, start))
        self.counts.n_lost_tokens += n_lost
        self.counts.n_stored_tokens += n - n_lost

    def _missing(self, node: Node, first: int, start: int = 0) -> list[tuple[int, int]]:
        """The ranges on the path of a node from `first` on that are stored nowhere and reach beyond `start`."""
        return [each for each in self.tiers.missing(node.space, node.prefix(), first) if each[1] > start]

    def _store(self, node: Node, ranges: Sequence[tuple[int, int]], most: int | None = None) -> int:
        """Store ranges of the path of a node, unless RAM is too small for the whole path to its end; about how many
        tokens.
        """
        n_stored = 0
        tokens = node.prefix()
        if not ranges or not self.tiers.fits(node.space, tokens, self.tiers.missing(node.space, tokens, 0)):
            return 0
        source = next(self.tree.holders(node))
        for first, end in ranges:
            if most is not None and n_stored >= most:
                break
            segment = self.tiers.add(node.space, tokens[: end * WIDTH], first)
            self._note_discarded()
            self._operations.append(Save(segment.number, source, first, end, self._scratch))
            self._saving.add(segment.number)
            n_stored += end - first
        return n_stored

    def _note_discarded(self) -> None:
        self._operations += map(Discard, self.tiers.take_discarded())

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
