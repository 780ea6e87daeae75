"""Ids of images' tokens, and where a prefix may not end."""

from __future__ import annotations

import numpy as np
import pytest

from llamaslot.base.images import before_tile, between_tiles, tile_ids

FIRST, OTHER = -(2**30), -(2**30) - 1
"""The lowest id that the first token of a tile may have, and the highest one of others."""


def test_ids_are_negative_and_differ_by_image_and_tile() -> None:
    first, second = tile_ids(b"a" * 32, 0, 64), tile_ids(b"a" * 32, 1, 64)
    other = tile_ids(b"b" * 32, 0, 64)
    for each in (first, second, other):
        assert each.dtype == np.int32
        assert each.max() < 0
        assert each[0] >= FIRST
        assert each[1:].max() <= OTHER
    assert len({*first.tolist(), *second.tolist(), *other.tolist()}) == 3 * 64
    assert tile_ids(b"a" * 32, 0, 64).tolist() == first.tolist()


@pytest.mark.parametrize(
    ("tokens", "n", "kept"),
    [
        ([1, 2, 3], 2, 2),
        ([1, FIRST, OTHER, 4], 1, 1),
        ([1, FIRST, OTHER, 4], 2, 1),
        ([1, FIRST, OTHER, 4], 3, 3),
        ([1, FIRST, OTHER, 4], 4, 4),
        ([FIRST, OTHER, 4], 1, 0),
        ([1, FIRST, OTHER], 3, 1),
        ([1, FIRST, 5, FIRST], 3, 3),
        ([1, FIRST, 5, FIRST], 4, 3),
        ([1, FIRST, OTHER, -1, OTHER, 5], 3, 3),
        ([1, FIRST, OTHER, -1, OTHER, 5], 4, 3),
        ([1, FIRST, OTHER, OTHER, -1, OTHER, 5], 3, 1),
        ([1, FIRST, -1], 3, 2),
        ([], 0, 0),
        ([FIRST], 0, 0),
    ],
)
def test_a_prefix_ends_before_a_tile_or_after_it(tokens: list[int], n: int, kept: int) -> None:
    assert before_tile(np.array(tokens, dtype=np.int32), n) == kept


@pytest.mark.parametrize(
    ("tokens", "n", "moved"),
    [
        ([1, FIRST, OTHER, 4], 1, 1),
        ([1, FIRST, OTHER, 4], 2, 3),
        ([1, FIRST, OTHER, 4], 3, 3),
        ([1, FIRST, OTHER, FIRST], 2, 3),
        ([1, FIRST, OTHER, OTHER], 3, 1),
        ([1, 2], 2, 2),
    ],
)
def test_a_place_within_a_tile_moves_to_its_end_if_more_follows(tokens: list[int], n: int, moved: int) -> None:
    assert between_tiles(np.array(tokens, dtype=np.int32), n) == moved
