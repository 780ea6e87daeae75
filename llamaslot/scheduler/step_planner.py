"""Plan of one step: streams first, then the prompts with the fewest tokens left, as far as one step may have both.

Running requests are in the order of `fair_share.by_share`: the oldest of each client, then the second oldest ones,
and so on. Cells go to the first of them first.

1. If free cells do not suffice, idle ones are evicted, then the last request is preempted.
2. Prompts get the token budget that streams leave. A quarter of it goes to the first prompt, so that this always
   progresses, and the rest to those with the fewest tokens left (shortest remaining first), to minimise TTFT.
   Tokens that a constraint forced after a stream's last one count as prompt tokens, but a stream is never the first
   prompt. If a step may have only one prompt, `turns.py` chooses it.
3. If all requests decode, it counts the following steps that need no decision, and frees cells for some of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

import numpy as np

from llamaslot.base.backend import Run
from llamaslot.kvcache.cache import KVCache
from llamaslot.scheduler.chunk_sizer import ChunkSizer
from llamaslot.scheduler.padding import Padding
from llamaslot.scheduler.passes import Passes
from llamaslot.scheduler.request import Request
from llamaslot.scheduler.step import Turn, Work

FIRST_PROMPT_FRACTION = 0.25
"""Fraction of a step's prompt tokens that goes to the first prompt."""
MAX_CELLS_AHEAD = 32
"""Most idle cells evicted at once for extra steps: more evict prefixes too early, fewer need more plans."""


