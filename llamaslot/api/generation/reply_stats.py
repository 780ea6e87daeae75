"""Statistics that replies of all APIs are made from: `timings`, `cache`, `usage` and the progress of a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from llamaslot.base.events import Finished, Output, Progress
from llamaslot.base.stats import MISS_FLAGS, Miss
from llamaslot.base.tokens import SessionMatch
from llamaslot.service.live_request import Completion


class Timings(msgspec.Struct):
    """llama-server's counts and times of one completion, or sums over several; rates without a duration are 0."""

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
    """Origin of the prompt tokens, and the reason why no more of them were reused."""

    cells: int
    """Prompt tokens whose KV was in the pool."""
    ram: int
    disk: int
    remote: int
    computed: int
    miss: Miss | None
    """A value of `Miss`; null if all cached tokens of the prompt were reused."""
    miss_flag: str | UnsetType = UNSET
    """The server's flag that overrides this; only where there is one."""
    diverged_at: int | None = None
    """Character at which the prompt departs from the cached tokens.

    The prompt is that of `/apply-template`, except for restored messages.
    """
    session_match: SessionMatch | None = None
    """A value of `SessionMatch`; null without a session."""
    approximate_tokens: int = 0
    """Tokens taken from the session although tokenizing the text alone gives others."""
    restored_tokens: int = 0
    """Tokens of messages that the server sent before, as it generated them."""


class PromptDetails(msgspec.Struct):
    """Reused prompt tokens."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """OpenAI's token counts; a prompt of several choices counts once."""

    completion_tokens: int
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TokenCount(msgspec.Struct):
    """Tokens of a prompt."""

    input_tokens: int


class PromptProgress(msgspec.Struct):
    """llama-server's progress of computing a prompt."""

    total: int
    cache: int
    processed: int
    time_ms: int

    @classmethod
    def of(cls, event: Output | Finished) -> PromptProgress | None:
        """Return the progress that an event carries; None for all others."""
        prefill = event.prefill if isinstance(event, Output) else None
        if prefill is None:
            return None
        return cls(progress_of(event).n_prompt, prefill.n_cached, prefill.n_processed, int(prefill.ms))


def progress_of(event: Output | Finished) -> Progress:
    """Return the progress of an event that has it: the first, the last, or any where the client asked for it."""
    assert event.progress is not None
    return event.progress


def cache_use(progress: Progress) -> CacheUse:
    """Return what a request found in the cache."""
    return CacheUse(
        cells=progress.n_cached - progress.n_loaded,
        ram=progress.n_loaded - progress.n_read - progress.n_fetched,
        disk=progress.n_read,
        remote=progress.n_fetched,
        computed=progress.n_prompt_computed,
        miss=progress.miss or None,
        miss_flag=MISS_FLAGS.get(progress.miss, UNSET),
        diverged_at=progress.diverged_at if progress.diverged_at >= 0 else None,
        session_match=progress.session_match or None,
        approximate_tokens=progress.n_approximate,
        restored_tokens=progress.n_restored,
    )


def timings(progress: Iterable[Progress]) -> Timings:
    """Return sums over completions. The first token comes from the prompt, so rates count the tokens after it."""
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


def stats_of(progress: Sequence[Progress]) -> dict[str, Any]:
    """Return the `timings` of completions, which are sums, and the `cache` of the first one."""
    return {"timings": timings(progress), "cache": cache_use(progress[0])}


def usage(completions: Sequence[Completion]) -> Usage:
    """Return the usage of finished completions. A prompt counts once, with the reused tokens of its first one."""
    prompts: dict[str, Progress] = {}
    for each in completions:
        prompts.setdefault(each.params.group or each.params.request_id, each.end.progress)
    n_prompt = sum(progress.n_prompt for progress in prompts.values())
    n_generated = sum(each.end.progress.n_generated for each in completions)
    n_cached = sum(progress.n_cached for progress in prompts.values())
    return Usage(n_generated, n_prompt, n_prompt + n_generated, PromptDetails(n_cached))


def _ratio(value: float, by: float) -> float:
    return value / by if by > 0 else 0.0
