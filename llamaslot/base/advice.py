"""Advice: where prompts diverged from what was cached, the likely culprit, and hit rates with other sizes.

`Divergence` comes from the prompt worker, `HitCurve` from the engine. `CacheAdvice` is the reply to
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
    "salted",
    "evicted",
    "no_checkpoint",
    "unknown",
]
"""Reason why a prompt diverged from what was cached."""

Role: TypeAlias = Literal["", "system", "tools", "user", "assistant", "tool"]
"""Part of a prompt: whose message, or the declared tools; empty for a prompt without messages, or if unknown."""


class Divergence(msgspec.Struct, frozen=True):
    """A place where a prompt diverged from an earlier one of its client, though the text after it is the same."""

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
    """Predicted hit rates against the number of tokens that the cache keeps; the reply to `InspectHitCurve`."""

    hit_rate: float = 0.0
    """Fraction of prompt tokens that were reused since the start."""
    ram: tuple[SizeAdvice, ...] = ()
    """With RAM of other sizes: hits in the pool and in RAM."""
    disk: tuple[SizeAdvice, ...] = ()
    """With a disk of other sizes: hits in the pool, in RAM and on disk."""


class PlaceAdvice(msgspec.Struct):
    """Places of one kind where a client's prompts diverged from what was cached."""

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
