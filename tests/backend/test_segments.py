"""Segments on llama.cpp: what was saved and loaded again answers as if it had never been away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from bench import synthetic
from llamaslot.backend.llama import LlamaBackend, LlamaSettings, saved_states
from llamaslot.base.backend import Run, Status
from llamaslot.base.files import parts
from llamaslot.base.kv_ops import (
    Copy,
    Free,
    IllegalCallError,
    Kv,
    Load,
    NotLoadedError,
    NotSavedError,
    Remove,
    Save,
)
from llamaslot.base.model import StateKind
from tests.noise import Noise

pytestmark = pytest.mark.gpu

N_CTX = 512
SCRATCH = 5
PROMPT = np.random.default_rng(3).integers(300, 500, 200).astype(np.int32)


def settings(model: Path, **fields: Any) -> LlamaSettings:
    return LlamaSettings(model, **{"n_ctx": N_CTX, "n_cache_seqs": 0, "n_ubatch": N_CTX, "n_threads": 1} | fields)


@contextmanager
def loaded(model: Path, **fields: Any) -> Iterator[LlamaBackend]:
    backend = LlamaBackend(settings(model, **fields))
    try:
        yield backend
    finally:
        backend.close()


def feed(backend: LlamaBackend, seq: int, tokens: Any) -> Status:
    run = Run(seq, backend.seq_len(seq), np.array(tokens, dtype=np.int32), n_outputs=1)
    return backend.decode([run]).status


def best(backend: LlamaBackend, seq: int, token: int) -> int:
    """The greedy token after one more."""
    assert feed(backend, seq, [token]) is Status.OK
    row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(backend._context, 0), (backend.info.n_vocab,))
    return int(row.argmax())


@pytest.mark.parametrize(
    ("type_k", "type_v"), [("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0"), ("q4_1", "q4_1")]
)
def test_a_prefix_put_together_from_segments_answers_as_a_cold_one(
    tiny_model: Path, type_k: str, type_v: str
) -> None:
    """Saved out of scattered cells, removed, and loaded into others: whole, in part, and behind what is left."""
    fields = {"cache_type_k": type_k, "cache_type_v": type_v}
    with loaded(tiny_model, **fields) as backend:
        for at in range(0, 200, 50):
            feed(backend, 1, PROMPT[at : at + 30])
            feed(backend, 0, PROMPT[at : at + 50])
        for number, (start, end) in enumerate([(0, 90), (90, 150), (140, 200)]):
            backend.change(Save(number, 0, start, end))
        backend.change(Remove(0, 40))
        backend.change(Remove(1, 40))
        for load in (
            Load(0, 40, ((0, 90),)),
            Load(0, 90, ((1, 150),)),
            Load(2, 0, ((0, 90),)),
            Load(2, 90, ((1, 145),)),
            Load(0, 150, ((2, 199),)),
            Load(2, 145, ((2, 200),)),
            Load(0, 199, ((2, 200),)),
        ):
            backend.change(load)
        backend.change(Copy(2, 3, 0, 200))
        assert [len(backend.seq_range(seq)) for seq in range(6)] == [200, 40, 200, 200, 0, 0]
        noise = Noise(settings(tiny_model, **fields))
        history = [*PROMPT.tolist(), 301]
        cold = int(noise.logits(history, N_CTX, 0).argmax())
        for seq in (0, 2, 3):
            warm = best(backend, seq, 301)
            assert warm == cold or noise.explains(history, warm, cold)
        # 440 cells for the prefixes, and one more for each answer: exactly what is left can be filled.
        assert feed(backend, 1, [301] * (N_CTX - 443)) is Status.OK
        assert feed(backend, 1, [301]) is Status.NO_CELLS


def test_a_wrong_segment_is_noticed_by_what_is_answered(tiny_model: Path) -> None:
    """So the comparison above means something."""
    with loaded(tiny_model) as backend:
        feed(backend, 0, PROMPT)
        other = PROMPT.copy()
        other[100:110] = PROMPT[110:100:-1]
        feed(backend, 1, other)
        backend.change(Save(0, 1, 100, 150))
        backend.change(Copy(0, 2, 0, 100))
        backend.change(Load(2, 100, ((0, 150),)))
        backend.change(Copy(0, 2, 150, 200))
        right, wrong = best(backend, 0, 301), best(backend, 2, 301)
        assert not Noise(settings(tiny_model)).explains([*PROMPT.tolist(), 301], wrong, right)


def test_a_pool_too_full_for_a_segment_stays_as_it_is(tiny_model: Path) -> None:
    with loaded(tiny_model) as backend:
        feed(backend, 0, PROMPT)
        backend.change(Save(0, 0, 0, 200))
        feed(backend, 1, [301] * (N_CTX - 399))
        with pytest.raises(NotLoadedError):
            backend.change(Load(2, 0, ((0, 1),)))
        assert [len(backend.seq_range(seq)) for seq in range(6)] == [200, 113, 0, 0, 0, 0]
        backend.change(Remove(1, 112))
        backend.change(Load(2, 0, ((0, 1),)))
        assert [len(backend.seq_range(seq)) for seq in range(6)] == [200, 112, 1, 0, 0, 0]
        assert feed(backend, 1, [301] * 199) is Status.OK
        assert feed(backend, 1, [301]) is Status.NO_CELLS


def test_a_segment_that_llama_cpp_cannot_save_is_told(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded(tiny_model) as backend:
        feed(backend, 0, PROMPT)
        with monkeypatch.context() as patch:
            patch.setattr(llama_cpp, "llama_state_seq_get_data", lambda *_: 0)
            with pytest.raises(NotSavedError):
                backend.change(Save(0, 0, 0, 200))
        assert [len(backend.seq_range(seq)) for seq in range(6)] == [200, 0, 0, 0, 0, 0]
        with pytest.raises(IllegalCallError, match="not saved"):
            backend.change(Load(1, 0, ((0, 200),)))
        backend.change(Save(0, 0, 0, 200))


@pytest.mark.parametrize("call", ["llama_state_seq_get_size", "llama_state_seq_set_data"])
def test_where_llama_cpp_has_no_memory_on_the_way_nothing_is_changed(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It catches the exception and returns 0."""
    with loaded(tiny_model) as backend:
        feed(backend, 0, PROMPT)
        backend.change(Save(0, 0, 0, 200))
        operation, error = (
            (Save(1, 0, 0, 100), NotSavedError)
            if call.endswith("size")
            else (Load(1, 0, ((0, 100),)), NotLoadedError)
        )
        with monkeypatch.context() as patch:
            patch.setattr(llama_cpp, call, lambda *_: 0)
            with pytest.raises(error):
                backend.change(operation)
        assert [len(backend.seq_range(seq)) for seq in range(6)] == [200, 0, 0, 0, 0, 0]
        assert backend.kv_of(1) is None
        backend.change(operation)


