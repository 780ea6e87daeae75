"""The ghost list recognizes evicted prefixes by their first whole block."""

from __future__ import annotations

import numpy as np
import pytest

from llamaslot.base.tokens import packed
from llamaslot.kvcache import match as match_module
from llamaslot.kvcache.match import BLOCK_TOKENS, GhostList


def run(*lengths: tuple[int, int]) -> bytes:
    """So many tokens of each kind, one kind after another."""
    return packed(np.concatenate([np.full(n, token, dtype=np.int32) for token, n in lengths]))


def test_a_block_counts_once_all_of_it_was_computed() -> None:
    ghosts = GhostList()
    ghosts.add("", run((1, BLOCK_TOKENS + 10)), 0)
    assert ghosts.continues("", run((1, BLOCK_TOKENS)), 0)
    assert ghosts.continues("", run((1, 3 * BLOCK_TOKENS)), BLOCK_TOKENS - 1)
    assert not ghosts.continues("", run((1, 3 * BLOCK_TOKENS)), BLOCK_TOKENS)
    assert not ghosts.continues("", run((1, BLOCK_TOKENS - 1)), 0), "it does not reach a whole block"


def test_a_block_behind_another_prefix_or_of_another_namespace_is_another_one() -> None:
    ghosts = GhostList()
    ghosts.add("s", run((1, BLOCK_TOKENS), (2, BLOCK_TOKENS)), 0)
    assert ghosts.continues("s", run((1, BLOCK_TOKENS), (2, BLOCK_TOKENS)), BLOCK_TOKENS)
    assert not ghosts.continues("s", run((3, BLOCK_TOKENS), (2, BLOCK_TOKENS)), BLOCK_TOKENS)
    assert not ghosts.continues("", run((1, BLOCK_TOKENS), (2, BLOCK_TOKENS)), BLOCK_TOKENS)


def test_only_blocks_behind_the_start_are_recorded() -> None:
    ghosts = GhostList()
    ghosts.add("", run((1, 3 * BLOCK_TOKENS)), BLOCK_TOKENS)
    assert not ghosts.continues("", run((1, 3 * BLOCK_TOKENS)), 0)
    assert ghosts.continues("", run((1, 3 * BLOCK_TOKENS)), BLOCK_TOKENS)


def test_the_oldest_blocks_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match_module, "MAX_BLOCKS", 2)
    ghosts = GhostList()
    ghosts.add("", run((1, BLOCK_TOKENS)), 0)
    ghosts.add("", run((2, BLOCK_TOKENS)), 0)
    ghosts.add("", run((1, BLOCK_TOKENS)), 0)
    ghosts.add("", run((3, BLOCK_TOKENS)), 0)
    assert ghosts.continues("", run((1, BLOCK_TOKENS)), 0)
    assert not ghosts.continues("", run((2, BLOCK_TOKENS)), 0)


def test_of_what_was_computed_only_whole_blocks_count() -> None:
    ghosts = GhostList()
    ghosts.add("", packed(np.arange(3 * BLOCK_TOKENS + 5, dtype=np.int32)), 0)
    longer = packed(np.arange(9 * BLOCK_TOKENS, dtype=np.int32))
    for n in (0, 7, 2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS - 1):
        assert ghosts.continues("", longer, n)
        assert not ghosts.continues("salt", longer, n)
    for n in (3 * BLOCK_TOKENS, 3 * BLOCK_TOKENS + 4):
        assert not ghosts.continues("", longer, n)
