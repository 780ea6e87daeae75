"""Slots of the embedded model, saved by one server and restored by another: text behind them is the cold one."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.demo.corpus import held_out
from llamaslot.app.model_files import resolve_model
from llamaslot.backend.disk import SlotFiles
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.commands import SlotAction, SlotActionDone, TokensPart
from llamaslot.base.events import Finished
from tests.conftest import LONG
from tests.engine.harness import GREEDY, Harness, running
from tests.noise import Noise
from tests.prompt_threads import text_request

SETTINGS = LlamaSettings(resolve_model("demo"), n_ctx=8192, n_slots=2)
N = 20 if LONG else 3


async def act(harness: Harness, action: str, slot: int, filename: str) -> int:
    """Do it, and the tokens that it was done to."""
    done = await harness.ask(SlotAction(slot, action, filename))  # type: ignore[arg-type]
    assert isinstance(done, SlotActionDone)
    return done.n_tokens


async def ask(harness: Harness, name: str, ids: tuple[int, ...], **fields: object) -> Finished:
    params = text_request(name, (TokensPart(ids),), sampling=GREEDY, max_tokens=24, **fields)  # type: ignore[arg-type]
    end = await harness.send(params)
    assert isinstance(end, Finished)
    return end


def folder(backend: LlamaBackend, path: Path) -> SlotFiles:
    assert backend.info.segment_size is not None
    return SlotFiles(path, lambda: b"k" * 32, backend.info.segment_size, backend.info.n_ctx_slot)


@pytest.mark.slow
async def test_text_behind_a_restored_slot_is_the_cold_one(tmp_path: Path) -> None:
    noise = Noise(SETTINGS)
    known: list[tuple[int, ...]] = []
    backend = LlamaBackend(SETTINGS)
    async with running(backend, snapshots=folder(backend, tmp_path)) as harness:
        for i, dialogue in enumerate(held_out(N, 5)):
            text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in dialogue.messages)
            ids = tuple(backend.vocab.tokenize(12 * text, add_special=True, parse_special=True).tolist())[:1500]
            await ask(harness, f"first {i}", ids, id_slot=i % 2)
            assert await act(harness, "save", i % 2, f"{i}.bin") == len(ids) + len(harness.tokens(f"first {i}")) - 1
            known.append((*ids, *harness.tokens(f"first {i}")))
    backend = LlamaBackend(SETTINGS)
    async with running(backend, snapshots=folder(backend, tmp_path), debug_invariants=True) as harness:
        for i, ids in enumerate(known):
            await act(harness, "restore", (i + 1) % 2, f"{i}.bin")
            warm = await ask(harness, f"warm {i}", ids, id_slot=(i + 1) % 2)
            assert warm.progress.n_prompt_computed == 1
            await ask(harness, f"cold {i}", ids, cache_prompt=False)
            a, b = harness.tokens(f"warm {i}"), harness.tokens(f"cold {i}")
            differs = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            assert differs is None or noise.explains([*ids, *a[:differs]], a[differs], b[differs])