@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "q4_0", "q4_1"])
def test_the_size_of_a_segment_is_known_beforehand(tiny_model: Path, cache_type: str) -> None:
    """However its cells lie."""
    with loaded(tiny_model, cache_type_k=cache_type, cache_type_v=cache_type) as backend:
        size = backend.info.segment_size
        assert size is not None
        for i in range(40):
            assert backend.decode([Run(seq, i, PROMPT[i : i + 1], 0) for seq in (0, 1)]).status is Status.OK
        feed(backend, 0, PROMPT[40:])
        for number, (start, end) in enumerate([(0, 1), (0, 2), (0, 40), (7, 150), (0, 200), (199, 200)]):
            backend.change(Save(number, 0, start, end))
            state = backend._kv.segments[number]
            assert len(state) == size.of(end - start)
            backend.change(Free(number))
        assert not backend._kv.segments


@pytest.mark.parametrize("shape", ["tiny-swa", "tiny-oss", "tiny-lfm2", "tiny-next", "tiny-mamba", "tiny-rwkv7"])
def test_the_size_of_a_segment_has_no_part_of_a_state_that_cannot_be_trimmed(shape: str) -> None:
    """However far a window has moved, and whether or not the range ends where the state is."""
    with loaded(synthetic.ensure(shape), checkpoints=True) as backend:
        size = backend.info.segment_size
        assert size is not None
        assert (size.per_token > 0) == (backend.info.state.kind is not StateKind.RECURRENT)
        for at in range(0, 200, 40):
            for seq in (0, 1):
                feed(backend, seq, PROMPT[at : at + 40])
        whole = llama_cpp.llama_state_seq_get_size(backend._context, 0)
        for start, end in ((0, 1), (0, 2), (7, 150), (0, 200), (199, 200)):
            backend.change(Save(0, 0, start, end))
            kv = backend.kv_of(0)
            assert kv is not None
            assert len(kv) == size.of(end - start)
            backend.change(Free(0))
        assert size.of(200) < whole
        with pytest.raises(ValueError, match="a segment of 200 tokens does not have"):
            backend.put(1, 0, 200, np.zeros(whole, dtype=np.uint8))
        backend.put(1, 0, 200, kv_of_whole(backend))
        backend.change(Remove(1, 0))
        backend.change(Load(1, 0, ((1, 200),)))
        assert backend.seq_len(1) == 200


