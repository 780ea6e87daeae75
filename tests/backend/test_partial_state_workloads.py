"""Random workloads on real models through the scheduler: the logits of every sampled token are those of a cold run.

A cold run computes the same tokens in an empty context. The two may differ by what rounding explains: `BOUND` times
the farthest that other chunk sizes and orders of cells move the logits of a model. In each workload one token of a
prompt is changed in a cold run, which must move them much farther. With flash attention, which llama.cpp computes
in float16, some tokens matter too little for that, but not most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from bench import synthetic
from bench.synthetic_layers import EXPERTS
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.backend import Decoded, Draws, Run, Status
from llamaslot.base.kv_ops import StateRecord
from llamaslot.base.model import StateKind
from llamaslot.base.namespaces import PUBLIC_SALT
from llamaslot.kvcache.cache_settings import checkpoint_settings
from llamaslot.scheduler.request import Request
from llamaslot.scheduler.step import StepPlan
from tests.backend.llama_machine import N_CTX, N_UBATCH, compute, empty_pool
from tests.backend.test_checkpoint_machine import EXACT
from tests.backend.test_models import failing, logits
from tests.cache_settings import NO_CHECKPOINTS
from tests.conftest import LONG
from tests.gguf_copies import rewritten
from tests.noise import Noise
from tests.random_workloads import run_workloads
from tests.scheduler.test_partial_state_workloads import SALTS, Workload
from tests.scheduler.test_scheduler import Driver, as_letters, as_tokens, step_seconds

pytestmark = pytest.mark.gpu

N_WORKLOADS = 200 if LONG else 4


@dataclass(frozen=True)
class Shape:
    """A synthetic model, some values in it that are changed, and its kind of memory."""

    name: str
    kind: StateKind
    values: Mapping[str, int] = field(default_factory=dict)


SHAPES = {
    "window": Shape("tiny-swa", StateKind.WINDOW),
    "short convolution": Shape("tiny-lfm2", StateKind.HYBRID),
    "mamba hybrid": Shape("tiny-granite", StateKind.HYBRID),
    "delta net": Shape("tiny-qwen35", StateKind.HYBRID),
    "mamba": Shape("tiny-mamba2", StateKind.RECURRENT),
    "rwkv": Shape("tiny-rwkv7", StateKind.RECURRENT),
    "window and convolution": Shape("tiny-lfm2", StateKind.HYBRID_WINDOW, {"attention.sliding_window": 32}),
    # All experts are used: rounding would exchange those whose weights are close together.
    "latent attention": Shape("tiny-mla", StateKind.NONE, {"expert_used_count": EXPERTS}),
}
N_NOISE = 8 if LONG else 2
"""Prompts whose noise is measured: the more workloads, the rarer what one of them may come to."""
BOUND = 4
OBVIOUS = 5
"""Multiple of the bound by which a changed token moves logits."""
LEAST_SHARE = 1e-4
"""Part of the logits' deviation below which two runs always count as equal."""
WORDS = as_letters(range(300, 512))
N_NEAR = 20
"""A changed token is so near the end of its prompt: layers with a window or a state forget what is farther back."""

EVENTS = "ended", "cancelled", "reused", "saves", "loads", "compared", "changed tokens"
STATE_EVENTS = "takes", "restores"
LONG_EVENTS = "failed", "copies", "private", "reused public KV", "dropped everything", "dropped a path"
"""Events that must come up in a long run."""

Logits = npt.NDArray[np.float32]


