"""Checkpoints on disk: their files go with those of the segments that they refer to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamaslot.base.model import CheckpointSize, SegmentSize
from llamaslot.kvcache.disk_io import (
    Erase,
    Read,
    ReadDone,
    ReadStarted,
    SegmentMeta,
    Write,
    Written,
    path_digest,
)
from llamaslot.kvcache.nodes import Checkpoint, Segment, SegmentEvent, SegmentState
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.tiers.disk_tier import DiskTier, verified_path
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers
from tests.cache_settings import checkpoint_settings, tier_settings
from tests.kvcache.test_segment_tiers import run_of

N_BYTES = 5


class Held:
    """Tiers with room for everything, and one sequence that holds a path."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tree = RadixTree()
        settings = tier_settings(
            ram_bytes=1000,
            disk_bytes=1000,
            segment_size=SegmentSize(3, 1),
            segment_tokens=64,
            checkpoints=checkpoint_settings(ram_bytes=1000, size=CheckpointSize(N_BYTES)),
        )
        self.tiers = SegmentTiers(self.tree, settings)
        self.disk_tier = DiskTier(self.tiers, self.tree, settings)
        self.tree.hold(0, "")

    def extend(self, *tokens: int) -> None:
        self.tree.extend(0, run_of(tokens))

    def save(self) -> Segment:
        node = self.tree.end_node(0)
        assert node is not None
        return self.tiers.add(node, 0, node.end)

    def take(self) -> Checkpoint:
        node = self.tree.end_node(0)
        assert node is not None
        return self.tiers.add_checkpoint(node, N_BYTES)

    def written(self, *, answers: bool = True) -> list[int]:
        """Numbers of what is written and, unless it `answers` later, done by now."""
        self.disk_tier.flush()
        self.now += 1
        self.disk_tier.tick(self.now)
        numbers = [job.meta.number for job in self.tiers.take_jobs() if isinstance(job, Write)]
        for number in numbers if answers else ():
            self.disk_tier.on_io(Written(number, ok=True), self.now)
        return numbers

    def erased(self) -> set[int]:
        jobs = self.tiers.take_jobs()
        return {number for job in jobs if isinstance(job, Erase) for number in job.numbers}

    def check(self) -> None:
        self.tiers.check(self.tree.check())


@pytest.mark.parametrize("is_read", [False, True])
def test_a_checkpoint_that_is_written_or_read_goes_with_the_file_that_it_refers_to(is_read: bool) -> None:
    held = Held()
    held.extend(1, 2, 3)
    segment = held.save()
    assert held.written() == [segment.number]
    checkpoint = held.take()
    assert held.written(answers=is_read) == [checkpoint.number]
    if is_read:
        held.tiers.transition(checkpoint, SegmentEvent.EVICT_RAM)
        held.disk_tier.start_read(checkpoint)
        assert [job.number for job in held.tiers.take_jobs() if isinstance(job, Read)] == [checkpoint.number]
        held.disk_tier.on_io(ReadStarted(), held.now)
    held.extend(4, 5)
    longer = held.save()
    held.tiers.transition(longer, SegmentEvent.EVICT_RAM)
    held.check()
    assert {segment.number, checkpoint.number} <= held.erased()
    assert checkpoint.state is (SegmentState.DROPPED if is_read else SegmentState.RAM)
    # The answer comes too late.
    answer = ReadDone(checkpoint.number, 0.1) if is_read else Written(checkpoint.number, ok=True)
    assert held.disk_tier.on_io(answer, held.now) is None
    held.check()
    assert not checkpoint.state.uses_disk


def test_of_a_path_only_the_deepest_checkpoint_stays_on_disk_even_if_one_between_was_never_written() -> None:
    held = Held()
    taken = []
    for i in range(3):
        held.extend(3 * i, 3 * i + 1, 3 * i + 2)
        segment, checkpoint = held.save(), held.take()
        taken.append(checkpoint)
        if i != 1:
            assert {segment.number, checkpoint.number} == {*held.written(), *held.written()}
            held.check()
    assert [each.state.uses_disk for each in taken] == [False, False, True]


def test_the_ends_of_the_first_message_and_last_image_and_the_start_of_the_last_reply_stay_on_disk_too() -> None:
    held = Held()
    ends: dict[str, Checkpoint] = {}
    for i, name in enumerate(("system", "image 1", "question 1", "answer 1", "image 2", "question 2", "answer 2")):
        held.extend(3 * i, 3 * i + 1, 3 * i + 2)
        held.save()
        taken = ends[name] = held.take()
        taken.ends_message, taken.precedes_reply = not i, name.startswith("question")
        taken.ends_images = name.startswith("image")
        while held.written():
            pass
        held.check()
    assert [name for name, each in ends.items() if each.state.uses_disk] == [
        "system",
        "image 2",
        "question 2",
        "answer 2",
    ]


