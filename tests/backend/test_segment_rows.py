"""Segments put together from parts of others are what llama.cpp saves of those tokens, byte for byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import synthetic
from llamaslot.backend.llama import LlamaBackend
from llamaslot.backend.state_format import join_parts
from llamaslot.base.kv_ops import Free, Kv, KvPart, Remove, Save
from llamaslot.base.model import SegmentSize
from tests.backend.test_segments import PROMPT, feed, loaded

pytestmark = pytest.mark.gpu

RANGES = [(0, 200), (0, 1), (199, 200), (0, 64), (40, 120), (7, 150), (130, 200)]
JOINED = [(0, 60, 10, 50), (50, 120, 50, 120), (100, 200, 120, 190)]
"""Positions of segments, and the part of each that is taken."""
KINDS = [
    "tiny-swa", "tiny-oss", "tiny-lfm2", "tiny-next", "tiny-qwen35", "tiny-granite", "tiny-mamba", "tiny-rwkv7",
    "tiny-mla",
]  # fmt: skip


def fill_out_of_order(backend: LlamaBackend) -> None:
    """Give sequence 0 the 200 tokens of `PROMPT`, later ones in lower cells than earlier ones."""
    for start, end in ((0, 40), (40, 90)):
        feed(backend, 1, PROMPT[start:end])
        feed(backend, 0, PROMPT[start:end])
    backend.change(Remove(1, 0))
    feed(backend, 0, PROMPT[90:150])
    feed(backend, 0, PROMPT[150:])


def saved(backend: LlamaBackend, start: int, end: int) -> Kv:
    backend.change(Save(0, 0, start, end))
    kv = backend.kv_of(0)
    assert kv is not None
    backend.change(Free(0))
    return kv


def cut(kv: Kv, positions: range, wanted: range, size: SegmentSize) -> Kv:
    return join_parts([KvPart(kv, positions, wanted)], size)


def check_parts(backend: LlamaBackend) -> None:
    size = backend.info.segment_size
    assert size is not None
    fill_out_of_order(backend)
    whole = saved(backend, 0, 200)
    for start, end in RANGES:
        expected = saved(backend, start, end)
        assert np.array_equal(cut(whole, range(200), range(start, end), size), expected), (start, end)
        if end - start > 2:
            again = cut(expected, range(start, end), range(start + 1, end - 1), size)
            assert np.array_equal(again, saved(backend, start + 1, end - 1))
    parts = [KvPart(saved(backend, a, b), range(a, b), range(c, d)) for a, b, c, d in JOINED]
    joined = join_parts(parts, size)
    assert len(joined) == size.of(180)
    for i in range(10, 190, 3):
        # By single positions, for the cells come in another order than llama.cpp would save them.
        assert np.array_equal(cut(joined, range(10, 190), range(i, i + 1), size), saved(backend, i, i + 1))


@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "q4_1"])
def test_a_part_has_the_bytes_that_llama_cpp_saves(tiny_model: Path, cache_type: str) -> None:
    with loaded(tiny_model, cache_type_k=cache_type, cache_type_v=cache_type) as backend:
        check_parts(backend)
        size = backend.info.segment_size
        assert size is not None
        whole = saved(backend, 0, 200)
        order = whole[16 : 16 + 12 * 200].view(np.int32).reshape(200, 3)[:, 0]
        assert not np.array_equal(order, np.sort(order)), "the cells are in the order of positions: a weaker test"


@pytest.mark.parametrize("shape", KINDS)
def test_a_part_has_them_for_each_kind_of_model(shape: str) -> None:
    with loaded(synthetic.ensure(shape), checkpoints=True) as backend:
        if backend.info.segment_size is None:
            pytest.skip("this device has no flash attention for this head size, so nothing is saved")
        check_parts(backend)


def test_what_is_not_such_a_segment_is_refused(tiny_model: Path) -> None:
    with loaded(tiny_model) as backend:
        size = backend.info.segment_size
        assert size is not None
        fill_out_of_order(backend)
        whole = saved(backend, 50, 150)
    positions, part = range(50, 150), range(60, 70)
    for wanted in (range(40, 70), range(60, 151), range(60, 60)):
        with pytest.raises(ValueError, match="are not a segment of"):
            cut(whole, positions, wanted, size)
    with pytest.raises(ValueError, match="are not a segment of"):
        cut(whole[:-1], positions, part, size)
    with pytest.raises(ValueError, match="other positions"):
        cut(whole, range(51, 151), range(60, 70), size)
    for at in (12, 20, 24 + 12 * 99 - 4, 16 + 12 * 100, 16 + 12 * 100 + 8 + 4):
        other = whole.copy()
        other[at] ^= 1
        with pytest.raises(ValueError, match="a segment"):
            cut(other, positions, part, size)
