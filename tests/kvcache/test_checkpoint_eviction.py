"""Which checkpoints are evicted from RAM, over the budget and over the limit of one path."""

from __future__ import annotations

import pytest

from llamaslot.base.model import CheckpointSize, SegmentSize, StateKind
from llamaslot.kvcache.nodes import Checkpoint, SegmentEvent, SegmentState
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.sequences import Sequences
from llamaslot.kvcache.tiers.checkpoints import Checkpoints
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers
from tests.cache_settings import checkpoint_settings, tier_settings
from tests.kvcache.test_segment_tiers import run_of

N_BYTES = 5
MAX_ON_PATH = 2


class Taken:
    """Checkpoints of four sequences, with room for `n` of them in RAM."""

    def __init__(self, n: int, *, max_on_path: int = 32) -> None:
        self.tree = RadixTree()
        size = CheckpointSize(N_BYTES)
        settings = tier_settings(
            ram_bytes=1000,
            disk_bytes=1000,
            segment_size=SegmentSize(0, 1),
            segment_tokens=64,
            n_slots=4,
            checkpoints=checkpoint_settings(
                kind=StateKind.RECURRENT, size=size, ram_bytes=n * N_BYTES, on_path=max_on_path
            ),
        )
        self.tiers = SegmentTiers(self.tree, settings)
        sequences = Sequences(self.tree, settings)
        self.checkpoints = Checkpoints(self.tree, sequences, settings.checkpoints, self.tiers)

    def take(self, seq: int, *tokens: int) -> Checkpoint:
        """Extend the path of a sequence, and take a checkpoint at its end."""
        self.extend(seq, *tokens)
        taken = self.checkpoints.take(seq)
        assert taken is not None
        return taken

    def extend(self, seq: int, *tokens: int) -> None:
        if self.tree.end_node(seq) is None:
            self.tree.hold(seq, "")
        self.tree.extend(seq, run_of(tokens))

    def start_writing(self, checkpoint: Checkpoint) -> None:
        self.tiers.transition(checkpoint, SegmentEvent.QUEUE)
        self.tiers.transition(checkpoint, SegmentEvent.WRITE)

    def write(self, checkpoint: Checkpoint) -> None:
        self.start_writing(checkpoint)
        self.tiers.transition(checkpoint, SegmentEvent.WRITTEN)

    def pin(self, checkpoint: Checkpoint, why: str) -> None:
        match why:
            case "restore":
                self.checkpoints.pending_restores[3] = checkpoint
            case "load":
                self.tiers.load_pins["a waiting request"] = frozenset({checkpoint})
            case "write":
                self.start_writing(checkpoint)
            case "read":
                self.write(checkpoint)
                self.tiers.transition(checkpoint, SegmentEvent.EVICT_RAM)
                self.tiers.transition(checkpoint, SegmentEvent.READ)

    def left(self, *checkpoints: Checkpoint) -> list[bool]:
        """Which of these are in RAM; the others must not be."""
        left = [each.state.uses_ram for each in checkpoints]
        assert sum(left) == len(self.tiers.checkpoints)
        return left


PINS = pytest.mark.parametrize("why", ["restore", "load", "write", "read"])


@PINS
def test_a_checkpoint_that_is_about_to_be_used_is_not_evicted_for_another_one(why: str) -> None:
    """Although it was used least recently; and nothing is evicted if room cannot be made."""
    taken = Taken(2)
    pinned, other = taken.take(0, 1), taken.take(1, 2)
    taken.pin(pinned, why)
    assert not taken.checkpoints.evict_for(2 * N_BYTES)
    assert taken.left(pinned, other) == [True, True]
    assert taken.checkpoints.evict_for(N_BYTES)
    assert taken.left(pinned, other) == [True, False]


@PINS
def test_a_checkpoint_that_is_about_to_be_used_stays_though_memory_is_short(why: str) -> None:
    taken = Taken(2)
    pinned, other = taken.take(0, 1), taken.take(1, 2)
    taken.pin(pinned, why)
    taken.checkpoints.keep_budget(0.0)
    assert taken.left(pinned, other) == [True, False]
    assert taken.tiers.checkpoints.capacity == N_BYTES


