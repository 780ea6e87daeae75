"""Anchors against a dumb oracle: a name gives its tokens or nothing, and what is used stays."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from llamaslot.base.tokens import packed
from llamaslot.prompts.anchors import Anchor, Anchors


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def name(n: int) -> bytes:
    return b"name %d" % n


def test_a_chain_gives_all_its_tokens() -> None:
    anchors = Anchors()
    assert anchors.add(name(1), tokens(1, 2, 3), b"") == Anchor(name(1), b"", 0, packed(tokens(1, 2, 3)))
    assert anchors.add(name(2), tokens(1, 2, 3, 4, 5), name(1)) == Anchor(name(2), name(1), 3, packed(tokens(4, 5)))
    found = anchors.find(name(2))
    assert found is not None
    assert found.tolist() == [1, 2, 3, 4, 5]
    assert anchors.find(name(3)) is None


def test_where_the_front_is_gone_an_anchor_keeps_all_tokens_itself() -> None:
    anchors = Anchors()
    assert anchors.add(name(2), tokens(1, 2, 3), name(1)) == Anchor(name(2), b"", 0, packed(tokens(1, 2, 3)))


def test_a_front_that_was_named_again_for_other_tokens_is_not_continued() -> None:
    anchors = Anchors()
    anchors.add(name(1), tokens(7, 8), b"")
    assert anchors.add(name(2), tokens(1, 2, 3, 4), name(1)) == Anchor(name(2), b"", 0, packed(tokens(1, 2, 3, 4)))


def test_what_was_kept_over_a_restart_is_taken_only_behind_what_it_continues() -> None:
    anchors = Anchors()
    first, second = Anchor(name(1), b"", 0, packed(tokens(1))), Anchor(name(2), name(1), 1, packed(tokens(2)))
    assert not anchors.put(second)
    assert anchors.put(first)
    assert not anchors.put(Anchor(name(3), name(1), 2, packed(tokens(2)))), "not where that one ends"
    assert not anchors.put(first), "twice"
    assert anchors.put(second)
    assert not anchors.put(Anchor(name(4), b"", 0, b""))


def test_one_that_is_too_large_alone_throws_nothing_out() -> None:
    anchors = Anchors(most_bytes=1000)
    anchors.add(name(1), tokens(1), b"")
    assert anchors.add(name(2), tokens(*range(300)), b"") is None
    assert len(anchors) == 1


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "add", "find"]), st.integers(0, 30), st.integers(0, 30)),
        max_size=80,
    ),
    st.integers(300, 3000),
)
def test_names_give_their_tokens_or_nothing_within_the_bytes_allowed(
    steps: list[tuple[str, int, int]], most_bytes: int
) -> None:
    anchors = Anchors(most_bytes)
    given_tokens: dict[bytes, list[int]] = {}
    used: list[bytes] = []
    for kind, i, front in steps:
        if kind == "find":
            found = anchors.find(name(i))
            assert found is None or found.tolist() == given_tokens[name(i)]
            if found is not None:
                used.append(name(i))
        else:
            known = given_tokens.get(name(front)) if name(front) in anchors else None
            ids = [*(known or []), i, i + 1]
            is_new = name(i) not in anchors
            anchor = anchors.add(name(i), tokens(*ids), name(front))
            assert anchor is None or is_new
            if anchor is not None:
                given_tokens[name(i)] = ids
                used.append(name(i))
        assert anchors.n_bytes <= most_bytes
        assert not used or used[-1] in anchors, "the last used is the last to go"
    for each in list(given_tokens):
        found = anchors.find(each)
        assert found is None or found.tolist() == given_tokens[each], "a front is gone"
    anchors.clear()
    assert (len(anchors), anchors.n_bytes) == (0, 0)


def test_the_least_recently_used_goes_first_and_fronts_after_what_continues_them() -> None:
    anchors = Anchors(most_bytes=4 * 204)
    anchors.add(name(1), tokens(1), b"")
    anchors.add(name(2), tokens(1, 2), name(1))
    anchors.add(name(3), tokens(3), b"")
    anchors.find(name(2))
    anchors.add(name(4), tokens(4), b"")
    anchors.add(name(5), tokens(5), b"")
    assert [name(i) in anchors for i in range(1, 6)] == [True, True, False, True, True]
    anchors.add(name(6), tokens(6), b"")
    assert [name(i) in anchors for i in range(1, 7)] == [True, False, False, True, True, True]