def kv_of_whole(backend: LlamaBackend) -> Kv:
    """The KV of all 200 tokens of sequence 0, as an earlier process would have saved it."""
    backend.change(Save(0, 0, 0, 200))
    kv = backend.kv_of(0)
    assert kv is not None
    backend.change(Free(0))
    return kv


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        ("tiny", {"flash_attn": "off"}),
        ("tiny", {"n_slots": 256}),
        ("tiny-swa", {}),
        ("tiny-mamba", {}),
    ],
)
def test_where_segments_cannot_be_used_they_have_no_size(
    tmp_path_factory: pytest.TempPathFactory, shape: str, fields: dict[str, Any]
) -> None:
    model = synthetic.ensure(shape, folder=tmp_path_factory.getbasetemp() / "models")
    with loaded(model, **fields) as backend:
        assert backend.info.segment_size is None


def test_with_255_slots_there_is_still_an_id_for_scratch(tiny_model: Path) -> None:
    with loaded(tiny_model, n_slots=255) as backend:
        assert backend.n_seqs == 256
        assert backend.info.segment_size is not None
        feed(backend, 254, PROMPT)
        backend.change(Save(0, 254, 0, 200))
        backend.change(Load(3, 0, ((0, 200),)))
        assert len(backend.seq_range(3)) == 200


def test_what_kv_depends_on_is_told(tiny_model: Path) -> None:
    plain = {"n_ctx": 512, "n_slots": 2, "n_threads": 1}
    kinds = {}
    for name, more in {
        "plain": {},
        "types": {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
        "flash attention": {"flash_attn": "off"},
        "long positions": {"n_ctx": 8192},
    }.items():
        backend = LlamaBackend(LlamaSettings(tiny_model, **plain | more))
        kinds[name] = backend.info.kv_facts
        files = [Path(each.path) for each in backend.info.kv_files]
        backend.close()
    assert len(set(kinds.values())) == len(kinds)
    assert llama_cpp.__version__ in kinds["plain"]
    assert files[0] == tiny_model
    assert {each.name.split(".")[0] for each in files[1:]} >= {"libllama", "libggml-base"}


def test_a_model_in_parts_has_several_files() -> None:
    assert parts(Path("/m/a-00001-of-00003.gguf")) == [Path(f"/m/a-0000{i}-of-00003.gguf") for i in (1, 2, 3)]
    assert parts(Path("/m/a.gguf")) == [Path("/m/a.gguf")]


def test_a_segment_for_which_there_is_no_memory_leaves_everything_as_it_was(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(n_bytes: int) -> Any:
        raise MemoryError

    with loaded(tiny_model) as backend:
        feed(backend, 0, PROMPT)
        with monkeypatch.context() as patched:
            patched.setattr(saved_states, "new_kv", nothing)
            with pytest.raises(NotSavedError, match="segment 7"):
                backend.change(Save(7, 0, 50, 100))
        assert backend.kv_of(7) is None
        assert [len(backend.seq_range(seq)) for seq in range(6)] == [200, 0, 0, 0, 0, 0]
        backend.change(Save(7, 0, 50, 100))
