"""On real graphs: vectors and scores are those of one plain decode, however their prefix came to be there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from bench import synthetic
from llamaslot.backend.llama import LlamaBackend, LlamaSettings, loading
from llamaslot.base.backend import Run, Status
from llamaslot.base.errors import ConfigError
from llamaslot.base.kv_ops import Copy, IllegalCallError, Load, Remove, Restore, Save, Take
from llamaslot.base.model import Pooling, RerankFormat
from tests.backend.test_models import failing
from tests.gguf_copies import rewritten
from tests.raw_context import RawContext, RawModel

Vector = npt.NDArray[np.float32]

N_UBATCH = 64
TOLERANCE = 1e-4
"""Of normalized vectors: chunk sizes change the order of additions (fact 9)."""
TOKENS = np.random.default_rng(3).integers(300, 500, 150).astype(np.int32)
_POOLINGS = {"last": llama_cpp.LLAMA_POOLING_TYPE_LAST, "rank": llama_cpp.LLAMA_POOLING_TYPE_RANK}


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama with weights of float32."""
    return synthetic.ensure("tiny", folder=tmp_path_factory.mktemp("exact"), is_exact=True)


@pytest.fixture(scope="module")
def reranker(exact: Path) -> Path:
    """The same as a Qwen3 with a head of two labels."""
    return with_head(exact, exact.with_name("reranker.gguf"))


def with_head(source: Path, path: Path, *, has_head: bool = True) -> Path:
    """Write a llama as a Qwen3 reranker."""
    chance = np.random.default_rng(5)
    norms = {f"blk.{i}.attn_{name}_norm.weight": np.ones(64, np.float32) for i in range(3) for name in "qk"}
    head = {"cls.output.weight": chance.normal(0, 0.3, (2, 128)).astype(np.float32)}
    return rewritten(
        source,
        path,
        "qwen3",
        values={"pooling_type": 4, "classifier.output_labels": ["yes", "no"]},
        tensors=norms | (head if has_head else {}),
    )


def loaded(model: Path, pooling: Pooling | None = None, **settings: Any) -> LlamaBackend:
    chosen: dict[str, Any] = {
        "n_ctx": 1024,
        "n_slots": 2,
        "n_cache_seqs": 1,
        "n_ubatch": N_UBATCH,
        "n_threads": 1,
        "embeds": True,
        "pooling": pooling,
        "cache_type_k": "f32",
        "cache_type_v": "f32",
        # In which hardly anything is rounded.
        "flash_attn": "off",
    }
    return LlamaBackend(LlamaSettings(model, **(chosen | settings)))


def reference(model: Path, pooling: Pooling, tokens: Sequence[int]) -> Vector:
    """The vector or the scores by one `llama_decode` of all tokens."""
    raw = RawModel(model)
    context = RawContext(raw, embeddings=True, pooling_type=_POOLINGS[pooling], n_outputs_max=256)
    assert context.decode((0, 0, tokens)) == 0
    n = llama_cpp.llama_model_n_cls_out(raw.handle) if pooling == "rank" else raw.width
    pointer = llama_cpp.llama_get_embeddings_seq(context._context, 0)
    vector = np.ctypeslib.as_array(pointer, (n,)).copy()
    context.close()
    raw.close()
    return unit(vector) if pooling == "last" else vector


def unit(vector: Vector) -> Vector:
    return vector / np.linalg.norm(vector)


def feed(backend: LlamaBackend, seq: int, tokens: Sequence[int], chunk: int = N_UBATCH) -> None:
    """Compute tokens in a sequence, with an output for the last one."""
    for at in range(0, len(tokens), chunk):
        part = np.array(tokens[at : at + chunk], dtype=np.int32)
        run = Run(seq, backend.seq_len(seq), part, n_outputs=int(at + chunk >= len(tokens)))
        decoded = backend.decode([run])
        assert decoded.status is Status.OK
        assert decoded.sent == {seq: (run.start, len(part))}


def vector(backend: LlamaBackend, seq: int) -> Vector:
    got = np.frombuffer(backend.vector(seq), dtype="<f4")
    return unit(got) if backend.info.pooling == "last" else got


