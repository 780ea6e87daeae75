"""Statistics of the reuse by requests that have ended."""

from __future__ import annotations

from msgspec.structs import replace

from llamaslot.base.stats import CacheStats, Miss, PromptStats, RequestStats
from llamaslot.scheduler.request import Request


class ReuseStats:
    """Counts hits by tier, misses, and reused tokens of requests that have ended."""

    def __init__(self) -> None:
        self.requests = RequestStats()
        self.prompt_tokens = PromptStats()
        self.miss_reasons: dict[Miss, int] = {}

    def count(self, request: Request) -> None:
        """Count a request that has ended."""
        if request.miss and request.has_started:
            self.miss_reasons[request.miss] = self.miss_reasons.get(request.miss, 0) + 1
        if request.is_private or not request.has_started:
            return
        n_cached, requests, tokens = request.n_cached, self.requests, self.prompt_tokens
        tokens.total += request.n_prompt
        tokens.matched += n_cached
        tokens.restored += request.prompt.n_replies
        tokens.hit_rate = tokens.matched / max(tokens.total, 1)
        if n_cached:
            requests.hits += 1
            if request.n_fetched:
                requests.from_remote += 1
            elif request.n_read:
                requests.from_disk += 1
            elif request.n_loaded:
                requests.from_ram += 1
            elif request.n_copied:
                requests.cross_slot += 1
            else:
                requests.same_slot += 1
            requests.anchored += request.prompt.n_anchored > 0
            requests.restored += request.prompt.n_replies > 0
            requests.in_session += request.prompt.session_match in ("exact", "extend", "diverge")
        else:
            requests.misses += 1
        requests.hit_rate = requests.hits / (requests.hits + requests.misses)

    def add_to(self, stats: CacheStats) -> None:
        """Fill in the fields of the cache's statistics that are about requests."""
        stats.requests = replace(self.requests)
        stats.prompt_tokens = replace(self.prompt_tokens)
        stats.miss_reasons = dict(self.miss_reasons)
