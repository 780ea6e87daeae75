"""Conversations fitted to the roles that a chat template takes, and to their order.

Agents send instructions in the middle of a conversation, and several messages of the user in a row. Templates
refuse them, leave them out, or write instructions at the start, where they would change everything after them. What
is done with a message depends on those before it only, and changes none of these but the one right before it. So
the prompt of a turn goes on with the tokens of the turn before.
"""

from __future__ import annotations

import json
from itertools import groupby

from llamaslot.text.conversation import SYSTEM_ROLES, Conversation, Message, joined


def fitted(conversation: Conversation, *, later_system: bool, user_twice: bool) -> Conversation:
    """Return the messages as a template takes them.

    Without `later_system`, instructions that begin the conversation become one message. Later ones become texts of
    the user in `<system-reminder>` tags, as those of Claude Code are; after the result of a tool they are added to
    it, because another message of the user would have templates leave out the reasoning of the tool loop. Without
    `user_twice`, messages of the user that follow each other become one.
    """
    found: list[tuple[Message, list[str]]] = []
    """Messages, and texts to be added to them."""
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
    """Put the leading system message before the next message's text, or make it the user's if there is none."""
    system, *rest = conversation
    if not rest:
        return [{**system, "role": "user"}]
    content = joined(system["content"], "\n") + "\n" + joined(rest[0]["content"], "\n")
    return [{**rest[0], "content": content}, *rest[1:]]


def results_from_user(conversation: Conversation) -> Conversation:
    """Make the results of tools messages of the user, in the JSON that llama.cpp once wrote for such templates.

    Results of one turn become one message, because in such templates roles often have to alternate.
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
