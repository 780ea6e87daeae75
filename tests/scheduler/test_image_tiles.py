"""Places of tiles in a prompt."""

from __future__ import annotations

from llamaslot.base.images import PromptImage, Tile
from llamaslot.scheduler.request import Tiles

FIRST, SECOND, THIRD = Tile(2, 5, 0), Tile(5, 7, 1), Tile(9, 10, 0)
ONE, OTHER = PromptImage(b"", b"1", (FIRST, SECOND)), PromptImage(b"", b"2", (THIRD,))


def test_each_token_belongs_to_one_tile_or_to_none() -> None:
    tiles = Tiles((ONE, OTHER))
    found = [tiles.at(position) for position in range(12)]
    first, second, third = (ONE, FIRST), (ONE, SECOND), (OTHER, THIRD)
    assert found == [None, None, first, first, first, second, second, None, None, third, None, None]
    assert Tiles().at(0) is None


def test_text_ends_before_the_next_tile() -> None:
    tiles = Tiles((ONE, OTHER))
    assert [tiles.limit(position, 100) for position in (0, 1, 7, 8, 10)] == [2, 1, 2, 1, 100]
    assert tiles.limit(0, 1) == 1
    assert Tiles().limit(3, 4) == 4
