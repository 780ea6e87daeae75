"""Removal of text in system messages that differs in every session or request, and so defeats the prefix cache.

Claude Code begins its system prompt with a billing header whose numbers depend on the first message or the whole
request. No two sessions would share a prefix, and everything after the header would be computed again. The header
is only for the provider's accounting, so it is removed before the prompt is rendered. Dates and folders are not
removed.
"""

from __future__ import annotations

import re
from itertools import takewhile

from llamaslot.base.errors import ConfigError
from llamaslot.text.conversation import SYSTEM_ROLES, Conversation, Message

OFF = "off"
_FIELD = r"[ \t]*[\w.-]+=[^;\s]*(?:;|(?=[ \t]*(?:\r?\n|$)))"
KNOWN = {"claude-code": rf"x-anthropic-billing-header:(?=[^\n]*\bcc\w+=)(?:{_FIELD})+[ \t]*(?:\r?\n)*"}
"""Patterns by the agent that sends such text. A header consists only of fields, one of which begins with `cc`."""


def pattern(words: str) -> re.Pattern[str] | None:
    """Compile a pattern from comma-separated names of `KNOWN`, or from a regular expression; None for `OFF`.

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
            f"{words!r} is not a valid regular expression ({error}); the known names are: {known}",
            param="--drop-volatile",
        ) from None
    if found.match(""):
        raise ConfigError(
            f"{words!r} matches an empty text, so it does not say what to remove", param="--drop-volatile"
        )
    return found


def without(volatile: re.Pattern[str], conversation: Conversation) -> Conversation:
    """Remove matches of `volatile` from the start of each part of the leading system messages.

    Parts and messages that become empty are dropped.
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
