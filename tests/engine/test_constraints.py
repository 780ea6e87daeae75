"""Constrained requests in the engine: beside others, under preemption and faults, with forced tokens."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from llamaslot.base.backend import CompiledConstraint, Status
from llamaslot.base.commands import Constraint, TextPart
from llamaslot.base.events import Cancelled, Failed, Finished, Output
from llamaslot.base.generation.sampling import Sampling
from llamaslot.engine import constraint_worker
from llamaslot.text.grammars.json_schema import json_schema_constraint
from tests.conftest import LONG
from tests.engine.harness import GREEDY, Harness, Threaded, running
from tests.fake_backend import EOS, FakeBackend, FakeSampler
from tests.prompt_threads import text_request

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["alpha beta", "alpha gamma"]},
    },
    "required": ["name", "age", "kind"],
}
PERSON = json_schema_constraint(SCHEMA, "json_schema")
FORCED = 'start: /[ab]/ "the tail is forced" /[ab]/ ", twice"'
"""18 tokens and 7 are forced, and two are sampled."""


def of_lark(lark: str) -> Constraint:
    return Constraint(LLMatcher.grammar_from_lark(lark), "grammar")


async def ended(harness: Harness, name: str) -> Finished:
    end = await harness.ends[name]
    assert isinstance(end, Finished), end
    return end


async def alone(prompt: str, constraint: Constraint | None, **fields: Any) -> list[int]:
    """The tokens that a request gives on a backend of its own."""
    async with running(FakeBackend(n_ctx=512)) as harness:
        await harness.submit("alone", prompt, constraint=constraint, **{"max_tokens": 200} | fields)
        return harness.tokens("alone")


@pytest.mark.parametrize("kind", [Harness, Threaded])
async def test_constrained_replies_are_valid_beside_free_ones(kind: type[Harness]) -> None:
    free = await alone("free", None, max_tokens=30)
    async with running(FakeBackend(n_ctx=1024), kind=kind) as harness:
        for i in range(6):
            harness.submit(f"r{i}", f"prompt {i}", constraint=PERSON, max_tokens=200)
        harness.submit("free", "free", max_tokens=30)
        for i in range(6):
            end = await ended(harness, f"r{i}")
            assert end.reason == "eos"
            assert json.loads(harness.text(f"r{i}"))["kind"] in SCHEMA["properties"]["kind"]["enum"]
            tokens = harness.tokens(f"r{i}")
            assert tokens[-1] == EOS
            assert end.progress.n_generated == len(tokens)
        await ended(harness, "free")
        assert harness.tokens("free") == free
        assert isinstance(harness.backend, FakeBackend)
    assert all(sampler.closed for sampler in harness.backend.samplers)


async def test_forced_tokens_change_the_steps_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> tuple[list[list[int]], int]:
        backend = FakeBackend(n_ctx=1024)
        async with running(backend) as harness:
            for i in range(4):
                harness.submit(f"r{i}", f"prompt {i}", constraint=PERSON, max_tokens=200)
            tokens = []
            for i in range(4):
                await ended(harness, f"r{i}")
                tokens.append(harness.tokens(f"r{i}"))
            return tokens, sum(sampler.n_drawn for sampler in backend.samplers)

    forwarded, n_drawn = await run()
    monkeypatch.setattr(FakeSampler, "force", lambda _: ())
    stepwise, n_drawn_stepwise = await run()
    assert forwarded == stepwise
    assert n_drawn_stepwise == sum(map(len, stepwise))
    assert n_drawn < 0.7 * n_drawn_stepwise


async def test_forced_tokens_come_in_one_step_and_one_event() -> None:
    backend = FakeBackend()
    async with running(backend) as harness:
        harness.submit("r", "prompt", constraint=of_lark(FORCED), max_tokens=100)
        end = await ended(harness, "r")
        outputs = [len(event.tokens) for event in harness.events["r"] if isinstance(event, Output)]
    assert outputs == [19]
    assert len(end.tokens) == 9
    assert harness.text("r")[1:19] == "the tail is forced"
    assert harness.text("r").endswith(", twice")
    assert backend.samplers[0].n_drawn == 2


@pytest.mark.parametrize("n", [1, 2, 10, 18, 19, 20, 21, 27, 28])
async def test_the_token_limit_holds_within_forced_tokens(n: int) -> None:
    whole = await alone("prompt", of_lark(FORCED))
    async with running(FakeBackend()) as harness:
        harness.submit("r", "prompt", constraint=of_lark(FORCED), max_tokens=n)
        end = await ended(harness, "r")
        assert harness.tokens("r") == whole[:n]
        assert end.progress.n_generated == n
        assert end.reason == ("limit" if n < len(whole) else "eos")


async def test_a_full_context_ends_forced_tokens() -> None:
    async with running(FakeBackend(n_ctx=32)) as harness:
        harness.submit("r", "a prompt of 20 chars", constraint=of_lark(FORCED), max_tokens=-1)
        end = await ended(harness, "r")
    assert end.truncated
    assert end.progress.n_prompt + end.progress.n_generated == 32


@pytest.mark.parametrize("stop", ["tail", "the tail is forced", "s f", ", twice", "e"])
async def test_stop_strings_end_a_reply_within_forced_tokens(stop: str) -> None:
    whole = bytes((await alone("prompt", of_lark(FORCED)))[:-1]).decode()
    async with running(FakeBackend()) as harness:
        for name in ("r", "again"):
            harness.submit(name, "prompt", constraint=of_lark(FORCED), stop=(stop,), max_tokens=100)
            end = await ended(harness, name)
            assert end.reason == "word"
            assert harness.text(name) == whole[: whole.index(stop)]
            # Each token is a byte: those up to the end of the stop string count, and no others.
            assert end.progress.n_generated == whole.index(stop) + len(stop)
            assert len(harness.tokens(name)) == whole.index(stop)
        harness.submit("next", "prompt", constraint=of_lark(FORCED), max_tokens=100)
        await ended(harness, "next")
        assert harness.text("next") == whole


async def test_several_choices_follow_the_grammar_each_on_its_own() -> None:
    backend = FakeBackend(n_ctx=1024)
    async with running(backend) as harness:
        sampling = Sampling(temperature=1.0, seed=5)
        params = text_request("r", (TextPart("prompt"),), sampling=sampling, max_tokens=200, constraint=PERSON, n=4)
        ends = harness.submit_all(params)
        for end in ends:
            assert isinstance(await end, Finished)
        texts = [harness.text(f"r-{i}") for i in range(4)]
    assert all(json.loads(text)["age"] <= 150 for text in texts)
    assert len(set(texts)) > 1


async def test_a_warm_prompt_gives_the_same_reply() -> None:
    cold = await alone("a prompt that is cached", PERSON)
    async with running(FakeBackend(n_ctx=1024)) as harness:
        for name in ("first", "second"):
            harness.submit(name, "a prompt that is cached", constraint=PERSON, max_tokens=200)
            end = await ended(harness, name)
            assert harness.tokens(name) == cold
        assert end.progress.n_cached > 15


async def test_a_reply_goes_on_where_it_was_preempted() -> None:
    # It is expected to generate 64 tokens, and generates 323.
    lark = of_lark('start: ("item " /[a-z]/ ", "){40} "end"')
    names = [f"prompt {i}" for i in range(3)]
    expected = [await alone(name, lark, max_tokens=400) for name in names]
    async with running(FakeBackend(n_ctx=600, n_slots=3, n_ubatch=16)) as harness:
        async with harness.held():
            for i, name in enumerate(names):
                harness.submit(f"r{i}", name, constraint=lark, max_tokens=400)
        for i in range(3):
            await ended(harness, f"r{i}")
            assert harness.tokens(f"r{i}") == expected[i]
        assert harness.engine.scheduler.admission.n_preempted > 0


@pytest.mark.slow
@pytest.mark.parametrize("status", [Status.NO_CELLS, Status.INVALID, Status.FATAL, Status.ABORTED])
async def test_a_failed_decode_is_repeated_with_the_same_grammar_state(status: Status) -> None:
    expected = [await alone(f"prompt {i}", PERSON) for i in range(3)]
    backend = FakeBackend(n_ctx=512)
    async with running(backend) as harness:
        for i in range(3):
            harness.submit(f"r{i}", f"prompt {i}", constraint=PERSON, max_tokens=200)
        # A request that is alone in its step would fail.
        for i in range(3):
            await harness.wait_for(f"r{i}", Output, 1)
        backend.failures.append((status, 1))
        for i in range(3):
            await ended(harness, f"r{i}")
            assert harness.tokens(f"r{i}") == expected[i]


@pytest.mark.slow
async def test_a_constraint_that_fails_ends_only_its_own_request() -> None:
    many = 12_000
    rules = "\n".join(f"x{i}: /a/ x{i}?" for i in range(many))
    lark = of_lark(f"start: {' | '.join(f'x{i} /!/' for i in range(many))}\n{rules}")
    async with running(FakeBackend(n_ctx=512)) as harness:
        harness.submit("good", "good", constraint=PERSON, max_tokens=200)
        harness.submit("bad", "bad", constraint=lark, max_tokens=200)
        end = await harness.ends["bad"]
        assert isinstance(end, Failed)
        assert end.error.type == "invalid_request_error"
        assert end.error.message.startswith("'grammar' cannot be followed after")
        await ended(harness, "good")
        json.loads(harness.text("good"))


async def test_an_invalid_grammar_fails_its_request() -> None:
    async with running(FakeBackend()) as harness:
        harness.submit("bad", "bad", constraint=of_lark("start: /(/"))
        end = await harness.ends["bad"]
        assert isinstance(end, Failed)
        assert (end.error.type, end.error.param) == ("invalid_request_error", "grammar")
        assert not harness.engine.scheduler.queue
        await harness.submit("good", "good")


class SlowBackend(FakeBackend):
    """Compiles nothing before `go` is set, or only those that are not `slow`."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.go = threading.Event()
        self.slow: list[Constraint] = []
        self.compiled: list[Constraint] = []

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        self.compiled.append(constraint)
        assert (self.slow and constraint not in self.slow) or self.go.wait(30)
        return super().compile(constraint)


