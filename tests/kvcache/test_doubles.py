"""Doubles: who takes whose cells when two or three sequences computed the same."""

from __future__ import annotations

from llamaslot.kvcache.doubles import Doubles
from llamaslot.kvcache.tree import Tree

from llamaslot.base.kv_ops import Share

PATH = bytes(4 * 10)


def held_by(*seqs: int) -> tuple[Tree, Doubles]:
    """Ten tokens that all of these hold."""
    tree = Tree()
    for seq in seqs:
        tree.hold(seq, tree.match("", b""))
        tree.extend(seq, PATH)
    return tree, Doubles(tree)


def test_the_later_sequence_takes_the_cells_of_another() -> None:
    _, doubles = held_by(0, 1)
    doubles.note(1, 2, 5)
    doubles.note(1, 5, 6)
    assert doubles.n_cells == 4
    doubles.cut(1, 5)
    assert doubles.n_cells == 3
    assert doubles.settle() == [Share(0, 1, 2, 5)]
    assert doubles.n_cells == 0
    assert doubles.settle() == []


def test_of_two_that_computed_the_same_one_gives_its_cells_where_the_first_is_gone() -> None:
    """1 has cells of its own in [0, 6), 2 in [4, 10); where both have, those of 2 are given up."""
    tree, doubles = held_by(0, 1, 2)
    doubles.note(1, 0, 6)
    doubles.note(2, 4, 10)
    tree.release(0)
    assert doubles.settle() == [Share(2, 1, 0, 4), Share(1, 2, 4, 10)]


def test_what_nobody_else_holds_any_more_is_no_double() -> None:
    tree, doubles = held_by(0, 1)
    doubles.note(1, 0, 10)
    tree.release(0)
    assert doubles.settle() == []
