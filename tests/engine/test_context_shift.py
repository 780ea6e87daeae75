"""Context shift in the engine: replies go on beyond their context, and change no other reply."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from llamaslot.base.adapters import Adapters, applied
from llamaslot.base.backend import Run, Status
from llamaslot.base.commands import ContextShift, InspectEngine
from llamaslot.base.events import Finished, Output
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import Copy, Load, Operation, Remove, Save, Share, Shift
from llamaslot.scheduler import admission, drafter
from llamaslot.scheduler.step import StepPlan
from llamaslot.text.grammars.json_schema import json_schema_constraint
from tests.conftest import LONG
from tests.engine.harness import Accepted, Harness, alone, draft_replies, running
from tests.engine.test_no_memory import Failing
from tests.fake_backend import BOS, FakeBackend, token_of
from tests.prompt_threads import text_request

N_CTX = 96
ON = ContextShift(is_on=True)
OPEN = Sampling(temperature=0.0, ignore_eos=True)
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"n_slots": 2, "n_ctx": N_CTX, "n_reserved": 2},
    {"n_slots": 1, "n_ctx": N_CTX},
    {"n_slots": 2, "n_ctx": 2 * N_CTX, "unified": False},
)


def ids_of(prompt: str) -> list[int]:
    return [BOS, *prompt.encode()]


def wide(n_slots: int, **shape: Any) -> FakeBackend:
    """A pool with cells for a whole context of each slot."""
    backend = FakeBackend(n_slots=n_slots, n_ctx=n_slots * N_CTX, n_reserved=2, n_ubatch=16, **shape)
    backend.info = msgspec.structs.replace(backend.info, n_ctx_slot=N_CTX)
    return backend


def as_llama_server_replies(
    prompt: Sequence[int],
    n: int,
    n_keep: int = 0,
    n_discard: int = 0,
    *,
    sampling: Sampling = OPEN,
    adapters: Adapters = (),
) -> list[int]:
    """The tokens of a reply that shifts its context, on a backend of its own."""
    backend = FakeBackend(n_slots=1, n_ctx=N_CTX, n_adapters=2)
    backend.use_adapters(adapters)
    sampler = backend.new_sampler(sampling, np.empty(0, dtype=np.int32))
    n_kept = min(len(prompt) if n_keep < 0 else n_keep, N_CTX - 4)
    found: list[int] = []
    pending = list(prompt)
    while True:
        for at in range(0, len(pending), 16):
            chunk = np.array(pending[at : at + 16], dtype=np.int32)
            run = Run(0, backend.seq_len(0), chunk, n_outputs=at + 16 >= len(pending))
            assert backend.decode([run]).status is Status.OK
        ((token,),) = backend.sample([(0, sampler)])
        found.append(token)
        pending = [token]
        if len(found) == n:
            backend.close()
            return found
        n_held = backend.seq_len(0)
        if n_held + 1 >= N_CTX:
            n_left = n_held - n_kept
            n_gone = max(0, min(n_discard or n_left // 2, n_left - 1))
            backend.change(Shift(0, n_kept, n_kept + n_gone, copies=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shift", [(0, 0), (-1, 0), (5, 3), (0, 10**6), (10**6, 0)])
@pytest.mark.parametrize("n_drafted", [(0, 0), (3, 4), (7, 0)])
async def test_a_reply_goes_on_as_with_llama_server(
    layout: dict[str, Any], shift: tuple[int, int], n_drafted: tuple[int, int]
) -> None:
    prompt = "a prompt of some words"
    expected = as_llama_server_replies(ids_of(prompt), 250, *shift)
    text = bytes(expected).decode()
    async with running(FakeBackend(n_ubatch=16, **layout), ram_bytes=10**6) as engine:
        draft_replies(engine, n_drafted, {prompt: text})
        end = await engine.submit("r", prompt, sampling=OPEN, max_tokens=250, shift=ContextShift(True, *shift))
        assert isinstance(end, Finished)
        (accepted,) = [each for each in engine.events["r"] if isinstance(each, Accepted)]
        assert list(accepted.prompt_tokens) == ids_of(prompt)
        assert engine.tokens("r") == expected
        assert (end.reason, end.truncated, end.progress.n_generated) == ("limit", True, 250)
        assert (end.generated, end.progress.n_held) == (None, 0)
        progress = end.progress
        assert progress.n_cached + progress.n_prompt_computed == progress.n_prompt
        if n_drafted == (7, 0) and shift != (10**6, 0):
            # Unless a shift leaves place for one token only, drafts go on after it: a context has not so many.
            assert progress.n_accepted > N_CTX
        state = await engine.ask(InspectEngine())
        assert state.cache.context_shifts > 0
        # Again: what the prompt has computed is still there.
        again = await engine.submit("again", prompt, sampling=OPEN, max_tokens=60)
        assert isinstance(again, Finished)
        assert engine.text("again") == text[:60]
        assert again.progress.n_cached == again.progress.n_prompt - 1


class Repeating(FakeBackend):
    """A model that repeats its last 20 tokens, whatever was discarded before."""

    def _logits(self, seq: int) -> int:
        seen = self.seen(seq)
        return self.alphabet.index(token_of(seen[-20][1])) * self._eos_every + 1


async def test_what_a_reply_repeats_is_drafted_after_a_shift_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "MIN_GAIN", -100.0)
    prompt, n_drafted, replies = "abcdefghijklmnopqrst" * 2, [0, 0], []
    for i, max_draft in enumerate((0, 7)):
        async with running(Repeating(n_slots=1, n_ctx=N_CTX, n_ubatch=64)) as engine:
            plan = engine.engine.scheduler.plan

            def planned(now: float, plan: Any = plan, i: int = i) -> StepPlan:
                made: StepPlan = plan(now)
                n_drafted[i] += sum(work.run.n_drafted for work in made.work if work.request.n_discarded)
                return made

            engine.engine.scheduler.plan = planned
            fields = {"sampling": OPEN, "max_tokens": 300, "max_draft": max_draft, "shift": ON}
            await engine.submit("r", prompt, **fields)
            replies.append(engine.text("r"))
    assert replies == [(prompt * 8)[:300]] * 2
    assert n_drafted[0] == 0 < n_drafted[1]


@pytest.mark.parametrize("cache_prompt", [True, False])
async def test_each_choice_of_a_prompt_is_shifted_for_itself(*, cache_prompt: bool) -> None:
    prompt = "a few words " * 7
    sampling = Sampling(seed=3, ignore_eos=True)
    async with running(wide(2)) as engine:
        fields = {"sampling": sampling, "max_tokens": 200, "shift": ON, "cache_prompt": cache_prompt}
        ends = engine.submit_all(text_request("r", prompt, n=2, return_progress=True, **fields))
        for i, end in enumerate(ends):
            ended = await end
            assert isinstance(ended, Finished)
            assert (ended.reason, ended.truncated, ended.generated) == ("limit", True, None)
            own = msgspec.structs.replace(sampling, seed=3 + i)
            assert engine.tokens(f"r-{i}") == as_llama_server_replies(ids_of(prompt), 200, sampling=own)
            # After a shift the first positions are not the prompt's, so they are no progress of it.
            outputs = [event for event in engine.events[f"r-{i}"] if isinstance(event, Output)]
            has_begun = [bool(event.tokens) for event in outputs]
            assert all(event.prefill is None for event in outputs[has_begun.index(True) :])


async def test_replies_with_different_adapters_are_shifted_side_by_side() -> None:
    backend = wide(3, n_adapters=2)
    sets = [applied(backend.info.adapters, scales) for scales in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))]
    prompt = "a prompt of some words"
    async with running(backend, ram_bytes=10**6) as engine:
        fields = {"sampling": OPEN, "max_tokens": 200, "shift": ON}
        ends = [engine.submit(str(i), prompt, adapters=each, **fields) for i, each in enumerate(sets)]
        for i, (end, adapters) in enumerate(zip(ends, sets, strict=True)):
            assert isinstance(await end, Finished)
            assert engine.tokens(str(i)) == as_llama_server_replies(ids_of(prompt), 200, adapters=adapters)
        for i, adapters in enumerate(sets):
            end = await engine.submit(f"again {i}", prompt, sampling=OPEN, max_tokens=20, adapters=adapters)
            assert isinstance(end, Finished)
            assert engine.tokens(f"again {i}") == engine.tokens(str(i))[:20]
            assert end.progress.n_cached == end.progress.n_prompt - 1


async def test_a_context_with_an_activated_adapter_is_not_shifted() -> None:
    backend = wide(2, n_adapters=1, invocation=b"words")
    adapters = applied(backend.info.adapters, [1.0])
    async with running(backend) as engine:
        for prompt, n in (
            ("a prompt of some words", N_CTX - len(ids_of("a prompt of some words"))),
            ("a prompt", 200),
        ):
            end = await engine.submit(prompt, prompt, sampling=OPEN, max_tokens=200, shift=ON, adapters=adapters)
            assert isinstance(end, Finished)
            assert end.progress.n_generated == n


async def test_where_moving_tokens_has_become_impossible_a_full_context_ends_the_reply() -> None:
    backend = FakeBackend(n_slots=1, n_ctx=N_CTX)
    async with running(backend) as engine:
        backend.info = msgspec.structs.replace(backend.info, shift_failure="the self-test has failed")
        end = await engine.submit("r", "a prompt", sampling=OPEN, max_tokens=200, shift=ON)
        assert isinstance(end, Finished)
        assert (end.reason, end.truncated) == ("limit", True)
        assert end.progress.n_prompt + end.progress.n_generated == N_CTX


async def test_a_reply_within_its_context_is_not_truncated() -> None:
    async with running(FakeBackend(n_slots=1, n_ctx=N_CTX)) as engine:
        end = await engine.submit("r", "a prompt", sampling=OPEN, max_tokens=20, shift=ON)
        assert isinstance(end, Finished)
        assert not end.truncated
        assert end.generated is not None


async def test_a_stop_string_after_a_shift_ends_the_reply_as_truncated() -> None:
    async with running(FakeBackend(n_slots=1, n_ctx=N_CTX)) as engine:
        await engine.submit("whole", "a prompt", sampling=OPEN, max_tokens=150, shift=ON)
        text = engine.text("whole")
        stop = text[120:124]
        end = await engine.submit("r", "a prompt", sampling=OPEN, max_tokens=150, shift=ON, stop=(stop,))
        assert isinstance(end, Finished)
        assert (end.reason, engine.text("r"), end.truncated) == ("word", text[: text.index(stop)], True)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_tokens_that_a_constraint_forces_may_exceed_the_context(layout: dict[str, Any]) -> None:
    text = "0123456789" * 25
    properties = {"a": {"const": text}, "b": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"]}
    constraint = json_schema_constraint(schema, "json_schema", compact=True)
    async with running(FakeBackend(n_ubatch=16, **layout)) as engine:
        end = await engine.submit("r", "a prompt", max_tokens=-1, shift=ON, constraint=constraint)
        assert isinstance(end, Finished)
        assert engine.text("r").startswith(f'{{"a":"{text}","b":"')
        assert (end.reason, end.truncated) == ("eos", True)


async def burst(engine: Harness, chance: random.Random, name: str, heads: Sequence[str]) -> list[tuple[str, str]]:
    """Run some requests at once; returns names and prompts of those that do not shift."""
    asked, plain = [], []
    for i in range(5):
        prompt = chance.choice(heads)[: chance.randint(5, 70)] + chance.choice(["", "x", "yz"])
        if shifts := chance.random() < 0.5:
            keep, discard = chance.choice([0, 3, -1]), chance.choice([0, 0, 5, 60])
            fields: dict[str, Any] = {
                "shift": ContextShift(True, keep, discard), "sampling": OPEN, "max_tokens": chance.randint(50, 250),
            }  # fmt: skip
        else:
            fields = {"max_tokens": chance.randint(1, 24)}
            plain.append((f"{name}-{i}", prompt))
        fields["cache_prompt"] = chance.random() < 0.8
        asked.append((engine.submit(f"{name}-{i}", prompt, **fields), shifts, fields["max_tokens"]))
        if chance.random() < 0.1:
            engine.cancel(f"{name}-{i}")
    for end, shifts, max_tokens in asked:
        ended = await end
        if isinstance(ended, Finished) and shifts:
            assert ended.progress.n_generated == max_tokens
    return plain


@pytest.mark.slow
@pytest.mark.parametrize("is_failing", [False, True])
async def test_no_other_reply_changes_whatever_is_shifted(
    monkeypatch: pytest.MonkeyPatch, *, is_failing: bool
) -> None:
    # Requests outgrow the pool only if they are expected to be short.
    monkeypatch.setattr(admission, "MIN_EXPECTED_TOKENS", 1)
    monkeypatch.setattr(admission, "_NEWEST_WEIGHT", 0.0)
    counts: Counter[str] = Counter()
    for seed in range(200 if LONG else 6):
        chance = random.Random(seed)
        layout = chance.choice([*LAYOUTS, {"n_slots": 3, "n_ctx": N_CTX}, {"n_slots": 3, "n_ctx": 3 * N_CTX}])
        backend = Failing(n_ubatch=16, **layout)
        backend.info = msgspec.structs.replace(backend.info, n_ctx_slot=N_CTX)
        backend.chance = chance
        heads = ["".join(chance.choices("abc", k=70)) for _ in range(3)]
        storing: dict[str, Any] = chance.choice([{}, {"ram_bytes": 10**6}, {"ram_bytes": 10**6, "idle_cells": 0}])
        async with running(backend, debug_invariants=True, **storing) as engine:
            for i in range(6):
                kinds: list[type[Operation]] = [Save, Load, Copy, Share, Remove, Shift]
                backend.kinds = tuple(chance.sample(kinds, chance.choice([0, 1, 6]))) if is_failing else ()
                for name, prompt in await burst(engine, chance, str(i), heads):
                    end = engine.ends[name].result()
                    if isinstance(end, Finished):
                        n = end.progress.n_generated
                        cold = await alone(prompt, FakeBackend(n_slots=1, n_ctx=N_CTX), max_tokens=n)
                        assert engine.text(name) == cold, (seed, name)
            await asyncio.sleep(0)
            state = await engine.ask(InspectEngine())
            counts["shifts"] += state.cache.context_shifts
            counts["preemptions"] += state.cache.preemptions
            counts["hits"] += state.cache.requests.hits
        assert engine.stopped is not None
        assert not engine.stopped.reason
        counts["failed"] += backend.failed["Shift"]
    assert counts["shifts"]
    assert counts["preemptions"]
    assert counts["hits"]
    assert counts["failed"] or not is_failing
