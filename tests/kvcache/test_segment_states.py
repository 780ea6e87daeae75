"""A segment goes through its states by the table alone; an illegal event raises and changes nothing."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from llamaslot.base.errors import IllegalTransitionError
from llamaslot.kvcache.nodes import SEGMENT_TABLE, Segment, SegmentEvent, SegmentState

S, E = SegmentState, SegmentEvent


EVENTS = {
    "queued": E.QUEUE,
    "dequeued": E.UNQUEUE,
    "write starts": E.WRITE,
    "written": E.WRITTEN,
    "write fails": E.WRITE_FAILED,
    "read starts": E.READ,
    "read": E.READ_DONE,
    "read fails": E.READ_FAILED,
    "timed-out read fails": E.READ_FAILED,
    "after 10 s": E.READ_TIMED_OUT,
    "after 30 s": E.RETRY,
    "evicted from RAM": E.EVICT_RAM,
    "evicted from disk": E.EVICT_DISK,
    "evicted": E.EVICT_DISK,
}
"""Events by the words of docs/internals/segment-states.md."""


def in_state(state: SegmentState) -> Segment:
    return Segment(7, 2, 5, 30, now=1.0, state=state)


def attributes(segment: Segment) -> dict[str, object]:
    return {name: getattr(segment, name) for name in Segment.__slots__}


def test_the_table_is_the_one_in_the_documents() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "internals" / "segment-states.md").read_text()
    documented = {(state, E.DROP): S.DROPPED for state in S if state is not S.DROPPED}
    for state, transitions in re.findall(r"^\| ([A-Z]+) \|.*\| ([^|]*->[^|]*) \|$", text, re.MULTILINE):
        for transition in transitions.split("; "):
            words, after = transition.split(" -> ")
            documented[S[state], EVENTS[words]] = S[after]
    assert documented == SEGMENT_TABLE


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SegmentState, SegmentEvent)))
def test_a_segment_follows_its_table(state: SegmentState, event: SegmentEvent) -> None:
    segment = in_state(state)
    before = attributes(segment)
    after = SEGMENT_TABLE.get((state, event))
    if after is None:
        with pytest.raises(IllegalTransitionError, match=f"segment 7: {event.value} while {state.value}"):
            segment.handle(event)
        assert attributes(segment) == before
    else:
        assert segment.handle(event) is state
        assert attributes(segment) == before | {"state": after}


def test_a_dropped_segment_never_comes_back() -> None:
    assert not [pair for pair in SEGMENT_TABLE if pair[0] is S.DROPPED]


def test_every_state_is_reached_from_a_new_segment() -> None:
    """One that was offloaded starts in RAM, one that was found at the start on disk."""
    reached, rest = set(), [S.RAM, S.DISK]
    while rest:
        state = rest.pop()
        if state not in reached:
            reached.add(state)
            rest += [after for (before, _), after in SEGMENT_TABLE.items() if before is state]
    assert reached == set(SegmentState)


def test_only_an_event_of_its_tier_changes_where_the_bytes_are() -> None:
    """Segments leave RAM by eviction or drop, and enter it by a read; the same for the disk."""
    for (before, event), after in SEGMENT_TABLE.items():
        if before.is_loadable and not after.is_loadable:
            assert event in (E.EVICT_RAM, E.DROP)
        if after.is_loadable and not before.is_loadable:
            assert event is E.READ_DONE
        if before.uses_disk and not after.uses_disk:
            assert event in (E.EVICT_DISK, E.DROP, E.WRITE_FAILED)
        if after.uses_disk and not before.uses_disk:
            assert event is E.WRITE
        if event is E.DROP:
            assert after is S.DROPPED


def test_a_segment_that_is_nowhere_is_dropped() -> None:
    for state in SegmentState:
        assert (state.uses_ram or state.uses_disk) == (state is not S.DROPPED)
        assert not state.is_loadable or state.uses_ram


def test_no_segment_is_evicted_from_ram_while_it_is_read_or_written() -> None:
    assert (S.READING, E.EVICT_RAM) not in SEGMENT_TABLE
    assert (S.WRITING, E.EVICT_RAM) not in SEGMENT_TABLE
