"""The scheduler: owns every request, slot and sequence, plans each step and commits what came of it.

    submit, end                      between steps only
    plan(now) -> StepPlan            admits, evicts and preempts; every plan is carried out before the next
    commit(plan, result, now) -> ... changes the state to what the backend really computed

Rules that hold at every step:
  1. Once later requests were admitted `PATIENCE` times before one that could run too, none is any more.
  2. A plan never needs more cells than there are: idle ones are given up first (least recently used first), then
     the youngest running request is preempted. The oldest never is, so it always comes to its end.
  3. A request in a failed step is retried alone; it fails only when it fails alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llamaslot.base.backend import Status
from llamaslot.base.events import FinishReason
from llamaslot.base.kv_ops import Operation
from llamaslot.base.model import SegmentSize
from llamaslot.kvcache.ledger import Fetched, Ledger
from llamaslot.kvcache.repacking import Repacker
from llamaslot.kvcache.separate import SeparateLedger
from llamaslot.kvcache.shared import SharedLedger
from llamaslot.kvcache.tiers import Tiers
from llamaslot.scheduler.admission import Admission
from llamaslot.scheduler.chunking import ChunkSizer
from llamaslot.scheduler.padding import Padding
from llamaslot.scheduler.planner import Planner
from llamaslot.scheduler.report import Traffic
from llamaslot.scheduler.request import Request, RequestEvent, RequestState
from llamaslot.scheduler.settings import SchedulerSettings
from llamaslot.scheduler.slots import Slot
from llamaslot.scheduler.step import StepPlan, StepResult, Work


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
        self.ledger = self._new_ledger()
        self.admission = Admission(settings, self.ledger, self.slots)
        self.traffic = Traffic()
        self._repacker: Repacker | None = None
        if isinstance(self.ledger, SharedLedger) and self.ledger.scratch is not None and settings.may_move:
            self._repacker = Repacker(self.ledger, self.ledger.scratch, settings.repack_gain)
        scratch = self.ledger.scratch if isinstance(self.ledger, SharedLedger) else None
        self._padding = Padding(settings.step_cost, scratch, settings.n_ubatch)
        self.chunks = ChunkSizer(n_ubatch=settings.n_ubatch, gap_ms=settings.gap_ms)
        self.tidies_at: float | None = None
        """When to tidy up; None where there is nothing to."""
        self._stores_at = 0.0
        self._has_worked = False
        """Whether anything ran since idle prefixes were last tidied up."""
        self.suspects: list[str] = []
        """Requests of a failed step, to be retried one by one before anything else runs."""
        self.admitted: list[Request] = []
        """Requests that the last plan admitted."""
        self.n_preempted = 0
        """Times that a request was sent back to the queue."""

    @property
    def tiers(self) -> Tiers | None:
        """What is stored off the pool; None where nothing ever is."""
        return self.ledger.tiers if isinstance(self.ledger, SharedLedger) and self.settings.stores else None

    @property
    def wakes_at(self) -> float | None:
        """When to plan again although nothing is asked for; None for never."""
        if self.tiers is None:
            return self.tidies_at
        tidies_at = None if self.tiers.lags else self.tidies_at
        return min((each for each in (tidies_at, self.tiers.due_at) if each is not None), default=None)

    @property
    def interrupts_at(self) -> float | None:
        """When to plan again although the running requests need no decision; None for never."""
        if not self.settings.writes or self.tiers is None:
            return None
        due_at = self.tiers.due_at
        return self._stores_at if due_at is None else min(self._stores_at, due_at)

    @property
    def queue(self) -> list[Request]:
        """Waiting requests by arrival."""
        return self.admission.queue

    @property
    def running(self) -> list[Request]:
        """Requests that hold a slot, oldest first."""
        return sorted((s.request for s in self.slots if s.request), key=lambda r: r.arrival)

    def submit(self, request: Request) -> None:
        """Queue a request; its prompt must be shorter than a slot's context."""
        if not 0 < request.n_prompt < self.settings.n_ctx_slot:
            raise ValueError(f"a prompt of {request.n_prompt} tokens cannot run")
        self.admission.enqueue(request)

    def end(self, request: Request, now: float, *, cancelled: bool = False) -> None:
        """End a request in any living state; what it computed stays, idle, unless it was private."""
        if request.state is RequestState.QUEUED:
            self.admission.withdraw(request)
        else:
            self._leave_slot(request)
        request.handle(RequestEvent.END, now)
        self.traffic.count(request)
        if not cancelled:
            self.admission.note_length(request.n_generated)
        if request.is_private and all(other.space != request.space for other in (*self.queue, *self.running)):
            self.ledger.forget(request.space)

    def wind_up(self, now: float) -> None:
        """Plan nothing from now on but to have written what is known, as long as there is a disk."""
        for request in [*self.queue, *self.running]:
            self.end(request, now, cancelled=True)
        self._has_worked, self.tidies_at = False, now
        if self.tiers is not None:
            self.tiers.end()

    def plan(self, now: float) -> StepPlan:
        """What the next step does; an empty plan means that nothing can be done now."""
        self.ledger.settle()
        self._reclaim_spoiled()
        running = self.running
        suspects = [r for r in running if r.id in self.suspects]
        self.admitted = self.admission.admit(running, now) if not suspects else []
        running = self.running
        self.ledger.tend(now)
        ready, is_loading = self._fetch(running)
        self._make_way(ready)
        planner = Planner(
            self.settings,
            self.ledger,
            self.chunks,
            self._padding,
            running,
            preempt=lambda request: self._preempt(request, now),
            siblings=self.admission.siblings,
        )
        work = planner.grant([request for request in suspects[:1] or running if request in ready])
        padding = None if suspects else planner.pad(work)
        n_ahead = 0 if suspects or is_loading else planner.n_ahead(work)
        self._keep_to_idle_budget(running)
        self._store_for_disk(running, now)
        operations = self.ledger.take_operations()
        if not n_ahead:
            operations += self._tidy(now)
        return StepPlan(
            operations,
            work,
            preempted=planner.preempted,
            padding=padding,
            n_ahead=n_ahead,
            jobs=self.ledger.take_jobs(),
        )

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Sampled | Broke]:
        """Let the state follow what the backend did for `plan`."""
        for segment in result.unsaved:
            self.ledger.was_not_saved(segment)
        if not plan.work:
            return []
        requests = {request.id: request for work in plan.work for request in (work.request, *work.siblings)}
        for work in plan.work:
            work.request.count_computed(*result.decoded.sent[work.run.seq], result.started)
        for request_id, sampler in result.samplers.items():
            requests[request_id].sampler = sampler
        if result.decoded.status is not Status.OK:
            return self._recover(plan, result, now)
        self._observe(plan, result)
        self.suspects = [s for s in self.suspects if s not in requests]
        return [sampled for work in plan.work for sampled in self._advance(work, result, now)]

    def _reclaim_spoiled(self) -> None:
        """Let running requests whose sequence was cleared start from whatever the tree has of them."""
        for slot in self.slots:
            if slot.request is not None and not self.ledger.holds(slot.id):
                self.ledger.claim([slot.id], slot.request.space, slot.request.prefix)

    def _fetch(self, running: Sequence[Request]) -> tuple[list[Request], bool]:
        """Let prompts take over what is known of them by now.

        Returns the requests that have nothing more to load, and whether another one has something to load at once.
        """
        pending = [len(request.known) - self.ledger.length(request.slot_id) for request in running]
        left = self.settings.at_once(self.settings.load_us) if 1 in pending else None
        ready = []
        is_loading = False
        for request, n in zip(running, pending, strict=True):
            before = replace(self.ledger.counts)
            fetched = self.ledger.fetch(request.slot_id, request.prefix, left) if n > 1 else Fetched.ALL
            if fetched is Fetched.ALL:
                ready.append(request)
            is_loading |= fetched is Fetched.SOME
            n_loaded = self.ledger.counts.n_loaded_tokens - before.n_loaded_tokens
            request.note_found(
                self.ledger.counts.n_copied_tokens - before.n_copied_tokens,
                n_loaded,
                self.ledger.counts.n_read_tokens - before.n_read_tokens,
            )
            left = None if left is None else max(0, left - n_loaded)
        return ready, is_loading

    def _make_way(self, ready: Sequence[Request]) -> None:
        """Let idle prefixes leave that would slow down prompts for too long, but for what somebody waits for."""
        ledger, life = self.ledger, self.settings.idle_life
        if life is None or not self.settings.stores:
            return
        n_prefill = sum(n for request in ready if (n := len(request.known) - ledger.length(request.slot_id)) > 1)
        if n_prefill and ledger.is_in_the_way(n_prefill, life):
            self.admission.renew()
            ledger.make_way(n_prefill, life, self._most_saved(ready))

    def _keep_to_idle_budget(self, running: Sequence[Request]) -> None:
        budget = self.settings.idle_cells
        if self.settings.shares and budget is not None and self.ledger.n_idle > budget:
            n_over, most = self.ledger.n_idle - budget, self._most_saved(running)
            self.ledger.evict(n_over if most is None else min(n_over, most))

    def _store_for_disk(self, running: Sequence[Request], now: float) -> None:
        """Store what is not stored yet, little by little: only what is in RAM can be written."""
        if self.tiers is None or not (self.settings.writes and running and now >= self._stores_at):
            return
        self._stores_at = now + self.settings.store_ms / 1e3
        if not self.tiers.lags:
            most = self._most_saved(running)
            n_tokens = self.settings.segment_tokens
            self.ledger.store_ahead(n_tokens if most is None else min(most, n_tokens), pinned=True)

    def _most_saved(self, requests: Sequence[Request]) -> int | None:
        """Tokens to save in this step at most; None where no stream would wait for it."""
        if not any(len(request.known) - self.ledger.length(request.slot_id) == 1 for request in requests):
            return None
        return self.settings.at_once(self.settings.save_us)

    def _new_ledger(self) -> Ledger:
        settings = self.settings
        n_slots, n_seqs, n_cells = settings.n_slots, settings.n_seqs, settings.n_ctx
        if not settings.shares:
            return SeparateLedger(n_slots=n_slots, n_seqs=n_seqs, n_cells=n_cells, copy_pays=self._copy_pays)
        size = settings.segment_size or SegmentSize(0, 1)
        tiers = Tiers(
            settings.ram_bytes if settings.stores else 0,
            size,
            settings.segment_tokens,
            disk_bytes=settings.disk_bytes,
        )
        return SharedLedger(
            n_slots=n_slots,
            n_seqs=n_seqs,
            n_cells=n_cells,
            min_shared=settings.min_shared,
            tiers=tiers,
            load_cost=settings.load_us / settings.prefill_us if settings.prefill_us else 0.0,
            prefill_us=settings.prefill_us,
        )

    def _copy_pays(self, n_tokens: int) -> bool:
        return self.settings.copies and self.chunks.seconds(n_tokens) > self.settings.stream_copy_ms / 1e3

    def _tidy(self, now: float) -> list[Operation]:
        """Move what is idle within the pool and, once nothing was to do for a while, store it ahead of need."""
        if self.running or self.queue:
            self._has_worked, self.tidies_at = True, None
        elif self._has_worked:
            self._has_worked, self.tidies_at = False, now + self.settings.rest_ms / 1e3
        is_resting = self.tidies_at is not None and now >= self.tidies_at
        move = self._repacker.move(is_idle=is_resting) if self._repacker is not None else None
        lags = self.tiers is not None and self.tiers.lags
        if move is not None:
            self.ledger.move(move)
        elif is_resting and self.settings.stores_ahead and not lags:
            self.ledger.store_ahead(self.settings.segment_tokens, pinned=False)
        operations = self.ledger.take_operations()
        if is_resting and not operations and not lags:
            self.tidies_at = None
        return operations

    def _preempt(self, request: Request, now: float) -> None:
        self.n_preempted += 1
        self._leave_slot(request)
        request.handle(RequestEvent.PREEMPT, now)
        self.admission.enqueue(request)

    def _leave_slot(self, request: Request) -> None:
        self.admission.release(request)
        if not self.settings.reuse:
            self.ledger.clear(request.slot_id)

    def _advance(self, work: Work, result: StepResult, now: float) -> list[Sampled]:
        request = work.request
        self.ledger.append(work.run.seq, work.run.tokens)
        if not request.wants_tokens and self.ledger.length(work.run.seq) == request.n_prompt:
            self.end(request, now)
            return [Sampled(request, None, "limit")]
        return [self._take_token(each, result.tokens[each.id], now) for each in work.samples]

    def _take_token(self, request: Request, token: int, now: float) -> Sampled:
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
            run = work.run
            applied = result.lengths[run.seq] - run.start
            if not 0 <= applied <= len(run.tokens):
                self.ledger.spoil(run.seq)
                continue
            self.ledger.append(run.seq, run.tokens[:applied])
            if self.ledger.length(run.seq) == len(work.request.known):
                self._take_back_last(work.request)
        # An exact ledger cannot run out of room; should it happen all the same, idle KV is what can be given up.
        if result.decoded.status is Status.NO_ROOM and self.ledger.n_idle:
            self.ledger.evict(self.ledger.n_idle)
            return []
        if len(plan.work) > 1 or plan.padding is not None:
            self.suspects = [work.request.id for work in plan.work]
            return []
        request = plan.work[0].request
        self.suspects = [s for s in self.suspects if s != request.id]
        self.ledger.spoil(request.slot_id)
        self.end(request, now)
        return [Broke(request, result.decoded.status)]

    def _take_back_last(self, request: Request) -> None:
        """All that a request knows was computed, yet nothing sampled: the last token's logits are needed again."""
        if self.settings.reuse:
            self.ledger.truncate(request.slot_id, len(request.known) - 1)
        else:
            self.ledger.spoil(request.slot_id)

    def _observe(self, plan: StepPlan, result: StepResult) -> None:
        n_prefill = sum(len(w.run.tokens) for w in plan.work if len(w.run.tokens) > 1)
        n_decoding = sum(1 for w in plan.work if len(w.run.tokens) == 1)
        n_padding = len(plan.padding.tokens) if plan.padding and n_prefill else 0
        self.ledger.grow_older(n_prefill)
        self.chunks.observe(n_prefill + n_padding, n_decoding, result.seconds)
