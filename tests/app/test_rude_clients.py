"""Clients that go away or send nonsense leave one quiet line in the log at most, and no traceback."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.certificates import make
from tests.live import Server, serving

PATHS = (
    *("/completion", "/v1/completions", "/infill", "/v1/chat/completions", "/v1/chat/completions/input_tokens"),
    *(
        "/v1/responses",
        "/v1/responses/compact",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses/x/cancel",
    ),
    *(
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/cache/probe",
        "/cache/clear",
        "/slots/0?action=save",
        "/none",
    ),
)
GENERATING = ("/completion", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
BODIES = {
    "a body that is cut": b"Content-Length: 100\r\n\r\n{",
    "a body that is longer than it says": b"Content-Length: 2\r\n\r\n{}{}{}",
    "a chunk that is cut": b"Transfer-Encoding: chunked\r\n\r\n20\r\n{",
    "a wrong size of a chunk": b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{",
    "no end of the chunks": b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
    "two lengths": b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a compressed body": b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\n\x1f\x8b",
    "a body that is announced": b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n",
    "no end of the headers": b"X: ",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("rude"), "-m", tiny_model, "--in-process") as running:
        yield running


def address_of(server: Server) -> tuple[str, int]:
    parts = urlsplit(server.url)
    return parts.hostname or "", parts.port or 0


def reset(client: socket.socket) -> None:
    """Close a connection so that the other side gets a reset."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def check_log(server: Server) -> None:
    """Wait for what the server has to do, and check its log."""
    assert server.get("/health") == {"status": "ok"}
    time.sleep(0.1)
    text = server.log.read_text()
    assert "Traceback" not in text, text[-5000:]
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    loud = [line for line in lines if line["level"] in ("error", "critical")]
    assert not loud, loud[:3]
    assert all(len(line) < 10_000 for line in text.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
def test_a_client_that_goes_away_in_its_body(server: Server, name: str) -> None:
    for path in PATHS:
        for end in (socket.socket.close, reset, lambda client: client.shutdown(socket.SHUT_WR)):
            client = socket.create_connection(address_of(server))
            client.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n".encode() + BODIES[name])
            end(client)
            client.close()
    check_log(server)


@pytest.mark.parametrize(
    "path", ["/completion", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_goes_away_in_its_reply(server: Server, path: str, is_stream: bool) -> None:
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a", "stream": is_stream}
    limits = {"max_tokens": 300, "n_predict": 300, "ignore_eos": True}
    for end in (socket.socket.close, reset):
        connection = http.client.HTTPConnection(*address_of(server))
        connection.request("POST", path, json.dumps({**body, **limits}))
        if is_stream:
            reply = connection.getresponse()
            assert reply.read(20)
        else:
            time.sleep(0.02)
        assert connection.sock is not None
        end(connection.sock)
        connection.close()
    check_log(server)


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01", b"\0" * 5000, b"GET\r\n\r\n", b"x" * 100_000, b"POST / HTTP/9.9\r\n\r\n"]
)
def test_what_is_no_http(server: Server, data: bytes) -> None:
    for end in (socket.socket.close, reset):
        client = socket.create_connection(address_of(server))
        client.sendall(data)
        end(client)
    check_log(server)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_client_that_goes_away_over_tls(tmp_path: Path, tiny_model: Path) -> None:
    make(tmp_path, "own")
    files = ("--ssl-cert-file", tmp_path / "own.pem", "--ssl-key-file", tmp_path / "own-key.pem")
    with serving(tmp_path, "-m", tiny_model, "--in-process", *files) as server:
        for data in (b"", b"\x16\x03\x01\x02", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 3000):
            for end in (socket.socket.close, reset):
                client = socket.create_connection(address_of(server))
                client.sendall(data)
                end(client)
        context = ssl.create_default_context(cafile=tmp_path / "own.pem")
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        for body in BODIES.values():
            for end in (socket.socket.close, reset):
                with socket.create_connection(address_of(server)) as plain:
                    client = context.wrap_socket(plain)
                    client.sendall(b"POST /completion HTTP/1.1\r\nHost: localhost\r\n" + body)
                    end(client)
        time.sleep(0.3)
        text = server.log.read_text()
        assert "Traceback" not in text, text[-5000:]
        assert server.stop() == 0
