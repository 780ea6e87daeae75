"""`/cache` and `/cache/clear`: the statistics add up, and prompts of others are not shown."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from llamaslot.api.context import ApiSettings
from llamaslot.base.commands import GenerateParams
from llamaslot.base.prompt_jobs import RequestContext
from llamaslot.protocol.bodies import CompletionBody
from llamaslot.protocol.images import ImageReader, RequestImages
from llamaslot.protocol.text_requests import prompts_of, text_requests
from tests.fake_backend import FakeBackend
from tests.prompt_threads import SETTINGS

SECRET = "The secret word of another user is xylophone."
ENDLESS = {"prompt": "Hello", "ignore_eos": True, "max_tokens": 10_000}


def pool(**shape: Any) -> FakeBackend:
    return FakeBackend(**{"n_ctx": 4096, "n_slots": 4, "n_reserved": 8, **shape})


async def complete(server: Any, prompt: str, **fields: Any) -> int:
    """Complete a prompt and return the number of reused tokens."""
    body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True, **fields}
    return (await server.ok("/completion", body))["timings"]["cache_n"]


async def cache(server: Any, query: str = "", **kwargs: Any) -> Any:
    status, body = await server.get(f"/cache{query}", **kwargs)
    assert status == 200, body
    return body


async def test_an_empty_cache(start: Any) -> None:
    assert await cache(await start(backend=pool())) == {
        "namespaces": 0,
        "nodes": 0,
        "leaves": 0,
        "tokens": 0,
        "tokens_pinned": 0,
        "costs_pending": "",
        "cells": {"total": 4096, "used": 0, "idle": 0, "pinned": 0, "free": 4096},
        "ram": {
            "total_bytes": 0,
            "used_bytes": 0,
            "tokens": 0,
            "segments": 0,
            "max_bytes": 0,
            "saved_bytes": 0,
            "state": "normal",
            "reason": "",
        },
        "disk": {
            "total_bytes": 0,
            "used_bytes": 0,
            "tokens": 0,
            "segments": 0,
            "corrupt_files": 0,
            "written_bytes": 0,
            "failed_writes": 0,
            "total_written_bytes": 0,
        },
        "remote": {
            "is_available": False,
            "lookups": 0,
            "fetched_tokens": 0,
            "fetched_bytes": 0,
            "uploads": 0,
            "uploaded_bytes": 0,
            "failed_uploads": 0,
            "failures": 0,
            "corrupt_objects": 0,
        },
        "checkpoints": {"total_bytes": 0, "used_bytes": 0, "count": 0, "taken": 0, "restored": 0, "evicted": 0},
        "anchors": {"replies": 0, "bytes": 0},
        "messages": {"known": 0, "bytes": 0},
        "sessions": {"known": 0, "bytes": 0},
        "sequences": {"slots": 4, "reserved": 8, "used": 0, "total": 14},
        "pins": {"prefixes": 0, "tokens": 0, "max_tokens": 2048},
        "requests": {
            "hits": 0,
            "misses": 0,
            "hit_rate": 0.0,
            "same_slot": 0,
            "cross_slot": 0,
            "from_ram": 0,
            "from_disk": 0,
            "from_remote": 0,
            "anchored": 0,
            "restored": 0,
            "in_session": 0,
            "waits": 0,
        },
        "prompt_tokens": {"total": 0, "matched": 0, "hit_rate": 0.0, "restored": 0, "ahead": 0},
        "speculation": {"drafts": 0, "drafted_tokens": 0, "accepted_tokens": 0},
        "miss_reasons": {},
        "copied_tokens": 0,
        "evicted_tokens": 0,
        "offloaded_tokens": 0,
        "loaded_tokens": 0,
        "public_tokens": 0,
        "written_tokens": 0,
        "read_tokens": 0,
        "moved_prefixes": 0,
        "dropped_prefixes": 0,
        "preemptions": 0,
        "layout_changes": 0,
        "context_shifts": 0,
        "prefixes": [],
    }


async def test_the_statistics_agree_with_the_replies_and_the_pool(start: Any) -> None:
    backend = pool()
    server = await start(backend=backend)
    chance = random.Random(3)
    prompts = ["".join(chance.choices("ab", k=chance.randint(1, 9))) for _ in range(60)]
    found = await asyncio.gather(*(complete(server, prompt) for prompt in prompts))
    await server.idle()
    state = await cache(server, "?top=1000")
    n_prompt = sum(len(prompt) + 1 for prompt in prompts)  # BOS is one of them
    hits = sum(n > 0 for n in found)
    assert 0 < hits < 60
    assert state["requests"]["hits"] == state["requests"]["same_slot"] + state["requests"]["cross_slot"] == hits
    assert state["requests"]["misses"] == 60 - hits
    assert state["requests"]["hit_rate"] == pytest.approx(hits / 60)
    assert state["prompt_tokens"] == {
        "total": n_prompt,
        "restored": 0,
        "ahead": 0,
        "matched": sum(found),
        "hit_rate": pytest.approx(sum(found) / n_prompt),
    }
    cells = state["cells"]
    assert cells["used"] == backend.cells_used == cells["idle"] == state["tokens"]
    assert (cells["free"], cells["pinned"]) == (4096 - cells["used"], 0)
    assert state["sequences"]["used"] == sum(backend.seq_len(seq) > 0 for seq in range(backend.n_seqs))
    prefixes = state["prefixes"]
    assert (state["nodes"], state["namespaces"]) == (len(prefixes), 1)
    assert state["leaves"] == len(set(range(len(prefixes))) - {prefix["parent"] for prefix in prefixes})
    assert sum(prefix["edge_tokens"] for prefix in prefixes) == state["tokens"]
    for i, prefix in enumerate(prefixes):
        parent = prefix["parent"]
        assert parent is None or parent < i
        above = prefixes[parent] if parent is not None else {"tokens": 0, "holders": prefix["holders"]}
        assert prefix["tokens"] == above["tokens"] + prefix["edge_tokens"]
        assert set(prefix["holders"]) <= set(above["holders"])
    assert {prefix["last_used"] for prefix in prefixes} >= {0}
    for query, n in (("?top=2", 2), ("", 20)):
        # The rank of the last use is among those that are listed.
        first = [{**each, "last_used": 0} for each in (await cache(server, query))["prefixes"]]
        assert first == [{**each, "last_used": 0} for each in prefixes[:n]]


async def test_prefixes_of_running_requests_are_pinned(start: Any) -> None:
    server = await start(backend=pool(n_ctx=20_000))
    await complete(server, "Goodbye")
    running = asyncio.create_task(server.post("/completion", ENDLESS))
    await server.state_where(lambda state: any(slot.n_generated > 2 for slot in state.slots))
    state = await cache(server)
    pinned = [prefix for prefix in state["prefixes"] if prefix["pinned"]]
    assert sum(prefix["edge_tokens"] for prefix in pinned) == state["tokens_pinned"] == state["cells"]["pinned"] > 5
    assert state["cells"]["idle"] > 0
    running.cancel()
    await asyncio.wait([running])


@pytest.mark.parametrize("query", ["0", "2001", "-1", "", "x", "2.0", "1e2", "٣", "9" * 5000, "5&top=6"])
async def test_a_wrong_top_is_refused(server: Any, query: str) -> None:
    status, body = await server.get(f"/cache?top={query}")
    assert status == 400
    error = body["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "top")
    assert error["message"] == "'top' must be an integer from 1 to 2000"


async def test_neither_text_nor_salt_is_shown(start: Any) -> None:
    server = await start(backend=pool(), metrics=True)
    for tail in ("one", "two"):
        await complete(server, SECRET + tail, cache_salt="pepper")
    async with server.session.get(server.url + "/cache?top=1000&text=true") as response:
        raw = await response.text()
    for word in ("xylophone", "secret", "pepper", '"text"'):
        assert word not in raw
    fields = {
        "parent",
        "namespace",
        "tokens",
        "edge_tokens",
        "ram_tokens",
        "disk_tokens",
        "hits",
        "holders",
        "pinned",
        "last_used",
        "checkpoint",
        "evicted_last",
    }
    prefixes = msgspec.json.decode(raw)["prefixes"]
    assert len(prefixes) == 3
    for prefix in prefixes:
        assert set(prefix) == fields
        assert isinstance(prefix["tokens"], int)
        assert set(prefix["holders"]) <= set(range(12))
    for path in ("/slots", "/metrics"):
        async with server.session.get(server.url + path) as response:
            assert "pepper" not in await response.text()


async def test_with_the_debug_flag_edges_show_the_text_of_prompts(start: Any) -> None:
    server = await start(backend=pool(), cache_debug_text=True)
    await complete(server, "shared head, one", cache_salt="pepper")
    await complete(server, "shared head, two", cache_salt="pepper")
    state = await cache(server)
    assert sorted(prefix["text"] for prefix in state["prefixes"]) == ["<s>shared head, ", "one", "two"]
    [head] = [i for i, prefix in enumerate(state["prefixes"]) if prefix["parent"] is None]
    assert [p["parent"] for p in state["prefixes"] if p["text"] in ("one", "two")] == [head, head]
    assert "pepper" not in repr(state)


@pytest.mark.parametrize(("method", "path"), [("GET", "/cache"), ("POST", "/cache/clear")])
async def test_cache_endpoints_need_slots_and_the_api_key(start: Any, method: str, path: str) -> None:
    server = await start(backend=pool(), api_keys=("key",))
    for headers, status in (
        ({}, 401),
        ({"Authorization": "Bearer no"}, 401),
        ({"Authorization": "Bearer key"}, 200),
    ):
        async with server.session.request(method, server.url + path, headers=headers) as response:
            assert response.status == status
            if status == 401:
                assert (await response.json())["error"]["type"] == "authentication_error"
    server = await start(slots=False)
    async with server.session.request(method, server.url + path) as response:
        assert response.status == 501
        assert "--slots" in (await response.json())["error"]["message"]
    other = {"GET": "POST", "POST": "GET"}[method]
    async with server.session.request(other, server.url + path) as response:
        assert response.status == 405


async def test_clearing_drops_idle_prefixes_and_keeps_running_ones(start: Any) -> None:
    backend = pool(n_ctx=4096)
    server = await start(backend=backend)
    await complete(server, "Goodbye and farewell")
    body = {**ENDLESS, "max_tokens": 1200, "temperature": 0}
    running = asyncio.create_task(server.ok("/completion", body))
    await server.state_where(lambda state: any(slot.n_generated > 2 for slot in state.slots))
    idle = (await cache(server))["cells"]["idle"]
    assert idle > 0
    assert await server.ok("/cache/clear", None) == {
        "cleared_tokens": idle,
        "cleared_ram_tokens": 0,
        "cleared_disk_tokens": 0,
    }
    state = await cache(server)
    assert not running.done()
    assert (state["cells"]["idle"], state["evicted_tokens"]) == (0, 0)
    assert all(prefix["pinned"] for prefix in state["prefixes"])
    alone = await (await start(backend=pool(n_ctx=4096))).ok("/completion", body)
    assert (await running)["content"] == alone["content"]
    assert await complete(server, "Goodbye and farewell") == 1  # BOS, which the running one kept
    cleared = await server.ok("/cache/clear?tier=ram", None)
    assert set(cleared.values()) == {0}
    assert await complete(server, "Goodbye and farewell") > 1, "what the pool has stays"
    assert (await server.ok("/cache/clear?tier=pool", None))["cleared_tokens"] > 0
    async with server.session.post(server.url + "/cache/clear?tier=remote") as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "tier"
    await server.ok("/cache/clear", {"a body": "that does not matter"})
    state = await cache(server)
    assert (state["nodes"], state["cells"]["used"], state["sequences"]["used"]) == (0, 0, 0)
    # The next step is what carries it out.
    await complete(server, "x")
    assert backend.cells_used == 2


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
async def test_only_requests_with_the_same_salt_share(start: Any, path: str) -> None:
    server = await start(backend=pool())

    async def cached(**fields: Any) -> int:
        prompt = {"prompt": SECRET, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 1}
        return (await server.ok(path, {**prompt, **fields}))["timings"]["cache_n"]

    assert await cached() == 0
    assert await cached(cache_salt="one") == 0
    assert await cached(cache_salt="two") == 0
    n = await cached(cache_salt="one")
    assert n >= len(SECRET)
    assert await cached(cache_salt=None) == n
    assert await cached(cache_salt="x" * 256) == 0
    assert (await cache(server))["namespaces"] == 4


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("salt", ["", "x" * 257, 5, ["a"], True])
async def test_a_wrong_salt_is_refused(server: Any, path: str, salt: Any) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "cache_salt": salt}
    status, reply = await server.post(path, body)
    assert status == 400
    assert (reply["error"]["type"], reply["error"]["param"]) == ("invalid_request_error", "cache_salt")
    assert "'cache_salt'" in reply["error"]["message"]


async def test_users_of_different_keys_never_share(start: Any) -> None:
    server = await start(
        backend=pool(), api_keys=("key-a", "key-b"), cache_salt_from_api_key=True, cache_debug_text=True
    )

    async def cached(headers: dict[str, str], **fields: Any) -> int:
        body = {"prompt": SECRET, "max_tokens": 1, **fields}
        status, reply = await server.post("/completion", body, headers=headers)
        assert status == 200, reply
        return reply["timings"]["cache_n"]

    a, b = {"Authorization": "Bearer key-a"}, {"Authorization": "Bearer key-b"}
    assert await cached(a) == 0
    assert await cached(b) == 0
    assert await cached({"X-Api-Key": "key-a"}) == len(SECRET)
    assert await cached({"Authorization": "bearer key-b"}) == len(SECRET)
    assert await cached(a, cache_salt="own") == 0
    assert await cached(b, cache_salt="own") == 0
    assert await cached(a, cache_salt="own") == len(SECRET)
    # Whoever knows how namespaces are named gets into none of them by it.
    [params] = made(api_key="key-a", from_key=True)
    assert await cached(b, cache_salt=params.cache_salt) == 0
    assert "key-a" not in repr(await cache(server, headers=a))


def made(
    *, api_key: str = "", from_key: bool = False, n_prompts: int = 1, n: int | None = None
) -> tuple[GenerateParams, ...]:
    """Return the commands that a request becomes."""
    info = FakeBackend().info
    body = CompletionBody(prompt=["p"] * n_prompts, n=n)
    key_secret = ApiSettings(cache_salt_from_api_key=from_key).key_secret(api_key)
    context = RequestContext("request", key_secret=key_secret)
    prompts = prompts_of(body, info.n_vocab, 10, RequestImages(ImageReader(None), {}, ""))
    read = text_requests(body, prompts, context, SETTINGS, info, tokens_of=lambda _: ())
    return tuple(each.params for each in read)


async def test_each_prompt_is_one_request() -> None:
    assert [(params.completion_id, params.n) for params in made(n=2)] == [("request", 2)]
    several = made(n_prompts=2, n=3)
    assert [(params.completion_id, params.n) for params in several] == [("request-0", 3), ("request-1", 3)]
