"""The self-test of reuse: models as they are pass, each planted bug fails, and what failed is not reused."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import llama_cpp
import numpy as np
import pytest

from bench import synthetic
from llamaslot.backend.llama import LlamaBackend, LlamaSettings, operations, self_test
from llamaslot.backend.state_format import HEADER_BYTES, LAYOUTS, SavedCells, digests, read_cells
from llamaslot.base.backend import Decoded, Draws, Run, Status
from llamaslot.base.kv_ops import (
    Copy,
    Free,
    IllegalCallError,
    Kv,
    Load,
    NotSavedError,
    Operation,
    Remove,
    Restore,
    Save,
    Take,
)
from llamaslot.base.model import StateKind
from tests.backend.test_models import failing
from tests.conftest import LONG
from tests.gguf_copies import rewritten
from tests.noisy_backend import NoisyBackend

pytestmark = pytest.mark.gpu

WINDOWS = ("tiny-swa", "tiny-oss")
RECURRENT = ("tiny-mamba", "tiny-mamba2", "tiny-rwkv7")
HYBRIDS = ("tiny-lfm2", "tiny-next", "tiny-qwen35", "tiny-granite")
STATES = (*WINDOWS, *HYBRIDS, *RECURRENT)
KINDS = (*STATES, "oss-128", "hybrid window") if LONG else ("oss-128", "tiny-lfm2", "tiny-rwkv7", "hybrid window")
"""Models on which bugs are planted that every kind can have."""
EXACT = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"}
LONG_WINDOWS = {
    "swa-200": replace(synthetic.SHAPES["tiny-swa"], window=200),
    "oss-128": replace(synthetic.SHAPES["tiny-oss"], window=128),
}
"""Shapes in which one token of a window hardly matters, and rounding moves logits as much."""
Q8 = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
TRIMMED = ("tiny-mla", "M-RoPE")
NOISES = (0.0, 0.2, 0.8, 1.6) if LONG else (0.0, 0.8)
"""Rms distance between logits of equal tokens; random weights give logits with a deviation of 2."""
FIELDS = (EXACT, {}, {"n_ubatch": 64}, {"n_slots": 1}, Q8)
RIGHT = [
    *((fields, 0.0) for fields in FIELDS),
    *((each, noise) for noise in NOISES[1:] for each in FIELDS[: 1 + 4 * LONG]),
]
ALL_V = "no V"
N_COLD = 3
"""Cold runs of which the test compares logits."""
PLACES = {
    "a checkpoint after another token": "after a checkpoint in its own sequence",
    "a checkpoint one token late": "after a checkpoint in its own sequence",
    "a checkpoint of another branch": "after a checkpoint in its own sequence",
    "another checkpoint in place": "after a checkpoint in its own sequence",
    "no restore": "after a checkpoint in another sequence",
    "a state that is not used": "after a checkpoint in its own sequence, logits",
}
"""Bugs of all models with checkpoints, and the step of the test that notices each."""
PLANTED = [
    *((bug, shape, where) for bug, where in PLACES.items() for shape in KINDS),
    *(
        (bug, shape, "after segments")
        for bug in ("no load", "a segment twice")
        for shape in ("tiny-swa", "tiny-next")
    ),
    *(("a load into another sequence", shape, "after segments") for shape in ("tiny-swa", "hybrid window")),
    # A window may keep the cells of the prefix, so that nothing needs to be restored.
    *(("no restore in place", shape, "after a checkpoint in its own") for shape in ("tiny-lfm2", "tiny-rwkv7")),
    *(("no copy", shape, "after a checkpoint in another") for shape in (*WINDOWS, "hybrid window", "tiny-lfm2")),
    *(("a fork of another branch", shape, "in a copy of a whole") for shape in ("tiny-lfm2", "tiny-mamba")),
    ("no trim", "tiny-mla", "in a sequence that was cut"),
    ("cells of another branch", "tiny-mla", "in a copy of a sequence"),
    ("no copy", "M-RoPE", "in a copy of a sequence"),
    ("no copy between partitions", "tiny-mla", "in a copy of a sequence"),
    ("a state that is not used", "tiny-mla", "in a sequence that was cut, logits"),
]
OTHER = 9
"""Number of a checkpoint that only the bug takes."""
TOKEN = np.array([301], dtype=np.int32)


class WrongBackend(NoisyBackend):
    """A backend with a bug, and with noise in its logits."""

    def __init__(self, settings: LlamaSettings, bug: str = "", noise: float = 0.0) -> None:
        self._bug = bug
        self._held: dict[int, list[int]] = defaultdict(list)
        self._unused: list[np.ndarray] = []
        self.n_decoded = 0
        super().__init__(settings, noise)

    def decode(self, runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        self.n_decoded += sum(len(run.tokens) for run in runs)
        for run in runs:
            self._held[run.seq][run.start :] = run.tokens.tolist()
        decoded = super().decode(runs, draws)
        if self._bug == "a state that is not used" and runs[0].targets is not None:
            self._compute_without_state(len(runs[0].tokens))
        return decoded

    def change(self, operation: Operation) -> None:  # noqa: PLR0912
        kv = self._kv
        match self._bug, operation:
            case "a checkpoint after another token", Take(number, src, end):
                ids = self._held[src][:end]
                self._of_other(1, [*ids[:-1], ids[0]], Take(number, 1, end))
            case "a checkpoint one token late", Take(number, src, end):
                ids = self._held[src][:end]
                self._of_other(1, [*ids, ids[0]], Take(number, 1, end + 1))
                kv.partial.states[number] = moved(kv.partial.states[number], self.info.state.kind)
                kv.states.checkpoints[number] = end
            case "a checkpoint of another branch", Take(number, src, end):
                self._of_other(1, self._held[src][:end][::-1], Take(number, 1, end))
            case "cells of another segment", Save(number, src, start, end):
                self._of_other(1, self._held[src][:end][::-1], Save(number, 1, start, end))
            case "another checkpoint in place", Take(_, src, end):
                super().change(operation)
                self._of_other(1, self._held[src][:end][::-1], Take(OTHER, 1, end))
            case "another checkpoint in place", Restore(_, 0):
                super().change(Restore(OTHER, 0))
            case ("no restore", Restore(number, 1 as dst)) | ("no restore in place", Restore(number, 0 as dst)):
                end = kv.states.checkpoints[number]
                llama_cpp.llama_memory_seq_rm(self._memory, dst, end, -1)
                kv.states.restore(dst)
                kv.lengths[dst] = end
            case "no copy", Copy(_, dst, 0, end):
                kv.lengths[dst] = end
            case "no load", Load(dst):
                kv.lengths[dst] = operation.end
            case "no copy between partitions", Copy(_, dst, 0, end):
                self._run(dst, self._held[dst][:1] * end)
            case "a load into another sequence", Load(0, start, parts):
                super().change(Load(1, start, parts))
                kv.lengths[0] = operation.end
            case "a segment twice", Load(_, _, ((first, half), (second, _))):
                kv.segments[second] = shifted(kv.segments[first], half)
                super().change(operation)
            case "cells of another branch", Copy(src, dst, 0, end):
                self._run(dst, self._held[src][:end][::-1])
            case "a fork of another branch", Copy(src, dst, 0, end) if end == self.seq_len(src):
                self._run(dst, self._held[src][:end][::-1])
            case (
                ("a state one token late" | "a state one token late after a long draft"),
                Remove(seq, keep, is_rejected=True),
            ) if "long" not in self._bug or self.seq_len(seq) > keep + 1:
                super().change(operation)
                self._of_other(1, self._held[seq][: keep + 1], Take(OTHER, 1, keep + 1))
                assert kv.partial._load(seq, moved(kv.partial.states[OTHER], self.info.state.kind))
                super().change(Free(OTHER))
            case "no trim", Remove(seq, keep) if keep:
                kv.lengths[seq] = keep
            case _:
                super().change(operation)

    def _compute_without_state(self, n_tokens: int) -> None:
        """Give later runs the logits of the first cold one, which follows another prefix, with new noise."""
        address = llama_cpp.llama_get_logits(self._context)
        rows = np.ctypeslib.as_array(address, (n_tokens, self.vocab.n_tokens))
        self._unused.append(rows.copy())
        if len(self._unused) > N_COLD:
            rows[:] = self._unused[0] + self._drawn(n_tokens)

    def _of_other(self, seq: int, ids: list[int], operation: Operation) -> None:
        """Carry out an operation on an empty sequence while it holds other tokens."""
        self._run(seq, ids)
        super().change(operation)
        super().change(Remove(seq, 0))

    def _run(self, seq: int, ids: list[int]) -> None:
        n = self.info.n_ubatch
        for at in range(0, len(ids), n):
            run = Run(seq, at, np.array(ids[at : at + n], np.int32), n_outputs=0)
            assert super().decode([run]).status is Status.OK


def saved_cells(state: Kv, n_caches: int) -> tuple[list[SavedCells], int]:
    """The cells of each cache of a saved sequence, and the place of what follows them."""
    for cell_bytes, has_v in LAYOUTS:
        try:
            caches, at = [], HEADER_BYTES
            for _ in range(n_caches):
                caches.append(read_cells(state, at + 4, cell_bytes=cell_bytes, has_v=has_v))
                at = caches[-1].end
            return caches, at
        except ValueError:
            continue
    raise AssertionError("another format")


def shifted(state: Kv, by: int) -> Kv:
    """A segment at later positions."""
    state = state.copy()
    [cells], _ = saved_cells(state, 1)
    cells.cells[:, :4] = (cells.positions + by).view(np.uint8).reshape(-1, 4)
    return state


def moved(state: Kv, kind: StateKind) -> Kv:
    """A checkpoint with all positions one earlier."""
    state = state.copy()
    caches, at = saved_cells(state, int(kind.has_window))
    for each in caches:
        each.cells[:, :4] = (each.positions - 1).view(np.uint8).reshape(-1, 4)
    if kind.has_recurrent_state:
        state[at + 4 : at + 8] = (state[at + 4 : at + 8].copy().view(np.int32) - 1).view(np.uint8)
    return state


def damaged(state: Kv, kind: StateKind, damage: str, *, is_partial: bool) -> Kv:
    """A saved sequence in which something is missing, or not where it belongs."""
    state = state.copy()
    n_caches = int(kind.has_window) + int(not is_partial and kind is not StateKind.RECURRENT)
    caches, at = saved_cells(state, n_caches)
    for each in caches:
        if len(each.cells) < 2:
            continue
        match damage:
            case "a missing layer":
                each.tensors[0].rows[:] = 0
            case "no V":
                for tensor in each.tensors[len(each.tensors) // 2 :]:
                    tensor.rows[:] = 0
            case "rows in each other's place":
                for tensor in each.tensors:
                    tensor.rows[[0, 1]] = tensor.rows[[1, 0]]
            case "one cell short":
                keep = each.positions > each.positions.min()
                start = each.end - len(each.cells) * each.bytes_per_token - 12 - 12 * len(each.tensors)
                parts = [np.array([keep.sum()], np.uint32).view(np.uint8), each.cells[keep], each.layers]
                parts += [part for tensor in each.tensors for part in (tensor.header, tensor.rows[keep])]
                flat = [state[:start], *(part.reshape(-1) for part in parts), state[each.end :]]
                return np.concatenate(flat)
    if kind.has_recurrent_state and damage != "one cell short" and state[at]:
        # After its position and the headers of layers and the first row.
        state[at + 32 : at + 48] ^= 1
    return state


@contextmanager
def loaded(
    shape: str | Path, bug: str = "", noise: float = 0.0, is_exact: bool = False, **fields: Any
) -> Iterator[WrongBackend]:
    chosen: dict[str, Any] = {"n_ctx": 1024, "n_slots": 2, "n_ubatch": 512, "n_threads": 1, "checkpoints": True}
    chosen["max_draft"] = 7
    # A busy machine, or the first steps on a GPU, may take longer than a start should.
    limit_s = fields.pop("self_test_limit_s", 60.0)
    is_exact |= fields.get("flash_attn") == "off"
    model = shape if isinstance(shape, Path) else synthetic.ensure(shape, is_exact=is_exact)
    with patch.object(self_test, "START_LIMIT_S", limit_s):
        backend = WrongBackend(LlamaSettings(model, **chosen | fields), bug, noise)
    try:
        yield backend
    finally:
        backend.close()


def skip_without_segments(backend: LlamaBackend, where: str) -> None:
    """Skip where a device has no flash attention for this head size, so that there are no segments."""
    if where.startswith("after segments") and not backend.info.flash_attn:
        pytest.skip("nothing is saved without flash attention")


def held(backend: LlamaBackend, seq: int) -> dict[str, bytes]:
    """Digests of what a sequence holds."""
    data = np.zeros(llama_cpp.llama_state_seq_get_size(backend._context, seq), np.uint8)
    pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    assert llama_cpp.llama_state_seq_get_data(backend._context, pointer, len(data), seq) == len(data)
    return digests(data, backend.info.state.kind)


def is_empty(backend: LlamaBackend) -> bool:
    kv = backend._kv
    holds = any(backend.seq_range(seq) for seq in range(backend.n_seqs))
    return not (holds or kv.segment_tokens or kv.states.checkpoints or kv.partial.states)


@pytest.fixture(autouse=True)
def _long_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in LONG_WINDOWS.items():
        monkeypatch.setitem(synthetic.SHAPES, name, shape)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that are rewritten from others, by name; each bug is tried on a smaller choice of kinds."""
    folder = tmp_path_factory.mktemp("models")
    window: dict[str, Any] = {"attention.sliding_window": 16}
    dimensions: dict[str, Any] = {"rope.dimension_sections": [8, 12, 12, 0]}
    lfm2, tiny = synthetic.ensure("tiny-lfm2"), synthetic.ensure("tiny")
    return {
        "hybrid window": rewritten(lfm2, folder / "lfm2-swa.gguf", "lfm2", values=window),
        "M-RoPE": rewritten(tiny, folder / "mrope.gguf", "qwen2vl", values=dimensions),
    }


