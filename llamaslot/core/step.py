"""One step: the plan as data, and its application to a backend.

    plan    (scheduler, event loop)   what is to happen, from the state; nothing is changed
    apply   (here, worker thread)     what the backend really did
    commit  (scheduler, event loop)   the state follows what really happened

Applying changes nothing but the backend, so a plan that was never applied leaves no trace. Where nothing is to be
decided after a step, `following` gives the next one without the scheduler, and the commits follow in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from llamaslot.core.backend import Backend, Decoded, Run, Sampler, Status
from llamaslot.core.request import Request
from llamaslot.core.slots import Slot


@dataclass(frozen=True, slots=True)
class Trim:
    """Drop all but the first `keep` tokens of a slot's sequence."""

    slot: Slot
    keep: int


@dataclass(frozen=True, slots=True)
class Claim:
    """Give a slot to a queued request that reuses the first `keep` tokens there."""

    request: Request
    slot: Slot
    keep: int


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of one request to compute."""

    request: Request
    run: Run


@dataclass(slots=True)
class StepPlan:
    """What one step does, in this order; slots appear in `trims` at most once."""

    preempted: list[Request] = field(default_factory=list)
    trims: list[Trim] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    n_ahead: int = 0
    """Steps that may follow without a decision, each computing the tokens that the one before sampled."""

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.preempted or self.trims or self.claims or self.work)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the backend did."""

    decoded: Decoded
    tokens: dict[int, int]
    """Sampled token per sequence id."""
    samplers: dict[int, Sampler]
    """Samplers made in this step, per sequence id."""
    lengths: dict[int, int]
    """After a failed decode, the tokens that each sequence of the batch holds now."""
    started: float
    """When the step began, on the caller's clock."""
    seconds: float
    """Time that decoding and sampling took."""


def apply(plan: StepPlan, backend: Backend, clock: Callable[[], float]) -> StepResult:
    """Carry out a plan. Raises only what is a bug or the end of the backend."""
    started = clock()
    for trim in plan.trims:
        backend.seq_rm(trim.slot.id, trim.keep)
    if not plan.work:
        return StepResult(Decoded(Status.OK, {}), {}, {}, {}, started, 0.0)
    decoded = backend.decode([work.run for work in plan.work])
    tokens: dict[int, int] = {}
    made: dict[int, Sampler] = {}
    lengths: dict[int, int] = {}
    if decoded.status is Status.OK:
        samplers: dict[int, Sampler] = {}
        for work in plan.work:
            if not work.run.output:
                continue
            sampler = work.request.sampler
            if sampler is None:
                sampler = backend.new_sampler(work.request.submit.sampling, work.request.known.view())
                made[work.run.seq] = sampler
            samplers[work.run.seq] = sampler
        tokens = backend.sample(samplers)
    else:
        lengths = {work.run.seq: backend.seq_len(work.run.seq) for work in plan.work}
    return StepResult(decoded, tokens, made, lengths, started, clock() - started)


def following(plan: StepPlan, result: StepResult, eog: frozenset[int]) -> StepPlan | None:
    """The step that computes what this one sampled; None where the scheduler has to decide."""
    if plan.n_ahead == 0 or result.decoded.status is not Status.OK or not eog.isdisjoint(result.tokens.values()):
        return None
    work = []
    for each in plan.work:
        run, token = each.run, result.tokens[each.run.seq]
        start = run.start + len(run.tokens)
        work.append(Work(each.request, Run(run.seq, start, np.array([token], dtype=np.int32), output=True)))
    return StepPlan(work=work, n_ahead=plan.n_ahead - 1)
