"""The tree of segments against an oracle that knows no tree: segments, each with the tokens that lead to it."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llamaslot.base.model import SegmentSize
from llamaslot.core.node import packed
from llamaslot.core.segments import Segment, SegmentTree
from tests.conftest import LONG

SPACES = st.sampled_from(["", "salt"])
SOME = st.lists(st.integers(1, 2), min_size=1, max_size=14).map(tuple)
HEADER = 3
LARGEST = 4
Path = tuple[int, ...]


def run_of(tokens: Path) -> bytes:
    return packed(np.array(tokens, dtype=np.int32))


def common(a: Path, b: Path) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass
class Known:
    """What the oracle knows of a segment: the whole path to its end."""

    segment: Segment
    space: str
    path: Path
    start: int
    last_used: int

    def has(self, space: str, tokens: Path, position: int) -> bool:
        """Whether it has the KV of this position of some tokens."""
        return (
            self.space == space
            and self.start <= position < len(self.path)
            and position < len(tokens)
            and self.path[: position + 1] == tokens[: position + 1]
        )

    def is_used_by(self, space: str, tokens: Path) -> bool:
        return self.has(space, tokens, self.start)


class SegmentsMachine(RuleBasedStateMachine):
    """Paths are stored, used and forgotten; after every rule the tree says what the oracle says."""

    @initialize(capacity=st.sampled_from([12, 40, 100, 10_000]))
    def start(self, capacity: int) -> None:
        self.capacity = capacity
        self.segments = SegmentTree(capacity, SegmentSize(HEADER, 1), LARGEST)
        self.known: dict[int, Known] = {}
        self.now = 0

    def stored(self, space: str, tokens: Path, position: int) -> bool:
        return any(known.has(space, tokens, position) for known in self.known.values())

    def note_use(self, space: str, tokens: Path) -> None:
        self.now += 1
        for known in self.known.values():
            if known.is_used_by(space, tokens):
                known.last_used = self.now

    def take_discarded(self) -> list[Known]:
        return [self.known.pop(number) for number in self.segments.take_discarded()]

    @rule(space=SPACES, tokens=SOME, share=st.floats(0, 1))
    def look(self, space: str, tokens: Path, share: float) -> None:
        start = int(share * len(tokens))
        found = self.segments.stored(space, run_of(tokens), start)
        at = start
        for each in found:
            known = self.known[each.segment.id]
            assert each.start == at < each.end
            assert all(known.has(space, tokens, position) for position in range(each.start, each.end))
            at = each.end
        assert not self.stored(space, tokens, at) or at == len(tokens)

    @rule(space=SPACES, tokens=SOME, share=st.sampled_from([0, 0, 0.5]))
    def store(self, space: str, tokens: Path, share: float) -> None:
        """All that is missing from some position on, which must be no more than that, or open."""
        start = int(share * len(tokens))
        ranges = self.segments.missing(space, run_of(tokens), start)
        told = {position for a, b in ranges for position in range(a, b)}
        missing = {i for i in range(start, len(tokens)) if not self.stored(space, tokens, i)}
        assert missing <= told
        assert sum(b - a for a, b in ranges) == len(told)
        assert all(0 < b - a <= LARGEST for a, b in ranges)
        for each in told - missing:
            (again,) = (known for known in self.known.values() if known.has(space, tokens, each))
            assert again.path == tokens[: len(again.path)], "a shared segment would be stored again"
            assert len(again.path) - again.start < LARGEST
            assert again.start in {a for a, _ in ranges}, "only a part of a segment is replaced"
        if not ranges:
            return
        used = [known for known in self.known.values() if known.is_used_by(space, tokens)]
        kept = [k for k in used if not any(a <= k.start and len(k.path) <= b for a, b in ranges)]
        n_bytes = sum(known.segment.n_bytes for known in kept) + sum(HEADER + b - a for a, b in ranges)
        fits = self.segments.fits(space, run_of(tokens), ranges)
        assert fits == (n_bytes <= self.capacity)
        for a, b in ranges if fits else ():
            self.add(space, tokens[:b], a)

    def add(self, space: str, path: Path, start: int) -> None:
        self.note_use(space, path)
        in_front = {known.segment.id for known in self.known.values() if known.is_used_by(space, path[:start])}
        segment = self.segments.add(space, run_of(path), start)
        gone = self.take_discarded()
        assert in_front <= self.known.keys(), "what leads to it was given up for it"
        assert segment.id not in self.known
        replaced = [each for each in gone if each.space == space and each.path == path[: len(each.path)]]
        replaced = [each for each in replaced if each.start >= start]
        for each in gone:
            if each in replaced:
                continue
            lost = len(each.path) - each.start
            assert all(each.last_used <= other.last_used for other in self.known.values()), "not the oldest"
            assert lost > 0
        self.known[segment.id] = Known(segment, space, path, start, self.now)

    @rule(space=SPACES, tokens=SOME)
    def touch(self, space: str, tokens: Path) -> None:
        self.segments.touch(space, run_of(tokens))
        self.note_use(space, tokens)

    @rule(space=SPACES)
    def forget(self, space: str) -> None:
        self.segments.forget(space)
        assert all(known.space == space for known in self.take_discarded())
        assert all(known.space != space for known in self.known.values())

    @rule()
    def clear(self) -> None:
        self.segments.clear()
        self.take_discarded()
        assert not self.known

    @precondition(lambda self: hasattr(self, "segments"))
    @invariant()
    def agree(self) -> None:
        self.segments.check()
        assert len(self.segments) == len(self.known)
        assert self.segments.n_bytes == sum(HEADER + len(k.path) - k.start for k in self.known.values())
        assert self.segments.n_bytes <= self.capacity
        positions = [(k.space, k.path[: i + 1]) for k in self.known.values() for i in range(k.start, len(k.path))]
        assert self.segments.n_tokens == len(positions) == len(set(positions)), "stored twice"


SegmentsMachine.TestCase.settings = settings(
    max_examples=2000 if LONG else 100, stateful_step_count=60, deadline=None
)
TestSegments = SegmentsMachine.TestCase


def test_a_shared_head_is_stored_once() -> None:
    held = SegmentTree(10**9, SegmentSize(216, 8204))
    head = tuple(range(8000))
    for i in range(50):
        path = (*head, *(10_000 + 100 * i + j for j in range(40)))
        for start, end in held.missing("", run_of(path), 0):
            assert held.add("", run_of(path[:end]), start) is not None
    n_distinct = 8000 + 50 * 40
    assert held.n_tokens == n_distinct
    assert held.n_bytes <= 1.05 * 8204 * n_distinct


def test_a_segment_that_is_not_full_gives_way_to_a_longer_one() -> None:
    held = SegmentTree(10**9, SegmentSize(0, 1))
    held.add("", run_of(tuple(range(100))), 0)
    assert held.missing("", run_of(tuple(range(130))), 100) == [(0, 130)]
    held.add("", run_of(tuple(range(130))), 0)
    assert (len(held), held.take_discarded()) == (1, [0])


def test_a_part_of_a_segment_cannot_be_replaced() -> None:
    held = SegmentTree(10**9, SegmentSize(0, 1))
    held.add("", run_of(tuple(range(100))), 0)
    with pytest.raises(AssertionError, match="covers a part"):
        held.add("", run_of(tuple(range(120))), 50)
