"""No request, however large, keeps `/health` or a running stream waiting."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.conftest import LONG
from tests.live import Server, serving

SCALE = 3 if LONG else 1
MESSAGES = [{"role": "user", "content": "Hello"}]
LARGE: dict[str, tuple[str, Any]] = {
    "template variables": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 1,
            "chat_template_kwargs": {"x": [{"key": "<|im_end|>"}] * 150_000 * SCALE},
        },
    ),
    "control tokens": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "<|im_end|>" * 300_000 * SCALE}], "max_tokens": 1},
    ),
    "many prompts": ("/v1/completions", {"prompt": ["x"] * 1_000_000, "max_tokens": 1}),
    "many biases": ("/completion", {"prompt": "x", "logit_bias": [[f"word {i}", 1] for i in range(100_000)]}),
    "a long text": ("/tokenize", {"content": "some words and more " * 150_000 * SCALE, "with_pieces": True}),
    "a long prompt": ("/completion", {"prompt": "some words and more " * 150_000 * SCALE, "n_predict": 1}),
    "a text of 20 MiB": ("/completion", {"prompt": "é" * 10 * 2**20, "n_predict": 1}),
    "many messages": ("/v1/chat/completions", {"messages": MESSAGES * 50_000 * SCALE, "max_tokens": 1}),
}
MAX_PAUSE_S = 0.5 if LONG else 1.5
"""The short form runs beside other tests on a machine with few cores."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("stalls"), "-np", "2") as running:
        yield running


def post(server: Server, path: str, data: bytes) -> int:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)
    connection.request("POST", path, data, {"Content-Type": "application/json"})
    with connection.getresponse() as reply:
        status = reply.status
    connection.close()
    return status


class Stream(threading.Thread):
    """A stream without end, and the longest time between two of its events."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.longest = 0.0
        self.has_begun = threading.Event()
        self.must_end = threading.Event()
        self._connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)

    def run(self) -> None:
        body = {"prompt": "Hello", "n_predict": 3000, "ignore_eos": True, "stream": True}
        self._connection.request("POST", "/completion", json.dumps(body).encode())
        reply = self._connection.getresponse()
        last = time.monotonic()
        while not self.must_end.is_set() and reply.readline():
            now = time.monotonic()
            if self.has_begun.is_set():
                self.longest = max(self.longest, now - last)
            last = now
            self.has_begun.set()
        reply.close()
        self._connection.close()


@pytest.mark.skipif(not LONG, reason="measures times, which other tests beside it disturb")
@pytest.mark.parametrize("name", LARGE)
def test_a_large_request_stalls_no_other(server: Server, name: str) -> None:
    path, body = LARGE[name]
    data = json.dumps(body).encode()
    stream = Stream(server)
    stream.start()
    assert stream.has_begun.wait(30)
    statuses: list[int] = []
    large = threading.Thread(target=lambda: statuses.append(post(server, path, data)))
    large.start()
    longest = 0.0
    while large.is_alive():
        started = time.monotonic()
        assert server.get("/health") == {"status": "ok"}
        longest = max(longest, time.monotonic() - started)
        time.sleep(0.01)
    stream.must_end.set()
    stream.join()
    assert statuses[0] in (200, 400, 413), statuses
    assert longest < MAX_PAUSE_S, f"/health took {longest:.2f} s"
    assert stream.longest < MAX_PAUSE_S, f"the stream paused for {stream.longest:.2f} s"
