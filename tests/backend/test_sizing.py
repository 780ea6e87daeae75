"""Number of sequences of a context, and of its cells without --ctx-size: as documented, and as
llama.cpp then really allocates them.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llama_cpp
import psutil
import pytest
from structlog.testing import capture_logs

from bench import synthetic
from llamaslot.app.model_files import resolve_model
from llamaslot.backend import host as host_module
from llamaslot.backend.host import host_memory
from llamaslot.backend.llama import LlamaSettings, library, sizing
from llamaslot.backend.llama.library import Device
from llamaslot.backend.llama.loading import (
    gpus,
    in_parts,
    load_model,
    load_structure,
    logged_bytes,
    padded,
    sequences,
)
from llamaslot.backend.llama.sizing import (
    HOST,
    MAX_AUTO_CELLS_GPU,
    MAX_AUTO_CELLS_HOST,
    KvBytes,
    Place,
    bytes_from_log,
    choose,
    kv_bytes,
    kv_places,
    layer_bytes,
    layers_on_gpu,
    most_cells,
    pool_size,
)
from llamaslot.base.backend import Status
from llamaslot.base.errors import ConfigError
from llamaslot.base.kv_ops import IllegalCallError
from tests.backend.test_models import feed, loaded

GIB = 2**30
DEMO_CELL = 5 * 2 * (64 + 64) * 2
"""Layers, heads, K and V, bytes of f16."""
UNLIKE = ("tiny-swa", "tiny-mamba", "tiny-lfm2")
"""Shapes whose layers are not alike."""
NEVER_BACK = ("tiny-granite", "tiny-next")
"""Hybrids whose states cannot go back."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model files by name."""
    folder = tmp_path_factory.mktemp("models")
    shapes = {name: synthetic.ensure(name, folder=folder) for name in ("tiny", *UNLIKE, *NEVER_BACK)}
    return {"demo": resolve_model("demo"), **shapes}


def of(**settings: object) -> LlamaSettings:
    return LlamaSettings(Path("none"), **settings)


@pytest.mark.parametrize(
    ("settings", "n_cache_seqs", "n_seqs"),
    [
        ({}, 16, 22),
        ({"n_cache_seqs_a_slot": 2}, 8, 14),
        ({"n_slots": 1}, 4, 7),
        ({"n_slots": 50}, 200, 252),
        ({"n_slots": 51}, 203, 256),
        ({"n_slots": 253}, 1, 256),
        ({"n_slots": 254}, 0, 256),
        ({"n_slots": 255}, 0, 256),
        ({"n_slots": 256}, 0, 256),
        ({"n_cache_seqs": 0}, 0, 6),
        ({"n_cache_seqs": 7}, 7, 13),
        ({"n_slots": 8, "n_cache_seqs": 246}, 246, 256),
        ({"unified": False}, 0, 4),
        ({"unified": False, "n_slots": 256}, 0, 256),
        ({"unified": False, "n_cache_seqs": 7}, 7, 11),
        ({"unified": False, "n_slots": 8, "n_cache_seqs": 248}, 248, 256),
    ],
)
def test_ids_are_the_slots_the_reserved_ones_a_spare_one_and_scratch(
    settings: dict[str, object], n_cache_seqs: int, n_seqs: int
) -> None:
    assert sequences(of(**settings), reusable=True) == (n_cache_seqs, n_seqs)


@pytest.mark.parametrize("settings", [{}, {"n_cache_seqs": 7}, {"unified": False, "n_cache_seqs": 7}])
def test_without_reuse_there_are_only_slots(settings: dict[str, object]) -> None:
    assert sequences(of(**settings), reusable=False) == (0, 4)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"n_slots": 8, "n_cache_seqs": 247}, 246),
        ({"n_slots": 254, "n_cache_seqs": 1}, 0),
        ({"n_slots": 255, "n_cache_seqs": 1}, 0),
        ({"n_slots": 256, "n_cache_seqs": 1}, 0),
        ({"n_slots": 8, "n_cache_seqs": 249, "unified": False}, 248),
        ({"n_cache_seqs": -2}, 250),
    ],
)
def test_more_ids_than_llama_cpp_has_are_refused(settings: dict[str, object], most: int) -> None:
    with pytest.raises(ConfigError, match=f"--cache-seqs must be between 0 and {most} ") as caught:
        sequences(of(**settings), reusable=True)
    assert caught.value.param == "--cache-seqs"


