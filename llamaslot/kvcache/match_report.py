"""Report of a match: in which tiers the KV of its tokens is, and why no more of them are cached."""

from __future__ import annotations

from collections.abc import Iterable

from llamaslot.base.stats import CacheProbe, Miss
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.ghost_list import GhostList
from llamaslot.kvcache.match import Match, SegmentPart


def probe_of(match: Match, loaded: Iterable[SegmentPart], n_tokens: int, miss: Miss) -> CacheProbe:
    """Return how many of a prompt's `n_tokens` each tier has; `loaded` are the parts that a request would load."""
    in_ram = on_disk = 0
    for part in loaded:
        if part.segment.state.is_loadable:
            in_ram += part.end - part.start
        else:
            on_disk += part.end - part.start
    return CacheProbe(
        prompt_tokens=n_tokens,
        cells=match.n_resident,
        ram=in_ram,
        disk=on_disk,
        computed=n_tokens - match.n_cached,
        matched=match.n_matched,
        miss=miss or None,
    )


def miss_reason(match: Match, ghosts: GhostList, min_shared: int) -> Miss:
    """Return why no more of the tokens are cached; empty if all are, or if nothing explains it."""
    n = match.n_cached
    if n * WIDTH == len(match.tokens):
        return ""
    if match.n_without_state >= min_shared:
        return "no_checkpoint"
    if ghosts.continues(match.namespace, match.tokens, n + match.n_without_state):
        return "evicted"
    if n < min_shared:
        return "salted" if match.namespace else "cold"
    return "diverged" if any(each.diverges_at(n) for each in (match, match.public) if each is not None) else ""
