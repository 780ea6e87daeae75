"""The scheduler: owns every request and slot, plans each step and commits what came of it.

    submit, cancel, end          between steps only
    plan() -> StepPlan           reads the state, changes nothing
    commit(plan, result) -> ...  changes the state to what the backend really did

Rules that hold at every step:
  1. Requests are admitted in the order of their arrival; only one pinned to a busy slot may be overtaken.
  2. A plan never needs more cells than there are: idle slots give up cells first (least recently used first),
     then the youngest running request is preempted. The oldest never is, so it always comes to its end.
  3. A request in a failed step is retried alone; it fails only when it fails alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamaslot.base.messages import FinishReason
from llamaslot.core.backend import Run, Status
from llamaslot.core.chunking import ChunkSizer
from llamaslot.core.request import Request, RequestEvent, RequestState
from llamaslot.core.slots import Slot, SlotEvent, SlotState
from llamaslot.core.step import Claim, StepPlan, StepResult, Trim, Work

_HEADROOM = 64
"""Cells that must be left for a newcomer's generation beside the running requests when it is admitted."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The limits that plans keep to."""

    n_slots: int
    n_ctx: int
    """Cells in the pool."""
    n_ctx_slot: int
    """Tokens that one slot may hold."""
    n_ubatch: int
    """Tokens that one step may compute; at least `n_slots`."""
    unified: bool = True
    """Whether slots share one pool; else each has `n_ctx_slot` cells of its own."""
    reuse: bool = True
    """Whether a sequence may be trimmed and continued."""
    gap_ms: float = 100.0
    """Time between two tokens of a stream that prefill beside it may use."""
    eog: frozenset[int] = frozenset()
    """Tokens that end a generation."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A request got its next token; `reason` says that it was the last one."""

    request: Request
    token: int | None
    """None where only the prompt was to be evaluated."""
    reason: FinishReason | None
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Broke:
    """A request failed alone in its step and was ended."""

    request: Request
    status: Status


class Scheduler:
    """The state of all requests and slots, owned by one event loop. Pass `now` in seconds on one clock."""

    def __init__(self, settings: SchedulerSettings) -> None:
        if settings.n_ubatch < settings.n_slots:
            raise ValueError("n_ubatch must be at least n_slots")
        self.settings = settings
        self.slots = [Slot(i) for i in range(settings.n_slots)]
        self.queue: list[Request] = []
        """Waiting requests by arrival."""
        self.chunks = ChunkSizer(n_ubatch=settings.n_ubatch, gap_ms=settings.gap_ms)
        self._clock = 0
        self.suspects: list[str] = []
        """Requests of a failed step, to be retried one by one before anything else runs."""

    @property
    def running(self) -> list[Request]:
        """Requests that hold a slot, oldest first."""
        return sorted((s.request for s in self.slots if s.request), key=lambda r: r.arrival)

    @property
    def cells_used(self) -> int:
        """Cells that the slots' histories occupy."""
        return sum(len(slot.history) for slot in self.slots)

    def submit(self, request: Request) -> None:
        """Queue a request; its prompt must be shorter than a slot's context."""
        if not 0 < request.n_prompt < self.settings.n_ctx_slot:
            raise ValueError(f"a prompt of {request.n_prompt} tokens cannot run")
        self.queue.append(request)

    def end(self, request: Request, now: float) -> None:
        """End a request in any living state; its slot keeps what was computed."""
        if request.state is RequestState.QUEUED:
            self.queue.remove(request)
        else:
            self._release(request)
        request.handle(RequestEvent.END, now)

    def plan(self) -> StepPlan:
        """What the next step should do; an empty plan means that nothing can be done now."""
        return _Planner(self).plan()

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Sampled | Broke]:
        """Let the state follow what the backend did for `plan`."""
        for request in plan.preempted:
            self._release(request)
            request.handle(RequestEvent.PREEMPT, now)
            self.queue.append(request)
        self.queue.sort(key=lambda r: r.arrival)
        trimmed = {trim.slot.id: trim.keep for trim in plan.trims}
        for slot in self.slots:
            keep = trimmed.get(slot.id)
            if keep is not None and slot.state is SlotState.RUNNING:
                slot.history.truncate(keep)
            elif keep is not None:
                slot.evict(keep)
            if keep == 0:
                slot.broken = False
        for claim in plan.claims:
            self.queue.remove(claim.request)
            claim.request.handle(RequestEvent.ADMIT, result.started)
            claim.request.slot_id = claim.slot.id
            claim.slot.claim(claim.request, claim.keep, self._tick())
        if not plan.work:
            return []
        for seq, (start, n) in result.decoded.sent.items():
            self._request_of(seq).count_computed(start, n)
        for seq, sampler in result.samplers.items():
            self._request_of(seq).sampler = sampler
        if result.decoded.status is not Status.OK:
            return self._recover(plan, result, now)
        self._observe(plan, result)
        computed = {work.request.id for work in plan.work}
        self.suspects = [s for s in self.suspects if s not in computed]
        return [s for work in plan.work if (s := self._advance(work, result, now)) is not None]

    def _advance(self, work: Work, result: StepResult, now: float) -> Sampled | None:
        request, run = work.request, work.run
        slot = self.slots[run.seq]
        slot.check(SlotEvent.EXTEND)
        slot.history.extend(run.tokens)
        if not request.wants_tokens and len(slot.history) == request.n_prompt:
            self.end(request, now)
            return Sampled(request, None, "limit")
        if not run.output:
            return None
        token = result.tokens[run.seq]
        request.add_token(token, now)
        reason: FinishReason | None = None
        truncated = False
        if token in self.settings.eog:
            reason = "eos"
        elif request.n_remaining == 0:
            reason = "limit"
        elif len(request.known) > self.settings.n_ctx_slot:
            reason, truncated = "limit", True
        if reason:
            self.end(request, now)
        return Sampled(request, token, reason, truncated)

    def _recover(self, plan: StepPlan, result: StepResult, now: float) -> list[Sampled | Broke]:
        """After a failed decode, keep what stayed applied and look for the request at fault."""
        for work in plan.work:
            slot, run = self.slots[work.run.seq], work.run
            applied = result.lengths[run.seq] - run.start
            without_logits = run.output and applied == len(run.tokens)
            if 0 <= applied <= len(run.tokens) and not without_logits:
                slot.history.extend(run.tokens[:applied])
            else:
                slot.history.truncate(0)
                slot.broken = True
        # An exact ledger cannot run out of room; should it happen all the same, idle KV is what can be given up.
        idle = [s for s in self.slots if s.state is SlotState.IDLE]
        if result.decoded.status is Status.NO_ROOM and idle:
            for slot in idle:
                slot.broken = True
            return []
        if len(plan.work) > 1:
            self.suspects = [work.request.id for work in plan.work]
            return []
        request = plan.work[0].request
        self.suspects = [s for s in self.suspects if s != request.id]
        slot = self.slots[request.slot_id]
        self.end(request, now)
        slot.broken = True
        return [Broke(request, result.decoded.status)]

    def _observe(self, plan: StepPlan, result: StepResult) -> None:
        n_prefill = sum(len(w.run.tokens) for w in plan.work if len(w.run.tokens) > 1)
        n_decoding = sum(1 for w in plan.work if len(w.run.tokens) == 1)
        self.chunks.observe(n_prefill, n_decoding, result.seconds)

    def _release(self, request: Request) -> None:
        slot = self.slots[request.slot_id]
        slot.release(self._tick())

    def _request_of(self, seq: int) -> Request:
        request = self.slots[seq].request
        if request is None:
            raise AssertionError(f"slot {seq} has no request")
        return request

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