def test_a_context_has_its_reserved_spare_and_scratch_ids(models: dict[str, Path]) -> None:
    with loaded(models["tiny"], n_slots=2, n_cache_seqs=3) as backend:
        assert (backend.info.n_slots, backend.info.n_cache_seqs, backend.n_seqs) == (2, 3, 7)
        assert (backend.info.n_ctx, backend.info.n_ctx_slot) == (512, 512)
        for seq in range(7):
            assert feed(backend, seq, [300 + seq] * 8).status is Status.OK
        assert [backend.seq_len(seq) for seq in range(7)] == [8] * 7
        with pytest.raises(IllegalCallError):
            backend.seq_len(7)


def test_a_step_may_be_smaller_than_the_number_of_ids(models: dict[str, Path]) -> None:
    with loaded(models["tiny"], n_slots=2, n_ubatch=2, n_batch=2) as backend:
        assert backend.n_seqs == 12
        for seq in (0, 11):
            assert feed(backend, seq, [300, 301]).status is Status.OK
    with pytest.raises(ConfigError, match="2 slots"), loaded(models["tiny"], n_slots=2, n_ubatch=1, n_batch=1):
        pass


@pytest.mark.parametrize("shape", UNLIKE)
def test_a_model_without_reuse_has_no_ids_beside_its_slots(models: dict[str, Path], shape: str) -> None:
    with loaded(models[shape], n_slots=2, n_cache_seqs=3) as backend:
        assert (backend.info.n_cache_seqs, backend.n_seqs) == (0, 2)


@pytest.mark.parametrize("n_cache_seqs", [None, 0, 3])
def test_reserved_ids_take_nothing_from_the_slots_of_a_pool_in_parts(
    models: dict[str, Path], n_cache_seqs: int | None
) -> None:
    settings = {"n_ctx": 1000, "n_slots": 2, "unified": False, "n_cache_seqs": n_cache_seqs}
    n_reserved = n_cache_seqs or 0
    with loaded(models["tiny"], **settings) as backend:
        info = backend.info
        assert (info.n_cache_seqs, backend.n_seqs) == (n_reserved, 2 + n_reserved)
        assert (info.n_ctx, info.n_ctx_slot) == (1024, 512)
        assert llama_cpp.llama_n_ctx(backend._context) == 512 * backend.n_seqs
        added = f"spare sequences add {512 * n_reserved:,} cells ({512 * n_reserved * 768 / 2**20:.1f} MiB)"
        assert (added in info.sizing) == bool(n_reserved)
        for seq in range(backend.n_seqs):
            for _ in range(8):
                assert feed(backend, seq, [300] * 64).status is Status.OK
            assert feed(backend, seq, [300]).status is Status.NO_CELLS


@pytest.mark.parametrize(("n_ctx", "n_slots"), [(1, 3), (256, 3), (300, 2), (1000, 7), (1025, 4), (8192, 4)])
def test_parts_are_as_large_as_llama_cpp_makes_them_for_slots_alone(
    models: dict[str, Path], n_ctx: int, n_slots: int
) -> None:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_outputs_max, params.kv_unified = n_ctx, n_slots, n_slots, False
    with loaded(models["tiny"]) as backend:
        context = llama_cpp.llama_init_from_model(backend._model, params)
        part = llama_cpp.llama_n_ctx_seq(context)
        llama_cpp.llama_free(context)
    for n_reserved in (0, 1, 40, 200):
        assert in_parts(n_ctx, n_slots, n_slots + n_reserved) == part * (n_slots + n_reserved)


def test_parts_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(ConfigError, match="--ctx-size"):
        in_parts(2**31 - 1, 4, 256)


def test_the_arithmetic() -> None:
    n_cells, line = pool_size([Place(HOST, 10 * GIB, 16 * GIB, 131_072)], fraction=0.75, most=10**6)
    assert n_cells == (10 - 4) * GIB // 131_072 == 49_152
    assert line == (
        "KV pool: (10.00 GiB free on the host - 25% of 16.00 GiB) / 131,072 bytes a cell = 49,152 cells; "
        "49,152 allocated"
    )