def test_of_checkpoints_that_are_all_deepest_those_on_disk_too_are_evicted_first() -> None:
    """Although they were used later."""
    taken = Taken(2)
    older, on_disk = taken.take(0, 1), taken.take(1, 2)
    taken.write(on_disk)
    assert taken.checkpoints.evict_for(N_BYTES)
    assert taken.left(older, on_disk) == [True, False]
    assert on_disk.state is SegmentState.DISK


def test_checkpoints_above_deeper_ones_are_evicted_before_those_that_are_on_disk_too() -> None:
    """Although they were used later."""
    taken = Taken(3)
    on_disk = taken.take(0, 1)
    taken.write(on_disk)
    above, deepest = taken.take(1, 2), taken.take(1, 3)
    assert taken.checkpoints.evict_for(N_BYTES)
    assert taken.left(on_disk, above, deepest) == [True, False, True]


def test_a_fork_is_evicted_no_sooner_than_the_deepest_of_a_path() -> None:
    """There are deeper ones than the fork, but it is the only one from which new paths can begin."""
    taken = Taken(4)
    oldest = taken.take(0, 9)
    fork = taken.take(1, 1, 2)
    taken.extend(2, 1, 2)
    deepest = [taken.take(1, 3), taken.take(2, 4)]
    assert fork.is_fork
    assert taken.checkpoints.evict_for(N_BYTES)
    assert taken.left(oldest, fork, *deepest) == [False, True, True, True]


def test_nothing_is_evicted_if_what_is_redundant_leaves_no_room() -> None:
    taken = Taken(4)
    oldest, above, deepest, on_disk = taken.take(0, 9), taken.take(1, 1), taken.take(1, 2), taken.take(2, 7)
    taken.write(on_disk)
    assert not taken.checkpoints.evict_for(3 * N_BYTES, only_redundant=True)
    assert taken.left(oldest, above, deepest, on_disk) == [True, True, True, True]
    assert taken.checkpoints.evict_for(2 * N_BYTES, only_redundant=True)
    assert taken.left(oldest, above, deepest, on_disk) == [True, False, True, False]


def test_of_a_path_with_too_many_the_one_whose_neighbours_are_closest_is_evicted() -> None:
    taken = Taken(9, max_on_path=2)
    path = [taken.take(0, *range(at, at + 10)) for at in (0, 10, 20)]
    assert taken.left(*path) == [False, True, True]


def test_of_a_path_with_too_many_a_fork_is_evicted_only_if_nothing_else_can_be() -> None:
    taken = Taken(9, max_on_path=2)
    fork = taken.take(0, *range(10))
    taken.extend(1, *range(10), 99)
    middle, deepest = taken.take(0, *range(10, 20)), taken.take(0, *range(20, 30))
    assert taken.left(fork, middle, deepest) == [True, False, True]
    taken.extend(2, *range(30), 99)
    last = taken.take(0, *range(30, 40))
    assert taken.left(fork, deepest, last) == [False, True, True], "both were forks: the older one is evicted"


@PINS
@pytest.mark.parametrize("are_forks", [False, True])
def test_of_a_path_with_too_many_none_is_evicted_that_is_about_to_be_used(why: str, are_forks: bool) -> None:
    """What is being read does not count, since there is nothing yet that could be evicted."""
    taken = Taken(9, max_on_path=2)
    pinned = taken.take(0, *range(10))
    middle = taken.take(0, *range(10, 20))
    if are_forks:
        taken.extend(1, *range(10), 99)
        taken.extend(2, *range(20), 99)
    taken.pin(pinned, why)
    deepest = taken.take(0, *range(20, 30))
    assert taken.left(pinned, middle, deepest) == [True, why == "read", True]
    taken.take(0, *range(30, 40))
    assert pinned.state.uses_ram
