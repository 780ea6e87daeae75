"""Tiles whose tokens share a position (M-RoPE): wherever segments are cut, sequences give what a cold one gives.

`test_projector.py` compares them with llama-server's, and `test_state_machine.py` does random operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from bench import synthetic
from bench.projector_files import picture, write_projector
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.backend import Run, Status
from llamaslot.base.images import ImageSize, PromptImage
from llamaslot.base.kv_ops import Copy, IllegalCallError, Kv, Load, Remove, Restore, Save, Share, Take
from tests.backend.test_models import failing, logits
from tests.backend.test_projector import AFTER, BEFORE, SETTINGS, assert_same, compute, steps
from tests.vision_files import placed, with_mrope

pytestmark = pytest.mark.gpu

SIZE = ImageSize(150, 60)
"""That of a tile of 9 x 4 tokens."""


@pytest.fixture(scope="module", params=["tiny-qwen2vl", "tiny-qwen35"])
def chosen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LlamaSettings:
    folder = tmp_path_factory.mktemp("models")
    if request.param == "tiny-qwen2vl":
        tiny = synthetic.ensure("tiny", folder=folder, is_exact=True)
        model = with_mrope(tiny, folder / "qwen2vl.gguf")
    else:
        model = synthetic.ensure(request.param, folder=folder, is_exact=True)
    projector = write_projector(folder / "mmproj.gguf", "qwen2vl_merger")
    settings: dict[str, Any] = SETTINGS | {"flash_attn": "on", "n_ctx": 512}
    return LlamaSettings(model, mmproj=projector, **settings)


@pytest.fixture
def backend(chosen: LlamaSettings) -> Iterator[LlamaBackend]:
    backend = LlamaBackend(chosen)
    yield backend
    backend.close()


def prompt(backend: LlamaBackend) -> tuple[list[int], PromptImage]:
    ids, image = placed(picture(1, SIZE.width, SIZE.height), backend.image_layout(SIZE), len(BEFORE))
    return [*BEFORE, *ids, *AFTER], image


def fill(backend: LlamaBackend, seq: int, n: int) -> None:
    """Give a sequence tokens of a text."""
    at = backend.seq_len(seq)
    assert backend.decode([Run(seq, at, np.full(n, 300, dtype=np.int32), 0)]).status is Status.OK


def restored(backend: LlamaBackend, seq: int, checkpoint: int) -> None:
    if backend.info.keeps_checkpoints:
        backend.change(Restore(checkpoint, seq))


def segment(backend: LlamaBackend, seq: int, start: int, end: int) -> Kv:
    backend.change(Save(99, seq, start, end))
    kv = backend.kv_of(99)
    assert kv is not None
    backend._kv.segments.pop(99)
    backend._kv.segment_tokens.pop(99)
    return kv


def test_saved_tiles_are_loaded_without_a_projector(chosen: LlamaSettings, backend: LlamaBackend) -> None:
    """From a file of a slot, or from disk after a restart with --no-mmproj."""
    ids, image = prompt(backend)
    compute(backend, ids, image)
    kv = segment(backend, 0, 0, len(ids))
    without = LlamaBackend(replace(chosen, mmproj=None))
    without.put(1, 0, len(ids), kv)
    without.change(Load(0, 0, ((1, len(ids)),)))
    assert without.seq_range(0).stop == len(ids)
    assert without.info.segment_size is not None
    assert len(segment(without, 0, 0, len(ids))) == without.info.segment_size.of(len(ids))
    without.close()


@pytest.mark.parametrize("n_last", [1, 2, 13])
@pytest.mark.parametrize("unified", [True, False])
def test_a_tile_is_loaded_from_parts_of_it_into_any_cells(
    chosen: LlamaSettings, n_last: int, *, unified: bool
) -> None:
    """The last part is less than a row of the tile, and goes to lower cells than the first one."""
    backend = LlamaBackend(chosen if unified else replace(chosen, unified=False, n_cache_seqs=0))
    ids, image = prompt(backend)
    ((start, end),) = image.tiles
    expected = compute(backend, ids, image)
    backend.change(Remove(0, 0))
    for run in steps(ids[:end], image, 0, 0):
        backend.decode([run])
    if backend.info.keeps_checkpoints:
        backend.change(Take(9, 0, end))
    if backend.info.state.kind.has_recurrent_state and not unified:
        backend.close()
        pytest.skip("not partitioned")
    cuts = [0, start - 3, start + 4, end - n_last, end]
    for i, (a, b) in enumerate(pairwise(cuts)):
        backend.change(Save(i, 0, a, b))
    backend.change(Remove(0, 0))
    fill(backend, 0, 30)
    backend.change(Load(1, 0, tuple((i, cuts[i + 1]) for i in range(3))))
    backend.change(Remove(0, 0))
    backend.change(Load(1, cuts[3], ((3, end),)))
    assert backend.seq_len(1) == end
    # What is saved of it once more, is the same tile.
    backend.change(Save(5, 1, start + 1, end - 1))
    backend.change(Save(6, 1, 0, start + 1))
    backend.change(Save(7, 1, end - 1, end))
    backend.change(Load(0, 0, ((6, start + 1), (5, end - 1), (7, end))))
    for seq in (1, 0):
        restored(backend, seq, 9)
        assert_same(compute(backend, ids, image, seq=seq), expected, 0.02)
    backend.close()


def test_a_segment_has_the_rows_and_columns_of_its_tokens(backend: LlamaBackend) -> None:
    """Those that are cut out of a saved tile are the ones that llama.cpp would save of them."""
    ids, image = prompt(backend)
    compute(backend, ids, image)
    ((start, end),) = image.tiles
    whole = segment(backend, 0, start, end)
    size = backend.info.segment_size
    assert size is not None
    found = []
    for at in range(start, end):
        entry = segment(backend, 0, at, at + 1)
        assert len(entry) == size.of(1)
        found.append(entry[16:36].view(np.int32)[[0, 2, 3, 4]].tolist())
    assert found == [[start, start + i % 9, start + i // 9, -1] for i in range(36)]
    assert len(whole) == size.of(36)


def test_sequences_share_tiles(chosen: LlamaSettings) -> None:
    """Cells that a sequence gave up for those of another one are free."""
    backend = LlamaBackend(replace(chosen, n_ctx=256, flash_attn="off"))
    ids, image = prompt(backend)
    expected = compute(backend, ids, image)
    if backend.info.keeps_checkpoints:
        backend.close()
        pytest.skip("a model with partial states")
    compute(backend, ids, image, seq=1)
    start, n = image.tiles[0][0], len(ids)
    backend.change(Share(0, 1, n - 5, n))
    n_free = 256 - 2 * n + 5
    for at in range(0, n_free, 64):
        fill(backend, 2, min(64, n_free - at))
    backend.change(Remove(2, 0))
    # In two ranges that meet within the tile.
    backend.change(Share(0, 1, start - 2, start + 5))
    backend.change(Share(0, 1, start + 5, n - 5))
    n_free = 256 - n - (start - 2)
    for at in range(0, n_free, 64):
        fill(backend, 2, min(64, n_free - at))
    backend.change(Remove(2, 0))
    for seq in (0, 1):
        with pytest.raises(IllegalCallError, match="within a tile"):
            backend.change(Remove(seq, start + 1))
        with pytest.raises(IllegalCallError, match="within a tile"):
            backend.change(Copy(seq, 2, 0, start + 1))
    for seq in (0, 1):
        backend.change(Remove(seq, n - 1))
        assert_same(compute(backend, ids, image, seq=seq), expected)
    backend.close()


def test_a_checkpoint_truncates_what_follows_it(backend: LlamaBackend) -> None:
    if not backend.info.keeps_checkpoints:
        pytest.skip("a model without partial states")
    ids, image = prompt(backend)
    ((_, end),) = image.tiles
    for run in steps(ids[: end + 2], image, 0, 0):
        backend.decode([run])
    backend.change(Take(9, 0, end + 2))
    expected = compute(backend, ids, image)
    backend.change(Copy(0, 1, 0, len(ids)))
    backend.change(Restore(9, 1))
    assert backend.seq_len(1) == end + 2
    assert_same(compute(backend, ids, image, seq=1), expected)
    # Nothing of what was truncated is left.
    backend.change(Save(1, 1, 0, len(ids)))
    backend.change(Load(2, 0, ((1, len(ids)),)))
    assert backend.seq_len(2) == len(ids)


def test_a_failed_step_leaves_a_sequence_as_it_was(backend: LlamaBackend) -> None:
    ids, image = prompt(backend)
    expected = compute(backend, ids, image)
    backend.change(Remove(0, 0))
    for run in steps(ids, image, 0, 0):
        with failing(backend):
            assert backend.decode([run]).status is Status.ABORTED
        assert backend.seq_len(0) == run.start
        if backend.info.keeps_checkpoints:
            # It has lost its state, so begin again.
            backend.change(Remove(0, 0))
            for earlier in steps(ids, image, 0, 0):
                if earlier.start < run.start:
                    backend.decode([earlier])
        assert backend.decode([run]).status is Status.OK
    backend.change(Copy(0, 1, 0, len(ids)))
    if not backend.info.keeps_checkpoints:
        backend.change(Remove(0, len(ids) - 1))
        assert_same(compute(backend, ids, image), expected)


def test_of_a_tile_whose_second_batch_fails_nothing_is_left(chosen: LlamaSettings) -> None:
    """Behind another tile, so that its position is lower than the number of tokens before it."""
    backend = LlamaBackend(replace(chosen, n_ubatch=64))
    (ids, first), size = prompt(backend), ImageSize(300, 120)
    more, second = placed(picture(2, size.width, size.height), backend.image_layout(size), len(ids))
    ((start, end),) = second.tiles
    between, tile, rest = steps([*ids, *more, *AFTER], second, len(ids), 0)

    def compute_before() -> None:
        backend.change(Remove(0, 0))
        compute(backend, ids, first)
        backend.decode([between])

    compute_before()
    with failing(backend, 10**9) as n_nodes:
        assert backend.decode([tile]).status is Status.OK
    backend.change(Save(1, 0, start, end))
    if backend.info.keeps_checkpoints:
        backend.change(Take(9, 0, end))
    backend.decode([rest])
    expected = logits(backend, len(rest.tokens) - 1)
    compute_before()
    with failing(backend, n_nodes[0] * 3 // 4):
        assert backend.decode([tile]).status is Status.ABORTED
    if backend.seq_len(0) > start:
        # llama.cpp cuts only the batch that failed.
        backend.change(Remove(0, start))
    assert backend.seq_len(0) == start
    # All other cells are free.
    for at in range(start, 512, 64):
        fill(backend, 1, min(64, 512 - at))
    backend.change(Remove(1, 0))
    backend.change(Load(0, start, ((1, end),)))
    restored(backend, 0, 9)
    backend.decode([rest])
    assert_same(logits(backend, len(rest.tokens) - 1), expected, 0.02)
    backend.close()
