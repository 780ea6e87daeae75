"""Capabilities agree with llama.cpp: a model is reusable if its state can be trimmed, else there is a reason.

An untested kind of cache counts as not reusable, because llama.cpp may report a trim that it did not do.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from bench import synthetic
from llamaslot.backend.llama import LlamaBackend, capabilities, library, loading
from llamaslot.backend.llama.loading import LlamaSettings
from llamaslot.base import files
from llamaslot.base.errors import ConfigError
from llamaslot.base.events import Finished
from llamaslot.base.kv_ops import IllegalCallError, Remove
from llamaslot.base.model import Capabilities, StateKind
from tests.backend.test_models import OTHER, PROMPT, cold, feed, load, loaded
from tests.engine.harness import running
from tests.gguf_copies import rewritten

SHAPES = {
    "tiny": Capabilities(n_layers=3, n_attention_layers=3),
    "tiny-swa": Capabilities(
        kind=StateKind.WINDOW,
        can_trim=False,
        can_shift=False,
        n_swa=32,
        n_window_cells=256,
        n_layers=6,
        n_attention_layers=1,
        n_window_layers=5,
    ),
    "tiny-lfm2": Capabilities(kind=StateKind.HYBRID, can_trim=False, n_layers=4, n_attention_layers=2),
    "tiny-mamba": Capabilities(kind=StateKind.RECURRENT, can_trim=False, n_layers=2),
}
OWN_CACHE = {"deepseek32", "deepseek4", "dots3note", "glm-dsa", "glm5-next", "minimax-m3", "qwen4exp"}
RECURRENT = {"arwkv7", "mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7"}
HYBRID = {
    *("bailingmoe3", "deepseek4", "falcon-h1", "glm5-next", "granitehybrid", "jamba", "kimi-k3", "kimi-linear"),
    *("lfm2", "lfm2moe", "minimax-01", "nemotron_h", "nemotron_h_moe", "plamo2", "qwen35", "qwen35moe"),
    *("qwen3next", "qwen4exp"),
}
REFUSED = {
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), "diffusion model"),
    **dict.fromkeys(("dflash", "eagle3", "gemma4-assistant"), "draft model"),
    **dict.fromkeys(("bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3"), "embedding model"),
    **dict.fromkeys(("llama-embed", "modern-bert", "neo-bert", "nomic-bert", "nomic-bert-moe"), "embedding model"),
    **dict.fromkeys(("pockettts", "wavtokenizer-dec"), "audio model"),
    "t5": "encoder-decoder model",
    "t5encoder": "encoder",
}
TESTED_CLASSES = {"kv_cache", "kv_cache_iswa", "memory_recurrent", "memory_hybrid", "memory_hybrid_iswa"}
OWN_CLASSES = {"kv_cache_dsa", "kv_cache_dsa_iswa", "kv_cache_dsv4", "kv_cache_msa", "memory_hybrid_idx"}
N_LAYERS, WIDTH, HEAD_DIM = 3, 128, 64
INDEXER = {"head_count": 1, "key_length": HEAD_DIM, "top_k": 4, "block_size": 16, "local_blocks": 1}
DENSE = {"leading_dense_block_count": N_LAYERS, "expert_feed_forward_length": 64, "expert_shared_count": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Path:
    return synthetic.ensure("tiny", folder=folder)


@pytest.fixture(scope="module")
def minimax(folder: Path, tiny: Path) -> Path:
    """A MiniMax M3 with dense layers only: llama.cpp still creates its cache class with an indexer."""
    norms = {
        f"blk.{i}.attn_{name}_norm.weight": np.full(HEAD_DIM, 2, np.float32)
        for i, name in itertools.product(range(N_LAYERS), "qk")
    }
    return rewritten(
        tiny,
        folder / "minimax.gguf",
        "minimax-m3",
        values=DENSE
        | {"expert_gating_func": 2}
        | {f"attention.indexer.{name}": value for name, value in INDEXER.items()},
        tensors=norms | {"output.weight": matrix(512, WIDTH)},
    )


def matrix(*shape: int) -> npt.NDArray[np.float32]:
    drawn = np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)
    return drawn / np.float32(shape[-1] ** 0.5)


@pytest.fixture(scope="module")
def known(folder: Path) -> Iterator[dict[str, Any]]:
    """A model of each architecture that both gguf and llama.cpp know, with a vocabulary and nothing else."""
    models = {}
    for name in gguf.MODEL_ARCH_NAMES.values():
        path = folder / f"vocabulary-{name}.gguf"
        write_vocabulary(path, name)
        with contextlib.suppress(ConfigError):
            models[name] = loading.load_vocab(path)
    yield models
    for model in models.values():
        llama_cpp.llama_model_free(model)


def write_vocabulary(path: Path, architecture: str, **values: int) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("no_vocab")
    for key, value in values.items():
        name = f"{architecture}.attention.{key.replace('__', '.')}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        else:
            writer.add_uint32(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_capabilities_of_each_shape(folder: Path, shape: str) -> None:
    with loaded(synthetic.ensure(shape, folder=folder)) as backend:
        assert backend.info.state == SHAPES[shape]
        assert backend.info.can_trim == (shape == "tiny")


def test_full_size_windows_have_the_cells_of_the_pool(folder: Path) -> None:
    with loaded(synthetic.ensure("tiny-swa", folder=folder), swa_full=True) as backend:
        assert backend.info.state.n_window_cells == backend.info.n_ctx == 512
        assert not backend.info.can_trim


@pytest.mark.cpu_only
def test_layers_with_a_window_of_no_size_are_not_trusted(folder: Path) -> None:
    """Gemma 2 has them whatever the file says, and `llama_model_n_swa` returns the file's 0."""
    gemma = synthetic.ensure("tiny-swa", folder=folder)
    norms = ("attn_q_norm.weight", "attn_k_norm.weight")
    path = rewritten(gemma, folder / "gemma2.gguf", "gemma2", values={"attention.sliding_window": 0}, dropped=norms)
    with loaded(path) as backend:
        assert backend.info.state.kind is StateKind.NONE
        assert backend.info.state.n_window_layers
        assert not backend.info.can_trim
        assert not backend.info.state.can_trim


