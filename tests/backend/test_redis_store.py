"""The remote store: what was uploaded is found and fetched again, and nothing else is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import fakeredis
import numpy as np
import pytest
from redis.asyncio.client import Pipeline

from llamaslot.backend.remote import StoreSettings
from llamaslot.backend.remote.redis_store import DIGEST_BYTES, ENTRY, RedisStore, Sealer
from llamaslot.base.kv_ops import Kv, KvPart
from llamaslot.base.model import SegmentSize
from llamaslot.kvcache.tiers.remote_tier import (
    CorruptObjectError,
    Found,
    RemoteObject,
    RemoteUnavailableError,
    portions_of,
)

SECRET, MODEL = b"secret of the fleet", b"model"
PROMPT = np.arange(2000, dtype=np.int32)
N_BYTES = 1000
SIZE = SegmentSize(N_BYTES, 0)
"""Segments of a fixed size, which are stored as they are."""


class FakeClock:
    """Time in seconds that tests move on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Fleet:
    """Stores of several servers on one server of Redis's protocol, `clock` included."""

    def __init__(self) -> None:
        self.server = fakeredis.FakeServer()
        self.clock = FakeClock()

    def client(self) -> Any:
        return fakeredis.FakeAsyncRedis(server=self.server)

    def store(self, secret: bytes = SECRET, model: bytes = MODEL, max_bytes: int = 0) -> RedisStore:
        settings = StoreSettings(max_bytes=max_bytes, ttl_s=100, timeout_s=5.0)
        return RedisStore(self.client(), Sealer(secret, model), settings, SIZE, clock=self.clock)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def packed(tokens: Any) -> bytes:
    return np.asarray(tokens, dtype=np.int32).tobytes()


def kv(seed: int) -> Kv:
    return np.random.default_rng(seed).integers(0, 256, N_BYTES).astype(np.uint8)


async def put(store: RedisStore, start: int, end: int, *, of: Any = PROMPT, state: Kv | None = None) -> int:
    part = KvPart(kv(end), range(start, end), range(start, end))
    return await store.upload("", packed(of[:end]), start, (part,), state)


async def find(
    store: RedisStore, tokens: Any, start: int = 0, *, namespace: str = "", states: bool = False
) -> Found:
    return await store.find(namespace, packed(tokens), start, with_checkpoints=states)


def spans(found: Found) -> list[tuple[int, int]]:
    return [(each.start, each.end) for each in found.portions]


async def test_another_server_finds_what_one_uploaded(fleet: Fleet) -> None:
    one, other = fleet.store(), fleet.store()
    for start, end in ((0, 512), (512, 1024), (1024, 1472)):
        assert await put(one, start, end) == N_BYTES
        assert await put(other, start, end) == 0, "it is there already"
    found = await find(other, PROMPT)
    assert spans(found) == [(0, 512), (512, 1024), (1024, 1472)]
    for portion in found.portions:
        fetched = await other.fetch(portion.object, kv=True, state=False)
        assert fetched is not None
        assert np.array_equal(fetched.kv, kv(portion.object.end))
    assert spans(await find(other, PROMPT, 700)) == [(700, 1024), (1024, 1472)]
    assert spans(await find(other, PROMPT[:600])) == [(0, 512), (512, 576)]


async def test_a_prompt_that_departs_finds_what_it_shares(fleet: Fleet) -> None:
    store = fleet.store()
    await put(store, 0, 512)
    await put(store, 512, 1024)
    departs = PROMPT[:900].copy()
    departs[700:] += 1
    assert spans(await find(store, departs)) == [(0, 512), (512, 640)]
    departs[0] += 1
    assert spans(await find(store, departs)) == []


async def test_a_gap_ends_what_is_found(fleet: Fleet) -> None:
    store = fleet.store()
    await put(store, 0, 512)
    await put(store, 1024, 1536)
    assert spans(await find(store, PROMPT)) == [(0, 512)]
    assert spans(await find(store, PROMPT, 1024)) == [(1024, 1536)]


async def test_other_fleets_models_and_namespaces_find_nothing(fleet: Fleet) -> None:
    await put(fleet.store(), 0, 512)
    for other in (fleet.store(secret=b"another secret 1"), fleet.store(model=b"another")):
        assert spans(await find(other, PROMPT)) == []
    assert spans(await find(fleet.store(), PROMPT, namespace="salted")) == []


