"""A system prompt that an administrator shares with all API keys, on the model that comes with the package."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from llamaslot.base.namespaces import tenant_name
from tests.live import Server, serving

SYSTEM = {
    "role": "system",
    "content": "You are a friendly assistant. "
    + "We met at the market and talked about the weather, the river and the long road home. " * 40,
}
ANN = [SYSTEM, {"role": "user", "content": "My cat is called Milo. What is my cat called?"}]
BOB = [SYSTEM, {"role": "user", "content": "My dog is called Bruno. What is my dog called?"}]
NOTHING = [SYSTEM, {"role": "user", "content": "?"}]


def send(server: Server, key: str, path: str, body: Any) -> Any:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode() if body else None, {"X-Api-Key": key}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


def ask(server: Server, key: str, messages: list[dict[str, str]], **fields: Any) -> tuple[str, int, Any]:
    """The answer to a greedy turn, its `cached_tokens`, and where they were found."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 24, **fields}
    reply = send(server, key, "/v1/chat/completions", body)
    n_cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return reply["choices"][0]["message"]["content"], n_cached, reply["cache"]


def tokens(server: Server, messages: list[dict[str, str]]) -> list[int]:
    prompt = send(server, "boss", "/apply-template", {"messages": messages})["prompt"]
    return send(server, "boss", "/tokenize", {"content": prompt, "add_special": True})["tokens"]


def n_common(server: Server, a: list[dict[str, str]], b: list[dict[str, str]]) -> int:
    """Tokens that the prompts of two conversations have in common."""
    pairs = zip(tokens(server, a), tokens(server, b), strict=False)
    return next(i for i, (x, y) in enumerate(pairs) if x != y)


@pytest.mark.slow
def test_each_keys_first_request_reuses_the_public_prefix_also_after_a_restart(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("boss\nann user\nbob user\ncem user\n")
    flags = ("--cache-salt-from-api-key", "--api-key-file", keys, "-c", "8192", "--cache-disk", tmp_path / "kv")
    with serving(tmp_path, *flags, "--debug-invariants") as server:
        n_public = n_common(server, NOTHING, ANN)
        assert n_public == n_common(server, NOTHING, BOB) > 600
        cold = {key: ask(server, key, each, cache_prompt=False) for key, each in (("ann", ANN), ("bob", BOB))}
        assert [n for _, n, _ in cold.values()] == [0, 0]
        # Before anything is public, a prompt of another key is not found.
        assert ask(server, "ann", ANN)[:2] == (cold["ann"][0], 0)
        assert ask(server, "boss", NOTHING, cache_public=True, max_tokens=0)[1] == 0
        text, n_cached, where = ask(server, "bob", BOB)
        assert (text, n_cached, where["ram"]) == (cold["bob"][0], n_public, n_public)
        assert server.stop() == 0
    with serving(tmp_path, *flags, "--debug-invariants") as server:
        text, n_cached, where = ask(server, "cem", BOB)
        assert (text, n_cached, where["disk"]) == (cold["bob"][0], n_public, n_public)
        state = send(server, "boss", "/cache", None)
        assert state["public_tokens"] == n_public
        found = {each["tenant"]: each for each in state["tenants"]}
        assert found["public"]["disk_bytes"] > 0
        assert found["public"]["requests"] == 0
        assert found[tenant_name("cem")]["requests"] == 1