def test_a_hybrid_model_with_a_window(folder: Path) -> None:
    lfm2 = synthetic.ensure("tiny-lfm2", folder=folder)
    values = {"attention.sliding_window": 16}
    with loaded(rewritten(lfm2, folder / "lfm2-swa.gguf", "lfm2", values=values)) as backend:
        state = backend.info.state
        assert (state.kind, state.n_swa) == (StateKind.HYBRID_WINDOW, 16)
        assert not backend.info.can_trim


def test_positions_of_several_dimensions_are_reused_but_not_shifted(folder: Path, tiny: Path) -> None:
    values: dict[str, Any] = {"rope.dimension_sections": [8, 12, 12, 0]}
    with loaded(rewritten(tiny, folder / "mrope.gguf", "qwen2vl", values=values)) as backend:
        state = backend.info.state
        assert (state.kind, state.has_mrope, state.can_shift) == (StateKind.NONE, True, False)
        assert backend.info.can_trim


def test_latent_attention(folder: Path) -> None:
    with loaded(synthetic.ensure("tiny-mla", folder=folder)) as backend:
        state = backend.info.state
        assert (state.kind, state.has_mla, state.n_attention_layers) == (StateKind.NONE, True, 4)
        assert backend.info.can_trim
        assert feed(backend, 0, [300]).status == 0


def test_kinds_by_architecture_are_those_of_llama_cpp(known: dict[str, Any]) -> None:
    assert len(known) > 100
    kinds = {name: capabilities.kind_of(model) for name, model in known.items()}
    assert {name for name, kind in kinds.items() if kind is StateKind.RECURRENT} == RECURRENT & known.keys()
    assert {name for name, kind in kinds.items() if kind is StateKind.HYBRID} == HYBRID & known.keys()
    for name, model in known.items():
        by_llama_cpp = (llama_cpp.llama_model_is_recurrent(model), llama_cpp.llama_model_is_hybrid(model))
        assert by_llama_cpp == (name in RECURRENT, name in HYBRID), name
        reason = capabilities.why_not_reusable(model)
        if name in OWN_CACHE:
            assert reason.startswith(f"{name} model: "), name
        else:
            assert bool(reason) == (name in RECURRENT | HYBRID), name


