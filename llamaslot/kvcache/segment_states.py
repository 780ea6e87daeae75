"""States of a segment: where its bytes are, and which events are legal in each state."""

from __future__ import annotations

from enum import Enum


class SegmentState(Enum):
    """Where the bytes of a segment are."""

    RAM = "in RAM"
    DIRTY = "in RAM, queued to be written"
    WRITING = "in RAM, being written"
    CLEAN = "in RAM and on disk"
    DISK = "on disk"
    READING = "on disk, being read"
    UNREADABLE = "on disk, but the last read failed"
    DROPPED = "dropped"

    @property
    def is_loadable(self) -> bool:
        """True if the bytes are in RAM now."""
        return self in _LOADABLE

    @property
    def uses_ram(self) -> bool:
        """True if it counts against the RAM budget. A read reserves its bytes at the start."""
        return self in _LOADABLE or self is SegmentState.READING

    @property
    def uses_disk(self) -> bool:
        """True if it counts against the disk budget. A write reserves its bytes at the start."""
        return self in _USES_DISK

    @property
    def is_busy(self) -> bool:
        """True while it is being read or written."""
        return self in _BUSY


class SegmentEvent(Enum):
    """Events that change the state of a segment."""

    QUEUE = "queue to be written"
    UNQUEUE = "leave the write queue"
    WRITE = "start to write"
    WRITTEN = "written"
    WRITE_FAILED = "write failed"
    READ = "start to read"
    READ_DONE = "read"
    READ_FAILED = "read failed"
    READ_TIMED_OUT = "no answer to a read"
    RETRY = "may be read again"
    EVICT_RAM = "evict from RAM"
    EVICT_DISK = "evict from disk"
    DROP = "drop everywhere"


S, E = SegmentState, SegmentEvent
_LOADABLE = frozenset({S.RAM, S.DIRTY, S.WRITING, S.CLEAN})
_BUSY = frozenset({S.WRITING, S.READING})
_USES_DISK = frozenset({S.WRITING, S.CLEAN, S.DISK, S.READING, S.UNREADABLE})

SEGMENT_TABLE: dict[tuple[SegmentState, SegmentEvent], SegmentState] = {
    (S.RAM, E.QUEUE): S.DIRTY,
    (S.RAM, E.EVICT_RAM): S.DROPPED,
    (S.DIRTY, E.UNQUEUE): S.RAM,
    (S.DIRTY, E.WRITE): S.WRITING,
    (S.DIRTY, E.EVICT_RAM): S.DROPPED,
    (S.WRITING, E.WRITTEN): S.CLEAN,
    (S.WRITING, E.WRITE_FAILED): S.RAM,
    (S.WRITING, E.EVICT_DISK): S.RAM,
    (S.CLEAN, E.EVICT_RAM): S.DISK,
    (S.CLEAN, E.EVICT_DISK): S.RAM,
    (S.DISK, E.READ): S.READING,
    (S.DISK, E.READ_FAILED): S.UNREADABLE,  # the answer to a read that had timed out
    (S.DISK, E.EVICT_DISK): S.DROPPED,
    (S.READING, E.READ_DONE): S.CLEAN,
    (S.READING, E.READ_FAILED): S.UNREADABLE,
    (S.READING, E.READ_TIMED_OUT): S.DISK,
    (S.READING, E.EVICT_DISK): S.DROPPED,
    (S.UNREADABLE, E.RETRY): S.DISK,
    (S.UNREADABLE, E.READ_FAILED): S.UNREADABLE,
    (S.UNREADABLE, E.EVICT_DISK): S.DROPPED,
    **{(state, E.DROP): S.DROPPED for state in SegmentState if state is not S.DROPPED},
}
"""Every legal transition; any other pair raises and changes nothing."""


class IllegalTransitionError(AssertionError):
    """An event that is not allowed in the segment's state: a bug, never caused by input."""
