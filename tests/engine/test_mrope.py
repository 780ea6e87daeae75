"""Images with a model of M-RoPE: replies are those of a cold run, wherever the KV of a tile comes from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import synthetic
from bench.projector_files import picture, write_projector
from llamaslot.backend.disk import DiskStore
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.commands import ImagePart, PromptPart, TextPart
from llamaslot.base.events import Finished
from llamaslot.base.images import ImageSize
from tests.engine.harness import Harness, alone, draft_tokens, running
from tests.engine.test_disk_worker import KEY, written
from tests.engine.test_drafts import OPEN, Steps
from tests.vision_files import with_mrope

SIZE = ImageSize(480, 400)
"""That of a tile of 30 x 25 tokens: more than a segment has, or a step."""
N_TILE = 750


@pytest.fixture(scope="module", params=["tiny-qwen2vl", "tiny-qwen35"])
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LlamaSettings:
    folder = tmp_path_factory.mktemp("models")
    if request.param == "tiny-qwen2vl":
        model = with_mrope(synthetic.ensure("tiny", folder=folder, is_exact=True), folder / "qwen2vl.gguf")
    else:
        model = synthetic.ensure(request.param, folder=folder, is_exact=True)
    return LlamaSettings(
        model,
        mmproj=write_projector(folder / "mmproj.gguf", "qwen2vl_merger"),
        n_ctx=2048,
        n_slots=2,
        n_cache_seqs=2,
        n_ubatch=256,
        n_threads=1,
        flash_attn="on",
        cache_type_k="f32",
        cache_type_v="f32",
        checkpoints=True,
    )


def parts(backend: LlamaBackend, before: str, image: int, after: str) -> list[PromptPart]:
    data = picture(image, SIZE.width, SIZE.height)
    return [TextPart(before), ImagePart(data, b"digest%d" % image, backend.image_layout(SIZE)), TextPart(after)]


async def cold(settings: LlamaSettings, *prompt: Any) -> str:
    backend = LlamaBackend(settings)
    return await alone(parts(backend, *prompt), backend, max_tokens=8)


async def reply(engine: Harness, backend: LlamaBackend, name: str, *prompt: Any) -> Finished:
    end = await engine.submit(name, parts(backend, *prompt), max_tokens=8)
    assert isinstance(end, Finished), end
    return end


@asynccontextmanager
async def served(backend: LlamaBackend, folder: Path) -> AsyncIterator[Harness]:
    store = DiskStore(folder)
    store.open(KEY, 10**9)
    try:
        async with running(
            backend, disk=store, ram_bytes=10**9, checkpoint_bytes=10**9, checkpoints_on_path=32
        ) as engine:
            yield engine
    finally:
        store.close()


async def test_a_reply_is_that_of_a_cold_run(settings: LlamaSettings, tmp_path: Path) -> None:
    """From cells, from RAM, after the eviction of a part, and from disk."""
    prompts = [("look: ", 1, " what is it?"), ("look: ", 1, " and whose?"), ("see: ", 2, " what is it?")]
    expected = [await cold(settings, *prompt) for prompt in prompts]
    backend = LlamaBackend(settings)
    async with served(backend, tmp_path) as engine:
        for i, prompt in enumerate(prompts):
            end = await reply(engine, backend, f"first {i}", *prompt)
            assert engine.text(f"first {i}") == expected[i]
        assert backend.stats.n_tiles_encoded == 2
        n_loaded = 0
        for n_filler in (300, 700, 1100, 1500, 1900):
            await engine.submit(f"filler {n_filler}", "f" * n_filler, max_tokens=1)
            for i, prompt in enumerate(prompts):
                name = f"{n_filler} {i}"
                end = await reply(engine, backend, name, *prompt)
                assert engine.text(name) == expected[i]
                assert end.progress.n_cached > N_TILE
                n_loaded += end.progress.n_loaded
        assert backend.stats.n_tiles_encoded == 2
        assert n_loaded > N_TILE
        await written(engine)
    backend = LlamaBackend(settings)
    async with served(backend, tmp_path) as engine:
        for i, prompt in enumerate(prompts):
            end = await reply(engine, backend, f"later {i}", *prompt)
            assert engine.text(f"later {i}") == expected[i]
            assert end.progress.n_cached > N_TILE
        assert backend.stats.n_tiles_encoded == 0


@pytest.mark.parametrize("n_drafted", [(3, 0), (1, 3), (0, 2)])
async def test_drafts_after_an_image_change_no_reply(settings: LlamaSettings, n_drafted: tuple[int, int]) -> None:
    """What is rejected is removed by its positions, which after an image are not the numbers of the tokens."""
    prompt, fields = ("look: ", 1, " what is it?"), {"max_tokens": 24, "sampling": OPEN}
    given = replace(settings, max_draft=63)
    backend = LlamaBackend(given)
    async with running(backend) as engine:
        await engine.submit("plain", parts(backend, *prompt), **fields)
        expected = engine.tokens("plain")
    backend = LlamaBackend(given)
    async with running(backend) as engine:
        steps = Steps(engine.engine)
        draft_tokens(engine, n_drafted, lambda _: expected)
        await engine.submit("drafted", parts(backend, *prompt), **fields)
        assert engine.tokens("drafted") == expected
        assert steps.counts["drafted"] > 5
        assert bool(steps.counts["rejected"]) == bool(n_drafted[1])
        # Nothing of what was rejected is left in what the next turn continues from.
        end = await reply(engine, backend, "next", "look: ", 1, " what is it?" + engine.text("drafted") + " and?")
        assert end.progress.n_cached > N_TILE
    assert engine.text("next") == await cold(
        settings, "look: ", 1, " what is it?" + engine.text("drafted") + " and?"
    )


async def test_nothing_is_encoded_again_in_turn_2_after_a_restart_nor_by_another_user_after_the_next(
    settings: LlamaSettings, tmp_path: Path
) -> None:
    system = "you see what others do not, and say so in a few words: " * 3
    question, text = "", ""
    for turn in (" what is it?", " and what else?", " whose is it, and what is behind it?"):
        question = turn if "whose" in turn else f"{question}{text}{turn}"
        expected = await cold(settings, system, 1, question)
        backend = LlamaBackend(settings)
        async with served(backend, tmp_path) as engine:
            end = await reply(engine, backend, turn, system, 1, question)
            text = engine.text(turn)
            assert text == expected
            if turn != " what is it?":
                assert backend.stats.n_tiles_encoded == 0
                delimiter = backend.image_layout(SIZE).pieces[-1]
                assert not isinstance(delimiter, int)
                assert end.progress.n_prompt_computed <= len(delimiter) + len(question)
            await written(engine)