@pytest.mark.parametrize(
    ("most", "n_cells", "capped"), [(2048, 2048, True), (1000, 1024, True), (2900, 2816, False)]
)
def test_no_more_is_taken_than_is_wanted_and_whole_paddings(most: int, n_cells: int, capped: bool) -> None:
    size, line = pool_size([Place(HOST, 3000, 3000, 1)], fraction=1, most=most)
    assert size == n_cells
    assert f" = 3,000 cells; {n_cells:,} allocated" in line
    assert ("default limit" in line) == capped


def test_the_tightest_place_decides() -> None:
    places = [Place("GPU0", 100_000, 100_000, 10), Place(HOST, 9_000, 10_000, 2)]
    _, line = pool_size(places, fraction=0.9, most=10**6)
    assert " = 4,000 cells; " in line
    assert "the smaller of (" in line
    assert "on GPU0" in line
    assert "on the host" in line


@pytest.mark.parametrize(
    ("n_parts", "n_streams", "n_cells"), [(4, 4, 7168), (4, 8, 3072), (2, 3, 5120), (4, 31, 1024)]
)
def test_a_pool_in_parts_has_room_for_reserved_sequences_too(n_parts: int, n_streams: int, n_cells: int) -> None:
    place = Place(HOST, 8000, 8000, 1)
    size, _ = pool_size([place], fraction=1, most=10**6, n_parts=n_parts, n_streams=n_streams)
    assert size == n_cells
    assert n_cells // n_parts * n_streams <= 8000


