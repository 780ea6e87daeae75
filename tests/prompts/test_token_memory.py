"""The token memory: its limit and what goes first, and the three ways in which it is asked."""

from __future__ import annotations

import sys
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from msgspec import structs

from llamaslot.base.callers import INACTIVE_S
from llamaslot.base.text_records import (
    OVERHEAD,
    RememberedReply,
    Session,
    TextAnchor,
    TextRecord,
    session_digest,
)
from llamaslot.base.tokens import ids_of, packed
from llamaslot.prompts.token_memory import TokenMemory


def tokens(*ids: int) -> bytes:
    return packed(np.array(ids, dtype=np.int32))


def digest(n: int) -> bytes:
    return b"digest %d" % n


def anchor(n: int, *ids: int, parent: bytes = b"", start: int = 0, owner: str = "") -> TextAnchor:
    return TextAnchor(key=digest(n), parent=parent, start=start, tokens=tokens(*ids), owner=owner)


def session(key: bytes, *ids: int, **fields: Any) -> Session:
    fields = {"session": key, "n_added": 0, "n_prompt": len(ids), "n_text": len(ids), **fields}
    return Session(key=key, tokens=tokens(*ids), **fields)


def reply(key: bytes, parent: bytes = b"", **fields: Any) -> RememberedReply:
    nothing = {
        "state": b"", "n_text": 0, "text": b"", "opening": "", "reasoning": b"", "has_reasoning": False,
        "begun": "", "closing": "", "tokens": b"t" * 400, "n_reply": 100,
    }  # fmt: skip
    return RememberedReply(**{"key": key, "parent": parent, **nothing, **fields})


def by_key(records: tuple[TextRecord, ...]) -> dict[bytes, TextRecord]:
    return {each.key: each for each in records}


def known(memory: TokenMemory, keys: bytes) -> bytes:
    """Keys of the replies that are there."""
    return b"".join(key.to_bytes() for key in keys if memory.find(key.to_bytes()) is not None)


def anchored(memory: TokenMemory, n: int) -> list[int] | None:
    found = memory.anchored(digest(n))
    return ids_of(found) if found is not None else None


# --- all kinds ---


def test_kinds_with_one_key_are_different_records() -> None:
    memory = TokenMemory()
    records: list[TextRecord] = [anchor(1, 5), session(digest(1), 6), reply(digest(1))]
    for each in records:
        memory.add(each)
    assert memory.records() == tuple(records)
    assert (anchored(memory, 1), memory.session(digest(1)), memory.find(digest(1))) == ([5], records[1], records[2])
    assert [memory.amount(type(each)) for each in records] == [(1, each.n_bytes) for each in records]
    assert memory.n_bytes == sum(each.n_bytes for each in records)
    memory.clear()
    assert (memory.records(), memory.n_bytes, memory.amount(Session)) == ((), 0, (0, 0))


def test_all_kinds_have_one_limit() -> None:
    memory = TokenMemory(3 * reply(b"a").n_bytes)
    for i in range(50):
        memory.add(anchor(i, *range(100)))
        memory.add(session(digest(i), *range(100)))
        memory.add(reply(digest(i)))
        assert memory.n_bytes <= memory.max_bytes
    assert [type(each) for each in memory.records()] == [TextAnchor, Session, RememberedReply]


def test_a_record_replaces_the_earlier_one_with_its_key() -> None:
    memory = TokenMemory()
    memory.add(session(b"a", 1, 2))
    second = session(b"a", 3)
    memory.add(second)
    assert (memory.records(), memory.n_bytes, memory.amount(Session)) == (
        (second,),
        second.n_bytes,
        (1, second.n_bytes),
    )


def test_a_record_that_is_too_large_is_not_kept_and_drops_nothing() -> None:
    memory = TokenMemory(2 * session(b"a", 1).n_bytes)
    records = session(b"a", 1), session(b"b", 2)
    for each in records:
        memory.add(each)
    memory.add(session(b"a", *range(1000)))
    assert by_key(memory.records()) == by_key(records)
    assert memory.add_anchor(digest(1), tokens(*range(1000)), b"") is None
    assert by_key(memory.records()) == by_key(records)


