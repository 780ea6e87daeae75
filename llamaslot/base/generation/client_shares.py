"""Shares of clients in a bounded memory of replies: which entry is evicted first.

The least recently used entry of the client that holds most is evicted. A client that holds most has at least its
equal share, so one that sends much never evicts an entry of a client that is below its share. Clients may use what
others leave, as with the KV of tenants (`kvcache/offload/tenant_shares.py`).

    capacity   |-- client 1 --|---------- client 2 ----------|-- client 3 --|
                                 evicted first
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class ClientShares(Generic[K]):
    """Keys of entries by client, in the order of their last use, and the bytes that each client holds."""

    def __init__(self) -> None:
        self._client_of: dict[K, str] = {}
        self._keys: dict[str, OrderedDict[K, None]] = {}
        """By client, the least recently used first."""
        self._bytes: Counter[str] = Counter()
        self.n_bytes = 0
        """Of all clients."""

    def __len__(self) -> int:
        """Count the entries."""
        return len(self._client_of)

    def __contains__(self, key: object) -> bool:
        """True if there is an entry."""
        return key in self._client_of

    def __iter__(self) -> Iterator[K]:
        """Iterate over the keys of all entries."""
        return iter(self._client_of)

    def add(self, key: K, client: str) -> None:
        """Add an entry that is not here, as the most recently used one; `charge` adds its bytes."""
        self._client_of[key] = client
        self._keys.setdefault(client, OrderedDict())[key] = None

    def use(self, key: K) -> None:
        """Make an entry the most recently used one of its client."""
        self._keys[self._client_of[key]].move_to_end(key)

    def remove(self, key: K) -> str:
        """Remove an entry and return its client, which keeps its bytes until they are charged back."""
        client = self._client_of.pop(key)
        del self._keys[client][key]
        if not self._keys[client]:
            del self._keys[client]
        return client

    def charge(self, client: str, n_bytes: int) -> None:
        """Count bytes that a client holds, or with a negative number holds no more."""
        self.n_bytes += n_bytes
        self._bytes[client] += n_bytes
        if not self._bytes[client]:
            del self._bytes[client]

    def clear(self) -> None:
        """Remove all entries and bytes."""
        self._client_of.clear()
        self._keys.clear()
        self._bytes.clear()
        self.n_bytes = 0

    def evicted_next(self, client: str, n_bytes: int, *, by_count: bool = False) -> K | None:
        """Return the key to be evicted before a client gets `n_bytes` more in an entry.

        It is of the client that would hold most bytes, or with `by_count` most entries. None if that one has no
        entry to be evicted: it must do without, as no other holds more.
        """

        def held(each: str) -> tuple[int, bool, str]:
            amount = len(self._keys.get(each, ())) if by_count else self._bytes[each]
            added = (1 if by_count else n_bytes) if each == client else 0
            # Where several hold as much, the one that wants more gives way.
            return amount + added, each == client, each

        largest = max({*self._bytes, *self._keys, client}, key=held)
        return next(iter(self._keys.get(largest, ())), None)