@pytest.mark.parametrize(
    ("place", "fraction", "n_streams", "words"),
    [
        (Place(HOST, 255, 1000, 1), 1, 1, ["256 cells", HOST]),
        (Place("GPU0", GIB, 16 * GIB, 1), 0.85, 1, ["1.00 GiB of 16.00 GiB on GPU0", "15%"]),
        (Place(HOST, 1000, 1000, 1), 1, 4, ["1,024 cells"]),
    ],
)
def test_no_room_for_a_small_pool_is_an_error(
    place: Place, fraction: float, n_streams: int, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        pool_size([place], fraction=fraction, most=10**6, n_parts=n_streams, n_streams=n_streams)
    assert caught.value.param == "--kv-mem-fraction"
    for word in ["--kv-mem-fraction", "--ctx-size", *words]:
        assert word in caught.value.message


def test_what_is_taken_without_being_asked() -> None:
    assert most_cells(4096, 4, on_host=True) == 16_384
    assert most_cells(4096, 32, on_host=True) == MAX_AUTO_CELLS_HOST
    assert most_cells(40_960, 4, on_host=True) == 40_960
    assert most_cells(4096, 4, on_host=False) == 16_384
    assert most_cells(40_960, 8, on_host=False) == MAX_AUTO_CELLS_GPU
    assert most_cells(2**20, 8, on_host=False) == 2**20


@pytest.mark.parametrize("model", ["tiny", "demo"])
@pytest.mark.parametrize("types", ["f16/f16", "q8_0/q8_0", "q8_0/f16", "f32/q4_0", "bf16/iq4_nl"])
def test_bytes_of_a_cell_are_what_llama_cpp_allocates(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, model: str, types: str
) -> None:
    monkeypatch.setattr(library, "_recent", deque[str](maxlen=None))
    k, v = types.split("/")
    n_ctx = 16_384
    settings = {"n_ctx": n_ctx, "cache_type_k": k, "cache_type_v": v, "flash_attn": "on", "n_gpu_layers": 0}
    with loaded(models[model], **settings) as backend:
        allocated = logged_bytes("KV buffer", library._recent)
        computed = llama_cpp.llama_model_n_layer(backend._model) * layer_bytes(backend._model, k, v) * n_ctx
    assert computed > 2**20
    assert allocated == pytest.approx(computed, abs=0.006 * 2**20)


@pytest.mark.parametrize("shape", UNLIKE)
@pytest.mark.parametrize(
    "settings",
    [{}, {"n_ctx": 256}, {"n_slots": 16}, {"unified": False}, {"swa_full": True}, {"cache_type_k": "q8_0"}],
    ids=str,
)
def test_kv_of_layers_that_are_not_alike_is_what_llama_cpp_allocates(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, shape: str, settings: dict[str, object]
) -> None:
    monkeypatch.setattr(library, "_recent", deque[str](maxlen=None))
    asked = LlamaSettings(
        models[shape], **{"n_ctx": 16_384, "flash_attn": "on", "n_gpu_layers": 0, "n_cache_seqs": 0} | settings
    )
    with loaded(models[shape], **{name: getattr(asked, name) for name in LlamaSettings.__slots__[1:]}) as backend:
        allocated = sum(logged_bytes(kind, library._recent) for kind in ("KV buffer", "RS buffer"))
        n_parts = 1 if asked.unified else asked.n_slots
        part = padded(padded(asked.n_ctx) // n_parts)
        gpu, host = kv_bytes(backend._model, asked, backend.n_seqs, part)
    assert gpu == KvBytes()
    assert allocated == pytest.approx(part * n_parts * host.per_cell + host.fixed, rel=0.05, abs=0.02 * 2**20)


def test_layers_with_a_sliding_window_take_little_in_a_large_pool(models: dict[str, Path]) -> None:
    """Five of six layers keep 32 tokens of each slot and a step; without that, all would keep 65,536."""
    with loaded(models["tiny-swa"], n_ctx=65_536, n_slots=4, n_ubatch=512, n_gpu_layers=0) as backend:
        assert backend.info.sizing.startswith("KV pool: 65,536 cells by --ctx-size, 15.3 MiB; plus 0.9 MiB")
        assert feed(backend, 0, [300] * 512).status is Status.OK
    model, _ = load_model(LlamaSettings(models["tiny-swa"], n_gpu_layers=0), lambda _share: True)
    for swa_full, per_cell, fixed in ((False, 256, 5 * 256 * 768), (True, 6 * 256, 0)):
        settings = LlamaSettings(models["tiny-swa"], swa_full=swa_full, n_gpu_layers=0)
        _, host = kv_bytes(model, settings, 4, 65_536)
        assert (host.per_cell, host.fixed) == pytest.approx((per_cell, fixed), rel=0.05)
    llama_cpp.llama_model_free(model)


@pytest.mark.parametrize(
    ("fields", "n_rollback"),
    [
        ({}, 7),
        ({"max_draft": 5}, 5),
        ({"max_draft": 0}, 0),
        ({"n_ubatch": 8}, 3),
        ({"n_ubatch": 4}, 0),
        ({"reuse_self_test": "off"}, 0),
        ({"embeds": True, "pooling": "last"}, 0),
        ({"checkpoints": False}, 0),
        ({"unified": False}, 0),
    ],
    ids=str,
)
def test_recurrent_states_go_back_as_far_as_is_wanted_and_a_step_is_long(
    models: dict[str, Path], fields: dict[str, object], n_rollback: int
) -> None:
    chosen = {"n_ctx": 256, "n_slots": 2, "n_gpu_layers": 0, "checkpoints": True, "max_draft": 63}
    with loaded(models["tiny-lfm2"], **chosen | fields) as backend:
        assert backend.info.state.n_rollback == n_rollback
        assert (f", {n_rollback} earlier ones of each sequence" in backend.info.sizing) == bool(n_rollback)


@pytest.mark.parametrize("shape", ["tiny", "tiny-swa", "tiny-mamba", *NEVER_BACK])
def test_models_whose_states_do_not_go_back_keep_no_earlier_ones(models: dict[str, Path], shape: str) -> None:
    with loaded(models[shape], n_ctx=256, n_slots=2, n_gpu_layers=0, checkpoints=True, max_draft=63) as backend:
        assert backend.info.state.n_rollback == 0
        assert "earlier" not in backend.info.sizing


def test_earlier_states_take_a_part_of_the_memory(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = load_model(LlamaSettings(models["tiny-lfm2"], n_gpu_layers=0), lambda _share: True)
    chosen = LlamaSettings(
        models["tiny-lfm2"], n_ctx=256, n_slots=64, n_gpu_layers=0, checkpoints=True, max_draft=63
    )
    _, one = kv_bytes(model, chosen, 64, 256)
    for n_planes, n_rollback in ((7, 7), (6, 3), (2, 0)):
        n_bytes = 32 * n_planes * one.fixed
        scarce(monkeypatch, available=10 * n_bytes, total=n_bytes)
        assert choose(model, chosen, 64, 0)[1] == n_rollback
        limited = replace(chosen, max_bytes=n_bytes)
        scarce(monkeypatch, available=10 * GIB, total=10 * GIB)
        assert choose(model, limited, 64, 0)[1] == n_rollback
    llama_cpp.llama_model_free(model)


def test_what_llama_cpp_logs_of_its_buffers_is_read_by_place() -> None:
    lines = [
        "llama_kv_cache_iswa: creating non-SWA KV cache, size = 256 cells",
        "llama_kv_cache:        CPU KV buffer size =     1.00 MiB",
        "llama_kv_cache:      CUDA0 KV buffer size =     2.00 MiB",
        "llama_kv_cache: size =    3.00 MiB (   256 cells,   3 layers,  4/1 seqs), K (f16):    1.50 MiB",
        "llama_kv_cache_iswa: creating     SWA KV cache, size = 256 cells",
        "llama_kv_cache:      CUDA0 KV buffer size =     4.00 MiB",
        "llama_kv_cache: size =    4.00 MiB (   256 cells,   9 layers,  4/1 seqs), K (f16):    2.00 MiB",
        "llama_memory_recurrent:  CUDA_Host RS buffer size =     0.50 MiB",
    ]
    assert bytes_from_log(lines, 512) == (KvBytes(8192, 8 * 2**20), KvBytes(4096, 2**19))
    assert bytes_from_log(lines, -1) == (KvBytes(8192 + 16_384, 0), KvBytes(4096, 2**19))


def test_bytes_of_a_cell_in_the_demo_model(models: dict[str, Path]) -> None:
    with loaded(models["demo"]) as backend:
        assert 5 * layer_bytes(backend._model, "f16", "f16") == DEMO_CELL


def test_a_default_pool_says_where_it_comes_from(models: dict[str, Path]) -> None:
    for settings in ({}, {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}):
        with loaded(models["demo"], n_ctx=0, n_gpu_layers=0, flash_attn="on", **settings) as backend:
            assert backend.info.n_ctx == 2 * backend.info.n_ctx_train == 8192
            n_bytes = DEMO_CELL // 64 * 34 if settings else DEMO_CELL
            assert f"/ {n_bytes:,} bytes a cell" in backend.info.sizing
            assert "8,192 allocated (default limit; --ctx-size overrides it)" in backend.info.sizing
    with loaded(models["demo"], n_ctx=256) as backend:
        assert backend.info.sizing == ""


def scarce(monkeypatch: pytest.MonkeyPatch, *, available: int, total: int) -> None:
    memory = SimpleNamespace(available=available, total=total)
    monkeypatch.setattr(host_module.psutil, "virtual_memory", lambda: memory)


def test_scarce_memory_makes_a_smaller_pool(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped weights count as available memory, and are not."""
    model, weights = load_model(LlamaSettings(models["demo"], n_gpu_layers=0), lambda _share: True)
    llama_cpp.llama_model_free(model)
    assert weights == pytest.approx(models["demo"].stat().st_size, rel=0.1)
    scarce(monkeypatch, available=weights + 2**20 + 1024 * DEMO_CELL, total=10 * 2**20)
    with loaded(models["demo"], n_ctx=0, kv_mem_fraction=0.9, n_gpu_layers=0) as backend:
        assert (backend.info.n_ctx, backend.info.n_ctx_slot) == (1024, 1024)
        assert "1,024 allocated" in backend.info.sizing
        assert "default limit" not in backend.info.sizing
    with loaded(models["demo"], n_ctx=0, kv_mem_fraction=0.9, n_gpu_layers=0, n_slots=2, unified=False) as backend:
        assert (backend.info.n_ctx, backend.info.n_ctx_slot) == (1024, 512)
    parts = {"n_slots": 2, "n_cache_seqs": 2, "unified": False}
    with loaded(models["demo"], n_ctx=0, kv_mem_fraction=0.9, n_gpu_layers=0, **parts) as backend:
        assert (backend.info.n_ctx, backend.info.n_ctx_slot) == (512, 256)
        assert "spare sequences add 512 cells (1.2 MiB)" in backend.info.sizing


def test_too_little_memory_is_said_and_a_size_of_ones_own_is_not_questioned(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce(monkeypatch, available=5 * 2**20, total=10 * 2**20)
    with (
        pytest.raises(ConfigError, match="not enough memory for a KV pool"),
        loaded(models["demo"], n_ctx=0, n_gpu_layers=0),
    ):
        pass
    with loaded(models["demo"], n_ctx=1024) as backend:
        assert backend.info.n_ctx == 1024


def test_where_kv_does_not_grow_with_the_cells_the_models_context_is_taken(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce(monkeypatch, available=1, total=2)
    with loaded(models["tiny-mamba"], n_ctx=0) as backend:
        assert backend.info.n_ctx == 4096
        assert backend.info.sizing.startswith("KV pool: 4,096 cells, the model's context")
        assert "does not grow" in backend.info.sizing


@pytest.mark.parametrize("shape", ["tiny-swa", "tiny-lfm2"])
def test_a_model_whose_layers_are_not_alike_gets_the_cells_that_fit(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    scarce(monkeypatch, available=2**21, total=2**21)
    monkeypatch.setattr(sizing, "kv_places", lambda gpu, host, _, used: kv_places(gpu, host, 0, used))
    with loaded(models[shape], n_ctx=0, kv_mem_fraction=1.0, n_gpu_layers=0) as backend:
        assert 256 <= backend.info.n_ctx < 8192
        assert "outside the cells) / " in backend.info.sizing


def logged_warnings(lines: list[Any]) -> list[str]:
    return [line["reason"] for line in lines if line["event"] == "kv_pool.larger_than_memory"]


def test_a_pool_that_is_larger_than_memory_is_warned_of_before_llama_cpp_tries(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, weights = load_model(LlamaSettings(models["demo"], n_gpu_layers=0), lambda _share: True)
    llama_cpp.llama_model_free(model)
    scarce(monkeypatch, available=weights + 5000 * DEMO_CELL, total=2**30)
    refused = [False]

    def failing(*_: object) -> None:
        refused[0] = bool(logged_warnings(lines))

    with capture_logs() as lines:
        with loaded(models["demo"], n_ctx=4096, n_gpu_layers=0):
            assert not logged_warnings(lines)
        monkeypatch.setattr(llama_cpp, "llama_init_from_model", failing)
        with pytest.raises(ConfigError, match=r"KV pool of 8,192 cells.* lower --ctx-size") as caught:
            load_model_and_context(models["demo"])
    assert refused == [True]
    assert caught.value.param == "--ctx-size"
    [reason] = logged_warnings(lines)
    assert reason.startswith(
        "--ctx-size 8,192 needs 8,192 cells x 2,560 bytes = 20.0 MiB on the host, where 12.2 MiB"
    )
    assert reason.endswith("at most 5,000 cells fit")


def load_model_and_context(model: Path) -> None:
    with loaded(model, n_ctx=8192, n_gpu_layers=0):
        pass


@pytest.mark.parametrize("key", ["kv_lora_rank", "key_length_mla", "indexer.key_length", "head_count_kv"])
def test_compressed_or_unequal_kv_is_measured(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    metadata = library.metadata

    def with_key(model: object, wanted: str) -> str:
        value = "[1, 2]" if key == "head_count_kv" else "512"
        return value if wanted == f"llama.attention.{key}" else metadata(model, wanted)

    monkeypatch.setattr(library, "metadata", with_key)
    measured = [0]

    def counted(*args: Any) -> Any:
        measured[0] += 1
        return measured_bytes(*args)

    measured_bytes = sizing.measured_bytes
    monkeypatch.setattr(sizing, "measured_bytes", counted)
    with loaded(models["tiny"], n_ctx=0, n_gpu_layers=0) as backend:
        assert "/ 778 bytes a cell" in backend.info.sizing, "768, as exact as the log is"
    assert measured == [1]


def test_devices_tell_their_memory() -> None:
    library.initialise()
    found = {device.name: device for device in library.devices()}
    assert found["CPU"].kind not in (library.GPU, library.INTEGRATED_GPU)
    assert found["CPU"].total == pytest.approx(psutil.virtual_memory().total, rel=0.1)


GPUS = [Device("GPU0", "a", 1, 60, 80), Device("GPU1", "b", 1, 20, 80)]


@pytest.mark.parametrize(("n_gpu_layers", "n_on_gpu"), [(-1, 4), (0, 0), (1, 0), (4, 3), (5, 4), (99, 4)])
def test_kv_lies_where_its_layer_does(n_gpu_layers: int, n_on_gpu: int) -> None:
    assert layers_on_gpu(4, 0, n_gpu_layers) == n_on_gpu
    assert layers_on_gpu(4, 1, n_gpu_layers + 1 if n_gpu_layers > 0 else n_gpu_layers) == n_on_gpu


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ["GPU0", "GPU1"]),
        ({"n_gpu_layers": 0}, []),
        ({"devices": ()}, []),
        ({"devices": ("GPU1",)}, ["GPU1"]),
        ({"devices": ("GPU1", "GPU0"), "split_mode": "none"}, ["GPU1"]),
        ({"split_mode": "none", "main_gpu": 1}, ["GPU1"]),
        ({"split_mode": "row", "main_gpu": 1}, ["GPU0", "GPU1"]),
    ],
)
def test_kv_counts_for_the_gpus_in_use(
    monkeypatch: pytest.MonkeyPatch, models: dict[str, Path], settings: dict[str, Any], names: list[str]
) -> None:
    monkeypatch.setattr(library, "devices", lambda: [Device("CPU", "", 0, 1, 1), *GPUS])
    found = gpus(of(**settings))
    assert [gpu.name for gpu in found] == names
    model = load_structure(models["tiny"])
    on_gpu, on_host = kv_bytes(model, of(**settings), 1, 0)
    assert (on_gpu.per_cell > 0, on_host.per_cell > 0) == (bool(names), not names)
    assert kv_bytes(model, of(**settings, kv_offload=False), 1, 0)[0] == KvBytes()
    llama_cpp.llama_model_free(model)


def test_the_memory_of_all_gpus_counts_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sizing, "host_memory", lambda: (50, 90))
    on_gpu, on_host = Place("GPU0 + GPU1", 80, 160, 900, 7), Place(HOST, 40, 90, 100, 3)
    assert kv_places(KvBytes(900, 7), KvBytes(100, 3), 10, GPUS) == [on_gpu, on_host]
    assert kv_places(KvBytes(900, 7), KvBytes(), 10, GPUS) == [on_gpu]
    assert kv_places(KvBytes(), KvBytes(100, 3), 10, []) == [on_host]


def test_a_gpu_without_memory_of_its_own_is_bound_by_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    integrated = Device("iGPU", "", 2, 70, 80)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sizing, "host_memory", lambda: (50, 90))
    both = [Place("iGPU", 70, 80, 900), Place(HOST, 40, 90, 1000)]
    assert kv_places(KvBytes(900), KvBytes(100), 10, [integrated]) == both
    monkeypatch.setattr(library, "devices", lambda: [integrated, *GPUS])
    assert gpus(of()) == GPUS


def test_a_gpu_that_does_not_say_what_is_free_is_not_guessed(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "kv_places", lambda *_args: [Place("GPU0", 0, 0, 1000)])
    with loaded(models["tiny"], n_ctx=0) as backend:
        assert backend.info.n_ctx == 4096
        assert "free memory on GPU0 is unknown" in backend.info.sizing


def group(folder: Path, limit: str, used: int, files: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.high").write_text("max\n")
    (folder / "memory.current").write_text(f"{used}\n")
    stat = {"anon": used - files, "file": files, "inactive_file": files - 10, "active_file": 10}
    (folder / "memory.stat").write_text("".join(f"{key} {value}\n" for key, value in stat.items()))


@pytest.mark.parametrize(
    ("outer", "inner", "memory"),
    [
        (("max", 500, 100), ("600", 500, 300), (400, 600)),
        (("700", 650, 100), ("600", 100, 10), (150, 600)),
        (("max", 500, 100), ("max", 500, 300), (800, 1000)),
        (("5000", 500, 100), ("4000", 500, 300), (800, 1000)),
        (("600", 900, 10), ("max", 500, 300), (0, 600)),
    ],
)
def test_a_container_has_what_its_groups_allow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outer: tuple[str, int, int],
    inner: tuple[str, int, int],
    memory: tuple[int, int],
) -> None:
    """The files that a group has read count as used there, and can be read again."""
    scarce(monkeypatch, available=800, total=1000)
    own, mount = tmp_path / "own", tmp_path / "mount"
    monkeypatch.setattr(host_module, "_OWN_GROUPS", own)
    monkeypatch.setattr(host_module, "_CGROUPS", mount)
    own.write_text("4:cpu:/elsewhere\n0::/inner\n")
    group(mount, *outer)
    group(mount / "inner", *inner)
    assert host_memory() == memory


def test_without_groups_memory_is_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scarce(monkeypatch, available=800, total=1000)
    own = tmp_path / "own"
    monkeypatch.setattr(host_module, "_OWN_GROUPS", own)
    monkeypatch.setattr(host_module, "_CGROUPS", tmp_path)
    assert host_memory() == (800, 1000)
    own.write_text("0::/\n")
    assert host_memory() == (800, 1000)