async def test_checkpoints_are_found_at_their_very_position(fleet: Fleet) -> None:
    store = fleet.store()
    await put(store, 0, 512)
    await put(store, 512, 700, state=kv(1))
    await put(store, 512, 730, state=kv(2), of=np.concatenate([PROMPT[:720], PROMPT[:10]]))
    found = await find(store, PROMPT, states=True)
    assert [(each.start, each.end) for each in found.checkpoints] == [(512, 700)]
    fetched = await store.fetch(found.checkpoints[0], kv=False, state=True)
    assert fetched is not None
    assert fetched.kv is None
    assert np.array_equal(fetched.state, kv(1))
    assert (await find(store, PROMPT[:699], states=True)).checkpoints == ()


@pytest.mark.parametrize("field", [b"kv", b"kv.code"])
async def test_a_flipped_bit_is_noticed_and_the_object_deleted(fleet: Fleet, field: bytes) -> None:
    store, client = fleet.store(), fleet.client()
    await put(store, 0, 512)
    (portion,) = (await find(store, PROMPT)).portions
    (name,) = await client.keys("llamaslot:1:*:d:*")
    value = bytearray(await client.hget(name, field))
    value[3] ^= 4
    await client.hset(name, field, bytes(value))
    with pytest.raises(CorruptObjectError):
        await store.fetch(portion.object, kv=True, state=False)
    assert await store.fetch(portion.object, kv=True, state=False) is None


async def test_an_object_under_another_name_is_refused(fleet: Fleet) -> None:
    """The code of an object covers its name, so KV cannot be passed off as that of another prompt."""
    store, client = fleet.store(), fleet.client()
    await put(store, 0, 512)
    await put(store, 512, 1024)
    first, second = (await find(store, PROMPT)).portions
    names = {each.digest: f"{store._store.prefix}d:{each.digest.hex()}" for each in (first.object, second.object)}
    await client.rename(names[second.object.digest], names[first.object.digest])
    with pytest.raises(CorruptObjectError):
        await store.fetch(first.object, kv=True, state=False)


async def test_an_entry_of_the_index_for_other_tokens_is_ignored(fleet: Fleet) -> None:
    """So KV of another prompt cannot be passed off by its entry either."""
    store, client = fleet.store(), fleet.client()
    await put(store, 0, 512)
    await put(store, 0, 512, of=PROMPT + 10)
    ours = store._sealer.path_digests("", packed(PROMPT), range(64, 513, 64))
    theirs = store._sealer.path_digests("", packed(PROMPT + 10), range(64, 513, 64))
    for at, digest in ours.items():
        entry = await client.get(store._store.name("i", theirs[at]))
        await client.set(store._store.name("i", digest), entry)
    assert spans(await find(store, PROMPT)) == []


async def test_a_sum_that_is_wrong_is_put_right(fleet: Fleet) -> None:
    store, client = fleet.store(max_bytes=3 * N_BYTES), fleet.client()
    await put(store, 0, 512)
    await client.delete(store._store.prefix + "l")
    await client.set(store._store.prefix + "n", 100 * N_BYTES)
    await put(store, 0, 512, of=PROMPT + 10)
    assert int(await client.get(store._store.prefix + "n")) == N_BYTES
    await put(store, 0, 512, of=PROMPT + 20)
    assert await _fetch(store, PROMPT + 10)


async def test_what_the_list_lacks_is_counted_again_once_it_would_be_uploaded(fleet: Fleet) -> None:
    """The store evicted list and sum, but not the objects; they are counted with their states, and once."""
    store, client = fleet.store(max_bytes=3 * N_BYTES), fleet.client()
    await put(store, 0, 512, state=kv(1))
    await client.delete(store._store.prefix + "l", store._store.prefix + "n")
    for state in (None, kv(1), None):
        assert await put(store, 0, 512, state=state) == 0
        assert await client.zcard(store._store.prefix + "l") == 1
        assert int(await client.get(store._store.prefix + "n")) == 2 * N_BYTES
    fleet.clock.advance(1)
    await put(store, 0, 512, of=PROMPT + 10)
    await put(store, 0, 512, of=PROMPT + 20)
    assert not await _fetch(store, PROMPT)


