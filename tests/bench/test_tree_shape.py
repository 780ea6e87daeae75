"""The tree of `bench tree` has the shape that it says, and its measures do what they say. Never timed."""

from __future__ import annotations

from bench.tree import Shape, build, evict_time, insert_times, match_times
from llamaslot.base.tokens import WIDTH
from tests.conftest import LONG
from tests.pool import tokens_of

SMALL = Shape(n_tokens=2_000, n_leaves=50, n_path_nodes=16, n_path_tokens=120, n_node_tokens=5)


def test_the_shape_is_met_exactly() -> None:
    shape = Shape() if LONG else Shape(n_tokens=200_000, n_leaves=2_000)
    tree = build(shape).tree
    nodes = list(tree.nodes())
    leaves = [node for node in nodes if not node.children]
    depths = {id(leaf): sum(1 for _ in leaf.path_to_root()) for leaf in leaves}
    deepest = max(leaves, key=lambda leaf: leaf.end)
    assert (tree.n_tokens, len(leaves)) == (shape.n_tokens, shape.n_leaves)
    assert sum(node.n_tokens for node in nodes) == tree.n_tokens
    assert max(depths.values()) == depths[id(deepest)] == 256
    assert deepest.end == 8_000
    assert sum(leaf.end == 8_000 for leaf in leaves) == shape.n_trunks


def test_the_tree_is_sound_and_the_same_again() -> None:
    built, again = build(SMALL), build(SMALL)
    built.tree.check()
    assert (built.paths, built.order) == (again.paths, again.order)
    assert [tokens_of(built.tree, seq) for seq in built.order] == [
        tokens_of(again.tree, seq) for seq in again.order
    ]
    assert len(set(built.paths)) == SMALL.n_trunks
    assert {len(path) // WIDTH for path in built.paths} == {SMALL.n_path_tokens}


def test_measuring_leaves_the_tree_as_it_was_but_for_what_is_evicted() -> None:
    built = build(SMALL)
    leaves = sum(not node.children for node in built.tree.nodes())
    match_times(built)
    insert_times(built, SMALL)
    built.tree.check()
    assert (built.tree.n_tokens, leaves) == (SMALL.n_tokens, SMALL.n_leaves)
    evict_time(built, 30)
    built.tree.check()
    assert sum(not node.children for node in built.tree.nodes()) == SMALL.n_leaves - 30
    assert [seq for seq in built.order if built.tree.end_node(seq) is not None] == built.order[30:]
