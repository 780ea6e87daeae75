"""Upload queue: segments in RAM that are to be uploaded to the remote tier, and when.

    full segment, fork                      due at once
    partial segment                         due after `PARTIAL_DELAY_S`: the next turn usually replaces it sooner
    checkpoint that `is_worth_storing`      the same: the next turn usually takes a deeper one sooner
    other checkpoints                       never due
    segment of a private request            never due

A segment that leaves RAM leaves the queue.
"""

from __future__ import annotations

from collections.abc import Iterable

from llamaslot.base.namespaces import is_private
from llamaslot.kvcache.nodes import Checkpoint, Segment
from llamaslot.kvcache.tiers import pacing

RETRY_UPLOAD_S = 1.0
"""Delay before a retry if earlier KV of the same block is not in RAM yet: it is usually offloaded soon."""
_MAX_TRIES = 5
"""Most tries of such a segment. After them it is queued again only at its next use."""
OFFER_AGAIN_S = 600.0
"""Time after an upload from which the next use queues the segment again: the store may have lost it meanwhile, and
if not, the upload extends its TTL.
"""
_MAX_UPLOADS = 2
"""Most uploads at a time. Few, so that the next segment is chosen as late as possible."""


class UploadQueue:
    """Segments to upload, of `max_tokens` each if they are full. Empty without a remote tier."""

    def __init__(self, max_tokens: int, *, is_on: bool) -> None:
        self.is_on = is_on
        self._max_tokens = max_tokens
        self._waiting: dict[Segment, None] = {}
        self._sending: dict[int, Segment] = {}
        self._stored: dict[Segment, float] = {}
        """Segments in RAM that the store has, and the time from which their next use queues them again."""
        self._now = 0.0
        self._postponed: dict[Segment, tuple[int, float]] = {}
        """Segments of incomplete blocks, with the number of tries and the time of the next one."""
        self._paused_until = 0.0
        self._is_flushing = False

    @property
    def due_at(self) -> float | None:
        """Time of the next upload; None if there is none, or if `_MAX_UPLOADS` are in progress."""
        if not self._waiting or len(self._sending) >= _MAX_UPLOADS:
            return None
        if self._now < self._paused_until:
            # A shortcut: all segments in RAM may be waiting, and every step asks for this.
            return self._paused_until
        return max(self._paused_until, min(map(self._due_at, self._waiting)))

    @property
    def is_sending(self) -> bool:
        """True while a segment is being uploaded."""
        return bool(self._sending)

    def put(self, segments: Iterable[Segment]) -> None:
        """Queue those of the segments that are in RAM, unless the store has them."""
        for segment in segments if self.is_on else ():
            is_stored = self._now < self._stored.get(segment, 0.0) or segment.number in self._sending
            if segment.state.is_loadable and not is_stored and self._may_send(segment):
                self._stored.pop(segment, None)
                self._waiting.setdefault(segment)

    def remove(self, segment: Segment) -> None:
        """Forget a segment that left RAM."""
        self._waiting.pop(segment, None)
        self._postponed.pop(segment, None)
        self._stored.pop(segment, None)

    def flush(self) -> None:
        """Make every upload due at once: the server is shutting down."""
        self._is_flushing = True

    def pause(self, until: float) -> None:
        """Upload nothing until a time, because the store does not answer; it may also have lost its content."""
        self._paused_until = max(until, self._paused_until)
        self.offer_all_again()

    def offer_all_again(self) -> None:
        """Queue every segment again at its next use, because the store may have lost its content."""
        self._stored.clear()

    def take_due(self, now: float) -> list[Segment]:
        """Return the segments to upload now; each must be reported to `on_uploaded` or `postpone`."""
        self._now = now
        taken: list[Segment] = []
        while self._waiting and now >= self._paused_until and len(self._sending) < _MAX_UPLOADS:
            segment = next((each for each in self._waiting if self._due_at(each) <= now), None)
            if segment is None:
                break
            del self._waiting[segment]
            if self._may_send(segment):
                self._sending[segment.number] = segment
                taken.append(segment)
        return taken

    def on_uploaded(self, number: int, now: float, *, ok: bool) -> None:
        """Handle the end of an upload; after a failure nothing is uploaded for `RETRY_DELAY_S`."""
        segment = self._sending.pop(number)
        if not ok:
            self.pause(now + pacing.RETRY_DELAY_S)
            self.put([segment])
        elif segment.state.is_loadable:
            self._postponed.pop(segment, None)
            self._stored[segment] = now + OFFER_AGAIN_S

    def postpone(self, segment: Segment, now: float) -> None:
        """Retry later, because earlier KV of the same block is not in RAM."""
        del self._sending[segment.number]
        n_tries = self._postponed.get(segment, (0, 0.0))[0] + 1
        if n_tries < _MAX_TRIES:
            self._postponed[segment] = n_tries, now + RETRY_UPLOAD_S
            self._waiting[segment] = None
        else:
            # Its next use queues it again.
            self._postponed.pop(segment, None)

    def _due_at(self, segment: Segment) -> float:
        at = pacing.due_at(segment, self._max_tokens, lambda _: self._is_flushing)
        if self._is_flushing or segment not in self._postponed:
            return at
        return max(at, self._postponed[segment][1])

    def check(self, in_ram: set[Segment]) -> None:
        """Verify that waiting and stored segments are in RAM; raises `AssertionError`."""
        assert self._waiting.keys() <= in_ram
        assert self._stored.keys() <= in_ram
        assert self._stored.keys().isdisjoint(self._waiting)

    def _may_send(self, segment: Segment) -> bool:
        if is_private(segment.namespace):
            return False
        return not isinstance(segment, Checkpoint) or segment.is_worth_storing
