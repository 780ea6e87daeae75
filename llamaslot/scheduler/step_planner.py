"""Plan of one step: decodes first, then the prompts with the fewest tokens left, as far as one step may have both.

Running requests are in the order of `by_share` (`admission.py`): the oldest of each client, then the second oldest
ones, and so on. Cells go to the first of them first.

`turns.py` chooses the requests that a step may have, where that may not be all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from llamaslot.base.backend import Run
from llamaslot.base.images import Tile
from llamaslot.base.model import ModelInfo
from llamaslot.kvcache.cache import KVCache
from llamaslot.scheduler.admission import Admission
from llamaslot.scheduler.chunk_sizer import ChunkSizer
from llamaslot.scheduler.drafter import Drafter
from llamaslot.scheduler.padding import DummyRows, Padding
from llamaslot.scheduler.request import Request
from llamaslot.scheduler.step import StepPlan, StepResult, Turn, Work

FIRST_PROMPT_FRACTION = 0.25
"""Fraction of a step's prompt tokens that goes to the first prompt."""
MAX_CELLS_AHEAD = 32
"""Most idle cells evicted at once for extra steps: more evict prefixes too early, fewer need more plans."""
_MAX_EXTRA_STEPS = 64
"""Most extra steps of several requests: for long replies, the layout is considered again (`layout.py`)."""


@dataclass(slots=True)
class _Grant:
    """Tokens of one request that a step may compute."""

    request: Request
    n_pending: int
    """Its tokens without KV."""
    n_due: int
    """Of these, the tokens up to its next checkpoint."""
    n_wanted: int
    """Of these, as many as can be scored in one step, if it scores its prompt."""
    is_decoding: bool
    n: int = 0
    """Of these, the tokens that this step computes if it gets cells for them."""
    tile: Tile | None = None
    """The tile that these are, which needs cells for all of them."""