async def test_an_object_that_takes_too_long_to_send_is_skipped_until_it_is_used_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, client = fleet.store(), fleet.client()
    n_sent = 0

    def late(*_args: object, **_kwargs: object) -> None:
        nonlocal n_sent
        n_sent += 1
        raise TimeoutError

    # Tries, a pause after each; the queue takes the last one for stored until the object is used again.
    for _ in range(2):
        monkeypatch.setattr(Pipeline, "execute", late)
        for _ in range(2):
            with pytest.raises(RemoteUnavailableError):
                await put(store, 0, 512)
        assert await put(store, 0, 512) == 0
        monkeypatch.undo()
    assert n_sent == 6
    assert await client.keys("*:d:*") == []
    assert await put(store, 0, 512) == N_BYTES
    # A store that is gone is asked again for ever.
    fleet.server.connected = False
    for _ in range(5):
        with pytest.raises(RemoteUnavailableError):
            await put(store, 512, 1024)


async def test_a_server_that_does_not_answer_is_unavailable(fleet: Fleet) -> None:
    store = fleet.store()
    await put(store, 0, 512)
    (portion,) = (await find(store, PROMPT)).portions
    fleet.server.connected = False
    with pytest.raises(RemoteUnavailableError):
        await find(store, PROMPT)
    with pytest.raises(RemoteUnavailableError):
        await store.fetch(portion.object, kv=True, state=False)
    with pytest.raises(RemoteUnavailableError):
        await put(store, 512, 1024)
    with pytest.raises(RemoteUnavailableError):
        await store.clear()


async def test_all_servers_together_keep_within_the_limit(fleet: Fleet) -> None:
    stores = [fleet.store(max_bytes=3 * N_BYTES) for _ in range(2)]
    for i in range(6):
        fleet.clock.advance(1)
        await put(stores[i % 2], 0, 512, of=PROMPT + 10 * i)
        assert int(await fleet.client().get(stores[0]._store.prefix + "n")) <= 3 * N_BYTES
    found = [bool(await _fetch(stores[0], PROMPT + 10 * i)) for i in range(6)]
    assert found == [False, False, False, True, True, True]


async def test_a_server_whose_clock_is_behind_keeps_within_the_limit(fleet: Fleet) -> None:
    fleet.clock.advance(50)
    ahead = fleet.store(max_bytes=2 * N_BYTES)
    for i in range(2):
        await put(ahead, 0, 512, of=PROMPT + 10 * i)
        fleet.clock.advance(1)
    fleet.clock.advance(-50)
    await put(fleet.store(max_bytes=2 * N_BYTES), 0, 512, of=PROMPT + 20)
    found = [bool(await _fetch(ahead, PROMPT + 10 * i)) for i in range(3)]
    assert found == [False, True, True]
    assert int(await fleet.client().get(ahead._store.prefix + "n")) == 2 * N_BYTES


async def test_what_is_used_stays_longer(fleet: Fleet) -> None:
    store = fleet.store(max_bytes=2 * N_BYTES)
    await put(store, 0, 512, of=PROMPT)
    fleet.clock.advance(1)
    await put(store, 0, 512, of=PROMPT + 10)
    fleet.clock.advance(1)
    assert await _fetch(store, PROMPT)
    await put(store, 0, 512, of=PROMPT + 20)
    assert await _fetch(store, PROMPT)
    assert not await _fetch(store, PROMPT + 10)


async def test_what_has_expired_does_not_count(fleet: Fleet) -> None:
    store, client = fleet.store(max_bytes=10 * N_BYTES), fleet.client()
    await put(store, 0, 512)
    fleet.clock.advance(101)
    await put(store, 0, 512, of=PROMPT + 10)
    assert int(await client.get(store._store.prefix + "n")) == N_BYTES
    assert await client.zcard(store._store.prefix + "l") == 1


async def test_everything_expires(fleet: Fleet) -> None:
    store, client = fleet.store(), fleet.client()
    await put(store, 0, 512)
    await put(store, 512, 700, state=kv(1))
    seconds = {name: await client.ttl(name) for name in await client.keys("*")}
    assert len(seconds) == 2 + 2 + 10 + 1
    # The list and the sum have to outlast all objects.
    longer = {f"{store._store.prefix}{each}".encode() for each in "ln"}
    assert {name for name, ttl in seconds.items() if 100 < ttl <= 200} == longer
    assert min(seconds.values()) > 90


