"""Images in llama.cpp: what a prompt with one gives is what llama-server's own calls give, however it is computed.

Projectors have random weights. What libmtmd's helper computes on a context of its own, as llama-server does, is
the oracle.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import llama_cpp
import numpy as np
import pytest
from llama_cpp import mtmd_cpp
from structlog.testing import capture_logs

from bench import synthetic
from bench.projector_files import Kind, picture, write_projector
from llamaslot.backend.llama import LlamaBackend, LlamaSettings, library
from llamaslot.backend.llama.loading import CACHE_TYPES, FLASH_ATTN
from llamaslot.base.backend import Run, Status
from llamaslot.base.errors import ConfigError, InvalidRequestError, NotSupportedError, UnavailableError
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.image_files import MAX_PIXELS
from llamaslot.base.images import ImageSize, PromptImage, Tile
from llamaslot.base.kv_ops import Copy, IllegalCallError, Load, Remove, Restore, Save, Take
from llamaslot.base.model import StateKind
from tests.backend.test_models import failing, logits
from tests.conftest import new_seed
from tests.vision_files import placed, with_mrope, with_tokens

pytestmark = pytest.mark.gpu

BEFORE = [5, *range(300, 320)]
AFTER = [*range(400, 412)]
SETTINGS: dict[str, Any] = {
    "n_ctx": 2048, "n_slots": 2, "n_cache_seqs": 2, "n_ubatch": 128, "n_threads": 1, "cache_type_k": "f32",
    "cache_type_v": "f32", "flash_attn": "off", "checkpoints": True,
}  # fmt: skip
CASES: list[tuple[str, Kind]] = [
    ("tiny", "mlp"), ("tiny", "idefics3"), ("tiny", "gemma3"), ("tiny-swa", "gemma3"), ("tiny-swa", "idefics3"),
    ("tiny-lfm2", "lfm2"), ("tiny-lfm2", "mlp"), ("tiny-mamba", "mlp"),
    ("tiny-qwen2vl", "qwen2vl_merger"), ("tiny-qwen35", "qwen2vl_merger"),
]  # fmt: skip
SIZES = {
    "mlp": (90, 70), "idefics3": (200, 100), "gemma3": (80, 64), "lfm2": (100, 60), "qwen2vl_merger": (150, 60),
}  # fmt: skip


@dataclass
class Case:
    """A model with a projector, a prompt with an image, and the logits that llama-server would have after it."""

    settings: LlamaSettings
    data: bytes
    size: ImageSize
    expected: np.ndarray

    def prompt(self, backend: LlamaBackend, data: bytes = b"") -> tuple[list[int], PromptImage]:
        ids, image = placed(data or self.data, backend.image_layout(self.size), len(BEFORE))
        return [*BEFORE, *ids, *AFTER], image


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {
        shape: with_tokens(synthetic.ensure(shape, folder=folder, is_exact=True), folder / f"{shape}.gguf")
        for shape in {shape for shape, _ in CASES} - {"tiny-qwen2vl"}
    }
    return {**made, "tiny-qwen2vl": with_mrope(made["tiny"], folder / "tiny-qwen2vl.gguf")}


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def case(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Case:
    shape, kind = request.param
    path = write_projector(tmp_path_factory.mktemp("projector") / "mmproj.gguf", kind)
    settings = LlamaSettings(models[shape], mmproj=path, **SETTINGS)
    size = ImageSize(*SIZES[kind])
    data = picture(1, size.width, size.height)
    return Case(settings, data, size, of_llama_server(settings, data))


@pytest.fixture
def backend(case: Case) -> Iterator[LlamaBackend]:
    backend = LlamaBackend(case.settings)
    yield backend
    backend.close()


def of_llama_server(settings: LlamaSettings, data: bytes) -> np.ndarray:
    """The logits after a prompt by libmtmd's helper, which llama-server calls too."""
    library.initialise()
    mtmd_cpp.mtmd_helper_log_set(library.on_log, ctypes.c_void_p(0))
    assert settings.mmproj is not None
    model = llama_cpp.llama_model_load_from_file(
        os.fsencode(settings.model), llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    types = {f"type_{each}": CACHE_TYPES[getattr(settings, f"cache_type_{each}")] for each in "kv"}
    attention = {"flash_attn_type": FLASH_ATTN[settings.flash_attn]}
    for name, value in (
        {"n_ctx": 1024, "n_batch": 128, "n_ubatch": 128, "n_threads": 1} | types | attention
    ).items():
        setattr(params, name, value)
    context = llama_cpp.llama_init_from_model(model, params)
    options = mtmd_cpp.mtmd_context_params_default()
    options.use_gpu, options.flash_attn_type = False, FLASH_ATTN[settings.flash_attn]
    handle = mtmd_cpp.mtmd_init_from_file(os.fsencode(settings.mmproj), model, options)
    assert handle
    n_past = llama_cpp.llama_pos(0)

    def add(text: Sequence[int], *, is_last: bool = False) -> None:
        batch = llama_cpp.llama_batch_init(len(text), 0, 1)
        for i, token in enumerate(text):
            batch.token[i], batch.pos[i], batch.logits[i] = token, n_past.value + i, is_last and i == len(text) - 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        batch.n_tokens = len(text)
        assert llama_cpp.llama_decode(context, batch) == 0
        llama_cpp.llama_batch_free(batch)
        n_past.value += len(text)

    add(BEFORE)
    buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    bitmap = mtmd_cpp.mtmd_helper_bitmap_init_from_buf(handle, buffer, len(data), False)
    chunks = mtmd_cpp.mtmd_input_chunks_init()
    text = mtmd_cpp.mtmd_input_text(text=b"<__media__>", text_len=11, add_special=False, parse_special=True)
    bitmaps = (mtmd_cpp.mtmd_bitmap_p_ctypes * 1)(bitmap)
    assert mtmd_cpp.mtmd_tokenize(handle, chunks, ctypes.byref(text), bitmaps, 1) == 0
    code = mtmd_cpp.mtmd_helper_eval_chunks(handle, context, chunks, n_past, 0, 128, False, ctypes.byref(n_past))
    assert code == 0
    add(AFTER, is_last=True)
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    found = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (n_vocab,)).copy()
    mtmd_cpp.mtmd_input_chunks_free(chunks)
    mtmd_cpp.mtmd_bitmap_free(bitmap)
    mtmd_cpp.mtmd_free(handle)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return found