@pytest.fixture(params=["last", "rank"])
def case(request: pytest.FixtureRequest, exact: Path, reranker: Path) -> Iterator[tuple[LlamaBackend, Vector]]:
    """A backend, and what it must give for `TOKENS`."""
    pooling: Pooling = request.param
    model = reranker if pooling == "rank" else exact
    backend = loaded(model, pooling)
    yield backend, reference(model, pooling, TOKENS.tolist())
    backend.close()


@pytest.mark.parametrize("chunk", [1, 7, 63, N_UBATCH])
def test_chunks_do_not_matter(case: tuple[LlamaBackend, Vector], chunk: int) -> None:
    backend, expected = case
    feed(backend, 0, TOKENS.tolist(), chunk)
    assert np.abs(vector(backend, 0) - expected).max() < TOLERANCE


@pytest.mark.parametrize("n_rows", [1, 10, 10**6])
def test_steps_of_any_size_are_computed_though_every_token_has_an_output(
    exact: Path, n_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "spare_rows", lambda model, settings, n_ubatch: min(n_rows, n_ubatch))
    backend = loaded(exact, "last")
    expected = reference(exact, "last", TOKENS.tolist())
    others = TOKENS[::-1].copy()
    # Beside a run that ends, one that does not, and a single token.
    feed(backend, 0, TOKENS[:120].tolist())
    runs = [Run(0, 120, TOKENS[120:], 1), Run(1, 0, others[:20], 0), Run(2, 0, others[:1], 1)]
    decoded = backend.decode(runs)
    assert decoded.status is Status.OK
    assert decoded.sent == {0: (120, 30), 1: (0, 20), 2: (0, 1)}
    assert [backend.seq_len(seq) for seq in range(3)] == [150, 20, 1]
    assert np.abs(vector(backend, 0) - expected).max() < TOLERANCE
    assert np.abs(vector(backend, 2) - reference(exact, "last", others[:1].tolist())).max() < TOLERANCE
    with pytest.raises(IllegalCallError, match="no vector"):
        backend.vector(1)
    feed(backend, 1, others[20:].tolist())
    assert np.abs(vector(backend, 1) - reference(exact, "last", others.tolist())).max() < TOLERANCE
    backend.close()


def test_prefixes_that_were_cut_copied_or_loaded_give_the_same(case: tuple[LlamaBackend, Vector]) -> None:
    backend, expected = case
    feed(backend, 0, TOKENS.tolist())
    cold = vector(backend, 0)
    for keep in (149, 100, 1):
        backend.change(Remove(0, keep))
        feed(backend, 0, TOKENS[keep:].tolist())
        assert np.abs(vector(backend, 0) - cold).max() < TOLERANCE
    backend.change(Copy(0, 1, 0, 120))
    feed(backend, 1, TOKENS[120:].tolist())
    assert np.abs(vector(backend, 1) - cold).max() < TOLERANCE
    backend.change(Save(1, 0, 0, 140))
    for seq in (0, 1):
        backend.change(Remove(seq, 0))
    backend.change(Load(1, 0, ((1, 140),)))
    feed(backend, 1, TOKENS[140:].tolist())
    assert np.abs(vector(backend, 1) - cold).max() < TOLERANCE
    assert np.abs(vector(backend, 1) - expected).max() < TOLERANCE


@pytest.mark.parametrize("shape", ["tiny-swa", "tiny-lfm2", "tiny-mamba"])
def test_prefixes_by_checkpoints_give_the_same(shape: str, tmp_path: Path) -> None:
    model = synthetic.ensure(shape, folder=tmp_path, is_exact=True)
    backend = loaded(model, "last", checkpoints=True, reuse_self_test="on")
    feed(backend, 0, TOKENS[:100].tolist())
    backend.change(Take(1, 0, 100))
    feed(backend, 0, TOKENS[100:].tolist())
    cold = vector(backend, 0)
    backend.change(Restore(1, 0))
    feed(backend, 0, TOKENS[100:].tolist())
    assert np.abs(vector(backend, 0) - cold).max() < TOLERANCE
    assert np.abs(cold - reference(model, "last", TOKENS.tolist())).max() < 1e-3
    backend.close()


