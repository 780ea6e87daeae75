"""The radix tree against an oracle without a tree: the tokens of each sequence and each segment, as tuples."""

from __future__ import annotations

import os
from itertools import count

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llamaslot.base.tokens import packed, unpacked
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.eviction import EvictionPlan
from llamaslot.kvcache.match import Match
from llamaslot.kvcache.nodes import Node, Segment
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.sequences import Sequences
from tests.pool import tokens_of

SEQS = 8
NAMESPACES = st.sampled_from(["", "salt"])
SOME = st.lists(st.integers(1, 3), max_size=8).map(tuple)
Path = tuple[int, ...]


def run_of(tokens: Path) -> bytes:
    return packed(np.array(tokens, dtype=np.int32))


def common(a: Path, b: Path) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def evict(tree: RadixTree, plan: EvictionPlan) -> None:
    """Carry out a plan: heirs first, so that no node loses its last holder before its heir ends there."""
    for seq, keep in plan.keeps.items():
        if keep:
            tree.truncate(seq, keep)
    for seq, keep in plan.keeps.items():
        if not keep:
            tree.release(seq)


def end_of(tree: RadixTree, seq: int) -> Node:
    node = tree.end_node(seq)
    assert node is not None
    return node


class TreeMachine(RuleBasedStateMachine):
    """Sequences and segments come, change and go; after every rule the tree says what the oracle says."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.sequences = Sequences(self.tree, CacheSettings(n_slots=SEQS, n_cells=0, n_seqs=SEQS, gap_ms=0.0))
        self.held: dict[int, tuple[str, Path]] = {}
        self.segments: dict[Segment, tuple[str, Path]] = {}
        """Segments with all tokens up to their end."""
        self.pinned: set[int] = set()
        self.now = 0
        self.numbers = count()
        self.matches: list[Match] = []
        """Earlier lookups: each stays right until the version of the tree changes."""

    # --- the oracle ---

    def prefixes(self, seqs: set[int] | None = None) -> set[tuple[str, Path]]:
        """Every prefix that is held: one for each cell."""
        return {
            (namespace, path[: n + 1])
            for seq, (namespace, path) in self.held.items()
            if seqs is None or seq in seqs
            for n in range(len(path))
        }

    def offloaded(self) -> dict[tuple[str, Path], Segment]:
        """For every prefix the segment that has its last token."""
        return {
            (namespace, path[: n + 1]): segment
            for segment, (namespace, path) in self.segments.items()
            for n in range(segment.start, segment.end)
        }

    def in_tree(self) -> set[tuple[str, Path]]:
        """Every prefix that is held or offloaded, or above such a one."""
        return self.prefixes() | self.below_segments()

    def below_segments(self) -> set[tuple[str, Path]]:
        """Every prefix that is offloaded, or above such a one."""
        return {(ns, path[: n + 1]) for ns, path in self.segments.values() for n in range(len(path))}

    def longest(self, namespace: str, tokens: Path, prefixes: set[tuple[str, Path]]) -> int:
        return next(n for n in range(len(tokens), -1, -1) if n == 0 or (namespace, tokens[:n]) in prefixes)

    def pick(self, index: int, seqs: set[int]) -> int:
        return sorted(seqs)[index % len(seqs)]

    # --- sequences ---

    @precondition(lambda self: len(self.held) < SEQS)
    @rule(
        index=st.integers(0, 7), namespace=NAMESPACES, tokens=SOME, less=st.integers(0, 3), hits=st.integers(0, 1)
    )
    def hold(self, index: int, namespace: str, tokens: Path, less: int, hits: int) -> None:
        seq = self.pick(index, set(range(SEQS)) - self.held.keys())
        n = max(0, self.longest(namespace, tokens, self.prefixes()) - less)
        shorter = self.tree.match(namespace, run_of(tokens[:n]))
        assert shorter.n_resident == n
        self.tree.hold(seq, namespace, shorter.resident_end, n)
        self.now += 1
        self.tree.touch(end_of(self.tree, seq), self.now, hits)
        self.held[seq] = (namespace, tokens[:n])

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 7), tokens=SOME)
    def extend(self, index: int, tokens: Path) -> None:
        seq = self.pick(index, set(self.held))
        namespace, path = self.held[seq]
        n_held = max(0, self.longest(namespace, path + tokens, self.prefixes()) - len(path))
        assert self.tree.extend(seq, run_of(tokens)) == n_held
        self.held[seq] = (namespace, path + tokens)

    @rule(namespace=NAMESPACES, last=SOME.filter(len), n_least=st.integers(1, 4), n=st.integers(1, 4))
    def search(self, namespace: str, last: Path, n_least: int, n: int) -> None:
        """Of all texts, one that has the tokens is found, with as many of them as it has."""
        n_least = min(n_least, len(last))
        n_matched, follows = self.tree.search(namespace, run_of(last), n_least, n)
        paths = {path for each, path in self.in_tree() if each == namespace}
        places = {
            (common(path[at - 1 :: -1], last[::-1]), path[at : at + n])
            for path in paths
            for at in range(1, len(path))
            if len(path[at:]) == n or not any(len(each) > len(path) and each[: len(path)] == path for each in paths)
        }
        found = {(n_same, text) for n_same, text in places if n_same >= n_least}
        assert (n_matched, tuple(unpacked(follows).tolist())) in (found or {(0, ())})

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 7), keep=st.integers(0, 8))
    def truncate(self, index: int, keep: int) -> None:
        seq = self.pick(index, set(self.held))
        namespace, path = self.held[seq]
        self.tree.truncate(seq, keep)
        self.held[seq] = (namespace, path[:keep])

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

    @rule(n_cells=st.one_of(st.integers(1, 4), st.integers(0, 30)))
    def evict(self, n_cells: int) -> None:
        before, safe = self.prefixes(), self.prefixes(self.pinned)
        used = {each: self.last_used(*each) for each in before}
        plan = self.tree.eviction.plan(n_cells)
        assert plan == self.tree.eviction.plan(n_cells)
        evicted = [
            (self.held[seq][0], self.held[seq][1][: n + 1])
            for seq, start, end in plan.evicted
            for n in range(start, end)
        ]
        evict(self.tree, plan)
        for seq, keep in plan.keeps.items():
            namespace, path = self.held[seq]
            assert keep < len(path)
            assert seq not in self.pinned
            if keep:
                self.held[seq] = (namespace, path[:keep])
            else:
                del self.held[seq]
        after = self.prefixes()
        assert safe <= after
        assert len(before) - len(after) == plan.n_cells == min(n_cells, len(before - safe))
        assert len(evicted) == plan.n_cells
        assert set(evicted) == before - after
        left = [used[each] for each in after - safe]
        assert all(used[each] <= min(left, default=used[each]) for each in evicted), "not in the order of last use"

    def last_used(self, namespace: str, path: Path) -> int:
        return self.tree.match(namespace, run_of(path)).matched_end.last_used

    # --- segments ---

    @rule(
        namespace=NAMESPACES, origin=st.integers(0, 20), keep=st.integers(0, 12), tokens=SOME, n=st.integers(1, 6)
    )
    def attach(self, namespace: str, origin: int, keep: int, tokens: Path, n: int) -> None:
        """Offload the last `n` tokens of a path that begins like something in the tree."""
        tracked = [path for ns, path in (*self.held.values(), *self.segments.values()) if ns == namespace] or [()]
        path = (tracked[origin % len(tracked)][:keep] + tokens)[:14]
        if not path:
            return
        start = max(0, len(path) - n)
        old = {seg for (ns, p), seg in self.offloaded().items() if ns == namespace and p == path[: len(p)]}
        old = {each for each in old if each.end > start}
        if any(each.start < start or self.segments[each][1] != path[: each.end] for each in old):
            return
        segment = Segment(next(self.numbers), start, len(path), 1)
        node = self.tree.insert(namespace, run_of(path))
        replaced = self.tree.attach(segment, node)
        assert replaced == sorted(old, key=lambda each: each.start)
        for each in replaced:
            assert not each.nodes
            self.tree.detach(each)
            del self.segments[each]
        self.segments[segment] = (namespace, path)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 7), start=st.integers(0, 10), n=st.integers(1, 6))
    def attach_to_what_is_resident(self, index: int, start: int, n: int) -> None:
        """Offload a range in the middle of what a sequence holds."""
        seq = self.pick(index, set(self.held))
        namespace, path = self.held[seq]
        path = path[: start + n]
        taken = self.offloaded()
        if start >= len(path) or any((namespace, path[: i + 1]) in taken for i in range(start, len(path))):
            return
        segment = Segment(next(self.numbers), start, len(path), 1)
        assert self.tree.attach(segment, end_of(self.tree, seq)) == []
        self.segments[segment] = (namespace, path)

    @precondition(lambda self: self.segments)
    @rule(index=st.integers(0, 20))
    def detach(self, index: int) -> None:
        segment = list(self.segments)[index % len(self.segments)]
        self.tree.detach(segment)
        assert not segment.nodes
        del self.segments[segment]

    # --- lookups ---

    @rule(namespace=NAMESPACES, origin=st.integers(0, 20), keep=st.integers(0, 12), tokens=SOME)
    def match(self, namespace: str, origin: int, keep: int, tokens: Path) -> None:
        tracked = [path for ns, path in (*self.held.values(), *self.segments.values()) if ns == namespace] or [()]
        tokens = tracked[origin % len(tracked)][:keep] + tokens
        match = self.tree.match(namespace, run_of(tokens))
        self.matches.append(match)
        n, n_matched = (self.longest(namespace, tokens, each) for each in (self.prefixes(), self.in_tree()))
        assert (match.n_resident, match.n_cached, match.n_matched) == (n, n, n_matched)
        shared = {s: common(path, tokens[:n]) if held == namespace else 0 for s, (held, path) in self.held.items()}
        assert self.sequences.held(match, range(SEQS)) == dict.fromkeys(range(SEQS), 0) | shared
        assert match.n_idle == n - max((shared[s] for s in self.pinned), default=0)
        if n:
            assert sorted(match.resident_end.holders()) == sorted(s for s in shared if shared[s] == n)
        taken = self.offloaded()
        covered = [taken.get((namespace, tokens[: i + 1])) for i in range(n_matched)]
        assert match.segments == list(dict.fromkeys(each for each in covered if each is not None))
        found = [(part.segment, i) for part in match.parts for i in range(part.start, part.end)]
        has_gap = next((i for i in range(n, n_matched) if covered[i] is None), n_matched)
        assert found == [(covered[i], i) for i in range(n, has_gap)]
        assert len({part.segment for part in match.parts}) == len(match.parts)
        assert match.last_fork() == self.last_fork(namespace, tokens[:n_matched], n)
        everything = self.in_tree()
        for i in range(len(tokens) + 1):
            others = {p[i] for ns, p in everything if ns == namespace and len(p) == i + 1 and p[:i] == tokens[:i]}
            assert match.diverges_at(i) == (i <= n_matched and bool(others - set(tokens[i : i + 1]))), i

    def last_fork(self, namespace: str, path: Path, n_resident: int) -> int:
        prefixes, pinned = self.in_tree(), self.prefixes(self.pinned)
        ends = {path for ns, path in self.held.values() if ns == namespace}
        for n in range(len(path), 0, -1):
            next_token = {p[n] for ns, p in prefixes if ns == namespace and len(p) == n + 1 and p[:n] == path[:n]}
            if next_token - set(path[n : n + 1]) or (namespace, path[:n]) in pinned:
                return n
            if n < len(path) and n != n_resident and path[:n] in ends:
                return n
        return 0

    # --- what must hold ---

    @invariant()
    def the_tree_says_what_the_oracle_says(self) -> None:
        assert self.tree.check() == set(self.segments)
        assert self.tree.n_tokens == len(self.prefixes())
        assert self.tree.n_pinned_tokens == len(self.prefixes(self.pinned))
        assert sum(node.n_tokens for node in self.tree.nodes()) == len(self.in_tree())
        for seq, (_, path) in self.held.items():
            assert tuple(tokens_of(self.tree, seq)) == path
            assert self.tree.length(seq) == len(path)
            assert self.tree.is_pinned(seq) == (seq in self.pinned)
            others = self.prefixes(set(self.held) - {seq})
            assert end_of(self.tree, seq).is_shared == (not path or self.held[seq] in others)

    @invariant()
    def segments_know_their_neighbours(self) -> None:
        taken = self.offloaded()
        for segment, (namespace, path) in self.segments.items():
            assert (segment.namespace, segment.prefix) == (namespace, run_of(path))
            assert segment.parent is taken.get((namespace, path[: segment.start]))
            above = [taken.get((namespace, path[: i + 1])) for i in range(len(path))]
            assert segment.path_from_root == list(dict.fromkeys(each for each in above if each is not None))
            others = [
                (each, other[: each.start])
                for each, (ns, other) in self.segments.items()
                if ns == namespace and each is not segment and common(path, other) > segment.start
            ]
            assert set(segment.children) == {
                each for each, front in others if taken.get((namespace, front)) is segment
            }
            assert segment.is_end_of_path == (not others)

    @invariant()
    def a_match_is_right_until_the_version_changes(self) -> None:
        self.matches = [each for each in self.matches if each.version == self.tree.version][-20:]
        for each in self.matches:
            again = self.tree.match(each.namespace, each.tokens)
            if each.namespace in self.tree._roots:
                assert again == each
            assert (again.n_resident, again.n_matched, again.parts) == (each.n_resident, each.n_matched, each.parts)


TreeMachine.TestCase.settings = settings(
    max_examples=2000 if os.environ.get("LLAMASLOT_TESTS") == "long" else 100, stateful_step_count=50, deadline=None
)
TestTree = TreeMachine.TestCase


def holding(tree: RadixTree, *paths: Path, first: int = 0) -> None:
    """Assign these paths to sequences from `first` on."""
    for seq, path in enumerate(paths, first):
        tree.hold(seq, "")
        tree.extend(seq, run_of(path))


def runs_of(tree: RadixTree) -> list[str]:
    """All nodes as text: position and tokens, `*` for resident ones, and the number of their segment."""
    found = []
    for node in tree.nodes():
        tokens = "".join(map(str, np.frombuffer(node.run, "<i4")))
        mark = "*" if node.is_resident else ""
        found.append(f"{node.start}:{tokens}{mark}" + (f" in {node.segment.number}" if node.segment else ""))
    return sorted(found)


def offload(tree: RadixTree, number: int, path: Path, start: int) -> Segment:
    segment = Segment(number, start, len(path), 1)
    tree.attach(segment, tree.insert("", run_of(path)))
    return segment


def test_a_lookup_changes_nothing() -> None:
    tree = RadixTree()
    holding(tree, (1, 2, 3, 4))
    version = tree.version
    before = [(bytes(node.run), node.hits, node.last_used) for node in tree.nodes()]
    match = tree.match("", run_of((1, 2, 9)))
    assert (match.resident_end, match.n_resident) == (tree.end_node(0), 2)
    assert [(bytes(node.run), node.hits, node.last_used) for node in tree.nodes()] == before
    assert tree.version == version
    assert tree.match("unknown", run_of((1, 2))).n_matched == 0
    assert list(tree._roots) == [""], "a lookup added a namespace"


def test_the_least_recently_used_leaf_goes_first_and_ancestors_last() -> None:
    tree = RadixTree()
    holding(tree, (1, 2, 3, 5, 5), (1, 2, 3, 6, 6), (1, 2, 3, 7, 7))
    for now, seq in enumerate((1, 0, 2), start=1):
        tree.touch(end_of(tree, seq), now)
    order = [tree.eviction.plan(n_cells).keeps for n_cells in range(1, 10)]
    assert order[0] == {1: 4}
    assert order[1] == {1: 0}
    assert order[3] == {1: 0, 0: 0}
    assert order[5] == {1: 0, 0: 0, 2: 3}
    assert order[6] == {1: 0, 0: 0, 2: 2}
    assert order[8] == {1: 0, 0: 0, 2: 0}


def test_prefixes_used_since_a_given_time_are_not_evicted() -> None:
    tree = RadixTree()
    for seq, word in enumerate((b"aab", b"aac", b"d")):
        holding(tree, tuple(word), first=seq)
        tree.touch(end_of(tree, seq), now=seq + 1)
    assert [tree.eviction.plan(9, before).keeps for before in (1, 2, 3, 4)] == [
        {}, {0: 0}, {0: 0, 1: 0}, {0: 0, 1: 0, 2: 0}
    ]  # fmt: skip
    assert tree.eviction.plan(2, before=4).keeps == {0: 0, 1: 2}


def test_a_prefix_that_was_used_later_than_its_continuation_is_not_evicted_with_it() -> None:
    tree = RadixTree()
    for seq, word in enumerate((b"aab", b"aa")):
        holding(tree, tuple(word), first=seq)
        tree.touch(end_of(tree, seq), now=1 + 4 * seq)
    assert tree.eviction.plan(9, before=5).keeps == {0: 0}
    assert tree.eviction.plan(9, before=6).keeps == {0: 0, 1: 0}


def test_the_last_holder_of_a_branch_keeps_the_shared_prefix() -> None:
    tree = RadixTree()
    holding(tree, (1, 2, 3, 5, 5), (1, 2, 3, 6, 6))
    for seq in (0, 1):
        tree.touch(end_of(tree, seq), seq)
    plans = [tree.eviction.plan(n_cells).keeps for n_cells in (1, 2, 4, 6, 7)]
    assert plans == [{0: 4}, {0: 0}, {0: 0, 1: 3}, {0: 0, 1: 1}, {0: 0, 1: 0}]


def test_a_namespace_without_kv_leaves_nothing_behind() -> None:
    tree = RadixTree()
    tree.hold(0, "salt")
    tree.hold(1, "salt")
    assert tree.extend(0, run_of((1, 2))) == 0
    assert tree.extend(1, run_of((1, 2, 3))) == 2
    segment = Segment(0, 0, 2, 1)
    tree.attach(segment, end_of(tree, 0))
    tree.release(0)
    tree.release(1)
    assert list(tree._roots) == ["salt"]
    tree.detach(segment)
    assert not tree._roots
    tree.check()


def test_a_joined_node_has_the_later_use_of_its_parts() -> None:
    tree = RadixTree()
    holding(tree, (1, 2, 3, 4), (1, 2), (9, 9))
    tree.touch(end_of(tree, 0), 1)
    tree.touch(end_of(tree, 2), 2)
    tree.touch(end_of(tree, 1), 3)
    tree.release(1)
    assert tree.eviction.plan(1).keeps == {2: 1}


def test_a_leaf_that_is_offered_many_times_stays_one_entry_of_the_eviction_queue() -> None:
    tree = RadixTree()
    holding(tree, (1, 2, 3))
    for _ in range(5000):
        tree.hold(1, "", end_of(tree, 0), 3)
        tree.release(1)
    assert len(tree.eviction._heap) < 200


def test_the_last_fork_is_where_another_path_goes_on_ends_or_runs() -> None:
    def fork(*tokens: int) -> int:
        return tree.match("", run_of(tokens)).last_fork()

    tree = RadixTree()
    holding(tree, (1, 2), (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 9))
    assert fork(1, 2, 3, 4, 5, 6) == fork(1, 2, 3, 4, 9) == 4
    assert fork(1, 2, 3) == 3, "others go on behind it"
    tree.release(2)
    assert fork(1, 2, 3, 4, 5, 6) == 2, "another path ends there"
    tree.release(0)
    assert fork(1, 2, 3, 4, 5, 6) == 0
    tree.pin(1)
    assert fork(1, 2, 3, 4, 5, 6) == 6, "it runs"
    assert fork(7) == 0


def test_an_offloaded_continuation_is_a_fork_too() -> None:
    tree = RadixTree()
    holding(tree, (1, 2, 3, 4))
    offload(tree, 0, (1, 2, 9), 0)
    assert tree.match("", run_of((1, 2, 3, 4))).last_fork() == 2
    assert tree.match("", run_of((1, 2, 9))).last_fork() == 2


def test_what_eviction_left_of_a_path_is_no_fork_of_it() -> None:
    tree = RadixTree()
    offload(tree, 0, (1, 2, 3, 4), 2)
    holding(tree, (1, 2))
    assert tree.match("", run_of((1, 2, 3, 4))).last_fork() == 0
    holding(tree, (1,), first=1)
    assert tree.match("", run_of((1, 2, 3, 4))).last_fork() == 1, "another path ends there"


def test_a_path_of_several_segments_has_no_fork_between_them() -> None:
    tree = RadixTree()
    for number, end in enumerate((2, 4, 5)):
        offload(tree, number, (1, 2, 3, 4, 5)[:end], (0, 2, 4)[number])
    assert tree.match("", run_of((1, 2, 3, 4, 5))).last_fork() == 0


def test_a_segment_stays_whole_when_a_node_below_it_is_split() -> None:
    tree = RadixTree()
    segment = offload(tree, 0, (1, 2, 3, 4), 0)
    holding(tree, (1, 2, 7))
    assert runs_of(tree) == ["0:12* in 0", "2:34 in 0", "2:7*"]
    assert [node.end for node in segment.nodes] == [2, 4]
    match = tree.match("", run_of((1, 2, 3, 4)))
    assert match.n_resident == 2
    assert [(part.segment, part.start, part.end) for part in match.parts] == [(segment, 2, 4)]


def test_nodes_of_one_segment_are_joined_once_nothing_separates_them() -> None:
    tree = RadixTree()
    segment = offload(tree, 0, (1, 2, 3, 4), 0)
    holding(tree, (1, 2, 7))
    tree.release(0)
    assert runs_of(tree) == ["0:1234 in 0"]
    assert [node.end for node in segment.nodes] == [4]


def test_an_offloaded_node_becomes_resident_in_place() -> None:
    tree = RadixTree()
    segment = offload(tree, 0, (1, 2, 3), 0)
    tree.hold(0, "")
    assert tree.extend(0, run_of((1, 2, 3, 4))) == 0, "nothing of it was in the pool"
    assert runs_of(tree) == ["0:123* in 0", "3:4*"]
    assert tree.n_tokens == 4
    tree.release(0)
    assert runs_of(tree) == ["0:123 in 0"]
    assert tree.n_tokens == 0
    assert segment.nodes


def test_tokens_computed_behind_a_segment_do_not_become_a_part_of_it() -> None:
    tree = RadixTree()
    holding(tree, (1, 2))
    segment = Segment(0, 0, 2, 1)
    tree.attach(segment, end_of(tree, 0))
    tree.extend(0, run_of((3, 4)))
    assert runs_of(tree) == ["0:12* in 0", "2:34*"]
    assert (segment.end, segment.nodes[-1].end) == (2, 2)


def test_dropping_a_segment_of_resident_tokens_joins_their_nodes() -> None:
    tree = RadixTree()
    holding(tree, (1, 2, 3, 4, 5, 6))
    segment = Segment(0, 2, 4, 1)
    tree.attach(segment, end_of(tree, 0))
    assert runs_of(tree) == ["0:12*", "2:34* in 0", "4:56*"]
    tree.detach(segment)
    assert runs_of(tree) == ["0:123456*"]


def test_dropping_a_segment_keeps_the_nodes_above_those_behind_it() -> None:
    tree = RadixTree()
    first, second = offload(tree, 0, (1, 2), 0), offload(tree, 1, (1, 2, 3, 4), 2)
    tree.detach(first)
    assert runs_of(tree) == ["0:12", "2:34 in 1"]
    match = tree.match("", run_of((1, 2, 3, 4)))
    assert (match.n_resident, match.n_matched, match.parts) == (0, 4, ()), "a gap ends what can be loaded"
    tree.detach(second)
    assert runs_of(tree) == []
    assert not tree._roots


def test_a_longer_segment_replaces_those_within_its_range() -> None:
    tree = RadixTree()
    first, second = offload(tree, 0, (1, 2), 0), offload(tree, 1, (1, 2, 3), 2)
    third = Segment(2, 0, 5, 1)
    assert tree.attach(third, tree.insert("", run_of((1, 2, 3, 4, 5)))) == [first, second]
    assert runs_of(tree) == ["0:12345 in 2"]
    assert not first.nodes
    assert not second.nodes


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (((1, 2, 3, 4), 0), ((1, 2), 0)),
        (((1, 2, 3, 4), 1), ((1, 2, 3, 4, 5), 2)),
        (((1, 2, 3), 1), ((1, 2, 8, 9), 0)),
    ],
    ids=["the end would be cut off", "the start would be cut off", "a branch would be cut off"],
)
def test_no_part_of_a_segment_can_be_replaced(old: tuple[Path, int], new: tuple[Path, int]) -> None:
    tree = RadixTree()
    segment = offload(tree, 0, *old)
    with pytest.raises(AssertionError, match="has a part of"):
        offload(tree, 1, *new)
    covered = [each.number for node in tree.nodes() if (each := node.segment)]
    assert set(covered) == {0}
    assert segment.nodes


def test_evicting_an_offloaded_leaf_frees_its_cells_and_keeps_the_node() -> None:
    tree = RadixTree()
    holding(tree, (1, 2, 3, 4))
    tree.attach(Segment(0, 0, 4, 1), end_of(tree, 0))
    plan = tree.eviction.plan(4)
    assert plan.evicted == [(0, 0, 4)]
    evict(tree, plan)
    assert runs_of(tree) == ["0:1234 in 0"]
    assert tree.n_tokens == 0
    assert tree.eviction.plan(4).n_cells == 0


def test_a_node_whose_children_are_only_offloaded_can_be_evicted() -> None:
    tree = RadixTree()
    holding(tree, (1, 2))
    offload(tree, 0, (1, 2, 3), 2)
    assert tree.eviction.plan(9).keeps == {0: 0}


def test_a_path_diverges_where_the_tree_goes_on_with_another_token() -> None:
    tree = RadixTree()
    holding(tree, (1, 2, 3, 4))
    offload(tree, 0, (1, 2, 3, 5), 0)
    match = tree.match("", run_of((1, 2, 3, 6)))
    assert [match.diverges_at(n) for n in range(5)] == [False, False, False, True, False]
    match = tree.match("", run_of((1, 2, 3, 4)))
    assert [match.diverges_at(n) for n in range(5)] == [False, False, False, True, False]
    match = tree.match("", run_of((1, 2)))
    assert match.diverges_at(2), "the tree goes on where the tokens end"


def test_the_version_changes_with_every_result_of_a_lookup() -> None:
    tree = RadixTree()
    versions = [tree.version]
    holding(tree, (1, 2, 3))
    versions.append(tree.version)
    tree.extend(0, run_of((4,)))
    versions.append(tree.version)
    segment = Segment(0, 0, 2, 1)
    tree.attach(segment, end_of(tree, 0))
    versions.append(tree.version)
    tree.truncate(0, 2)
    versions.append(tree.version)
    tree.release(0)
    versions.append(tree.version)
    tree.detach(segment)
    versions.append(tree.version)
    assert versions == sorted(set(versions))


def test_the_text_that_was_used_last_is_found_and_followed() -> None:
    tree = RadixTree()
    for seq, path in enumerate([(1, 2, 3, 4, 5), (7, 2, 3, 6), (7, 2, 3, 6, 8, 8), (7, 2, 3, 6, 9)]):
        tree.hold(seq, "")
        tree.extend(seq, run_of(path))
        tree.touch(end_of(tree, seq), 10 - seq if seq else 1)

    def found(last: Path, n: int) -> tuple[int, Path]:
        n_matched, follows = tree.search("", run_of(last), 2, n)
        return n_matched, tuple(unpacked(follows).tolist())

    assert found((1, 2, 3), 1) == (2, (6,))
    assert found((1, 2, 3), 3) == (2, (6, 8, 8))
    assert found((0, 4, 5), 3) == (0, ())
    assert found((0, 3, 4), 3) == (2, (5,))
    assert found((3, 6), 3) == (2, (8, 8))
    assert found((0, 3, 6, 8), 3) == (3, (8,))
    tree.touch(end_of(tree, 3), 20)
    assert found((3, 6), 3) == (2, (9,))
    tree.touch(end_of(tree, 0), 21)
    assert found((7, 2, 3), 3) == (2, (4, 5))


def test_only_whole_tokens_are_found() -> None:
    tree = RadixTree()
    tree.hold(0, "")
    tree.extend(0, run_of((256, 5, 1, 1, 6, 7)))
    assert tree.search("", run_of((256,)), 1, 1) == (1, run_of((5,)))
    tree.release(0)
    tree.hold(0, "")
    tree.extend(0, run_of((1, 1, 6, 7)))
    assert tree.search("", run_of((256,)), 1, 1) == (0, b"")
    # One at no token overlaps one that is found.
    tree.extend(0, run_of((0, 256)))
    assert tree.search("", run_of((0,)), 1, 1) == (1, run_of((256,)))


def test_a_search_ends_after_enough_tokens() -> None:
    tree = RadixTree()
    rare = tuple(range(100, 120))
    for seq in range(4):
        tree.hold(seq, "")
        tree.extend(seq, run_of((seq, *(rare if seq == 0 else ()), *range(1000, 1000 + 2**17))))
        tree.touch(end_of(tree, seq), seq)
    assert tree.search("", run_of(rare), 16, 1) == (0, b"")
    tree.touch(end_of(tree, 0), 4)
    assert tree.search("", run_of(rare), 16, 1) == (20, run_of((1000,)))


@pytest.mark.parametrize(("n_others", "is_found"), [(100, True), (300, False)])
def test_a_search_ends_after_many_occurrences_of_the_bytes_at_no_token(n_others: int, is_found: bool) -> None:
    tree = RadixTree()
    tree.hold(0, "")
    tree.extend(0, run_of((*[256] * 17, 7, *[65536] * (n_others + 17), 9)))
    assert tree.search("", run_of((256,) * 16), 16, 1) == ((16, run_of((7,))) if is_found else (0, b""))


def test_only_the_newest_of_many_children_are_searched() -> None:
    tree = RadixTree()
    for seq in range(1500):
        tree.hold(seq, "")
        tree.extend(seq, run_of((1, 2, 100 + seq, 3, 4)))
    assert tree.search("", run_of((1, 2)), 2, 3)[0] == 2
    assert tree.search("", run_of((1599, 3)), 2, 1) == (2, run_of((4,)))
    tree.touch(end_of(tree, 0), 1)
    assert tree.search("", run_of((100, 3)), 2, 1) == (0, b"")


def test_a_search_ends_after_enough_nodes() -> None:
    tree = RadixTree()
    for seq in range(200):
        tree.hold(seq, "")
        tree.extend(seq, run_of((1, 2, 100 + seq, 3, 4)))
        tree.touch(end_of(tree, seq), seq)
    assert tree.search("", run_of((299, 3)), 2, 1) == tree.search("", run_of((250, 3)), 2, 1) == (2, run_of((4,)))
    assert tree.search("", run_of((100, 3)), 2, 1) == (0, b"")
