"""Branches of a session: which conversations belong together."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from llamaslot.protocol.bodies import ChatBody
from llamaslot.protocol.chat_prompt import conversation_branch
from llamaslot.text.conversation import volatile_pattern
from llamaslot.text.template import ChatTemplate

TEMPLATE = ChatTemplate("{{ messages }}", bos_token="", eos_token="", volatile=volatile_pattern("claude-code"))
SYSTEM = {"role": "system", "content": "Write code."}
USER = {"role": "user", "content": "Hello"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
REPLY = {"role": "assistant", "content": "Hi"}


def branch(*messages: dict[str, Any], **fields: Any) -> str:
    return conversation_branch(TEMPLATE, msgspec.convert({"messages": messages, **fields}, ChatBody))


START = branch(SYSTEM, USER, tools=[TOOL])


@pytest.mark.parametrize(
    "later",
    [
        branch(SYSTEM, USER, REPLY, {"role": "user", "content": "More"}, tools=[TOOL]),
        branch(SYSTEM, USER, {"role": "user", "content": "More"}, tools=[TOOL]),
        branch(SYSTEM, USER, REPLY, SYSTEM, tools=[TOOL], temperature=0.5, max_tokens=3),
        branch({"content": "Write code.", "role": "system"}, USER, tools=[dict(reversed(TOOL.items()))]),
        branch({**SYSTEM, "content": "x-anthropic-billing-header: cch=5;\nWrite code."}, USER, tools=[TOOL]),
    ],
)
def test_later_turns_are_of_the_same_branch(later: str) -> None:
    assert later == START


@pytest.mark.parametrize(
    "other",
    [
        branch(SYSTEM, USER),
        branch(SYSTEM, USER, tools=[TOOL, TOOL]),
        branch(USER, tools=[TOOL]),
        branch({**SYSTEM, "content": "Name it."}, USER, tools=[TOOL]),
        branch(SYSTEM, {**USER, "content": "Hello!"}, tools=[TOOL]),
        branch(SYSTEM, REPLY, USER, tools=[TOOL]),
    ],
)
def test_other_tools_system_prompts_and_first_messages_are_other_branches(other: str) -> None:
    assert other != START


def test_a_system_message_may_have_a_refusal() -> None:
    parts = [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "x"}]
    same = [{"type": "text", "text": "No."}, {"type": "text", "text": "x"}]
    given, known = {"role": "system", "content": parts}, {"role": "system", "content": same}
    assert branch(given, USER) == branch(known, USER)
