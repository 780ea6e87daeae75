"""Activated adapters (aLoRA) on real models: replies, what of a prompt is shared with whom, and what is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from bench import synthetic
from bench.lora_files import INVOCATION, write_adapter
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.adapters import Adapters, activation_of, applied
from llamaslot.base.backend import Run
from llamaslot.base.cache_ids import MAX_MARKED_FOR_ADAPTERS, cache_ids_of
from llamaslot.base.commands import TokensPart
from llamaslot.base.errors import ConfigError
from llamaslot.base.events import Finished
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import Remove
from llamaslot.base.tokens import TokenizedPrompt, packed
from tests.backend.llama_machine import empty_pool
from tests.backend.test_models import logits
from tests.engine.harness import Harness, running
from tests.engine.test_prompt_scores import scored

GREEDY = Sampling(temperature=0.0, ignore_eos=True)
INVOKED, OTHER = [401, 402, 403], [411, 412]
WORDS = np.random.default_rng(3).integers(300, 400, 300).tolist()
PREFIX = WORDS[:150]
N_PREDICT = 6
MAX_ROUNDED = 0.1
"""Difference of two logits below which rounding may exchange the tokens; 0.03 did. Most differ by 0.5 or more."""


@pytest.fixture(scope="module", params=["tiny", "tiny-swa", "tiny-lfm2"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaBackend]:
    """A model with two activated adapters and one that is always active."""
    folder = tmp_path_factory.mktemp("alora")
    model = synthetic.ensure(request.param, folder=folder, is_exact=True)
    invocations: list[list[int] | None] = [INVOKED, OTHER, None]
    files = [
        write_adapter(folder / f"{i}.gguf", model, i, values={INVOCATION: each})
        for i, each in enumerate(invocations)
    ]
    settings = LlamaSettings(
        model,
        adapters=tuple((path, 0.0) for path in files),
        n_ctx=4096,
        n_slots=4,
        n_cache_seqs=8,
        n_ubatch=64,
        n_threads=1,
        flash_attn="on",
        cache_type_k="f32",
        cache_type_v="f32",
        checkpoints=True,
    )
    made = LlamaBackend(settings)
    made.close, close = lambda: None, made.close  # type: ignore[method-assign]
    yield made
    close()


@pytest.fixture
def serve(backend: LlamaBackend) -> Callable[[Callable[[Harness], Coroutine[Any, Any, None]]], None]:
    """Run a test in an engine whose pool is empty."""

    def served(test: Callable[[Harness], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            async with running(backend, debug_invariants=True, checkpoint_bytes=10**9) as engine:
                await test(engine)

        try:
            asyncio.run(run())
        finally:
            empty_pool(backend)

    return served


def chosen(backend: LlamaBackend, *scales: float) -> Adapters:
    return applied(backend.info.adapters, scales)


async def reply(engine: Harness, prompt: Sequence[int], adapters: Adapters, **fields: Any) -> tuple[list[int], int]:
    """Return the tokens of a greedy reply, and how many tokens of the prompt were cached."""
    name = f"{len(engine.ends)}"
    given = {"sampling": GREEDY, "max_tokens": N_PREDICT, "adapters": adapters, **fields}
    end = await engine.submit(name, [TokensPart(tuple(prompt))], **given)
    assert isinstance(end, Finished), end
    return engine.tokens(name), end.progress.n_cached


def computed(backend: LlamaBackend, parts: Sequence[tuple[Adapters, Sequence[int]]]) -> list[tuple[int, float]]:
    """Return a greedy reply by the backend alone: each part of the prompt with its adapters, the reply as the last.

    Each token comes with the difference of its logit and the next one's.
    """
    at, tokens = 0, np.array([], dtype=np.int32)
    for adapters, part in parts:
        backend.use_adapters(adapters)
        for i in range(0, len(part), 64):
            tokens = np.array(part[i : i + 64], dtype=np.int32)
            backend.decode([Run(0, at, tokens, 1)])
            at += len(tokens)
    found = []
    for _ in range(N_PREDICT):
        *_, second, first = logits(backend, len(tokens) - 1).argsort()
        row = logits(backend, len(tokens) - 1)
        found.append((int(first), float(row[first] - row[second])))
        tokens = np.array([first], dtype=np.int32)
        backend.decode([Run(0, at, tokens, 1)])
        at += 1
    backend.change(Remove(0, 0))
    return found


def test_an_adapter_is_active_from_its_last_invocation_on(backend: LlamaBackend, serve: Any) -> None:
    one, two, always = chosen(backend, 1, 0, 0), chosen(backend, 0, 1, 0), chosen(backend, 0, 0, 1)
    cases: list[tuple[Adapters, list[tuple[Adapters, list[int]]]]] = [
        (one, [((), PREFIX), (one, INVOKED)]),
        (one, [((), PREFIX), (one, [*INVOKED, *WORDS[:3]])]),
        (one, [((), PREFIX[:5]), (one, [*INVOKED, *WORDS[:130]])]),
        (one, [(one, [*INVOKED, *WORDS[:5]])]),
        (one, [((), [*INVOKED, *PREFIX]), (one, [*INVOKED, 300])]),
        (one, [((), PREFIX)]),
        (chosen(backend, 1, 1, 0), [((), [*PREFIX, *INVOKED, 301]), (two, OTHER)]),
        (chosen(backend, 1, 1, 0), [((), [*PREFIX, *OTHER]), (one, INVOKED)]),
        (chosen(backend, 1, 0, 1), [(always, PREFIX), (chosen(backend, 1, 0, 1), INVOKED)]),
        (chosen(backend, 1, 0, 1), [(always, PREFIX)]),
    ]
    expected = [computed(backend, parts) for _, parts in cases]
    assert len({tuple(token for token, _ in each) for each in expected}) == len(cases)

    def check(tokens: list[int], expected: list[tuple[int, float]]) -> None:
        first = next((lead for token, (other, lead) in zip(tokens, expected, strict=True) if token != other), 0.0)
        assert first < MAX_ROUNDED

    async def test(engine: Harness) -> None:
        prompts = [([*sum((part for _, part in parts), [])], adapters) for adapters, parts in cases]  # noqa: RUF017
        for fields in ({"cache_prompt": False}, {}, {}):
            together = await asyncio.gather(*(reply(engine, *each, **fields) for each in prompts))
            for prompt, (tokens, _), each in zip(prompts, together, expected, strict=True):
                check(tokens, each)
                check((await reply(engine, *prompt, **fields))[0], each)

    serve(test)


def test_what_precedes_it_is_shared_with_the_model_and_other_adapters(backend: LlamaBackend, serve: Any) -> None:
    one, half, two = chosen(backend, 1, 0, 0), chosen(backend, 0.5, 0, 0), chosen(backend, 0, 1, 0)
    prompt, n_shared = [*PREFIX, *INVOKED, *WORDS[:3]], len(PREFIX) - MAX_MARKED_FOR_ADAPTERS

    async def test(engine: Harness) -> None:
        first = await reply(engine, prompt, one)
        assert first[1] == 0
        # The model alone continues before the invocation, as do another scale and another adapter.
        assert (await reply(engine, [*prompt, 300], ()))[1] == n_shared
        assert (await reply(engine, prompt, half))[1] == n_shared
        assert (await reply(engine, [*PREFIX, *OTHER, 301], two))[1] == n_shared
        # The same adapter begins at the invocation, or goes on after it.
        again = await reply(engine, prompt, one)
        assert again[0] == first[0]
        assert again[1] == len(prompt) - 1 or (again[1] >= len(PREFIX) and not backend.info.state.can_trim)
        follow = await reply(engine, [*prompt, *first[0], 302], one)
        assert follow[1] >= len(prompt)
        assert follow[0] == (await reply(engine, [*prompt, *first[0], 302], one, cache_prompt=False))[0]
        # It does not find what it computed where a later invocation counts.
        assert (await reply(engine, [*prompt, *first[0], *INVOKED], one))[1] < len(prompt) + 2

    serve(test)


def test_without_its_invocation_it_has_no_effect(backend: LlamaBackend, serve: Any) -> None:
    async def test(engine: Harness) -> None:
        expected = await reply(engine, PREFIX, ())
        again = await reply(engine, PREFIX, chosen(backend, 1, 1, 0))
        assert again[0] == expected[0]
        assert again[1] > 100

    serve(test)


def test_an_invocation_of_one_token_is_shared_wherever_it_is(backend: LlamaBackend, serve: Any) -> None:
    short = backend.info.adapters[0]
    adapters = applied([replace(short, invocation=(401,))], [1.0])

    async def test(engine: Harness) -> None:
        found = [await reply(engine, [*PREFIX, 401], adapters) for _ in range(2)]
        assert found[0][0] == found[1][0]
        assert found[1][1] >= len(PREFIX) - MAX_MARKED_FOR_ADAPTERS
        for n in (0, 1, 5, 6):
            prompt = [*PREFIX[:n], 401, *WORDS[:90]]
            found = [await reply(engine, prompt, adapters) for _ in range(2)]
            assert found[0][0] == found[1][0]
            assert found[1][1] >= n
            # The model alone has computed nothing of it, and other scales either.
            for other in ((), applied([replace(short, invocation=(401,))], [0.5])):
                assert (await reply(engine, prompt, other))[1] <= n

    serve(test)


@pytest.mark.parametrize("more", [0, 6])
def test_scales_whose_first_ids_are_alike_share_nothing_that_depends_on_them(
    backend: LlamaBackend, serve: Any, more: int
) -> None:
    """A client that looks for such scales finds them soon. Duplicate cells become those of another sequence."""
    tokens = [*PREFIX, *INVOKED, *WORDS[:more]]
    one = chosen(backend, 1, 0, 0)

    def first_id(adapters: Adapters) -> int:
        prompt = TokenizedPrompt(packed(np.array(tokens)))
        cached = cache_ids_of(prompt, activation_of(adapters, prompt.packed_tokens))
        return int(cached.ids[cached.marked_from[0]])

    others = [chosen(backend, -100 + i / 1000, 0, 0) for i in range(10_000)]
    alike = [each for each in others if first_id(each) == first_id(one)]
    assert len(alike) > 2

    async def test(engine: Harness) -> None:
        expected, _ = await reply(engine, tokens, one, cache_prompt=False)
        for each in alike:
            assert (await reply(engine, tokens, each))[0] != expected
        for _ in range(2):
            assert (await reply(engine, tokens, one))[0] == expected

    serve(test)


def test_choices_of_a_prompt_compute_it_once_and_continue_with_the_adapter(
    backend: LlamaBackend, serve: Any
) -> None:
    one, prompt = chosen(backend, 1, 0, 0), [*PREFIX, *INVOKED, *WORDS[:3]]

    async def test(engine: Harness) -> None:
        expected, _ = await reply(engine, prompt, one, cache_prompt=False)
        alone, _ = await reply(engine, prompt, (), cache_prompt=False)
        assert expected != alone
        for cache_prompt in (True, False):
            given = {"sampling": GREEDY, "max_tokens": N_PREDICT, "adapters": one, "cache_prompt": cache_prompt}
            names = [f"{cache_prompt} {i}" for i in range(3)]
            async with engine.held():
                ends = [
                    engine.submit(name, [TokensPart(tuple(prompt))], group=f"{cache_prompt}", **given)
                    for name in names
                ]
            found = await asyncio.gather(*ends)
            assert [engine.tokens(name) for name in names] == [expected] * 3
            assert sum(each.progress.n_prompt_computed for each in found) < 2 * len(prompt)

    serve(test)


def test_scores_of_a_prompt_are_those_of_its_tokens(backend: LlamaBackend, serve: Any) -> None:
    one, prompt = chosen(backend, 1, 0, 0), [*PREFIX[:20], *INVOKED, *WORDS[:4]]

    async def test(engine: Harness) -> None:
        found = []
        for adapters in (one, ()):
            await reply(engine, prompt, adapters, prompt_probs=0)
            scores = scored(engine, f"{len(engine.ends) - 1}")
            assert [each.token for each in scores] == prompt
            found.append([each.value for each in scores[1:]])
        with_adapter, alone = found
        # That of a token is computed with the one before it.
        assert with_adapter[:20] == pytest.approx(alone[:20], abs=1e-4)
        assert with_adapter[20:] != pytest.approx(alone[20:], abs=1e-2)

    serve(test)


def test_tokens_of_the_invocation_count_for_penalties(backend: LlamaBackend, serve: Any) -> None:
    sampling = Sampling(
        temperature=0.0, ignore_eos=True, presence_penalty=1000.0, repeat_last_n=64, logit_bias={402: 500.0}
    )

    async def test(engine: Harness) -> None:
        for tokens in ([*PREFIX, *INVOKED], [*PREFIX, 300]):
            found, _ = await reply(engine, tokens, chosen(backend, 1, 0, 0), sampling=sampling, max_tokens=2)
            assert (402 in found) == (402 not in tokens)

    serve(test)


@pytest.mark.parametrize(("tokens", "reason"), [([300] * 257, "257 tokens"), ([300, 2**20], "the model lacks")])
def test_an_invocation_that_no_prompt_can_have_is_refused(
    tiny_model: Path, tmp_path: Path, tokens: list[int], reason: str
) -> None:
    path = write_adapter(tmp_path / "a.gguf", tiny_model, 1, values={INVOCATION: tokens})
    with pytest.raises(ConfigError, match=reason) as refused:
        LlamaBackend(LlamaSettings(tiny_model, adapters=((path, 1.0),), n_ctx=512, n_threads=1))
    assert refused.value.message.startswith(f"--lora: {path} ")


def test_its_file_says_what_invokes_it(backend: LlamaBackend) -> None:
    first, second, third = backend.info.adapters
    assert (first.invocation, second.invocation, third.invocation) == (tuple(INVOKED), tuple(OTHER), ())
    assert first.invocation_text == backend.vocab.detokenize(INVOKED).decode(errors="replace") != ""
    assert third.invocation_text == ""
