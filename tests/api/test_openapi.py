"""`/openapi.json` describes every route, and what the endpoints reply."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from llamaslot.api.context import ApiSettings
from llamaslot.api.credentials import Access
from llamaslot.api.http_server import create_app
from llamaslot.api.routes import ROUTES, document
from llamaslot.api.web_page import page
from llamaslot.backend.disk import SlotFiles
from llamaslot.base.model import FimTokens, RerankFormat
from tests.fake_backend import FakeBackend
from tests.fuzz.replies import check_reply, route_of

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "ignore_eos": True}
TEXT = {"prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
INFILL = {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c"}], **TEXT}
FILE = {"filename": "a"}
SCORED = {"verbose": True, "logprobs": True, "n_probs": 2, "return_progress": True}
ALL = {"n": 2, "stop": ["zz"], "logit_bias": [["a", False], [5, 1.5]], "timings_per_token": True}
RESPONSE = {"input": "Hello", "max_output_tokens": 3, "ignore_eos": True, "id_slot": 0}
RESPONSE_FIELDS = {
    "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}],
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"enum": [1]}}, "verbosity": "low"},
    "reasoning": {"effort": "low"},
    "tool_choice": "none",
    "metadata": {"a": "b"},
}
OLLAMA = {"options": {"num_predict": 3, "ignore_eos": True}}
SCORED_BY_OLLAMA = {"logprobs": True, "top_logprobs": 2}
STORED = "/v1/responses/{response_id}"
CHATS = "/v1/chat/completions/{completion_id}"

REQUESTS: list[tuple[str, str, dict[str, str], Any]] = [
    ("GET", "/health", {}, None),
    ("GET", "/v1/models", {}, None),
    ("GET", "/v1/models/{name:.+}", {"name:.+": "fake"}, None),
    ("GET", "/v1/models/{name:.+}", {"name:.+": "other"}, None),
    ("GET", "/props", {}, None),
    ("POST", "/models/load", {}, {"model": "fake"}),
    ("POST", "/models/unload", {}, {"model": "fake"}),
    ("GET", "/slots", {}, None),
    ("GET", "/cache", {}, None),
    ("GET", "/cache/advice", {}, None),
    ("GET", "/metrics", {}, None),
    ("GET", "/openapi.json", {}, None),
    ("POST", "/apply-template", {}, CHAT),
    ("POST", "/v1/chat/completions/input_tokens", {}, CHAT),
    ("POST", "/tokenize", {}, {"content": "aé"}),
    ("POST", "/tokenize", {}, {"content": "aé", "with_pieces": True}),
    ("POST", "/tokenize", {}, {"prompt": "aé", "return_token_strs": True}),
    ("POST", "/detokenize", {}, {"tokens": [97, 98]}),
    ("GET", "/tokenizer_info", {}, None),
    ("GET", "/lora-adapters", {}, None),
    *[("POST", "/lora-adapters", {}, body) for body in ([{"id": 0, "scale": 0.5}], [{"id": 1}])],
    ("POST", "/cache/clear", {}, None),
    *[("POST", "/cache/probe", {}, body) for body in (CHAT, TEXT, {**TEXT, "prompt": ["a", "b"]})],
    *[("POST", "/cache/warm", {}, body) for body in (CHAT, {**TEXT, "pin": True}, {"input": "Hello"}, {})],
    *[("POST", "/v1/chat/completions", {}, {**CHAT, **more}) for more in ({}, ALL, SCORED, {"n": 0})],
    *[("POST", "/v1/completions", {}, {**TEXT, **more}) for more in ({}, ALL, SCORED, {"prompt": ["a", "b"]})],
    ("POST", "/v1/completions", {}, {**TEXT, "logprobs": 2, "echo": True}),
    *[("POST", "/v1/messages", {}, {**CHAT, **more}) for more in ({}, {"n": 2}, {"stop_sequences": ["e"]})],
    ("POST", "/v1/messages/count_tokens", {}, CHAT),
    *[("POST", "/api/chat", {}, {**CHAT, **OLLAMA, **more}) for more in ({}, SCORED_BY_OLLAMA, {"format": 5})],
    *[("POST", "/api/generate", {}, {**TEXT, **OLLAMA, **more}) for more in ({}, SCORED_BY_OLLAMA, {"raw": True})],
    ("POST", "/api/show", {}, {"model": "any"}),
    *[("GET", f"/api/{name}", {}, None) for name in ("tags", "ps", "version")],
    *[("POST", "/completion", {}, {**TEXT, **more}) for more in ({}, ALL, SCORED, {"return_tokens": True})],
    ("POST", "/completion", {}, {**TEXT, **SCORED, "post_sampling_probs": True}),
    ("POST", "/completion", {}, {**TEXT, "response_fields": ["content", "generation_settings/seed"]}),
    ("POST", "/completion", {}, {**TEXT, **ALL, "response_fields": ["content"]}),
    *[("POST", "/infill", {}, {**INFILL, **more}) for more in ({}, ALL, SCORED, {"response_fields": ["content"]})],
    ("POST", "/infill", {}, {"prompt": "x"}),
    *[("POST", "/v1/responses", {}, {**RESPONSE, **more}) for more in ({}, SCORED, {"n": 2}, RESPONSE_FIELDS)],
    ("POST", "/v1/responses/input_tokens", {}, {"input": "Hello"}),
    ("POST", "/v1/responses/compact", {}, {"input": "Hello", "max_output_tokens": 3}),
    ("POST", f"{STORED}/cancel", {}, None),
    ("GET", STORED, {}, None),
    ("GET", STORED, {"": "?stream=true"}, None),
    ("GET", f"{STORED}/input_items", {}, None),
    ("DELETE", STORED, {}, None),
    ("GET", STORED, {}, None),
    ("POST", "/v1/chat/completions", {}, {**CHAT, "store": True}),
    ("GET", "/v1/chat/completions", {}, None),
    ("GET", CHATS, {}, None),
    ("POST", CHATS, {}, {"metadata": {"a": "b"}}),
    ("GET", f"{CHATS}/messages", {}, None),
    ("DELETE", CHATS, {}, None),
    ("GET", CHATS, {}, None),
    *[("POST", "/slots/{id_slot}", {"id_slot": "0", "": f"?action={verb}"}, FILE) for verb in ("save", "restore")],
    ("POST", "/slots/{id_slot}", {"id_slot": "0", "": "?action=erase"}, None),
    ("POST", "/slots/{id_slot}", {"id_slot": "0"}, None),
    ("DELETE", "/sessions/{session_id:.+}", {"session_id:.+": "mine"}, None),
    ("DELETE", "/sessions/{session_id:.+}", {"session_id:.+": "mine"}, None),
]


VECTOR_REQUESTS: dict[Any, list[tuple[str, Any]]] = {
    "last": [
        ("/v1/embeddings", {"input": ["x", "y"]}),
        ("/v1/embeddings", {"input": "x", "encoding_format": "base64"}),
        ("/v1/embeddings", {"content": "x"}),
        ("/embedding", {"input": "x"}),
        ("/api/embed", {"input": ["x", "y"]}),
        ("/api/embed", {}),
        ("/api/embed", {"input": 5}),
        ("/api/embeddings", {"prompt": "x"}),
        ("/api/embeddings", {}),
        ("/rerank", {"query": "x", "documents": ["y"]}),
    ],
    "rank": [
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
        ("/rerank", {"query": "x", "texts": ["y"], "return_text": True}),
        ("/embedding", {"input": "x"}),
    ],
}
"""Requests to servers of vectors and of scores, by their pooling."""


async def test_every_route_is_described_with_the_access_that_it_needs(server: Any) -> None:
    _, described = await server.get("/openapi.json")
    found = {
        (method.upper(), path): (bool(operation["security"]), operation.get("x-llamaslot-role", "public"))
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
    }
    routes = {
        (route.method, route.resource.canonical): route.handler
        for route in create_app(ApiSettings()).router.routes()
        if route.method != "HEAD" and route.resource is not None and route.handler is not page
    }
    assert set(found) == set(routes)
    for route in ROUTES:
        path = re.sub(r":[^}]*", "", route.path)
        assert found[route.method, path] == (route.access > Access.PUBLIC, route.access.name.lower())
        assert routes[route.method, path] == route.handler


def test_every_reference_leads_to_a_schema_and_every_schema_is_used() -> None:
    described = document(ROUTES)
    components = described["components"]
    references = set(re.findall(r'"\$ref": "#/components/([^"]+)"', json.dumps(described)))
    assert references == {"responses/Error"} | {f"schemas/{name}" for name in components["schemas"]}
    ids = [operation["operationId"] for path in described["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids))
    assert all(operation["summary"] for path in described["paths"].values() for operation in path.values())
    body = components["schemas"]["ChatBody"]
    assert body["required"] == ["messages"]
    assert body["properties"]["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}


async def test_replies_are_what_is_described(start: Any, tmp_path: Path) -> None:
    backend = FakeBackend(n_ctx=1024, n_adapters=1)
    backend.info = msgspec.structs.replace(backend.info, fim=FimTokens(1, 2, 3))
    assert backend.info.segment_size is not None
    store = SlotFiles(tmp_path, lambda: bytes(32), backend.info.segment_size, backend.info.n_ctx_slot)
    server = await start(backend=backend, metrics=True, alias="fake", engine={"snapshots": store})
    endpoints = set()
    stored = (await server.ok("/v1/responses", RESPONSE))["id"]
    chat = (await server.ok("/v1/chat/completions", {**CHAT, "store": True}))["id"]
    for method, pattern, variables, body in REQUESTS:
        path = pattern.replace("{response_id}", stored).replace("{completion_id}", chat)
        for name, value in variables.items():
            path = path.replace(f"{{{name}}}", value) if name else path + value
        takes_stream = bool(route_of(method, pattern).chunks)
        for stream in (False, True) if takes_stream else (None,):
            sent = {**(body or {}), "session_id": "mine", "stream": stream} if stream is not None else body
            async with server.session.request(method, server.url + path, json=sent) as response:
                reply = await _checked(method, pattern, response, "response_fields" in (body or ()))
            assert stream is not True or body is None or response.status != 200 or len(reply) > 1
            endpoints.add((response.status, pattern))
    for pooling, vector_requests in VECTOR_REQUESTS.items():
        own = FakeBackend(pooling=pooling, rerank=RerankFormat() if pooling == "rank" else None)
        server = await start(backend=own)
        for pattern, body in vector_requests:
            async with server.session.post(server.url + pattern, json=body) as response:
                await _checked("POST", pattern, response)
                endpoints.add((response.status, pattern))
    succeeded = {pattern for status, pattern in endpoints if status == 200}
    aliases = {"/v1/health", "/models", "/completions", "/responses", "/embeddings", "/reranking", "/v1/reranking"}
    aliases |= {"/chat/completions", "/chat/completions/input_tokens"}
    # A stream without end: `test_web_page.py` has its events. This server has one model.
    elsewhere = {"/events", "/models/load", "/models/unload"}
    assert succeeded | aliases | elsewhere == {route.path for route in ROUTES}


async def test_the_slots_of_running_requests_are_described(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=20_000))
    url, body = server.url + "/completion", {"prompt": "x", "ignore_eos": True, "stream": True}
    async with server.session.post(url, json=body) as response:
        await response.content.readany()
        async with server.session.get(server.url + "/slots") as listed:
            slots = await _checked("GET", "/slots", listed)
    assert any(slot.is_processing and slot.params for slot in slots)


async def _checked(method: str, pattern: str, response: aiohttp.ClientResponse, picked: bool = False) -> Any:
    return check_reply(
        method, pattern, response.status, response.content_type, await response.read(), picked=picked
    )
