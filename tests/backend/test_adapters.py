"""LoRA adapters in llama.cpp: what they change, that each batch has its own, and that reuse changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import synthetic
from bench.lora_files import write_adapter
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.adapters import Adapters, applied
from llamaslot.base.backend import Run
from llamaslot.base.errors import ConfigError
from llamaslot.base.events import Failed, Finished
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import IllegalCallError, Load, Remove, Save
from tests.backend.test_models import logits
from tests.demo.talks import dialogues, turns
from tests.demo.test_checkpoints import EMBEDDED, MODELS
from tests.engine.harness import running

GREEDY = Sampling(temperature=0.0, ignore_eos=True)
SCALES = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 0.5))
SETTINGS: dict[str, Any] = {"n_ctx": 4096, "n_slots": 4, "n_ubatch": 64, "n_threads": 1}
WORDS = np.random.default_rng(3).integers(300, 500, 200).astype(np.int32)


@pytest.fixture(scope="module", params=["tiny", "tiny-swa", "tiny-lfm2"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return synthetic.ensure(request.param, folder=tmp_path_factory.mktemp("models"), is_exact=True)


@pytest.fixture(scope="module")
def files(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[Path, float], ...]:
    folder = tmp_path_factory.mktemp("adapters")
    return tuple((write_adapter(folder / f"{i}.gguf", model, i), 0.0) for i in range(2))


def load(model: Path, adapters: tuple[tuple[Path, float], ...], **settings: Any) -> LlamaBackend:
    return LlamaBackend(LlamaSettings(model, adapters=adapters, **SETTINGS | settings))


@pytest.fixture
def backend(model: Path, files: tuple[tuple[Path, float], ...]) -> Iterator[LlamaBackend]:
    backend = load(model, files, may_unload=True, checkpoints=True)
    yield backend
    backend.close()


def sets(backend: LlamaBackend) -> list[Adapters]:
    return [applied(backend.info.adapters, scales) for scales in SCALES]


def last_logits(backend: LlamaBackend, adapters: Adapters, tokens: np.ndarray = WORDS[:60]) -> np.ndarray:
    """The logits after tokens in sequence 0, which is empty before and after."""
    backend.use_adapters(adapters)
    backend.decode([Run(0, 0, tokens, 1)])
    found = logits(backend, len(tokens) - 1).copy()
    backend.change(Remove(0, 0))
    return found


def test_each_batch_has_its_own_adapters(backend: LlamaBackend) -> None:
    expected = [last_logits(backend, each) for each in sets(backend)]
    for i, one in enumerate(expected):
        for other in expected[:i]:
            assert np.abs(one - other).max() > 0.05
    for i in (3, 0, 1, 1, 2, 0, 3):
        assert np.abs(last_logits(backend, sets(backend)[i]) - expected[i]).max() < 1e-4


def test_without_adapters_it_is_the_model_alone(model: Path, backend: LlamaBackend) -> None:
    expected = last_logits(backend, ())
    plain = load(model, ())
    assert np.abs(last_logits(plain, ()) - expected).max() < 1e-5
    assert plain.info.kv_facts == backend.info.kv_facts
    assert plain.info.kv_files == backend.info.kv_files
    plain.close()


def test_adapters_that_are_not_loaded_are_refused(backend: LlamaBackend) -> None:
    for wrong in (backend.info.adapters[::-1], (*backend.info.adapters, backend.info.adapters[0])):
        with pytest.raises(IllegalCallError):
            backend.use_adapters(applied(wrong, [1.0] * len(wrong)))


def test_they_are_loaded_again_with_the_model(backend: LlamaBackend) -> None:
    expected = [last_logits(backend, each) for each in sets(backend)]
    for _ in range(2):
        backend.unload()
        backend.reload()
        for each, before in zip(sets(backend), expected, strict=True):
            assert np.abs(last_logits(backend, each) - before).max() < 1e-4


def test_a_file_that_was_changed_is_not_loaded_again(tiny_model: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a.gguf", tiny_model, 1)
    backend = load(tiny_model, ((path, 1.0),), may_unload=True)
    backend.unload()
    write_adapter(path, tiny_model, 2)
    with pytest.raises(RuntimeError, match="--lora was changed"):
        backend.reload()
    write_adapter(path, tiny_model, 1)
    backend.reload()
    path.unlink()
    backend.unload()
    with pytest.raises(ConfigError, match="--lora"):
        backend.reload()
    backend.close()


def test_facts_of_an_adapter_follow_from_its_file(tiny_model: Path, tmp_path: Path) -> None:
    named = {"adapter.lora.task_name": "sums", "adapter.lora.prompt_prefix": "Add: "}
    files = [write_adapter(tmp_path / f"{i}.gguf", tiny_model, 1, values=named) for i in range(2)]
    other = write_adapter(tmp_path / "other.gguf", tiny_model, 2)
    backend = load(tiny_model, ((files[0], 0.5), (files[1], 1.0), (other, 1.0)))
    one, two, three = backend.info.adapters
    assert (one.path, one.scale, one.task_name, one.prompt_prefix) == (str(files[0]), 0.5, "sums", "Add: ")
    assert one.digest == two.digest != three.digest
    assert backend.info.adapter_switch_ms >= 0
    backend.close()


def test_an_adapter_that_llama_cpp_refuses_is_an_error_that_names_it(tiny_model: Path, tmp_path: Path) -> None:
    lost = write_adapter(tmp_path / "lost.gguf", tiny_model, 1, names=["blk.0.attn_q.weight"])
    data = lost.read_bytes()
    for wrong in (data.replace(b"blk.0.attn_q", b"blk.9.attn_q"), data[:-100], data.replace(b"lora_b", b"lora_c")):
        lost.write_bytes(wrong)
        with pytest.raises(ConfigError, match="--lora") as refused:
            load(tiny_model, ((lost, 1.0),))
        assert "lost.gguf" in refused.value.message


def test_saved_kv_continues_with_its_adapters(tiny_model: Path, tmp_path: Path) -> None:
    files = tuple((write_adapter(tmp_path / f"{i}.gguf", tiny_model, i), 0.0) for i in range(2))
    backend = load(tiny_model, files)
    for number, adapters in enumerate(sets(backend)):
        expected = last_logits(backend, adapters)
        backend.use_adapters(adapters)
        backend.decode([Run(0, 0, WORDS[:50], 0)])
        backend.change(Save(number, 0, 0, 50))
        backend.change(Remove(0, 0))
        backend.change(Load(1, 0, ((number, 50),)))
        backend.decode([Run(1, 50, WORDS[50:60], 1)])
        assert np.abs(logits(backend, 9) - expected).max() < 0.05
        backend.change(Remove(1, 0))
    backend.close()


async def test_infinite_kv_of_an_adapter_spoils_no_other_request(tiny_model: Path, tmp_path: Path) -> None:
    """Without flash attention, where it would through cells that others only mask."""
    wild = write_adapter(tmp_path / "wild.gguf", tiny_model, 1, strength=1e6)
    backend = load(tiny_model, ((wild, 0.0),), flash_attn="off")
    adapters = applied(backend.info.adapters, [1.0])
    prompt = "A prompt of some words, which is no matter, but for its length. " * 3
    async with running(backend, debug_invariants=True) as harness:

        async def tokens(name: str) -> list[int]:
            end = await harness.submit(name, prompt, sampling=GREEDY, max_tokens=8, cache_prompt=False)
            assert isinstance(end, Finished), end
            return harness.tokens(name)

        before = await tokens("before")
        for i in range(3):
            end = await harness.submit(f"bad {i}", prompt * 2, sampling=GREEDY, max_tokens=8, adapters=adapters)
            assert isinstance(end, Failed)
            assert "INVALID_LOGITS" in end.error.message
            assert await tokens(f"good {i}") == before


@pytest.mark.parametrize("trained", [EMBEDDED, *MODELS], ids=lambda path: path.stem)
@pytest.mark.parametrize("at_once", [True, False])
async def test_warm_replies_are_the_cold_ones_with_each_set_of_adapters(
    trained: Path, tmp_path: Path, *, at_once: bool
) -> None:
    """Of trained models, whose replies rounding does not change (fact 9)."""
    files = tuple((write_adapter(tmp_path / f"{i}.gguf", trained, i, strength=0.15), 0.0) for i in range(2))
    prompts = turns(dialogues(2, seed=20, filler_tokens=150)[0])

    async def replies(*, cache_prompt: bool) -> dict[tuple[str, Adapters], tuple[list[int], int]]:
        backend = load(trained, files, checkpoints=True)
        asked = [(prompt, each) for prompt in prompts for each in sets(backend)]
        async with running(backend, ram_bytes=2**28, checkpoint_bytes=2**26, debug_invariants=True) as harness:

            async def ask(i: int) -> tuple[list[int], int]:
                prompt, adapters = asked[i]
                chosen: dict[str, Any] = {"adapters": adapters, "cache_prompt": cache_prompt}
                end = await harness.submit(str(i), prompt, sampling=GREEDY, max_tokens=16, **chosen)
                assert isinstance(end, Finished), end
                return harness.tokens(str(i)), end.progress.n_cached

            numbers = range(len(asked))
            at_a_time = len(SCALES) if at_once and cache_prompt else 1
            found = []
            for first in numbers[::at_a_time]:
                found += await asyncio.gather(*map(ask, numbers[first : first + at_a_time]))
        return dict(zip(asked, found, strict=True))

    warm, cold = await replies(cache_prompt=True), await replies(cache_prompt=False)
    assert {asked: tokens for asked, (tokens, _) in warm.items()} == {
        asked: tokens for asked, (tokens, _) in cold.items()
    }
    by_prompt = [{tuple(cold[asked][0]) for asked in cold if asked[0] == prompt} for prompt in prompts]
    assert max(map(len, by_prompt)) > 1, "the adapters change nothing"
    later = [n for (prompt, _), (_, n) in warm.items() if prompt != prompts[0]]
    assert min(later) > 0.3 * len(prompts[0]) / 10
    assert not any(n for (prompt, _), (_, n) in warm.items() if prompt == prompts[0])
