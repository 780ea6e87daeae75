"""One step: the plan as data, and its application to a backend.

    plan    (scheduler, event loop)   what is to happen; the tree already contains the plan's operations
    apply   (here, worker thread)     executes the plan and reports what the backend really did
    commit  (scheduler, event loop)   updates the state accordingly

If a step leaves nothing to decide, `next_decode_step` returns the next one without a plan (multi-step decode). The
commits follow in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from llamaslot.base.adapters import Adapters
from llamaslot.base.backend import Backend, Decoded, Draws, Run, Sampler, Status
from llamaslot.base.generation.token_probs import TokenScore
from llamaslot.base.images import Tile
from llamaslot.base.kv_ops import (
    Copy,
    Free,
    IllegalCallError,
    Load,
    NotLoadedError,
    NotSavedError,
    Operation,
    Remove,
    Restore,
    Save,
    Share,
    Shift,
    Take,
)
from llamaslot.base.tokens import Tokens
from llamaslot.kvcache.disk_io import Job
from llamaslot.kvcache.tiers.remote_tier import Upload
from llamaslot.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of one request to compute, and waiting requests that sample their first token from the same logits."""

    request: Request
    run: Run
    siblings: tuple[Request, ...] = ()

    @property
    def samples(self) -> tuple[Request, ...]:
        """Requests that get tokens by this work: one each, or several of a draft."""
        return (self.request, *self.siblings) if self.run.n_outputs and self.request.wants_tokens else ()

    def kept(self, sampled: Sequence[int]) -> Tokens:
        """Return the tokens that the sequence keeps of the run: not the part of a draft that was not sampled."""
        run = self.run
        n_rejected = run.n_drafted - (len(sampled) - 1) if run.n_drafted else 0
        return self.as_cached(len(run.tokens) - n_rejected)

    def as_cached(self, n: int) -> Tokens:
        """Return the first `n` tokens of the run as the cache knows them."""
        return self.request.as_cached(self.run.start, self.run.tokens[:n])


@dataclass(frozen=True, slots=True)
class Turn:
    """The requests whose tokens one step may compute, as chosen in `turns.py`."""

    requests: Sequence[Request] = ()
    long_runs: tuple[Request, ...] = ()
    """All requests that have several tokens to compute: the one of this step, then the others in the order of their
    turns. Empty if the step computes single tokens, or runs of any length.
    """
    is_forced: bool = False
    """True if the run of several tokens belongs to a decoding request, whose constraint forced them."""
    tile: Tile | None = None
    """`ImageTurns` only: the tile of the only request that the step computes."""
    n_waiting: int = 0
    """Number of decoding requests that are not in this step and wait for its end."""
    waiting_since: float | None = None
    """`PromptTurns` and `ImageTurns` only: when the first step that these requests wait for was planned."""
    order: tuple[Adapters, ...] = ()
    """`AdapterTurns` only: the adapters of all requests that can run, in the order of their turns; those of this
    step at the end.
    """
    changes_adapters: bool = False
    """True if the adapters of this step are not those of the last one."""
    since: float = 0.0
    """`AdapterTurns` only: when the turn of its adapters began."""
    until: float | None = None
    """`AdapterTurns` only: when it ends; None if no request with other adapters can run."""
    n_others: int = 0
    """Number of requests with other adapters that can run."""
    n_apart: int = 0
    """Of these, the decoding ones: they wait for the end of the step too."""
    waited_s: float | None = None
    """Seconds that prompt steps have delayed the decoding requests; None if none ran since their last step."""
    n_overtaken: int | None = None
    """`PromptTurns` only: steps of other prompts since the first prompt's last step, including this one; None in a
    step of decoding requests.
    """


@dataclass(slots=True)
class StepPlan:
    """Everything that one step does, in this order."""

    operations: list[Operation] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    """Requests that were sent back to the queue to make room."""
    padding: Sequence[Run] = ()
    """Dummy tokens that make the step faster; they are removed at its end."""
    n_extra_steps: int = 0
    """Number of steps that may follow without a plan, each computing the tokens that the one before sampled."""
    jobs: list[Job] = field(default_factory=list)
    """Disk jobs to start once the operations are done."""
    uploads: list[Upload] = field(default_factory=list)
    """Uploads to the remote tier to start once the operations are done."""
    turn: Turn = Turn()

    @property
    def adapters(self) -> Adapters:
        """Adapters of the step, which all of its requests apply. Raises `IllegalCallError` if they do not."""
        of_runs = [work.request.adapters_at(work.run.start) for work in self.work]
        if any(each != of_runs[0] for each in of_runs):
            raise IllegalCallError("requests with different adapters in one step")
        return of_runs[0] if of_runs else ()

    @property
    def n_tokens(self) -> int:
        """Number of tokens to compute, including padding."""
        return sum(len(run.tokens) for run in (*(each.run for each in self.work), *self.padding))

    def without(self, incomplete: Collection[int]) -> StepPlan:
        """Return the plan without work and padding in these sequences."""
        if not incomplete:
            return self
        padding = [run for run in self.padding if run.seq not in incomplete]
        work = [each for each in self.work if each.run.seq not in incomplete]
        return replace(self, work=work, padding=padding)

    def __bool__(self) -> bool:
        """Return True if there is anything to do, or if a preemption may let the next plan do something."""
        return bool(self.operations or self.work or self.preempted or self.jobs or self.uploads)


