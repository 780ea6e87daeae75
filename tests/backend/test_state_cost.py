"""Sizes of checkpoints, and the time to take and restore one, on models of every kind of state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from bench import synthetic
from llamaslot.backend.llama import LlamaBackend, LlamaSettings, costs
from llamaslot.backend.llama.costs import Quiet
from llamaslot.backend.llama.saved_states import PartialStates
from llamaslot.base.backend import Run, Status
from llamaslot.base.kv_ops import Free, Remove, Restore, Take
from llamaslot.base.model import CheckpointSize, StateCost, StateKind

pytestmark = pytest.mark.gpu

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
        run = Run(seq, start, PROMPT[start : min(start + N_UBATCH, end)], n_outputs=0)
        assert backend.decode([run]).status is Status.OK


def taken(backend: LlamaBackend, seq: int) -> int:
    """The bytes of a checkpoint of a sequence."""
    backend.change(Take(0, seq, backend.seq_len(seq)))
    n_bytes = len(backend._kv.partial.states[0])
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


@pytest.mark.parametrize("n_computed", [64, 8, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_cost_is_the_time_to_take_and_to_restore_a_checkpoint_of_the_largest_size(
    shape: str, n_computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking needs 3 ms a kibibyte, restoring 2 ms."""
    now, sizes = 0.0, []
    take, restore = PartialStates.take, PartialStates.restore

    def timed_take(states: PartialStates, operation: Take) -> None:
        nonlocal now
        take(states, operation)
        sizes.append(len(states.states[operation.checkpoint]))
        now += 3e-3 * sizes[-1] / 1024

    def timed_restore(states: PartialStates, operation: Restore, end: int) -> None:
        nonlocal now
        restore(states, operation, end)
        assert states.n_bytes(operation.dst) == sizes[-1]
        now += 2e-3 * sizes[-1] / 1024

    monkeypatch.setattr(costs, "_SAVED_TOKENS", n_computed)
    monkeypatch.setattr(costs, "perf_counter", lambda: now)
    monkeypatch.setattr(PartialStates, "take", timed_take)
    monkeypatch.setattr(PartialStates, "restore", timed_restore)
    with loaded(shape) as backend:
        # The self-test took some.
        sizes.clear()
        cost, size = measured(backend), backend.info.checkpoint_size
        assert cost is not None
        assert size is not None
        # A window is filled by whole sequences.
        largest = size.fixed + size.per_cell * -(-size.n_swa // n_computed) * min(n_computed, size.n_swa)
        assert set(sizes) == {largest}
        assert largest - size.of(N_CTX) < n_computed * max(size.per_cell, 1)
        assert (cost.take_ms, cost.restore_ms) == pytest.approx((3 * largest / 1024, 2 * largest / 1024))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_pool_is_empty_afterwards_and_answers_as_before(shape: str) -> None:
    with loaded(shape, n_slots=1) as backend:
        feed(backend, 0, 150)
        before = logits(backend)
        backend.change(Remove(0, 0))
        assert measured(backend) is not None
        assert [backend.seq_range(seq) for seq in range(backend.n_seqs)] == [range(0)] * backend.n_seqs
        assert not backend._kv.partial.states
        feed(backend, 0, 150)
        assert np.abs(logits(backend) - before).max() < 0.1 * before.std()
        # Only an empty pool has room for all of these.
        for start in range(151, N_CTX, N_UBATCH):
            run = Run(0, start, np.full(min(N_UBATCH, N_CTX - start), 301, dtype=np.int32), n_outputs=0)
            assert backend.decode([run]).status is Status.OK


@pytest.mark.parametrize(("shape", "fields"), [("tiny", {}), ("tiny-swa", {"checkpoints": False})])
def test_without_checkpoints_they_have_no_cost(shape: str, fields: dict[str, object]) -> None:
    with loaded(shape, **fields) as backend:
        assert measured(backend) is None


@pytest.mark.parametrize("call", ["llama_state_seq_get_data_ext", "llama_state_seq_set_data_ext"])
def test_without_memory_for_a_checkpoint_its_cost_is_unknown(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded("tiny-swa") as backend:
        monkeypatch.setattr(llama_cpp, call, lambda *_: 0)
        assert measured(backend) is None
        monkeypatch.undo()
        assert not backend._kv.partial.states
        assert [backend.seq_range(seq) for seq in range(backend.n_seqs)] == [range(0)] * backend.n_seqs
        feed(backend, 0, 100)


def measured(backend: LlamaBackend) -> StateCost | None:
    return costs.measure_state_cost(backend, backend._context, backend._kv.partial, Quiet(on_cpu=True))


def logits(backend: LlamaBackend) -> npt.NDArray[np.float32]:
    """The logits after one more token of sequence 0."""
    start = backend.seq_len(0)
    assert backend.decode([Run(0, start, PROMPT[start : start + 1], n_outputs=1)]).status is Status.OK
    row = llama_cpp.llama_get_logits_ith(backend._context, 0)
    return np.ctypeslib.as_array(row, (backend.info.n_vocab,)).copy()
