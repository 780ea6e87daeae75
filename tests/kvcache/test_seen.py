"""What was computed once is known again by its first whole block."""

from __future__ import annotations

import numpy as np
from llamaslot.kvcache.seen import BLOCK, Seen

from llamaslot.base.tokens import packed


def run(*lengths: tuple[int, int]) -> bytes:
    """So many tokens of a kind, one kind after another."""
    return packed(np.concatenate([np.full(n, token, dtype=np.int32) for token, n in lengths]))


def test_a_block_counts_once_all_of_it_was_computed() -> None:
    seen = Seen()
    seen.note("", run((1, BLOCK + 10)), 0)
    assert seen.continues("", run((1, BLOCK)), 0)
    assert seen.continues("", run((1, 3 * BLOCK)), BLOCK - 1)
    assert not seen.continues("", run((1, 3 * BLOCK)), BLOCK)
    assert not seen.continues("", run((1, BLOCK - 1)), 0), "it does not reach a whole block"


def test_another_front_or_namespace_is_another_block() -> None:
    seen = Seen()
    seen.note("s", run((1, BLOCK), (2, BLOCK)), 0)
    assert seen.continues("s", run((1, BLOCK), (2, BLOCK)), BLOCK)
    assert not seen.continues("s", run((3, BLOCK), (2, BLOCK)), BLOCK)
    assert not seen.continues("", run((1, BLOCK), (2, BLOCK)), BLOCK)


def test_only_what_lies_behind_the_start_is_noted() -> None:
    seen = Seen()
    seen.note("", run((1, 3 * BLOCK)), BLOCK)
    assert not seen.continues("", run((1, 3 * BLOCK)), 0)
    assert seen.continues("", run((1, 3 * BLOCK)), BLOCK)


def test_the_oldest_blocks_are_forgotten() -> None:
    seen = Seen(most=2)
    seen.note("", run((1, BLOCK)), 0)
    seen.note("", run((2, BLOCK)), 0)
    seen.note("", run((1, BLOCK)), 0)
    seen.note("", run((3, BLOCK)), 0)
    assert seen.continues("", run((1, BLOCK)), 0)
    assert not seen.continues("", run((2, BLOCK)), 0)
