"""Connections that send nothing, half a request or no HTTP do not keep others from being answered."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from aiohttp.http import HttpProcessingError
from structlog.testing import capture_logs

from llamaslot.api import bodies
from llamaslot.api.connections import Connection, available_connections
from tests.api.conftest import Server, Start
from tests.fake_backend import FakeBackend

ENDLESS = {"prompt": "x", "ignore_eos": True, "stream": True}


class Socket:
    """A client that sends what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def reply(self) -> bytes:
        """All that the server sends until it closes the connection."""
        async with asyncio.timeout(10):
            try:
                return await self._reader.read()
            except ConnectionResetError:
                return b""

    async def some(self) -> bytes:
        """Return the next bytes from the server."""
        async with asyncio.timeout(10):
            return await self._reader.read(2**16)

    @property
    def is_open(self) -> bool:
        return not self._reader.at_eof()

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def sockets(server: Server, count: int) -> AsyncIterator[list[Socket]]:
    url = urlsplit(server.url)
    opened = [Socket(*await asyncio.open_connection(url.hostname, url.port)) for _ in range(count)]
    try:
        yield opened
    finally:
        for each in opened:
            each.close()


def posted(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)


def error_of(reply: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


async def test_new_connections_replace_silent_ones(start: Start) -> None:
    server = await start(max_connections=4)
    with capture_logs() as logs:
        async with sockets(server, 12) as silent:
            assert await server.get("/health") == (200, {"status": "ok"})
            assert [await each.reply() for each in silent[:8]] == [b""] * 8, "the oldest were closed"
            assert all(each.is_open for each in silent[-3:])
    full = [line for line in logs if line["event"] == "connections.full"]
    assert len(full) == 1, "once a minute at most"
    assert full[0]["flag"] == "--max-connections"


async def test_a_connection_that_is_closed_before_its_body_is_read_is_no_crash(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy server a connection is replaced, or its client goes away, between its head and its handler."""
    server = await start()

    async def close(request: web.Request) -> None:
        assert isinstance(request.protocol, Connection)
        request.protocol.abort()

    monkeypatch.setattr(bodies, "_continue", close)
    with capture_logs() as logs:
        for path in ("/completion", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"):
            async with sockets(server, 1) as (client,):
                await client.send(
                    b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n" % path.encode()
                )
                assert await client.reply() == b""
    assert not [line for line in logs if line.get("log_level") in ("error", "critical")]


async def test_connections_with_a_request_are_kept_and_a_further_one_gets_503(start: Start) -> None:
    server = await start(backend=FakeBackend(n_ctx=20_000), max_connections=2)
    async with sockets(server, 2) as busy:
        for each in busy:
            await each.send(posted(ENDLESS))
            assert b"200 OK" in await each.some()
        async with sockets(server, 1) as (refused,):
            status, error = error_of(await refused.reply())
            assert (status, error["type"]) == (503, "unavailable_error")
            assert "--max-connections" in error["message"]
        await server.state_where(lambda state: sum(bool(slot.request_id) for slot in state.slots) == 2)
        for each in busy:
            assert b"data: " in await each.some()
    await server.idle()
    assert await server.get("/health") == (200, {"status": "ok"})


async def test_a_connection_is_idle_again_after_its_reply(start: Start) -> None:
    server = await start(max_connections=1)
    async with sockets(server, 1) as (first,):
        await first.send(posted({"prompt": "x", "n_predict": 1}))
        assert b"200 OK" in await first.some()
        assert (await server.get("/health"))[0] == 200
        assert await first.reply() == b""


@pytest.mark.parametrize("sent", [b"", b"POST /completion HTTP/1.1\r\nHost: localhost\r\n"])
async def test_a_connection_without_a_whole_request_is_closed_after_a_while(start: Start, sent: bytes) -> None:
    server = await start(keep_alive_timeout=0.2)
    async with sockets(server, 1) as (silent,):
        await silent.send(sent)
        assert await silent.reply() == b""


async def test_a_stream_may_last_longer_than_an_idle_connection(start: Start) -> None:
    server = await start(keep_alive_timeout=0.05, backend=FakeBackend(n_ctx=4000))
    events = await server.stream("/completion", {"prompt": "x", "n_predict": 500, "ignore_eos": True})
    assert events[-1]["stop"]


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"HELLO\r\n\r\n"]
)
async def test_what_is_no_http_gets_a_json_error(server: Server, sent: bytes) -> None:
    async with sockets(server, 1) as (client,):
        await client.send(sent)
        reply = await client.reply()
        assert b"Content-Type: application/json" in reply
        status, error = error_of(reply)
        assert (status, error["type"]) == (400, "invalid_request_error")


@pytest.mark.slow
async def test_what_is_no_http_is_not_kept_until_a_garbage_collection(server: Server) -> None:
    """Errors of a parser refer to the frames that raised them, and these to what was received."""
    gc.collect()
    gc.disable()
    try:
        async with sockets(server, 3) as clients:
            for client in clients:
                await client.send(b"x" * 200_000 + b"\r\n\r\n")
                await client.reply()
        await asyncio.sleep(0.1)
        assert not [each for each in gc.get_objects() if isinstance(each, HttpProcessingError)]
    finally:
        gc.enable()


async def received(server: Server, n_bytes: int) -> None:
    """Wait until unread bodies take that many bytes."""
    async with asyncio.timeout(10):
        while server.bodies._bytes.total != n_bytes:
            await asyncio.sleep(0.005)


async def test_a_body_alone_is_read_whatever_it_takes(start: Start) -> None:
    server = await start(max_total_body_bytes=100)
    assert (await server.post("/completion", {"prompt": "x" * 500, "n_predict": 1}))[0] == 200


async def test_unfinished_bodies_share_one_limit(start: Start) -> None:
    server = await start(max_total_body_bytes=100_000)
    half = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90000\r\n\r\n" + b" " * 60_000
    async with sockets(server, 1) as (first,):
        await first.send(half)
        await received(server, 60_000)
        async with sockets(server, 1) as (second,):
            await second.send(half)
            status, error = error_of(await second.some())
            assert (status, error["type"]) == (429, "rate_limit_error")
            assert "--max-total-body-mb" in error["message"]
        assert (await server.post("/completion", {"prompt": "x", "n_predict": 1}))[0] == 200
    await received(server, 0)
    async with sockets(server, 1) as (third,):
        await third.send(half)
        await received(server, 60_000)
        await third.send(b" " * 30_000)
        assert error_of(await third.some())[0] == 400, "its place was free, and it is read to its end"


async def test_a_body_that_does_not_arrive_is_not_waited_for(start: Start) -> None:
    server = await start(body_timeout=0.1)
    async with sockets(server, 1) as (client,):
        await client.send(b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        status, error = error_of(await client.some())
        assert (status, error["type"]) == (408, "request_timeout_error")
        assert "--body-timeout" in error["message"]


async def test_the_size_limit_is_exact_and_known_before_a_body_arrives(start: Start) -> None:
    server = await start(max_body_bytes=1000)
    body = json.dumps({"prompt": "x", "n_predict": 1}).encode()
    for size, expected in ((1000, 200), (1001, 413)):
        async with server.session.post(server.url + "/completion", data=body.ljust(size)) as response:
            assert response.status == expected
    async with sockets(server, 1) as (client,):
        await client.send(b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1001\r\n\r\n")
        status, error = error_of(await client.some())
        assert status == 413
        assert "--max-body-mb" in error["message"]


@pytest.mark.parametrize("encodings", [["gzip"], ["BR"], ["identity, deflate"], ["identity", "zstd"]])
async def test_compressed_bodies_are_refused_before_they_arrive(server: Server, encodings: list[str]) -> None:
    headers = "".join(f"Content-Encoding: {each}\r\n" for each in encodings)
    async with sockets(server, 1) as (client,):
        head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: 10\r\n\r\n"
        await client.send(head.encode())
        reply = await client.some()
    status, error = error_of(reply)
    assert (status, error["type"], error["param"]) == (415, "unsupported_media_type_error", "Content-Encoding")
    assert b"Accept-Encoding: identity\r\n" in reply


async def test_a_body_that_is_waited_with_is_asked_for_only_if_it_is_read(start: Start) -> None:
    server = await start(max_body_bytes=1000, api_keys=("key",))
    body = json.dumps({"prompt": "x", "n_predict": 1}).encode()
    head = (
        "POST /completion HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
        "{}Connection: close\r\nContent-Length: {}\r\n\r\n"
    )
    key = "Authorization: Bearer key\r\n"
    refused = ((key, 1001, 413), (f"{key}Content-Encoding: gzip\r\n", len(body), 415), ("", len(body), 401))
    for headers, size, expected in refused:
        async with sockets(server, 1) as (client,):
            await client.send(head.format(headers, size).encode())
            assert error_of(await client.some())[0] == expected
    async with sockets(server, 1) as (client,):
        await client.send(head.format(key, len(body)).encode())
        assert await client.some() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(body)
        assert (await client.some()).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("path", ["/completion", "/nowhere"])
async def test_an_unknown_expectation_gets_a_json_error(server: Server, path: str) -> None:
    async with server.session.post(server.url + path, json={}, headers={"Expect": "a miracle"}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["type"]) == (417, 417, "expectation_failed_error")
        assert "'Expect'" in error["message"]
        assert response.headers["X-Request-Id"]


@pytest.mark.parametrize(
    ("limits", "wanted", "allowed", "soft"),
    [
        ((256, 256), 1000, 128, 256),
        ((256, 4096), 1000, 1000, 1128),
        ((8192, 8192), 1000, 1000, 8192),
        ((20, 20), 19, 10, 20),
    ],
)
def test_the_limit_of_descriptors_is_raised_or_obeyed(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], wanted: int, allowed: int, soft: int
) -> None:
    now = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: now.append(pair))
    assert available_connections(wanted) == allowed
    assert now[-1] == (soft, limits[1])


UNFINISHED = (
    "POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Length: 100\r\n\r\n{{"
)
WITH_BODY = (
    *("/completion", "/completions", "/v1/completions", "/infill", "/chat/completions", "/v1/chat/completions"),
    *("/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens", "/v1/messages", "/tokenize"),
    *("/v1/messages/count_tokens", "/detokenize", "/apply-template", "/cache/probe", "/sessions/x"),
)


async def test_a_key_cannot_hold_all_connections_by_unfinished_bodies(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("boss\none user\ntwo user\n")
    server = await start(api_key_file=str(file), max_connections=32)
    async with sockets(server, 60) as clients:
        for i, client in enumerate(clients):
            path = WITH_BODY[i % len(WITH_BODY)]
            method = UNFINISHED.replace("POST", "DELETE") if path.startswith("/sessions") else UNFINISHED
            await client.send(method.format(path=path, key="one").encode())
        await asyncio.sleep(0.1)
        boss, two, one = ({"Authorization": f"Bearer {key}"} for key in ("boss", "two", "one"))
        body = {"prompt": "x", "n_predict": 1}
        for _ in range(3):
            # Each on a connection of its own.
            async with aiohttp.ClientSession() as session:
                for path, headers in (("/health", {}), ("/v1/models", boss), ("/v1/models", two)):
                    async with session.get(server.url + path, headers=headers) as response:
                        assert response.status == 200, (path, headers)
                async with session.post(server.url + "/completion", json=body, headers=two) as response:
                    assert response.status == 200
        assert (await server.post("/completion", body, headers=one))[0] == 429
    for _ in range(100):
        if (await server.post("/completion", body, headers=one))[0] == 200:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("its connections were not released")


async def test_a_few_keys_cannot_hold_all_connections_together(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("boss\n" + "".join(f"user-{i} user\n" for i in range(20)))
    server = await start(api_key_file=str(file), max_connections=32)
    async with sockets(server, 80) as clients:
        for i, client in enumerate(clients):
            await client.send(UNFINISHED.format(path="/completion", key=f"user-{i % 19}").encode())
        await asyncio.sleep(0.1)
        headers = {"Authorization": "Bearer boss"}
        for _ in range(3):
            async with aiohttp.ClientSession() as session:
                for path in ("/health", "/v1/models"):
                    async with session.get(server.url + path, headers=headers) as response:
                        assert response.status == 200
        status, reply = await server.get("/v1/models", headers={"Authorization": "Bearer user-19"})
        assert (status, reply["error"]["type"]) == (503, "unavailable_error")


async def test_without_keys_an_address_cannot_hold_all_connections(start: Start) -> None:
    server = await start(max_connections=32)
    async with sockets(server, 60) as clients:
        for client in clients:
            await client.send(UNFINISHED.format(path="/completion", key="").encode())
        await asyncio.sleep(0.1)
        for _ in range(3):
            async with aiohttp.ClientSession() as session, session.get(server.url + "/health") as response:
                assert response.status == 200


async def test_the_unfinished_bodies_of_a_key_leave_room_for_those_of_others(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one user\ntwo user\n")
    server = await start(api_key_file=str(file), max_total_body_bytes=100_000)
    head = (
        "POST /completion HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\nContent-Length: 90000\r\n\r\n"
    )
    async with sockets(server, 9) as clients:
        for client in clients:
            await client.send(head.encode() + b" " * 20_000)
        await received(server, 80_000)
        body = {"prompt": "x", "n_predict": 1, "user": "y" * 5_000}
        assert (await server.post("/completion", body, headers={"Authorization": "Bearer two"}))[0] == 200
        assert (await server.post("/completion", body, headers={"Authorization": "Bearer one"}))[0] == 429