@dataclass(frozen=True, slots=True)
class RequestResult:
    """Result of a step for one request."""

    request: Request
    sampler: Sampler | None = None
    """The request's sampler, created by this step unless it had one; None if nothing was to be sampled."""
    tokens: tuple[int, ...] = ()
    """Accepted tokens of the draft, and one more, each sampled or forced; `NO_TOKEN` alone for invalid logits."""
    scores: Sequence[TokenScore] = ()
    """Probabilities of the sampled tokens, if the request wants them."""
    forced: tuple[int, ...] = ()
    """Tokens forced after the sampled ones."""
    prompt_scores: Sequence[TokenScore] = ()
    """Probabilities of the prompt tokens that were to be scored."""
    vector: bytes = b""
    """The vector of the whole prompt, float32, if the request wants it."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step."""

    decoded: Decoded
    started: float
    """Time at which decoding began, after the operations, on the caller's clock."""
    seconds: float = 0.0
    """Duration of decoding and sampling."""
    results: Sequence[tuple[RequestResult, ...]] = ()
    """For each work that was computed, the results of its request and its siblings; none after a failed decode."""
    lengths: Mapping[int, int] = field(default_factory=dict)
    """After a failed decode: the number of tokens that each sequence of the batch now holds."""
    unsaved: frozenset[int] = frozenset()
    """Numbers of segments whose save failed for lack of memory, without those freed since."""
    incomplete: frozenset[int] = frozenset()
    """Sequences with an operation that failed for lack of memory; nothing was computed in them."""


def apply(plan: StepPlan, backend: Backend, clock: Callable[[], float]) -> StepResult:
    """Carry out a plan. Raises only for bugs, and if the backend cannot go on."""
    unsaved, incomplete = _change(plan.operations, backend)
    backend.end_changes()
    started = clock()
    plan = plan.without(incomplete)
    if not plan.work:
        return StepResult(Decoded(Status.OK, {}), started, unsaved=unsaved, incomplete=incomplete)
    draws = _draws(plan.work, backend)
    backend.use_adapters(plan.adapters)
    decoded = _decode(plan, draws, backend)
    results: Sequence[tuple[RequestResult, ...]] = ()
    lengths: dict[int, int] = {}
    if decoded.status is Status.OK:
        results = _sample(plan.work, draws, backend)
    else:
        requests = [request for work in plan.work for request in work.samples]
        for request, (_, sampler) in zip(requests, draws, strict=True):
            if request.sampler is None:
                # Nobody keeps it, since there is no result.
                sampler.close()
        for run in (work.run for work in plan.work):
            if run.n_drafted:
                _cut(run, len(run.tokens) - run.n_drafted, backend)
            lengths[run.seq] = backend.seq_len(run.seq)
    return StepResult(decoded, started, clock() - started, results, lengths, unsaved, incomplete)


def _draws(works: Sequence[Work], backend: Backend) -> Draws:
    """Return sequence and sampler of each request that gets tokens; creates the samplers of new ones."""
    draws: list[tuple[int, Sampler]] = []
    for work in works:
        for request in work.samples:
            sampler = request.sampler
            if sampler is None:
                sampler = backend.new_sampler(request.params.sampling, request.inputs(0), request.constraint)
            draws.append((work.run.seq, sampler))
    return draws


def _sample(works: Sequence[Work], draws: Draws, backend: Backend) -> list[tuple[RequestResult, ...]]:
    """Sample for every request that gets tokens, and score prompts."""
    sampled = iter(zip(draws, backend.sample(draws), strict=True))
    results = []
    for work in works:
        of_work = []
        for request in work.samples:
            (_, sampler), tokens = next(sampled)
            # What a constraint forces within a draft may differ from it, or go beyond it: then one of these tokens
            # is the new one, and those after it have no KV either.
            n_new = work.run.n_accepted(tokens) + 1
            forced = tokens[n_new:] + _forced(request, sampler, tokens)
            of_work.append(RequestResult(request, sampler, tokens[:n_new], tuple(sampler.scores), forced))
        if not of_work:
            vector = backend.vector(work.run.seq) if work.run.n_outputs else b""
            of_work.append(RequestResult(work.request, vector=vector))
        if work.run.n_drafted:
            _cut(work.run, len(work.kept(of_work[0].tokens)), backend)
        if work.run.targets is not None:
            prompt_scores = backend.score(work.run.seq, work.request.params.prompt_probs)
            of_work[0] = replace(of_work[0], prompt_scores=prompt_scores)
        results.append(tuple(of_work))
    return results