@pytest.mark.cpu_only
@pytest.mark.parametrize("fails_last", [False, True])
@pytest.mark.parametrize("shape", ["tiny", "tiny-lfm2"])
def test_a_step_of_two_batches_may_fail_in_either(
    shape: str, fails_last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "spare_rows", lambda *_: 1)
    model = synthetic.ensure(shape, folder=tmp_path, is_exact=True)
    backend = loaded(model, "last", checkpoints=True, reuse_self_test="on")
    feed(backend, 0, TOKENS[:50].tolist())
    if backend.info.keeps_checkpoints:
        backend.change(Take(1, 0, 50))
    compute = backend._compute

    def failing_once(runs: Sequence[Run], *others: Any, embeds: bool) -> Status:
        if embeds != fails_last:
            return compute(runs, *others, embeds=embeds)
        with failing(backend):
            return compute(runs, *others, embeds=embeds)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "_compute", failing_once)
        decoded = backend.decode([Run(0, 50, TOKENS[50:100], 1)])
    assert decoded.status is Status.ABORTED
    assert decoded.sent == {0: (50, 50 if fails_last else 49)}
    if backend.info.keeps_checkpoints:
        assert backend.seq_len(0) == 50
        backend.change(Restore(1, 0))
    else:
        assert backend.seq_len(0) == (99 if fails_last else 50)
    feed(backend, 0, TOKENS[backend.seq_len(0) :].tolist())
    assert np.abs(vector(backend, 0) - reference(model, "last", TOKENS.tolist())).max() < 1e-3
    backend.close()


def test_targets_have_logits_and_no_vector(exact: Path) -> None:
    backend = loaded(exact, "last")
    assert backend.decode([Run(0, 0, TOKENS[:8], 1, targets=TOKENS[1:8])]).status is Status.OK
    assert len(backend.score(0, 1)) == 7
    with pytest.raises(IllegalCallError, match="no vector"):
        backend.vector(0)
    with pytest.raises(IllegalCallError, match="drafted"):
        backend.decode([Run(0, 8, TOKENS[8:12], 2)])
    with pytest.raises(IllegalCallError, match="no vector"):
        backend.vector(99)
    backend.close()


def test_a_server_of_text_has_no_vectors(exact: Path) -> None:
    backend = loaded(exact, embeds=False)
    assert (backend.info.pooling, backend.info.n_vector, backend.info.rerank) == ("", 0, None)
    feed(backend, 0, TOKENS[:8].tolist())
    with pytest.raises(IllegalCallError, match="no vector"):
        backend.vector(0)
    backend.close()


def test_facts_about_the_model(exact: Path, reranker: Path) -> None:
    backend = loaded(exact, "last")
    assert (backend.info.pooling, backend.info.n_vector, backend.info.rerank) == ("last", 128, None)
    assert not backend.info.samples_on_device
    backend.close()
    backend = loaded(reranker)
    assert (backend.info.pooling, backend.info.n_vector) == ("rank", 2)
    assert backend.info.rerank == RerankFormat(), "its tokenizer adds nothing"
    backend.close()


def test_the_file_s_template_of_rerank_prompts_is_read(reranker: Path, tmp_path: Path) -> None:
    import gguf  # noqa: PLC0415

    path = tmp_path / "template.gguf"
    reader, writer = gguf.GGUFReader(reranker), gguf.GGUFWriter(path, "qwen3")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind, *inner = field.types
            writer.add_key_value(key, field.contents(), kind, inner[0] if inner else None)
    writer.add_string("tokenizer.chat_template.rerank", "Q {query} D {document}")
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    backend = loaded(path)
    assert backend.info.rerank == RerankFormat("Q {query} D {document}")
    backend.close()


