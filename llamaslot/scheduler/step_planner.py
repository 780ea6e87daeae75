"""Plan of one step: decodes first, then the prompts with the fewest tokens left, as far as one step may have both.

Running requests are in the order of `fair_share.by_share`: the oldest of each client, then the second oldest ones,
and so on. Cells go to the first of them first.

1. If free cells do not suffice, idle ones are evicted, then the last request is preempted.
2. Prompts get the token budget that decodes leave. A quarter of it goes to the first prompt, so that this always
   progresses, and the rest to those with the fewest tokens left (shortest remaining first), to minimise TTFT.
   Tokens that a constraint forced after a sampled one count as prompt tokens, but a decoding request is never the
   first prompt.
3. If all requests decode, it counts the following steps that need no decision, and frees cells for some of them.

Where llama.cpp should not compute runs of different lengths together, requests take turns before that:

    NoTurns        a step may have all requests
    PromptTurns    all decoding requests, or one prompt: in a partitioned pool
    RunTurns       single tokens of any number of requests, or a longer run of one: for models with both sliding
                   windows and recurrent states

`next` returns the requests for the next step. Only `commit` changes state, so a plan that is not executed takes no
turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from llamaslot.base.backend import Run
from llamaslot.kvcache.cache import KVCache
from llamaslot.scheduler.chunk_sizer import ChunkSizer
from llamaslot.scheduler.padding import Padding, DummyRows
from llamaslot.scheduler.request import Request
from llamaslot.scheduler.step import Turn, Work

MAX_OVERTAKEN = 3
"""Most steps of other prompts before one of the first prompt, which so gets a quarter, as in a unified pool."""
FIRST_PROMPT_FRACTION = 0.25
"""Fraction of a step's prompt tokens that goes to the first prompt."""
MAX_CELLS_AHEAD = 32
"""Most idle cells evicted at once for extra steps: more evict prefixes too early, fewer need more plans."""


class NoTurns:
    """Null implementation for unified pools of most models, in which steps may have runs of any lengths."""

    def next(self, able: Sequence[Request], n_pending: Callable[[Request], int], now: float) -> Turn:
        """Return a turn for all `able` requests."""
        return Turn(able)

    def commit(self, turn: Turn) -> None:
        """Do nothing, because no request waits for a turn."""


class PromptTurns:
    """Turns of prompts in a partitioned pool: a step computes decodes, or a single prompt.

    llama.cpp computes tokens of several slots together only if each slot has equally many (fact 3). So two prompts
    in one step would be computed in small pieces, and a prompt beside decodes would take as long as two steps. A
    prompt therefore has a step of its own, and goes first as long as the decodes still get their next tokens within
    the gap (`ChunkSizer.limit`): a short prompt gets its first token earlier, and the decodes' intervals stay the
    same. Every fourth step of prompts is for the first one by share, the others for the one with the fewest tokens
    left.
    """

    def __init__(self, chunks: ChunkSizer) -> None:
        self._chunks = chunks
        self._n_overtaken = 0
        """Number of steps of other prompts since the first prompt's last step."""
        self._waiting_since: float | None = None
        """When the first step of prompts since the decodes' last step was planned; None if there was none."""

    def next(self, able: Sequence[Request], n_pending: Callable[[Request], int], now: float) -> Turn:
        """Return the turn of the next step; `able` are the requests that may run, in order of their share."""
        pending = {request.id: n_pending(request) for request in able}
        decodes = [request for request in able if request.is_decoding(pending[request.id])]
        prompts = [request for request in able if not request.is_decoding(pending[request.id])]
        waited_s = None if self._waiting_since is None else now - self._waiting_since
        if not prompts:
            return Turn(decodes, waited_s=waited_s)
        first = prompts[0]
        chosen = first if self._n_overtaken == MAX_OVERTAKEN else min(prompts, key=lambda each: pending[each.id])
        if waited_s is not None and not self._can_wait(decodes, waited_s, pending[chosen.id]):
            return Turn(decodes, waited_s=waited_s)
        since = now if self._waiting_since is None else self._waiting_since
        n_overtaken = 0 if chosen is first else self._n_overtaken + 1
        return Turn(
            [chosen], n_waiting=len(decodes), waiting_since=since, waited_s=waited_s, n_overtaken=n_overtaken
        )

    def _can_wait(self, decodes: Sequence[Request], waited_s: float, n_prompt: int) -> bool:
        """True if the gap leaves time for a query block of the prompt, or for all that the prompt has left."""
        # A prompt that is cached whole counts as decoding, but its user still waits for the first token.
        if any(not request.n_generated for request in decodes):
            return False
        limit = self._chunks.limit(0, n_waiting=len(decodes), waited_s=waited_s)
        return limit >= min(n_prompt, self._chunks.block(0))

    def commit(self, turn: Turn) -> None:
        """Record that a step with this turn was carried out."""
        self._waiting_since = turn.waiting_since if turn.n_waiting else None
        if turn.n_overtaken is not None:
            self._n_overtaken = turn.n_overtaken


