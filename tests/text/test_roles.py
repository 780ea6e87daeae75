"""Conversations in the roles that templates take: what was rendered for a turn stays as it was in later ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaslot.text.message_order import with_accepted_roles

RULES, USER = {"role": "system", "content": "Rules"}, {"role": "user", "content": "Hi"}
LATER, REPLY = {"role": "developer", "content": "New rules"}, {"role": "assistant", "content": "Yes?"}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "sunny"}
REMINDER = "<system-reminder>\nNew rules\n</system-reminder>"
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("conversation", "expected"),
    [
        ([RULES, USER, REPLY, USER], [RULES, USER, REPLY, USER]),
        ([RULES, LATER, USER], [{**RULES, "content": "Rules\n\nNew rules"}, USER]),
        ([RULES, USER, LATER], [RULES, USER, {"role": "user", "content": REMINDER}]),
        ([USER, REPLY, LATER, USER], [USER, REPLY, {"role": "user", "content": REMINDER}, USER]),
        ([USER, REPLY, RESULT, LATER, REPLY], [USER, REPLY, {**RESULT, "content": f"sunny\n\n{REMINDER}"}, REPLY]),
        ([USER, REPLY, {**RESULT, "content": ""}, LATER], [USER, REPLY, {**RESULT, "content": REMINDER}]),
        (
            [USER, REPLY, {**RESULT, "content": PARTS}, LATER],
            [USER, REPLY, {**RESULT, "content": f"a\nb\n\n{REMINDER}"}],
        ),
        ([{**RULES, "content": PARTS}, LATER], [{**RULES, "content": "a\nb\n\nNew rules"}]),
    ],
)
def test_instructions_where_a_template_takes_them_at_the_beginning_only(conversation: Any, expected: Any) -> None:
    assert with_accepted_roles(conversation, later_system=False, user_twice=True) == expected
    assert with_accepted_roles(conversation, later_system=True, user_twice=True) == conversation


def test_messages_of_the_user_become_one_where_a_template_refuses_two() -> None:
    conversation = [RULES, USER, {**USER, "content": PARTS}, REPLY, LATER, USER]
    reminded = {"role": "user", "content": f"{REMINDER}\n\nHi"}
    assert with_accepted_roles(conversation, later_system=False, user_twice=False) == [
        RULES,
        {"role": "user", "content": "Hi\n\na\nb"},
        REPLY,
        reminded,
    ]
    assert with_accepted_roles(conversation, later_system=True, user_twice=False)[2:] == [REPLY, LATER, USER]


@given(st.lists(st.sampled_from([RULES, USER, LATER, REPLY, RESULT]), max_size=8), st.booleans(), st.booleans())
def test_what_follows_changes_the_last_message_at_most(conversation: Any, later: bool, twice: bool) -> None:
    whole = with_accepted_roles(conversation, later_system=later, user_twice=twice)
    for n in range(len(conversation)):
        *before, last = with_accepted_roles(conversation[: n + 1], later_system=later, user_twice=twice)
        assert whole[: len(before)] == before
        assert whole[len(before)]["role"] == last["role"]
        assert whole[len(before)]["content"].startswith(last["content"])
    assert with_accepted_roles(whole, later_system=later, user_twice=twice) == whole
