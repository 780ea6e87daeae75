"""Adviser: counts, for each client, where its prompts diverged from what was cached, for `GET /cache/advice`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from msgspec import UNSET

from llamaslot.base.advice import ClientAdvice, Culprit, Divergence, PlaceAdvice, Role

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
    "salted": (
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

WHERE: dict[Role, str] = {
    "system": "in the system prompt",
    "tools": "in the tools",
    "user": "in a message of the user",
    "assistant": "in a message of the model",
    "tool": "in a tool's result",
    "": "",
}
"""Each role in words."""

MAX_CLIENTS = 256
"""Clients that are known: those that sent a request most recently."""


@dataclass(slots=True)
class _Client:
    n_requests: int = 0
    n_prompt: int = 0
    n_computed: int = 0
    places: dict[tuple[Culprit, Role], PlaceAdvice] = field(default_factory=dict)


class Adviser:
    """Requests of each client, and the places where they diverged: of few kinds, so few are kept."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, _Client] = OrderedDict()

    def count(self, client: str, n_prompt: int, n_cached: int) -> None:
        """Count a request that got a slot."""
        known = self._clients.setdefault(client, _Client())
        self._clients.move_to_end(client)
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)
        known.n_requests += 1
        known.n_prompt += n_prompt
        known.n_computed += n_prompt - n_cached

    def add(self, client: str, request_id: str, divergence: Divergence) -> None:
        """Add the place where a counted request diverged."""
        known = self._clients.get(client)
        if known is None:
            # Many others have sent requests since.
            return
        kind = divergence.culprit, divergence.role
        before = known.places.get(kind)
        meaning, fix = MEANINGS[divergence.culprit]
        has_text = bool(divergence.before or divergence.old or divergence.new)
        known.places[kind] = PlaceAdvice(
            culprit=divergence.culprit,
            meaning=meaning,
            fix=fix,
            role=divergence.role,
            where=WHERE[divergence.role],
            offset=divergence.offset,
            requests=1 + (before.requests if before is not None else 0),
            tokens=divergence.tokens + (before.tokens if before is not None else 0),
            last_request_id=request_id,
            before=divergence.before if has_text else UNSET,
            old=divergence.old if has_text else UNSET,
            new=divergence.new if has_text else UNSET,
        )

    def drop_texts(self) -> None:
        """Forget the texts of all places, but not the counts."""
        for known in self._clients.values():
            for place in known.places.values():
                place.before = place.old = place.new = UNSET

    def clients(self) -> tuple[ClientAdvice, ...]:
        """Return the advice for each client that has a place, those with the most tokens computed again first."""
        found = [
            ClientAdvice(
                client=client,
                requests=known.n_requests,
                prompt_tokens=known.n_prompt,
                computed_tokens=known.n_computed,
                places=tuple(sorted(known.places.values(), key=lambda place: -place.tokens)),
            )
            for client, known in self._clients.items()
            if known.places
        ]
        return tuple(sorted(found, key=lambda each: -sum(place.tokens for place in each.places)))
