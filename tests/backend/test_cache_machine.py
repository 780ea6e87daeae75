"""The cache's state machine on a real model: what the scheduler makes llama.cpp do gives what a cold run gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llamaslot.backend.llama import LlamaBackend, LlamaSettings, loading
from llamaslot.backend.llama.saved_states import load_sequence, save_sequence
from llamaslot.base.backend import Backend
from llamaslot.base.kv_ops import Shift
from tests.backend.llama_machine import N_CTX, N_UBATCH, LlamaMachine, run_machine
from tests.conftest import LONG
from tests.kvcache.test_cache_machine import OFTEN, Shape
from tests.kvcache.test_shift_machine import ShiftMachine, shift_beside_another
from tests.noise import Noise

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


class Shifting(ShiftMachine, AllLayouts):
    """Replies go on beyond their context, which fits into the pool of cold runs twice."""

    def slot_context(self) -> int:
        return min(super().slot_context(), N_CTX // 2)


class Unrotated(Shifting):
    """The planted bug: keys that were moved stay as they are, because they are saved and loaded before a decode."""

    def new_backend(self, shape: Shape) -> Backend:
        backend = super().new_backend(shape)
        assert isinstance(backend, LlamaBackend)
        kv = backend._kv
        moved = kv._shift

        def shift(operation: Shift) -> None:
            moved(operation)
            assert load_sequence(kv._context, operation.seq, save_sequence(kv._context, operation.seq))

        kv._shift = shift  # type: ignore[method-assign]
        return backend


@pytest.fixture
def shifting(tiny_model: Path) -> Iterator[LlamaSettings]:
    """The settings of cold runs, and these in `Shifting`."""
    chosen = LlamaSettings(tiny_model, n_ctx=N_CTX, n_slots=2, n_cache_seqs=0, n_ubatch=N_UBATCH, n_threads=1)
    Shifting.model, Shifting.cold, Shifting.noise = chosen.model, LlamaBackend(chosen), Noise(chosen)
    yield chosen
    Shifting.cold.close()


def test_a_shift_on_a_real_model_beside_a_request_that_shares_its_cells(shifting: LlamaSettings) -> None:
    shift_beside_another(Shifting(), 0.0)


def test_keys_that_are_not_rotated_are_noticed(shifting: LlamaSettings) -> None:
    with pytest.raises(AssertionError, match="not what a cold run gives"):
        shift_beside_another(Unrotated(), 0.0)


@pytest.mark.slow
def test_the_cache_with_context_shifts_on_a_real_model(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MIN_PART", loading.PADDING)
    chosen = LlamaSettings(tiny_model, n_ctx=N_CTX, n_slots=2, n_cache_seqs=0, n_ubatch=N_UBATCH, n_threads=1)
    expected = ("shifted", "shifted again", "tokens after a shift") if LONG else ("tokens", "shifted")
    run_machine(Shifting, chosen, n_examples=60 if LONG else 5, expected=expected)
