"""A mapping that stays below a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """A value that knows about how much memory it takes."""

    @property
    def n_bytes(self) -> int:
        """Bytes in memory, estimated."""


V = TypeVar("V", bound=Sized)


class LruCache(Generic[V]):
    """Values by digest; beyond `max_bytes` the least recently used one goes.

    One thread changes it; others may read its length and `n_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self._values: OrderedDict[bytes, V] = OrderedDict()

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
        return value

    def put(self, digest: bytes, value: V) -> None:
        """Set a value, in place of an earlier one; a value that is too large alone is not kept."""
        self.drop(digest)
        if value.n_bytes > self.max_bytes:
            return
        self._values[digest] = value
        self.n_bytes += value.n_bytes
        while self.n_bytes > self.max_bytes:
            self.drop(next(iter(self._values)))

    def drop(self, digest: bytes) -> V | None:
        """Remove and return a value."""
        value = self._values.pop(digest, None)
        if value is not None:
            self.n_bytes -= value.n_bytes
        return value

    def clear(self) -> None:
        """Remove all values."""
        self._values.clear()
        self.n_bytes = 0