def test_models_that_do_not_generate_token_by_token_are_refused(
    known: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = {name: reason for name, model in known.items() if (reason := capabilities.why_not_served(model))}
    assert refused.keys() == REFUSED.keys() & known.keys()
    for name, reason in refused.items():
        assert REFUSED[name] in reason
        assert f"({name})" in reason
        is_served = not capabilities.why_not_served(known[name], embeds=True)
        assert is_served == (REFUSED[name] == "embedding model"), name
        assert capabilities.attends_later(known[name], {}) == is_served, name
    monkeypatch.setattr(files, "why_not_served", lambda *_, **__: "")
    for name, model in known.items():
        reason = capabilities.why_not_served(model)
        assert not reason or name in REFUSED, f"{name} can be refused before its weights are loaded"


def test_a_model_without_causal_attention_is_refused(folder: Path) -> None:
    path = folder / "not-causal.gguf"
    write_vocabulary(path, "llama", causal=False)
    model = loading.load_vocab(path)
    try:
        assert "causal" in capabilities.why_not_served(model)
    finally:
        llama_cpp.llama_model_free(model)


@pytest.mark.parametrize("architecture", sorted({*OWN_CACHE, *RECURRENT, *HYBRID, *REFUSED, "hy_v4"}))
def test_llama_cpp_knows_each_architecture_that_is_named_here(folder: Path, architecture: str) -> None:
    path = folder / f"named-{architecture}.gguf"
    write_vocabulary(path, architecture)
    model = loading.load_vocab(path)
    try:
        assert capabilities.has_own_cache(model) == (architecture in OWN_CACHE)
        assert REFUSED.get(architecture, "") in capabilities.why_not_served(model)
    finally:
        llama_cpp.llama_model_free(model)


@pytest.mark.parametrize(("n_chosen", "is_reusable"), [(0, True), (2048, False)])
def test_an_indexer_makes_an_own_cache(folder: Path, n_chosen: int, is_reusable: bool) -> None:
    path = folder / f"indexer-{n_chosen}.gguf"
    write_vocabulary(path, "hy_v4", indexer__top_k=n_chosen)
    model = loading.load_vocab(path)
    try:
        assert (capabilities.why_not_reusable(model) == "") is is_reusable
    finally:
        llama_cpp.llama_model_free(model)


def test_all_memory_classes_of_the_library_were_reviewed() -> None:
    """A new class must be added to those that are tested for reuse, or its architectures to those that are not."""
    data = Path(llama_cpp.llama_cpp._lib._name).read_bytes()
    found = {
        name.decode().removeprefix("llama_")
        for length, name in re.findall(rb"(\d\d)(llama_(?:kv_cache|memory)\w*)\0", data)
        if len(name) == int(length) and not name.endswith((b"_context", b"_i"))
    }
    assert found == TESTED_CLASSES | OWN_CLASSES


def test_a_cache_of_its_own_is_only_cleared_whole(minimax: Path) -> None:
    with loaded(minimax) as backend:
        info = backend.info
        assert not info.can_trim
        assert info.reuse_reason.startswith("minimax-m3 model: ")
        assert info.state == Capabilities(can_trim=False, has_own_cache=True, n_layers=N_LAYERS)
        assert backend.n_seqs == info.n_slots
        feed(backend, 0, [300, 301, 302])
        with pytest.raises(IllegalCallError):
            backend.change(Remove(0, 2))
        backend.change(Remove(0, 0))
        assert backend.seq_len(0) == 0


def test_a_cache_class_of_an_unknown_architecture_is_not_trusted(
    minimax: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "has_own_cache", lambda _: False)
    with loaded(minimax) as backend:
        assert not backend.info.can_trim
        assert "untested" in backend.info.reuse_reason
        assert backend.info.state.has_own_cache
        feed(backend, 0, [300, 301, 302])
        with pytest.raises(IllegalCallError):
            backend.change(Remove(0, 2))


@pytest.mark.parametrize("has_own_cache", [False, True])
def test_sequences_for_checkpoints_are_reserved_where_checkpoints_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, has_own_cache: bool
) -> None:
    monkeypatch.setattr(capabilities, "has_own_cache", lambda _: has_own_cache)
    with loaded(synthetic.ensure("tiny-lfm2", folder=folder), checkpoints=True, n_cache_seqs=1) as backend:
        assert backend.info.keeps_checkpoints is not has_own_cache
        n_more = 0 if has_own_cache else 1
        assert backend.info.n_cache_seqs == n_more
        assert backend.n_seqs == backend.info.n_slots + 2 * n_more


async def test_a_second_turn_on_a_cache_of_its_own_is_computed_whole(minimax: Path) -> None:
    async with running(load(minimax)) as harness:
        await harness.submit("first", PROMPT)
        prompt = PROMPT + harness.text("first") + OTHER
        second = await harness.submit("second", prompt)
        text = harness.text("second")
    assert isinstance(second, Finished)
    assert (second.progress.n_cached, second.progress.n_prompt_computed) == (0, second.progress.n_prompt)
    assert text == await cold(minimax, prompt)


@pytest.mark.parametrize("architecture", ["llada", "dream"])
def test_a_diffusion_model_is_refused_in_one_line(folder: Path, tiny: Path, architecture: str) -> None:
    path = rewritten(tiny, folder / f"{architecture}.gguf", architecture)
    library.initialise()
    with pytest.raises(ConfigError) as refused:
        LlamaBackend(LlamaSettings(path, n_ctx=512, n_threads=1))
    assert str(refused.value).startswith(f"{path} is a diffusion model ({architecture})")
    assert "\n" not in str(refused.value)