async def test_others_run_while_a_constraint_is_compiled() -> None:
    backend = SlowBackend(n_slots=1)
    async with running(backend) as harness:
        harness.submit("slow", "slow", constraint=PERSON, max_tokens=200)
        for i in range(3):
            await harness.submit(f"free {i}", f"free {i}")
        assert not harness.ends["slow"].done()
        backend.go.set()
        await ended(harness, "slow")


async def test_a_request_can_be_cancelled_while_its_constraint_is_compiled() -> None:
    backend = SlowBackend(n_slots=1)
    async with running(backend) as harness:
        harness.submit("slow", "slow", constraint=PERSON)
        await harness.submit("free", "free")
        harness.cancel("slow")
        assert isinstance(await harness.ends["slow"], Cancelled)
        backend.go.set()
        await harness.submit("next", "next", constraint=PERSON, max_tokens=200)
        json.loads(harness.text("next"))


async def test_a_constraint_that_waits_is_not_compiled_once_its_request_is_cancelled() -> None:
    backend = SlowBackend(n_slots=1)
    waits = of_lark('start: "waits"')
    async with running(backend) as harness:
        # Both threads are busy: one has what may take long, the other the rest.
        for name in ("slow", "slower"):
            harness.submit(name, name, constraint=msgspec.structs.replace(PERSON, seconds=float(name == "slower")))
        for seconds in (0.0, 1.0):
            harness.submit(f"waits {seconds}", "waits", constraint=msgspec.structs.replace(waits, seconds=seconds))
        await harness.submit("free", "free")
        for seconds in (0.0, 1.0):
            harness.cancel(f"waits {seconds}")
            assert isinstance(await harness.ends[f"waits {seconds}"], Cancelled)
        backend.go.set()
        await ended(harness, "slow")
        await harness.submit("next", "next", constraint=of_lark('start: "next"'), max_tokens=20)
    assert waits.grammar not in {each.grammar for each in backend.compiled}