@pytest.mark.slow
@pytest.mark.parametrize("shape", [*STATES, *LONG_WINDOWS, "hybrid window", "M-RoPE", "tiny-mla"])
@pytest.mark.parametrize(("fields", "noise"), RIGHT, ids=str)
def test_a_right_model_passes_and_leaves_nothing(
    shape: str, fields: dict[str, Any], noise: float, models: dict[str, Path]
) -> None:
    with loaded(models.get(shape, shape), noise=noise, **fields) as backend:
        info = backend.info
        assert (info.self_test, info.self_test_reason) == ("passed", "")
        assert info.keeps_checkpoints is (shape not in TRIMMED)
        assert info.can_trim is (shape in TRIMMED)
        assert is_empty(backend)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(
    "fields", [EXACT, {}, Q8, {"unified": False, "n_cache_seqs": 1}, {"unified": False} | EXACT], ids=str
)
@pytest.mark.parametrize("shape", ["tiny", "tiny-mla", "M-RoPE"])
def test_a_right_dense_model_passes(
    shape: str, fields: dict[str, Any], noise: float, models: dict[str, Path]
) -> None:
    """Also one that needs no test."""
    with loaded(models.get(shape, shape), noise=noise, **fields) as backend:
        assert self_test.run(backend, backend._context, limit_s=None) == self_test.SelfTestResult("passed")
        assert is_empty(backend)


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("bug", "shape", "where"), PLANTED)
def test_a_planted_bug_fails_in_any_noise(
    bug: str, shape: str, where: str, noise: float, models: dict[str, Path]
) -> None:
    fields = {"unified": False, "n_cache_seqs": 1} if "partitions" in bug else {}
    with loaded(models.get(shape, shape), bug, noise, **fields) as backend:
        skip_without_segments(backend, where)
        assert backend.info.self_test == "failed"
        assert backend.info.reuse_reason.startswith(f"self-test failed: {where}")
        assert is_empty(backend)