class StepPlanner:
    """Plans one step for the `running` requests, which are in order of their share.

    `preempt` sends a request back to the queue. Call in this order: `grant`, `pad`, `n_extra_steps`.
    """

    def __init__(
        self,
        n_ctx_slot: int,
        cache: KVCache,
        chunks: ChunkSizer,
        padding: Padding,
        passes: Passes,
        *,
        running: list[Request],
        preempt: Callable[[Request], None],
        siblings: Callable[[Request], Sequence[Request]],
        n_rows: int,
    ) -> None:
        self._n_ctx_slot = n_ctx_slot
        self._cache = cache
        self._chunks = chunks
        self._padding = padding
        self._passes = passes
        self._running = running
        self._preempt = preempt
        self._siblings = siblings
        self._n_rows = n_rows
        self._n_granted = 0
        self._n_padding = 0
        self._is_chunked = False
        self.preempted: list[Request] = []
        """Requests that were sent back to the queue."""
        self._served: set[str] = set()
        """Waiting requests whose first token this step samples."""

    def grant(self, requests: Sequence[Request], *, turn: Turn) -> list[Work]:
        """Return the work of this step for some of the running requests, sorted by sequence id.

        `requests` are in order of their share. `turn` has the number of streams that wait for the end of this step,
        and how long they have waited.
        """
        pending = {r.id: len(r.tokens) - self._cache.length(r.slot) for r in requests}
        streams = {r.id for r in requests if r.is_stream(pending[r.id])}
        n_decoding = len(streams)
        due = {r.id: r.stops.limit(self._cache.length(r.slot), pending[r.id]) for r in requests}
        wanted = self._within_logits(requests, due)
        limit = self._chunks.limit(n_decoding, n_waiting=turn.n_waiting, waited_s=turn.waited_s)
        shares = self._shares(wanted, streams, limit)
        if self._leaves_rest(due, shares):
            spans = [(self._cache.length(request.slot), shares[request.id]) for request in requests]
            is_one_pass = self._cache.settings.unified or len(requests) == 1
            if is_one_pass and self._padding.gain_ms(spans, self._cache.cells.used):
                # Fill the query block with more tokens of these prompts instead of padding.
                limit = self._chunks.block(n_decoding)
            n_left = max((n for name, n in wanted.items() if name not in streams), default=0)
            may_grow = turn.waited_s is None
            limit = self._chunks.without_short_rest(limit, n_left, n_decoding, may_grow=may_grow)
            shares = self._shares(wanted, streams, limit)
        self._is_chunked = self._leaves_rest(due, shares)
        granted: list[Work] = []
        for request in requests:
            if request not in self._running:
                continue
            n = self._free_cells(shares[request.id], request)
            if n == 0:
                continue
            granted.append(self._work(request, n, is_last=n == pending[request.id]))
            self._n_granted += n
        granted = self._with_drafts(granted)
        granted.sort(key=lambda work: work.run.seq)
        return granted

    def _with_drafts(self, granted: Sequence[Work]) -> list[Work]:
        """Return the work with the drafts of streams, as far as the step, free cells and rows of logits have room.

        The part of a draft that is rejected is removed, so the model must be able to truncate sequences.
        """
        if not any(len(work.request.draft) for work in granted) or not self._cache.settings.can_trim:
            return [*granted]
        n_rows = self._n_rows - sum(len(work.run.targets) for work in granted if work.run.targets is not None)
        left = min(self._chunks.n_ubatch - self._n_granted, n_rows)
        if self._cache.settings.unified:
            free = self._cache.cells.free - self._n_granted
            left = min(left, self._cache.limit_by_windows(free, self._n_granted))
        work = []
        for each in granted:
            run, request = each.run, each.request
            limits = [left, self._n_ctx_slot - len(request.tokens) - 1]
            if (most := request.n_draftable) is not None:
                limits.append(most)
            # Siblings have no KV of their own in which several tokens could be kept.
            has_rows = run.n_outputs > 0 and not each.siblings
            if n := min(len(request.draft), max(min(limits), 0)) * has_rows:
                tokens = np.concatenate([run.tokens, request.draft[:n]])
                run = replace(run, tokens=tokens, n_outputs=1 + n)
                left -= n
                self._n_granted += n
            work.append(replace(each, run=run))
        return work

    def _within_logits(self, requests: Sequence[Request], pending: dict[str, int]) -> dict[str, int]:
        """Return the pending tokens of each request, with prompts to be scored limited by the rows of logits."""
        wanted, left = dict(pending), self._n_rows
        for request in requests:
            if not request.is_scored:
                wanted[request.id] = min(pending[request.id], left)
                left -= wanted[request.id]
        return wanted

    @staticmethod
    def _leaves_rest(pending: dict[str, int], shares: dict[str, int]) -> bool:
        """True if any request gets fewer tokens than it has pending."""
        return any(shares[name] < n for name, n in pending.items())

    @staticmethod
    def _shares(pending: dict[str, int], streams: AbstractSet[str], left: int) -> dict[str, int]:
        """Return the number of tokens that each request may compute in this step, given its `pending` tokens.

        Each stream gets one token; `left` are divided among prompts and tokens forced by constraints.
        """
        shares = {name: min(n, 1) if name in streams else 0 for name, n in pending.items()}
        rests = {name: n - shares[name] for name, n in pending.items() if n > shares[name]}
        turns = [(name, left) for name in sorted(rests, key=lambda name: rests[name])]
        first = next((name for name in rests if name not in streams), None)
        if first is not None:
            turns.insert(0, (first, math.ceil(left * FIRST_PROMPT_FRACTION)))
        for name, most in turns:
            n = min(pending[name] - shares[name], most, left)
            shares[name] += n
            left -= n
        return shares

    def _work(self, request: Request, n: int, *, is_last: bool) -> Work:
        start = self._cache.length(request.slot)
        n_outputs = int(is_last and request.wants_tokens)
        run = Run(request.slot, start, request.tokens.view(start, start + n), n_outputs, request.targets(start, n))
        if not n_outputs or request.sampler is not None:
            return Work(request, run)
        siblings = tuple(other for other in self._siblings(request) if other.id not in self._served)
        self._served.update(other.id for other in siblings)
        return Work(request, run, siblings)

    def _free_cells(self, wanted: int, request: Request) -> int:
        """Free cells for a request by eviction and preemption; returns how many, 0 if it was preempted itself."""
        if not self._cache.settings.unified or wanted == 0:
            return wanted
        while True:
            n = self._n_granted + wanted
            free = self._cache.free_cells(n, n_least=self._n_granted + 1) - self._n_granted
            if free > 0:
                return min(wanted, free)
            last = self._running.pop()
            self._preempt(last)
            self.preempted.append(last)
            if last is request:
                return 0

    def pad(self, work: Sequence[Work]) -> Sequence[Run]:
        """Return padding that makes this step faster, if any (`padding.py`, `passes.py`).

        None if a request has more tokens than this step computes, because `grant` has filled the step with those.
        """
        if self._is_chunked or not work:
            return ()
        return self._pad_unified(work) if self._cache.settings.unified else self._pad_parts(work)

    def _pad_parts(self, work: Sequence[Work]) -> Sequence[Run]:
        """Return dummy rows that join streams into fewer passes, or padding after a prompt that is alone."""
        settings = self._cache.settings
        if all(len(each.run.tokens) == 1 for each in work):
            held = {slot: self._cache.length(slot) for slot in range(settings.n_slots)}
            free = {slot: n for slot, n in held.items() if n < settings.seq_cells}
            return self._passes.fill([each.run.seq for each in work], free)
        if len(work) > 1:
            # A stream has forced tokens, which llama.cpp computes in further passes anyway.
            return ()
        run = work[0].run
        n, end = len(run.tokens), run.start + len(run.tokens)
        if not self._padding.gain_ms([(run.start, n)], self._cache.cells.used):
            return ()
        padding = self._padding.run(n, run.seq, end)
        return (padding,) if end + len(padding.tokens) <= settings.seq_cells else ()

    def _pad_unified(self, work: Sequence[Work]) -> Sequence[Run]:
        """Return padding in the scratch sequence.

        Idle cells are evicted for it if it gains more time than computing them again takes.
        """
        spans = [(each.run.start, len(each.run.tokens)) for each in work]
        gain = self._padding.gain_ms(spans, self._cache.cells.used)
        if not gain:
            return ()
        assert self._cache.settings.scratch is not None
        run = self._padding.run(self._n_granted, self._cache.settings.scratch)
        n, free = len(run.tokens), self._cache.cells.free - self._n_granted
        if self._cache.limit_by_windows(n, self._n_granted) < n:
            return ()
        may_evict = not self.preempted and gain > self._padding.eviction_cost_ms
        if free < n <= free + self._cache.cells.idle and may_evict:
            free += self._cache.evict(n - free)
        if free < n:
            return ()
        self._n_padding = n
        return (run,)

    def n_extra_steps(self, work: Sequence[Work]) -> int:
        """Return how many further steps need no plan; evicts up to `MAX_CELLS_AHEAD` idle cells for them.

        Each computes what the one before sampled, and only the last may reach a limit. None for requests with stop
        strings, which are searched on the event loop, and for those whose sampler this step creates: the event loop
        knows it only after the commit.
        """
        requests = [each.request for each in work]
        if not work or not all(each.run.n_outputs and len(each.run.tokens) == 1 for each in work):
            return 0
        if any(request.sampler is None or request.params.ends_by_text for request in requests):
            return 0
        left = [self._n_ctx_slot - len(request.tokens) for request in requests]
        left += [n for request in requests if (n := request.n_remaining) is not None]
        left += [r.stops.limit(self._cache.length(r.slot), self._n_ctx_slot) for r in requests]
        # In a partitioned pool no cells are counted: a request that fills its part continues in another layout.
        n_steps = max(min(left) - 1, 0)
        if self._cache.settings.unified:
            free = self._cache.cells.free - self._n_granted - self._n_padding
            wanted = min(n_steps * len(work), max(len(work), MAX_CELLS_AHEAD))
            if not self.preempted and free < wanted:
                free += self._cache.evict(wanted - free)
            free = self._cache.limit_by_windows(free, self._n_granted + self._n_padding)
            n_steps = min(n_steps, free // len(work))
        return n_steps