class RunTurns:
    """Turns for models with both sliding windows and recurrent states, where all runs of a step must have the same
    length (fact 33).

    1. A step computes either one token each of any number of requests, or a longer run of a single request: a chunk
       of a prompt, or what a constraint forced after a sampled token. Both kinds of steps alternate.
    2. Longer runs of decodes and of prompts alternate as well, so that a decode does not wait for all prompts, nor
       a prompt for all decodes.
    3. Otherwise the request that has waited longest gets the longer run.
    """

    def __init__(self) -> None:
        self._last_had_long_run = False
        """True if the last step had a longer run."""
        self._last_was_forced = False
        """True if the last longer run belonged to a decoding request."""
        self._last_long_run = ""
        """Id of the request that had the last longer run."""
        self._order: list[str] = []
        """Ids of the other requests that had longer runs to compute then, the next one first."""

    def next(self, able: Sequence[Request], n_pending: Callable[[Request], int], now: float) -> Turn:
        """Return the turn of the next step; `able` are the requests that may run, in order of their share.

        `n_pending` returns the number of tokens that a request has to compute.
        """
        pending = [(request, n_pending(request)) for request in able]
        single = [request for request, n in pending if n == 1]
        longer = [(request, request.is_decoding(n)) for request, n in pending if n > 1]
        n_forced = sum(is_decoding for _, is_decoding in longer)
        if not longer or (single and self._last_had_long_run):
            return Turn(single, n_waiting=n_forced)
        places = {name: i for i, name in enumerate(self._order)}
        # New requests come after those that wait already: otherwise a stream of short prompts would overtake a long
        # one forever. The last request served has waited least, so it comes after the new ones.
        longer.sort(key=lambda each: (each[0].id == self._last_long_run, places.get(each[0].id, len(places))))
        chosen = next((each for each in longer if each[1] != self._last_was_forced), longer[0])
        request, is_forced = chosen
        longer.remove(chosen)
        long_runs = (request.id, *(other.id for other, _ in longer))
        return Turn([request], long_runs, is_forced, n_waiting=len(single) + n_forced - is_forced)

    def commit(self, turn: Turn) -> None:
        """Record that a step with this turn was carried out."""
        self._last_had_long_run = bool(turn.long_runs)
        if turn.long_runs:
            self._last_was_forced = turn.is_forced
            self._last_long_run, *self._order = turn.long_runs


Turns: TypeAlias = NoTurns | PromptTurns | RunTurns


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
        dummy_rows: DummyRows,
        *,
        running: list[Request],
        preempt: Callable[[Request], None],
        siblings: Callable[[Request], Sequence[Request]],
        n_spare_rows: int,
    ) -> None:
        self._n_ctx_slot = n_ctx_slot
        self._cache = cache
        self._chunks = chunks
        self._padding = padding
        self._dummy_rows = dummy_rows
        self._running = running
        self._preempt = preempt
        self._siblings = siblings
        self._n_spare_rows = n_spare_rows
        self._n_granted = 0
        self._n_padding = 0
        self._is_chunked = False
        self.preempted: list[Request] = []
        """Requests that were sent back to the queue."""
        self._served: set[str] = set()
        """Waiting requests whose first token this step samples."""

    def grant(self, requests: Sequence[Request], *, turn: Turn) -> list[Work]:
        """Return the work of this step for some of the running requests, sorted by sequence id.

        `requests` are in order of their share. `turn` has the number of decodes that wait for the end of this step,
        and how long they have waited.
        """
        pending = {r.id: len(r.tokens) - self._cache.length(r.slot) for r in requests}
        decodes = {r.id for r in requests if r.is_decoding(pending[r.id])}
        n_decoding = len(decodes)
        due = {r.id: r.stops.limit(self._cache.length(r.slot), pending[r.id]) for r in requests}
        wanted = self._within_logits(requests, due)
        limit = self._chunks.limit(n_decoding, n_waiting=turn.n_waiting, waited_s=turn.waited_s)
        shares = self._shares(wanted, decodes, limit)
        if self._leaves_rest(due, shares):
            spans = [(self._cache.length(request.slot), shares[request.id]) for request in requests]
            is_one_pass = self._cache.settings.unified or len(requests) == 1
            if is_one_pass and self._padding.gain_ms(spans, self._cache.cells.used):
                # Fill the query block with more tokens of these prompts instead of padding.
                limit = self._chunks.block(n_decoding)
            n_left = max((n for name, n in wanted.items() if name not in decodes), default=0)
            may_grow = turn.waited_s is None
            limit = self._chunks.without_short_rest(limit, n_left, n_decoding, may_grow=may_grow)
            shares = self._shares(wanted, decodes, limit)
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
        """Return the work with the drafts of requests, as far as the step, free cells and rows of logits have room.

        The part of a draft that is rejected is removed, so the model must be able to truncate sequences.
        """
        if not any(len(work.request.draft) for work in granted) or not self._cache.settings.can_trim:
            return [*granted]
        n_rows = self._n_spare_rows - sum(len(work.run.targets) for work in granted if work.run.targets is not None)
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
        wanted, left = dict(pending), self._n_spare_rows
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
    def _shares(pending: dict[str, int], decodes: AbstractSet[str], left: int) -> dict[str, int]:
        """Return the number of tokens that each request may compute in this step, given its `pending` tokens.

        Each decoding request gets one token; `left` are divided among prompts and tokens forced by constraints.
        """
        shares = {name: min(n, 1) if name in decodes else 0 for name, n in pending.items()}
        rests = {name: n - shares[name] for name, n in pending.items() if n > shares[name]}
        turns = [(name, left) for name in sorted(rests, key=lambda name: rests[name])]
        first = next((name for name in rests if name not in decodes), None)
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
        """Return padding that makes this step faster, if any (`padding.py`).

        None if a request has more tokens than this step computes, because `grant` has filled the step with those.
        """
        if self._is_chunked or not work:
            return ()
        return self._pad_unified(work) if self._cache.settings.unified else self._pad_parts(work)

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
