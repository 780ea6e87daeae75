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
from llamaslot.core.backend import Status
from llamaslot.core.chunking import ChunkSizer
from llamaslot.core.planner import Planner
from llamaslot.core.request import Request, RequestEvent, RequestState
from llamaslot.core.settings import SchedulerSettings
from llamaslot.core.slots import Slot, SlotState
from llamaslot.core.step import StepPlan, StepResult, Work


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
        return Planner(self.settings, self.slots, self.queue, self.suspects, self.chunks).plan()

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Sampled | Broke]:
        """Let the state follow what the backend did for `plan`."""
        for request in plan.preempted:
            self._release(request)
            request.handle(RequestEvent.PREEMPT, now)
            self.queue.append(request)
        self.queue.sort(key=lambda r: r.arrival)
        for trim in plan.trims:
            if trim.slot.broken:
                trim.slot.mend()
            else:
                trim.slot.evict(trim.keep)
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
        slot.extend(run.tokens)
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
        elif len(request.known) >= self.settings.n_ctx_slot:
            reason, truncated = "limit", True
        if reason:
            self.end(request, now)
        return Sampled(request, token, reason, truncated)

    def _recover(self, plan: StepPlan, result: StepResult, now: float) -> list[Sampled | Broke]:
        """After a failed decode, keep what stayed applied and look for the request at fault."""
        for work in plan.work:
            slot, run = self.slots[work.run.seq], work.run
            applied = result.lengths[run.seq] - run.start
            # All that is known would be computed and yet nothing sampled: the logits are needed once more.
            without_logits = run.start + applied == len(work.request.known)
            if 0 <= applied <= len(run.tokens) and not without_logits:
                slot.extend(run.tokens[:applied])
            else:
                slot.spoil()
        # An exact ledger cannot run out of room; should it happen all the same, idle KV is what can be given up.
        idle = [s for s in self.slots if s.state is SlotState.IDLE]
        if result.decoded.status is Status.NO_ROOM and idle:
            for slot in idle:
                slot.spoil()
            return []
        if len(plan.work) > 1:
            self.suspects = [work.request.id for work in plan.work]
            return []
        request = plan.work[0].request
        self.suspects = [s for s in self.suspects if s != request.id]
        slot = self.slots[request.slot_id]
        self.end(request, now)
        slot.spoil()
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
