"""Scheduler: owns every request and slot, plans each step, and commits its result.

    submit, end                      only between steps
    plan(now) -> StepPlan            admits, loads, evicts, preempts; every plan is executed before the next one
    commit(plan, result, now) -> ... updates the state to what the backend really computed

Rules that hold at every step:
  1. No starvation: clients take turns (`fair_share.py`), and among requests whose turn it is, at most
     `MAX_OVERTAKEN` later ones are admitted before one that could run.
  2. A plan never needs more cells than there are: idle ones are evicted first (least recently used first), then the
     youngest running request is preempted, of a client that runs several if there is one. The oldest is never
     preempted, so it always finishes.
  3. Requests of a failed step are retried one at a time; only one that fails alone is ended.
  4. A request with invalid logits is ended. But if KV that it reused may be the cause, it is computed again first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from llamaslot.base.backend import CONSTRAINT_FAILED, NO_TOKEN, Status
from llamaslot.base.events import FinishReason
from llamaslot.base.generation.token_probs import TokenScore
from llamaslot.base.model import ModelInfo
from llamaslot.base.namespaces import salt_namespace
from llamaslot.base.stats import CacheStats
from llamaslot.base.tokens import WIDTH, packed
from llamaslot.kvcache.cache import KVCache
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.offload.load_or_compute import LoadStatus
from llamaslot.kvcache.offload.offload_policy import Deadlines
from llamaslot.kvcache.tiers.disk_io import SegmentMeta
from llamaslot.scheduler.admission import Admission
from llamaslot.scheduler.checkpoint_taker import CheckpointTaker
from llamaslot.scheduler.chunk_sizer import ChunkSizer
from llamaslot.scheduler.fair_share import by_share
from llamaslot.scheduler.layout import LayoutChoice
from llamaslot.scheduler.padding import Padding, DummyRows
from llamaslot.scheduler.recovery import Recovery
from llamaslot.scheduler.request import Request, RequestEvent, RequestState, ReuseStats, Slot
from llamaslot.scheduler.step import StepPlan, StepResult, Work
from llamaslot.scheduler.step_planner import NoTurns, PromptTurns, RunTurns, StepPlanner, Turns


@dataclass(frozen=True, slots=True)
class Sampled:
    """A request got its next tokens, sampled or forced; with a `reason` the last of them ended it."""

    request: Request
    tokens: tuple[int, ...]
    """Empty if only the prompt was to be computed."""
    reason: FinishReason | None
    truncated: bool = False
    scores: Sequence[TokenScore] = ()
    """Probabilities of the tokens, if the request asks for them."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of the next tokens of a request's prompt."""

    request: Request
    scores: list[TokenScore]


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """A request's decode failed even alone in its step, or its logits were NaN or infinite."""

    request: Request
    reason: str
    """Name of the `Status`, or INVALID_LOGITS."""
    is_retried: bool = False
    """True if the request was not ended, but will be computed again without cached KV."""


@dataclass(frozen=True, slots=True)
class ConstraintFailed:
    """A request was ended because its constraint allows no next token."""

    request: Request
    message: str


Outcome: TypeAlias = Sampled | Scored | DecodeFailed | ConstraintFailed
"""A result of a step for one request."""