class WatchedLlama(LlamaBackend):
    """A real model on the clock of the tests, with a record of the logits that tokens were sampled from."""

    def __init__(self, settings: LlamaSettings) -> None:
        self.now = 0.0
        self.failures: deque[tuple[Status, int]] = deque()
        self.drawn: dict[int, Logits] = {}
        """Logits of the last step, by sequence."""
        super().__init__(settings)

    @property
    def states(self) -> StateRecord:
        return self._kv.states

    def decode(self, runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        self.drawn = {}
        self.now += step_seconds(runs)
        if not self.failures:
            return super().decode(runs, draws)
        with failing(self, self.failures.popleft()[1]):
            return super().decode(runs, draws)

    def sample(self, draws: Draws) -> list[tuple[int, ...]]:
        self.drawn = {seq: self._logits(self._rows[seq][0]).copy() for seq, _ in draws}
        return super().sample(draws)

    def empty(self) -> None:
        """Begin anew, in a pool whose free cells are where the last workload has left them."""
        self.failures.clear()
        empty_pool(self)


class Model:
    """A model with its server and its cold runs."""

    def __init__(self, path: Path, flash_attn: str) -> None:
        fields = EXACT | {"flash_attn": flash_attn}
        chosen = LlamaSettings(path, n_ctx=N_CTX, n_slots=3, n_cache_seqs=2, n_ubatch=N_UBATCH, **fields)
        self.server, self._cold = WatchedLlama(chosen), LlamaBackend(chosen)
        self.info = self.server.info
        self.largest = 0.0
        self.changed: list[float] = []
        """Multiples of the bound: the farthest that a warm run was from a cold one, and those of changed tokens."""
        noise, rng = Noise(chosen), np.random.default_rng(5)
        histories = [rng.integers(300, 512, n).tolist() for n in np.linspace(130, 30, N_NOISE, dtype=int)]
        self.noise = max(map(noise.distance, histories))
        deviation = min(float(self.cold(each, [])[0].std()) for each in histories)
        self.bound = max(BOUND * self.noise, LEAST_SHARE * deviation)

    def report(self) -> str:
        """The noise, and how far warm runs and changed tokens were from cold runs."""
        return (
            f"flash attention {self.info.flash_attn}: noise {self.noise:.2g}, bound {self.bound:.2g}; warm runs at "
            f"most {self.largest:.2g} of it, changed tokens at least {min(self.changed, default=0):.2g} times"
        )

    def cold(self, prompt: Sequence[int], reply: Sequence[int]) -> list[Logits]:
        """The logits that each token of `reply`, and one more, is sampled from if nothing is cached."""
        backend = self._cold
        compute(backend, prompt)
        found = [logits(backend, -1)]
        for at, token in enumerate(reply, len(prompt)):
            assert backend.decode([Run(0, at, np.array([token], dtype=np.int32), 1)]).status is Status.OK
            found.append(logits(backend, -1))
        return found

    def share(self, one: Logits, other: Logits) -> float:
        """The largest difference as a multiple of the bound."""
        assert np.isfinite(one).all()
        return float(np.abs(one - other).max()) / self.bound

    def close(self) -> None:
        self.server.close()
        self._cold.close()


class LlamaDriver(Driver):
    """A scheduler on a real model."""

    def check(self) -> None:
        if not self.cache._sequences.operations:
            self.cache.check(self.backend.seq_range)


class LlamaWorkload(Workload):
    """Longer prompts of a real model's words."""

    n_requests = 8, 15
    max_prompt = 120
    max_new = 40
    alphabet = WORDS[::40]
    salts = *SALTS[:1] * 3, PUBLIC_SALT
    drop_rate = 0.03
    new_rate = 0.25

    def __init__(self, models: Sequence[Model], seed: int) -> None:
        self.model = models[seed % len(models)]
        self.rows: dict[Request, list[Logits]] = {}
        """Logits from which each token of a request was sampled."""
        super().__init__(seed)

    def new_driver(self) -> Driver:
        rng, model = self.rng, self.model
        backend, info = model.server, model.info
        backend.empty()
        n_ctx = rng.choice([144, 160, 256])
        n_slots = rng.choice([1, 2, 3])
        backend.info = msgspec.structs.replace(info, n_slots=n_slots, n_ctx=n_ctx, n_ctx_slot=n_ctx)
        checkpoints = {}
        if info.checkpoint_size is not None:
            served = checkpoint_settings(info, backend.n_seqs, NO_CHECKPOINTS.limits)
            checkpoints = {
                "n_window_cells": served.n_window_cells,
                "step": rng.choice([16, 32, 80]),
                "on_path": rng.choice([2, 4, 32]),
                "ram_bytes": info.checkpoint_size.of(N_CTX) * rng.choice([2, 4, 8, 1000]),
                "take_ms": rng.choice([0, 0, 60]),
            }
        n_ram = rng.choice([0, 12, 1000, 1000])
        return LlamaDriver(
            backend=backend,
            ram_bytes=n_ram * info.segment_size.of(16) if info.segment_size is not None else 0,
            segment_tokens=rng.choice([16, 32, 512]),
            min_shared=4,
            offload_after=rng.choice([None, 40, 40]),
            checkpoints=checkpoints,
        )

    def first_prompts(self) -> list[str]:
        return [self.letters(WORDS, n) for n in (30, 50, 70)]

    def failure(self) -> tuple[Status, int]:
        """Somewhere in the graph, or after its end, where no step fails."""
        return Status.ABORTED, self.rng.choice([1, 40, 200])

    def step(self, seconds: float = 0.0) -> StepPlan:
        plan = super().step(seconds)
        drawn = self.model.server.drawn
        for work in plan.work:
            for request in work.samples if work.run.seq in drawn else ():
                self.rows.setdefault(request, []).append(drawn[work.run.seq])
        drawn.clear()
        return plan

    def check_tokens(self, request: Request, prompt: str, found: list[int]) -> None:
        model, tokens = self.model, as_tokens(prompt).tolist()
        rows = self.rows.get(request, [])
        assert found == [int(row.argmax()) for row in rows], request.id
        if not found:
            return
        cold = model.cold(tokens, found[:-1])
        shares = [model.share(*pair) for pair in zip(rows, cold, strict=True)]
        model.largest = max(model.largest, *shares)
        assert max(shares) <= 1, (request.id, prompt, request.n_cached, shares)
        self.counts["compared"] += len(shares)
        if request is self.requests[-1]:
            self.check_bound(tokens, cold[0])

    def check_bound(self, tokens: list[int], cold: Logits) -> None:
        """Verify that one changed token makes a difference."""
        changed, at = tokens.copy(), self.rng.randint(max(0, len(tokens) - N_NEAR), len(tokens) - 1)
        changed[at] += 1 if changed[at] < 511 else -1
        share = self.model.share(self.model.cold(changed, [])[0], cold)
        assert share > OBVIOUS or self.model.info.flash_attn, (tokens, at)
        self.model.changed.append(share)
        self.counts["changed tokens"] += 1


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_of_every_sampled_token_are_those_of_a_cold_run(shape: Shape, tmp_path: Path) -> None:
    """Without flash attention rounding is least, but no KV is offloaded. Models without attention need one way."""
    path = synthetic.ensure(shape.name, folder=tmp_path, is_exact=True)
    if shape.values:
        architecture = synthetic.SHAPES[shape.name].arch
        path = rewritten(path, tmp_path / "rewritten.gguf", architecture, values=shape.values)
    ways = ("on",) if shape.kind is StateKind.RECURRENT else ("on", "off")
    models = [Model(path, each) for each in ways]
    assert models[0].info.state.kind is shape.kind
    expected = EVENTS if shape.kind is StateKind.NONE else (*EVENTS, *STATE_EVENTS)
    try:
        run_workloads(partial(LlamaWorkload, models), N_WORKLOADS, (*expected, *(LONG_EVENTS if LONG else ())))
        # With flash attention llama.cpp computes in float16, which may move logits as far as a token far back does.
        assert np.median(models[-1].changed) > OBVIOUS
    finally:
        for model in models:
            print(model.report())
            model.close()
