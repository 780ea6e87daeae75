"""Requests that are made to hurt others: one key cannot stall `/health` or another key, nor fill memory.

The long form prints figures, on an idle machine: `LLAMASLOT_TESTS=long pytest -n 0 -s tests/app/test_attacks.py`
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.conftest import LONG
from tests.live import Server, serving

pytestmark = pytest.mark.slow

SCALE = 8 if LONG else 1
MAX_HEALTH_S, MAX_RSS_MB = (0.3, 150) if LONG else (3.0, 250)
"""The short form runs beside other tests on a machine with few cores; today's faults exceed these, too."""
EVIL, OTHER, BOSS = "evil-key", "other-key", "boss-key"
HEAD = (
    f"POST {{path}} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {EVIL}\r\n"
    "Content-Length: {length}\r\n\r\n"
)
MESSAGES = [{"role": "user", "content": "abc"}]
NO_END = {"ignore_eos": True, "seed": 1}
N = 16 * SCALE
REPLIES: dict[str, tuple[str, dict[str, Any]]] = {
    "the issue's": ("/completion", {"prompt": "abc", "n": N, "n_predict": 50, "n_probs": 128}),
    "just allowed": ("/completion", {"prompt": "abc", "n": 10 * SCALE, "n_predict": 50, "n_probs": 127}),
    "no limit of tokens": ("/completion", {"prompt": "abc", "n": N, "n_probs": 128}),
    "a stream": ("/completion", {"prompt": "abc", "n": N, "n_predict": 50, "n_probs": 128, "stream": True}),
    "a text": ("/v1/completions", {"prompt": "abc", "n": N, "max_tokens": 30, "logprobs": 100}),
    "best of": ("/v1/completions", {"prompt": "abc", "best_of": N, "max_tokens": 30, "logprobs": 100}),
    "prompts": ("/v1/completions", {"prompt": ["abc"] * N, "max_tokens": 30, "logprobs": 100}),
    "a prompt": (
        "/v1/completions",
        {"prompt": "a b c d e " * 300, "n": 2 * SCALE, "max_tokens": 1, "echo": True, "logprobs": 20},
    ),
    "a streamed prompt": (
        "/v1/completions",
        {
            "prompt": "a b c d e " * 300,
            "n": 2 * SCALE,
            "max_tokens": 1,
            "echo": True,
            "logprobs": 20,
            "stream": True,
        },
    ),
    "a chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "n": N, "max_tokens": 50, "logprobs": True, "top_logprobs": 20, "verbose": True},
    ),
    "a stored chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "n": N, "max_tokens": 50, "logprobs": True, "top_logprobs": 20, "store": True},
    ),
    "a response": ("/v1/responses", {"input": "abc", "max_output_tokens": 700 * SCALE, "top_logprobs": 20}),
    "a streamed response": (
        "/v1/responses",
        {"input": "abc", "max_output_tokens": 700 * SCALE, "top_logprobs": 20, "stream": True},
    ),
    "many long prompts": ("/completion", {"prompt": "a b c d e " * 600, "n": N, "n_predict": 1}),
    "pieces": ("/tokenize", {"content": "a b c d e " * 100_000 * SCALE, "with_pieces": True}),
    "tokens": ("/detokenize", {"tokens": [100] * 200_000 * SCALE}),
    "a template": ("/apply-template", {"messages": [{"role": "user", "content": "a b c " * 300_000 * SCALE}]}),
    "an error": ("/v1/chat/completions", {"messages": [{"role": "x" * 1_000_000 * SCALE, "content": "a"}]}),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("attacks")
    keys = folder / "keys"
    keys.write_text(f"{BOSS}\n{EVIL} user\n{OTHER} user\n")
    with serving(folder, "-np", "2", "-c", "16384", "--api-key-file", keys, "--max-connections", "64") as running:
        yield running