async def test_compiling_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SlowBackend(n_slots=1)
    async with running(backend) as harness:
        monkeypatch.setattr(constraint_worker, "COMPILE_TIMEOUT_S", 0.05)
        harness.submit("slow", "slow", constraint=PERSON)
        end = await harness.ends["slow"]
        assert isinstance(end, Failed)
        assert end.error.type == "unavailable_error"
        assert "not compiled within" in end.error.message
        backend.go.set()


async def test_what_compiles_quickly_does_not_wait_for_what_takes_long() -> None:
    backend = SlowBackend(n_slots=1)
    backend.slow = [msgspec.structs.replace(of_lark(f'start: "slow {i}"'), seconds=1.0) for i in range(3)]
    async with running(backend) as harness:
        for i, constraint in enumerate(backend.slow):
            harness.submit(f"slow {i}", "slow", constraint=constraint, client=f"client {min(i, 1)}")
        await harness.submit("quick", "quick", constraint=PERSON, max_tokens=200)
        assert not any(harness.ends[f"slow {i}"].done() for i in range(3))
        backend.go.set()
        for i in range(3):
            await ended(harness, f"slow {i}")
    assert backend.compiled.index(backend.slow[1]) < backend.compiled.index(backend.slow[2])


async def test_clients_take_turns_at_compiling() -> None:
    backend = SlowBackend(n_slots=1)
    backend.slow = [of_lark(f'start: "{i}"') for i in range(6)]
    async with running(backend) as harness:
        for i, constraint in enumerate(backend.slow):
            harness.submit(f"r{i}", "r", constraint=constraint, client="other" if i == 5 else "many")
        backend.go.set()
        for i in range(6):
            await ended(harness, f"r{i}")
    assert backend.compiled.index(backend.slow[5]) == 1


