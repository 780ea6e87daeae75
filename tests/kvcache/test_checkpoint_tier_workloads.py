"""Segments with checkpoints in RAM and on disk at random, without a scheduler: their files refer to each other.

Jobs of the disk are done one at a time, and after any of them the process may end and start again with the files
that are there. `test_segment_tiers.py` has an oracle for segments; here it is about what checkpoints add to them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from llamaslot.base.model import CheckpointSize, SegmentSize
from llamaslot.kvcache.disk_io import Corrupt, Read, ReadDone, ReadStarted, Reparent, Written
from llamaslot.kvcache.nodes import SegmentEvent, SegmentState
from llamaslot.kvcache.offloading import _missing
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.tiers.disk_tier import DiskTier
from llamaslot.kvcache.tiers.pacing import PARTIAL_DELAY_S, RETRY_DELAY_S
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers
from tests.cache_settings import checkpoint_settings, tier_settings
from tests.conftest import LONG
from tests.fake_disk import FakeDisk
from tests.kvcache.test_segment_tiers import HEADER, MAX_TOKENS, run_of
from tests.random_workloads import run_workloads

N_WORKLOADS = 6000 if LONG else 200
N_EVENTS = 120
N_SEQS = 3
MAX_LENGTH = 14
N_BYTES = 5
"""Bytes of a checkpoint."""


class Workload:
    """Random budgets and events, drawn from one seed.

    Each kind of event has a method, which returns False if there is nothing that it could do.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.now = 0.0
        self.disk = FakeDisk()
        self.ram_bytes, self.disk_bytes = self.rng.choice([40, 100, 1000]), self.rng.choice([40, 100, 1000])
        self.checkpoint_bytes = self.rng.choice([20, 50, 1000])
        self.taken: dict[int, bytes] = {}
        """Tokens before each checkpoint, by its number."""
        self.start()

    def start(self) -> None:
        self.tree = RadixTree()
        self.paths: dict[int, tuple[int, ...]] = {}
        """The tokens of each sequence."""
        settings = tier_settings(
            ram_bytes=self.ram_bytes,
            segment_size=SegmentSize(HEADER, 1),
            segment_tokens=MAX_TOKENS,
            disk_bytes=self.disk_bytes,
            checkpoints=checkpoint_settings(ram_bytes=self.checkpoint_bytes, size=CheckpointSize(N_BYTES)),
        )
        self.tiers = SegmentTiers(self.tree, settings)
        self.disk_tier = DiskTier(self.tiers, self.tree, settings)

    def run(self) -> None:
        for _ in range(N_EVENTS):
            (event,) = self.rng.choices([*EVENTS], [*EVENTS.values()])
            self.counts[event.__name__] += event(self)
            self.queue_jobs()
            self.check()
        while self.answer() or self.answer_read():
            self.queue_jobs()
            self.check()
        assert self.is_idle
        self.check_restart()

    # --- sequences ---

    def extend(self) -> bool:
        seq = self.rng.randrange(N_SEQS)
        if seq not in self.paths:
            self.tree.hold(seq, "")
            self.paths[seq] = ()
        if len(self.paths[seq]) >= MAX_LENGTH:
            return False
        more = tuple(self.rng.choices([1, 2], k=self.rng.randint(1, 5)))
        self.tree.extend(seq, run_of(more))
        self.paths[seq] += more
        return True

    def release(self) -> bool:
        if not self.paths:
            return False
        seq = self.rng.choice([*self.paths])
        self.tree.release(seq)
        del self.paths[seq]
        return True

    def save(self) -> bool:
        """Offload what no segment has of a sequence, if all of it fits."""
        seq = self.rng.choice([*self.paths, None])
        node = self.tree.end_node(seq) if seq is not None else None
        ranges = _missing(node, 0, node.end, MAX_TOKENS) if node is not None else []
        if seq is None or node is None or not ranges or not self.tiers.fits(node, ranges):
            return False
        for start, end in ranges:
            # Attaching a segment splits nodes.
            last = self.tree.end_node(seq)
            assert last is not None
            self.tiers.add(next(each for each in last.path_to_root() if each.start < end), start, end)
        return True

    def take(self) -> bool:
        """Take a checkpoint at the end of a sequence; the least recently used ones go for it."""
        seq = self.rng.choice([*self.paths, None])
        node = self.tree.end_node(seq) if seq is not None else None
        if node is None or node.is_root or node.checkpoint is not None:
            return False
        for each in sorted(self.tiers.checkpoints, key=lambda each: each.rank):
            if not self.may_add and not each.state.is_busy:
                self.tiers.transition(each, SegmentEvent.EVICT_RAM)
        if not self.may_add:
            return False
        self.taken[self.tiers.add_checkpoint(node, N_BYTES).number] = node.prefix()
        return True

    @property
    def may_add(self) -> bool:
        return self.tiers.checkpoints.n_bytes + N_BYTES <= self.tiers.checkpoints.capacity

    # --- RAM ---

    def evict(self) -> bool:
        oldest = self.tiers.ram.oldest(lambda each: not each.state.is_busy)
        if oldest is not None:
            self.tiers.transition(oldest, SegmentEvent.EVICT_RAM)
        return oldest is not None

    def evict_checkpoint(self) -> bool:
        idle = [each for each in self.tiers.checkpoints if not each.state.is_busy]
        if idle:
            self.tiers.transition(self.rng.choice(idle), SegmentEvent.EVICT_RAM)
        return bool(idle)

    def drop(self) -> bool:
        found = [*self.tiers.checkpoints]
        if found:
            self.tiers.drop([self.rng.choice(found)])
        return bool(found)

    def fail_to_save(self) -> bool:
        """The backend has no memory for what was to be saved just now."""
        new = [each for each in (*self.tiers.ram, *self.tiers.checkpoints) if each.state is SegmentState.RAM]
        if new:
            self.tiers.on_save_failed(frozenset({self.rng.choice(new).number}), self.now)
            self.now += RETRY_DELAY_S + 1
        return bool(new)

    # --- the disk ---

    def tick(self) -> bool:
        self.now += self.rng.choice([0.1, 2.5, PARTIAL_DELAY_S])
        self.disk_tier.tick(self.now)
        return True

    def queue_jobs(self) -> None:
        jobs = self.tiers.take_jobs()
        self.tiers.take_freed()
        for job in jobs:
            self.counts["reparented"] += isinstance(job, Reparent)
            if isinstance(job, Read):
                self.disk_tier.on_io(ReadStarted(), self.now)
        self.disk.take(jobs)

    def answer(self) -> bool:
        """The disk does the next job that is no read."""
        if not self.disk.writes:
            return False
        ok = self.rng.random() < 0.9
        write = self.disk.next_change(ok=ok)
        if write is not None:
            self.disk_tier.on_io(Written(write.meta.number, ok), self.now)
        return True

    def read(self) -> bool:
        """Start to read a checkpoint."""
        reader = self.disk_tier
        found = [
            s for s in self.tiers.disk if s.is_checkpoint and s.state is SegmentState.DISK and reader.may_read(s)
        ]
        if not found or not reader.may_start_read or not self.may_add:
            return False
        reader.start_read(self.rng.choice(found))
        return True

    def answer_read(self) -> bool:
        if not self.disk.reads:
            return False
        number = self.disk.reads.pop(0)
        self.disk_tier.on_io(ReadDone(number, 0.1) if number in self.disk.metas else Corrupt(number), self.now)
        return True

    def corrupt(self) -> bool:
        """A read finds out that a file is corrupt; the disk has erased it."""
        states = SegmentState.DISK, SegmentState.READING
        found = [each.number for each in self.tiers.disk if each.state in states and each.number in self.disk.metas]
        if not found:
            return False
        number = self.rng.choice(found)
        del self.disk.metas[number]
        self.disk.reads = [each for each in self.disk.reads if each != number]
        self.disk_tier.on_io(Corrupt(number), self.now)
        return True

    def restart(self) -> bool:
        """The process ends before the jobs that are queued are done, and starts again."""
        self.queue_jobs()
        self.disk.writes, self.disk.reads = [], []
        self.start()
        assert not self.disk_tier.adopt([*self.disk.metas.values()], self.disk.first_number)
        self.now += RETRY_DELAY_S + 1
        return True

    # --- what must hold ---

    @property
    def is_idle(self) -> bool:
        """True if all jobs are done."""
        return not self.disk.writes and not self.tiers.busy

    def check(self) -> None:
        tiers, metas = self.tiers, self.disk.metas
        tiers.drop_lost()
        tiers.check(self.tree.check())
        for checkpoint in {*tiers.checkpoints, *(each for each in tiers.disk if each.is_checkpoint)}:
            assert checkpoint.prefix == self.taken[checkpoint.number], f"{checkpoint.number} is on another path"
        if not self.is_idle:
            return
        self.counts["idle"] += 1
        for each in tiers.disk:
            assert each.number in metas, f"{each.number} has no file"
            parent = each.parent
            if parent is not None and not parent.replaces:
                assert metas[each.number].parent == parent.number, f"{each.number} refers to another file"
        assert not {*metas} - {each.number for each in tiers.disk} - {*tiers.replaced_files}, "files are left"

    def check_restart(self) -> None:
        """Once all jobs are done, a restart finds all that was on disk, unless a file waited to be replaced."""
        before, is_whole = {each.number for each in self.tiers.disk}, not self.tiers.replaced_files
        self.restart()
        if is_whole:
            assert {each.number for each in self.tiers.disk} == before
            self.counts["all found again"] += bool(before)
        self.queue_jobs()
        self.check()


EVENTS: dict[Callable[[Workload], bool], float] = {
    Workload.extend: 2,
    Workload.release: 1,
    Workload.save: 3,
    Workload.take: 3,
    Workload.tick: 4,
    Workload.answer: 3,
    Workload.read: 2,
    Workload.answer_read: 1,
    Workload.evict: 1,
    Workload.evict_checkpoint: 1,
    Workload.drop: 0.2,
    Workload.fail_to_save: 0.2,
    Workload.corrupt: 0.15,
    Workload.restart: 0.1,
}
"""How often each comes up, relative to the others."""


@pytest.mark.slow
def test_files_of_checkpoints_refer_to_those_of_their_parents_and_none_is_left_over() -> None:
    expected = (*(event.__name__ for event in EVENTS), "idle", "reparented", "all found again")
    run_workloads(Workload, N_WORKLOADS, expected)
