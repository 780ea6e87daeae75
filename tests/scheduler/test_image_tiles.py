"""Places of tiles in a prompt."""

from __future__ import annotations

from llamaslot.base.images import PromptImage, Tile
from llamaslot.scheduler.request import Tiles

ONE, OTHER = PromptImage(b"", b"1", ((2, 5), (5, 7))), PromptImage(b"", b"2", ((9, 10),))


def test_a_tile_is_found_where_it_begins() -> None:
    tiles = Tiles((ONE, OTHER))
    found = {position: tile for position in range(12) if (tile := tiles.at(position))}
    assert found == {2: Tile(ONE, 0), 5: Tile(ONE, 1), 9: Tile(OTHER, 0)}
    assert [(tile.start, tile.end) for tile in found.values()] == [(2, 5), (5, 7), (9, 10)]
    assert Tiles().at(0) is None


def test_text_ends_before_the_next_tile() -> None:
    tiles = Tiles((ONE, OTHER))
    assert [tiles.limit(position, 100) for position in (0, 1, 7, 8, 10)] == [2, 1, 2, 1, 100]
    assert tiles.limit(0, 1) == 1
    assert Tiles().limit(3, 4) == 4
