"""Scheduler: owns every request and slot, plans each step, and commits its result.

    submit, end                      only between steps; a request in the background makes way for any other
    plan(now) -> StepPlan            admits, loads, evicts, preempts; every plan is executed before the next one
    commit(plan, result, now) -> ... updates the state to what the backend really computed

Rules that hold at every step:
  1. No starvation: clients take turns (`admission.py`), and among requests whose turn it is, at most
     `MAX_OVERTAKEN` later ones are admitted before one that could run.
  2. A plan never needs more cells than there are: idle ones are evicted first (least recently used first), then the
     youngest running request is preempted, of a client that runs several if there is one. The oldest is never
     preempted, so it always finishes.
  3. Requests of a failed step are retried one at a time; only one that fails alone is ended.
  4. A request with invalid logits is ended. But if KV that it reused may be the cause, it is computed again first.

After a failed decode the backend reports how much each sequence holds, and requests continue from there if they
can. Otherwise the sequence is *invalidated*: it is emptied, and in the next plan its request starts again from what
is cached of its tokens. If the step had several requests, all of them are *suspects*: each is computed alone, and
only one that fails alone is at fault.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from llamaslot.base.backend import CONSTRAINT_FAILED, NO_TOKEN, Status
from llamaslot.base.events import FinishReason
from llamaslot.base.generation.token_probs import TokenScore
from llamaslot.base.model import ModelInfo
from llamaslot.base.stats import CacheStats
from llamaslot.base.tokens import WIDTH, packed
from llamaslot.kvcache.cache import KVCache
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.disk_io import SegmentMeta
from llamaslot.kvcache.match import Deadlines, LoadStatus
from llamaslot.scheduler.admission import Admission, by_share
from llamaslot.scheduler.checkpoint_taker import CheckpointTaker
from llamaslot.scheduler.chunk_sizer import ChunkSizer
from llamaslot.scheduler.drafter import Drafter
from llamaslot.scheduler.layout import LayoutChoice
from llamaslot.scheduler.request import NO_TOKENS, Request, RequestEvent, RequestState, ReuseStats, Slot
from llamaslot.scheduler.step import RequestResult, StepPlan, StepResult, Turn, Work
from llamaslot.scheduler.step_planner import StepPlanner
from llamaslot.scheduler.turns import AdapterTurns, ImageTurns, PromptTurns, RunTurns, Turns

INVALID_LOGITS = "INVALID_LOGITS"
"""Reason of a decode that succeeded, and whose logits are NaN or infinite."""
_MIN_TURN = 20
"""Shortest turn of requests with the same LoRA adapters, in durations of a change: changes so take under 5%."""
_MAX_TURN_S = 1.0
"""Most seconds of that, if the change was measured beside other work."""
_MIN_SHIFTED = 4
"""Places at the end of a context that `n_keep` leaves to other tokens, as in llama-server."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A request got its next tokens, sampled or forced; with a `reason` the last of them ended it."""

    request: Request
    tokens: tuple[int, ...] = ()
    """Empty if only the prompt was to be computed."""
    reason: FinishReason | None = None
    truncated: bool = False
    scores: Sequence[TokenScore] = ()
    """Probabilities of the tokens, if the request asks for them."""
    vector: bytes = b""
    """The vector of the prompt, float32, if the request asks for it."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of the next tokens of a request's prompt."""

    request: Request
    scores: Sequence[TokenScore]


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """A request's decode failed even alone in its step, or its logits were NaN or infinite."""

    request: Request
    reason: str
    """Name of the `Status`, or `INVALID_LOGITS`."""
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
        self._max_prompt = info.max_prompt
        self._adds_bos = info.adds_bos
        self._eog = eog
        self.chunks = ChunkSizer(
            n_ubatch=info.n_ubatch, gap_ms=cache_settings.gap_ms, unified=cache_settings.unified
        )
        self.cache = KVCache(
            cache_settings, prefill_seconds=self.chunks.seconds, on_disk=on_disk, first_number=first_number
        )
        self._remote, self._dropper, self._pins = self.cache.remote, self.cache.dropper, self.cache.pins
        self._taker = CheckpointTaker(self.cache, control, info.n_ctx_slot)
        self.slots = [Slot(i) for i in range(cache_settings.n_slots)]
        self.admission = Admission(self.cache, self.slots, info.n_ctx_slot)
        self.queue = self.admission.queue
        """Waiting requests by arrival."""
        self._layout = LayoutChoice(self.cache, self.admission)
        self.reuse = ReuseStats()
        self._drafter = Drafter(info, self.chunks, self.cache)
        self._planner = StepPlanner(info, self.cache, self.admission, self.chunks, self._drafter)
        self._turns = self._turns_for(info)
        self.deadlines = Deadlines()
        """Times at which to plan again even if no command arrives."""
        self.admitted: list[Request] = []
        """Requests that the last plan admitted."""
        self.ending: list[Request] = []
        """Requests whose text has ended, that a step may still compute (`end_by_text`)."""
        self.has_drafts = False
        """True if a request has a draft, so that the next step must be planned."""
        self.keeps_layout = False
        """True once memory did not suffice to create the context in another layout."""
        self._is_stopping = False

    def set_costs(self, info: ModelInfo) -> None:
        """Take over costs that were measured after the model was loaded."""
        self.cache.settings.set_costs(info)
        self._planner.set_costs(info)
        self._drafter.set_model(info)

    def end_trial(self, info: ModelInfo, *, allows_reuse: bool) -> None:
        """Take over the result of the self-test: until now nothing was reused, and nothing drafted."""
        self.cache.settings.is_on_trial = False
        self.admission.end_trial(allows_reuse=allows_reuse)
        self._drafter.set_model(info)

    @property
    def can_draft(self) -> bool:
        """True if replies may be drafted in this layout of the pool."""
        return self._drafter.max_draft > 0

    @property
    def running(self) -> list[Request]:
        """Requests that have a slot, oldest first."""
        return sorted((s.request for s in self.slots if s.request), key=lambda r: r.arrival)

    def submit(self, request: Request) -> None:
        """Queue a request; its prompt must have at most `ModelInfo.max_prompt` tokens.

        One in the background takes the place of an earlier one, which must have ended.
        """
        if not 0 < request.n_prompt <= self._max_prompt:
            raise ValueError(f"a prompt of {request.n_prompt} tokens cannot run")
        self.admission.enqueue(request)

    def why_not_pinned(self, request: Request) -> str:
        """Return why a request's prompt cannot be pinned, as it asks for; empty if it can."""
        pending = [each for each in (*self.queue, *self.running) if each.params.pin]
        n_pending = sum(each.n_prompt for each in pending)
        return self._pins.why_not(request.namespace, request.packed_ids, len(pending), n_pending)

    def end(self, request: Request, now: float, *, cancelled: bool = False) -> None:
        """End a queued or running request; what it computed stays cached unless it is private."""
        self.admission.remove(request)
        self._remote.unpin(request.id)
        request.handle(RequestEvent.END, now)
        self.reuse.count(request)
        if not cancelled and request.wants_tokens:
            self.admission.observe_length(request.n_generated)
        self._drop_private(request)

    def end_by_text(self, request: Request) -> None:
        """End a running request whose text has ended as soon as no step may compute it any more (`end_ending`)."""
        self.ending.append(request)

    def end_ending(self, now: float) -> None:
        """End the requests of `end_by_text`, between two plans."""
        for request in self.ending:
            # One may have failed meanwhile.
            if request.state is not RequestState.DONE:
                self.end(request, now)
        self.ending.clear()

    def _drop_private(self, request: Request) -> None:
        """Drop what a private request has computed, unless others of its group are left."""
        others = {*self.queue, *self.running} - {request}
        if request.is_private and all(other.namespace != request.namespace for other in others):
            self._dropper.drop(request.namespace)

    def stop(self, now: float) -> None:
        """End all requests. Later plans only write everything to disk."""
        background = self.admission.background
        # One in the background may be running too.
        for request in dict.fromkeys([*self.queue, *self.running, *filter(None, [background])]):
            self.end(request, now, cancelled=True)
        self._is_stopping = True

    def wants_unified(self, now: float) -> bool:
        """True if a unified pool suits the current requests better, False if a partitioned one does."""
        if self.keeps_layout or not self.cache.settings.part_cells:
            return self.cache.settings.unified
        # What is computed in the background is no reason for a change.
        return self._layout.decide([each for each in self.running if not each.params.is_background], now)

    def empty_pool(self, now: float) -> None:
        """Save the pool to RAM for a change of the layout; the next plan loads the KV of running requests again."""
        self.cache.tick(now)
        for request in self.running:
            self.cache.release(request.slot)
            request.restart()
            request.is_invalidated = True
        self.cache.empty_pool()

    def set_layout(self, info: ModelInfo, n_seqs: int) -> None:
        """Switch to a context of another layout, which is empty."""
        self.cache.set_layout(unified=info.unified, n_seqs=n_seqs)
        self._planner.set_layout(info)
        self._drafter.set_model(info)
        self._turns = self._turns_for(info)
        self.chunks.set_layout(unified=info.unified)

    def plan(self, now: float) -> StepPlan:
        """Plan the next step; an empty plan means that nothing can be done now."""
        # 1. Requests that lost their KV start again from what is cached of their tokens.
        self.cache.tick(now, is_stopping=self._is_stopping)
        for request in self.running:
            if request.is_invalidated:
                request.is_invalidated = False
                self.cache.acquire([request.slot], self.admission.match(request), is_new=False)
        # 2. Free slots go to waiting requests, unless requests of a failed step are to be retried. For these, what
        #    runs in the background makes way: its KV stays cached.
        self.admission.make_way(now)
        suspects = [request for request in self.running if request.is_suspect]
        self.admitted = self.admission.admit(now) if not suspects else []
        for request in self.admitted:
            self._taker.choose_stops(request)
        # 3. Prompts are extended by what is cached of them by now, and full contexts are shifted.
        running = self.running
        self.cache.has_decodes = any(request.is_decoding(self._n_pending(request)) for request in running)
        loaded, is_loading = self._load(running)
        for request in loaded:
            if request.params.shift.is_on and self.cache.length(request.slot) >= self.n_ctx_slot - 1:
                self._shift(request)
        for request in self.admitted:
            self._remote.unpin(request.id)
        # 4. Requests take turns where a step may not have all of them. Some stop for a checkpoint.
        running = by_share(running)
        able = [request for request in suspects[:1] or running if request in loaded]
        pending = {request: self._n_pending(request) for request in able}
        turn = self._turns.next(pending, now) if self._turns is not None else Turn([*pending])
        ready = self._taker.take_due(turn.requests, self.queue)
        # 5. Idle prefixes that would slow prompts down are offloaded.
        n_prefill = sum(n for each in ready if (n := pending[each]) > 1 and not each.is_decoding(n))
        self.cache.offload_idle(n_prefill, lambda: map(self.admission.match, self.queue))
        # 6. The others compute their next tokens, as far as one step has room. Steps that repeat this one may
        #    follow only if no request was left out that may be in the next step.
        plan = self._planner.plan(
            [request for request in able if request in ready],
            turn,
            now,
            running=running,
            may_pad=not suspects,
            may_repeat=not suspects and not is_loading and len(ready) + turn.n_others == len(able),
        )
        # 7. What else is due: offloading ahead of time, disk jobs, uploads.
        is_busy = bool(self.running or self.queue)
        self.deadlines = self.cache.maintain(now, is_running=bool(running), is_busy=is_busy)
        if turn.until is not None:
            until = turn.until if self.deadlines.running is None else min(self.deadlines.running, turn.until)
            self.deadlines = replace(self.deadlines, running=until)
        plan.operations = self.cache.take_operations()
        plan.jobs = self.cache.take_jobs()
        plan.uploads = self._remote.take_uploads()
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Outcome]:
        """Update the state to what the backend did for `plan`."""
        self.has_drafts = False
        if self._turns is not None:
            self._turns.commit(plan.turn)
        # 1. Operations for which there was no memory.
        if result.unsaved:
            self.cache.on_save_failed(result.unsaved, now)
        if result.incomplete:
            plan = plan.without(result.incomplete)
            self._drop_incomplete(plan, result.incomplete, now)
        if not plan.work:
            return []
        for work in plan.work:
            work.request.count_computed(*result.decoded.sent[work.run.seq], result.started)
        # 2. A failed decode.
        if result.decoded.status is not Status.OK:
            failed = self._recover(plan, result)
            if failed is None:
                return []
            self.end(failed, now)
            return [DecodeFailed(failed, result.decoded.status.name)] if failed not in self.ending else []
        # 3. New tokens.
        self._planner.observe(plan, result)
        outcomes: list[Outcome] = []
        for work, results in zip(plan.work, result.results, strict=True):
            for each in results:
                each.request.is_suspect = False
                if each.sampler is not None:
                    each.request.sampler = each.sampler
            outcomes += self._advance(work, results, now)
        # 4. Drafts for the next step.
        adapters = plan.adapters
        decoding = [
            each for each in self.running if each.n_generated and each.adapters_at(each.n_prompt) == adapters
        ]
        decoding = [each for each in decoding if not each.is_suspect and each not in self.ending]
        self.has_drafts = self._drafter.propose(decoding)
        return outcomes

    def cache_stats(self) -> CacheStats:
        """Return the statistics of the cache, including what requests reused."""
        stats = self.cache.stats()
        self.reuse.add_to(stats)
        stats.requests.waits, stats.preemptions = self.admission.n_waits, self.admission.n_preempted
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

    def _shift(self, request: Request) -> None:
        """Discard a part of a full context, as llama-server does: after the tokens to keep, half of the rest.

        Tokens that the slot does not hold yet, such as those that a constraint has forced, follow the rest.
        """
        shift, n_held = request.params.shift, self.cache.length(request.slot)
        n_keep = (request.n_prompt if shift.n_keep < 0 else shift.n_keep) + self._adds_bos
        start = min(n_keep, self.n_ctx_slot - _MIN_SHIFTED)
        n_left = n_held - start
        end = start + min(shift.n_discard or n_left // 2, n_left - 1)
        self.cache.shift(request.slot, request.shifted, start, end)
        if not request.n_discarded:
            # It has left its first namespace.
            self._drop_private(request)
        request.shift(start, end)

    def _advance(self, work: Work, results: Sequence[RequestResult], now: float) -> list[Outcome]:
        """Take over the results of computing a request's tokens: its own, and those of its siblings."""
        request = work.request
        n_drafted = work.run.n_drafted
        self.cache.append(work.run.seq, work.kept(results[0].tokens), is_draft=n_drafted > 0)
        if request in self.ending:
            # What this step sampled is beyond the end of its text. If its logits are invalid, the next request that
            # reuses the KV will show that.
            return []
        if n_drafted:
            n_accepted = len(results[0].tokens) - 1
            request.count_draft(n_drafted, n_accepted)
            self.reuse.count_draft(n_drafted, n_accepted)
        outcomes: list[Outcome] = []
        if not request.is_scored:
            scores = results[0].prompt_scores
            if any(math.isnan(each.value) for each in scores):
                return self._fail_sampling(work, now)
            if scores := request.new_scores(work.run.start, scores):
                outcomes.append(Scored(request, scores))
        if not request.wants_tokens and self.cache.length(work.run.seq) == request.n_prompt:
            vector = results[0].vector
            if not np.isfinite(np.frombuffer(vector, dtype="<f4")).all():
                return [*outcomes, *self._fail_sampling(work, now)]
            self._drop_distrusted(request)
            if request.params.pin is not None and not request.is_private:
                change = self._pins.add if request.params.pin else self._pins.remove
                change(request.namespace, request.packed_ids)
            self.end(request, now)
            return [*outcomes, Sampled(request, (), "limit", vector=vector)]
        if any(each.tokens == (NO_TOKEN,) for each in results):
            return [*outcomes, *self._fail_sampling(work, now)]
        return outcomes + self._take_results(results, now)

    def _take_results(self, results: Sequence[RequestResult], now: float) -> list[Outcome]:
        """Take over the tokens that requests got, or why they got none."""
        outcomes: list[Outcome] = []
        for each in results:
            if each.tokens == (CONSTRAINT_FAILED,):
                outcomes.append(self._fail_constraint(each.request, now))
            elif each.tokens:
                outcomes.append(self._take_tokens(each, now))
        return outcomes

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
            self.admission.preempt(request, now)
            self._dropper.drop_paths([(namespace, tokens)])
            is_left = self.cache.match(namespace, reused).n_cached >= request.n_reused
            request.isolate(reused if is_left else b"")
            return [DecodeFailed(request, INVALID_LOGITS, is_retried=True)]
        failed = work.samples or (request,)
        for each in failed:
            self.end(each, now)
        self._dropper.drop_paths([(namespace, tokens)])
        return [DecodeFailed(each, INVALID_LOGITS) for each in failed]

    def _take_tokens(self, result: RequestResult, now: float) -> Sampled:
        """Append sampled tokens to a request, and those forced after them, as far as the request's limits allow."""
        request, tokens = result.request, result.tokens + result.forced
        self._drop_distrusted(request)
        reason, truncated, n_taken = None, False, 0
        while reason is None and n_taken < len(tokens):
            request.add_token(tokens[n_taken], now, forced=n_taken >= len(result.tokens))
            reason, truncated = self._end_reason(request, tokens[n_taken])
            n_taken += 1
        if reason:
            self.end(request, now)
        return Sampled(request, tokens[:n_taken], reason, truncated, result.scores[:n_taken])

    def _drop_distrusted(self, request: Request) -> None:
        """Drop a cached prefix without which the outputs are valid now.

        Only the last node is dropped: if the fault is further up, the next request that reuses it will show that.
        """
        if request.distrusted:
            self._dropper.invalidate_path(
                request.shared_namespace, request.distrusted, with_public=request.n_public > 0
            )
            request.distrusted = b""

    def _end_reason(self, request: Request, token: int) -> tuple[FinishReason | None, bool]:
        """Return why a request ends after a token (None if it does not), and True if its context is full."""
        if token in self._eog:
            return "eos", False
        if request.n_remaining == 0:
            return "limit", False
        is_full = len(request.tokens) >= self.n_ctx_slot and not request.params.shift.is_on
        return ("limit" if is_full else None), is_full

    def _drop_incomplete(self, plan: StepPlan, incomplete: Collection[int], now: float) -> None:
        """Drop sequences whose operations failed; their requests start again from what is cached."""
        self.cache.on_incomplete(plan.operations, incomplete, now)
        for seq in incomplete:
            request = self.slots[seq].request if seq < len(self.slots) else None
            if request is not None:
                self._invalidate(request)
            else:
                self.cache.invalidate(seq)

    def _recover(self, plan: StepPlan, result: StepResult) -> Request | None:
        """Keep what a failed decode computed; returns the request at fault, to be ended, if it ran alone."""
        # 1. Requests of the step continue from what their sequences hold now.
        cache, status = self.cache, result.decoded.status
        may_have_lost_states = status in (Status.ABORTED, Status.FATAL)
        if may_have_lost_states:
            cache.on_step_failed({work.run.seq: work.run.start for work in plan.work})
        for work in plan.work:
            self._keep_computed(work, result.lengths[work.run.seq] - work.run.start)
        # 2. A step may also move the recurrent states of other sequences in llama.cpp; if it fails, these are lost.
        if may_have_lost_states:
            if not cache.settings.can_reuse:
                computed = [work.request for work in plan.work]
                for request in self.running:
                    if request not in computed:
                        self._invalidate(request)
            cache.recover_states(request.slot for request in self.running if not request.is_invalidated)
        # 3. Cells are counted exactly, so they should not run out (fact 12). If they do, evict all idle ones and
        #    retry.
        if status is Status.NO_CELLS and cache.evict(cache.cells.idle):
            return None
        # 4. If anything but one request may be at fault, each request is retried alone.
        is_alone = len(plan.work) == 1 and not plan.padding and not plan.work[0].run.n_drafted
        for work in plan.work:
            if n_drafted := work.run.n_drafted:
                # So that a step that fails for its size is not tried again and again.
                work.request.acceptance.add(n_drafted, 0)
            work.request.draft = NO_TOKENS
            work.request.is_suspect = not is_alone
        if not is_alone:
            return None
        cache.invalidate(plan.work[0].run.seq)
        return plan.work[0].request

    def _keep_computed(self, work: Work, n: int) -> None:
        """Keep the first `n` tokens of a run that failed, if a request can continue from there."""
        request, run = work.request, work.run
        # Tokens that were computed have no scores, so a request that scores its prompt must compute them again.
        # A tile may have been computed in several batches, of which one failed.
        is_part = run.tile is not None and 0 < n < len(run.tokens)
        if not 0 <= n <= len(run.tokens) or is_part or (n and not request.is_scored):
            self._invalidate(request)
            return
        self.cache.append(run.seq, work.as_cached(n))
        if self.cache.length(run.seq) != len(request.tokens):
            return
        # The last token's logits were never sampled from, so it is computed again, and its tile with it.
        n_kept = len(request.tokens) - 1 if run.tile is None else run.tile.start
        if self.cache.settings.can_trim and n_kept:
            self.cache.truncate(run.seq, n_kept)
        else:
            self._invalidate(request)

    def _invalidate(self, request: Request) -> None:
        self.cache.invalidate(request.slot)
        request.is_invalidated = True

    def _turns_for(self, info: ModelInfo) -> AdapterTurns | Turns | None:
        """Return the turns that requests take where a step may not have all of them."""
        new_turns = partial(self._turns_of_kinds, info)
        turn_s = min(_MIN_TURN * info.adapter_switch_ms / 1e3, _MAX_TURN_S)
        return AdapterTurns(turn_s, new_turns) if info.adapters else new_turns()

    def _turns_of_kinds(self, info: ModelInfo) -> Turns | None:
        """Return the turns that requests with the same adapters take, tiles and text apart."""
        turns = self._turns_of_lengths(info)
        return ImageTurns(turns) if info.projector is not None else turns

    def _turns_of_lengths(self, info: ModelInfo) -> PromptTurns | RunTurns | None:
        """Return the turns that requests take where a step may not have runs of any lengths."""
        if not info.state.kind.allows_mixed_lengths:
            return RunTurns()
        return None if self.cache.settings.unified else PromptTurns(self.chunks)
