"""`GET /cache/advice`: what a server says of prompts that diverged, to whom, and with which texts."""

from __future__ import annotations

from typing import Any

import pytest

from llamaslot.base.advice import Divergence
from llamaslot.base.prompt_jobs import Release
from llamaslot.kvcache import ghost_list
from llamaslot.service import advice
from llamaslot.service.advice import Adviser

SYSTEM = "You are an agent. Today is {}. " + "Be careful with all files. " * 12


def chat(day: str, question: str = "What is in the file?", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM.format(day)}, {"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": 2, **fields}


async def told(server: Any, key: str = "") -> dict[str, Any]:
    """The advice, once everything that was found is in it."""
    # Jobs of the prompt worker are carried out in order.
    await server.service._prompts.call(Release("none"))
    status, found = await server.get("/cache/advice", headers={"Authorization": f"Bearer {key}"} if key else {})
    assert status == 200
    return dict(found)


@pytest.mark.parametrize("shows_text", [False, True])
async def test_a_planted_date_is_named_and_its_text_only_shown_if_wanted(start: Any, shows_text: bool) -> None:
    server = await start(cache_debug_text=shows_text)
    server.local.prompts.worker._shows_text = shows_text
    for day in ("2026-11-27", "2026-11-28", "2026-12-01"):
        reply = await server.ok("/v1/chat/completions", chat(day))
    (client,) = (found := await told(server))["clients"]
    (place,) = client["places"]
    assert client["requests"] == 3
    assert client["prompt_tokens"] > client["computed_tokens"] > place["tokens"]
    assert (place["culprit"], place["requests"]) == ("date", 2)
    assert place["tokens"] >= 2 * 300
    assert place["last_request_id"] == reply["id"]
    assert place["offset"] == len("system: You are an agent. Today is 2026-1")
    assert place["meaning"] in "a date or time"
    assert place["fix"]
    assert ("agent" in str(found)) == shows_text
    assert {"before", "old", "new"} & place.keys() == ({"before", "old", "new"} if shows_text else set())
    assert 0 < found["hit_rate"] < 1


@pytest.mark.parametrize(("method", "path"), [("POST", "/cache/clear"), ("DELETE", "/sessions/mine")])
async def test_texts_are_forgotten_with_the_cache_or_a_session(start: Any, method: str, path: str) -> None:
    server = await start(cache_debug_text=True)
    server.local.prompts.worker._shows_text = True
    for day in ("2026-11-27", "2026-11-28"):
        await server.ok("/v1/chat/completions", chat(day, session_id="mine"))
    assert "agent" in str(await told(server))
    async with server.session.request(method, server.url + path) as response:
        assert response.status == 200
    (client,) = (found := await told(server))["clients"]
    assert client["places"][0]["requests"] == 1
    assert "agent" not in str(found)


async def test_turns_and_new_conversations_are_no_places(start: Any) -> None:
    server = await start()
    for question in ("What is in the file?", "Who wrote it?", "Who wrote it? And when?"):
        await server.ok("/v1/chat/completions", chat("2026-11-27", question))
    assert (await told(server))["clients"] == []


async def test_evicted_prefixes_are_places(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await start()
    await server.ok("/v1/chat/completions", chat("2026-11-27"))
    await server.service.clear_cache()
    await server.ok("/v1/chat/completions", chat("2026-11-27"))
    (client,) = (await told(server))["clients"]
    (place,) = client["places"]
    assert (place["culprit"], place["offset"], place["role"]) == ("evicted", -1, "")
    assert place["tokens"] >= 4 * ghost_list.BLOCK_TOKENS


async def test_with_keys_an_administrators_is_needed_and_tenants_are_not_compared(start: Any) -> None:
    server = await start(api_keys=("boss", "clerk"), cache_salt_from_api_key=True)
    for key, day in (("boss", "2026-11-27"), ("clerk", "2026-11-28"), ("boss", "2026-11-27")):
        headers = {"Authorization": f"Bearer {key}"}
        status, _ = await server.post("/v1/chat/completions", chat(day), headers=headers)
        assert status == 200
    assert (await told(server, "boss"))["clients"] == []
    assert (await server.get("/cache/advice"))[0] == 401


async def test_without_slots_there_is_no_advice(start: Any) -> None:
    server = await start(slots=False)
    assert (await server.get("/cache/advice"))[0] == 501


def test_clients_that_sent_nothing_for_long_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "MAX_CLIENTS", 2)
    adviser = Adviser()
    for client in ("a", "b", "a", "c"):
        adviser.count(client, 100, 10)
    for client, n_tokens in (("a", 5), ("b", 7), ("c", 9), ("a", 6)):
        adviser.add(client, f"of {client}", Divergence("date", n_tokens, "system", 3))
    first, second = adviser.clients()
    assert (first.client, first.requests, first.computed_tokens, first.places[0].tokens) == ("a", 2, 180, 11)
    assert (second.client, second.requests, second.places[0].requests) == ("c", 1, 1)