class StepPlanner:
    """Plans which tokens of the running requests a step computes, and preempts requests for their cells.

    `n_ctx_slot` is the number of tokens that a slot may hold.
    """

    def __init__(
        self, info: ModelInfo, cache: KVCache, admission: Admission, chunks: ChunkSizer, drafter: Drafter
    ) -> None:
        self._n_ctx_slot = info.n_ctx_slot
        self._n_spare_rows = info.n_spare_rows
        self._cache = cache
        self._admission = admission
        self._chunks = chunks
        self._drafter = drafter
        self.set_costs(info)

    def set_costs(self, info: ModelInfo) -> None:
        """Take over the costs of steps."""
        self._switch_s = info.adapter_switch_ms / 1e3
        self.set_layout(info)
        # Without `step_cost` there are no dummy rows. It is measured only for models whose sequences can be
        # truncated, so dummy rows can always be removed.
        self._dummy_rows = DummyRows(info.step_cost, info.n_slots)

    def set_layout(self, info: ModelInfo) -> None:
        """Take over the layout that the cache's settings have now."""
        settings = self._cache.settings
        self._keeps_earlier_states = info.state.n_rollback > 0
        # With recurrent states llama.cpp splits steps of several sequences, so padding would only cost time.
        is_split = info.keeps_checkpoints and info.state.kind.has_recurrent_state
        has_place = settings.scratch is not None if settings.unified else settings.can_trim
        self._padding = Padding(info.step_cost if has_place and not is_split else None, info.n_ubatch)

    def plan(
        self,
        requests: Sequence[Request],
        turn: Turn,
        now: float,
        *,
        running: Sequence[Request],
        may_pad: bool,
        may_repeat: bool,
    ) -> StepPlan:
        """Plan a step of some of the `running` requests, both in order of their share.

        `turn` says how many decodes wait for the end of the step, and how long they have waited. With `may_repeat`,
        steps that repeat this one may follow it without a plan.
        """
        # 1. Each decoding request computes a token. Prompts get the token budget that these leave: a quarter of it
        #    goes to the first prompt, so that this always progresses, and the rest to those with the fewest tokens
        #    left (shortest remaining first), to minimise TTFT. Tokens that a constraint forced after a sampled one
        #    count as prompt tokens, but a decoding request is never the first prompt.
        grants = self._grant(requests, turn) if turn.tile is None else self._grant_tile(requests, turn.tile)
        # 2. If free cells do not suffice, idle ones are evicted, then the last running request is preempted.
        work, preempted = self._take_cells(grants, running, now)
        # 3. Drafted tokens get what is left of the step and of the cells.
        work = sorted(self._with_drafts(work), key=lambda each: each.run.seq)
        if self._keeps_earlier_states:
            # Before a shorter run, llama.cpp may compute a prompt token by token (fact 44).
            work.sort(key=lambda each: len(each.run.tokens))
        plan = StepPlan(work=work, preempted=preempted, turn=turn)
        # 4. Padding may make the step faster (`padding.py`). Not if a request has more tokens than the step
        #    computes, because step 1 has filled it with those.
        if work and may_pad and turn.tile is None and all(each.n == each.n_due for each in grants):
            plan.padding = self._pad_unified(plan) if self._cache.settings.unified else self._pad_parts(work)
        # 5. If all requests decode, the following steps may need no decision.
        if work and may_repeat and len(work) == len(requests):
            plan.n_extra_steps = self._n_extra_steps(plan)
        return plan

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Learn the costs of prompt tokens, decodes and dummy rows from a step that was computed."""
        if plan.turn.tile is not None:
            # The projector's time says nothing of other steps.
            return
        seconds = result.seconds
        if plan.turn.changes_adapters:
            seconds = max(seconds - self._switch_s, 0.0)
        # Tokens forced by constraints cost as much as prompt tokens, so they count as such.
        lengths = [(len(work.run.tokens) - work.run.n_drafted, work.request) for work in plan.work]
        n_decoding = sum(request.is_decoding(n) for n, request in lengths)
        n_prefill = sum(n for n, _ in lengths) - n_decoding
        n_drafted = sum(work.run.n_drafted for work in plan.work)
        if n_drafted and not n_prefill:
            # What drafts cost is learned apart: they are shorter than chunks, and sampled after each token.
            n_cells = max(work.run.start for work in plan.work)
            self._drafter.observe(n_drafted, n_decoding, n_cells, seconds)
            return
        n_prefill += n_drafted
        n_padding = sum(len(run.tokens) for run in plan.padding) if n_prefill else 0
        self._chunks.observe(n_prefill + n_padding, n_decoding, seconds)
        if n_prefill == 0 and not self._cache.settings.unified:
            self._dummy_rows.observe([*(work.run for work in plan.work), *plan.padding], seconds)

    def _grant(self, requests: Sequence[Request], turn: Turn) -> list[_Grant]:
        """Return how many tokens each request may compute, if there are cells for them."""
        grants: list[_Grant] = []
        n_rows = self._n_spare_rows
        for request in requests:
            length = self._cache.length(request.slot)
            n_pending = len(request.tokens) - length
            n_due = request.n_alike(length, request.stops.limit(length, n_pending))
            if request.params.shift.is_on:
                # Tokens that a constraint forced may exceed the context: the next plan shifts it.
                n_due = min(n_due, self._n_ctx_slot - 1 - length)
            n_wanted = n_due
            if not request.is_scored:
                n_wanted = min(n_due, n_rows)
                n_rows -= n_wanted
            grants.append(_Grant(request, n_pending, n_due, n_wanted, request.is_decoding(n_pending)))
        n_decoding = sum(each.is_decoding for each in grants)
        # Those that have waited for a known time have the same adapters.
        n_waiting = turn.n_waiting + (turn.n_apart if turn.waited_s is None else 0)
        limit = self._chunks.limit(n_decoding, n_waiting=n_waiting, waited_s=turn.waited_s)
        if any(request.params.is_background for request in requests):
            # It runs alone.
            limit = min(limit, self._chunks.background())
        self._divide(grants, limit)
        if any(each.n < each.n_due for each in grants):
            spans = [(self._cache.length(each.request.slot), each.n) for each in grants]
            is_one_pass = self._cache.settings.unified or len(requests) == 1
            if is_one_pass and self._padding.gain_ms(spans, self._cache.cells.used):
                # Fill the query block with more tokens of these prompts instead of padding.
                limit = self._chunks.block(n_decoding)
            n_left = max((each.n_wanted for each in grants if not each.is_decoding), default=0)
            may_grow = turn.waited_s is None
            limit = self._chunks.without_short_rest(limit, n_left, n_decoding, may_grow=may_grow)
            self._divide(grants, limit)
        return grants

    @staticmethod
    def _grant_tile(requests: Sequence[Request], tile: Tile) -> list[_Grant]:
        """Return the grant of a whole tile to its request, unless that stopped for a checkpoint."""
        n = tile.end - tile.start
        return [
            _Grant(each, len(each.tokens) - tile.start, n, n, is_decoding=False, n=n, tile=tile)
            for each in requests
        ]

    @staticmethod
    def _divide(grants: Sequence[_Grant], n_left: int) -> None:
        """Give each decoding request one token, and divide `n_left` among prompts and forced tokens."""
        for each in grants:
            each.n = min(each.n_wanted, 1) if each.is_decoding else 0
        rests = [each for each in grants if each.n < each.n_wanted]
        turns = [(each, n_left) for each in sorted(rests, key=lambda each: each.n_wanted - each.n)]
        first = next((each for each in rests if not each.is_decoding), None)
        if first is not None:
            turns.insert(0, (first, math.ceil(n_left * FIRST_PROMPT_FRACTION)))
        for each, most in turns:
            n = min(each.n_wanted - each.n, most, n_left)
            each.n += n
            n_left -= n

    def _take_cells(
        self, grants: Sequence[_Grant], running: Sequence[Request], now: float
    ) -> tuple[list[Work], list[Request]]:
        """Return the work for which there are cells, and the requests that were preempted for them."""
        work: list[Work] = []
        preempted: list[Request] = []
        left = [*running]
        n_taken = 0
        for grant in grants:
            request, n = grant.request, grant.n
            if self._cache.settings.unified:
                n_least = n if grant.tile is not None else 1
                while n and request in left:
                    free = self._cache.free_cells(n_taken + n, n_least=n_taken + n_least) - n_taken
                    if free >= n_least:
                        n = min(n, free)
                        break
                    last = left.pop()
                    self._admission.preempt(last, now)
                    preempted.append(last)
            if n and request in left:
                work.append(self._work(grant, n, work))
                n_taken += n
        return work, preempted

    def _work(self, grant: _Grant, n: int, before: Sequence[Work]) -> Work:
        """Return the work of the first `n` tokens of a grant; that `before` is in the same step."""
        request, start = grant.request, self._cache.length(grant.request.slot)
        n_outputs = int(n == grant.n_pending and request.has_output)
        targets = request.targets(start, n)
        run = Run(request.slot, start, request.inputs(start, start + n), n_outputs, targets, grant.tile)
        if not n_outputs or not request.wants_tokens or request.sampler is not None:
            return Work(request, run)
        served = [other for each in before for other in each.siblings]
        return Work(request, run, tuple(each for each in self._admission.siblings(request) if each not in served))

    def _with_drafts(self, granted: list[Work]) -> list[Work]:
        """Return the work with the drafts of requests, as far as the step, free cells and rows of logits have room.

        The part of a draft that is rejected is removed, so the model must allow that.
        """
        if not any(len(work.request.draft) for work in granted):
            return granted
        wanted = [self._n_drafted(each) for each in granted]
        n_granted = sum(len(work.run.tokens) for work in granted)
        n_rows = self._n_spare_rows - sum(len(work.run.targets) for work in granted if work.run.targets is not None)
        left = min(sum(wanted), self._chunks.n_ubatch - n_granted, n_rows)
        if self._cache.settings.unified:
            missing = n_granted + left - self._cache.cells.free
            if missing > 0:
                # As for extra steps, few idle cells at once: most of a draft may be rejected.
                self._cache.evict(min(missing, MAX_CELLS_AHEAD))
            left = min(left, self._cache.limit_by_windows(self._cache.cells.free - n_granted, n_granted))
        if not self._drafter.may_differ:
            # One more run, or one of another length, would end up in a micro-batch of its own.
            most = 0 if any(len(each.run.tokens) > 1 for each in granted) else left // len(granted)
            wanted = [max(min(*wanted, most), 0)] * len(granted)
        work = []
        for each, n_wanted in zip(granted, wanted, strict=True):
            run = each.run
            if n := min(n_wanted, max(left, 0)):
                tokens = np.concatenate([run.tokens, each.request.draft[:n]])
                run = replace(run, tokens=tokens, n_outputs=1 + n)
                left -= n
            work.append(replace(each, run=run))
        return work

    def _n_drafted(self, work: Work) -> int:
        """Return how many drafted tokens a request may have in its run."""
        request, run = work.request, work.run
        # Siblings have no KV of their own in which several tokens could be kept.
        if not run.n_outputs or work.siblings:
            return 0
        # A draft must not pass the position of the next checkpoint.
        n_due = request.stops.limit(run.start, len(run.tokens) + len(request.draft)) - len(run.tokens)
        limits = [n_due, self._drafter.max_draft, self._n_ctx() - len(request.tokens) - 1]
        if (most := request.n_draftable) is not None:
            limits.append(most)
        return max(min(limits), 0)

    def _pad_parts(self, work: Sequence[Work]) -> Sequence[Run]:
        """Return dummy rows that join decodes into fewer passes, or padding after a prompt that is alone."""
        settings = self._cache.settings
        if all(len(each.run.tokens) == 1 for each in work):
            held = {slot: self._cache.length(slot) for slot in range(settings.n_slots)}
            free = {slot: n for slot, n in held.items() if n < settings.seq_cells}
            return self._dummy_rows.fill([each.run.seq for each in work], free)
        if len(work) > 1:
            # A decoding request has forced tokens, which llama.cpp computes in further passes anyway.
            return ()
        run = work[0].run
        n, end = len(run.tokens), run.start + len(run.tokens)
        if not self._padding.gain_ms([(run.start, n)], self._cache.cells.used):
            return ()
        padding = self._padding.run(n, run.seq, end)
        return (padding,) if end + len(padding.tokens) <= settings.seq_cells else ()

    def _pad_unified(self, plan: StepPlan) -> Sequence[Run]:
        """Return padding in the scratch sequence.

        Idle cells are evicted for it if it gains more time than computing them again takes.
        """
        spans = [(each.run.start, len(each.run.tokens)) for each in plan.work]
        gain = self._padding.gain_ms(spans, self._cache.cells.used)
        if not gain:
            return ()
        assert self._cache.settings.scratch is not None
        run = self._padding.run(plan.n_tokens, self._cache.settings.scratch)
        n, free = len(run.tokens), self._cache.cells.free - plan.n_tokens
        if self._cache.limit_by_windows(n, plan.n_tokens) < n:
            return ()
        may_evict = not plan.preempted and gain > self._padding.eviction_cost_ms
        if free < n <= free + self._cache.cells.idle and may_evict:
            free += self._cache.evict(n - free)
        return (run,) if free >= n else ()

    def _n_extra_steps(self, plan: StepPlan) -> int:
        """Return how many further steps need no plan; evicts up to `MAX_CELLS_AHEAD` idle cells for them.

        Each computes what the one before sampled, and only the last may reach a limit. None for requests whose
        sampler this step creates: the event loop knows it only after the commit. A request with stop strings, which
        are searched on the event loop, may be computed once more than it should; so there are none if that would
        cost it the partial state that its next turn continues from.
        """
        work, cache = plan.work, self._cache
        requests = [each.request for each in work]
        if not all(each.run.n_outputs and len(each.run.tokens) == 1 for each in work):
            return 0
        has_states = cache.settings.has_states
        if any(request.sampler is None or (has_states and request.params.ends_by_text) for request in requests):
            return 0
        n_ctx = self._n_ctx()
        left = [n_ctx - len(request.tokens) for request in requests]
        left += [n for request in requests if (n := request.n_remaining) is not None]
        left += [request.stops.limit(cache.length(request.slot), n_ctx) for request in requests]
        # In a partitioned pool no cells are counted: a request that fills its part continues in another layout.
        n_steps = max(min(left) - 1, 0)
        if len(work) > 1:
            n_steps = min(n_steps, _MAX_EXTRA_STEPS)
        if cache.settings.unified:
            free = cache.cells.free - plan.n_tokens
            wanted = min(n_steps * len(work), max(len(work), MAX_CELLS_AHEAD))
            if not plan.preempted and free < wanted:
                free += cache.evict(wanted - free)
            free = cache.limit_by_windows(free, plan.n_tokens)
            n_steps = min(n_steps, free // len(work))
        return n_steps

    def _n_ctx(self) -> int:
        """Return the number of tokens that a slot may hold in this layout."""
        return min(self._n_ctx_slot, self._cache.settings.seq_cells)
