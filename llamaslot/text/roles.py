"""Adapts conversations to the roles that a chat template accepts, and to their order.

Agents send instructions in the middle of a conversation, and several user messages in a row. Templates refuse
these, leave them out, or write instructions at the start, where they would change everything after them. How a
message is adapted depends only on messages before it, and changes at most the one right before it. So the prompt of
a turn continues the tokens of the turn before.
"""

from __future__ import annotations

import json
from itertools import groupby

from llamaslot.text.conversation import SYSTEM_ROLES, Conversation, Message, joined


def fitted(conversation: Conversation, *, later_system: bool, user_twice: bool) -> Conversation:
    """Return the messages as a template accepts them.

    Without `later_system`, instructions at the start of the conversation become one message. Later ones become user
    texts in `<system-reminder>` tags, like those of Claude Code. After a tool result they are added to the result,
    because templates leave out the reasoning of a tool loop when a user message follows. Without `user_twice`,
    consecutive user messages become one.
    """
    found: list[tuple[Message, list[str]]] = []
    """Messages, and texts to add to them."""
    for message in conversation:
        role, last_role = message["role"], found[-1][0]["role"] if found else ""
        text = joined(message["content"], "\n")
        is_later = role in SYSTEM_ROLES and bool(found) and not later_system
        follows_system = is_later and last_role in SYSTEM_ROLES
        if is_later and not follows_system:
            text, role = f"<system-reminder>\n{text}\n</system-reminder>", "user"
        if follows_system or (is_later and last_role == "tool") or (role == last_role == "user" and not user_twice):
            found[-1][1].append(text)
        else:
            found.append(({"role": role, "content": text} if is_later else message, []))
    return [_with_texts(message, texts) if texts else message for message, texts in found]


def _with_texts(message: Message, texts: list[str]) -> Message:
    return {**message, "content": "\n\n".join(filter(None, [joined(message["content"], "\n"), *texts]))}


def without_system(conversation: Conversation) -> Conversation:
    """Put the leading system message before the next message's text; if there is none, make it a user message."""
    system, *rest = conversation
    if not rest:
        return [{**system, "role": "user"}]
    content = joined(system["content"], "\n") + "\n" + joined(rest[0]["content"], "\n")
    return [{**rest[0], "content": content}, *rest[1:]]


def results_from_user(conversation: Conversation) -> Conversation:
    """Convert tool results to user messages, in the JSON form that llama.cpp once used for such templates.

    Results of one turn become one message, because roles often have to alternate in such templates.
    """
    adapted: Conversation = []
    for is_result, run in groupby(conversation, lambda message: bool(message["role"] == "tool")):
        if is_result:
            adapted.append({"role": "user", "content": "\n".join(map(_result_as_text, run))})
        else:
            adapted += run
    return adapted


def _result_as_text(message: Message) -> str:
    result = {"tool": message.get("name"), "content": joined(message["content"], "\n")}
    result = {key: value for key, value in result.items() if value is not None}
    return json.dumps({"tool_response": result}, ensure_ascii=False, indent=2)
