"""Shares of owners (`Caller.owner`) in a bounded memory of replies: which entry is evicted first.

The least recently used entry of the owner that holds most is evicted. That owner has at least its equal share, so
one that sends much never evicts an entry of an owner that is below its share. Owners may use what others leave, as
with the KV of tenants (`kvcache/tiers/tier_budget.py`). One that has added and used nothing for an hour has no
share: its entries are evicted first.

    capacity   |-- owner 1 ---|---------- owner 2 -----------|-- owner 3 ---|
                                 evicted first
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from llamaslot.base.callers import Amounts

INACTIVE_S = 3600.0
"""Time without a use after which an owner has no share."""
K = TypeVar("K", bound=Hashable)


class OwnerShares(Generic[K]):
    """Keys of entries by owner, in the order of their last use, and the bytes that each owner holds.

    `clock` gives seconds; without one no owner is ever inactive.
    """

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._clock = clock
        self._owner_of: dict[K, str] = {}
        self._keys: OrderedDict[str, OrderedDict[K, None]] = OrderedDict()
        """By owner, the least recently used first; so are the owners."""
        self._last_used: dict[str, float] = {}
        """Times of owners that have entries."""
        self._bytes = Amounts()

    @property
    def n_bytes(self) -> int:
        """Bytes of all owners."""
        return self._bytes.total

    def __len__(self) -> int:
        """Count the entries."""
        return len(self._owner_of)

    def __contains__(self, key: object) -> bool:
        """True if there is an entry."""
        return key in self._owner_of

    def __iter__(self) -> Iterator[K]:
        """Iterate over the keys of all entries."""
        return iter(self._owner_of)

    def add(self, key: K, owner: str) -> None:
        """Add an entry that is not here, as the most recently used one; `charge` adds its bytes."""
        self._owner_of[key] = owner
        self._keys.setdefault(owner, OrderedDict())[key] = None
        self._keep_active(owner)

    def use(self, key: K) -> None:
        """Make an entry the most recently used one of its owner."""
        owner = self._owner_of[key]
        self._keys[owner].move_to_end(key)
        self._keep_active(owner)

    def remove(self, key: K) -> str:
        """Remove an entry and return its owner, which keeps its bytes until they are charged back."""
        owner = self._owner_of.pop(key)
        del self._keys[owner][key]
        if not self._keys[owner]:
            del self._keys[owner], self._last_used[owner]
        return owner

    def charge(self, owner: str, n_bytes: int) -> None:
        """Count bytes that an owner holds, or with a negative number holds no more."""
        self._bytes.add(owner, n_bytes)

    def clear(self) -> None:
        """Remove all entries and bytes."""
        self._owner_of.clear()
        self._keys.clear()
        self._last_used.clear()
        self._bytes = Amounts()

    def evicted_next(
        self,
        owner: str,
        n_bytes: int,
        *,
        by_count: bool = False,
        can_evict: Callable[[K], bool] = lambda key: True,
    ) -> K | None:
        """Return the key to evict before an owner gets `n_bytes` more in an entry.

        It is of an inactive owner, or else of the one that would hold most bytes, or with `by_count` most entries,
        among those that have an entry which `can_evict`. None if the owner itself would hold most and has none:
        it must do without.
        """

        def held(each: str) -> tuple[int, bool, str]:
            amount = len(self._keys.get(each, ())) if by_count else self._bytes[each]
            added = (1 if by_count else n_bytes) if each == owner else 0
            # Where several hold as much, the one that wants more gives way.
            return amount + added, each == owner, each

        # What requests in progress keep of an owner cannot be evicted: that must not stop the others.
        first = {each: next(filter(can_evict, keys), None) for each, keys in self._keys.items()}
        inactive_since = self._clock() - INACTIVE_S
        for each, key in first.items():
            if self._last_used[each] > inactive_since:
                break
            if key is not None and each != owner:
                return key
        largest = max({owner, *(each for each, key in first.items() if key is not None)}, key=held)
        return first.get(largest)

    def _keep_active(self, owner: str) -> None:
        self._keys.move_to_end(owner)
        self._last_used[owner] = self._clock()
