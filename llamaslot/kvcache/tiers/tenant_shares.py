"""Shares of tenants: whose KV is evicted first if several tenants use a pool or a tier.

All tenants with KV there have equal shares. KV beyond a tenant's share is evicted before that of tenants within
their share, so no tenant can evict everything of the others by sending many prompts. Others may use the part of a
share that its tenant does not fill. A tenant that has sent nothing for an hour has no share: all of its KV counts
as beyond it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from llamaslot.kvcache.tiers.segment_lru import SegmentLru

INACTIVE_S = 3600.0
"""Time without requests after which a tenant loses its share."""
_NONE: Mapping[str, int] = {}


class TenantShares:
    """Time of each tenant's last request, in seconds on the caller's clock. At the start all count as active."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._now = 0.0
        self._last_used: dict[str, float] = {}
        self.n_requests: Counter[str] = Counter()
        """Requests of each tenant that got a slot."""

    def tick(self, now: float) -> None:
        """Advance the clock."""
        self._now = now
        if self._started is None:
            self._started = now

    def keep_active(self, tenant: str) -> None:
        """Record that a tenant's KV is used, so that it keeps its share."""
        self._last_used[tenant] = self._now

    def use(self, tenant: str, *, is_new: bool = True) -> None:
        """Record that a tenant's request got a slot; `is_new` is False if it had one before."""
        self.keep_active(tenant)
        self.n_requests[tenant] += is_new

    def excess(
        self, used: Mapping[str, int], capacity: int, tenant: str | None = None, n: int = 0
    ) -> dict[str, int]:
        """Return by how much each tenant exceeds its share of `capacity`; negative for those below it.

        `used` has the amount of each tenant, in any unit; `tenant` is about to get `n` more.
        """
        amounts = {each: amount for each, amount in used.items() if amount}
        if tenant is not None and n:
            amounts[tenant] = amounts.get(tenant, 0) + n
        share = capacity // max(1, sum(map(self._is_active, amounts)))
        return {each: amount - share * self._is_active(each) for each, amount in amounts.items()}

    def losers(
        self, tier: SegmentLru, tenant: str, n_bytes: int, reserved: Mapping[str, int] = _NONE
    ) -> Collection[str]:
        """Return the tenants one of whom must lose a segment before `tenant` gets `n_bytes`; empty if they fit.

        `reserved` has further bytes of each tenant that the tier does not count itself.
        """
        used = {each: tier.used[each] + reserved.get(each, 0) for each in {*tier.used, *reserved}}
        if exceeds_limit(tier, tenant, used.get(tenant, 0) + n_bytes):
            return (tenant,)
        if sum(used.values()) + n_bytes <= tier.capacity:
            return ()
        return [each for each, n in self.excess(used, tier.capacity, tenant, n_bytes).items() if n > 0]

    def kept_by_others(self, tier: SegmentLru, tenant: str, n_bytes: int, kept: Mapping[str, int]) -> int:
        """Return the bytes that others keep if `tenant` gets `n_bytes`: up to their share, at least `kept`."""
        excess = self.excess(tier.used, tier.capacity, tenant, n_bytes)
        others = {*tier.used} - {tenant}
        return sum(max(kept.get(each, 0), tier.used[each] - max(0, excess.get(each, 0))) for each in others)

    def _is_active(self, tenant: str) -> bool:
        last_used = self._last_used.get(tenant, self._started if self._started is not None else self._now)
        return self._now - last_used < INACTIVE_S


def exceeds_limit(tier: SegmentLru, tenant: str, n_bytes: int) -> bool:
    """True if `n_bytes` exceed the tenant's limit in a tier. Only API keys have one, not the nameless tenant."""
    return 0 < tier.limit < n_bytes and bool(tenant)
