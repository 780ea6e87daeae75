"""Which waiting request may run next, and in which slot.

A request waits while no slot is free, while what it needs does not fit beside what the running ones still need,
and while a running request computes a prefix that it can share (its *leader*). Nothing is stored about leaders:
each plan asks anew what the running requests are about to compute, so whatever ends a leader also frees who waited
on it, and the first of them to be admitted leads the others.

The order: what was preempted, by arrival; then what was overtaken too often and choices whose first token came with
another's, by arrival; then the longest known prefix first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamaslot.base.stats import Miss
from llamaslot.base.tokens import WIDTH, packed
from llamaslot.kvcache.ledger import Ledger
from llamaslot.kvcache.seen import Seen
from llamaslot.kvcache.tree import Match, Tree
from llamaslot.scheduler.request import Request, RequestEvent
from llamaslot.scheduler.settings import SchedulerSettings
from llamaslot.scheduler.slots import Slot

PATIENCE = 8
"""Later requests that may be admitted before one that could run too."""

_LEAST_EXPECTED = 64
"""Tokens that a request without a limit of its own is expected to generate still, whatever others did."""
_WEIGHT = 0.1
"""Share of the newest length in the mean."""
_WINDOW = 64
"""Requests that have not started yet, from the oldest on, among which the longest known prefix goes first."""


class Admission:
    """The queue, and what it takes to leave it."""

    def __init__(self, settings: SchedulerSettings, ledger: Ledger, slots: Sequence[Slot]) -> None:
        self._settings = settings
        self._ledger = ledger
        self._slots = slots
        self._promised = Tree()
        """What the running requests hold or are about to compute, by slot."""
        self._mean_generated = 0.0
        self._seen = Seen()
        self.queue: list[Request] = []
        """Waiting requests by arrival."""
        self.n_waits = 0
        """Requests that waited for what another one computed."""

    def enqueue(self, request: Request) -> None:
        """Let a request wait, in the order of arrival."""
        self.queue.append(request)
        self.queue.sort(key=lambda r: r.arrival)
        self._ledger.touch(self._found(request))

    def renew(self) -> None:
        """Note that what waiting requests would find is still wanted."""
        self._ledger.touch(*map(self._found, self.queue))

    def withdraw(self, request: Request) -> None:
        """Take a request from the queue."""
        self.queue.remove(request)

    def admit(self, running: Sequence[Request], now: float) -> list[Request]:
        """Move every request that may run now from the queue into a slot; `running` are those that run already."""
        free = [slot for slot in self._slots if slot.request is None]
        admitted: list[Request] = []
        passed: list[Request] = []
        for request in self._ordered(running, free) if free else ():
            choices = _choices(request, free)
            if not choices:
                passed.append(request)
            elif self._wait_for_leader(request, [*running, *admitted], choices):
                continue
            elif self._fits(request, [*running, *admitted]):
                self._start(request, choices, now)
                free.remove(self._slots[request.slot_id])
                admitted.append(request)
            elif request.has_started or request.n_overtaken >= PATIENCE:
                break
            else:
                passed.append(request)
        for request in passed:
            pinned = request.submit.id_slot
            request.n_overtaken += sum(
                other.arrival > request.arrival and pinned in (-1, other.slot_id) for other in admitted
            )
        return admitted

    def release(self, request: Request) -> None:
        """A request leaves its slot, whose sequence keeps what was computed."""
        if not request.is_private:
            computed = packed(request.known.view(0, self._ledger.length(request.slot_id)))
            self._seen.note(request.space, computed, request.n_known)
        slot = self._slots[request.slot_id]
        slot.release()
        self._promised.release(slot.id)
        self._ledger.unpin(slot.id)

    def note_length(self, n_generated: int) -> None:
        """A request ended after so many tokens."""
        self._mean_generated += _WEIGHT * (n_generated - self._mean_generated)

    def siblings(self, request: Request) -> list[Request]:
        """The waiting requests of the same group that know exactly what `request` does and want a first token."""
        known = request.known.view()
        return [
            other
            for other in self.queue
            if _are_together(request, other)
            and other.sampler is None
            and other.wants_tokens
            and len(other.known) == len(known)
            and np.array_equal(other.known.view(), known)
        ]

    def _found(self, request: Request) -> Match:
        return self._ledger.tree.match(request.space, request.prefix)

    def _ordered(self, running: Sequence[Request], free: Sequence[Slot]) -> list[Request]:
        """The queue in the order in which to try: those that cannot run now keep no place among the newest."""
        resumed: list[Request] = []
        due: list[Request] = []
        fresh: list[Request] = []
        blocked: list[Request] = []
        for request in self.queue:
            choices = _choices(request, free)
            if request.slot_id >= 0:
                resumed.append(request)
            elif request.has_started or request.n_overtaken >= PATIENCE:
                due.append(request)
            elif not choices:
                blocked.append(request)
            elif len(fresh) < _WINDOW and not self._wait_for_leader(request, running, choices):
                fresh.append(request)
        fresh.sort(key=lambda r: (-self._ledger.known(r.space, r.prefix), r.arrival))
        return [*resumed, *due, *fresh, *blocked]

    def _start(self, request: Request, choices: Sequence[int], now: float) -> None:
        self.queue.remove(request)
        is_first = request.slot_id < 0
        n_copied = self._ledger.counts.n_copied_tokens
        request.n_reused = self._ledger.known(request.space, request.prefix)
        if is_first and not request.is_private:
            request.n_known = request.n_reused
            request.miss = self._miss(request)
        request.slot_id, n_held = self._ledger.claim(choices, request.space, request.prefix)
        if is_first:
            request.n_found = n_held
            request.n_copied = self._ledger.counts.n_copied_tokens - n_copied
        self._slots[request.slot_id].claim(request)
        request.handle(RequestEvent.ADMIT, now)
        self._promised.hold(request.slot_id, self._promised.match(request.space, b""))
        self._promised.extend(request.slot_id, packed(request.known.view()))

    def _miss(self, request: Request) -> Miss:
        """Why no more of a prompt is known."""
        n = request.n_known
        if n * WIDTH == len(request.prefix):
            return ""
        if self._seen.continues(request.space, request.prefix, n):
            return "evicted"
        if n < self._settings.min_shared:
            return "salted" if request.space else "cold"
        if not self._ledger.branches(request.space, request.prefix, n):
            return ""
        return "changed" if request.prompt.is_reply_edited else "diverged"

    def _wait_for_leader(self, request: Request, running: Sequence[Request], choices: Sequence[int]) -> bool:
        """Let a request wait while a running one is about to compute a part of its prompt; whether it does.

        What counts is how much of it the leader had to compute when it was admitted, however little of that is
        left. Who has waited for a prefix goes on waiting for it when another one leads.
        """
        if not (self._settings.shares or self._settings.copies):
            return False
        promised = self._promised.match(request.space, request.prefix)
        known = self._ledger.known(request.space, request.prefix)
        if self._settings.copies:
            own = max(self._ledger.tree.shared(self._found(request), choices).values())
            if not self._ledger.copy_pays(max(promised.n, known) - own):
                return False
            if promised.n <= known:
                return self._ledger.waits_for_copy(choices, request.space, request.prefix)
        if any(_are_together(leader, request) and leader.sampler is None for leader in running):
            return True
        if promised.n <= known:
            return False
        reused = min(self._reused_in(slot) for slot in self._promised.holders(promised.node))
        if promised.n - reused > self._settings.min_shared:
            self.n_waits += not request.awaits
            request.awaits = max(request.awaits, promised.n)
        return min(promised.n, request.awaits) > known

    def _reused_in(self, slot_id: int) -> int:
        request = self._slots[slot_id].request
        assert request is not None
        return request.n_reused

    def _fits(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether a request's prompt and what it is expected to generate fit beside what the running ones need.

        Idle cells count as free, those of the request's own prefix excepted.
        """
        if not self._settings.unified or not running:
            return True
        ledger = self._ledger
        promised = sum(len(r.known) - ledger.length(r.slot_id) + self._expected(r) for r in running)
        needed = len(request.known) + self._expected(request)
        if self._settings.shares:
            match = ledger.tree.match(request.space, request.prefix)
            needed += ledger.tree.n_idle(match) - match.n
        return ledger.n_pinned + promised + needed <= self._settings.n_ctx

    def _expected(self, request: Request) -> int:
        """Tokens that a request is expected to generate still."""
        expected = max(_LEAST_EXPECTED, round(self._mean_generated) - request.n_generated)
        expected = min(expected, self._settings.n_ctx_slot - len(request.known))
        remaining = request.n_remaining
        return expected if remaining is None else min(remaining, expected)


def _choices(request: Request, free: Sequence[Slot]) -> list[int]:
    """The free slots that a request may run in."""
    return [slot.id for slot in free if request.submit.id_slot in (-1, slot.id)]


def _are_together(a: Request, b: Request) -> bool:
    """Whether two requests were asked for as choices of one prompt."""
    return bool(a.submit.group) and (a.submit.group, a.space) == (b.submit.group, b.space)