async def test_what_would_be_uploaded_again_stays_with_its_index(fleet: Fleet) -> None:
    one, other, client = fleet.store(), fleet.store(), fleet.client()
    await put(one, 0, 512)
    await put(one, 512, 700, state=kv(1))
    before = set(await client.keys("*"))
    for name in before:
        await client.expire(name, 5)
    (gone, *_) = await client.keys("*:i:*")
    await client.delete(gone)
    fleet.clock.advance(50)
    assert await put(other, 0, 512) + await put(other, 512, 700, state=kv(1)) == 0
    assert set(await client.keys("*")) == before
    assert min([await client.ttl(name) for name in before]) > 90
    assert min(score for _, score in await client.zrange(one._store.prefix + "l", 0, -1, withscores=True)) == 1150


@pytest.mark.parametrize("place", range(ENTRY.size + DIGEST_BYTES))
async def test_a_flipped_bit_in_the_index_hides_the_object(fleet: Fleet, place: int) -> None:
    store, client = fleet.store(), fleet.client()
    await put(store, 0, 64)
    (name,) = await client.keys("*:i:*")
    value = bytearray(await client.get(name))
    value[place] ^= 1
    await client.set(name, bytes(value))
    assert spans(await find(store, PROMPT)) == []


async def test_what_is_larger_than_the_limit_is_not_stored(fleet: Fleet) -> None:
    store = fleet.store(max_bytes=N_BYTES - 1)
    assert await put(store, 0, 512) == 0
    assert not await fleet.client().keys("*")


async def test_a_state_that_comes_later_is_counted_with_its_object(fleet: Fleet) -> None:
    store, client = fleet.store(), fleet.client()
    await put(store, 0, 512)
    assert await put(store, 0, 512, state=kv(1)) == 2 * N_BYTES
    assert await client.zcard(store._store.prefix + "l") == 1
    assert int(await client.get(store._store.prefix + "n")) == 2 * N_BYTES


async def test_an_object_with_a_state_stays_if_its_kv_is_used(fleet: Fleet) -> None:
    """Another server, which has the same KV without a state, has named it in the index."""
    store, other = fleet.store(), fleet.store()
    await put(store, 0, 512, state=kv(1))
    assert await put(other, 0, 512) == 0
    fleet.clock.advance(50)
    assert await _fetch(store, PROMPT)
    ((_, expires),) = await fleet.client().zrange(store._store.prefix + "l", 0, -1, withscores=True)
    assert expires == fleet.clock.now + 100


@pytest.mark.parametrize("member", [b"x", b"zz:10", b"\xff:1", b"aa:b:c"])
async def test_foreign_members_of_the_list_are_removed(fleet: Fleet, member: bytes) -> None:
    store, client = fleet.store(max_bytes=10 * N_BYTES), fleet.client()
    await client.zadd(store._store.prefix + "l", {member: 1})
    assert await put(store, 0, 512) == N_BYTES
    assert await client.zscore(store._store.prefix + "l", member) is None
    await client.zadd(store._store.prefix + "l", {member: 2000})
    await store.clear()
    assert not await client.exists(store._store.prefix + "l")
    await client.set(store._store.prefix + "n", b"many")
    with pytest.raises(RemoteUnavailableError):
        await put(store, 0, 512)


async def test_nothing_in_the_store_is_readable(fleet: Fleet) -> None:
    store, client = fleet.store(), fleet.client()
    part = KvPart(kv(1), range(512), range(512))
    await store.upload("a namespace", packed(PROMPT[:512]), 0, (part,), None)
    everything = b"".join([repr(await client.dump(name)).encode() + name for name in await client.keys("*")])
    for secret in (b"namespace", SECRET, packed(PROMPT[10:14])):
        assert secret not in everything


async def test_clearing_deletes_all_of_this_model_and_no_other(fleet: Fleet) -> None:
    store, other = fleet.store(), fleet.store(model=b"other")
    for i in range(70):
        await put(store, 0, 512, of=PROMPT + 10 * i)
    await put(other, 0, 512)
    await store.clear()
    assert not await _fetch(store, PROMPT)
    assert not await fleet.client().exists(store._store.prefix + "n", store._store.prefix + "l")
    assert await _fetch(other, PROMPT)


async def test_clearing_deletes_what_the_list_lacks(fleet: Fleet) -> None:
    """The store evicted the list, or another server cleared while this was uploaded."""
    store, client = fleet.store(), fleet.client()
    await put(store, 0, 512)
    await client.delete(store._store.prefix + "l")
    await store.clear()
    assert not await client.keys("*")