def steps(ids: Sequence[int], image: PromptImage, start: int, seq: int) -> Iterator[Run]:
    """The steps that compute a prompt from a position on: text, or a tile; the last has logits."""
    tiles = {first: Tile(image, i) for i, (first, _) in enumerate(image.tiles)}
    for first, end in itertools.pairwise(sorted({0, len(ids), *itertools.chain(*image.tiles)})):
        at = max(first, start)
        if at < end:
            tokens = np.array(ids[at:end], dtype=np.int32)
            yield Run(seq, at, tokens, n_outputs=end == len(ids), tile=tiles.get(first))


def compute(backend: LlamaBackend, ids: Sequence[int], image: PromptImage, *, seq: int = 0) -> np.ndarray:
    """Compute what a sequence lacks of a prompt, and return the last logits."""
    for run in steps(ids, image, backend.seq_len(seq), seq):
        decoded = backend.decode([run])
        assert decoded.status is Status.OK
        assert decoded.sent == {seq: (run.start, len(run.tokens))}
    return logits(backend, len(run.tokens) - 1)


def assert_same(found: np.ndarray, expected: np.ndarray, tolerance: float = 5e-3) -> None:
    """Steps of other sizes are rounded a little differently (fact 9); another image changes some logits by 0.02."""
    assert np.abs(found - expected).max() < tolerance


def test_a_prompt_gives_what_llama_server_computes(case: Case, backend: LlamaBackend) -> None:
    ids, image = case.prompt(backend)
    assert backend.info.projector is not None
    is_gemma = "gemma3" in case.settings.mmproj.read_bytes()[:1000].decode("latin1")
    assert backend.info.projector.max_tile == 128 * (is_gemma or backend.info.state.n_swa > 0)
    assert_same(compute(backend, ids, image), case.expected, 1e-3)
    assert backend.stats.n_tiles_encoded == len(image.tiles)
    other = picture(2, case.size.width, case.size.height)
    different = compute(backend, *case.prompt(backend, other), seq=1)
    assert np.abs(different - case.expected).max() > 0.02, "the image changes nothing"


