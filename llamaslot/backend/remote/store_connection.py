"""Connection to a remote store: names of keys, and calls with a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis import exceptions
from redis.asyncio import Redis

from llamaslot.backend.failure_log import FailureLog
from llamaslot.kvcache.remote.remote_io import RemoteUnavailableError

_T = TypeVar("_T")


class StoreConnection:
    """A client of the store, whose keys begin with `prefix`."""

    def __init__(
        self, client: Redis, prefix: str, timeout_s: float, failures: FailureLog, address: str = ""
    ) -> None:
        self.client: Any = client
        self.prefix = prefix
        self.timeout_s = timeout_s
        """Time limit of a call that transfers no object, in seconds."""
        self.address = address
        """The store's URL in messages."""
        self._failures = failures

    def name(self, kind: str, digest: bytes) -> str:
        """Return the key of this kind for a digest."""
        return f"{self.prefix}{kind}:{digest.hex()}"

    async def within(self, call: Callable[[], Awaitable[_T]], seconds: float | None = None) -> _T:
        """Return the result of a call; raises `RemoteUnavailableError` if it fails or takes longer than `seconds`.

        `timeout_s` is the default.
        """

        async def limited() -> _T:
            async with asyncio.timeout(self.timeout_s if seconds is None else seconds):
                return await call()

        return await self.unlimited(limited)

    async def unlimited(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Return the result of a call that the caller limits; raises `RemoteUnavailableError` if it fails."""
        try:
            return await call()
        except (exceptions.RedisError, OSError, TimeoutError, ValueError) as error:
            self._failures.add("remote.unavailable", error, flag="--cache-remote", url=self.address)
            raise RemoteUnavailableError(str(error) or type(error).__name__) from error
