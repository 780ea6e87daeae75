"""Size and expiry of the objects in a remote store. All servers together keep the sum within one limit.

l     sorted set: objects with their sizes, by time of expiry
n     sum of these sizes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from llamaslot.backend.remote.sealing import DIGEST_BYTES
from llamaslot.backend.remote.store_connection import StoreConnection, size_of, values
from llamaslot.backend.remote.store_entries import digest_and_size, member_of
from llamaslot.backend.remote.store_settings import StoreSettings
from llamaslot.kvcache.tiers.remote_io import RemoteObject

_MAX_DELETED = 8
"""Most expired objects to delete before an upload."""
_MEMBER_BYTES = 2 * DIGEST_BYTES + 21
"""Most bytes of a member: a digest in hex, a colon and a size."""
_PAGE = 1000
"""Number of members that are read at once."""
_RECOUNT_S = 600.0
"""Interval at which a server recomputes the sum. It becomes wrong if a server ends or times out between two
commands, or if the store evicts keys.
"""


class StoreBudget:
    """Counts objects, deletes those that expire first if the limit is exceeded, and renews the TTL of used ones."""

    def __init__(self, store: StoreConnection, settings: StoreSettings, clock: Callable[[], float]) -> None:
        self._store = store
        self._client = store.client
        self._settings = settings
        self._clock = clock
        self._recounts_at = 0.0
        self._list, self._sum = store.prefix + "l", store.prefix + "n"

    async def reserve(self, wanted: RemoteObject) -> None:
        """Count an object, and delete others in the order of their expiry until the sum is within the limit."""
        listed, total, now = self._list, self._sum, self._clock()
        n_bytes = wanted.n_bytes + wanted.state_bytes

        async def count() -> int:
            expired = await self._client.zrangebyscore(listed, "-inf", now, start=0, num=_MAX_DELETED)
            await self.delete(_members(expired)[:_MAX_DELETED])
            # It may replace the same object without a state.
            without = member_of(replace(wanted, state_bytes=0))
            if wanted.state_bytes and await self._client.zrem(listed, without):
                await self._client.decrby(total, wanted.n_bytes)
            if await self._client.zadd(listed, {member_of(wanted): now + self._settings.ttl_s}):
                return int(await self._client.incrby(total, n_bytes))
            return int(await self._client.get(total) or 0)

        async def recount() -> int:
            n_all, at, has_more = 0, 0, True
            while has_more:
                members = await self._store.within(
                    partial(self._page, at, at + _PAGE - 1), n_bytes=size_of(_PAGE, _MEMBER_BYTES)
                )
                n_all += sum(digest_and_size(each)[1] for each in members)
                at, has_more = at + _PAGE, len(members) == _PAGE
            await self._store.within(lambda: self._client.set(total, n_all))
            return n_all

        n_all = await self._store.within(count, n_bytes=size_of(_MAX_DELETED, _MEMBER_BYTES))
        limit = self._settings.max_bytes
        if limit and now >= self._recounts_at:
            self._recounts_at = now + _RECOUNT_S
            n_all = await recount()
        while limit and n_all > limit:
            oldest = await self._store.within(partial(self._page, 0, 1))
            # Other servers may have other clocks or TTLs, so the new object itself may be the first to expire.
            others = [each for each in oldest if each != member_of(wanted)]
            if not others:
                # Only the new object is left, so the sum was wrong: a server may have ended between two commands.
                await self._store.within(lambda: self._client.set(total, n_bytes))
                return
            n_all -= await self.delete(others[:1])

    async def _page(self, first: int, last: int) -> list[bytes]:
        """Return members of the sorted set by their rank."""
        return _members(await self._client.zrange(self._list, first, last))

    async def keep(self, wanted: RemoteObject) -> None:
        """Restart the TTL of an object, because it is used."""
        ttl = self._settings.ttl_s

        async def put_off() -> None:
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.zadd(self._list, {member_of(wanted): self._clock() + ttl}, xx=True)
                pipe.expire(self._store.name("d", wanted.digest), ttl)
                self.keep_list(pipe)
                await pipe.execute()

        await self._store.within(put_off)

    async def count_again(self, wanted: RemoteObject) -> None:
        """Count an object if the sorted set lacks it, because the store has evicted the set but not the object."""
        listed, n_bytes = self._list, wanted.n_bytes + wanted.state_bytes

        async def count() -> None:
            if await self._client.zadd(listed, {member_of(wanted): self._clock() + self._settings.ttl_s}, nx=True):
                await self._client.incrby(self._sum, n_bytes)

        await self._store.within(count)

    def keep_list(self, pipe: Any) -> None:
        """Set the TTL of sorted set and sum, longer than any object's: they expire after the last server."""
        for each in (self._list, self._sum):
            pipe.expire(each, 2 * self._settings.ttl_s)

    async def delete(self, members: Iterable[bytes]) -> int:
        """Delete the objects of these members of the sorted set; returns their bytes."""
        n_deleted = 0
        for member in members:
            digest, n_bytes = digest_and_size(member)

            async def delete(member: bytes = member, digest: bytes = digest, n_bytes: int = n_bytes) -> None:
                await self._client.unlink(self._store.name("d", digest))
                # If several servers delete the same object, only one of them subtracts its size.
                if await self._client.zrem(self._list, member):
                    await self._client.decrby(self._sum, n_bytes)

            await self._store.within(delete)
            n_deleted += n_bytes
        return n_deleted


def _members(reply: object) -> list[bytes]:
    """Return the members in a reply; raises `ValueError` for anything but a list of values."""
    return [each for each in values(reply) if each is not None]
