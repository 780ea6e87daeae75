"""On real weights, reuse never changes a text otherwise than another chunk size does.

Workloads of turns, forks and edits run in every way in which KV is kept: in roomy and in small pools, with RAM, on
disk, in parallel slots, in slots of their own, with preemption. Long ones have prompts of 2,000 to 4,000 tokens
that are edited far back, for Gemma behind its window of 512 tokens. `tests/real/test_servers.py` has real servers.
The short form, which `make test` runs, has a few workloads on SmolLM2.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import llama_cpp
import msgspec
import numpy as np
import pytest

from llamaslot.backend.disk import DiskStore
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.backend.llama.saved_states import PartialStates
from llamaslot.base.commands import ClearCache
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import Kv, Load, Operation, Restore
from llamaslot.base.model import KvCost
from llamaslot.kvcache.tiers import pacing
from llamaslot.scheduler import admission
from tests.demo.test_reuse import load_another_segment
from tests.engine.harness import running
from tests.real.cold import N_SCORES, Comparison, Control, Reply
from tests.real.conftest import NAMES, REAL, note, path_of
from tests.real.conversations import N_TOKENS, Family, cold_model, families
from tests.workloads import Answer, Ask, Tally, answered

MIB = 2**20
IN_RAM: dict[str, Any] = {"ram_bytes": 512 * MIB, "offload_after": 1}
PARTITIONS = KvCost(1000, 1e3, prefill_us=1e3, save_us=0.5, first_save_us=0.5, load_us=0.5)
"""Costs by which any two requests that share little partition the pool."""
SCORED = Sampling(temperature=0.0, n_probs=N_SCORES)
PLAIN = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Kind:
    """A way in which KV is kept, and how many workloads each batch of it has."""

    n_batches: int
    n_workloads: int = 10
    n_ctx: int = 8192
    n_slots: int = 2
    n_ubatch: int = 512
    settings: dict[str, Any] = field(default_factory=dict)
    storing: dict[str, Any] = field(default_factory=dict)
    on_disk: bool = False
    """Run them twice: a second engine finds on disk what the first one wrote."""
    is_long: bool = False
    is_crowded: bool = False
    """Expect too little of requests, so that they outgrow the pool together and some are preempted."""
    must: tuple[str, ...] = ()
    """What a batch must have come to, on SmolLM2."""


KINDS = {
    "long": Kind(5, n_workloads=4, n_ctx=8192, is_long=True, storing=IN_RAM),
    "roomy": Kind(3, must=("copied tokens",)),
    "parallel": Kind(3, n_slots=4, n_ubatch=128, must=("copied tokens",)),
    "small": Kind(3, n_ctx=512, must=("evicted tokens",)),
    "RAM": Kind(3, n_ctx=512, storing=IN_RAM, must=("restored tokens",)),
    "disk": Kind(2, n_ctx=512, storing=IN_RAM, on_disk=True, must=("read tokens",)),
    "preempted": Kind(2, n_ctx=512, n_slots=8, storing=IN_RAM, is_crowded=True, must=("preemptions",)),
    "partitioned": Kind(2, n_ctx=1536, n_slots=3, settings={"unified": False, "n_cache_seqs": 0}),
    "partitioned, RAM": Kind(2, n_ctx=1536, n_slots=3, settings={"unified": False}, storing=IN_RAM),
    "both layouts": Kind(
        2, n_ctx=1536, n_slots=3, settings={"may_partition": True}, storing=IN_RAM, must=("layout changes",)
    ),
}
"""228 workloads on SmolLM2 and 180 on Gemma, without what says nothing about it; `test_servers.py` has 20 more."""
N_LONG_BATCHES = {"smollm2": 2}
"""Of prompts whose length tells more about a model with windows."""
SHORT_KINDS = {name: replace(KINDS[name], n_batches=1, n_workloads=5, must=()) for name in ("RAM", "parallel")}
BATCHES = [
    pytest.param(name, kind, batch, id=f"{name}, {kind}, {batch}")
    for name in NAMES
    for kind, each in (KINDS if REAL else SHORT_KINDS).items()
    for batch in range(N_LONG_BATCHES.get(name, each.n_batches) if each.is_long else each.n_batches)
    # In a partitioned pool models with windows keep no checkpoints.
    if not (name == "gemma3" and ("partitioned" in kind or "layouts" in kind))
]


def load(name: str, kind: Kind) -> LlamaBackend:
    """Open the model, whose self-test must pass: without it nothing is reused."""
    settings = LlamaSettings(
        path_of(name), n_ctx=kind.n_ctx, n_slots=kind.n_slots, n_ubatch=kind.n_ubatch, n_threads=1, checkpoints=True
    )
    backend = LlamaBackend(replace(settings, **kind.settings))
    assert backend.info.self_test != "pending" or backend.run_self_test()
    if backend.info.part_cells:
        backend.info = msgspec.structs.replace(backend.info, kv_cost=PARTITIONS)
    return backend


def asks(chance: random.Random, some: list[Family], kind: Kind) -> list[Ask]:
    """Return requests for prompts of a few families in any order: some are cancelled, some have several replies."""
    drawn = chance.sample(some, min(len(some), 1 if kind.is_long else chance.randint(1, 3)))
    return [
        Ask(
            prompt=chance.choice(chance.choice(drawn).prompts),
            n=chance.choice((1, kind.n_slots) if kind.is_crowded else (1, 1, 1, 1, 2)),
            patience=chance.choice((None,) * 7 + (chance.randint(1, 800),)),
            cache_prompt=chance.random() < 0.95,
            id_slot=chance.choice((-1, -1, -1, 0)),
        )
        for _ in range(chance.randint(3, 5) if kind.is_long else chance.randint(4, 7))
    ]


async def run(
    backend: LlamaBackend, kind: Kind, some: list[Family], seed: int, tally: Tally, **storing: Any
) -> list[Answer]:
    """Run the workloads of a batch, without stores mostly on an empty cache."""
    chance = random.Random(seed)
    answers: list[Answer] = []
    async with running(backend, checkpoint_bytes=128 * MIB, debug_invariants=True, **storing) as engine:
        for i in range(kind.n_workloads):
            if not kind.storing and chance.random() < 0.7:
                await engine.ask(ClearCache())
            answers += await answered(
                engine,
                asks(chance, some, kind),
                # Probabilities take another way through the engine than tokens alone.
                sampling=SCORED if chance.random() < 0.7 else PLAIN,
                max_tokens=N_TOKENS if kind.is_crowded else chance.choice((N_TOKENS // 4, N_TOKENS // 2, N_TOKENS)),
                name=f"workload {i}, request",
                together=kind.n_slots if kind.is_crowded else chance.choice((1, 2, 4)),
            )
        tally.count(engine)
        tally.seen["restored checkpoints"] += engine.engine.scheduler.cache.stats().checkpoints.restored
        for events in engine.events.values():
            progress = getattr(events[-1], "progress", None)
            tally.seen["prompt tokens"] += progress.n_prompt if progress else 0
            tally.seen["cached tokens"] += progress.n_cached if progress else 0
    return answers


def compared(name: str, kind: Kind, some: list[Family], *, batch: int, folder: Path, tally: Tally) -> Comparison:
    """Run a batch and compare all its replies with the cold ones."""
    answers: list[Answer] = []
    for _ in range(1 + kind.on_disk):
        store = DiskStore(folder)
        store.open(b"k" * 32, 2**30)
        storing = kind.storing | ({"disk": store} if kind.on_disk else {})
        answers += asyncio.run(run(load(name, kind), kind, some, batch, tally, **storing))
        store.close()
    control = Control()
    for each in some:
        each.control(control)
    cold = {prompt: reply for each in some for prompt, reply in each.cold.items()}
    comparison = Comparison(control)
    for answer in answers:
        tally.n_requests += 1
        tally.n_cancelled += not answer.is_whole
        scores = [{row.token: row.value for row in each.top} for each in answer.probs]
        comparison.add(answer.ask.prompt, cold[answer.ask.prompt], Reply(answer.tokens, scores))  # type: ignore[arg-type]
    return comparison


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "batch"), BATCHES)
def test_warm_texts_differ_only_as_cold_ones_do(
    *, name: str, kind: str, batch: int, tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = (KINDS if REAL else SHORT_KINDS)[kind]
    path_of(name)
    monkeypatch.setattr(pacing, "PARTIAL_DELAY_S", 0.0)
    if what.is_crowded:
        monkeypatch.setattr(admission, "MIN_EXPECTED_TOKENS", 2)
        # Else it would learn from the first replies.
        monkeypatch.setattr(admission, "_NEWEST_WEIGHT", 0.0)
    tally = Tally()
    some = families(name, batch, shared, is_long=what.is_long)
    comparison = compared(name, what, some, batch=batch, folder=tmp_path, tally=tally)
    control = comparison.control
    print(f"{comparison.n_differing} of {comparison.n_texts} texts differ, {tally}")
    note(
        shared,
        model=name,
        kind=kind,
        workloads=what.n_workloads,
        replies=comparison.n_texts,
        differing=comparison.n_differing,
        positions=len(comparison.moves),
        **{"largest move": max(comparison.moves, default=0.0)},
        **{f"{each}": n for each, n in tally.seen.items() if n},
    )
    if batch == 0:
        note(
            shared,
            model=name,
            kind="cold, long prompts" if what.is_long else "cold, short prompts",
            **{"replies": control.n_texts, "differing": control.n_differing}
            if kind in ("long", "roomy", "RAM")
            else {},
            **{"largest move": control.farthest, "largest rms": control.rms},
        )
    comparison.check(cold_model(name))
    assert tally.seen["cached tokens"] > 0 or what.settings
    assert name != "smollm2" or all(tally.seen[each] for each in what.must), tally
    assert name != "gemma3" or what.settings or tally.seen["restored checkpoints"] > 0, tally


def shift_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load KV one position too far; the last token stays where it is."""
    change = LlamaBackend.change

    def wrong(backend: LlamaBackend, operation: Operation) -> None:
        change(backend, operation)
        if isinstance(operation, Load):
            memory = llama_cpp.llama_get_memory(backend._context)
            llama_cpp.llama_memory_seq_add(memory, operation.dst, operation.start, operation.end - 1, 1)

    monkeypatch.setattr(LlamaBackend, "change", wrong)


