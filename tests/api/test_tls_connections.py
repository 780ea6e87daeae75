"""Connections of a TLS port: those whose handshake does not end count like those that send nothing."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import time
from collections.abc import Sequence

import pytest

from llamaslot.base.backend import Decoded, Draws, Run
from tests.api.conftest import Server, Start
from tests.api.test_connections import ENDLESS, error_of, posted, sockets
from tests.certificates import make
from tests.fake_backend import FakeBackend

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
"""Its beginning."""


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*make(tmp_path_factory.mktemp("certificates"), "one"))
    return context


async def encrypted(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]), ssl=context)


@pytest.mark.parametrize("sent", [b"", CLIENT_HELLO], ids=["nothing", "half a handshake"])
async def test_new_connections_replace_those_in_a_handshake(start: Start, tls: ssl.SSLContext, sent: bytes) -> None:
    server = await start(tls=tls, max_connections=4)
    async with sockets(server, 12) as silent:
        for each in silent:
            await each.send(sent)
        assert await server.get("/health") == (200, {"status": "ok"})
        # Long before a handshake has taken too long.
        async with asyncio.timeout(5):
            assert [await each.reply() for each in silent[:8]] == [b""] * 8, "the oldest were closed"
        assert all(each.is_open for each in silent[-3:])


class Paced(FakeBackend):
    """Leaves the event loop time for connections, which answers without an end would take on a slow machine."""

    def decode(self, runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        time.sleep(0.005)
        return super().decode(runs, draws)


async def test_connections_with_a_request_are_kept_and_a_further_one_gets_503(
    start: Start, tls: ssl.SSLContext
) -> None:
    server = await start(tls=tls, backend=Paced(n_ctx=20_000), max_connections=2)
    busy = [await encrypted(server) for _ in range(2)]
    for reader, writer in busy:
        writer.write(posted(ENDLESS))
        assert b"200 OK" in await reader.read(2**16)
    async with sockets(server, 40) as silent:
        # 32 handshakes are waited for beside them, to answer.
        assert [await each.reply() for each in silent[32:]] == [b""] * 8
        assert all(each.is_open for each in silent[:32])
    async with asyncio.timeout(10):
        while True:
            # Until the server has noticed that those have gone.
            with contextlib.suppress(ConnectionError):
                refused, writer = await encrypted(server)
                break
        status, error = error_of(await refused.read())
    writer.close()
    assert (status, error["type"]) == (503, "unavailable_error")
    for reader, writer in busy:
        assert b"data: " in await reader.read(2**16)
        writer.close()
    await server.idle()
    assert await server.get("/health") == (200, {"status": "ok"})


async def test_many_requests_at_once_are_answered(start: Start, tls: ssl.SSLContext) -> None:
    server = await start(tls=tls, max_connections=60)
    async with asyncio.timeout(30):
        replies = await asyncio.gather(*(server.post("/tokenize", {"content": "x" * 5000}) for _ in range(40)))
    assert {status for status, _ in replies} == {200}
    async with sockets(server, 1) as (client,):
        await client.send(b"GET / HTTP/1.1\r\n\r\n")
        await client.reply()
    assert (await server.get("/health"))[0] == 200


async def test_a_handshake_does_not_hold_up_the_end(start: Start, tls: ssl.SSLContext) -> None:
    server = await start(tls=tls)
    async with sockets(server, 1) as (client,):
        assert await server.get("/health") == (200, {"status": "ok"})
        async with asyncio.timeout(5):
            await server.listener.close()
        assert await client.reply() == b""
