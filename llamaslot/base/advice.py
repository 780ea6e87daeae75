"""Advice: where prompts parted from what was cached, the likely culprit, and hit rates with other sizes.

`Parting` comes from the prompt worker, `HitCurve` from the engine. `CacheAdvice` is the reply to
`GET /cache/advice`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

Culprit: TypeAlias = Literal[
    "date",
    "git_status",
    "directory",
    "model",
    "id",
    "attribution",
    "reminder",
    "tool_order",
    "tools",
    "reasoning",
    "trimmed",
    "salt",
    "evicted",
    "no_checkpoint",
    "unknown",
]
"""What made a prompt depart from what was cached."""

MEANINGS: dict[Culprit, tuple[str, str]] = {
    "date": (
        "a date or time",
        "Have the client put the date into its last message, or at least no clock time into the system prompt. "
        "Where the chat template writes the date, send the same `date_string` in `chat_template_kwargs`.",
    ),
    "git_status": (
        "the git status",
        "Turn it off in the client (Claude Code: `includeGitInstructions: false` in its settings), or have it sent "
        "with the last message.",
    ),
    "directory": (
        "the working directory",
        "Start the agent in one folder, or have the client name the folder in a message after the system prompt "
        "(claude -p: --exclude-dynamic-system-prompt-sections).",
    ),
    "model": (
        "another model's name",
        "The server has one model: have the client ask for it by one name.",
    ),
    "id": (
        "an id that is new each time",
        "Leave ids out of the prompt, or put them into the last message; --drop-volatile with a regular expression "
        "removes one at the start of a system message.",
    ),
    "attribution": (
        "an attribution header",
        "--drop-volatile claude-code (the default) removes Claude Code's; a regular expression removes another one "
        "at the start of a system message.",
    ),
    "reminder": (
        "a reminder that moves to the latest message",
        "Leave reminders in the messages with which they were sent, or turn them off in the client.",
    ),
    "tool_order": (
        "tools in another order",
        "Have the client sort its tools by name.",
    ),
    "tools": (
        "changed, added or removed tools",
        "Declare the same tools from the first request on: start MCP servers before the first prompt, and forbid "
        "calls by `tool_choice` instead of leaving tools out.",
    ),
    "reasoning": (
        "reasoning that is not in the next prompt",
        "Have the client send `reasoning_content` back, keep --restore-messages on, and where the template has "
        "such a variable (`preserve_thinking`), set it in `chat_template_kwargs`.",
    ),
    "trimmed": (
        "the oldest messages were left out",
        "Give the client a context of the size of a slot's (`n_ctx` of /slots), and have it drop many messages at "
        "once instead of one each turn.",
    ),
    "salt": (
        "another cache_salt",
        "Send one cache_salt for all requests of a user.",
    ),
    "evicted": (
        "evicted for lack of memory",
        "Raise --cache-ram or -c, or set --cache-disk; `ram` and `disk` say what that brings.",
    ),
    "no_checkpoint": (
        "no checkpoint to continue from",
        "Raise --checkpoint-ram.",
    ),
    "unknown": (
        "text that changed before text that did not",
        "Put text that changes after text that does not.",
    ),
}
"""For each culprit its name in a sentence, and what helps."""

Role: TypeAlias = Literal["", "system", "tools", "user", "assistant", "tool"]
"""Part of a prompt: whose message, or the declared tools; empty for a prompt without messages, or if unknown."""
WHERE: dict[Role, str] = {
    "system": "in the system prompt",
    "tools": "in the tools",
    "user": "in a message of the user",
    "assistant": "in a message of the model",
    "tool": "in a tool's result",
    "": "",
}
"""Each role in words."""


class Parting(msgspec.Struct, frozen=True):
    """A place where a prompt parted from an earlier one of its client, though the text after it is the same."""

    culprit: Culprit
    tokens: int
    """Prompt tokens after it that had been computed for an earlier prompt, and are computed again."""
    role: Role = ""
    offset: int = -1
    """Characters of the prompt before it; -1 if that is unknown."""
    before: str = ""
    """Text before the place; empty unless text is shown (`--cache-debug-text`), like the next two."""
    old: str = ""
    """Text of the earlier prompt from the place on, until it agrees again."""
    new: str = ""


class SizeAdvice(msgspec.Struct, frozen=True):
    """The hit rate with a tier of some size."""

    bytes: int
    hit_rate: float
    is_current: bool = False


class HitCurve(msgspec.Struct, frozen=True):
    """Predicted hit rates against the number of tokens that the cache keeps; the reply to `PredictHits`."""

    hit_rate: float = 0.0
    """Fraction of prompt tokens that were reused since the start."""
    ram: tuple[SizeAdvice, ...] = ()
    """With RAM of other sizes: hits in the pool and in RAM."""
    disk: tuple[SizeAdvice, ...] = ()
    """With a disk of other sizes: hits in the pool, in RAM and on disk."""


class PlaceAdvice(msgspec.Struct):
    """Places of one kind where a client's prompts parted from what was cached."""

    culprit: Culprit
    meaning: str
    """The culprit in words."""
    fix: str
    role: Role
    where: str
    """The role in words; empty if it is unknown."""
    offset: int
    """Characters before the latest place; -1 if that is unknown."""
    requests: int
    tokens: int
    """Prompt tokens computed again, of all these requests."""
    last_request_id: str
    before: str | UnsetType = UNSET
    """Text before the latest place, if the server shows text, and the differing text of both prompts."""
    old: str | UnsetType = UNSET
    new: str | UnsetType = UNSET


class ClientAdvice(msgspec.Struct):
    """A client: an API key; without keys a session, else an address."""

    client: str
    """Its digest."""
    requests: int
    prompt_tokens: int
    computed_tokens: int
    """Of `prompt_tokens`, those that were not cached."""
    places: tuple[PlaceAdvice, ...]
    """Those with the most tokens first."""


class CacheAdvice(msgspec.Struct):
    """The reply to `GET /cache/advice`."""

    clients: tuple[ClientAdvice, ...]
    """Those with the most tokens computed again first."""
    hit_rate: float
    """Fraction of prompt tokens that were reused since the start."""
    ram: tuple[SizeAdvice, ...]
    """Predicted hit rates with other sizes of `--cache-ram`; empty before there is enough to predict from."""
    disk: tuple[SizeAdvice, ...]
    """The same of `--cache-disk-size`; empty without a disk."""
