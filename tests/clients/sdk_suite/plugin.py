"""Pytest plugin for the tests of an SDK: clients of llamaslot; ids that exist, and schemas, for what tests make up.

The SDK's package of tests has the name of this project's, so this one is imported as `sdk_suite.plugin` there.
"""

from __future__ import annotations

import importlib
import json
import os
import urllib.request
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest
from pytest_asyncio import is_async_test

from .exceptions import reason

URL, PACKAGE, RESULTS = "LLAMASLOT_URL", "LLAMASLOT_SDK", "LLAMASLOT_SDK_RESULTS"
"""Environment variables with the server's address, the SDK, and the file that gets a JSON line for each test."""

CHAT, RESPONSES, MODELS = "/v1/chat/completions", "/v1/responses", "/v1/models"
MODEL = "demo"
CHAT_ID, RESPONSE_IDS = "completion_id", ("resp_677efb5139a88190b512bc3fef8e535d", "response_id")
PREVIOUS_ID = "resp_123"
"""Ids in the tests."""
NO_SCHEMAS = b'"properties":{"location":"bar","unit":"bar"}'
SCHEMAS = b'"properties":{"location":{"type":"string"},"unit":{"type":"string"}}'
"""Properties of a strict tool in the tests, whose schemas are words, and the same with schemas."""
# The type of a stored message allows the role of the assistant only.
MESSAGES = [{"role": "assistant", "content": "Hello."}]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what has an exception: it must fail, so that no exception stays longer than its reason."""
    for item in items:
        if is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
        if why := reason(item.nodeid):
            item.add_marker(pytest.mark.xfail(reason=why, strict=True))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append the result of a test."""
    if report.when == "call" or report.outcome != "passed":
        message = str(report.longrepr)[-600:] if report.outcome == "failed" else ""
        outcome = "excepted" if report.outcome == "skipped" and hasattr(report, "wasxfail") else report.outcome
        line = {"test": report.nodeid, "outcome": outcome, "message": message}
        with open(os.environ[RESULTS], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class Substitutes:
    """Chats, responses and schemas that stand for those that the tests name."""

    def apply(self, request: Any) -> None:
        """Replace the ids in a request by those of something that is stored for it, and words by schemas."""
        path, url = request.url.path, request.url
        if f"{CHAT}/{CHAT_ID}" in path or (path == CHAT and request.method == "GET"):
            chat = self._chat()
            url = url.copy_with(path=path.replace(CHAT_ID, chat))
            listed = _ask("GET", f"{CHAT}/{chat}/messages") if path.endswith("/messages") else None
            url = self._with_query(url, after=listed["data"][0]["id"] if listed else chat, model=MODEL)
        if path.startswith(f"{MODELS}/") and request.method == "GET":
            url = url.copy_with(path=f"{MODELS}/{MODEL}")
        for known in RESPONSE_IDS:
            if f"{RESPONSES}/{known}" in path:
                response = _ask("POST", RESPONSES, {"input": "Hello", "max_output_tokens": 8})
                items = _ask("GET", f"{RESPONSES}/{response['id']}/input_items")
                url = url.copy_with(path=path.replace(known, response["id"]))
                url = self._with_query(url, after=items["data"][0]["id"])
        request.url = url
        content = request.content.replace(NO_SCHEMAS, SCHEMAS)
        if f'"{PREVIOUS_ID}"'.encode() in content:
            response = _ask("POST", RESPONSES, {"input": "Hello", "max_output_tokens": 8})
            content = content.replace(PREVIOUS_ID.encode(), response["id"].encode())
        if content != request.content:
            request._content = content
            request.stream = type(request.stream)(content)
            request.headers["Content-Length"] = str(len(content))

    async def apply_later(self, request: Any) -> None:
        """Do the same for a client that waits."""
        self.apply(request)

    @staticmethod
    def _chat() -> str:
        body = {"messages": MESSAGES, "max_tokens": 8, "store": True, "metadata": {"foo": "string"}}
        return str(_ask("POST", CHAT, body)["id"])

    @staticmethod
    def _with_query(url: Any, **values: str) -> Any:
        given = {name: value for name, value in values.items() if name in url.params}
        return url.copy_merge_params(given) if given else url


def _ask(method: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(os.environ[URL] + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def _sdk() -> tuple[type, type, type, dict[str, Any]]:
    package = os.environ[PACKAGE]
    module = importlib.import_module(package)
    base = os.environ[URL] + ("/v1" if package == "openai" else "")
    names = {"openai": ("OpenAI", "AsyncOpenAI"), "anthropic": ("Anthropic", "AsyncAnthropic")}[package]
    options: dict[str, Any] = {"base_url": base, "api_key": "none", "max_retries": 0}
    if package == "openai":
        options["admin_api_key"] = "none"
    return getattr(module, names[0]), getattr(module, names[1]), module.DefaultAioHttpClient, options


def _watched(client: Any, hook: Any) -> Any:
    client._client.event_hooks["request"].append(hook)
    return client


@pytest.fixture(scope="session")
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The SDK's client, `loose` or `strict` in what it takes."""
    sync, _, _, options = _sdk()
    with sync(**options, _strict_response_validation=getattr(request, "param", True)) as made:
        yield _watched(made, Substitutes().apply)


@pytest.fixture(scope="session")
async def async_client(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """The SDK's client that waits, also over aiohttp."""
    _, make, aiohttp, options = _sdk()
    param = getattr(request, "param", True)
    strict = param if isinstance(param, bool) else param.get("strict", True)
    if isinstance(param, dict) and param.get("http_client") == "aiohttp":
        make = partial(make, http_client=aiohttp())
    async with make(**options, _strict_response_validation=strict) as made:
        yield _watched(made, Substitutes().apply_later)
