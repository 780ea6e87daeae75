"""The figures that users see are those of llama_decode itself, read off the arrays that it was given."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import llama_cpp
import pytest

from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.events import Finished
from llamaslot.base.generation.sampling import Sampling
from tests.engine.harness import running


async def test_cached_and_computed_tokens_are_what_llama_decode_was_given(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LlamaBackend(LlamaSettings(tiny_model, n_ctx=2048, n_slots=3, n_ubatch=32, n_threads=1))
    given: Counter[int] = Counter()
    decode = llama_cpp.llama_decode

    def spy(context: object, batch: llama_cpp.llama_batch) -> int:
        given.update(batch.seq_id[i][0] for i in range(batch.n_tokens))
        return decode(context, batch)

    monkeypatch.setattr(llama_cpp, "llama_decode", spy)
    endless = Sampling(temperature=0.0, ignore_eos=True)
    prompts = ["one two three four " * 5, "five six seven " * 6, "eight nine " * 9]
    async with running(backend) as engine:
        for turn in range(4):
            before = Counter(given)
            names = [f"{i}-{turn}" for i in range(len(prompts))]
            ends = await asyncio.gather(
                *(engine.submit(n, p, sampling=endless, max_tokens=6) for n, p in zip(names, prompts, strict=True))
            )
            for end in ends:
                assert isinstance(end, Finished)
                sent = given[end.progress.slot] - before[end.progress.slot]
                progress = end.progress
                # All generated tokens but the last were decoded too.
                assert sent == progress.n_prompt_computed + progress.n_generated - 1
                assert progress.n_cached == progress.n_prompt - progress.n_prompt_computed
                assert (progress.n_cached > 0) == (turn > 0)
            prompts = [p + engine.text(n) + " and on" for p, n in zip(prompts, names, strict=True)]
