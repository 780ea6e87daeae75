"""Duplicate cells: which sequence takes the cells of which when two or three computed the same tokens."""

from __future__ import annotations

from llamaslot.base.kv_ops import Share
from llamaslot.kvcache.duplicates import DuplicateCells
from llamaslot.kvcache.radix_tree import RadixTree

PATH = bytes(4 * 10)


def held_by(*seqs: int) -> tuple[RadixTree, DuplicateCells]:
    """Ten tokens that all of these hold."""
    tree = RadixTree()
    for seq in seqs:
        tree.hold(seq, "")
        tree.extend(seq, PATH)
    return tree, DuplicateCells(tree)


def test_the_later_sequence_takes_the_cells_of_the_earlier_one() -> None:
    _, duplicates = held_by(0, 1)
    duplicates.add(1, 2, 5)
    duplicates.add(1, 5, 6)
    assert duplicates.n_cells == 4
    duplicates.truncate(1, 5)
    assert duplicates.n_cells == 3
    assert duplicates.resolve() == [Share(0, 1, 2, 5)]
    assert duplicates.n_cells == 0
    assert duplicates.resolve() == []


def test_one_of_two_duplicates_is_shared_where_the_original_is_gone() -> None:
    """1 has cells of its own in [0, 6), 2 in [4, 10); where both have, those of 2 are freed."""
    tree, duplicates = held_by(0, 1, 2)
    duplicates.add(1, 0, 6)
    duplicates.add(2, 4, 10)
    tree.release(0)
    assert duplicates.resolve() == [Share(2, 1, 0, 4), Share(1, 2, 4, 10)]


def test_tokens_that_no_other_sequence_holds_any_more_are_no_duplicates() -> None:
    tree, duplicates = held_by(0, 1)
    duplicates.add(1, 0, 10)
    tree.release(0)
    assert duplicates.resolve() == []


def test_a_copy_of_a_duplicate_takes_the_cells_of_the_original_too() -> None:
    """Otherwise the cells of the duplicate would stay, and the tree would not count them."""
    _, duplicates = held_by(0, 1, 2)
    duplicates.add(1, 2, 6)
    duplicates.copy(1, 2, 0, 4)
    duplicates.copy(0, 2, 4, 10)
    assert duplicates.resolve() == [Share(0, 1, 2, 4), Share(0, 1, 4, 6), Share(0, 2, 2, 4)]
