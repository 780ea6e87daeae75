"""The cache's state machine on a real model: what the scheduler makes llama.cpp do gives what a cold run gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamaslot.backend.llama import LlamaBackend, LlamaSettings, loading
from llamaslot.base.backend import Backend
from tests.backend.llama_machine import N_CTX, N_UBATCH, LlamaMachine, run_machine
from tests.conftest import LONG
from tests.kvcache.test_cache_machine import OFTEN, Shape

pytestmark = pytest.mark.gpu


class AllLayouts(LlamaMachine):
    """Pools of each layout."""

    layouts = "shared", "shared", "partitions", "changing", "changing"

    def new_backend(self, shape: Shape) -> Backend:
        return LlamaBackend(
            LlamaSettings(
                self.model,
                n_ctx=loading.PADDING * shape.n_slots if shape.layout == "changing" else shape.n_ctx,
                n_slots=shape.n_slots,
                n_cache_seqs=shape.n_spare,
                n_ubatch=shape.n_ubatch,
                n_threads=1,
                unified=shape.layout != "partitions",
                may_partition=shape.layout == "changing",
                may_unload=True,
            )
        )


def test_the_cache_on_a_real_model(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MIN_PART", loading.PADDING)
    chosen = LlamaSettings(tiny_model, n_ctx=N_CTX, n_slots=2, n_cache_seqs=0, n_ubatch=N_UBATCH, n_threads=1)
    expected = OFTEN if LONG else ("tokens", "steps", "ended")
    run_machine(AllLayouts, chosen, n_examples=60 if LONG else 6, expected=expected)
