"""On real weights, drafts change no text otherwise than another chunk size does.

Prompts ask for text that they contain, in pairs that share a prefix. Each is sent twice, so that drafts come from
the request's own tokens and from the tree. They are made after short matches, and whether they pay or not, so that
many are wrong. Greedy replies are compared with cold ones by the rule of `tests/real/cold.py`, others with those
without drafts; a token may differ only where rounding moves both tokens as far as they lie apart.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llamaslot.app.model_files import resolve_model
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.events import Finished
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.stats import SpeculationStats
from llamaslot.scheduler import admission, drafter, step
from llamaslot.text.template import ChatTemplate
from tests.demo.talks import dialogues, turns
from tests.demo.test_structured_output import PERSON
from tests.engine.harness import Harness, running
from tests.noise import Noise
from tests.real.cold import N_SCORES, SHAPES, ColdModel, Comparison, Control, Reply, parting
from tests.real.conftest import REAL, note, path_of
from tests.real.conversations import passages, user
from tests.text.rendering import rendered
from tests.workloads import Ask, Tally, answered

pytestmark = pytest.mark.skipif(not REAL, reason="long: make test-real")

NAMES = ("smollm2", "demo")
MAX_DRAFT = 63
N_TOKENS = 40
N_PAIRS = 6
PASSAGE_CHARS = 300
HEAD_CHARS = 30
"""Of the passage, with which a reply begins."""
GREEDY = Sampling(temperature=0.0)
SCORED = Sampling(temperature=0.0, n_probs=N_SCORES)


@dataclass(frozen=True)
class Kind:
    """A way in which requests run."""

    together: int = 1
    copies: int = 1
    n_slots: int = 4
    settings: dict[str, Any] = field(default_factory=dict)
    sampling: Sampling = GREEDY
    is_crowded: bool = False
    """Expect too little of requests, so that some are preempted."""
    is_cancelled: bool = False
    """Cancel every second request."""


KINDS = {
    "alone": Kind(),
    "scored": Kind(together=2, sampling=SCORED),
    "streams": Kind(together=8, n_slots=8),
    "several replies": Kind(together=2, copies=3, n_slots=6),
    "parts": Kind(settings={"unified": False, "n_cache_seqs": 0}),
    "small pool": Kind(together=8, n_slots=8, is_crowded=True),
    "cancelled": Kind(together=4, is_cancelled=True),
}


SMALL_POOL = {"smollm2": 512, "demo": 448}
"""Cells for two requests or three."""
PATIENCE_MS = {"smollm2": 400, "demo": 12}
"""Most that a client waits who cancels."""


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft after short matches, whether it pays or not."""
    monkeypatch.setattr(drafter, "MIN_MATCH", 2)
    monkeypatch.setattr(drafter, "MIN_GAIN", -100.0)
    monkeypatch.setattr(drafter, "MAX_DELAY", 100.0)


def settings_of(name: str, **fields: Any) -> LlamaSettings:
    path = resolve_model(name) if name == "demo" else path_of(name)
    return LlamaSettings(path, n_threads=1, **{"n_ctx": 4096, "n_slots": 4} | fields)


@cache
def model_of(name: str) -> ColdModel:
    return ColdModel(settings_of(name).model, 4096)


@cache
def prompts_of(name: str) -> list[str]:
    """Return prompts whose replies repeat them, in pairs that share a prefix."""
    if name == "demo":
        return [prompt for each in dialogues(N_PAIRS, seed=41, filler_tokens=60) for prompt in turns(each)[-2:]]
    template = ChatTemplate(model_of(name).backend.info.chat_template, bos_token="", eos_token="")
    asked = ("Repeat this text.", "Repeat this text, and explain it.")
    return [
        rendered(template, [user(f"{passage}\n\n{question}")]) + passage[:HEAD_CHARS].rpartition(" ")[0]
        for passage in passages(PASSAGE_CHARS, random.Random(4), N_PAIRS)
        for question in asked
    ]