def post(server: Server, path: str, body: Any, key: str) -> tuple[int, int]:
    """Status and size of a reply, which is read and not kept."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=300)
    connection.request("POST", path, json.dumps(body), {"Authorization": f"Bearer {key}"})
    n_bytes = 0
    with connection.getresponse() as reply:
        while data := reply.read(2**16):
            n_bytes += len(data)
    connection.close()
    return reply.status, n_bytes


def health(server: Server) -> float:
    """Seconds that `/health` took."""
    started = time.monotonic()
    assert server.get("/health") == {"status": "ok"}
    return time.monotonic() - started


def check_beside(server: Server, attack: Callable[[], Any], name: str, max_bodies_mb: int = 0) -> Any:
    """Run an attack; check and print what others notice of it. Bodies of so many MiB are kept meanwhile."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(attack()))
    parent = psutil.Process(server.process.pid)
    thread.start()
    longest, n_bytes, others = 0.0, 0, []
    while thread.is_alive():
        longest = max(longest, health(server))
        n_bytes = max(n_bytes, parent.memory_info().rss)
        started = time.monotonic()
        assert post(server, "/completion", {"prompt": "Hi", "n_predict": 1}, OTHER)[0] == 200
        others.append(time.monotonic() - started)
        time.sleep(0.01)
    print(
        f"{name}: {results}, /health {longest:.2f} s, another key's request {max(others, default=0):.2f} s, "
        f"parent {n_bytes / 2**20:.0f} MiB"
    )
    assert longest < MAX_HEALTH_S
    assert n_bytes < (MAX_RSS_MB + max_bodies_mb) * 2**20
    return results[0]


@pytest.mark.parametrize("name", REPLIES if LONG else ["the issue's"])
def test_a_reply_of_any_size_stalls_no_other_request(server: Server, name: str) -> None:
    path, body = REPLIES[name]
    status, _ = check_beside(server, lambda: post(server, path, {**body, **NO_END}, EVIL), name)
    assert status in (200, 400, 429)


@pytest.mark.skipif(not LONG, reason="takes some seconds")
def test_clients_that_do_not_read_their_replies_fill_no_memory(server: Server) -> None:
    """Each asks for a reply of some MiB, and reads nothing of it."""
    path, body = REPLIES["just allowed"]
    data = json.dumps({**body, **NO_END, "n": 10}).encode()
    head = HEAD.format(path=path, length=len(data))
    address = urlsplit(server.url)
    clients = [socket.create_connection((address.hostname, address.port)) for _ in range(3 * SCALE)]

    def attack() -> None:
        for client in clients:
            client.sendall(head.encode() + data)
        time.sleep(8 if LONG else 2)

    check_beside(server, attack, "replies that are not read")
    for client in clients:
        client.close()


@pytest.mark.skipif(not LONG, reason="takes some seconds")
def test_a_list_of_large_chats_is_sent_in_pieces(server: Server) -> None:
    path, body = REPLIES["a stored chat"]
    for _ in range(3):
        post(server, path, {**body, **NO_END}, EVIL)

    def attack() -> None:
        for _ in range(3):
            connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=300)
            connection.request("GET", f"{path}?limit=100", headers={"Authorization": f"Bearer {EVIL}"})
            with connection.getresponse() as reply:
                while reply.read(2**16):
                    pass
            connection.close()

    check_beside(server, attack, "a list")


def test_unfinished_bodies_lock_no_other_key_out(server: Server) -> None:
    address = urlsplit(server.url)
    head = HEAD.format(path="/completion", length=99) + "{"
    clients = []
    for _ in range(100):
        client = socket.create_connection((address.hostname, address.port))
        client.sendall(head.encode())
        clients.append(client)
    check_beside(server, lambda: time.sleep(1), "unfinished bodies")
    assert post(server, "/completion", {"prompt": "Hi", "n_predict": 1}, BOSS)[0] == 200
    for client in clients:
        client.close()


def test_large_unfinished_bodies_fill_no_memory(server: Server) -> None:
    address = urlsplit(server.url)
    clients = [socket.create_connection((address.hostname, address.port)) for _ in range(50)]
    for client in clients:
        client.setblocking(False)
        client.sendall(HEAD.format(path="/completion", length=20_000_000).encode())

    def attack() -> None:
        for _ in range(20 * SCALE):
            for client in clients:
                with contextlib.suppress(OSError):
                    while client.send(b"x" * 2**16):
                        pass
            time.sleep(0.05)

    check_beside(server, attack, "large unfinished bodies", max_bodies_mb=64)
    for client in clients:
        client.close()
