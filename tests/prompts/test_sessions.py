"""Sessions and the cache that keeps the most recently used ones."""

from __future__ import annotations

import numpy as np
import pytest

from llamaslot.prompts.lru_cache import LruCache
from llamaslot.prompts.sessions import MAX_BYTES, MAX_RECORD_BYTES, OVERHEAD, Session, session_digest

SIZE = 16 * 4 + OVERHEAD


def session(first: int, n: int = 4) -> Session:
    return Session(np.arange(first, first + n, dtype=np.int32), 1, n, n)


def new_cache(max_bytes: int = 10**6) -> LruCache[Session]:
    return LruCache(max_bytes)


def test_the_least_recently_used_goes_first() -> None:
    sessions = new_cache(2 * SIZE)
    first = session(0)
    sessions.put(b"a", first)
    sessions.put(b"b", session(10))
    assert sessions.get(b"a") is first
    sessions.put(b"c", session(20))
    assert (sessions.get(b"b"), len(sessions), sessions.n_bytes) == (None, 2, 2 * SIZE)


def test_a_session_replaces_the_earlier_one_with_its_digest() -> None:
    sessions = new_cache()
    sessions.put(b"a", session(0))
    second = session(10)
    sessions.put(b"a", second)
    assert sessions.get(b"a") is second
    assert (len(sessions), sessions.n_bytes) == (1, SIZE)


def test_a_session_that_is_too_large_is_not_kept_nor_is_the_one_it_replaces() -> None:
    sessions = new_cache(2 * SIZE)
    sessions.put(b"a", session(0))
    sessions.put(b"b", session(10))
    sessions.put(b"a", session(0, 100))
    assert (sessions.get(b"a"), len(sessions), sessions.n_bytes) == (None, 1, SIZE)


def test_dropped_and_cleared_sessions_are_gone() -> None:
    sessions = new_cache()
    first = session(0)
    sessions.put(b"a", first)
    assert sessions.drop(b"a") is first
    assert sessions.drop(b"a") is None
    sessions.put(b"b", session(0))
    sessions.clear()
    assert (sessions.get(b"b"), sessions.n_bytes) == (None, 0)


def test_digests_differ_by_namespace_and_id() -> None:
    digests = {
        session_digest(namespace, session_id)
        for namespace, session_id in (("", "a"), ("a", ""), ("s", "a"), ("", "b"))
    }
    assert len(digests) == 4


def test_earlier_sequences_stay_as_branches_unless_a_later_one_contains_them() -> None:
    def path(*tokens: int) -> Session:
        return Session(np.array(tokens, dtype=np.int32), 0, len(tokens), len(tokens))

    later = path(1, 2, 3, 4, 5).continuing(path(1, 2, 3))
    assert later.branches == ()
    other = path(1, 2, 9).continuing(later)
    assert [np.frombuffer(each, "<i4").tolist() for each in other.paths] == [[1, 2, 3, 4, 5], [1, 2, 9]]
    last = path(1, 7).continuing(other)
    assert [np.frombuffer(each, "<i4").tolist() for each in last.paths] == [[1, 2, 9], [1, 2, 3, 4, 5], [1, 7]]
    for n in range(20):
        last = path(1, 7, 100 + n).continuing(last)
    assert len(last.branches) == 8
    assert last.n_bytes > path(1, 7, 119).n_bytes


@pytest.mark.parametrize("n_tokens", [100, 1_000, 10_000])
def test_the_records_of_all_sessions_that_are_kept_are_kept_too(n_tokens: int) -> None:
    kept = session(0, n_tokens)
    n_sessions = MAX_BYTES // kept.n_bytes
    share = n_sessions * kept.record(b"0" * 16).n_bytes / MAX_RECORD_BYTES
    assert 0.7 < share <= 1
