"""Text at the start of a system message that changes with every request and so defeats the prefix cache.

Some agents put a billing header with a random number there. No two prompts have a common prefix then, and
everything after the header is computed again. It is removed only if the server is told to, since the client sent
it.
"""

from __future__ import annotations

import re

from llamaslot.base.errors import ConfigError
from llamaslot.text.conversation import SYSTEM_ROLES, Conversation, Message

KNOWN = {"claude-code": r"x-anthropic-billing-header:[^\n]*(?:\n+|$)"}
"""Patterns by the agent that sends such text."""


def pattern(words: str) -> re.Pattern[str] | None:
    """Compile what to remove: names of `KNOWN` separated by commas, or one regular expression; None for nothing.

    Raises `ConfigError` for anything else, and for an expression that matches an empty text.
    """
    names = [word.strip() for word in words.split(",")]
    source = "|".join(KNOWN[name] for name in names) if all(name in KNOWN for name in names) else words
    if not source:
        return None
    try:
        found = re.compile(source)
    except re.error as error:
        known = ", ".join(KNOWN)
        raise ConfigError(
            f"{words!r} is no regular expression ({error}), and the known names are: {known}",
            param="--drop-volatile",
        ) from None
    if found.match(""):
        raise ConfigError(
            f"{words!r} matches an empty text: it would leave out nothing, or anything", param="--drop-volatile"
        )
    return found


def without(volatile: re.Pattern[str], conversation: Conversation) -> Conversation:
    """Remove what `volatile` matches at the start of the system message; drop the message if nothing is left."""
    if not conversation or conversation[0]["role"] not in SYSTEM_ROLES:
        return conversation
    first, *rest = conversation
    kept = _kept(volatile, first)
    return [kept, *rest] if kept["content"] or kept == first else rest


def _kept(volatile: re.Pattern[str], message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": _cut(volatile, content)}
    if not content:
        return message
    part, *others = content
    text = _cut(volatile, part["text"])
    return {**message, "content": [{**part, "text": text}, *others] if text else others}


def _cut(volatile: re.Pattern[str], text: str) -> str:
    found = volatile.match(text)
    return text[found.end() :] if found else text
