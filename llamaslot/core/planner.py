"""Building the plan of one step on a sketch of the cells, leaving every state alone.

1. Clear what is broken or belongs to nobody.
2. Admit queued requests in the order of their arrival, each to the slot that shares most with it.
3. Grant tokens, oldest request first: evict idle cells for them, then preempt the youngest.
4. Where all that runs is decoding, say for how many steps nothing will have to be decided, and make room for some.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llamaslot.core.backend import Run
from llamaslot.core.chunking import ChunkSizer
from llamaslot.core.request import Request
from llamaslot.core.settings import SchedulerSettings
from llamaslot.core.slots import Slot, SlotState
from llamaslot.core.step import Claim, StepPlan, Trim, Work

_HEADROOM = 64
"""Cells that must be left for a newcomer's generation beside the running requests when it is admitted."""
_ROOM_AHEAD = 32
"""Idle cells taken at once for steps ahead: more lose prefixes early, fewer ask for a plan more often."""


class Planner:
    """Builds one plan. `queue` is in the order of arrival; of `suspects` only the oldest gets work."""

    def __init__(
        self,
        settings: SchedulerSettings,
        slots: Sequence[Slot],
        queue: Sequence[Request],
        suspects: Collection[str],
        chunks: ChunkSizer,
    ) -> None:
        self._settings = settings
        self._slots = slots
        self._queue = queue
        self._suspects = suspects
        self._chunks = chunks
        self._plan = StepPlan()
        self._held = {slot.id: len(slot.history) for slot in slots}
        self._trims: dict[int, int] = {}
        self._running = sorted((s.request for s in slots if s.request), key=lambda r: r.arrival)
        self._at = {slot.request.id: slot for slot in slots if slot.request}
        self._evictable = sorted((s for s in slots if s.state is SlotState.IDLE), key=lambda s: s.last_used)

    def plan(self) -> StepPlan:
        """The plan; empty when nothing can be done now."""
        self._clear_unwanted()
        suspects = [r for r in self._running if r.id in self._suspects]
        if suspects:
            self._grant(suspects[:1])
        else:
            self._admit()
            self._grant(list(self._running))
            self._plan.n_ahead = self._plan_ahead()
        self._plan.trims = [Trim(self._slots[i], keep) for i, keep in sorted(self._trims.items())]
        self._plan.work.sort(key=lambda work: work.run.seq)
        return self._plan

    def _clear_unwanted(self) -> None:
        """Clear broken sequences, and private KV whose request is gone."""
        waiting = {request.id for request in self._queue}
        for slot in self._slots:
            orphaned = slot.private_to and slot.state is SlotState.IDLE and slot.private_to not in waiting
            if slot.broken or orphaned:
                self._trim(slot, 0)

    def _trim(self, slot: Slot, keep: int) -> None:
        self._trims[slot.id] = keep
        self._held[slot.id] = keep

    def _admit(self) -> None:
        free = [s for s in self._slots if s.state is not SlotState.RUNNING]
        for request in self._queue:
            pinned = request.submit.id_slot
            choices = [s for s in free if pinned in (-1, s.id)]
            if not choices:
                if not free:
                    return
                continue
            if not self._fits_beside_running(request):
                return
            slot, keep = self._choose(request, choices)
            free.remove(slot)
            if slot in self._evictable:
                self._evictable.remove(slot)
            if keep < len(slot.history) or slot.broken:
                self._trim(slot, keep)
            self._plan.claims.append(Claim(request, slot, keep))
            self._running.append(request)
            self._at[request.id] = slot
        self._running.sort(key=lambda r: r.arrival)

    def _fits_beside_running(self, request: Request) -> bool:
        if not self._settings.unified or not self._running:
            return True
        promised = sum(max(len(r.known), self._held[self._at[r.id].id]) for r in self._running)
        remaining = request.n_remaining
        headroom = _HEADROOM if remaining is None else min(_HEADROOM, remaining)
        return promised + len(request.known) + headroom <= self._settings.n_ctx

    def _choose(self, request: Request, choices: list[Slot]) -> tuple[Slot, int]:
        """The slot to run in and the tokens to keep there.

        Longest match first, ties to the least recently used; a slot of which more than half would be cut only
        when no empty one is left.
        """
        matches = {s.id: self._match(request, s) for s in choices}
        kept = [s for s in choices if matches[s.id] and 2 * matches[s.id] >= len(s.history)]
        empty = [s for s in choices if self._held[s.id] == 0]
        candidates = (kept or empty) if empty else choices
        best = max(candidates, key=lambda s: (matches[s.id], -s.last_used, -s.id))
        return best, matches[best.id]

    def _match(self, request: Request, slot: Slot) -> int:
        if not self._settings.reuse or self._trims.get(slot.id) == 0:
            return 0
        return slot.match(request)

    def _grant(self, requests: list[Request]) -> None:
        """Hand out this step's tokens, oldest request first, making room for each."""
        pending = {r.id: len(r.known) - self._held[self._at[r.id].id] for r in requests}
        n_decoding = sum(1 for n in pending.values() if n == 1)
        chunk = self._chunks.limit(n_decoding)
        for request in requests:
            if request.id not in self._at:
                continue
            wanted = pending[request.id]
            if wanted > 1:
                wanted = min(wanted, chunk)
            granted = self._make_room(wanted, request) if wanted else 0
            if granted == 0:
                continue
            if pending[request.id] > 1:
                chunk -= granted
            slot = self._at[request.id]
            start = self._held[slot.id]
            complete = granted == pending[request.id]
            run = Run(
                seq=slot.id,
                start=start,
                tokens=request.known.view(start, start + granted),
                output=complete and request.wants_tokens,
            )
            self._held[slot.id] += granted
            self._plan.work.append(Work(request, run))

    def _make_room(self, wanted: int, request: Request) -> int:
        """Cells that `request` gets now, at most `wanted`; 0 if it had to be preempted itself."""
        if not self._settings.unified:
            return wanted
        while True:
            free = self._settings.n_ctx - sum(self._held.values())
            free += self._evict(wanted - free)
            if free > 0:
                return min(wanted, free)
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is request:
                return 0

    def _plan_ahead(self) -> int:
        """How many steps may follow unasked: each computes what the one before sampled, and only the last may reach
        a limit. Takes up to `_ROOM_AHEAD` idle cells for them.

        A stop string is looked for on the loop, and a sampler that this step makes is known there only when it is
        committed: such requests go step by step.
        """
        work = self._plan.work
        requests = [each.request for each in work]
        if not work or not all(each.run.output and len(each.run.tokens) == 1 for each in work):
            return 0
        if any(request.sampler is None or request.submit.stop for request in requests):
            return 0
        left = [self._settings.n_ctx_slot - len(request.known) for request in requests]
        left += [n for request in requests if (n := request.n_remaining) is not None]
        n_ahead = min(left) - 1
        if self._settings.unified:
            free = self._settings.n_ctx - sum(self._held.values())
            if not self._plan.preempted:
                free += self._evict(min(n_ahead * len(work), max(len(work), _ROOM_AHEAD)) - free)
            n_ahead = min(n_ahead, free // len(work))
        return n_ahead

    def _evict(self, n: int) -> int:
        """Take up to `n` cells from idle slots, least recently used first."""
        taken = 0
        for slot in self._evictable:
            if taken >= n:
                break
            held = self._held[slot.id]
            cut = min(held, n - taken) if self._settings.reuse else held
            if cut:
                self._trim(slot, held - cut)
                taken += cut
        return taken

    def _preempt(self, request: Request) -> None:
        slot = self._at.pop(request.id)
        self._running.remove(request)
        claim = next((c for c in self._plan.claims if c.request is request), None)
        if claim is not None:
            self._plan.claims.remove(claim)
        else:
            self._plan.preempted.append(request)
        self._evictable.append(slot)
