"""The middleware before every endpoint: readiness, API keys, CORS, request ids."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import structlog

from llamaslot.api.context import READINESS, ApiSettings
from llamaslot.api.http_server import create_app, serve
from llamaslot.base.errors import ConfigError, ServerError, UnavailableError

HELLO = {"prompt": "Hello", "max_tokens": 1}


@pytest.fixture
async def empty() -> AsyncIterator[Any]:
    """A server without a model, and its address."""
    app = create_app(ApiSettings(api_keys=("secret",)))
    listener = await serve(app, ["127.0.0.1"], 0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{listener.addresses[0][1]}") as session:
        yield app[READINESS], session
    await listener.close()


async def test_requests_are_refused_while_loading_and_after_a_failure(empty: Any) -> None:
    readiness, session = empty
    paths = ["/health", "/v1/health", "/v1/models", "/props", "/nowhere"]
    for path in paths:
        async with session.get(path) as response:
            assert response.status == 503
            error = (await response.json())["error"]
            assert error == {"code": 503, "message": "Loading model", "type": "unavailable_error", "param": None}
    async with session.get("/") as response:
        assert response.status == 200, "the page says that the model is loading"
    for reason, status in ((ServerError("the model is gone"), 500), (UnavailableError("shutting down"), 503)):
        readiness.fail(reason)
        async with session.get("/health") as response:
            assert response.status == status
            assert (await response.json())["error"]["message"] == reason.message


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Bearer zweite-\u00fc"}, 200),
        ({"Authorization": "Bearer first"}, 200),
        ({"Authorization": "bearer first"}, 200),
        ({"X-Api-Key": "first"}, 200),
        ({"X-Api-Key": "firs"}, 401),
        ({"Authorization": "Bearer wrong", "X-Api-Key": "first"}, 401),
    ],
)
async def test_only_valid_keys_are_accepted(start: Any, headers: dict[str, str], status: int) -> None:
    server = await start(api_keys=("first", "zweite-\u00fc"))
    async with server.session.post(server.url + "/completion", json=HELLO, headers=headers) as response:
        assert response.status == status
        if status == 401:
            error = (await response.json())["error"]
            assert error["type"] == "authentication_error"
            assert response.headers["WWW-Authenticate"] == "Bearer"
    assert (await server.get("/health"))[0] == 200
    assert (await server.get("/v1/health"))[0] == 200
    async with server.session.options(server.url + "/completion") as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("allowed", "origin", "reflected"),
    [
        (("*",), "http://anywhere.example", True),
        (("http://one.example",), "http://one.example", True),
        (("http://one.example",), "http://two.example", False),
        (("localhost",), "http://localhost:8080", True),
        (("localhost",), "http://[::1]:3000", True),
        (("localhost",), "http://localhost.evil.example", False),
        (("localhost",), "http://[::1", False),
    ],
)
async def test_only_allowed_origins_are_reflected(
    start: Any, allowed: tuple[str, ...], origin: str, reflected: bool
) -> None:
    server = await start(cors_origins=allowed)
    for method, path in (("OPTIONS", "/v1/chat/completions"), ("GET", "/health"), ("GET", "/nowhere")):
        async with server.session.request(method, server.url + path, headers={"Origin": origin}) as response:
            if not reflected and method == "OPTIONS":
                assert response.status == 200, "a preflight, which gets no header that allows anything"
                assert not [name for name in response.headers if name.startswith("Access-Control-")]
            elif not reflected:
                assert response.status == 403
                error = (await response.json())["error"]
                assert error["type"] == "permission_error"
                assert "--cors-origins" in error["message"]
            assert response.headers.get("Access-Control-Allow-Origin") == (origin if reflected else None)
            assert response.headers["Vary"] == "Origin"
            if method == "OPTIONS" and reflected:
                assert response.headers["Access-Control-Allow-Methods"] == "GET, POST, DELETE, OPTIONS"
                assert response.headers["Access-Control-Allow-Headers"] == "*"


async def test_a_foreign_page_gets_nothing_done(start: Any) -> None:
    server = await start()
    headers = {"Origin": "https://evil.example"}
    for path in ("/completion", "/cache/clear", "/slots/0?action=erase"):
        assert (await server.post(path, HELLO, headers=headers))[0] == 403
    assert (await server.get("/slots", headers=headers))[0] == 403
    assert (await server.get("/health", headers={"Origin": "null"}))[0] == 403, "a sandboxed frame"
    state = await server.idle()
    assert state.n_decode_calls == 0
    assert (await server.post("/completion", HELLO, headers={"Origin": "http://localhost:3000"}))[0] == 200
    assert (await server.post("/completion", HELLO))[0] == 200


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        (("localhost",), "localhost:8080", 200),
        (("localhost",), "127.0.0.1", 200),
        (("localhost",), "127.1.2.3:80", 200),
        (("localhost",), "[::1]:8080", 200),
        (("localhost",), "LOCALHOST", 200),
        (("localhost",), "localhost.:8080", 200),
        (("localhost",), "llm.localhost:8080", 200),
        (("localhost",), "evillocalhost", 403),
        (("localhost",), "evil.example.", 403),
        (("localhost", "box.lan"), "box.lan.", 200),
        (("localhost",), "evil.example", 403),
        (("localhost",), "localhost.evil.example:8080", 403),
        (("localhost",), "192.168.0.9:8080", 403),
        (("localhost",), "[::1", 403),
        (("localhost", "box.lan"), "Box.lan:8080", 200),
        (("localhost", "fe80::1"), "[FE80::1]:8080", 200),
        (("localhost",), "", 403),
        ((), "anything.example", 200),
        (("*",), "anything.example", 200),
    ],
)
async def test_only_the_servers_own_names_are_answered(
    start: Any, allowed: tuple[str, ...], host: str, status: int
) -> None:
    server = await start(allowed_hosts=allowed)
    async with server.session.get(server.url + "/health", headers={"Host": host}) as response:
        assert response.status == status
        if status == 403:
            assert "--allowed-hosts" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("theirs", "kept"), [("trace-1.2:3", True), ("", False), ("a b", False), ("x" * 200, False), ("<b>", False)]
)
async def test_a_valid_request_id_is_returned(server: Any, theirs: str, kept: bool) -> None:
    for path in ("/health", "/nowhere"):
        async with server.session.get(server.url + path, headers={"X-Request-Id": theirs}) as response:
            ours = response.headers["X-Request-Id"]
            assert (ours == theirs) is kept
            assert len(ours) >= 8


async def test_two_requests_may_have_the_same_client_id(server: Any) -> None:
    headers = {"X-Request-Id": "the-same-for-both"}
    for stream in (False, True):
        body = {**HELLO, "stream": stream}
        async with server.session.post(server.url + "/v1/completions", json=body, headers=headers) as response:
            assert response.headers["X-Request-Id"] == "the-same-for-both"
            assert "the-same-for-both" not in await response.text()


async def test_the_log_contains_the_request_id_of_the_client(server: Any) -> None:
    with structlog.testing.capture_logs() as logs:
        for theirs in ("trace-1", "not a sane one"):
            headers = {"X-Request-Id": theirs}
            for path in ("/completion", "/v1/completions", "/v1/chat/completions"):
                body = {**HELLO, "messages": [{"role": "user", "content": "Hello"}]}
                assert (await server.post(path, body, headers=headers))[0] == 200
    names = [log.get("client_request_id") for log in logs if log["event"] == "request.done"]
    assert names == ["trace-1"] * 3 + [None] * 3


async def test_a_crash_is_logged_with_the_requests_id_and_not_shown(server: Any) -> None:
    async def broken(*_: Any) -> Any:
        raise RuntimeError("a secret detail")

    server.service.ask = broken
    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as logs:
        async with server.session.get(server.url + "/slots", headers={"X-Request-Id": "trace-1"}) as response:
            assert response.status == 500
            text = await response.text()
    assert "secret" not in text
    assert "Traceback" not in text
    [entry] = [log for log in logs if log["event"] == "request.crashed"]
    assert entry["http_request_id"] == "trace-1"
    assert str(entry["exc_info"]) == "a secret detail"


async def test_there_is_no_access_log(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "aiohttp.access"):
        await server.get("/health")
    assert not caplog.records


async def test_a_port_in_use_names_the_flag() -> None:
    first = await serve(create_app(ApiSettings()), ["127.0.0.1"], 0)
    port = first.addresses[0][1]
    with pytest.raises(ConfigError, match=f"port {port} .*--port"):
        await serve(create_app(ApiSettings()), ["127.0.0.1"], port)
    await first.close()


async def test_an_unknown_host_names_the_flag() -> None:
    for host in ("x" * 70, "192.0.2.1"):
        with pytest.raises(ConfigError, match="--host"):
            await serve(create_app(ApiSettings()), [host], 0)


async def test_several_hosts_share_a_port() -> None:
    try:
        listener = await serve(create_app(ApiSettings()), ["127.0.0.1", "::1"], 0)
    except ConfigError as error:
        pytest.skip(f"no IPv6 here: {error}")
    (one, port), (other, same) = listener.addresses
    assert {one, other} == {"127.0.0.1", "::1"}
    assert port == same
    await listener.close()


@pytest.mark.parametrize(
    "name",
    [
        "host.docker.internal",
        "gateway.docker.internal",
        "kubernetes.docker.internal",
        "host.containers.internal",
        "host.lima.internal",
        "host.rancher-desktop.internal",
        "host.orb.internal",
        "host.minikube.internal",
        "host.k3d.internal",
        "Host.Docker.Internal",
    ],
)
async def test_containers_reach_a_server_on_loopback_by_their_name_of_the_machine(start: Any, name: str) -> None:
    server = await start()
    for host, wanted in ((name, 200), (f"{name}.:8080", 200), (f"{name}.evil.example", 403), (f"x.{name}", 403)):
        assert (await server.get("/health", headers={"Host": host}))[0] == wanted, host
    elsewhere = await start(allowed_hosts=("llm.example",))
    assert (await elsewhere.get("/health", headers={"Host": name}))[0] == 403


async def test_a_preflight_allows_the_headers_that_the_page_names(start: Any) -> None:
    server = await start(cors_origins=("*",), api_keys=("key",))
    for wanted, allowed in (
        ("authorization, content-type", "authorization, content-type"),
        ("Authorization,X-Api-Key,anthropic-version", "Authorization,X-Api-Key,anthropic-version"),
        (None, "*"),
        ("", "*"),
        ("a" * 3000, "*"),
        ("a;b=<c>", "*"),
    ):
        headers = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        if wanted is not None:
            headers["Access-Control-Request-Headers"] = wanted
        for path in ("/v1/chat/completions", "/v1/messages", "/nowhere"):
            async with server.session.options(server.url + path, headers=headers) as response:
                assert response.status == 200
                assert response.headers["Access-Control-Allow-Headers"] == allowed


@pytest.mark.parametrize("name", ["", "pull", "push", "create", "copy", "delete", "blobs/a:0", "chats"])
async def test_a_missing_endpoint_of_ollama_is_told_which_are_there(server: Any, name: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        async with server.session.request(method, f"{server.url}/api/{name}", json={"model": "x"}) as response:
            assert response.status == 404
            message = (await response.json())["error"]
        assert f"/api/{name}" in message
        assert "POST /api/chat" in message


CHAT = [{"role": "user", "content": "a"}]
JSON_BODIES: dict[str, Any] = {
    "/completion": {"prompt": "a", "n_predict": 1},
    "/completions": {"prompt": "a", "n_predict": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1.0},
    "/chat/completions": {"messages": CHAT, "max_tokens": 1},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 1},
    "/v1/chat/completions/input_tokens": {"messages": CHAT},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/responses/compact": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": CHAT, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/api/chat": {"messages": CHAT, "stream": False, "options": {"num_predict": 1.0}},
    "/api/generate": {"prompt": "a", "stream": False, "options": {"num_predict": 1}},
    "/api/show": {"model": "a"},
    "/cache/probe": {"messages": CHAT},
    "/tokenize": {"content": "a"},
    "/detokenize": {"tokens": [97]},
    "/apply-template": {"messages": CHAT},
}


@pytest.mark.parametrize("path", JSON_BODIES)
async def test_a_byte_order_mark_before_a_body_is_skipped(server: Any, path: str) -> None:
    data = json.dumps(JSON_BODIES[path]).encode()
    async with server.session.post(server.url + path, data=b"\xef\xbb\xbf" + data) as response:
        assert response.status == 200, await response.text()
    async with server.session.post(server.url + path, data=b"\xef\xbb\xbf") as response:
        assert response.status == 400


async def test_a_byte_order_mark_before_a_small_body_is_skipped(server: Any) -> None:
    stored = await server.ok("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, "store": True})
    data = b'\xef\xbb\xbf{"metadata": {"a": "b"}}'
    async with server.session.post(f"{server.url}/v1/chat/completions/{stored['id']}", data=data) as response:
        assert (await response.json())["metadata"] == {"a": "b"}
    async with server.session.delete(f"{server.url}/sessions/x", data=b"\xef\xbb\xbf{}") as response:
        assert response.status == 404, "it is read, and there is no such session"


async def test_an_empty_input_is_taken_where_a_prompt_results(server: Any) -> None:
    path, short = "/v1/responses", {"max_output_tokens": 1}
    first = await server.ok(path, {"input": "a", **short})
    for body in ({"previous_response_id": first["id"]}, {"instructions": "Say a."}):
        await server.ok(path, {"input": [], **body, **short})
        await server.ok(f"{path}/input_tokens", {"input": [], **body})
    status, reply = await server.post(path, {"input": [], **short})
    assert (status, reply["error"]["param"]) == (400, "input")
    await server.ok(path, short)
