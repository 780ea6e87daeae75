"""Partial states in a real backend: what sequences keep of them, and where one was lost, nothing is computed.

Weights and KV are float32, so logits after a point of reuse are those of a cold run but for little rounding.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from bench import synthetic
from llamaslot.backend.llama import LlamaBackend, saved_states
from llamaslot.base.backend import Decoded, Draws, Run, Status
from llamaslot.base.kv_ops import (
    Copy,
    Free,
    IllegalCallError,
    Load,
    NotLoadedError,
    NotSavedError,
    Remove,
    Restore,
    Save,
    Take,
)
from llamaslot.base.model import StateKind
from tests.backend.test_models import cold as cold_answer
from tests.backend.test_models import failing, load, loaded, logits
from tests.engine.harness import running

pytestmark = pytest.mark.gpu

SHAPES = ("tiny-lfm2", "tiny-mamba", "tiny-swa")
N_SWA = 32
N_CTX = 256
N_HELD = 50
"""Tokens of a sequence whose window has moved."""
SCRATCH = 4
IDS = np.random.default_rng(3).integers(300, 512, 200).astype(np.int32)
HELD, TAIL, OTHER = IDS[:N_HELD], IDS[100:103], IDS[103:163]
EXACT = {
    **{"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32", "n_ctx": N_CTX},
    **{"checkpoints": True, "n_cache_seqs": 2},
}

Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=SHAPES)
def backend(folder: Path, request: pytest.FixtureRequest) -> Iterator[LlamaBackend]:
    backend = load(synthetic.ensure(request.param, folder=folder, is_exact=True), **EXACT)
    assert backend.n_seqs == SCRATCH + 1
    yield backend
    backend.close()


def feed(backend: LlamaBackend, seq: int, tokens: npt.NDArray[np.int32]) -> Logits:
    """Compute tokens after what the sequence holds; returns the logits after the last."""
    assert backend.decode([Run(seq, backend.seq_len(seq), tokens, 1)]).status is Status.OK
    return logits(backend, len(tokens) - 1)


def cold(backend: LlamaBackend, *parts: npt.NDArray[np.int32]) -> Logits:
    """The logits after all parts, computed in an empty sequence."""
    backend.change(Remove(3, 0))
    for part in parts[:-1]:
        feed(backend, 3, part)
    last = feed(backend, 3, parts[-1])
    backend.change(Remove(3, 0))
    return last


def is_same(warm: Logits, cold: Logits) -> bool:
    return float(np.sqrt(np.square(warm - cold).mean())) < 0.001 * float(cold.std())


def is_refused(backend: LlamaBackend, seq: int) -> bool:
    """True if nothing can be computed after what a sequence holds."""
    try:
        feed(backend, seq, TAIL)
    except IllegalCallError as error:
        return f"sequence {seq} has lost its state" in str(error)
    return False


def test_a_checkpoint_serves_its_own_sequence_and_others(backend: LlamaBackend) -> None:
    expected = cold(backend, HELD, TAIL)
    feed(backend, 0, IDS[60:90])
    feed(backend, 1, HELD)
    backend.change(Take(7, 1, N_HELD))
    feed(backend, 1, OTHER)
    backend.change(Copy(1, 2, 0, N_HELD))
    assert is_refused(backend, 2)
    with pytest.raises(IllegalCallError, match="the target is shorter"):
        backend.change(Restore(7, 0))
    backend.change(Restore(7, 2))
    assert is_same(feed(backend, 2, TAIL), expected)
    backend.change(Restore(7, 1))
    assert backend.seq_len(1) == N_HELD
    assert is_same(feed(backend, 1, TAIL), expected)
    backend.change(Remove(1, N_HELD))
    assert is_refused(backend, 1)
    backend.change(Free(7))
    for operation in (Free(7), Restore(7, 1)):
        with pytest.raises(IllegalCallError):
            backend.change(operation)


def test_a_copy_at_the_tip_forks_recurrent_states_alone(backend: LlamaBackend) -> None:
    expected = cold(backend, HELD, TAIL)
    feed(backend, 0, HELD)
    backend.change(Copy(0, 1, 0, N_HELD))
    if backend.info.state.kind is StateKind.WINDOW:
        assert is_refused(backend, 1)
    else:
        feed(backend, 0, OTHER)
        assert is_same(feed(backend, 1, TAIL), expected)
        # What has no state itself gives none away.
        backend.change(Remove(0, N_HELD))
    backend.change(Remove(2, 0))
    backend.change(Copy(1, 2, 0, 20))
    backend.change(Remove(1, 0))
    backend.change(Copy(2, 1, 0, 20))
    assert is_refused(backend, 2)
    assert is_refused(backend, 1)


def test_segments_are_saved_without_a_state(backend: LlamaBackend) -> None:
    """Of the same size whatever the sequence holds; with a checkpoint they make up the sequence again."""
    expected = cold(backend, HELD, TAIL)
    feed(backend, 0, HELD)
    backend.change(Take(1, 0, N_HELD))
    feed(backend, 0, OTHER)
    backend.change(Copy(0, 1, 0, 30))
    for number, (seq, start, end) in enumerate([(0, 0, 30), (0, 30, N_HELD), (1, 0, 30)], 10):
        backend.change(Save(number, seq, start, end))
    assert len(backend.kv_of(10)) == len(backend.kv_of(12))
    assert is_refused(backend, 1)
    backend.change(Remove(0, 0))
    backend.change(Load(0, 0, ((10, 30),)))
    assert is_refused(backend, 0)
    backend.change(Load(0, 30, ((11, N_HELD),)))
    backend.change(Restore(1, 0))
    assert is_same(feed(backend, 0, TAIL), expected)


def test_a_failed_step_costs_states_and_no_cells(backend: LlamaBackend) -> None:
    """On recurrent memory those of all sequences, as llama.cpp moves them in the graph that failed."""
    expected, started = cold(backend, HELD, TAIL), cold(backend, TAIL)
    for seq in (0, 1):
        feed(backend, seq, HELD)
    backend.change(Take(1, 0, N_HELD))
    with failing(backend):
        runs = [Run(0, N_HELD, OTHER[:50], 1), Run(2, 0, OTHER[:10], 1)]
        assert backend.decode(runs).status is Status.ABORTED
    assert [backend.seq_len(seq) for seq in range(3)] == [N_HELD, N_HELD, 0]
    assert is_refused(backend, 0)
    if backend.info.state.kind is StateKind.WINDOW:
        assert is_same(feed(backend, 1, TAIL), expected)
        backend.change(Remove(1, 0))
        feed(backend, 1, HELD)
    else:
        assert is_refused(backend, 1)
    assert is_same(feed(backend, 2, TAIL), started)
    backend.change(Restore(1, 0))
    backend.change(Remove(2, 0))
    n_left = N_CTX - 2 * N_HELD
    for n in (60, 60, n_left - 120):
        feed(backend, 2, IDS[:n])
    backend.change(Remove(2, 0))
    assert is_same(feed(backend, 0, TAIL), expected)


def fail_beside_a_free_state(backend: LlamaBackend) -> None:
    """Fail in a step that moves the state of 2 next to that of 0; where it was is one that counts as clear."""
    for seq in range(3):
        feed(backend, seq, HELD)
    backend.change(Remove(1, 0))
    with failing(backend):
        runs = [Run(seq, N_HELD, OTHER[:2], 1) for seq in (0, 2)]
        assert backend.decode(runs).status is Status.ABORTED


def test_a_new_sequence_begins_with_a_clear_state_after_a_failed_step(backend: LlamaBackend) -> None:
    expected = cold(backend, TAIL)
    fail_beside_a_free_state(backend)
    for seq in range(SCRATCH):
        backend.change(Remove(seq, 0))
    for seq in range(SCRATCH):
        assert is_same(feed(backend, seq, TAIL), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_without_checkpoints_a_new_sequence_begins_with_a_clear_state_too(folder: Path, shape: str) -> None:
    model = synthetic.ensure(shape, folder=folder, is_exact=True)
    backend = load(model, **EXACT | {"checkpoints": False, "n_slots": 3})
    expected = feed(backend, 0, TAIL)
    backend.change(Remove(0, 0))
    fail_beside_a_free_state(backend)
    for seq in range(3):
        backend.change(Remove(seq, 0))
    for seq in range(3):
        assert is_same(feed(backend, seq, TAIL), expected)
    backend.close()


def test_cells_of_a_failed_step_are_free_before_anything_is_restored(backend: LlamaBackend) -> None:
    feed(backend, 0, HELD)
    with failing(backend):
        assert backend.decode([Run(0, N_HELD, OTHER, 1)]).status is Status.ABORTED
    n_left = N_CTX - N_HELD
    for n in (60, 60, 60, n_left - 180):
        feed(backend, 1, IDS[:n])


@pytest.mark.cpu_only
def test_a_failed_step_of_which_a_part_was_applied_leaves_nothing(backend: LlamaBackend) -> None:
    """Beside recurrent states, llama.cpp first computes as many tokens of each sequence as the shortest run has."""
    expected = cold(backend, OTHER)
    with failing(backend, n_nodes=10**9) as counted:
        assert backend.decode([Run(0, 0, HELD[:1], 1)]).status is Status.OK
    with failing(backend, counted[0] + 5):
        runs = [Run(0, 1, HELD[1:2], 1), Run(1, 0, HELD, 1)]
        status = backend.decode(runs).status
    if status is Status.ABORTED:
        assert (backend.seq_len(0), backend.seq_len(1)) == (1, 0)
        assert is_refused(backend, 0)
    assert (status is Status.ABORTED) is (backend.info.state.kind is not StateKind.WINDOW)
    backend.change(Remove(1, 0))
    assert is_same(feed(backend, 1, OTHER), expected)


def test_a_checkpoint_that_cannot_be_loaded_leaves_an_empty_sequence(backend: LlamaBackend) -> None:
    expected = cold(backend, HELD, TAIL)
    for seq in (0, 1):
        feed(backend, seq, HELD)
    backend.change(Take(1, 0, N_HELD))
    states = backend._kv.partial.states
    states[1] = states[1][:-1]
    with pytest.raises(NotLoadedError):
        backend.change(Restore(1, 0))
    assert backend.seq_len(0) == 0
    assert is_same(feed(backend, 1, TAIL), expected)
    feed(backend, 0, HELD)
    assert is_same(feed(backend, 0, TAIL), expected)


def test_a_checkpoint_without_memory_leaves_its_number_unused(
    backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(_: int) -> None:
        raise MemoryError

    feed(backend, 0, HELD)
    with monkeypatch.context() as patched:
        patched.setattr(saved_states, "new_kv", no_memory)
        with pytest.raises(NotSavedError):
            backend.change(Take(1, 0, N_HELD))
    with pytest.raises(IllegalCallError):
        backend.change(Restore(1, 0))
    backend.change(Take(1, 0, N_HELD))
    assert not is_refused(backend, 0)


@pytest.mark.cpu_only
@pytest.mark.parametrize(("n_held", "is_whole"), [(N_SWA - 1, True), (N_SWA, False)])
def test_a_window_that_is_full_cannot_be_cut(folder: Path, n_held: int, is_whole: bool) -> None:
    """No next token sees the oldest cell of a full window, so llama.cpp gives it to another sequence."""
    with loaded(synthetic.ensure("tiny-swa", folder=folder, is_exact=True), **{**EXACT, "n_ctx": 512}) as backend:
        assert backend.info.state.n_swa == N_SWA
        feed(backend, 0, IDS[:n_held])
        for at in range(0, 360, 60):
            feed(backend, 1, IDS[at % 120 :][:60])
        backend.change(Remove(0, 10))
        assert is_refused(backend, 0) is not is_whole
        backend.change(Remove(1, 0))
        if is_whole:
            backend.change(Remove(0, 10))
            assert is_same(feed(backend, 0, TAIL), cold(backend, IDS[:10], TAIL))


@pytest.mark.cpu_only
@pytest.mark.parametrize("shape", SHAPES)
def test_a_failed_step_without_checkpoints_leaves_all_sequences_empty(folder: Path, shape: str) -> None:
    """llama.cpp cannot trim recurrent states, so it claims that the tokens of the failed step were computed.

    Those of other sequences may be lost, too.
    """
    with loaded(synthetic.ensure(shape, folder=folder, is_exact=True)) as backend:
        expected = feed(backend, 0, IDS[:40])
        backend.change(Remove(0, 0))
        for seq in (0, 1):
            feed(backend, seq, IDS[seq:30])
        with failing(backend):
            assert backend.decode([Run(0, 30, IDS[30:40], 1)]).status is Status.ABORTED
        assert (backend.seq_len(0), backend.seq_len(1)) == (0, 0)
        assert np.array_equal(feed(backend, 0, IDS[:40]), expected)
        assert np.array_equal(feed(backend, 1, IDS[:40]), expected)


async def test_requests_of_a_failed_step_give_the_answers_of_cold_runs(folder: Path) -> None:
    """The step fails in the middle of a prompt, which could go on after tokens that were not computed."""
    path = synthetic.ensure("tiny-lfm2", folder=folder, is_exact=True)
    settings = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"}
    backend = load(path, **settings)
    decode, n_failed = backend.decode, 0

    def fail_once(runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        nonlocal n_failed
        if n_failed or len(runs) < 2 or not all(run.start for run in runs):
            return decode(runs, draws)
        n_failed += 1
        with failing(backend):
            return decode(runs, draws)

    backend.decode = fail_once
    words = ["".join(pair) for pair in itertools.product("abcdefghijklmnop", repeat=2)]
    prompts = {name: " " + " ".join(words[i::2]) for i, name in enumerate(("even", "odd"))}
    async with running(backend) as harness:
        await asyncio.gather(*(harness.submit(*each) for each in prompts.items()))
        texts = {name: harness.text(name) for name in prompts}
    assert n_failed == 1
    assert texts == {name: await cold_answer(path, prompt, **settings) for name, prompt in prompts.items()}


def test_a_full_window_cache_fails_an_operation_and_nothing_else(folder: Path) -> None:
    """Sequences share cells of other layers, but each has a window of its own, or one cell of it."""
    settings = {**EXACT, "n_slots": 8, "n_cache_seqs": 9}
    with loaded(synthetic.ensure("tiny-swa", folder=folder, is_exact=True), **settings) as backend:
        expected = cold(backend, HELD[:N_SWA], TAIL)
        feed(backend, 0, HELD[:N_SWA])
        backend.change(Take(1, 0, N_SWA))
        for seq in range(1, 8):
            backend.change(Copy(0, seq, 0, N_SWA))
            backend.change(Restore(1, seq))
        n_left = backend.info.state.n_window_cells - 8 * (N_SWA - 1)
        assert n_left == 8
        for seq in range(8, 8 + n_left):
            backend.change(Copy(0, seq, 0, N_SWA))
        with pytest.raises(MemoryError):
            backend.change(Copy(0, 16, 0, N_SWA))
        assert backend.seq_len(16) == 0
        with pytest.raises(NotSavedError):
            backend.change(Save(2, 0, 0, N_SWA))
        for seq in range(1, 4):
            backend.change(Remove(seq, 0))
        assert is_same(feed(backend, 0, TAIL), expected)
        assert is_same(feed(backend, 16, HELD[:N_SWA]), cold(backend, HELD[:N_SWA]))
