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
PROPERTIES = {f"p{i}": {"type": "string", "description": "words " * 20} for i in range(20)}
SCHEMA = {"type": "object", "properties": PROPERTIES}
FUNCTIONS = [{"name": f"f{i}", "description": "d", "parameters": SCHEMA} for i in range(1_700 * SCALE)]
DEEP = "[" * 100_000 + "]" * 100_000
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
    "tools": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 1, "tools": [{"type": "function", "function": f} for f in FUNCTIONS]},
    ),
    "tools that are forced": (
        "/v1/chat/completions/input_tokens",
        {
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": f} for f in FUNCTIONS],
            "tool_choice": "required",
        },
    ),
    "tools of Anthropic's": (
        "/v1/messages",
        {
            "messages": MESSAGES,
            "max_tokens": 1,
            "tools": [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS],
        },
    ),
    "tools that are only repeated": (
        "/v1/responses",
        {"input": "Hello", "max_output_tokens": 1, "tools": [{"type": "web_search", "x": "x" * 15_000_000}]},
    ),
    "tools of OpenAI's responses": (
        "/v1/responses",
        {"input": "Hello", "max_output_tokens": 1, "tools": [{"type": "function", **f} for f in FUNCTIONS]},
    ),
    "items that are not rendered": (
        "/v1/responses",
        {"input": [*MESSAGES, *[{"type": "reasoning"}] * 300_000 * SCALE], "max_output_tokens": 1, "stream": True},
    ),
    "many messages of Anthropic's": ("/v1/messages", {"messages": MESSAGES * 100_000, "max_tokens": 1}),
    "many parts": (
        "/cache/probe",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1_000_000}]},
    ),
    "many empty blocks": (
        "/v1/messages/count_tokens",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1_000_000}]},
    ),
    "a deep schema": ("/completion", f'{{"prompt": "x", "n_predict": 1, "json_schema": {DEEP}}}'),
    "a deep tool": ("/v1/messages", f'{{"messages": [], "max_tokens": 1, "tools": {DEEP}}}'),
    "a large schema": ("/completion", {"prompt": "x", "n_predict": 1, "json_schema": {"anyOf": [SCHEMA] * 5_000}}),
    "a schema that takes long to compile": (
        "/completion",
        {
            "prompt": "x",
            "n_predict": 1,
            "json_schema": {"properties": {f"p{i}": {"pattern": f"^(a{{1,9}}|{i}){{9}}$"} for i in range(200)}},
        },
    ),
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


def read(server: Server, path: str) -> bytes:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)
    connection.request("GET", path)
    with connection.getresponse() as reply:
        assert reply.status == 200
        data = reply.read()
    connection.close()
    return data


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
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
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


@pytest.mark.skipif(not LONG, reason="measures times, which other tests beside it disturb")
def test_a_large_response_stalls_none_when_it_is_listed_and_continued(server: Server) -> None:
    body = {"input": [*MESSAGES, *[{"type": "reasoning"}] * 900_000], "max_output_tokens": 1}
    stored = server.post("/v1/responses", body)["id"]
    messages = [{**MESSAGES[0], "extra": [[]] * 6_000_000}]
    chat = server.post("/v1/chat/completions", {"messages": messages, "store": True, "max_tokens": 1})["id"]
    longest = 0.0
    for action in (
        lambda: read(server, f"/v1/chat/completions/{chat}/messages"),
        lambda: server.get(f"/v1/responses/{stored}/input_items?limit=5"),
        lambda: server.get(f"/v1/responses/{stored}/input_items?limit=100&order=asc"),
        lambda: server.post(
            "/v1/responses", {"input": "Hi", "previous_response_id": stored, "max_output_tokens": 1}
        ),
    ):
        thread = threading.Thread(target=action)
        thread.start()
        while thread.is_alive():
            started = time.monotonic()
            assert server.get("/health") == {"status": "ok"}
            longest = max(longest, time.monotonic() - started)
            time.sleep(0.01)
    assert longest < MAX_PAUSE_S, f"/health took {longest:.2f} s"