def test_a_long_tile_takes_several_batches(case: Case) -> None:
    backend = LlamaBackend(replace(case.settings, n_ubatch=12))
    assert backend.info.projector is not None
    if backend.info.projector.max_tile:
        with pytest.raises(InvalidRequestError, match="--ubatch-size"):
            backend.image_layout(case.size)
    else:
        ids, image = case.prompt(backend)
        for run in steps(ids, image, 0, 0):
            # Text is computed in chunks that fit; a tile as it is.
            parts = range(0, len(run.tokens), 12) if run.tile is None else [0]
            for at in parts:
                tokens = run.tokens[at : at + 12] if run.tile is None else run.tokens
                is_last = run.n_outputs and at + len(tokens) == len(run.tokens)
                assert backend.decode([replace(run, start=run.start + at, tokens=tokens, n_outputs=is_last)])
        assert max(end - start for start, end in image.tiles) > 12
        assert_same(logits(backend, len(tokens) - 1), case.expected)
        assert backend.stats.n_tiles_encoded == len(image.tiles)
    backend.close()


def test_a_tile_is_computed_whole_and_alone(case: Case, backend: LlamaBackend) -> None:
    ids, image = case.prompt(backend)
    run = next(run for run in steps(ids, image, 0, 0) if run.tile is not None)
    compute(backend, ids[: run.start], PromptImage(b"", b"", ()))
    longer = np.concatenate([run.tokens, run.tokens[:1]])
    for wrong in (
        [replace(run, tokens=run.tokens[:-1])],
        [replace(run, tokens=longer)],
        [replace(run, tokens=np.abs(run.tokens))],
        [replace(run, n_outputs=2)],
        [run, Run(1, 0, np.array([300], dtype=np.int32), 1)],
        [replace(run, tile=Tile(image, len(image.tiles)))],
        [replace(run, tile=Tile(image, -1))],
        [replace(run, tile=None)],
    ):
        with pytest.raises(IllegalCallError, match=r"tile|vocabulary"):
            backend.decode(wrong)
    assert backend.seq_len(0) == run.start
    assert_same(compute(backend, ids, image), case.expected)


def test_tokens_attend_to_earlier_ones_alone_after_an_image(case: Case, backend: LlamaBackend) -> None:
    """Also after a step with an image that fails."""
    text = np.array([*BEFORE, *AFTER], dtype=np.int32)

    def after_text() -> np.ndarray:
        backend.change(Remove(0, 0))
        backend.decode([Run(0, 0, text, 1)])
        found = logits(backend, len(text) - 1)
        backend.change(Remove(0, 0))
        return found

    before = after_text()
    ids, image = case.prompt(backend)
    compute(backend, ids, image)
    assert_same(after_text(), before)
    for run in steps(ids, image, 0, 0):
        with failing(backend) if run.tile is not None else nullcontext():
            if backend.decode([run]).status is Status.ABORTED:
                break
    assert run.tile is not None
    assert_same(after_text(), before)


def test_kv_of_images_is_copied_saved_and_loaded(case: Case, backend: LlamaBackend) -> None:
    ids, image = case.prompt(backend)
    n = image.tiles[-1][1]
    for run in steps(ids[:n], image, 0, 0):
        backend.decode([replace(run, n_outputs=0)])
    has_states = backend.info.state.kind is not StateKind.NONE
    if has_states:
        backend.change(Take(2, 0, n))
    backend.change(Save(1, 0, 0, n))
    backend.change(Copy(0, 1, 0, n))
    if has_states:
        backend.change(Restore(2, 1))
    assert_same(compute(backend, ids, image, seq=1), case.expected)
    for seq in (0, 1):
        backend.change(Remove(seq, 0))
    # So that it comes to other cells.
    backend.decode([Run(0, 0, np.full(40, 300, dtype=np.int32), 0)])
    backend.change(Load(1, 0, ((1, n),)))
    if has_states:
        backend.change(Restore(2, 1))
    assert np.abs(compute(backend, ids, image, seq=1) - case.expected).max() < 0.02
    assert backend.stats.n_tiles_encoded == len(image.tiles)


def test_a_sequence_is_cut_back_to_the_start_of_a_tile(case: Case, backend: LlamaBackend) -> None:
    if not backend.info.can_trim:
        pytest.skip("a model with partial states")
    ids, image = case.prompt(backend)
    compute(backend, ids, image)
    for start, _ in image.tiles[::-1]:
        backend.change(Remove(0, start))
        assert_same(compute(backend, ids, image), case.expected)


