"""Tells whether the assistant of the demo model's grammar could have said a sentence, whatever the conversation."""

import re
from collections.abc import Iterable, Iterator
from functools import cache

from bench.demo import grammar as g
from bench.demo import tool_grammar as t

_STRING, _INTEGER = r'"[^"\\<>{}]{1,80}"', r"\d{1,12}"
_VALUE = rf"(?:{_STRING}|{_INTEGER}|\[{_INTEGER}(?:, {_INTEGER}){{0,8}}\])"
_FIELD = rf'"\w+": {_VALUE}'
_NAME = "|".join(tool.name for tool in t.TOOLS)
_CALL = re.compile(
    rf'<tool_call>\n\{{"name": "(?:{_NAME})", "arguments": \{{{_FIELD}(?:, {_FIELD}){{0,2}}\}}\}}\n</tool_call>'
)
"""A call of one of the tools as the assistant writes it, with few arguments."""


def sentences(text: str) -> list[str]:
    """Cuts a reply into sentences; values hold no sentence mark, and a call is one sentence."""
    return [part for part in re.split(r"(?<=[.!?]) ", text) if part]


def _assistant_templates() -> Iterator[str]:
    for attribute in (*g.ATTRIBUTES, *g.WORLD, *g.PERSON):
        yield attribute.answer
    for _, assistant in g.CHAT:
        yield assistant
    yield from (g.NOTED, g.CORRECTED, g.UNKNOWN, g.CONFUSED, g.ECHOED, g.STORY_THANKS, g.STORY_ANSWER)
    yield from (t.FAILED, *(tool.answer for tool in t.TOOLS))
    for variants in g.STORY_PARTS:
        yield from variants


@cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    def one_of(items: Iterable[str]) -> str:
        return "(?:" + "|".join(map(re.escape, items)) + ")"

    word = r"[^ .!?,;]+"
    value, name = rf"{word}(?: {word}){{0,3}}", rf"{word}(?: {word})?"
    stories = g.STORIES.values()
    slots = {
        "v": value,
        "p": name,
        "w": r"[^.!?,;]{1,200}",
        "r": r"[^.!?;]{1,200}",
        "N": name,
        "M": one_of([story.friend_name for story in stories]),
        "f": one_of([story.friend for story in stories]),
        "home": one_of([story.home for story in stories]),
        "a": one_of(tuple(g.STORIES)),
        "j": one_of(g.STORY_ADJECTIVES),
        "find": one_of([story.find for story in stories]),
    }
    unique = {sentence for template in _assistant_templates() for sentence in sentences(template)}
    return (
        _CALL,
        *(
            re.compile(re.sub(r"\\\{(\w+)\\\}", lambda match: slots[match.group(1)], re.escape(sentence)))
            for sentence in sorted(unique)
        ),
    )


def is_grammatical(sentence: str) -> bool:
    """True if the grammar has this sentence among those of the assistant."""
    return any(pattern.fullmatch(sentence) for pattern in _patterns())