@pytest.mark.parametrize("shape", ["tiny-lfm2", "tiny-qwen35"])
@pytest.mark.parametrize("is_later", [False, True])
def test_a_state_that_goes_back_to_a_wrong_token_ends_drafts_alone(shape: str, is_later: bool) -> None:
    for bug in ("", "a state one token late", "a state one token late after a long draft"):
        with loaded(shape, bug, self_test_limit_s=0.0 if is_later else 60.0) as backend:
            assert backend.run_self_test()
            info = backend.info
            assert (info.self_test, info.can_reuse, info.max_draft) == ("passed", True, 0 if bug else 7)
            assert is_empty(backend)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("damage", ["a missing layer", "rows in each other's place", "one cell short"])
@pytest.mark.parametrize(
    ("shape", "call"),
    [
        *((shape, "_ext") for shape in (*WINDOWS, *LONG_WINDOWS, "hybrid window")),
        *((shape, "") for shape in ("tiny-swa", "oss-128", "tiny-lfm2", "tiny-mla")),
    ],
)
def test_a_damaged_state_fails_in_any_noise(
    request: pytest.FixtureRequest, shape: str, call: str, damage: str, noise: float
) -> None:
    """The bytes that llama.cpp is given to load are not those that it has saved."""
    models, monkeypatch = request.getfixturevalue("models"), request.getfixturevalue("monkeypatch")
    name = f"llama_state_seq_set_data{call}"
    load = getattr(llama_cpp, name)

    def load_damaged(context: Any, pointer: Any, n_bytes: int, *args: Any) -> int:
        state = np.ctypeslib.as_array(pointer, (n_bytes,))
        wrong = damaged(state, backend.info.state.kind, damage, is_partial=bool(call))
        loaded: int = load(context, wrong.ctypes.data_as(type(pointer)), len(wrong), *args)
        return n_bytes if loaded == len(wrong) else loaded

    with loaded(models.get(shape, shape), noise=noise, self_test_limit_s=0.0) as backend:
        skip_without_segments(backend, "" if call else "after segments")
        monkeypatch.setattr(llama_cpp, name, load_damaged)
        assert backend.run_self_test()
        assert backend.info.self_test == "failed"
        where = "after a checkpoint in its own sequence, " if call else "after segments that were loaded, "
        assert where in backend.info.reuse_reason
        assert "are not what was computed" in backend.info.reuse_reason
        assert is_empty(backend)


