"""Remote store in Redis, Valkey, or another server of the Redis protocol.

Keys begin with `llamaslot:1:` and a digest of fleet and model (`Sealer.scope`). H is the keyed digest of all tokens
up to a position:

    d:H   hash: object that ends at this position: KV and partial state, each with its authentication code
    i:H   index entry of this position on the grid: names the object that has the token before it, and has a code
    k:H   list: entries of checkpoints from this position on the grid up to the next one
    l     sorted set: objects with their sizes, by time of expiry
    n     sum of these sizes

All keys have a TTL (`--cache-remote-ttl`), which starts again when an object is fetched or uploaded again.

All servers keep the sum below the same limit: before an upload, a server deletes the objects that expire first. An
object that Redis evicts itself (`maxmemory`) counts until it would have expired.

The client runs on the event loop of the remote worker's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any, NoReturn

import numpy as np
import structlog
from redis.asyncio import Redis

from llamaslot.backend.host import new_kv
from llamaslot.backend.remote import StoreSettings
from llamaslot.backend.remote.store_connection import StoreConnection, TooLargeError, number, size_of, values
from llamaslot.backend.state_format import join_parts
from llamaslot.backend.storage import FailureLog
from llamaslot.base.kv_ops import Kv, KvPart
from llamaslot.base.model import SegmentSize
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.tiers.remote_tier import (
    BLOCK_TOKENS,
    GRID_TOKENS,
    CorruptObjectError,
    Fetched,
    Found,
    RemoteObject,
    RemoteUnavailableError,
    block_start,
    grid_positions,
    portions_of,
)

DIGEST_BYTES = 16
ENTRY = struct.Struct(f"<IIQQ{DIGEST_BYTES}s")
"""Start, end, bytes of KV, bytes of state, digest."""
_MAX_CHECKPOINTS = 16
"""Most checkpoints listed at one position on the grid; the newest are kept."""
_KV, _STATE, _INDEX = b"kv", b"state", b"index"
_TRANSFER_TIMEOUT_S = 30.0
"""Most time to send or receive an object. Requests that wait for one have their own, shorter limit."""
_MAX_LATE_UPLOADS = 3
"""Uploads over `_TRANSFER_TIMEOUT_S` after which an object is not sent again until its next use."""
_SCANNED_NAMES = 1000
"""Number of keys that one SCAN goes through, within one time limit."""
_MAX_SCANNED = 4 * _SCANNED_NAMES
"""Most keys that one SCAN may return: its count is only a hint."""
_MAX_LOOKUPS = 16
"""Most concurrent lookups. Each has its own connection, and the client refuses to open more than a hundred."""
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

_MAX_DIGITS = 15
"""Most digits of a size in an entry; longer ones cannot come from a server."""

_log = structlog.get_logger(__name__)


class RedisStore:
    """`RemoteStore` that speaks the Redis protocol. `size` has the bytes of segments."""

    def __init__(
        self,
        client: Redis,
        sealer: Sealer,
        settings: StoreSettings,
        size: SegmentSize,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        prefix = f"llamaslot:1:{sealer.scope}:"
        self._store = StoreConnection(client, prefix, settings, FailureLog())
        self._budget = StoreBudget(self._store, settings, clock)
        self._sealer = sealer
        self._settings = settings
        self._size = size
        self._late_uploads: dict[bytes, int] = {}
        """Number of uploads of an object that exceeded `_TRANSFER_TIMEOUT_S`, by digest."""
        self._lookups = asyncio.Semaphore(_MAX_LOOKUPS)

    @property
    def timeout_s(self) -> float:
        """Most seconds that a lookup may take."""
        return self._settings.timeout_s

    @property
    def address(self) -> str:
        """The store's URL in messages."""
        return self._settings.address

    async def ping(self) -> None:
        """Connect and wait for an answer; the caller sets a time limit."""
        await self._store.unlimited(self._store.client.ping)

    async def find(self, namespace: str, tokens: bytes, start: int, *, with_checkpoints: bool) -> Found:
        """Look up what the store has of a prompt after its first `start` tokens.

        The caller sets a time limit, which includes waiting for other lookups.
        """
        began = perf_counter()
        n_tokens = len(tokens) // WIDTH
        grid = grid_positions(start, n_tokens)
        # A checkpoint is listed at the last grid position before it, which may be before `start`.
        lists = range(0, n_tokens + 1, GRID_TOKENS) if with_checkpoints else ()
        digests = self._sealer.path_digests(namespace, tokens, {*grid, *lists})

        async with self._lookups:
            ask = partial(self._asked, digests, grid, lists)
            named, listed = await self._store.unlimited(ask, self._index_bytes(len(grid), len(lists)))
        entries = {
            at: each
            for at, data in zip(grid, named, strict=True)
            if (each := self._indexed(digests[at], data)) is not None
        }
        checkpoints = self._on_path(namespace, tokens, chain.from_iterable(listed))
        return Found(tuple(portions_of(entries, start, n_tokens)), checkpoints, perf_counter() - began)

    async def fetch(self, wanted: RemoteObject, *, kv: bool, state: bool) -> Fetched | None:
        """Return the KV of an object, its state, or both."""
        fields = [field for field, is_wanted in ((_KV, kv), (_STATE, state)) if is_wanted]
        name = self._store.name("d", wanted.digest)

        sizes = [
            n for field in fields for n in (wanted.n_bytes if field == _KV else wanted.state_bytes, DIGEST_BYTES)
        ]

        async def get() -> list[bytes | None]:
            data = await self._store.client.hmget(name, [key for f in fields for key in (f, _code(f))])
            return values(data, len(sizes))

        try:
            got = await self._store.within(get, _TRANSFER_TIMEOUT_S, sum(size_of(1, n) for n in sizes))
        except RemoteUnavailableError as error:
            if isinstance(error.__cause__, TooLargeError):
                await self._drop_corrupt(name, "an object is larger than its index entry says")
            raise
        if None in got:
            return None
        found: dict[bytes, Kv] = {}
        for field, data, code in zip(fields, got[::2], got[1::2], strict=True):
            assert data is not None
            assert code is not None
            if not await asyncio.to_thread(self._sealer.is_genuine, wanted.digest, field, data, code):
                await self._drop_corrupt(name, f"the {field.decode()} of an object differs from what was uploaded")
            # Copied to memory that goes back to the system once it is freed.
            found[field] = new_kv(len(data))
            found[field][:] = np.frombuffer(data, dtype=np.uint8)
        with contextlib.suppress(RemoteUnavailableError):
            await self._budget.keep(wanted)
        return Fetched(found.get(_KV), found.get(_STATE))

    async def upload(
        self, namespace: str, tokens: bytes, start: int, parts: Sequence[KvPart], state: Kv | None
    ) -> int:
        """Store the object from `start` to the end of these tokens, unless it is stored already or too large."""
        end = len(tokens) // WIDTH
        grid = grid_positions(start, end)
        digests = self._sealer.path_digests(namespace, tokens, {*grid, end, end // GRID_TOKENS * GRID_TOKENS})
        name = self._store.name("d", digests[end])
        n_state = len(state) if state is not None else 0
        wanted = RemoteObject(start, end, digests[end], self._size.of(end - start), n_state)
        if self._settings.max_bytes and wanted.n_bytes + n_state > self._settings.max_bytes:
            return 0
        last = _STATE if state is not None else _KV

        async def state_size() -> int:
            return number(await self._store.client.hstrlen(name, _STATE))

        if await self._store.within(lambda: self._store.client.hexists(name, last)):
            if state is None:
                # The sorted set has it with the size of KV and state together.
                wanted = replace(wanted, state_bytes=await self._store.within(state_size))
            await self._index(wanted, digests)
            await self._budget.count_again(wanted)
            await self._budget.keep(wanted)
            return 0
        fields: dict[bytes, Kv | bytes] = {}
        for field, data in ((_KV, await asyncio.to_thread(self.join, parts)), (_STATE, state)):
            if data is not None:
                fields[field] = data
                fields[_code(field)] = await asyncio.to_thread(self._sealer.code, digests[end], field, data)
        # May delete other objects, with a call for each, so it needs more time than a single call.
        await self._store.within(lambda: self._budget.reserve(wanted), _TRANSFER_TIMEOUT_S)

        pipe = self._store.client.pipeline(transaction=False)
        pipe.hset(
            name, mapping={key: each if isinstance(each, bytes) else each.data for key, each in fields.items()}
        )
        pipe.expire(name, self._settings.ttl_s)
        self._budget.keep_list(pipe)
        try:
            await self._store.within(pipe.execute, _TRANSFER_TIMEOUT_S)
        except RemoteUnavailableError as error:
            if not isinstance(error.__cause__, TimeoutError) or not self._is_skipped(wanted):
                raise
            return 0
        self._late_uploads.pop(wanted.digest, None)
        await self._index(wanted, digests)
        return wanted.n_bytes + n_state

    def join(self, parts: Sequence[KvPart]) -> Kv:
        """Join parts of segments, which must leave no gap, into one segment."""
        return join_parts(parts, self._size)

    async def drop(self, namespace: str, tokens: bytes, start: int) -> None:
        """Delete the objects of a prompt that have tokens after position `start`."""
        n_tokens = len(tokens) // WIDTH
        lists = range(0, n_tokens + 1, GRID_TOKENS)
        digests = self._sealer.path_digests(namespace, tokens, lists)

        ask, size = partial(self._asked, digests, lists, lists), self._index_bytes(len(lists), len(lists))
        named, listed = await self._store.within(ask, n_bytes=size)
        for data in chain(named, *listed):
            entry = object_of(data[: ENTRY.size] if data is not None else None)
            if entry is not None and entry.end > start:
                await self._budget.delete([member_of(entry)])
        # Also last blocks of earlier turns, which the index no longer names. They count until they would have
        # expired.
        gone = [self._store.name("d", digest) for at, digest in digests.items() if at > start]
        if gone:
            await self._store.within(lambda: self._store.client.unlink(*gone))

    async def clear(self) -> None:
        """Delete all objects of this model and fleet."""
        # Found by a scan and not from the sorted set: that lacks what another server uploaded during the last
        # clear, and a full store may have evicted it.
        cursor = 0

        async def delete_some() -> int:
            at, names = await self._store.client.scan(cursor, match=self._store.prefix + "*", count=_SCANNED_NAMES)
            # The store is not trusted to return only keys of the pattern.
            ours = [each for each in names if each.startswith(self._store.prefix.encode())]
            if ours:
                await self._store.client.unlink(*ours)
            return int(at)

        size = size_of(_MAX_SCANNED, len(self._store.name("d", bytes(DIGEST_BYTES))))
        while cursor := await self._store.within(delete_some, n_bytes=size):
            pass

    async def close(self) -> None:
        """Close the connections."""
        await self._store.client.aclose()

    # --- inside ---

    async def _drop_corrupt(self, name: str, reason: str) -> NoReturn:
        _log.error("remote.corrupt_object", reason=reason)
        await self._store.within(lambda: self._store.client.unlink(name))
        raise CorruptObjectError(reason)

    async def _asked(
        self, digests: Mapping[int, bytes], grid: Sequence[int], lists: Sequence[int]
    ) -> tuple[list[bytes | None], list[list[bytes | None]]]:
        """Return the index entries at positions on the grid, and the lists of checkpoints."""
        pipe = self._store.client.pipeline(transaction=False)
        if grid:
            pipe.mget([self._store.name("i", digests[at]) for at in grid])
        for at in lists:
            pipe.lrange(self._store.name("k", digests[at]), 0, _MAX_CHECKPOINTS - 1)
        answers = await pipe.execute()
        return (values(answers[0], len(grid)) if grid else []), list(map(values, answers[bool(grid) :]))

    def _index_bytes(self, n_entries: int, n_lists: int) -> int:
        """Return the size of replies with this number of index entries and checkpoint lists."""
        return size_of(n_entries, ENTRY.size + DIGEST_BYTES) + size_of(n_lists * (_MAX_CHECKPOINTS + 1), ENTRY.size)

    def _is_plausible(self, each: RemoteObject) -> bool:
        """Return True if the KV of an object has the right size for this model."""
        return each.end - each.start <= BLOCK_TOKENS and each.n_bytes == self._size.of(each.end - each.start)

    def _on_path(self, namespace: str, tokens: bytes, entries: Iterable[bytes | None]) -> tuple[RemoteObject, ...]:
        """Return those of the listed checkpoints that belong to the prompt's path."""
        n_tokens = len(tokens) // WIDTH
        able = [each for data in entries if (each := object_of(data)) is not None and each.end <= n_tokens]
        digests = self._sealer.path_digests(namespace, tokens, {each.end for each in able})
        return tuple(
            each
            for each in able
            if each.digest == digests[each.end] and each.start == block_start(each.end) and self._is_plausible(each)
        )

    async def _index(self, wanted: RemoteObject, digests: Mapping[int, bytes]) -> None:
        """Write the index entries of an object, and list its checkpoint at the last grid position before it."""
        ttl, entry = self._settings.ttl_s, entry_of(wanted)
        pipe = self._store.client.pipeline(transaction=False)
        for at in grid_positions(wanted.start, wanted.end):
            code = self._sealer.code(digests[at], _INDEX, entry)
            pipe.set(self._store.name("i", digests[at]), entry + code, ex=ttl)
        if wanted.state_bytes:
            listed = self._store.name("k", digests[wanted.end // GRID_TOKENS * GRID_TOKENS])
            pipe.lrem(listed, 0, entry)
            pipe.lpush(listed, entry)
            pipe.ltrim(listed, 0, _MAX_CHECKPOINTS - 1)
            pipe.expire(listed, ttl)
        await self._store.within(pipe.execute)

    def _indexed(self, digest: bytes, data: bytes | None) -> RemoteObject | None:
        """Return the object that an index entry names; None unless this fleet wrote it for these tokens."""
        entry, code = (data[: ENTRY.size], data[ENTRY.size :]) if data is not None else (b"", b"")
        found = object_of(entry) if self._sealer.is_genuine(digest, _INDEX, entry, code) else None
        return found if found is not None and self._is_plausible(found) else None

    def _is_skipped(self, wanted: RemoteObject) -> bool:
        """Count an upload that exceeded the time limit; True if the object must not be sent again."""
        n_late = self._late_uploads.pop(wanted.digest, 0) + 1
        if n_late < _MAX_LATE_UPLOADS:
            self._late_uploads[wanted.digest] = n_late
            return False
        _log.warning("remote.upload_skipped", bytes=wanted.n_bytes + wanted.state_bytes, tries=n_late)
        return True


def _code(field: bytes) -> bytes:
    return field + b".code"


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
        pipe = self._client.pipeline(transaction=False)
        pipe.zadd(self._list, {member_of(wanted): self._clock() + ttl}, xx=True)
        pipe.expire(self._store.name("d", wanted.digest), ttl)
        self.keep_list(pipe)
        await self._store.within(pipe.execute)

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


class Sealer:
    """Keyed digests for one fleet and one model. `model_key` is a digest of everything that KV depends on.

    They are names of objects and authentication codes of their fields: BLAKE2b, keyed with a secret that all
    servers of the fleet share. Without the secret nobody can tell to which prompt an object belongs, or write an
    object that a server accepts.
    """

    def __init__(self, secret: bytes, model_key: bytes) -> None:
        self._key = hashlib.blake2b(secret, digest_size=32, person=b"llamaslot fleet").digest()
        self.scope = hashlib.blake2b(b"scope\0" + model_key, key=self._key, digest_size=DIGEST_BYTES).hexdigest()
        """Prefix of all keys in the store; different for each secret and model."""

    def path_digests(self, namespace: str, tokens: bytes, ends: Iterable[int]) -> dict[int, bytes]:
        """Return digests of a prompt's tokens up to each of `ends`."""
        state = hashlib.blake2b(key=self._key, digest_size=DIGEST_BYTES, person=b"path")
        state.update(self.scope.encode() + b"\0" + namespace.encode() + b"\0")
        digests: dict[int, bytes] = {}
        at = 0
        for end in sorted(ends):
            state.update(tokens[at * WIDTH : end * WIDTH])
            digests[end] = state.copy().digest()
            at = end
        return digests

    def code(self, digest: bytes, field: bytes, data: Kv | bytes) -> bytes:
        """Return the authentication code of a field of an object."""
        state = hashlib.blake2b(key=self._key, digest_size=DIGEST_BYTES, person=b"object")
        state.update(self.scope.encode() + digest + field)
        state.update(data if isinstance(data, bytes) else data.data)
        return state.digest()

    def is_genuine(self, digest: bytes, field: bytes, data: Kv | bytes, code: bytes) -> bool:
        """True if a server of the fleet uploaded exactly this field."""
        return hmac.compare_digest(self.code(digest, field, data), code)


def entry_of(each: RemoteObject) -> bytes:
    """Return the index entry of an object."""
    return ENTRY.pack(each.start, each.end, each.n_bytes, each.state_bytes, each.digest)


def object_of(data: bytes | None) -> RemoteObject | None:
    """Return the object that an index entry names; None for invalid bytes."""
    if data is None or len(data) != ENTRY.size:
        return None
    start, end, n_bytes, state_bytes, digest = ENTRY.unpack(data)
    return RemoteObject(start, end, digest, n_bytes, state_bytes) if start < end else None


def member_of(each: RemoteObject) -> bytes:
    """Return an object's member of the sorted set: its digest and size."""
    return f"{each.digest.hex()}:{each.n_bytes + each.state_bytes}".encode()


def digest_and_size(member: bytes) -> tuple[bytes, int]:
    """Return digest and size in a member of the sorted set; empty and 0 if no server can have written it."""
    digest, _, n_bytes = member.partition(b":")
    if len(digest) != 2 * DIGEST_BYTES or not n_bytes.isdigit() or len(n_bytes) > _MAX_DIGITS:
        return b"", 0
    try:
        return bytes.fromhex(digest.decode("ascii")), int(n_bytes)
    except ValueError:
        return b"", 0