def test_two_images_are_computed_in_turn(case: Case, backend: LlamaBackend) -> None:
    prompts = [case.prompt(backend, picture(i, case.size.width, case.size.height)) for i in (1, 3)]
    runs = [steps(*prompt, 0, seq) for seq, prompt in enumerate(prompts)]
    for both in zip(*runs, strict=True):
        for run in both:
            assert backend.decode([run]).status is Status.OK
            found = logits(backend, len(run.tokens) - 1) if run.n_outputs else None
            if run.n_outputs and run.seq == 0:
                assert_same(found, case.expected)
    assert backend.stats.n_tiles_encoded == sum(len(image.tiles) for _, image in prompts)


def test_an_image_that_cannot_be_decoded_fails_alone(case: Case, backend: LlamaBackend) -> None:
    ids, image = case.prompt(backend)
    for data in (case.data[:60], b"", picture(1, 3000, 2)):
        backend.change(Remove(0, 0))
        for run in steps(ids, PromptImage(data, data, image.tiles), 0, 0):
            decoded = backend.decode([run])
            if run.tile is not None:
                break
        assert decoded.status is Status.INVALID
        assert decoded.sent == {0: (run.start, 0)}
        assert backend.seq_len(0) == run.start
        backend.change(Remove(0, 0))
    assert_same(compute(backend, ids, image), case.expected)


def test_tiles_must_be_those_of_the_image(case: Case, backend: LlamaBackend) -> None:
    """Nothing of another size is read from where the embeddings are."""
    ids, image = case.prompt(backend)
    start, end = image.tiles[0]
    compute(backend, ids[:start], PromptImage(b"", b"", ()))
    longer, another = ((start, end + 1),), ((start, end),) * 99
    for spans in (longer, another):
        tile = Tile(PromptImage(image.data, image.digest, spans), len(spans) - 1)
        tokens = np.full(tile.end - tile.start, -5, dtype=np.int32)
        with pytest.raises(IllegalCallError, match="tile"):
            backend.decode([Run(0, start, tokens, 0, tile=tile)])
    assert backend.seq_len(0) == start


def test_samplers_do_not_see_tokens_of_images(case: Case, backend: LlamaBackend) -> None:
    """They are no tokens: penalties would count them, and llama.cpp would index logits by them."""
    ids, image = case.prompt(backend)
    compute(backend, ids, image)
    sampling = Sampling(temperature=0.0, repeat_penalty=1.5, dry_multiplier=1.0, repeat_last_n=-1)
    text = [token for token in ids if token >= 0]
    chosen = []
    for history in (ids, text):
        sampler = backend.new_sampler(sampling, np.array(history, dtype=np.int32))
        chosen.append(backend.sample([(0, sampler)]))
        sampler.close()
    assert chosen[0] == chosen[1]
    assert backend.vocab.detokenize(ids) == backend.vocab.detokenize(text)


def test_an_unloaded_projector_is_loaded_again(case: Case) -> None:
    backend = LlamaBackend(replace(case.settings, may_unload=True))
    ids, image = case.prompt(backend)
    for n_times in (1, 2):
        assert_same(compute(backend, ids, image), case.expected)
        assert backend.stats.n_tiles_encoded == n_times * len(image.tiles)
        backend.change(Remove(0, 0))
        backend.unload()
        with pytest.raises(UnavailableError, match="not loaded"):
            backend.image_layout(case.size)
        backend.reload()
    backend.close()
    backend.close()


@pytest.fixture(scope="module")
def tiny(models: dict[str, Path]) -> Path:
    return models["tiny"]


def test_a_projector_that_was_changed_is_not_loaded_again(tiny: Path, tmp_path: Path) -> None:
    path = write_projector(tmp_path / "a.gguf", "mlp")
    backend = LlamaBackend(LlamaSettings(tiny, mmproj=path, may_unload=True, **SETTINGS))
    backend.unload()
    write_projector(path, "mlp", seed=2)
    with pytest.raises(RuntimeError, match="--mmproj was changed"):
        backend.reload()
    path.unlink()
    with pytest.raises(ConfigError, match="--mmproj"):
        backend.reload()
    write_projector(path, "mlp")
    backend.reload()
    backend.image_layout(ImageSize(10, 10))
    backend.close()