def _cut(run: Run, n: int, backend: Backend) -> None:
    """Remove what a sequence holds after the first `n` tokens of a run."""
    # After a failure only the backend knows which tokens it computed; `seq_len` also corrects its own record.
    if backend.seq_len(run.seq) > run.start + n:
        backend.change(Remove(run.seq, run.start + n, is_rejected=n > 0))


def _forced(request: Request, sampler: Sampler, sampled: tuple[int, ...]) -> tuple[int, ...]:
    """Advance a request's constraint by the sampled tokens; returns what it and the reasoning limit force next.

    The mask after them is computed during the next step. Nothing is forced after a token that ends the reply.
    """
    limit = request.reasoning_limit
    if sampled[0] < 0:
        return ()
    forced = limit.add(sampled) if limit is not None else ()
    if forced or request.constraint is not None:
        by_constraint = sampler.advance(forced=forced)
        forced += by_constraint
        if limit is not None:
            limit.add(by_constraint)
    return forced


def _change(operations: Sequence[Operation], backend: Backend) -> tuple[frozenset[int], frozenset[int]]:
    """Execute operations in order; return the segments and the sequences that failed for lack of memory.

    1. If an operation fails, or needs a sequence that has failed, it is skipped. Its target, a segment or a
       sequence, counts as failed.
    2. A failed segment that is freed, or a failed sequence that is emptied, no longer counts.
    3. A checkpoint that could not be taken is not restored.

    No plan loads a segment that it saves itself, so failed saves make no loads fail.
    """
    unsaved: set[int] = set()
    incomplete: set[int] = set()
    for operation in operations:
        if isinstance(operation, Free):
            if operation.segment in unsaved:
                unsaved.remove(operation.segment)
            else:
                backend.change(operation)
            continue
        is_possible = incomplete.isdisjoint(_needed(operation))
        if isinstance(operation, Restore):
            is_possible &= operation.checkpoint not in unsaved
        is_done = is_possible and _is_done(operation, backend)
        match operation:
            case Save(number) | Take(number) if not is_done:
                unsaved.add(number)
            case Remove(seq, 0) if is_done and seq in incomplete:
                incomplete.remove(seq)
            case Remove(seq) | Shift(seq) | Copy(dst=seq) | Share(dst=seq) | Load(dst=seq) if not is_done:
                incomplete.add(seq)
            case Restore(dst=seq) if not is_done:
                incomplete.add(seq)
    return frozenset(unsaved), frozenset(incomplete)


def _needed(operation: Operation) -> tuple[int, ...]:
    """Return the sequences whose content an operation depends on."""
    match operation:
        case Copy(src, dst) | Share(src, dst):
            return src, dst
        case Shift(seq) | Save(src=seq) | Load(dst=seq) | Take(src=seq) | Restore(dst=seq):
            return (seq,)
    return ()


def _is_done(operation: Operation, backend: Backend) -> bool:
    """Carry out an operation; returns False if memory does not suffice."""
    try:
        backend.change(operation)
    except (NotSavedError, NotLoadedError, MemoryError):
        return False
    return True


def _decode(plan: StepPlan, draws: Draws, backend: Backend) -> Decoded:
    """Compute a step's tokens, and remove its padding."""
    runs = [work.run for work in plan.work]
    if not plan.padding:
        return backend.decode(runs, draws)
    # Sorted by sequence, because llama.cpp computes adjacent ones together. The sort is stable, so padding that
    # continues a run follows it, and scratch has the highest id: real tokens get the same cells as without padding.
    decoded = backend.decode(sorted((*runs, *plan.padding), key=lambda run: run.seq), draws)
    sent = {run.seq: decoded.sent[run.seq] for run in runs}
    for padding in plan.padding:
        _cut(padding, 0, backend)
        if padding.seq in sent:
            first, n_sent = sent[padding.seq]
            sent[padding.seq] = first, n_sent - len(padding.tokens)
    return Decoded(decoded.status, sent)


def next_decode_step(plan: StepPlan, result: StepResult, eog: frozenset[int]) -> StepPlan | None:
    """Return the step that computes what this one sampled; None if a plan is needed, as for forced tokens."""
    if plan.n_extra_steps == 0 or result.decoded.status is not Status.OK or result.incomplete:
        return None
    work = []
    for each, (own, *_) in zip(plan.work, result.results, strict=True):
        (token,) = own.tokens
        if token < 0 or token in eog or own.forced:
            return None
        run = each.run
        start = run.start + len(run.tokens)
        work.append(Work(each.request, Run(run.seq, start, np.array([token], dtype=np.int32), n_outputs=1)))
    return StepPlan(work=work, padding=plan.padding, n_extra_steps=plan.n_extra_steps - 1)