@pytest.mark.parametrize("shape", RECURRENT)
def test_a_damaged_recurrent_state_fails(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = llama_cpp.llama_state_seq_set_data_ext

    def load_damaged(context: Any, pointer: Any, n_bytes: int, *args: Any) -> int:
        state = np.ctypeslib.as_array(pointer, (n_bytes,))
        wrong = damaged(state, StateKind.RECURRENT, "a missing layer", is_partial=True)
        return int(load(context, wrong.ctypes.data_as(type(pointer)), n_bytes, *args))

    with loaded(shape, self_test_limit_s=0.0) as backend:
        monkeypatch.setattr(llama_cpp, "llama_state_seq_set_data_ext", load_damaged)
        assert backend.run_self_test()
        assert "the recurrent state" in backend.info.reuse_reason


@pytest.mark.parametrize("shape", ["tiny", "tiny-swa", "tiny-lfm2", "tiny-mla"])
def test_a_layer_that_llama_cpp_never_saves_shows_in_the_logits(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two saved sequences then are equal, whatever the cells hold."""
    save = llama_cpp.llama_state_seq_get_data

    def save_in_part(context: Any, pointer: Any, n_bytes: int, seq: int) -> int:
        n_saved = int(save(context, pointer, n_bytes, seq))
        state = np.ctypeslib.as_array(pointer, (n_bytes,))
        kind = backend.info.state.kind
        state[:] = damaged(state, StateKind.WINDOW if kind.has_window else StateKind.NONE, ALL_V, is_partial=False)
        return n_saved

    with loaded(shape) as backend:
        monkeypatch.setattr(llama_cpp, "llama_state_seq_get_data", save_in_part)
        result = self_test.run(backend, backend._context, limit_s=None)
        assert result.outcome == "failed"
        assert "logits" in result.reason


@pytest.mark.parametrize("shape", [*WINDOWS, *HYBRIDS, "tiny-mla"])
def test_wrong_cells_of_a_segment_fail(shape: str) -> None:
    with loaded(shape, "cells of another segment") as backend:
        skip_without_segments(backend, "after segments")
        assert backend.info.self_test == "failed"
        assert "after segments that were loaded" in backend.info.reuse_reason


@pytest.mark.parametrize(
    ("shape", "bug"),
    [
        *((shape, "another checkpoint in place") for shape in STATES),
        *((shape, "a fork of another branch") for shape in (*HYBRIDS, *RECURRENT)),
    ],
)
def test_a_sequence_and_its_forks_are_tested_apart_from_copies_of_its_cells(shape: str, bug: str) -> None:
    with loaded(shape, bug) as backend:
        assert backend.info.self_test == "failed"
        where = "in its own sequence" if "place" in bug else "in a copy of a whole sequence"
        assert where in backend.info.reuse_reason


@pytest.mark.parametrize("bug", ["cells of another branch", "no trim"])
def test_wrong_cells_of_a_model_that_can_be_trimmed_fail(bug: str) -> None:
    with loaded("tiny-mla", bug) as backend:
        info = backend.info
        assert info.self_test == "failed"
        assert not info.can_trim
        assert not info.state.can_trim
        assert info.n_cache_seqs == 0


def test_a_model_that_failed_is_computed_whole() -> None:
    with loaded("tiny-lfm2", "no restore") as backend:
        info = backend.info
        assert not info.keeps_checkpoints
        assert (info.checkpoint_size, info.segment_size, info.state_cost) == (None, None, None)
        assert info.reuse_reason == info.self_test_reason
        assert backend.decode([Run(0, 0, TOKEN, 1)]).status is Status.OK
        for operation in (Take(1, 0, 1), Copy(0, 1, 0, 1), Save(1, 0, 0, 1)):
            with pytest.raises(IllegalCallError):
                backend.change(operation)
        backend.change(Remove(0, 0))


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        *(("tiny", {}), ("tiny-swa", {"checkpoints": False}), ("tiny-qwen35", {"checkpoints": False})),
        ("tiny-mamba", {"unified": False}),
    ],
)
def test_dense_models_and_those_that_reuse_nothing_need_none(shape: str, fields: dict[str, Any]) -> None:
    with loaded(shape, **fields) as backend:
        assert backend.info.self_test == ""
        assert backend.run_self_test()
        assert backend.info.self_test == ""


def test_a_partitioned_pool_is_tested_by_copies_and_segments() -> None:
    with loaded("tiny-mla", unified=False) as backend:
        assert backend.info.self_test == "passed"


def test_a_test_that_takes_too_long_is_run_later() -> None:
    with loaded("tiny-lfm2", self_test_limit_s=0.0) as backend:
        info = backend.info
        assert (info.self_test, info.keeps_checkpoints) == ("pending", True)
        assert info.self_test_reason.startswith("the self-test takes too long at start: about ")
        assert is_empty(backend)
        asked = iter([False, False, True])
        assert not backend.run_self_test(lambda: next(asked))
        assert next(asked, None) is None
        assert backend.info == info
        assert is_empty(backend)
        assert backend.run_self_test()
        assert (backend.info.self_test, backend.info.self_test_reason) == ("passed", "")
        n_decoded = backend.n_decoded
        assert backend.run_self_test()
        assert backend.n_decoded == n_decoded


def test_a_later_test_may_fail() -> None:
    with loaded("tiny-swa", "a checkpoint of another branch", self_test_limit_s=0.0) as backend:
        assert backend.run_self_test()
        assert (backend.info.self_test, backend.info.keeps_checkpoints) == ("failed", False)
        assert is_empty(backend)


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["", "a checkpoint of another branch"])
@pytest.mark.parametrize("stops_after", [0, 3, 1000])
@pytest.mark.parametrize("fields", [EXACT, Q8, {"n_slots": 1}], ids=str)
@pytest.mark.parametrize("shape", ["tiny-swa", "tiny-lfm2", "tiny-mamba", "hybrid window", "tiny-mla"])
def test_a_later_test_leaves_sequences_as_they_were(
    request: pytest.FixtureRequest, shape: str, fields: dict[str, Any], stops_after: int, bug: str
) -> None:
    models = request.getfixturevalue("models")
    if bug and (stops_after < 1000 or shape == "tiny-mla"):
        pytest.skip("the bug is never met")
    with loaded(models.get(shape, shape), bug, self_test_limit_s=0.0, **fields) as backend:
        seqs = range(backend.info.n_slots)
        for seq in seqs:
            backend._run(seq, list(range(300 + seq, 350 + 7 * seq)))
        if backend.info.keeps_checkpoints:
            super(WrongBackend, backend).change(Take(5, 0, 50))
        if len(seqs) > 1:
            backend.change(Remove(1, 20))
        before = [held(backend, seq) for seq in seqs]
        lengths, live = list(backend._kv.lengths), [backend._kv.states.is_live(seq) for seq in seqs]
        asked = iter(range(2000))
        assert backend.run_self_test(lambda: next(asked) >= stops_after) is (stops_after == 1000)
        expected = "pending" if stops_after < 1000 else "failed" if bug else "passed"
        assert backend.info.self_test == expected
        assert [held(backend, seq) for seq in seqs] == before
        assert backend._kv.lengths == lengths
        assert [backend._kv.states.is_live(seq) for seq in seqs] == live
        assert list(backend._kv.states.checkpoints) == [5] * backend._kv.states.has_states
        if not bug and live[0]:
            assert backend.decode([Run(0, lengths[0], TOKEN, 1)]).status is Status.OK


def test_a_later_test_does_not_run_without_memory_for_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded("tiny-swa", self_test_limit_s=0.0) as backend:
        backend._run(0, list(range(300, 350)))
        before = held(backend, 0)
        monkeypatch.setattr(operations, "_MAX_SET_ASIDE_BYTES", 1000)
        with pytest.raises(NotSavedError):
            backend.run_self_test()
        assert (backend.info.self_test, held(backend, 0)) == ("pending", before)


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["", "no restore", "cells of another branch"])
@pytest.mark.parametrize("shape", ["tiny-swa", "tiny-lfm2", "tiny-mamba", "tiny-mla"])
def test_the_flag_overrides_the_test(shape: str, bug: str, tmp_path: Path) -> None:
    """Whatever an earlier start has kept."""
    for choice in ("auto", "on", "off", "on", "off", "auto"):
        with loaded(shape, bug, measurements=tmp_path, reuse_self_test=choice) as backend:
            info, n_decoded = backend.info, backend.n_decoded
            if choice == "auto":
                assert info.self_test in ("passed", "failed")
                continue
            assert info.self_test == {"on": "skipped", "off": "off"}[choice]
            assert info.can_reuse is (choice == "on")
            assert n_decoded < 5
            assert info.self_test_reason == f"--reuse-self-test {choice}"
            assert backend.run_self_test()


@pytest.mark.parametrize(
    ("step_s", "outcome"),
    [
        (lambda n: 0.01, "passed"),
        (lambda n: 0.001 * n, "pending"),
        (lambda n: 0.00001 * n, "passed"),
        (lambda n: 0.05, "pending"),
    ],
    ids=["a GPU", "a slow CPU", "a fast CPU", "a slow GPU"],
)
def test_time_is_estimated_from_few_tokens_and_where_possible_from_many(
    step_s: Callable[[int], float], outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test of the window of 200 tokens computes about 800 in some 15 steps."""
    with loaded("swa-200", n_ubatch=128, checkpoints=True, self_test_limit_s=0.0) as backend:
        now = 0.0
        decode = backend.decode

        def timed(runs: Sequence[Run]) -> Decoded:
            nonlocal now
            now += step_s(len(runs[0].tokens))
            return decode(runs)

        monkeypatch.setattr(backend, "decode", timed)
        monkeypatch.setattr(self_test, "perf_counter", lambda: now)
        result = self_test.run(backend, backend._context, limit_s=0.5)
        assert result.outcome == outcome
        assert now < 2 * 0.5
        assert is_empty(backend)


def test_a_test_that_takes_longer_than_expected_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded("tiny-lfm2", self_test_limit_s=0.0) as backend:
        clock = iter([*[0.0] * 12, *[10.0] * 1000])
        monkeypatch.setattr(self_test, "perf_counter", lambda: next(clock))
        result = self_test.run(backend, backend._context, limit_s=0.5)
        assert (result.outcome, result.reason) == ("pending", "the self-test takes too long at start")
        assert is_empty(backend)


def starts(shape: str, folder: Path, n: int, bug: str = "", **fields: Any) -> tuple[list[str], list[int]]:
    """Outcomes and computed tokens of that many starts."""
    outcomes, computed = [], []
    for _ in range(n):
        with loaded(shape, bug, measurements=folder, **fields) as backend:
            outcomes.append(backend.info.self_test)
            computed.append(backend.n_decoded)
    return outcomes, computed


@pytest.mark.parametrize(("bug", "outcome"), [("", "passed"), ("no restore", "failed")])
def test_a_result_is_kept_for_the_next_start(bug: str, outcome: str, tmp_path: Path) -> None:
    outcomes, computed = starts("tiny-granite", tmp_path, 2, bug)
    assert outcomes == [outcome] * 2
    assert computed[1] < 3 < computed[0]
    assert starts("tiny-granite", tmp_path, 1, cache_type_k="q8_0")[1][0] > 3


def test_the_result_of_a_later_test_is_kept_too(tmp_path: Path) -> None:
    assert starts("tiny-swa", tmp_path, 2, self_test_limit_s=0.0)[0] == ["pending"] * 2
    [file] = tmp_path.iterdir()
    before = file.read_bytes()
    with loaded("tiny-swa", measurements=tmp_path, self_test_limit_s=0.0) as backend:
        assert file.read_bytes() == before
        assert backend.run_self_test()
    assert starts("tiny-swa", tmp_path, 1, self_test_limit_s=0.0)[0] == ["passed"]


def test_a_failure_for_want_of_memory_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded("tiny-swa", self_test_limit_s=0.0, measurements=tmp_path) as backend:
        with monkeypatch.context() as patched:
            patched.setattr(llama_cpp, "llama_state_seq_get_data_ext", lambda *_: 0)
            assert backend.run_self_test()
        assert backend.info.self_test == "failed"
        assert "not enough memory" in backend.info.reuse_reason
        assert is_empty(backend)
    assert starts("tiny-swa", tmp_path, 1)[0] == ["passed"]


def test_a_model_that_cannot_compute_fails_for_now(tmp_path: Path) -> None:
    with loaded("tiny-lfm2", self_test_limit_s=0.0, measurements=tmp_path) as backend:
        with failing(backend):
            assert backend.run_self_test()
        assert (backend.info.self_test, "ABORTED" in backend.info.reuse_reason) == ("failed", True)
        assert is_empty(backend)
    assert starts("tiny-lfm2", tmp_path, 1)[0] == ["passed"]


@pytest.mark.parametrize(("window", "outcome"), [(250, "failed"), (256, "passed"), (1000, "passed")])
def test_a_window_must_be_able_to_move_in_the_pool_or_never_moves(
    window: int, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(synthetic.SHAPES, "window", replace(synthetic.SHAPES["tiny-swa"], window=window))
    with loaded("window", n_ctx=256, n_ubatch=64) as backend:
        assert backend.info.self_test == outcome
        if outcome == "failed":
            assert backend.info.reuse_reason == "self-test failed: it needs 306 cells, and a sequence has 256"
