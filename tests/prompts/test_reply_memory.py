"""The memory of replies: its limit, and which replies go first."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from llamaslot.base.callers import INACTIVE_S
from llamaslot.base.text_records import RememberedReply
from llamaslot.prompts.reply_memory import ReplyMemory


def reply(key: bytes, parent: bytes = b"", **fields: Any) -> RememberedReply:
    nothing = {
        "state": b"", "n_text": 0, "text": b"", "opening": "", "reasoning": b"", "has_reasoning": False,
        "begun": "", "closing": "", "tokens": b"t" * 400, "n_reply": 100,
    }  # fmt: skip
    return RememberedReply(**{"key": key, "parent": parent, **nothing, **fields})


def known(memory: ReplyMemory, keys: bytes) -> bytes:
    return b"".join(key.to_bytes() for key in keys if memory.find(key.to_bytes()) is not None)


def test_the_reply_that_was_not_used_for_longest_goes_first_and_none_before_those_behind_it() -> None:
    memory = ReplyMemory(4 * reply(b"a").n_bytes)
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
    assert (len(memory), memory.n_bytes) == (4, 4 * reply(b"a").n_bytes)


def test_a_new_reply_is_a_use_of_those_before_it() -> None:
    memory = ReplyMemory(3 * reply(b"a").n_bytes)
    for each in (reply(b"a"), reply(b"x"), reply(b"b", b"a"), reply(b"y")):
        memory.add(each)
    assert known(memory, b"axby") == b"aby"


def test_tokens_count() -> None:
    memory = ReplyMemory(100_000)
    for key in range(10):
        memory.add(reply(key.to_bytes(), tokens=b"t" * 30_000))
    assert len(memory) == 3


def test_no_client_evicts_a_reply_of_another_that_is_within_its_share() -> None:
    memory = ReplyMemory(4 * reply(b"a").n_bytes)
    memory.add(reply(b"a", owner="one"))
    for key in b"uvwxyz":
        memory.add(reply(key.to_bytes(), owner="two"))
    assert known(memory, b"auvwxyz") == b"axyz"
    memory.add(reply(b"b", b"a", owner="one"))
    assert known(memory, b"abuvwxyz") == b"abyz"


def test_finding_a_reply_is_no_use() -> None:
    memory = ReplyMemory(2 * reply(b"a").n_bytes)
    memory.add(reply(b"a"))
    memory.add(reply(b"b"))
    assert memory.find(b"a") is not None
    memory.add(reply(b"c"))
    assert known(memory, b"abc") == b"bc"


@pytest.mark.parametrize("field", ["begun", "opening", "closing"])
@pytest.mark.parametrize("text", ["a" * 50_000, "a" * 50_000 + "🙂"], ids=["ascii", "wide"])
def test_texts_count_with_the_bytes_that_they_take(field: str, text: str) -> None:
    memory = ReplyMemory(3 * sys.getsizeof(text))
    for key in range(10):
        memory.add(reply(key.to_bytes(), **{field: text}))
    assert len(memory) == 2


def test_replies_of_a_session_are_dropped() -> None:
    memory = ReplyMemory()
    memory.add(reply(b"a", session=b"one"))
    memory.add(reply(b"b", session=b"two"))
    memory.add(reply(b"c", session=b"one"))
    memory.add(reply(b"d"))
    memory.drop_session(b"one")
    assert known(memory, b"abcd") == b"bd"
    memory.clear()
    assert (len(memory), memory.n_bytes) == (0, 0)


def test_a_client_that_got_no_reply_for_an_hour_gives_way_to_others() -> None:
    now = 0.0
    memory = ReplyMemory(3 * reply(b"a").n_bytes, lambda: now)
    for key in (b"a", b"b", b"c"):
        memory.add(reply(key, owner=key.decode()))
    now += INACTIVE_S - 1
    memory.use(b"a")
    memory.add(reply(b"d", owner="d"))
    assert known(memory, b"abcd") == b"abc"
    now += 1
    memory.add(reply(b"d", owner="d"))
    assert known(memory, b"abcd") == b"acd"
