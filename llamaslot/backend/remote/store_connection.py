"""Connection to a remote store: names of keys, calls with limits of time and size, and checks of their results.

The store is not trusted: it may answer anything, of any length, at any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

from redis import exceptions
from redis.asyncio import Redis

from llamaslot.backend.failure_log import FailureLog
from llamaslot.backend.remote.reply_parser import ELEMENT_BYTES, allowing
from llamaslot.kvcache.tiers.remote_io import RemoteUnavailableError

_MAX_NUMBER = 2**53
"""Largest plausible count or size in a store; still fits into an index entry."""

_T = TypeVar("_T")


class StoreConnection:
    """A client of the store, whose keys begin with `prefix`."""

    def __init__(
        self, client: Redis, prefix: str, timeout_s: float, failures: FailureLog, address: str = ""
    ) -> None:
        self.client: Any = client
        self.prefix = prefix
        self.timeout_s = timeout_s
        """Time limit, in seconds, of calls that transfer no object."""
        self.address = address
        """The store's URL in messages."""
        self._failures = failures

    def name(self, kind: str, digest: bytes) -> str:
        """Return the key of a kind (such as `d`) for a digest."""
        return f"{self.prefix}{kind}:{digest.hex()}"

    async def within(self, call: Callable[[], Awaitable[_T]], seconds: float | None = None, n_bytes: int = 0) -> _T:
        """Return the result of a call; raises `RemoteUnavailableError` if it fails or takes longer than `seconds`.

        The default of `seconds` is `timeout_s`; `n_bytes` is as in `unlimited`.
        """

        async def limited() -> _T:
            async with asyncio.timeout(self.timeout_s if seconds is None else seconds):
                return await call()

        return await self.unlimited(limited, n_bytes)

    async def unlimited(self, call: Callable[[], Awaitable[_T]], n_bytes: int = 0) -> _T:
        """Return the result of a call; raises `RemoteUnavailableError` if it fails. The caller sets a time limit.

        The call may receive `n_bytes` (`size_of`) of data.
        """
        try:
            with allowing(n_bytes):
                return await call()
        except RemoteUnavailableError:
            raise
        except (exceptions.RedisError, OSError, TimeoutError, ValueError) as error:
            self._fail(error)
        except (TypeError, LookupError, AttributeError, EOFError) as error:
            # Raised by the client itself, which does not check the types of replies.
            self._fail(ValueError(f"the store answers with unexpected types ({error})"))

    def _fail(self, error: Exception) -> NoReturn:
        self._failures.add("remote.unavailable", error, flag="--cache-remote", url=self.address)
        raise RemoteUnavailableError(str(error) or type(error).__name__) from error


def size_of(n_values: int, n_bytes: int) -> int:
    """Return the size of replies with `n_values` values of at most `n_bytes` each."""
    return n_values * (ELEMENT_BYTES + n_bytes)


def values(reply: object, n: int | None = None) -> list[bytes | None]:
    """Return a reply that must be a list, of `n` values if given; raises `ValueError`."""
    if not isinstance(reply, list) or not all(each is None or isinstance(each, bytes) for each in reply):
        raise ValueError("the store does not answer with a list of values")
    if n is not None and len(reply) != n:
        raise ValueError(f"the store answers with {len(reply)} values instead of {n}")
    return reply


def number(reply: object) -> int:
    """Return a reply that must be a count or size; raises `ValueError` for anything else."""
    if not isinstance(reply, int) or not 0 <= reply <= _MAX_NUMBER:
        raise ValueError("the store does not answer with a size")
    return int(reply)
