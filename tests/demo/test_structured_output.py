"""Constrained replies of real models: valid for generated schemas, and the same warm, cold, preempted, and with or
without forced tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest
from jsonschema import Draft202012Validator

from bench import synthetic
from llamaslot.app.model_files import resolve_model
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.backend.llama.sampling.host_sampler import HostSampler
from llamaslot.base.commands import Constraint, TextPart
from llamaslot.base.errors import InvalidRequestError
from llamaslot.base.events import Finished, Output
from llamaslot.base.generation.sampling import Sampling
from llamaslot.text.grammars.compiling import GrammarChecker
from llamaslot.text.grammars.json_schema import json_schema_constraint
from tests.conftest import LONG
from tests.engine.harness import GREEDY, Harness, running
from tests.fake_backend import byte_trial
from tests.json_schemas import SchemaMaker
from tests.noise import Noise
from tests.prompt_threads import text_request

N_SLOTS = 8
MAX_TOKENS = 700
PROMPT = "<|im_start|>user\nHello! My name is Ada, and I live in Rome.<|im_end|>\n<|im_start|>assistant\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "tags": {
            "type": "array",
            "items": {"enum": ["first of all", "first and last"]},
            "minItems": 8,
            "maxItems": 9,
        },
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "note": {"anyOf": [{"type": "string", "pattern": "^[a-z ]{3,12}$"}, {"type": "null"}]},
    },
    "required": ["name", "tags", "age", "note"],
}
PERSON = json_schema_constraint(SCHEMA, "json_schema")


def settings(model: str = "demo", n_ctx: int = 8192, n_slots: int = N_SLOTS) -> LlamaSettings:
    return LlamaSettings(resolve_model(model), n_ctx=n_ctx, n_slots=n_slots)


async def reply(engine: Harness, name: str, **fields: object) -> list[int]:
    """The tokens of a reply that ended by itself."""
    end = await engine.submit(name, PROMPT, **{"constraint": PERSON, "max_tokens": MAX_TOKENS} | fields)
    assert isinstance(end, Finished), end
    assert end.reason == "eos"
    assert end.progress.n_generated == len(engine.tokens(name))
    assert not list(Draft202012Validator(SCHEMA).iter_errors(json.loads(engine.text(name))))
    return engine.tokens(name)


def agree(noise: Noise, a: Sequence[int], b: Sequence[int]) -> bool:
    """True if two replies are equal up to a token where both were equally likely."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if at is None:
        return len(a) == len(b)
    return noise.explains([*noise.tokenize(PROMPT), *a[:at]], a[at], b[at])


async def check_generated_schemas(model: str, n: int) -> None:
    """Every reply to a generated schema is valid; none is refused, and at most 5% are cut."""
    backend = LlamaBackend(settings(model))
    checker = GrammarChecker(byte_trial(backend.info.control_tokens, backend.info.n_vocab))
    n_cut = n_refused = n_valid = 0
    async with running(backend) as engine:
        free = asyncio.Semaphore(2 * N_SLOTS)

        async def ask(seed: int) -> None:
            nonlocal n_cut, n_refused, n_valid
            schema = SchemaMaker(seed).schema()
            try:
                constraint = json_schema_constraint(schema, "json_schema")
                checker.check(constraint)
            except InvalidRequestError:
                n_refused += 1
                return
            sampling = GREEDY if seed % 2 else Sampling(temperature=1.0, seed=seed)
            async with free:
                end = await engine.submit(
                    f"r{seed}", PROMPT, constraint=constraint, max_tokens=MAX_TOKENS, sampling=sampling
                )
            assert isinstance(end, Finished), (seed, schema, end)
            if end.reason == "limit":
                n_cut += 1
                return
            errors = list(Draft202012Validator(schema).iter_errors(json.loads(engine.text(f"r{seed}"))))
            assert not errors, (seed, schema, engine.text(f"r{seed}"), errors[0].message)
            n_valid += 1

        async with asyncio.timeout(3600), asyncio.TaskGroup() as group:
            for seed in range(n):
                group.create_task(ask(seed))
    print(f"{model}: {n} schemas, {n_valid} valid, {n_cut} cut, {n_refused} refused")
    assert n_refused == 0, "the generator has supported keywords only"
    assert n_cut <= n * 0.05
    assert n_valid + n_cut == n


@pytest.mark.slow
async def test_replies_to_generated_schemas_are_valid() -> None:
    await check_generated_schemas("demo", 1000 if LONG else 40)


@pytest.mark.skipif(not LONG, reason="a file of 64 MB and minutes of computing")
async def test_replies_to_generated_schemas_are_valid_with_a_large_vocabulary() -> None:
    await check_generated_schemas(str(synthetic.ensure("60m")), 1000)


@pytest.mark.slow
async def test_a_reply_is_the_same_warm_preempted_and_stepwise(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = Noise(settings())
    async with running(LlamaBackend(settings())) as engine:
        cold = await reply(engine, "cold", cache_prompt=False)
        first = await reply(engine, "first")
        warm = await reply(engine, "warm")
        assert engine.ends["warm"].result().progress.n_cached > 0
    n_steps = sum(isinstance(event, Output | Finished) for event in engine.events["cold"])
    assert n_steps < len(cold), "nothing was forced"
    # 1,024 cells for three replies that are expected to take 64 tokens each, and take several hundred.
    async with running(LlamaBackend(settings(n_ctx=256, n_slots=3))) as engine:
        async with engine.held():
            replies = [asyncio.ensure_future(reply(engine, f"r{i}", cache_salt=str(i))) for i in range(3)]
            await asyncio.sleep(0)
        crowded = await asyncio.gather(*replies)
        assert engine.engine.scheduler.admission.n_preempted > 0
    monkeypatch.setattr(HostSampler, "force", lambda _: ())
    async with running(LlamaBackend(settings())) as engine:
        stepwise = await reply(engine, "stepwise")
    for other in (first, warm, stepwise, *crowded):
        assert agree(noise, cold, other)


async def test_choices_follow_the_schema_each_on_its_own() -> None:
    async with running(LlamaBackend(settings())) as engine:
        params = text_request(
            "r",
            (TextPart(PROMPT),),
            sampling=Sampling(temperature=1.0, seed=7),
            max_tokens=MAX_TOKENS,
            constraint=PERSON,
            n=4,
        )
        for end in engine.submit_all(params):
            assert isinstance(await end, Finished)
        texts = [engine.text(f"r-{i}") for i in range(4)]
    assert all(not list(Draft202012Validator(SCHEMA).iter_errors(json.loads(text))) for text in texts)
    assert len(set(texts)) > 1


async def test_a_text_without_any_freedom_is_one_step() -> None:
    text = "This answer is fixed. " * 20
    async with running(LlamaBackend(settings())) as engine:
        constraint = json_schema_constraint({"const": text}, "json_schema")
        await engine.submit("r", PROMPT, constraint=constraint, max_tokens=MAX_TOKENS)
        assert json.loads(engine.text("r")) == text
        assert sum(isinstance(event, Output | Finished) for event in engine.events["r"]) == 1
        assert isinstance(engine.ends["r"].result(), Finished)


def test_constraints_are_plain_values() -> None:
    assert Constraint(PERSON.grammar, "json_schema") == PERSON