class Scheduler:
    """Plans steps for all requests and slots. Used on one event loop; times are seconds on one clock."""

    def __init__(
        self,
        info: ModelInfo,
        cache_settings: CacheSettings,
        *,
        eog: frozenset[int] = frozenset(),
        control: Collection[int] = (),
        on_disk: Sequence[SegmentMeta] = (),
        first_number: int = 0,
    ) -> None:
        if info.n_ubatch < cache_settings.n_slots:
            raise ValueError("n_ubatch must be at least n_slots")
        self.n_ctx_slot = info.n_ctx_slot
        self._n_spare_rows = info.n_spare_rows
        self._eog = eog
        self.chunks = ChunkSizer(
            n_ubatch=info.n_ubatch, gap_ms=cache_settings.gap_ms, unified=cache_settings.unified
        )
        self.cache = KVCache(
            cache_settings, prefill_seconds=self.chunks.seconds, on_disk=on_disk, first_number=first_number
        )
        self._remote = self.cache.remote
        self._taker = CheckpointTaker(self.cache, control, info.n_ctx_slot)
        self.slots = [Slot(i) for i in range(cache_settings.n_slots)]
        self.admission = Admission(self.cache, self.slots, info.n_ctx_slot)
        self.queue = self.admission.queue
        """Waiting requests by arrival."""
        self._layout = LayoutChoice(self.cache, self.admission)
        self.reuse = ReuseStats()
        self._padding = _padding(info, cache_settings)
        # Without `step_cost` there are no dummy rows. It is measured only for models whose sequences can be
        # truncated, so dummy rows can always be removed.
        self._dummy_rows = DummyRows(info.step_cost, info.n_slots)
        self._turns = _turns(info, cache_settings, self.chunks)
        self.deadlines = Deadlines()
        """Times at which to plan again even if no command arrives."""
        self.recovery = Recovery(self.cache, self.slots, self.admission)
        self.admitted: list[Request] = []
        """Requests that the last plan admitted."""
        self.n_preempted = 0
        """Number of preemptions."""
        self.keeps_layout = False
        """True once memory did not suffice to create the context in another layout."""
        self._is_stopping = False

    def set_costs(self, info: ModelInfo, measured: CacheSettings) -> None:
        """Take over costs that could not be measured when the model was loaded."""
        self.cache.set_costs(measured)
        self._padding = _padding(info, measured)
        self._dummy_rows = DummyRows(info.step_cost, info.n_slots)

    @property
    def running(self) -> list[Request]:
        """Requests that have a slot, oldest first."""
        return sorted((s.request for s in self.slots if s.request), key=lambda r: r.arrival)

    def submit(self, request: Request) -> None:
        """Queue a request; its prompt must be shorter than a slot's context."""
        if not 0 < request.n_prompt < self.n_ctx_slot:
            raise ValueError(f"a prompt of {request.n_prompt} tokens cannot run")
        self.admission.enqueue(request)

    def end(self, request: Request, now: float, *, cancelled: bool = False) -> None:
        """End a queued or running request; what it computed stays cached unless it is private."""
        if request.state is RequestState.QUEUED:
            self.admission.withdraw(request)
        else:
            self.admission.release(request)
        self._remote.unpin(request.id)
        request.handle(RequestEvent.END, now)
        self.reuse.count(request)
        if not cancelled:
            self.admission.observe_length(request.n_generated)
        others = (*self.queue, *self.running)
        if request.is_private and all(other.namespace != request.namespace for other in others):
            self.cache.drop(request.namespace)

    def stop(self, now: float) -> None:
        """End all requests. Later plans only write everything to disk."""
        for request in [*self.queue, *self.running]:
            self.end(request, now, cancelled=True)
        self._is_stopping = True

    def wants_unified(self, now: float) -> bool:
        """True if a unified pool suits the current requests better, False if a partitioned one does."""
        if self.keeps_layout or not self.cache.settings.part_cells:
            return self.cache.settings.unified
        return self._layout.decide(self.running, now)

    def empty_pool(self, now: float) -> None:
        """Save the pool to RAM for a change of the layout; the next plan loads the KV of running requests again."""
        self.cache.tick(now)
        self.recovery.release_running()
        self.cache.empty_pool()

    def set_layout(self, info: ModelInfo, n_seqs: int) -> None:
        """Switch to a context of another layout, which is empty."""
        self.cache.set_layout(unified=info.unified, n_seqs=n_seqs)
        self._padding = _padding(info, self.cache.settings)
        self._turns = _turns(info, self.cache.settings, self.chunks)
        self.chunks.set_layout(unified=info.unified)

    def plan(self, now: float) -> StepPlan:
        """Plan the next step; an empty plan means that nothing can be done now."""
        running = self.running
        self.cache.tick(now, is_stopping=self._is_stopping)
        self.recovery.reacquire_invalidated()
        suspects = [request for request in running if request.id in self.recovery.suspects]
        self.admitted = self.admission.admit(running, now) if not suspects else []
        for request in self.admitted:
            self._taker.choose_stops(request)
        running = self.running
        self.cache.has_decodes = any(request.is_decoding(self._n_pending(request)) for request in running)
        loaded, is_loading = self._load(running)
        for request in self.admitted:
            self._remote.unpin(request.id)
        able = [request for request in suspects[:1] or by_share(running) if request in loaded]
        turn = self._turns.next(able, self._n_pending, now)
        ready = self._taker.take_due(turn.requests, self.queue)
        n_prefill = sum(n for request in ready if not request.is_decoding(n := self._n_pending(request)) and n > 1)
        self.cache.offload_idle(n_prefill, lambda: map(self.admission.match, self.queue))
        planner = StepPlanner(
            min(self.n_ctx_slot, self.cache.settings.seq_cells),
            self.cache,
            self.chunks,
            self._padding,
            self._dummy_rows,
            running=by_share(running),
            preempt=lambda request: self._preempt(request, now),
            siblings=self.admission.siblings,
            n_spare_rows=self._n_spare_rows,
        )
        work = planner.grant([request for request in able if request in ready], turn=turn)
        padding = () if suspects else planner.pad(work)
        # Extra steps repeat this one, so none may follow if a request was left out: it may be in the next step.
        is_whole = not suspects and not is_loading and len(work) == len(able)
        n_extra_steps = planner.n_extra_steps(work) if is_whole else 0
        is_busy = bool(self.running or self.queue)
        self.deadlines = self.cache.maintain(now, is_running=bool(running), is_busy=is_busy)
        return StepPlan(
            self.cache.take_operations(),
            work,
            preempted=planner.preempted,
            padding=padding,
            n_extra_steps=n_extra_steps,
            jobs=self.cache.take_jobs(),
            uploads=self._remote.take_uploads(),
            turn=turn,
        )

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Outcome]:
        """Update the state to what the backend did for `plan`."""
        self._turns.commit(plan.turn)
        if result.unsaved:
            self.cache.on_save_failed(result.unsaved, now)
        if result.incomplete:
            plan = plan.without(result.incomplete)
            self.recovery.drop_incomplete(result.incomplete, plan, now)
        if not plan.work:
            return []
        requests = {request.id: request for work in plan.work for request in (work.request, *work.siblings)}
        for work in plan.work:
            work.request.count_computed(*result.decoded.sent[work.run.seq], result.started)
        for request_id, sampler in result.samplers.items():
            requests[request_id].sampler = sampler
        if result.decoded.status is not Status.OK:
            failed = self.recovery.on_failed(plan, result)
            if failed is None:
                return []
            self.end(failed, now)
            return [DecodeFailed(failed, result.decoded.status.name)]
        self._observe(plan, result)
        self.recovery.clear_suspects(requests)
        return [outcome for work in plan.work for outcome in self._advance(work, result, now)]

    def cache_stats(self) -> CacheStats:
        """Return the statistics of the cache, including what requests reused."""
        stats = self.cache.stats()
        self.reuse.add_to(stats)
        stats.requests.waits, stats.preemptions = self.admission.n_waits, self.n_preempted
        return stats

    def _n_pending(self, request: Request) -> int:
        """Return how many tokens a running request still has to compute."""
        return len(request.tokens) - self.cache.length(request.slot)

    def _load(self, running: Sequence[Request]) -> tuple[list[Request], bool]:
        """Extend running prompts by what is cached of them by now.

        Returns the requests that have nothing more to load, and True if any other can load more in the next step.
        """
        loaded = []
        is_loading = False
        for request in running:
            n_pending = self._n_pending(request)
            lacks_state = self.cache.lacks_state(request.slot)
            if lacks_state or (n_pending > 1 and not request.is_decoding(n_pending)):
                result = self.cache.load(request.slot, request.prefix)
                request.count_loaded(result)
                is_loading |= result.status is LoadStatus.MORE
                if result.status is not LoadStatus.DONE:
                    continue
            loaded.append(request)
        return loaded, is_loading

    def _preempt(self, request: Request, now: float) -> None:
        self.n_preempted += 1
        self.admission.release(request)
        request.handle(RequestEvent.PREEMPT, now)
        self.admission.enqueue(request)

    def _advance(self, work: Work, result: StepResult, now: float) -> list[Outcome]:
        request = work.request
        self.cache.append(work.run.seq, result.kept(work))
        scored: list[Outcome] = []
        if not request.is_scored:
            scores = result.prompt_scores.get(request.id, [])
            if any(math.isnan(each.value) for each in scores):
                return self._fail_sampling(work, now)
            if scores := request.new_scores(work.run.start, scores):
                scored.append(Scored(request, scores))
        if not request.wants_tokens and self.cache.length(work.run.seq) == request.n_prompt:
            self.end(request, now)
            return [*scored, Sampled(request, (), "limit")]
        tokens = {each: result.tokens[each.id] for each in work.samples}
        if (NO_TOKEN,) in tokens.values():
            return [*scored, *self._fail_sampling(work, now)]
        taken = [
            self._take_tokens(each, sampled, result, now)
            if sampled != (CONSTRAINT_FAILED,)
            else self._fail_constraint(each, now)
            for each, sampled in tokens.items()
        ]
        return [*scored, *taken]

    def _fail_constraint(self, request: Request, now: float) -> ConstraintFailed:
        assert request.sampler is not None
        assert request.params.constraint is not None
        param, reason = request.params.constraint.param, request.sampler.failure
        self.end(request, now)
        return ConstraintFailed(
            request, f"'{param}' cannot be followed after {request.n_generated} tokens: {reason}"
        )

    def _fail_sampling(self, work: Work, now: float) -> list[Outcome]:
        """Drop the KV that led to invalid logits, and end the requests that were to sample from them.

        `invalidate` empties the slot, `drop_paths` removes the path from spare sequences, RAM and disk. Prefixes
        that other paths share are not dropped, although one of them may be the cause. So if the request reused
        anything and has no token yet, it is not ended but computed once more, without the cache.
        """
        request = work.request
        namespace, tokens = request.namespace, packed(request.tokens.view())
        self._remote.deny(namespace, tokens)
        self.cache.invalidate(request.slot)
        if request.n_reused and not request.n_generated and not request.is_private:
            reused = tokens[: request.n_reused * WIDTH]
            self._preempt(request, now)
            self.cache.drop_paths(namespace, [tokens])
            is_left = self.cache.match(namespace, reused).n_cached >= request.n_reused
            request.isolate(reused if is_left else b"")
            return [DecodeFailed(request, "INVALID_LOGITS", is_retried=True)]
        failed = work.samples or (request,)
        for each in failed:
            self.end(each, now)
        self.cache.drop_paths(namespace, [tokens])
        return [DecodeFailed(each, "INVALID_LOGITS") for each in failed]

    def _take_tokens(self, request: Request, sampled: tuple[int, ...], result: StepResult, now: float) -> Sampled:
        """Append sampled tokens to a request, and those forced after them, as far as the request's limits allow."""
        tokens = sampled + result.forced.get(request.id, ())
        if request.distrusted:
            # Without that cached prefix the logits are valid, so its KV is dropped. Only the last node is: if the
            # fault is further up, the next request that reuses it will show that.
            self.cache.invalidate_path(
                salt_namespace(request.params.cache_salt), request.distrusted, with_public=request.n_public > 0
            )
            request.distrusted = b""
        reason, truncated, n_taken = None, False, 0
        while reason is None and n_taken < len(tokens):
            request.add_token(tokens[n_taken], now, forced=n_taken >= len(sampled))
            reason, truncated = self._end_reason(request, tokens[n_taken])
            n_taken += 1
        if reason:
            self.end(request, now)
        scores = result.scores.get(request.id, [])[:n_taken]
        return Sampled(request, tokens[:n_taken], reason, truncated, scores)

    def _end_reason(self, request: Request, token: int) -> tuple[FinishReason | None, bool]:
        """Return why a request ends after a token (None if it does not), and True if its context is full."""
        if token in self._eog:
            return "eos", False
        if request.n_remaining == 0:
            return "limit", False
        is_full = len(request.tokens) >= self.n_ctx_slot
        return ("limit" if is_full else None), is_full

    def _observe(self, plan: StepPlan, result: StepResult) -> None:
        # Tokens forced by constraints cost as much as prompt tokens, so they count as such.
        lengths = [(len(w.run.tokens), w.request) for w in plan.work]
        n_decoding = sum(1 for n, request in lengths if request.is_decoding(n))
        n_prefill = sum(n for n, _ in lengths) - n_decoding
        n_padding = sum(len(run.tokens) for run in plan.padding) if n_prefill else 0
        self.chunks.observe(n_prefill + n_padding, n_decoding, result.seconds)
        if n_prefill == 0 and not self.cache.settings.unified:
            self._dummy_rows.observe([*(work.run for work in plan.work), *plan.padding], result.seconds)


def _padding(info: ModelInfo, settings: CacheSettings) -> Padding:
    # With recurrent states llama.cpp splits steps of several sequences, so padding would only cost time.
    is_split = info.keeps_checkpoints and info.state.kind.has_recurrent_state
    has_place = settings.scratch is not None if settings.unified else settings.can_trim
    return Padding(info.step_cost if has_place and not is_split else None, info.n_ubatch)


def _turns(info: ModelInfo, settings: CacheSettings, chunks: ChunkSizer) -> Turns:
    if not info.state.kind.allows_mixed_lengths:
        return RunTurns()
    return NoTurns() if settings.unified else PromptTurns(chunks)