@pytest.mark.parametrize("what", ["segments", "checkpoints"])
def test_a_partial_segment_is_written_before_it_or_its_checkpoint_is_evicted(what: str) -> None:
    """A partial segment is due as soon as a quarter of RAM was filled after it, whatever its age."""
    held = Held()
    held.extend(1, 2, 3)
    segment = held.save()
    checkpoint = held.take()
    held.disk_tier.tick(0.0)
    assert segment.state is SegmentState.DIRTY
    lru = held.tiers.ram if what == "segments" else held.tiers.checkpoints
    first = segment if what == "segments" else checkpoint
    i = 0
    while lru.n_bytes_put - first.ram_put_before <= lru.capacity / 4:
        i += 1
        held.disk_tier.tick(0.0)
        assert segment.state is SegmentState.DIRTY
        held.tree.hold(i, "")
        held.tree.extend(i, run_of([i + 9, i, i]))
        node = held.tree.end_node(i)
        assert node is not None
        if what == "segments":
            held.tiers.add(node, 0, node.end)
        else:
            held.tiers.add_checkpoint(node, N_BYTES)
    held.disk_tier.tick(0.0)
    assert segment.state is SegmentState.WRITING
    while held.tiers.busy:
        held.disk_tier.on_io(Written(next(iter(held.tiers.busy)), ok=True), 0.0)
        held.disk_tier.tick(0.0)
    assert segment.state is SegmentState.CLEAN
    # A checkpoint may be replaced soon, too, and waits if only segments came in.
    assert checkpoint.state is (SegmentState.DIRTY if what == "segments" else SegmentState.CLEAN)
    held.check()


def test_a_partial_segment_is_not_written_early_for_checkpoints_that_do_not_wait_for_it() -> None:
    """One is on disk already, so its age does not matter; and what is put itself is not much else."""
    held = Held()
    held.extend(1, 2, 3)
    segment, checkpoint = held.save(), held.take()
    for each in (segment, checkpoint):
        held.now += 3
        held.disk_tier.tick(held.now)
        held.disk_tier.on_io(Written(each.number, ok=True), held.now)
    assert segment.state is checkpoint.state is SegmentState.CLEAN
    held.tree.hold(1, "")
    held.tree.extend(1, run_of([7, 8]))
    other = held.tree.end_node(1)
    assert other is not None
    while held.tiers.checkpoints.n_bytes_put <= held.tiers.checkpoints.capacity / 3:
        held.tiers.add_checkpoint(other, N_BYTES)
        held.tiers.drop([other.checkpoint] if other.checkpoint is not None else [])
    held.extend(4, 5)
    longer = held.save()
    held.disk_tier.tick(held.now)
    assert longer.state is SegmentState.DIRTY


def test_metadata_that_names_another_segment_is_not_trusted() -> None:
    """Even if that one has the same tokens."""
    held = Held()
    held.extend(1, 2, 3)
    segment, checkpoint = held.save(), held.take()
    sizes, digest = (held.tiers.size, CheckpointSize(N_BYTES)), path_digest("", segment.prefix)
    meta = SegmentMeta(checkpoint.number, segment.number, "", 3, b"", N_BYTES, digest)
    assert verified_path(meta, segment, *sizes) == segment.prefix
    assert verified_path(replace(meta, parent=segment.number + 100), segment, *sizes) is None
    assert verified_path(meta, None, *sizes) is None


def test_a_partial_segment_is_not_written_early_for_a_checkpoint_above_a_deeper_one() -> None:
    """Of these only forks are written, so it does not matter how soon another one is evicted."""
    held = Held()
    held.extend(1, 2)
    above = held.take()
    held.tiers.checkpoints.n_bytes_put += held.tiers.checkpoints.capacity // 2
    held.extend(3)
    deepest, segment = held.take(), held.save()
    held.disk_tier.tick(0.0)
    assert (above.state, deepest.state, segment.state) == (
        SegmentState.RAM,
        SegmentState.RAM,
        SegmentState.DIRTY,
    )
    held.tree.hold(1, "")
    held.tree.extend(1, run_of([1, 2]))
    assert above.is_fork
    held.disk_tier.tick(0.0)
    assert segment.state is SegmentState.WRITING


@pytest.mark.parametrize("what", ["segment", "checkpoint"])
def test_what_is_put_itself_does_not_make_a_partial_segment_due(what: str) -> None:
    """However much of RAM it fills: it would be written at once, though the next turn usually replaces it."""
    held = Held()
    held.extend(1, 2, 3)
    tiers = held.tiers
    if what == "segment":
        tiers.ram.capacity = 10
    else:
        tiers.checkpoints.capacity = 10
    segment, checkpoint = held.save(), held.take()
    assert {"segment": segment, "checkpoint": checkpoint}[what].n_bytes > 10 / 4
    held.disk_tier.tick(0.0)
    assert segment.state is SegmentState.DIRTY