def test_a_session_that_outgrows_its_share_keeps_its_earlier_tokens() -> None:
    memory = TokenMemory(10 * session(b"a", *range(1000)).n_bytes)
    for key in b"abcdefghij":
        memory.add(session(bytes([key]), *range(1000), owner=chr(key)))
    before = memory.records()
    memory.add(session(b"a", *range(1100), owner="a"))
    assert by_key(memory.records()) == by_key(before)


def test_an_owner_loses_nothing_for_a_record_that_does_not_fit_into_its_share() -> None:
    one = session(b"a", *range(1000)).n_bytes
    memory = TokenMemory(20 * one)
    for i in range(19):
        memory.add(session(b"%d" % i, *range(1000), owner=f"owner {i}"))
    for i in range(2):
        memory.add(session(b"a %d" % i, 1, owner="a"))
    before = memory.records()
    assert len(before) == 21
    memory.add(session(b"a", *range(3000), owner="a"))
    assert memory.records() == before


def test_a_dropped_session_takes_its_branches_replies_and_anchors_along() -> None:
    memory = TokenMemory()
    own = [session(b"one", 1), session(b"branch", 2, session=b"one")]
    others: list[TextRecord] = [session(b"two", 3), reply(b"b", session=b"two"), reply(b"d"), anchor(1, 4)]
    for each in (*own, *others, reply(b"a", session=b"one"), reply(b"c", session=b"one")):
        memory.add(each)
    memory.add_anchor(digest(2), tokens(4, 5), digest(1), session=b"one")
    assert memory.drop_session(b"one") == own
    assert memory.records() == tuple(others)
    assert memory.n_bytes == sum(each.n_bytes for each in others)
    assert memory.drop_session(b"one") == []


def test_parents_that_form_a_circle_are_not_followed_for_ever() -> None:
    memory = TokenMemory()
    memory.add(reply(b"a", b"b"))
    memory.add(reply(b"b", b"a"))
    memory.use(b"a")
    memory.add(anchor(1, 5, parent=digest(2), start=1))
    memory.add(anchor(2, 6, parent=digest(1), start=1))
    assert (anchored(memory, 1), anchored(memory, 2)) == (None, None)


# --- by text ---


def test_an_anchor_gives_the_tokens_of_its_ancestors_and_its_own() -> None:
    memory = TokenMemory()
    assert memory.add_anchor(digest(1), tokens(1, 2, 3), b"") == anchor(1, 1, 2, 3)
    assert memory.add_anchor(digest(2), tokens(1, 2, 3, 4, 5), digest(1)) == anchor(
        2, 4, 5, parent=digest(1), start=3
    )
    assert anchored(memory, 2) == [1, 2, 3, 4, 5]
    assert anchored(memory, 3) is None


def test_an_anchor_whose_parent_is_gone_keeps_all_tokens_itself() -> None:
    memory = TokenMemory()
    assert memory.add_anchor(digest(2), tokens(1, 2, 3), digest(1)) == anchor(2, 1, 2, 3)


def test_a_parent_with_other_tokens_is_not_continued() -> None:
    memory = TokenMemory()
    memory.add_anchor(digest(1), tokens(7, 8), b"")
    assert memory.add_anchor(digest(2), tokens(1, 2, 3, 4), digest(1)) == anchor(2, 1, 2, 3, 4)


def test_the_first_tokens_of_a_text_stay() -> None:
    memory = TokenMemory()
    memory.add_anchor(digest(1), tokens(7, 8), b"")
    assert memory.add_anchor(digest(1), tokens(1, 2, 3), b"") is None
    assert anchored(memory, 1) == [7, 8]


def test_a_restored_anchor_is_found_once_its_parent_is_there_too() -> None:
    memory = TokenMemory()
    memory.add(anchor(2, 2, parent=digest(1), start=1))
    assert anchored(memory, 2) is None
    memory.add(anchor(1, 1))
    assert anchored(memory, 2) == [1, 2]
    memory.add(anchor(3, 2, parent=digest(1), start=2))
    assert anchored(memory, 3) is None, "not where that one ends"
    memory.add(anchor(4))
    assert anchored(memory, 4) is None, "without tokens"


