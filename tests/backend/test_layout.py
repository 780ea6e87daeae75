"""The layout of a real context: KV that was saved in one is loaded in the other, and nothing illegal is done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llamaslot.backend.llama import LlamaBackend, LlamaSettings, loading
from llamaslot.base.backend import Run, Status
from llamaslot.base.errors import ConfigError
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import IllegalCallError, Load, Remove, Save
from llamaslot.base.tokens import Tokens
from tests.backend.llama_machine import compute

pytestmark = pytest.mark.gpu

PROMPT = [3 + i % 200 for i in range(60)]


@pytest.fixture
def backend(tiny_model: Path) -> Iterator[LlamaBackend]:
    settings = LlamaSettings(tiny_model, n_ctx=1024, n_slots=2, n_ubatch=64, n_threads=1, may_partition=True)
    made = LlamaBackend(settings)
    yield made
    made.close()


def greedy(backend: LlamaBackend, seq: int, tokens: Tokens) -> int:
    """The token that follows, computed on what a sequence holds."""
    run = Run(seq, backend.seq_len(seq), tokens, n_outputs=1)
    assert backend.decode([run]).status is Status.OK
    ((token,),) = backend.sample([(seq, backend.new_sampler(Sampling(temperature=0.0), tokens[:0]))])
    return token


def test_kv_goes_from_one_layout_to_the_other_and_back(backend: LlamaBackend) -> None:
    assert (backend.info.part_cells, backend.info.unified, backend.info.n_ctx_slot) == (512, True, 1024)
    last = np.array([7], dtype=np.int32)
    compute(backend, PROMPT)
    cold = greedy(backend, 0, last)
    backend.change(Remove(0, len(PROMPT)))
    for segment, unified in enumerate((False, True, False)):
        backend.change(Save(segment, 0, 0, len(PROMPT)))
        backend.change(Remove(0, 0))
        backend.set_layout(unified=unified)
        assert (backend.info.unified, backend.n_seqs > 2) == (unified, unified)
        assert [backend.seq_len(seq) for seq in (0, 1)] == [0, 0]
        for seq in (0, 1):
            backend.change(Load(seq, 0, ((segment, len(PROMPT)),)))
            assert greedy(backend, seq, last) == cold
        backend.change(Remove(1, 0))
        backend.change(Remove(0, len(PROMPT)))


def test_a_layout_is_refused_while_a_sequence_holds_something(backend: LlamaBackend) -> None:
    compute(backend, PROMPT)
    with pytest.raises(IllegalCallError):
        backend.set_layout(unified=False)
    assert backend.seq_len(0) == len(PROMPT)


@pytest.mark.parametrize("n_failures", [1, 2])
def test_without_memory_for_another_context(
    backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch, n_failures: int
) -> None:
    """The former layout stays; without memory for that either, the backend can only be closed."""
    make, left = loading.make_context, [n_failures]

    def failing(*given: object, **named: object) -> loading.Context:
        if left[0]:
            left[0] -= 1
            raise ConfigError("no memory", param="--ctx-size")
        return make(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "make_context", failing)
    with pytest.raises(MemoryError if n_failures == 1 else ConfigError):
        backend.set_layout(unified=False)
    if n_failures == 1:
        assert backend.info.unified
        compute(backend, PROMPT)
        assert backend.seq_len(0) == len(PROMPT)


def test_the_layout_of_a_pool_with_small_parts_is_fixed(tiny_model: Path) -> None:
    made = LlamaBackend(
        LlamaSettings(tiny_model, n_ctx=768, n_slots=2, n_ubatch=64, n_threads=1, may_partition=True)
    )
    assert not made.info.part_cells
    with pytest.raises(IllegalCallError):
        made.set_layout(unified=False)
    made.close()
