"""Places of tiles in a prompt, and when they are computed."""

from __future__ import annotations

from llamaslot.base.commands import GenerateParams
from llamaslot.base.images import PromptImage, Tile, tile_ids
from llamaslot.base.tokens import TokenizedPrompt, packed
from llamaslot.scheduler.chunk_sizer import ChunkSizer
from llamaslot.scheduler.request import Request, Tiles
from llamaslot.scheduler.turns import ImageTurns, PromptTurns
from tests.scheduler.test_scheduler import tokenized

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


def test_in_a_partitioned_pool_decodes_wait_for_one_tile() -> None:
    """Not for a prompt after it: the time of the tile counts as a prompt's."""
    chunks = ChunkSizer(n_ubatch=64, gap_ms=100.0)
    chunks.observe(0, 1, 0.01)
    chunks.observe(64, 0, 0.05)
    turns = ImageTurns(PromptTurns(chunks))
    ids = tile_ids(b"2", 0, 10)
    image = PromptImage(b"", b"2", ((0, 10),))
    looking = Request(GenerateParams("image"), TokenizedPrompt(packed(ids), images=(image,)), arrival=0, now=0.0)
    prompt, stream = (Request(GenerateParams(name), tokenized("a" * 40), arrival=0, now=0.0) for name in "ps")
    stream.add_token(ord("b"), 0.0)
    pending, served = {stream: 1, looking: 10, prompt: 40}, []
    for now in (0.0, 0.5, 1.0, 1.5):
        turn = turns.next(pending, now)
        served.append([each.id for each in turn.requests])
        turns.commit(turn)
    assert served == [["image"], ["s"], ["image"], ["s"]]