def restore_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the window of another checkpoint, in the cells and at the positions of the right one."""
    restore = PartialStates.restore

    def wrong(partial: PartialStates, operation: Restore, end: int) -> None:
        own = partial.states[operation.checkpoint]
        mixed, other = own.copy(), max((s for s in partial.states.values() if s is not own), key=len, default=own)
        for to, source in zip(window_rows(mixed), window_rows(other), strict=True):
            to[:] = np.resize(source, len(to))
        partial.states[operation.checkpoint] = mixed
        restore(partial, operation, end)
        partial.states[operation.checkpoint] = own

    monkeypatch.setattr(PartialStates, "restore", wrong)


def window_rows(state: Kv) -> list[Kv]:
    """Return the K and V of each layer in a checkpoint of a window."""
    # As in `tests/kv_rows.py`.
    n_cells = int(state[12:16].view(np.uint32)[0])
    at, rows = 16 + 12 * n_cells + 8, []
    while at < len(state):
        n_bytes = n_cells * int(state[at + 4 : at + 12].copy().view(np.uint64)[0])
        rows.append(state[at + 12 : at + 12 + n_bytes])
        at += 12 + n_bytes
    assert at == len(state)
    return rows


N_TRIES = 4
"""Batches of workloads in which a planted fault must be noticed."""
FAULTS: list[tuple[str, str, Callable[[pytest.MonkeyPatch], None]]] = [
    ("smollm2", "RAM", load_another_segment),
    ("smollm2", "RAM", shift_by_one),
    ("gemma3", "RAM", load_another_segment),
    ("gemma3", "roomy", restore_foreign),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "plant"), [each for each in (FAULTS if REAL else FAULTS[:1]) if each[0] in NAMES]
)
def test_the_comparison_notices_planted_faults(
    *,
    name: str,
    kind: str,
    plant: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    what = replace(KINDS[kind], n_workloads=8)

    def is_noticed(batch: int) -> bool:
        """By the texts, or by the invariants that the engine checks."""
        some = families(name, batch, shared)
        with monkeypatch.context() as patch:
            loaded = load(name, what)
            patch.setattr(f"{__name__}.load", lambda *_: loaded)
            # The self-test would notice it, so it is planted behind that.
            plant(patch)
            try:
                comparison = compared(name, what, some, batch=batch, folder=tmp_path / str(batch), tally=Tally())
                comparison.check(cold_model(name))
            except AssertionError:
                return True
        return False

    # A fault changes nothing where, say, no other segment has the same positions: that depends on timing.
    assert any(map(is_noticed, range(N_TRIES)))
    note(shared, model=name, kind="planted faults", noticed=1)