def test_an_anchor_that_cannot_be_found_any_more_is_replaced() -> None:
    memory = TokenMemory()
    memory.add(anchor(2, 2, parent=digest(1), start=1))
    assert memory.add_anchor(digest(2), tokens(3, 4), digest(1)) == anchor(2, 3, 4)
    assert anchored(memory, 2) == [3, 4]


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "find"]), st.integers(0, 30), st.integers(0, 30), st.sampled_from("aab")
        ),
        max_size=80,
    ),
    st.integers(OVERHEAD + 100, 8 * OVERHEAD),
    st.booleans(),
)
def test_digests_give_their_tokens_or_nothing_within_the_allowed_bytes(
    steps: list[tuple[str, int, int, str]], max_bytes: int, has_owners: bool
) -> None:
    """A digest gives its tokens or nothing, whoever's share its parents are in."""
    memory = TokenMemory(max_bytes)
    given_tokens: dict[int, list[int]] = {}
    used: list[int] = []
    for kind, i, parent, owner in steps:
        found = anchored(memory, i)
        assert found is None or found == given_tokens[i]
        if found is not None:
            used.append(i)
        elif kind == "add":
            ids = [*(anchored(memory, parent) or []), i, i + 1]
            added = memory.add_anchor(digest(i), tokens(*ids), digest(parent), owner=owner if has_owners else "")
            if added is not None:
                given_tokens[i] = ids
                used.append(i)
        assert memory.n_bytes <= max_bytes
        assert memory.n_bytes == sum(each.n_bytes for each in memory.records())
        assert not used or has_owners or anchored(memory, used[-1]), "the last used is the last to go"
    for i, ids in given_tokens.items():
        found = anchored(memory, i)
        assert found is None or found == ids
        assert found or has_owners or not any(each.key == digest(i) for each in memory.records()), "a lost parent"


def test_the_least_recently_used_goes_first_and_parents_after_their_children() -> None:
    memory = TokenMemory(4 * (OVERHEAD + 4))
    memory.add_anchor(digest(1), tokens(1), b"")
    memory.add_anchor(digest(2), tokens(1, 2), digest(1))
    memory.add_anchor(digest(3), tokens(3), b"")
    memory.anchored(digest(2))
    memory.add_anchor(digest(4), tokens(4), b"")
    memory.add_anchor(digest(5), tokens(5), b"")
    assert {each.key for each in memory.records()} == {digest(i) for i in (1, 2, 4, 5)}
    memory.add_anchor(digest(6), tokens(6), b"")
    assert {each.key for each in memory.records()} == {digest(i) for i in (1, 4, 5, 6)}


# --- by session ---


def test_the_session_that_was_not_used_for_longest_goes_first() -> None:
    memory = TokenMemory(2 * session(b"a", 1).n_bytes)
    first = session(b"a", 1)
    memory.add(first)
    memory.add(session(b"b", 2))
    assert memory.session(b"a") is first
    memory.add(session(b"c", 3))
    assert (memory.session(b"b"), len(memory.records())) == (None, 2)


def test_digests_differ_by_namespace_and_id() -> None:
    digests = {
        session_digest(namespace, session_id)
        for namespace, session_id in (("", "a"), ("a", ""), ("s", "a"), ("", "b"))
    }
    assert len(digests) == 4


def test_earlier_sequences_stay_as_branches_unless_a_later_one_contains_them() -> None:
    def path(*ids: int) -> Session:
        return session(b"a", *ids)

    later = path(1, 2, 3, 4, 5).continuing(path(1, 2, 3))
    assert later.branches == ()
    other = path(1, 2, 9).continuing(later)
    assert [ids_of(each) for _, each in other.paths] == [[1, 2, 3, 4, 5], [1, 2, 9]]
    last = path(1, 7).continuing(other)
    assert [ids_of(each) for _, each in last.paths] == [[1, 2, 9], [1, 2, 3, 4, 5], [1, 7]]
    for n in range(20):
        last = path(1, 7, 100 + n).continuing(last)
    assert len(last.branches) == 8
    assert last.n_bytes > path(1, 7, 119).n_bytes


def test_a_sequence_of_another_namespace_stays_as_a_branch_whatever_continues_it() -> None:
    first, same, other = (
        structs.replace(session(b"a", *ids), namespace_key=key)
        for ids, key in (((1, 2), ""), ((1, 2, 3), ""), ((1, 2, 3, 4), "image"))
    )
    later = other.continuing(same.continuing(first))
    assert [(key, ids_of(each)) for key, each in later.paths] == [("", [1, 2, 3]), ("image", [1, 2, 3, 4])]
    marked = later.with_branch(np.array([1, 2, 3, -4], dtype=np.int32), "image")
    assert [key for key, _ in marked.paths] == ["image", "", "image"]
    predicted = marked.with_branch(np.array([1, 2, 3, 5], dtype=np.int32), "")
    assert [(key, ids_of(each)) for key, each in predicted.paths] == [
        ("", [1, 2, 3, 5]),
        ("image", [1, 2, 3, -4]),
        ("image", [1, 2, 3, 4]),
    ]


