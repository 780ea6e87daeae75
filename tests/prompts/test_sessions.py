"""Sessions by name: the latest use stays, the rest goes."""

from __future__ import annotations

import numpy as np

from llamaslot.prompts.sessions import OVERHEAD, Session, Sessions, digest_of

SIZE = 16 * 4 + OVERHEAD


def session(first: int, n: int = 4) -> Session:
    return Session(np.arange(first, first + n, dtype=np.int32), 1, n, n)


def test_the_least_recently_used_goes_first() -> None:
    sessions = Sessions(2 * SIZE)
    first = session(0)
    assert sessions.put(b"a", first) == []
    sessions.put(b"b", session(10))
    assert sessions.find(b"a") is first
    assert sessions.put(b"c", session(20)) == [b"b"]
    assert (sessions.find(b"b"), len(sessions), sessions.n_bytes) == (None, 2, 2 * SIZE)


def test_one_takes_the_place_of_another_of_its_name() -> None:
    sessions = Sessions()
    sessions.put(b"a", session(0))
    second = session(10)
    sessions.put(b"a", second)
    assert sessions.find(b"a") is second
    assert (len(sessions), sessions.n_bytes) == (1, SIZE)


def test_one_that_is_too_large_is_not_kept_nor_is_what_it_was_to_replace() -> None:
    sessions = Sessions(2 * SIZE)
    sessions.put(b"a", session(0))
    sessions.put(b"b", session(10))
    assert sessions.put(b"a", session(0, 100)) == []
    assert (sessions.find(b"a"), len(sessions), sessions.n_bytes) == (None, 1, SIZE)


def test_what_is_dropped_or_cleared_is_gone() -> None:
    sessions = Sessions()
    first = session(0)
    sessions.put(b"a", first)
    assert sessions.drop(b"a") is first
    assert sessions.drop(b"a") is None
    sessions.put(b"b", session(0))
    sessions.clear()
    assert (sessions.find(b"b"), sessions.n_bytes) == (None, 0)


def test_a_name_belongs_to_a_namespace_and_does_not_run_into_it() -> None:
    names = {digest_of(space, session_id) for space, session_id in (("", "a"), ("a", ""), ("s", "a"), ("", "b"))}
    assert len(names) == 4


def test_earlier_sequences_are_kept_in_mind_where_they_are_no_part_of_a_later_one() -> None:
    def path(*tokens: int) -> Session:
        return Session(np.array(tokens, dtype=np.int32), 0, len(tokens), len(tokens))

    later = path(1, 2, 3, 4, 5).behind(path(1, 2, 3))
    assert later.others == ()
    other = path(1, 2, 9).behind(later)
    assert [np.frombuffer(each, "<i4").tolist() for each in other.paths] == [[1, 2, 3, 4, 5], [1, 2, 9]]
    last = path(1, 7).behind(other)
    assert [np.frombuffer(each, "<i4").tolist() for each in last.paths] == [[1, 2, 9], [1, 2, 3, 4, 5], [1, 7]]
    for n in range(20):
        last = path(1, 7, 100 + n).behind(last)
    assert len(last.others) == 8
    assert last.n_bytes > path(1, 7, 119).n_bytes
