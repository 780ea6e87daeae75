"""Sizes of checkpoints, and the time to take and restore one, on models of every kind of state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from bench import synthetic
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.backend import Run, Status
from llamaslot.base.kv_ops import Free, Take
from llamaslot.base.model import CheckpointSize, StateKind

SHAPES = (
    "tiny-swa",
    "tiny-oss",
    "tiny-lfm2",
    "tiny-next",
    "tiny-granite",
    "tiny-mamba",
    "tiny-mamba2",
    "tiny-rwkv7",
)
N_CTX, N_UBATCH = 1024, 64
PROMPT = np.random.default_rng(5).integers(300, 500, 400).astype(np.int32)


@contextmanager
def loaded(shape: str, **fields: object) -> Iterator[LlamaBackend]:
    chosen: dict[str, object] = {
        "n_ctx": N_CTX,
        "n_slots": 2,
        "n_ubatch": N_UBATCH,
        "n_threads": 1,
        "checkpoints": True,
    }
    backend = LlamaBackend(LlamaSettings(synthetic.ensure(shape), **chosen | fields))
    try:
        yield backend
    finally:
        backend.close()


def feed(backend: LlamaBackend, seq: int, end: int) -> None:
    """Compute the prompt up to a position, after what the sequence holds of it."""
    for start in range(backend.seq_len(seq), end, N_UBATCH):
        run = Run(seq, start, PROMPT[start : min(start + N_UBATCH, end)], output=False)
        assert backend.decode([run]).status is Status.OK


def taken(backend: LlamaBackend, seq: int) -> int:
    """The bytes of a checkpoint of a sequence."""
    backend.change(Take(0, seq, backend.seq_len(seq)))
    n_bytes = len(backend._kv.partial._states[0])
    backend.change(Free(0))
    return n_bytes


@pytest.mark.parametrize("shape", SHAPES)
def test_the_size_of_a_checkpoint_is_known_by_its_position(shape: str) -> None:
    """A window grows until it is full; a recurrent state has the same size everywhere."""
    with loaded(shape) as backend:
        size, state = backend.info.checkpoint_size, backend.info.state
        assert size is not None
        assert size.n_swa == state.n_swa
        assert (size.per_cell > 0) == (state.kind is StateKind.WINDOW)
        for end in (1, 2, 5, 31, 32):
            feed(backend, 0, end)
            assert taken(backend, 0) == size.of(end)
        for end in (33, 40, 150):
            feed(backend, 0, end)
            assert taken(backend, 0) == size.of(end) == size.of(32)
        # Others take the oldest cell of a window that has moved.
        feed(backend, 1, 400)
        assert size.of(150) - taken(backend, 0) == size.per_cell


@pytest.mark.parametrize(
    ("shape", "fields"), [("tiny", {}), ("tiny-swa", {"checkpoints": False}), ("tiny-mamba", {"unified": False})]
)
def test_without_checkpoints_they_have_no_size(shape: str, fields: dict[str, object]) -> None:
    with loaded(shape, **fields) as backend:
        assert backend.info.checkpoint_size is None


def test_checkpoints_have_a_size_where_segments_have_none() -> None:
    with loaded("tiny-swa", flash_attn="off") as backend:
        assert backend.info.segment_size is None
        assert isinstance(backend.info.checkpoint_size, CheckpointSize)
        feed(backend, 0, 100)
        assert taken(backend, 0) == backend.info.checkpoint_size.of(100)