async def test_an_engine_that_stops_fails_what_is_being_compiled() -> None:
    backend = SlowBackend(n_slots=1)
    async with running(backend) as harness:
        harness.submit("slow", "slow", constraint=PERSON)
        await harness.submit("free", "free")
        backend.go.set()
        harness.engine.stop()
        assert isinstance(await harness.ends["slow"], Failed | Finished)


async def test_a_prompt_makes_progress_beside_streams_with_forced_tokens() -> None:
    """Forced tokens take the same budget as prompts, of which a quarter is the first prompt's."""
    lark = of_lark('start: ("word " /[a-z]/ " many forced letters follow here; "){40} "end"')
    async with running(FakeBackend(n_ctx=2048, n_ubatch=16), gap_ms=0.001) as harness:
        for i in range(3):
            harness.submit(f"r{i}", f"prompt {i}", constraint=lark, max_tokens=400)
        await harness.wait_for("r0", Output, 2)
        harness.submit("long", "p" * 100, max_tokens=1)
        await ended(harness, "long")
        assert not all(harness.ends[f"r{i}"].done() for i in range(3))


@pytest.mark.parametrize("seed", range(60 if LONG else 8))
async def test_random_requests_give_what_each_gives_alone(seed: int) -> None:
    choice = random.Random(seed)
    constraints: list[Callable[[], Constraint | None]] = [
        lambda: PERSON,
        lambda: of_lark(FORCED),
        lambda: of_lark('start: ("item " /[a-z]/ ", ")+ "end"'),
        lambda: None,
    ]
    asked = []
    for i in range(choice.randint(3, 8)):
        constraint = choice.choice(constraints)()
        stop = (choice.choice(["tail", "it", "a"]),) if choice.random() < 0.4 else ()
        sampling = GREEDY if choice.random() < 0.5 else Sampling(temperature=1.0, seed=choice.randrange(9))
        prompt = "shared prefix " * choice.randint(0, 2) + f"prompt {choice.randint(0, 3)}"
        fields = {"constraint": constraint, "stop": stop, "sampling": sampling}
        asked.append((f"r{i}", prompt, fields | {"max_tokens": choice.randint(1, 60)}))
    expected = {}
    for name, prompt, fields in asked:
        async with running(FakeBackend(n_ctx=512)) as harness:
            await harness.submit(name, prompt, **fields)
            expected[name] = harness.tokens(name), harness.text(name)
    backend = FakeBackend(n_ctx=160, n_slots=3, n_ubatch=choice.choice([8, 16, 32]))
    async with running(backend) as harness:
        cancelled = set()
        for name, prompt, fields in asked:
            harness.submit(name, prompt, **fields)
            for _ in range(choice.randint(0, 20)):
                await asyncio.sleep(0)
            if choice.random() < 0.15:
                harness.cancel(name)
                cancelled.add(name)
            if choice.random() < 0.3:
                backend.failures.append((Status.NO_CELLS, 0))
        for name, _, _ in asked:
            end = await harness.ends[name]
            if isinstance(end, Failed):
                # Its decode failed while it was alone in the step.
                assert "NO_CELLS" in end.error.message
                assert expected[name][1].startswith(harness.text(name))
            elif name not in cancelled:
                assert (harness.tokens(name), harness.text(name)) == expected[name], name
    assert all(sampler.closed for sampler in backend.samplers)
