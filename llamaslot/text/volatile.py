"""Text of system messages that differs in every session or request, means nothing, and defeats the prefix cache.

Claude Code begins its system prompt with a billing header, in which numbers are made of the first message or of the
whole request. No two sessions would have a common prefix, and everything after the header would be computed again.
It is for the provider's accounting, so it is removed before the prompt is made; a date or a folder is not.
"""

from __future__ import annotations

import re
from itertools import takewhile

from llamaslot.base.errors import ConfigError
from llamaslot.text.conversation import SYSTEM_ROLES, Conversation, Message

OFF = "off"
_FIELD = r"[ \t]*[\w.-]+=[^;\s]*(?:;|(?=[ \t]*(?:\r?\n|$)))"
KNOWN = {"claude-code": rf"x-anthropic-billing-header:(?=[^\n]*\bcc\w+=)(?:{_FIELD})+[ \t]*(?:\r?\n)*"}
"""Patterns by the agent that sends such text: a header has nothing but fields, one of which begins with `cc`."""


def pattern(words: str) -> re.Pattern[str] | None:
    """Compile what to remove: names of `KNOWN` separated by commas, or one regular expression; None for `OFF`.

    Raises `ConfigError` for anything else, and for an expression that matches an empty text.
    """
    names = [word.strip() for word in words.split(",")]
    source = "|".join(KNOWN[name] for name in names) if all(name in KNOWN for name in names) else words
    if source in ("", OFF):
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
    """Remove what `volatile` matches at the start of each part of the system messages at the start.

    Parts and messages of which nothing is left are dropped.
    """
    first = list(takewhile(lambda message: message["role"] in SYSTEM_ROLES, conversation))
    kept = [(message, _kept(volatile, message)) for message in first]
    return [*(left for given, left in kept if left["content"] or left == given), *conversation[len(first) :]]


def _kept(volatile: re.Pattern[str], message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str):
        found = volatile.match(content)
        return {**message, "content": content[found.end() :]} if found else message
    cut = [
        {**part, "text": part["text"][found.end() :]} if (found := volatile.match(part["text"])) else part
        for part in content
    ]
    return {
        **message,
        "content": [part for part, given in zip(cut, content, strict=True) if part["text"] or part is given],
    }
