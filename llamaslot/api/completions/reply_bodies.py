"""The bodies of replies: their shapes, and the figures that are the same in all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from llamaslot import __version__
from llamaslot.base.events import FinishReason, Progress, SessionMatch
from llamaslot.base.stats import Miss
from llamaslot.service.generations import Generation

FINGERPRINT = f"b{__version__}-llamaslot"
"""Clients of llama-server expect a build number: a `b` in front."""

OpenAIReason: TypeAlias = Literal["stop", "length"]
REASONS: dict[FinishReason, OpenAIReason] = {"eos": "stop", "word": "stop", "limit": "length"}


class Timings(msgspec.Struct):
    """llama-server's figures of one request or, as sums, of several; rates without a duration are 0."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class CacheUse(msgspec.Struct):
    """Where the tokens of a prompt came from, and why no more of them were reused."""

    cells: int
    """Prompt tokens whose KV was in the pool."""
    ram: int
    disk: int
    computed: int
    miss: Miss | None
    """See `Miss`; null where nothing that is known was missed."""
    diverged_at: int | None = None
    """The character of the prompt, as `/apply-template` shows it, where it leaves what is known."""
    session_match: SessionMatch | None = None
    """See `SessionMatch`; null without a session."""
    approximate_tokens: int = 0
    """Tokens that the session gave, where those of the text alone are others."""


class PromptDetails(msgspec.Struct):
    """How much of the prompt was reused."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """OpenAI's figures; a prompt of several choices counts once."""

    completion_tokens: int
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Message(msgspec.Struct):
    """A whole answer in a chat."""

    content: str
    role: str = "assistant"


class Delta(msgspec.Struct):
    """What a chunk adds to an answer in a chat."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET


class ChatChoice(msgspec.Struct):
    """A choice of a whole chat reply."""

    index: int
    message: Message
    finish_reason: OpenAIReason


class ChatChunkChoice(msgspec.Struct):
    """A choice of a chat chunk."""

    index: int
    delta: Delta
    finish_reason: OpenAIReason | None = None


class TextChoice(msgspec.Struct):
    """A choice of a text completion, whole or a chunk."""

    index: int
    text: str
    finish_reason: OpenAIReason | None = None
    logprobs: None = None


class Envelope(msgspec.Struct):
    """What surrounds the choices of OpenAI's replies."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int
    model: str
    choices: Sequence[ChatChoice | ChatChunkChoice | TextChoice]
    system_fingerprint: str = FINGERPRINT
    usage: Usage | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    cache: CacheUse | UnsetType = UNSET


def cache_use(progress: Progress) -> CacheUse:
    """What a request found in the cache."""
    return CacheUse(
        cells=progress.n_cached - progress.n_loaded,
        ram=progress.n_loaded - progress.n_read,
        disk=progress.n_read,
        computed=progress.n_prompt_computed,
        miss=progress.miss or None,
        diverged_at=progress.diverged_at if progress.diverged_at >= 0 else None,
        session_match=progress.session_match or None,
        approximate_tokens=progress.n_approximate,
    )


def timings(progress: Iterable[Progress]) -> Timings:
    """The sums over requests. The first token comes out of the prompt, so rates are over those after it."""
    several = list(progress)
    prompt_n = sum(p.n_prompt_computed for p in several)
    prompt_ms = sum(p.prompt_ms for p in several)
    predicted_ms = sum(p.predicted_ms for p in several)
    steps = sum(max(p.n_generated - 1, 0) for p in several)
    return Timings(
        cache_n=sum(p.n_cached for p in several),
        prompt_n=prompt_n,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, prompt_n),
        prompt_per_second=_ratio(1e3 * prompt_n, prompt_ms),
        predicted_n=sum(p.n_generated for p in several),
        predicted_ms=predicted_ms,
        predicted_per_token_ms=_ratio(predicted_ms, steps),
        predicted_per_second=_ratio(1e3 * steps, predicted_ms),
    )


def usage(choices: Sequence[Generation], n: int) -> Usage:
    """The figures of finished choices, `n` for each prompt: what its first one reused counts as reused."""
    prompts = [choice.end.progress for choice in choices[::n]]
    prompt_tokens = sum(p.n_prompt for p in prompts)
    completion_tokens = sum(choice.end.progress.n_generated for choice in choices)
    return Usage(
        completion_tokens,
        prompt_tokens,
        prompt_tokens + completion_tokens,
        PromptDetails(sum(p.n_cached for p in prompts)),
    )


def pick(body: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The fields that `paths` (`a` or `a/b`) name, under those names; missing ones are left out."""
    picked = {}
    for path in paths:
        value: Any = body
        for key in path.split("/"):
            if not isinstance(value, dict) or key not in value:
                break
            value = value[key]
        else:
            picked[path] = value
    return picked


def _ratio(value: float, by: float) -> float:
    return value / by if by > 0 else 0.0
