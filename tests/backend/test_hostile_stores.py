"""Stores that answer anything: no reply takes memory or time, or fails in another way than as a store may fail."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from redis.exceptions import RedisError

from llamaslot.backend.remote import StoreSettings, redis_store
from llamaslot.backend.remote.redis_store import ENTRY, RedisStore, Sealer
from llamaslot.backend.remote.store_connection import ReplyParser, allowing, connect
from llamaslot.base.kv_ops import KvPart
from llamaslot.base.model import SegmentSize
from llamaslot.kvcache.tiers.remote_tier import CorruptObjectError, RemoteUnavailableError
from tests.conftest import LONG
from tests.store_proxy import Fault, StoreProxy
from tests.store_server import StoreServer, store_server

TOKENS = np.arange(512, dtype=np.int32).tobytes()
OTHER = np.arange(7, 519, dtype=np.int32).tobytes()
SIZE = SegmentSize(1000, 0)
KV = np.arange(1000, dtype=np.uint8)
STATE = np.arange(500, dtype=np.uint8)
TIMEOUT_S = 0.1
MAX_BYTES = 2**20
"""Memory that a reply may take: much less than what is announced, and than what a call may wait for."""

HUGE = ("2147483647", "4294967295", "9223372036854775807", "9" * 5000)
ANSWERS: dict[str, bytes] = {
    **{f"{kind}{size[:10]}": f"{kind}{size}\r\n".encode() for kind in "*$%~>|=(:,!" for size in HUGE},
    **{f"{kind}-2": f"{kind}-2\r\n".encode() for kind in "*$"},
    "deep": b"*1\r\n" * 100_000,
    "deep, wide": b"*16\r\n" * 100_000,
    "null values": b"*1000000\r\n" + b"$-1\r\n" * 1_000_000,
    "empty lists": b"*1000\r\n" + b"*0\r\n" * 1000,
    "errors in a list": b"*3\r\n-ERR a\r\n-MOVED 1 a:1\r\n-ERR b\r\n",
    "a long error": b"-ERR " + b"x" * 2_000_000 + b"\r\n",
    "a long text": b"+" + b"x" * 2_000_000 + b"\r\n",
    "no number": b"*x\r\n",
    "no size": b"$\r\n",
    "no reply": b"\r\n\r\n",
    "no end": b"$3\r\nabcdefgh\r\n",
    "HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a number": b":7\r\n",
    "a negative number": b":-7\r\n",
    "a large number": b":9223372036854775807\r\n",
    "nothing": b"$-1\r\n",
    "no list": b"*-1\r\n",
    "an empty list": b"*0\r\n",
    "a text": b"+OK\r\n",
    "a value": b"$3\r\nabc\r\n",
    "numbers": b"*2\r\n:1\r\n:2\r\n",
    "lists": b"*2\r\n*1\r\n$1\r\na\r\n*1\r\n$1\r\na\r\n",
    "a cursor": b"*2\r\n$1\r\n7\r\n*1\r\n$1\r\na\r\n",
    "a member": b"*1\r\n$35\r\n" + b"ab" * 16 + b":-9\r\n",
    "an error": b"-ERR no\r\n",
    "an error for clusters": b"-MOVED 3999 127.0.0.1:1\r\n",
    "an error for logins": b"-NOAUTH Authentication required.\r\n",
    "pushes": b">3\r\n+invalidate\r\n+a\r\n+b\r\n" * 3,
    "control characters": b"-ERR \x1b[2J\x00\xff\r\n",
    **{f"bytes {i}": random.Random(i).randbytes(200) + b"\r\n" for i in range(5)},
    **{
        f"protocol {i}": b"".join(random.Random(i).choices([b"*2\r\n", b"$1\r\na\r\n", b":1\r\n"], k=9))
        for i in range(5)
    },
}
ENDLESS = {"a text without end": b"x" * 2**16, "a value without end": b"$1000000000\r\n" + b"x" * 2**16}
COMMANDS = {
    "ping": (b"CLIENT", b"PING"),
    "find": (b"MGET", b"LRANGE"),
    "fetch": (b"HMGET",),
    "upload": (b"HEXISTS", b"ZRANGEBYSCORE", b"ZADD", b"INCRBY", b"ZRANGE", b"HSET", b"SET", b"LPUSH"),
    "upload again": (b"HSTRLEN", b"EXPIRE"),
    "drop": (b"MGET", b"LRANGE", b"UNLINK"),
    "clear": (b"SCAN", b"UNLINK"),
}
CALLS = [(method, command.decode()) for method, commands in COMMANDS.items() for command in commands]
LARGE = "*2147483647"


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    with store_server() as started:
        yield started


@pytest.fixture(scope="module")
def proxy(server: StoreServer) -> Iterator[StoreProxy]:
    proxy = StoreProxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "_TRANSFER_TIMEOUT_S", TIMEOUT_S)


def opened(port: int, timeout_s: float = 10) -> RedisStore:
    settings = StoreSettings(max_bytes=2000, ttl_s=100, timeout_s=timeout_s, url=f"redis://127.0.0.1:{port}")
    client = connect(settings)
    return RedisStore(client, Sealer(b"secret", b"model"), settings, SIZE)


async def put(store: RedisStore, tokens: bytes, state: Any = STATE) -> int:
    return await store.upload("", tokens, 0, [KvPart(KV, range(512), range(512))], state)


async def call(store: RedisStore, method: str) -> None:
    match method:
        case "ping":
            await store.ping()
        case "find":
            await store.find("", TOKENS, 0, with_checkpoints=True)
        case "fetch":
            found = await store.find("", TOKENS, 0, with_checkpoints=True)
            await store.fetch(found.checkpoints[0], kv=True, state=True)
        case "upload":
            await put(store, OTHER)
        case "upload again":
            await put(store, TOKENS, None)
        case "drop":
            await store.drop("", TOKENS, 0)
        case _:
            await store.clear()


async def prepare(server: StoreServer) -> None:
    """Let the store have one object."""
    server.connect().flushall()
    store = opened(server.port)
    assert await put(store, TOKENS)
    await store.close()


async def outcome(proxy: StoreProxy, method: str) -> str:
    store = opened(proxy.port, TIMEOUT_S)
    is_limited = method in ("upload", "upload again", "fetch")
    try:
        async with asyncio.timeout(30 if is_limited else 4 * TIMEOUT_S):
            await call(store, method)
    except (RemoteUnavailableError, CorruptObjectError) as error:
        return type(error).__name__
    except TimeoutError:
        # `ping` and `find` are limited by their caller, `clear` and `drop` as a whole.
        return "late" if is_limited else "TimeoutError"
    finally:
        with contextlib.suppress(Exception):
            await store.close()
    return "done"


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < MAX_BYTES


@pytest.mark.parametrize("name", [*ANSWERS, *ENDLESS])
async def test_no_reply_takes_more_memory_than_is_allowed(name: str) -> None:
    received = ANSWERS.get(name) or ENDLESS[name] * 16
    for n_bytes in (0, 2**16):
        stream = asyncio.StreamReader()
        stream.feed_data(received)
        stream.feed_eof()
        parser = ReplyParser(socket_read_size=2**16)
        parser.on_connect(SimpleNamespace(_reader=stream))
        with little_memory(), allowing(n_bytes), contextlib.suppress(RedisError):
            while True:
                await parser.read_response()


@pytest.mark.slow
@pytest.mark.parametrize("at", range(len(CALLS)), ids=lambda at: "-".join(CALLS[at]))
async def test_no_answer_fails_otherwise_than_a_store_may(server: StoreServer, proxy: StoreProxy, at: int) -> None:
    method, command = CALLS[at]
    others = list(ANSWERS)[1:]
    for name in [LARGE, *(others if LONG else others[at::66])]:
        await prepare(server)
        proxy.fault = Fault("answer", frozenset({command.encode()}), answer=ANSWERS[name])
        n_before = proxy.n_faults
        try:
            for _ in range(20):
                assert await outcome(proxy, method) != "late", name
                if proxy.n_faults > n_before:
                    break
                # On a busy machine, an earlier command may take too long.
                await prepare(server)
            else:
                raise AssertionError("it was not asked")
        finally:
            proxy.heal()


@pytest.mark.parametrize("command", [b"MGET", b"HMGET", b"HEXISTS", b"SCAN"] if LONG else [b"HMGET"])
@pytest.mark.parametrize("name", ENDLESS)
async def test_an_answer_without_end_takes_no_memory(
    server: StoreServer, proxy: StoreProxy, name: str, command: bytes
) -> None:
    method = {b"MGET": "find", b"HMGET": "fetch", b"HEXISTS": "upload", b"SCAN": "clear"}[command]
    await prepare(server)
    proxy.fault = Fault("answer", frozenset({command}), answer=ENDLESS[name], is_endless=True)
    with little_memory():
        assert await outcome(proxy, method) != "late"
    proxy.heal()


async def test_sizes_that_the_list_of_checkpoints_announces_are_not_believed(
    server: StoreServer, proxy: StoreProxy
) -> None:
    """Its entries have no authentication codes."""
    await prepare(server)
    client = server.connect()
    [listed] = [key for key in client.scan_iter() if b":k:" in key]
    [entry] = client.lrange(listed, 0, -1)
    start, end, _, n_state, digest = ENTRY.unpack(entry)
    for n_bytes in (0, 999, 2**40, 2**63):
        client.lpush(listed, ENTRY.pack(start, end, n_bytes, n_state, digest))
    store = opened(proxy.port)
    found = await store.find("", TOKENS, 0, with_checkpoints=True)
    assert [each.n_bytes for each in found.checkpoints] == [1000]
    await store.close()


async def test_an_object_that_is_larger_than_its_index_entry_says_is_deleted(
    server: StoreServer, proxy: StoreProxy
) -> None:
    await prepare(server)
    client = server.connect()
    [name] = [key for key in client.scan_iter() if b":d:" in key]
    client.hset(name, "kv", b"x" * 2**20)
    assert await outcome(proxy, "fetch") == "CorruptObjectError"
    assert not client.exists(name)
