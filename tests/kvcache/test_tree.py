"""The radix tree against an oracle that knows no tree: what each sequence holds, as a tuple of tokens."""

from __future__ import annotations

import os

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llamaslot.base.tokens import packed
from llamaslot.kvcache.tree import Match, Tree

SEQS = 8
SPACES = st.sampled_from(["", "salt"])
SOME = st.lists(st.integers(1, 3), max_size=8).map(tuple)
Path = tuple[int, ...]


def run_of(tokens: Path) -> bytes:
    return packed(np.array(tokens, dtype=np.int32))


def common(a: Path, b: Path) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class TreeMachine(RuleBasedStateMachine):
    """Sequences come, grow, shrink and go; after every rule the tree says what the oracle says."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree()
        self.held: dict[int, tuple[str, Path]] = {}
        self.pinned: set[int] = set()
        self.now = 0

    def prefixes(self, seqs: set[int] | None = None) -> set[tuple[str, Path]]:
        """Every prefix that is held: one for each cell."""
        return {
            (space, path[: n + 1])
            for seq, (space, path) in self.held.items()
            if seqs is None or seq in seqs
            for n in range(len(path))
        }

    def matching(self, space: str, tokens: Path) -> int:
        known = self.prefixes()
        return next(n for n in range(len(tokens), -1, -1) if n == 0 or (space, tokens[:n]) in known)

    def pick(self, index: int, seqs: set[int]) -> int:
        return sorted(seqs)[index % len(seqs)]

    @precondition(lambda self: len(self.held) < SEQS)
    @rule(index=st.integers(0, 7), space=SPACES, tokens=SOME, less=st.integers(0, 3), hits=st.integers(0, 1))
    def hold(self, index: int, space: str, tokens: Path, less: int, hits: int) -> None:
        seq = self.pick(index, set(range(SEQS)) - self.held.keys())
        n = self.matching(space, tokens)
        found = self.tree.match(space, run_of(tokens))
        assert found.n == n
        shared = {s: common(path, tokens[:n]) if held == space else 0 for s, (held, path) in self.held.items()}
        assert self.tree.shared(found, range(SEQS)) == dict.fromkeys(range(SEQS), 0) | shared
        assert self.tree.n_idle(found) == n - max((shared[s] for s in self.pinned), default=0)
        if n:
            assert sorted(self.tree.holders(found.node)) == sorted(s for s in shared if shared[s] == n)
        shorter = self.tree.match(space, run_of(tokens[: max(0, n - less)]))
        self.tree.hold(seq, shorter)
        self.now += 1
        self.tree.touch(self.tree.tip(seq), self.now, hits)
        self.held[seq] = (space, tokens[: shorter.n])

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 7), tokens=SOME)
    def extend(self, index: int, tokens: Path) -> None:
        seq = self.pick(index, set(self.held))
        space, path = self.held[seq]
        n_known = max(0, self.matching(space, path + tokens) - len(path))
        assert self.tree.extend(seq, run_of(tokens)) == n_known
        self.held[seq] = (space, path + tokens)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 7), keep=st.integers(0, 8))
    def truncate(self, index: int, keep: int) -> None:
        seq = self.pick(index, set(self.held))
        space, path = self.held[seq]
        self.tree.truncate(seq, keep)
        self.held[seq] = (space, path[:keep])

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 7))
    def release(self, index: int) -> None:
        seq = self.pick(index, set(self.held))
        self.tree.release(seq)
        del self.held[seq]
        self.pinned.discard(seq)

    @precondition(lambda self: self.held.keys() - self.pinned)
    @rule(index=st.integers(0, 7))
    def pin(self, index: int) -> None:
        seq = self.pick(index, set(self.held) - self.pinned)
        self.tree.pin(seq)
        self.pinned.add(seq)

    @precondition(lambda self: self.pinned)
    @rule(index=st.integers(0, 7))
    def unpin(self, index: int) -> None:
        seq = self.pick(index, self.pinned)
        self.now += 1
        self.tree.unpin(seq, self.now)
        self.pinned.discard(seq)

    @rule(n_cells=st.integers(0, 30))
    def evict(self, n_cells: int) -> None:
        before, safe = self.prefixes(), self.prefixes(self.pinned)
        plan = self.tree.plan_eviction(n_cells)
        assert plan == self.tree.plan_eviction(n_cells)
        self.tree.evict(plan)
        for seq, keep in plan.keeps.items():
            space, path = self.held[seq]
            assert keep < len(path)
            assert seq not in self.pinned
            if keep:
                self.held[seq] = (space, path[:keep])
            else:
                del self.held[seq]
        after = self.prefixes()
        assert safe <= after
        assert len(before) - len(after) == plan.n_cells == min(n_cells, len(before - safe))

    @invariant()
    def the_tree_says_what_the_oracle_says(self) -> None:
        self.tree.check()
        assert self.tree.n_tokens == len(self.prefixes())
        assert self.tree.n_pinned_tokens == len(self.prefixes(self.pinned))
        for seq, (_, path) in self.held.items():
            assert tuple(self.tree.tokens(seq).tolist()) == path
            assert self.tree.length(seq) == len(path)
            assert self.tree.is_pinned(seq) == (seq in self.pinned)
            others = self.prefixes(set(self.held) - {seq})
            assert self.tree.is_covered(seq) == (not path or self.held[seq] in others)


TreeMachine.TestCase.settings = settings(
    max_examples=2000 if os.environ.get("LLAMASLOT_TESTS") == "long" else 100, stateful_step_count=50, deadline=None
)
TestTree = TreeMachine.TestCase


def test_a_lookup_changes_nothing() -> None:
    tree = Tree()
    tree.hold(0, tree.match("", b""))
    tree.extend(0, run_of((1, 2, 3, 4)))
    before = [(bytes(node.run), node.hits, node.last_used) for node in tree.nodes()]
    assert tree.match("", run_of((1, 2, 9))) == Match(tree.tip(0), 2)
    assert [(bytes(node.run), node.hits, node.last_used) for node in tree.nodes()] == before


def test_the_least_recently_used_leaf_goes_first_and_ancestors_last() -> None:
    tree = Tree()
    for seq, tail in enumerate(((5, 5), (6, 6), (7, 7))):
        tree.hold(seq, tree.match("", run_of((1, 2, 3))))
        tree.extend(seq, run_of(((1, 2, 3) if seq == 0 else ()) + tail))
    for now, seq in enumerate((1, 0, 2), start=1):
        tree.touch(tree.tip(seq), now)
    order = []
    for n_cells in range(1, 10):
        order.append(tree.plan_eviction(n_cells).keeps)
    assert order[0] == {1: 4}
    assert order[1] == {1: 0}
    assert order[3] == {1: 0, 0: 0}
    assert order[5] == {1: 0, 0: 0, 2: 3}
    assert order[6] == {1: 0, 0: 0, 2: 2}
    assert order[8] == {1: 0, 0: 0, 2: 0}


def test_what_was_used_since_a_given_time_is_spared() -> None:
    tree = Tree()
    for seq, word in enumerate((b"aab", b"aac", b"d")):
        tree.hold(seq, tree.match("", b""))
        tree.extend(seq, run_of(tuple(word)))
        tree.touch(tree.match("", run_of(tuple(word))).node, now=seq + 1)
    assert [tree.plan_eviction(9, before).keeps for before in (1, 2, 3, 4)] == [
        {}, {0: 0}, {0: 0, 1: 0}, {0: 0, 1: 0, 2: 0}
    ]  # fmt: skip
    assert tree.plan_eviction(2, before=4).keeps == {0: 0, 1: 2}


def test_a_head_that_was_used_later_than_what_branches_off_it_is_spared() -> None:
    tree = Tree()
    for seq, word in enumerate((b"aab", b"aa")):
        tree.hold(seq, tree.match("", b""))
        tree.extend(seq, run_of(tuple(word)))
        tree.touch(tree.match("", run_of(tuple(word))).node, now=1 + 4 * seq)
    assert tree.plan_eviction(9, before=5).keeps == {0: 0}
    assert tree.plan_eviction(9, before=6).keeps == {0: 0, 1: 0}


def test_the_last_to_hold_a_path_goes_on_holding_it() -> None:
    tree = Tree()
    for seq, tail in enumerate(((5, 5), (6, 6))):
        tree.hold(seq, tree.match("", run_of((1, 2, 3))))
        tree.extend(seq, run_of(((1, 2, 3) if seq == 0 else ()) + tail))
        tree.touch(tree.tip(seq), seq)
    plans = [tree.plan_eviction(n_cells).keeps for n_cells in (1, 2, 4, 6, 7)]
    assert plans == [{0: 4}, {0: 0}, {0: 0, 1: 3}, {0: 0, 1: 1}, {0: 0, 1: 0}]


def test_a_namespace_without_kv_leaves_nothing_behind() -> None:
    tree = Tree()
    first, second = tree.match("salt", b""), tree.match("salt", b"")
    tree.hold(0, first)
    tree.hold(1, second)
    assert tree.extend(0, run_of((1, 2))) == 0
    assert tree.extend(1, run_of((1, 2, 3))) == 2
    assert tree.sequences("salt") == [0, 1]
    tree.release(0)
    tree.release(1)
    assert not tree._roots
    tree.check()


def test_a_joined_node_was_used_when_either_part_was() -> None:
    tree = Tree()
    tree.hold(0, tree.match("", b""))
    tree.extend(0, run_of((1, 2, 3, 4)))
    tree.hold(1, tree.match("", run_of((1, 2))))
    tree.hold(2, tree.match("", b""))
    tree.extend(2, run_of((9, 9)))
    tree.touch(tree.tip(0), 1)
    tree.touch(tree.tip(2), 2)
    tree.touch(tree.tip(1), 3)
    tree.release(1)
    assert tree.plan_eviction(1).keeps == {2: 1}


def test_what_is_offered_again_and_again_is_kept_once() -> None:
    tree = Tree()
    tree.hold(0, tree.match("", b""))
    tree.extend(0, run_of((1, 2, 3)))
    for _ in range(5000):
        tree.hold(1, tree.match("", run_of((1, 2, 3))))
        tree.release(1)
    assert len(tree._candidates._heap) < 200


def test_the_last_fork_of_a_path_is_where_another_one_goes_on_ends_or_runs() -> None:
    def fork(*tokens: int) -> int:
        return tree.last_fork(tree.match("", run_of(tokens)))

    tree = Tree()
    for seq, tokens in enumerate(((1, 2), (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 9))):
        tree.hold(seq, tree.match("", b""))
        tree.extend(seq, run_of(tokens))
    assert fork(1, 2, 3, 4, 5, 6) == fork(1, 2, 3, 4, 9) == 4
    assert fork(1, 2, 3) == 3, "others go on behind it"
    tree.release(2)
    assert fork(1, 2, 3, 4, 5, 6) == 2, "another path ends there"
    tree.release(0)
    assert fork(1, 2, 3, 4, 5, 6) == 0
    tree.pin(1)
    assert fork(1, 2, 3, 4, 5, 6) == 6, "it runs"
    assert fork(7) == 0