class _Planner:
    """Builds one plan on a sketch of the cells, leaving the scheduler's state alone."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._settings = scheduler.settings
        self._held = {slot.id: len(slot.history) for slot in scheduler.slots}
        self._trims: dict[int, int] = {}
        self._running = scheduler.running
        self._at = {request.id: scheduler.slots[request.slot_id] for request in self._running}
        self._evictable = sorted(
            (s for s in scheduler.slots if s.state is SlotState.IDLE), key=lambda s: s.last_used
        )
        self._plan = StepPlan()

    def plan(self) -> StepPlan:
        self._clear_unwanted()
        suspects = [r for r in self._running if r.id in self._scheduler.suspects]
        if suspects:
            self._grant(suspects[:1])
        else:
            self._admit()
            self._grant(list(self._running))
        slots = self._scheduler.slots
        self._plan.trims = [Trim(slots[i], keep) for i, keep in sorted(self._trims.items())]
        self._plan.work.sort(key=lambda work: work.run.seq)
        return self._plan

    def _clear_unwanted(self) -> None:
        """Clear broken sequences, and private KV whose request is gone."""
        waiting = {request.id for request in self._scheduler.queue}
        for slot in self._scheduler.slots:
            orphaned = slot.private_to and slot.state is SlotState.IDLE and slot.private_to not in waiting
            if slot.broken or orphaned:
                self._trim(slot, 0)

    def _trim(self, slot: Slot, keep: int) -> None:
        self._trims[slot.id] = keep
        self._held[slot.id] = keep

    def _admit(self) -> None:
        free = [s for s in self._scheduler.slots if s.state is not SlotState.RUNNING]
        for request in self._scheduler.queue:
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
        best = max(kept or empty or choices, key=lambda s: (matches[s.id], -s.last_used, -s.id))
        return best, matches[best.id]

    def _match(self, request: Request, slot: Slot) -> int:
        if not self._settings.reuse or self._trims.get(slot.id) == 0:
            return 0
        return slot.match(request)

    def _grant(self, requests: list[Request]) -> None:
        """Hand out this step's tokens, oldest request first, making room for each."""
        pending = {r.id: len(r.known) - self._held[self._at[r.id].id] for r in requests}
        n_decoding = sum(1 for n in pending.values() if n == 1)
        chunk = self._scheduler.chunks.limit(n_decoding)
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