@pytest.mark.parametrize("n_slots", [1, 3, 4])
@pytest.mark.parametrize("pooling", ["none", "mean", "cls"])
def test_inputs_whose_vectors_are_of_all_tokens_are_computed_whole(
    exact: Path, pooling: Pooling, n_slots: int
) -> None:
    backend = loaded(exact, pooling, n_slots=n_slots, n_ubatch=256)
    info = backend.info
    assert (info.embeds_whole, info.can_reuse, info.n_ctx, info.n_ctx_slot, info.max_prompt) == (
        True, False, 256, 256, 256,
    )  # fmt: skip
    texts = [TOKENS[: 30 + 20 * i] for i in range(n_slots)]
    for inputs in (texts, [np.resize(TOKENS, 256)], [TOKENS[:1]] * n_slots):
        runs = [Run(seq, 0, tokens, 1) for seq, tokens in enumerate(inputs)]
        assert backend.decode(runs).status is Status.OK
        for seq, tokens in enumerate(inputs):
            got = np.frombuffer(backend.vector(seq), dtype="<f4").reshape(-1, info.n_vector)
            expected = whole_reference(exact, pooling, tokens.tolist())
            assert got.shape == expected.shape
            assert np.abs(got - expected).max() < 1e-3 * np.abs(expected).max()
        for seq in range(len(inputs)):
            backend.change(Remove(seq, 0))
    for run in (Run(0, 0, TOKENS[:5], 0), Run(0, 0, np.resize(TOKENS, 257), 1)):
        with pytest.raises(IllegalCallError):
            backend.decode([run])
    feed(backend, 0, TOKENS[:5].tolist())
    with pytest.raises(IllegalCallError, match="a part of an input"):
        backend.decode([Run(0, 5, TOKENS[5:7], 1)])
    backend.close()


def whole_reference(model: Path, pooling: Pooling, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """The mean, the first, or all of the vectors of single tokens, which a context without a pooling gives."""
    raw = RawModel(model)
    none = llama_cpp.LLAMA_POOLING_TYPE_NONE
    context = RawContext(raw, embeddings=True, pooling_type=none, n_outputs_max=256)
    assert context.decode((0, 0, tokens)) == 0
    pointer = llama_cpp.llama_get_embeddings(context._context)
    rows = np.ctypeslib.as_array(pointer, (len(tokens), raw.width)).copy()
    context.close()
    raw.close()
    return {"none": rows, "mean": rows.mean(axis=0, keepdims=True), "cls": rows[:1]}[pooling]


def test_a_file_that_says_nothing_has_a_vector_of_each_token(exact: Path) -> None:
    backend = loaded(exact)
    assert (backend.info.pooling, backend.info.embeds_whole) == ("none", True)
    backend.close()


def test_windows_do_not_matter_to_whole_inputs(tmp_path: Path) -> None:
    model = synthetic.ensure("tiny-swa", folder=tmp_path, is_exact=True)
    backend = loaded(model, "mean", n_ubatch=256, checkpoints=True)
    assert not backend.info.can_reuse
    assert backend.decode([Run(0, 0, TOKENS, 1)]).status is Status.OK
    got = np.frombuffer(backend.vector(0), dtype="<f4")
    expected = whole_reference(model, "mean", TOKENS.tolist())[0]
    assert np.abs(got - expected).max() < 1e-3 * np.abs(expected).max()
    backend.close()


@pytest.mark.parametrize("shape", ["tiny-lfm2", "tiny-mamba"])
def test_recurrent_states_allow_the_last_vector_only(shape: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"recurrent states.*--pooling last"):
        loaded(synthetic.ensure(shape, folder=tmp_path), "mean")


def test_a_model_without_a_head_cannot_rerank(exact: Path, tmp_path: Path) -> None:
    for path in (exact, with_head(exact, tmp_path / "headless.gguf", has_head=False)):
        with pytest.raises(ConfigError, match="no classification head"):
            loaded(path, "rank")


def test_a_pooling_that_llama_cpp_does_not_know_is_refused(exact: Path, tmp_path: Path) -> None:
    path = rewritten(exact, tmp_path / "odd.gguf", "llama", values={"pooling_type": 77})
    with pytest.raises(ConfigError, match="not known: give --pooling"):
        loaded(path)
    backend = loaded(path, embeds=False)
    feed(backend, 0, TOKENS[:8].tolist())
    backend.close()