@cache
def cold_of(name: str) -> tuple[dict[str, Reply], Control]:
    """Return cold replies, and what cold runs differ in."""
    model, control, cold = model_of(name), Control(), {}
    for prompt in prompts_of(name):
        ids = model.tokenize(prompt)
        cold[prompt] = model.reply(ids, N_TOKENS)
        for shape in SHAPES[1:]:
            control.add(cold[prompt], model.reply(ids, N_TOKENS, shape))
    return cold, control


def asks(name: str, kind: Kind) -> list[Ask]:
    """Return requests for all prompts, twice each."""
    chance = random.Random(5)
    prompts = prompts_of(name)
    return [
        Ask(
            prompt,
            n=kind.copies,
            patience=chance.randint(1, PATIENCE_MS[name]) if kind.is_cancelled and i % 2 else None,
        )
        for i, prompt in enumerate(chance.sample(prompts, len(prompts)) + prompts)
    ]


def report(shared: Path, name: str, kind: str, stats: SpeculationStats, **figures: Any) -> None:
    """Keep the figures for the table; drafts were made, and both right and wrong ones."""
    figures |= {"drafts": stats.drafts, "drafted": stats.drafted_tokens, "right": stats.accepted_tokens}
    note(shared, model=name, kind=f"drafts, {kind}", **figures)
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_texts_differ_only_as_cold_ones_do(
    name: str, kind: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what, tally = KINDS[kind], Tally()
    if what.is_crowded:
        monkeypatch.setattr(admission, "MIN_EXPECTED_TOKENS", 2)
        monkeypatch.setattr(admission, "_NEWEST_WEIGHT", 0.0)
    cold, control = cold_of(name)
    comparison = Comparison(control)

    async def run() -> SpeculationStats:
        n_ctx = SMALL_POOL[name] if what.is_crowded else 4096
        backend = LlamaBackend(settings_of(name, n_ctx=n_ctx, n_slots=what.n_slots, **what.settings))
        async with running(backend, debug_invariants=True) as engine:
            for answer in await answered(
                engine,
                asks(name, what),
                sampling=what.sampling,
                max_tokens=N_TOKENS,
                together=what.together,
                max_draft=MAX_DRAFT,
            ):
                scores = [{row.token: row.value for row in each.top} for each in answer.probs]
                comparison.add(answer.ask.prompt, cold[answer.ask.prompt], Reply(answer.tokens, scores))
                tally.n_cancelled += not answer.is_whole
                expected = cold[answer.ask.prompt].tokens
                if answer.is_whole and parting(expected, answer.tokens) is None:
                    assert answer.tokens == expected
            tally.count(engine)
            return engine.engine.scheduler.cache_stats().speculation

    stats = asyncio.run(run())
    figures = {"replies": comparison.n_texts, "differing": comparison.n_differing}
    report(shared, name, kind, stats, **figures, preemptions=tally.seen["preemptions"])
    comparison.check(model_of(name))
    # The embedded model's replies are too short to outgrow a pool.
    assert tally.seen["preemptions"] > 0 or not what.is_crowded or name == "demo"
    assert tally.n_cancelled > 0 or not what.is_cancelled


@pytest.mark.parametrize("name", NAMES)
def test_stop_strings_end_replies_within_drafts(name: str, shared: Path) -> None:
    cold, control = cold_of(name)
    model, comparison, n_stopped = model_of(name), Comparison(control), 0

    async def run() -> SpeculationStats:
        nonlocal n_stopped
        async with running(LlamaBackend(settings_of(name)), debug_invariants=True) as engine:
            for i, (prompt, reply) in enumerate([*cold.items()] * 2):
                text = model.text(reply.tokens)
                stop = text[len(text) // 2 :][:6]
                fields = {"stop": (stop,), "max_tokens": N_TOKENS, "max_draft": MAX_DRAFT}
                end = await engine.submit(f"r{i}", prompt, sampling=GREEDY, **fields)
                assert isinstance(end, Finished), end
                tokens = engine.tokens(f"r{i}")
                comparison.add(prompt, reply, Reply(tokens, []))
                assert stop not in engine.text(f"r{i}")
                if parting(reply.tokens, tokens) is None:
                    n_stopped += 1
                    assert end.stopping_word == stop
                    assert engine.text(f"r{i}") == text.partition(stop)[0]
            return engine.engine.scheduler.cache_stats().speculation

    report(shared, name, "stop strings", asyncio.run(run()), replies=comparison.n_texts, stopped=n_stopped)
    comparison.check(model)
    assert n_stopped > 0


async def replies(
    name: str, prompts: Sequence[str], fields: Callable[[int], dict[str, Any]], *, max_draft: int, together: int
) -> tuple[list[list[int]], SpeculationStats]:
    """Return the tokens of replies, and what was drafted for them."""
    async with running(LlamaBackend(settings_of(name)), debug_invariants=True) as engine:
        places = asyncio.Semaphore(together)

        async def reply(i: int, harness: Harness = engine) -> list[int]:
            async with places:
                end = await harness.submit(f"r{i}", prompts[i], max_draft=max_draft, **fields(i))
                assert isinstance(end, Finished), end
                return harness.tokens(f"r{i}")

        found = await asyncio.gather(*(reply(i) for i in range(len(prompts))))
        return found, engine.engine.scheduler.cache_stats().speculation


def seeded(i: int) -> dict[str, Any]:
    """Return the fields of a sampled reply, of the same seed in both runs."""
    return {"sampling": Sampling(temperature=0.8, seed=50 + i), "max_tokens": N_TOKENS}


def constrained(_i: int) -> dict[str, Any]:
    """Return the fields of a reply that matches a schema; with probabilities, forced tokens are sampled too."""
    return {"sampling": SCORED, "max_tokens": 80, "constraint": PERSON}


@pytest.mark.parametrize("fields", [seeded, constrained])
@pytest.mark.parametrize("name", NAMES)
def test_other_texts_are_those_without_drafts_as_far_as_rounding_allows(
    name: str, fields: Callable[[int], dict[str, Any]], shared: Path
) -> None:
    prompts = prompts_of(name)[::2] * 2
    plain, none = asyncio.run(replies(name, prompts, fields, max_draft=0, together=1))
    drafted, stats = asyncio.run(replies(name, prompts, fields, max_draft=MAX_DRAFT, together=4))
    assert not none.drafts
    side_by_side, _ = asyncio.run(replies(name, prompts, fields, max_draft=0, together=4))
    n_control = sum(parting(*each) is not None for each in zip(plain, side_by_side, strict=True))
    noise = Noise(settings_of(name))
    for i, (expected, tokens) in enumerate(zip(plain, drafted, strict=True)):
        at = parting(expected, tokens)
        if at is None:
            assert tokens == expected
            continue
        ids, sampling = noise.tokenize(prompts[i]), fields(i)["sampling"]
        assert noise.explains_draw(ids, expected[:at], sampling, tokens[at], expected[at]), (i, at)
    figures = {"replies": len(plain), "differing": noise.n_explained, "differing side by side": n_control}
    report(shared, name, fields.__name__, stats, **figures)


def test_the_comparison_notices_a_token_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the first wrong token of a draft is kept in the cells."""
    cut = step._cut
    monkeypatch.setattr(step, "_cut", lambda run, n, backend: cut(run, min(n + 1, len(run.tokens)), backend))
    cold, control = cold_of("demo")
    comparison = Comparison(control)

    async def run() -> None:
        async with running(LlamaBackend(settings_of("demo"))) as engine:
            for answer in await answered(
                engine, asks("demo", Kind()), sampling=GREEDY, max_tokens=N_TOKENS, max_draft=MAX_DRAFT
            ):
                comparison.add(answer.ask.prompt, cold[answer.ask.prompt], Reply(answer.tokens, []))

    try:
        asyncio.run(run())
        comparison.check(model_of("demo"))
    except (AssertionError, TimeoutError):
        return
    pytest.fail("nothing was noticed")
