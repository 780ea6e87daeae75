"""A mapping that stays below a number of bytes, in which owners have shares."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from llamaslot.base.callers import OwnerShares


class Sized(Protocol):
    """A value that knows about how much memory it takes."""

    @property
    def n_bytes(self) -> int:
        """Bytes in memory, estimated."""


V = TypeVar("V", bound=Sized)


class LruCache(Generic[V]):
    """Values by digest; beyond `max_bytes` the least recently used one of the owner that holds most is evicted.

    Who uses it on several threads holds a lock, but for its length and `n_bytes`. `clock` is as in `OwnerShares`.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.max_bytes = max_bytes
        self._values: OrderedDict[bytes, V] = OrderedDict()
        self._shares: OwnerShares[bytes] = OwnerShares(clock)

    @property
    def n_bytes(self) -> int:
        """Bytes of all values, estimated."""
        return self._shares.n_bytes

    def __len__(self) -> int:
        """Count the values."""
        return len(self._values)

    def __contains__(self, digest: bytes) -> bool:
        """True if there is a value; does not count as a use."""
        return digest in self._values

    def values(self) -> Iterable[V]:
        """Return all values, the least recently used first."""
        return self._values.values()

    def items(self) -> Iterable[tuple[bytes, V]]:
        """Return all digests with their values, the least recently used first."""
        return self._values.items()

    def peek(self, digest: bytes) -> V | None:
        """Return a value; does not count as a use."""
        return self._values.get(digest)

    def get(self, digest: bytes) -> V | None:
        """Return a value and make it the most recently used one."""
        value = self._values.get(digest)
        if value is not None:
            self._values.move_to_end(digest)
            self._shares.use(digest)
        return value

    def put(self, digest: bytes, value: V, owner: str = "") -> None:
        """Set a value of an owner, in place of an earlier one.

        It is not kept if it is larger than `max_bytes`, or if its owner would hold most and has no other to evict.
        """
        self.drop(digest)
        if value.n_bytes > self.max_bytes:
            return
        while self.n_bytes + value.n_bytes > self.max_bytes:
            evicted = self._shares.evicted_next(owner, value.n_bytes)
            if evicted is None:
                return
            self.drop(evicted)
        self._values[digest] = value
        self._shares.add(digest, owner)
        self._shares.charge(owner, value.n_bytes)

    def drop(self, digest: bytes) -> V | None:
        """Remove and return a value."""
        value = self._values.pop(digest, None)
        if value is not None:
            self._shares.charge(self._shares.remove(digest), -value.n_bytes)
        return value

    def clear(self) -> None:
        """Remove all values."""
        self._values.clear()
        self._shares.clear()
