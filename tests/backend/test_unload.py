"""A model that is unloaded and loaded again: what was saved is right after it, and nothing illegal is done."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from bench import synthetic
from llamaslot.backend.llama import LlamaBackend, loading
from llamaslot.base.backend import Run
from llamaslot.base.errors import ConfigError
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import Free, IllegalCallError, Load, Remove, Restore, Save, Take
from tests.backend.test_models import load, logits
from tests.backend.test_partial_states import EXACT, HELD, TAIL, cold, feed

pytestmark = pytest.mark.gpu

SHAPES = "tiny", "tiny-lfm2", "tiny-mamba", "tiny-swa"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=SHAPES)
def backend(folder: Path, request: pytest.FixtureRequest) -> Iterator[LlamaBackend]:
    backend = load(synthetic.ensure(request.param, folder=folder, is_exact=True), may_unload=True, **EXACT)
    yield backend
    backend.close()


def save(backend: LlamaBackend, tokens: np.ndarray) -> None:
    """Compute tokens in sequence 0, save them as segment 1 with their state as checkpoint 2, and empty it."""
    feed(backend, 0, tokens)
    if backend.info.keeps_checkpoints:
        backend.change(Take(2, 0, len(tokens)))
    backend.change(Save(1, 0, 0, len(tokens)))
    backend.change(Remove(0, 0))


def restore(backend: LlamaBackend, seq: int, n_tokens: int) -> None:
    backend.change(Load(seq, 0, ((1, n_tokens),)))
    if backend.info.keeps_checkpoints:
        backend.change(Restore(2, seq))


def test_what_was_saved_continues_as_before(backend: LlamaBackend) -> None:
    expected = cold(backend, HELD, TAIL)
    save(backend, HELD)
    for _ in range(3):
        backend.unload()
        backend.reload()
        for seq in (0, 1):
            restore(backend, seq, len(HELD))
            assert np.abs(feed(backend, seq, TAIL) - expected).max() < 1e-4
            backend.change(Remove(seq, 0))


def test_a_live_sequence_is_cut_back_after_it(backend: LlamaBackend) -> None:
    """What is loaded to remove a partial state was made before."""
    save(backend, HELD)
    backend.unload()
    backend.reload()
    feed(backend, 0, HELD)
    backend.change(Remove(0, 20))
    assert backend.seq_len(0) == 20
    backend.change(Remove(0, 0))
    restore(backend, 0, len(HELD))
    feed(backend, 0, TAIL)
    ((token,),) = backend.sample([(0, backend.new_sampler(Sampling(temperature=0.0), TAIL[:0]))])
    assert token == int(logits(backend, len(TAIL) - 1).argmax())


def test_the_model_is_the_same_after_it(backend: LlamaBackend) -> None:
    before, n_seqs = backend.info, backend.n_seqs
    expected = cold(backend, HELD, TAIL)
    backend.unload()
    backend.reload()
    assert (backend.info, backend.n_seqs) == (before, n_seqs)
    assert np.abs(cold(backend, HELD, TAIL) - expected).max() < 1e-4


def test_while_it_is_unloaded_nothing_needs_it(backend: LlamaBackend) -> None:
    save(backend, HELD)
    kv = backend.kv_of(1)
    assert kv is not None
    text = backend.vocab.detokenize(TAIL.tolist())
    backend.unload()
    for call in (
        lambda: backend.decode([Run(0, 0, TAIL, 1)]),
        lambda: backend.change(Load(0, 0, ((1, len(HELD)),))),
        lambda: backend.change(Remove(0, 0)),
        lambda: backend.seq_len(0),
        lambda: backend.seq_range(0),
        backend.measure_costs,
        lambda: backend.set_layout(unified=False),
        backend.unload,
    ):
        with pytest.raises(IllegalCallError):
            call()
    gc.collect()
    assert backend.vocab.detokenize(TAIL.tolist()) == text
    assert backend.vocab.tokenize("a b", add_special=False, parse_special=False).size
    if backend.info.segment_size is not None:
        backend.put(7, 0, len(HELD), kv)
        backend.change(Free(7))
    backend.end_changes()
    backend.change(Free(1))
    assert backend.kv_of(1) is None
    backend.reload()
    feed(backend, 0, HELD)


def test_it_is_not_unloaded_while_a_sequence_holds_something(backend: LlamaBackend) -> None:
    feed(backend, 0, HELD)
    with pytest.raises(IllegalCallError):
        backend.unload()
    with pytest.raises(IllegalCallError):
        backend.reload()
    assert backend.seq_len(0) == len(HELD)


def test_it_stays_unloaded_if_it_cannot_be_loaded(backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    save(backend, HELD)
    backend.unload()
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_init_from_model", lambda *_: None)
        with pytest.raises(ConfigError, match="cannot create a KV pool"):
            backend.reload()
    with pytest.raises(ConfigError, match="stopped"):
        backend.reload(lambda: True)
    with pytest.raises(IllegalCallError):
        feed(backend, 0, HELD)
    backend.reload()
    restore(backend, 0, len(HELD))


def test_a_changed_file_is_not_loaded_in_its_place(folder: Path, tmp_path: Path) -> None:
    """Saved KV is of the old one."""
    path = tmp_path / "model.gguf"
    path.write_bytes(synthetic.ensure("tiny", folder=folder).read_bytes())
    backend = load(path, may_unload=True, n_ctx=256)
    backend.unload()
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(RuntimeError, match="was changed"):
        backend.reload()
    path.unlink()
    with pytest.raises(ConfigError):
        backend.reload()
    backend.close()


def test_it_stays_loaded_unless_that_was_asked_for(folder: Path) -> None:
    backend = load(synthetic.ensure("tiny", folder=folder), n_ctx=256)
    with pytest.raises(IllegalCallError):
        backend.unload()
    backend.close()


def test_it_can_be_closed_while_it_is_unloaded(folder: Path) -> None:
    backend = load(synthetic.ensure("tiny", folder=folder), may_unload=True, n_ctx=256)
    backend.unload()
    backend.close()
    backend.close()
    with pytest.raises(IllegalCallError):
        backend.reload()


def test_a_partitioned_pool_is_made_again_in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MIN_PART", loading.PADDING)
    backend = load(
        synthetic.ensure("tiny", folder=folder), may_unload=True, may_partition=True, n_slots=2, n_ctx=1024
    )
    backend.set_layout(unified=False)
    backend.unload()
    backend.reload()
    assert not backend.info.unified
    assert llama_cpp.llama_n_ctx_seq(backend._context) == backend.info.part_cells
    backend.set_layout(unified=True)
    assert llama_cpp.llama_n_ctx(backend._context) == backend.info.n_ctx
    backend.close()