# --- by meaning ---


def test_the_reply_that_was_not_used_for_longest_goes_first_and_none_before_those_behind_it() -> None:
    memory = TokenMemory(4 * reply(b"a").n_bytes)
    memory.add(reply(b"x"))
    memory.add(reply(b"a"))
    memory.add(reply(b"b", b"a"))
    memory.add(reply(b"c", b"b"))
    memory.add(reply(b"y"))
    assert known(memory, b"abcxy") == b"abcy"
    memory.use(b"b")
    memory.add(reply(b"z"))
    assert known(memory, b"abcyz") == b"abyz", "c is behind b, and was not used"
    memory.add(reply(b"v"))
    assert known(memory, b"abyzv") == b"abzv"
    memory.add(reply(b"w"))
    assert known(memory, b"abzvw") == b"azvw", "b before a, which it needs"
    assert (memory.amount(RememberedReply), memory.n_bytes) == (
        (4, 4 * reply(b"a").n_bytes),
        4 * reply(b"a").n_bytes,
    )


def test_a_new_reply_is_a_use_of_those_before_it() -> None:
    memory = TokenMemory(3 * reply(b"a").n_bytes)
    for each in (reply(b"a"), reply(b"x"), reply(b"b", b"a"), reply(b"y")):
        memory.add(each)
    assert known(memory, b"axby") == b"aby"


def test_tokens_count() -> None:
    memory = TokenMemory(100_000)
    for key in range(10):
        memory.add(reply(key.to_bytes(), tokens=b"t" * 30_000))
    assert len(memory.records()) == 3


def test_no_client_evicts_a_reply_of_another_that_is_within_its_share() -> None:
    memory = TokenMemory(4 * reply(b"a").n_bytes)
    memory.add(reply(b"a", owner="one"))
    for key in b"uvwxyz":
        memory.add(reply(key.to_bytes(), owner="two"))
    assert known(memory, b"auvwxyz") == b"axyz"
    memory.add(reply(b"b", b"a", owner="one"))
    assert known(memory, b"abuvwxyz") == b"abyz"


def test_no_client_evicts_a_record_of_another_by_those_of_other_kinds() -> None:
    memory = TokenMemory(4 * reply(b"a").n_bytes)
    memory.add(reply(b"a", owner="one"))
    for i in range(20):
        memory.add(anchor(i, *range(100), owner="two"))
        memory.add(session(digest(i), *range(100), owner="two"))
    assert known(memory, b"a") == b"a"


def test_finding_a_reply_is_no_use() -> None:
    memory = TokenMemory(2 * reply(b"a").n_bytes)
    memory.add(reply(b"a"))
    memory.add(reply(b"b"))
    assert memory.find(b"a") is not None
    memory.add(reply(b"c"))
    assert known(memory, b"abc") == b"bc"


@pytest.mark.parametrize("field", ["begun", "opening", "closing"])
@pytest.mark.parametrize("text", ["a" * 50_000, "a" * 50_000 + "🙂"], ids=["ascii", "wide"])
def test_texts_count_with_the_bytes_that_they_take(field: str, text: str) -> None:
    memory = TokenMemory(3 * sys.getsizeof(text))
    for key in range(10):
        memory.add(reply(key.to_bytes(), **{field: text}))
    assert len(memory.records()) == 2


def test_a_client_that_got_no_reply_for_an_hour_gives_way_to_others() -> None:
    now = 0.0
    memory = TokenMemory(3 * reply(b"a").n_bytes, lambda: now)
    for key in (b"a", b"b", b"c"):
        memory.add(reply(key, owner=key.decode()))
    now += INACTIVE_S - 1
    memory.use(b"a")
    memory.add(reply(b"d", owner="d"))
    assert known(memory, b"abcd") == b"abc"
    now += 1
    memory.add(reply(b"d", owner="d"))
    assert known(memory, b"abcd") == b"acd"
