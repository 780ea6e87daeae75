"""Text anchors against a simple oracle: a digest gives its tokens or nothing, and the last used ones stay."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from llamaslot.base.tokens import packed
from llamaslot.prompts.text_anchors import TextAnchor, TextAnchors


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def digest(n: int) -> bytes:
    return b"digest %d" % n


def test_an_anchor_gives_the_tokens_of_its_ancestors_and_its_own() -> None:
    anchors = TextAnchors()
    assert anchors.add(digest(1), tokens(1, 2, 3), b"") == TextAnchor(digest(1), b"", 0, packed(tokens(1, 2, 3)))
    assert anchors.add(digest(2), tokens(1, 2, 3, 4, 5), digest(1)) == TextAnchor(
        digest(2), digest(1), 3, packed(tokens(4, 5))
    )
    found = anchors.find(digest(2))
    assert found is not None
    assert found.tolist() == [1, 2, 3, 4, 5]
    assert anchors.find(digest(3)) is None


def test_an_anchor_whose_parent_is_gone_keeps_all_tokens_itself() -> None:
    anchors = TextAnchors()
    assert anchors.add(digest(2), tokens(1, 2, 3), digest(1)) == TextAnchor(
        digest(2), b"", 0, packed(tokens(1, 2, 3))
    )


def test_a_parent_with_other_tokens_is_not_continued() -> None:
    anchors = TextAnchors()
    anchors.add(digest(1), tokens(7, 8), b"")
    assert anchors.add(digest(2), tokens(1, 2, 3, 4), digest(1)) == TextAnchor(
        digest(2), b"", 0, packed(tokens(1, 2, 3, 4))
    )


def test_a_restored_anchor_is_inserted_only_behind_its_parent() -> None:
    anchors = TextAnchors()
    first, second = (
        TextAnchor(digest(1), b"", 0, packed(tokens(1))),
        TextAnchor(digest(2), digest(1), 1, packed(tokens(2))),
    )
    assert not anchors.insert(second)
    assert anchors.insert(first)
    assert not anchors.insert(TextAnchor(digest(3), digest(1), 2, packed(tokens(2)))), "not where that one ends"
    assert not anchors.insert(first), "twice"
    assert anchors.insert(second)
    assert not anchors.insert(TextAnchor(digest(4), b"", 0, b""))


def test_an_anchor_that_is_too_large_drops_no_others() -> None:
    anchors = TextAnchors(max_bytes=1000)
    anchors.add(digest(1), tokens(1), b"")
    assert anchors.add(digest(2), tokens(*range(300)), b"") is None
    assert len(anchors) == 1


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "add", "find"]), st.integers(0, 30), st.integers(0, 30)),
        max_size=80,
    ),
    st.integers(300, 3000),
)
def test_digests_give_their_tokens_or_nothing_within_the_allowed_bytes(
    steps: list[tuple[str, int, int]], max_bytes: int
) -> None:
    anchors = TextAnchors(max_bytes)
    given_tokens: dict[bytes, list[int]] = {}
    used: list[bytes] = []
    for kind, i, parent in steps:
        if kind == "find":
            found = anchors.find(digest(i))
            assert found is None or found.tolist() == given_tokens[digest(i)]
            if found is not None:
                used.append(digest(i))
        else:
            known = given_tokens.get(digest(parent)) if digest(parent) in anchors else None
            ids = [*(known or []), i, i + 1]
            is_new = digest(i) not in anchors
            anchor = anchors.add(digest(i), tokens(*ids), digest(parent))
            assert anchor is None or is_new
            if anchor is not None:
                given_tokens[digest(i)] = ids
                used.append(digest(i))
        assert anchors.n_bytes <= max_bytes
        assert not used or used[-1] in anchors, "the last used is the last to go"
    for each in list(given_tokens):
        found = anchors.find(each)
        assert found is None or found.tolist() == given_tokens[each], "a parent is missing"
    anchors.clear()
    assert (len(anchors), anchors.n_bytes) == (0, 0)


def test_the_least_recently_used_goes_first_and_parents_after_their_children() -> None:
    anchors = TextAnchors(max_bytes=4 * 204)
    anchors.add(digest(1), tokens(1), b"")
    anchors.add(digest(2), tokens(1, 2), digest(1))
    anchors.add(digest(3), tokens(3), b"")
    anchors.find(digest(2))
    anchors.add(digest(4), tokens(4), b"")
    anchors.add(digest(5), tokens(5), b"")
    assert [digest(i) in anchors for i in range(1, 6)] == [True, True, False, True, True]
    anchors.add(digest(6), tokens(6), b"")
    assert [digest(i) in anchors for i in range(1, 7)] == [True, False, False, True, True, True]