def test_the_digest_is_of_the_file_and_what_the_embeddings_depend_on(tiny: Path, tmp_path: Path) -> None:
    files = [write_projector(tmp_path / f"{i}.gguf", "mlp", seed=i // 2) for i in range(3)]

    def digest(path: Path, **settings: Any) -> str:
        backend = LlamaBackend(LlamaSettings(tiny, mmproj=path, **SETTINGS | settings))
        assert backend.info.projector is not None
        found = backend.info.projector.digest
        backend.close()
        return found

    one, same, other = map(digest, files)
    assert one == same != other
    assert len({one, digest(files[0], image_min_tokens=5), digest(files[0], image_max_tokens=5)}) == 3


def test_without_a_projector_images_are_refused(tiny: Path) -> None:
    backend = LlamaBackend(LlamaSettings(tiny, **SETTINGS))
    with pytest.raises(NotSupportedError, match="--mmproj"):
        backend.image_layout(ImageSize(10, 10))
    assert backend.info.projector is None
    backend.close()


def test_token_limits_reach_libmtmd(models: dict[str, Path], tmp_path: Path) -> None:
    path = write_projector(tmp_path / "a.gguf", "lfm2")
    found = []
    for limits in ({}, {"image_min_tokens": 100, "image_max_tokens": 100}, {"image_max_tokens": 70}):
        backend = LlamaBackend(LlamaSettings(models["tiny-lfm2"], mmproj=path, **SETTINGS, **limits))
        tiles = [run for run in backend.image_layout(ImageSize(20, 20)).pieces if isinstance(run, int)]
        tiles += [run for run in backend.image_layout(ImageSize(1000, 1000)).pieces if isinstance(run, int)][-1:]
        found.append(tiles)
        backend.close()
    assert found == [[64, 256], [100, 100], [64, 64]]


def test_a_tile_that_does_not_fit_into_a_step_is_refused(tiny: Path, tmp_path: Path) -> None:
    for kind, is_refused in (("gemma3", True), ("mlp", False)):
        path = write_projector(tmp_path / f"{kind}.gguf", kind)
        backend = LlamaBackend(LlamaSettings(tiny, mmproj=path, **SETTINGS | {"n_ubatch": 15}))
        with pytest.raises(InvalidRequestError, match="--ubatch-size") if is_refused else nullcontext():
            backend.image_layout(ImageSize(10, 10))
        backend.close()


@pytest.mark.parametrize("kind", ["mlp", "llava-1.6", "idefics3", "gemma3", "lfm2", "qwen2vl_merger"])
def test_any_size_has_a_layout_or_is_refused(tiny: Path, tmp_path: Path, kind: str) -> None:
    values = {"clip.vision.image_grid_pinpoints": [64, 128, 128, 64, 128, 128]} if kind == "llava-1.6" else {}
    path = write_projector(tmp_path / "a.gguf", "mlp" if values else cast("Kind", kind), values=values)
    model = with_mrope(tiny, tmp_path / "model.gguf") if kind == "qwen2vl_merger" else tiny
    backend = LlamaBackend(LlamaSettings(model, mmproj=path, **SETTINGS))
    chance = np.random.default_rng(new_seed())
    edges = [0, 1, 2, 200, 201, 2**15, 2**16, 2**31 - 1]
    edges += np.exp(chance.uniform(0, 9.9, 60)).astype(int).tolist()
    for width, height in itertools.product(edges, repeat=2):
        least, most = sorted((width, height))
        if not least or least * most > MAX_PIXELS or most > 200 * least:
            with pytest.raises(InvalidRequestError, match=f"{width} x {height}"):
                backend.image_layout(ImageSize(width, height))
            continue
        layout = backend.image_layout(ImageSize(width, height))
        assert all(piece > 0 if isinstance(piece, int) else min(piece) >= 0 for piece in layout.pieces)
    assert backend._projector is not None
    for size in (ImageSize(1, 200), ImageSize(200, 1), ImageSize(3, 600), ImageSize(1, 1)):
        _, image = placed(picture(1, size.width, size.height), backend.image_layout(size), 0)
        for number, (start, end) in enumerate(image.tiles):
            found = backend._projector.encode(Tile(image, number))
            assert found is not None
            assert len(found.embeddings) == end - start
            if found.places is not None:
                assert found.n_positions == found.places[1:3].max() + 1
    backend.close()


def test_layouts_are_made_while_steps_are_computed(tiny: Path, tmp_path: Path) -> None:
    path = write_projector(tmp_path / "a.gguf", "idefics3")
    backend = LlamaBackend(LlamaSettings(tiny, mmproj=path, **SETTINGS))
    size = ImageSize(200, 100)
    layout = backend.image_layout(size)
    with ThreadPoolExecutor(3) as pool:
        for i in range(4):
            expected = [pool.submit(backend.image_layout, ImageSize(100 + n, 50 + n % 7)) for n in range(60)]
            ids, image = placed(picture(i, 200, 100), layout, 0)
            backend.change(Remove(0, 0))
            compute(backend, ids, image)
            assert all(each.result().n_tokens for each in expected)
    backend.close()


def refusal(model: Path, path: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        LlamaBackend(LlamaSettings(model, mmproj=path, **SETTINGS | settings))
    assert refused.value.param == "--mmproj"
    assert len(refused.value.message.splitlines()) == 1
    return refused.value.message


def test_what_cannot_be_used_is_left_out_if_it_is_optional(tiny: Path, tmp_path: Path) -> None:
    audio = {"clip.has_vision_encoder": False, "clip.has_audio_encoder": True}
    for model, path, said in (
        (tiny, write_projector(tmp_path / "wide.gguf", "mlp", n_embd=64), "n_embd"),
        (tiny, write_projector(tmp_path / "audio.gguf", "mlp", values=audio), "audio"),
        (tiny, write_projector(tmp_path / "crash.gguf", "mlp", dropped=["mm.2.weight"]), "ends its process"),
        (tiny, tmp_path / "none.gguf", "there is no file"),
    ):
        assert said in refusal(model, path)
        settings = LlamaSettings(model, mmproj=path, mmproj_is_optional=True, may_unload=True, **SETTINGS)
        with capture_logs() as logged:
            backend = LlamaBackend(settings)
            assert backend.info.projector is None
            backend.unload()
            backend.reload()
        (line,) = (each for each in logged if each["event"] == "projector.not_used")
        assert said in line["reason"]
        assert line["log_level"] == "warning"
        with pytest.raises(NotSupportedError):
            backend.image_layout(ImageSize(64, 64))
        backend.close()


def test_what_does_not_belong_together_is_refused(tiny: Path, tmp_path: Path) -> None:
    wide = write_projector(tmp_path / "wide.gguf", "mlp", n_embd=64)
    assert "n_embd" in refusal(tiny, wide)
    plain = synthetic.ensure("tiny", folder=tmp_path)
    assert "vocabulary" in refusal(plain, write_projector(tmp_path / "tiles.gguf", "idefics3"))
    assert "not a projector" in refusal(plain, plain)
    assert "there is no file" in refusal(plain, tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("mlp", {"values": {"clip.has_vision_encoder": False, "clip.has_audio_encoder": True}}, "audio"),
        ("mlp", {"values": {"clip.has_vision_encoder": None}}, "audio"),
        ("mlp", {"values": {"clip.projector_type": "hunyuanvl"}}, "images precede"),
        ("mlp", {"values": {"clip.projector_type": "deepseek4v"}}, "place in the prompt"),
        ("mlp", {"values": {"clip.projector_type": "no_such"}}, "unknown projector"),
        ("mlp", {"values": {"clip.projector_type": None}}, ""),
        ("mlp", {"values": {"clip.vision.patch_size": 0}}, "patch_size"),
        ("mlp", {"values": {"clip.vision.image_size": 10**6}}, "too large"),
        ("mlp", {"values": {"clip.vision.image_size": 0}}, ""),
        ("mlp", {"values": {"clip.vision.image_size": "x"}}, ""),
        ("mlp", {"values": {"clip.vision.block_count": 10**9}}, ""),
        ("mlp", {"values": {"clip.vision.attention.head_count": 0}}, ""),
        ("mlp", {"values": {"clip.vision.attention.head_count": 5}}, ""),
        ("mlp", {"values": {"clip.vision.embedding_length": 32}}, ""),
        ("mlp", {"values": {"clip.vision.image_mean": [0.5]}}, "image_mean"),
        ("idefics3", {"values": {"clip.vision.projector.scale_factor": 0}}, "n_merge"),
        ("idefics3", {"values": {"clip.vision.projector.scale_factor": 5}}, ""),
        ("lfm2", {"values": {"clip.vision.patch_size": 4000}}, ""),
        ("gemma3", {"values": {"clip.vision.projector.scale_factor": 3000}}, ""),
        ("mlp", {"dropped": ["mm.2.weight"]}, ""),
        ("mlp", {"dropped": ["v.position_embd.weight"]}, ""),
        ("mlp", {"dropped": ["v.patch_embd.weight"]}, ""),
        ("mlp", {"dropped": ["v.blk.0.attn_q.weight"]}, ""),
        ("mlp", {"dropped": ["v.blk.1.ffn_up.weight"]}, "ffn_up"),
        ("mlp", {"tensors": {"v.blk.0.attn_q.weight": np.zeros((3, 5), dtype=np.float32)}}, "GGML_ASSERT"),
        ("mlp", {"tensors": {"v.position_embd.weight": np.zeros((64, 5), dtype=np.float32)}}, "GGML_ASSERT"),
        ("mlp", {"tensors": {"mm.0.weight": np.zeros((128, 64), dtype=np.int32)}}, "of type 26"),
        ("mlp", {"architecture": "llama"}, "not a projector"),
    ],
)
def test_a_hostile_projector_is_refused(
    tiny: Path, tmp_path: Path, kind: Kind, changes: dict[str, Any], said: str
) -> None:
    """The server's process goes on."""
    assert said in refusal(tiny, write_projector(tmp_path / "bad.gguf", kind, **changes))


def test_a_projector_that_ends_early_is_refused(tiny: Path, tmp_path: Path) -> None:
    data = write_projector(tmp_path / "a.gguf", "mlp").read_bytes()
    for n in (0, 3, 10, 100, 700, 2000, len(data) // 2, len(data) - 33):
        cut = tmp_path / f"{n}.gguf"
        cut.write_bytes(data[:n])
        assert str(cut) in refusal(tiny, cut)


@pytest.mark.parametrize(
    "layout",
    [{"unified": False, "n_cache_seqs": 0}, {"flash_attn": "on", "cache_type_v": "f16"}, {"cache_type_k": "q8_0"}],
    ids=str,
)
def test_other_kinds_of_kv_give_what_llama_server_computes(case: Case, layout: dict[str, Any]) -> None:
    settings = replace(case.settings, **layout)
    expected = of_llama_server(settings, case.data)
    backend = LlamaBackend(settings)
    if backend.info.state.kind is StateKind.WINDOW and settings.unified:
        # With texts too, its logits depend on how steps are cut by 0.07 and 0.1.
        backend.close()
        pytest.skip("rounding of KV in other cells moves its logits more than an image")
    prompt = case.prompt(backend)
    for seq in (1, 0):
        # Quantized keys multiply what rounding changes: by up to 0.007, as the CPU's kernels have it.
        assert_same(compute(backend, *prompt, seq=seq), expected, 1.5e-2 if "cache_type_k" in layout else 5e-3)
    backend.close()


def test_a_prompt_may_end_with_an_image(case: Case) -> None:
    """Its last token has logits, on the host and on the device."""
    drawn = []
    for on_device in (False, True):
        backend = LlamaBackend(replace(case.settings, backend_sampling=on_device, checkpoints=False))
        ids, image = case.prompt(backend)
        n = image.tiles[-1][1]
        *before, last = steps(ids[:n], image, 0, 0)
        for run in before:
            backend.decode([run])
        assert last.tile is not None
        assert last.n_outputs == 1
        sampling = Sampling(temperature=0.0, repeat_penalty=1.2)
        sampler = backend.new_sampler(sampling, np.array(ids[:n], dtype=np.int32))
        backend.decode([last], [(0, sampler)])
        tokens = backend.sample([(0, sampler)])[0]
        for at in range(3):
            backend.decode([Run(0, n + at, np.array(tokens[-1:], dtype=np.int32), 1)], [(0, sampler)])
            tokens += backend.sample([(0, sampler)])[0]
        drawn.append(tokens)
        assert (backend.stats.n_device_sampled > 0) == on_device
        sampler.close()
        backend.close()
    assert drawn[0] == drawn[1]


def test_models_without_images_load_nothing_of_them(tiny: Path) -> None:
    load = f"LlamaBackend(LlamaSettings(Path({str(tiny)!r}), n_ctx=256, n_slots=1)).close()"
    found = "print({'PIL', 'llama_cpp.mtmd_cpp'} & {*sys.modules})"
    start = "import sys; from pathlib import Path; from llamaslot.backend.llama import LlamaBackend, LlamaSettings"
    done = subprocess.run(
        [sys.executable, "-c", "; ".join((start, load, found))], capture_output=True, check=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "set()"