async def test_dropping_a_path_keeps_what_comes_before(fleet: Fleet) -> None:
    store = fleet.store()
    await put(store, 0, 512)
    await put(store, 512, 1024)
    await put(store, 1024, 1300, state=kv(1))
    await store.drop("", packed(PROMPT[:1300]), 600)
    found = await find(store, PROMPT, states=True)
    assert await _fetch(store, PROMPT[:512])
    for portion in found.portions[1:]:
        assert await store.fetch(portion.object, kv=True, state=False) is None
    for each in found.checkpoints:
        assert await store.fetch(each, kv=False, state=True) is None


async def _fetch(store: RedisStore, tokens: Any) -> bool:
    """True if the first block of a prompt can be fetched."""
    portions = (await find(store, tokens)).portions
    return bool(portions) and await store.fetch(portions[0].object, kv=True, state=False) is not None


@pytest.mark.parametrize("seed", range(200))
def test_portions_are_without_a_gap_and_reach_as_far_as_the_entries_do(seed: int) -> None:
    draw = np.random.default_rng(seed)
    n_tokens = int(draw.integers(1, 2000))
    ends = draw.choice(np.arange(64, 2049, 64), size=int(draw.integers(1, 20)))
    entries: dict[int, RemoteObject] = {}
    for end in map(int, ends):
        start = (end - 1) // 512 * 512
        for at in range(start + 64, min(end, n_tokens) + 1, 64):
            entries[at] = RemoteObject(start, end, bytes([end // 64]) * 16, 10)
    start = int(draw.integers(0, n_tokens))
    portions = list(portions_of(entries, start, n_tokens))
    assert _reached(entries, start) == (portions[-1].end if portions else start)
    at = start
    for portion in portions:
        assert portion.start == at
        assert portion.object.start <= portion.start < portion.end <= portion.object.end
        assert entries[portion.end] == portion.object
        at = portion.end


def _reached(entries: dict[int, RemoteObject], start: int) -> int:
    """Return the position up to which entries cover the tokens from `start` on, without a gap."""
    at = start
    for token in range(start, 2048):
        if not any(position > token and each.start <= token for position, each in entries.items()):
            break
        at = token + 1
    return at


@pytest.mark.parametrize("wrong", [None, -50 * N_BYTES, 50 * N_BYTES])
async def test_a_sum_that_is_wrong_is_corrected_after_a_while(fleet: Fleet, wrong: int | None) -> None:
    """The store evicted it, or a server ended or timed out between two commands."""
    store, client = fleet.store(max_bytes=3 * N_BYTES), fleet.client()
    for i in range(3):
        await put(store, 0, 512, of=PROMPT + 10 * i)
        fleet.clock.advance(1)
    if wrong is None:
        await client.delete(store._store.prefix + "n")
    else:
        await client.set(store._store.prefix + "n", wrong)
    other = fleet.store(max_bytes=3 * N_BYTES)
    for i in range(3, 6):
        await put(other, 0, 512, of=PROMPT + 10 * i)
        fleet.clock.advance(1)
    assert len(await client.keys("*:d:*")) == await client.zcard(store._store.prefix + "l") == 3
    assert int(await client.get(store._store.prefix + "n")) == 3 * N_BYTES


async def test_a_burst_of_lookups_does_not_run_out_of_connections(fleet: Fleet) -> None:
    store = fleet.store()
    await put(store, 0, 512)
    found = await asyncio.gather(*(find(store, PROMPT[:600]) for _ in range(150)))
    assert {each.portions[-1].end for each in found} == {512}


async def test_only_the_caller_limits_a_lookup(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    store = fleet.store()
    await put(store, 0, 128)
    monkeypatch.setattr(store._store, "_settings", replace(store._settings, timeout_s=0.01))
    pipeline = store._store.client.pipeline

    def slow(**fields: Any) -> Any:
        pipe = pipeline(**fields)

        async def execute(_execute: Any = pipe.execute) -> Any:
            await asyncio.sleep(0.05)
            return await _execute()

        pipe.execute = execute
        return pipe

    monkeypatch.setattr(store._store.client, "pipeline", slow)
    assert spans(await find(store, PROMPT)) == [(0, 128)]
