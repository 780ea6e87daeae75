"""The page at `/` loads nothing from elsewhere, and `/events` tells what the server does, and no texts."""

from __future__ import annotations

import asyncio
import json
import re
from importlib import resources
from typing import Any

import pytest

from llamaslot.api.web_page import FILES, PAGES
from llamaslot.base.commands import InspectCache
from llamaslot.base.errors import QueueFullError, UnavailableError
from llamaslot.base.stats import CacheState, CacheStats, EngineState, SlotState
from llamaslot.service import activity
from llamaslot.service.activity import Activity, RequestUpdate, SlotActivity, StateUpdate

MAX_BYTES = 150_000
_IS_ADDRESS = re.compile(r"(?:https?:)?//[a-z0-9-]+\.[a-z]")


def folder() -> Any:
    return resources.files("llamaslot.api").joinpath("webui")


@pytest.mark.parametrize("path", PAGES)
async def test_each_file_is_served_with_a_policy_that_forbids_other_origins(start: Any, path: str) -> None:
    server = await start()
    async with server.session.get(server.url + path) as response:
        assert response.status == 200
        body, headers = await response.read(), response.headers
    assert body == folder().joinpath(path[1:] or "index.html").read_bytes()
    directives = dict(each.strip().split(" ", 1) for each in headers["Content-Security-Policy"].split(";"))
    assert directives["default-src"] == "'none'"
    assert {value for name, value in directives.items() if name.endswith("-src")} == {"'none'", "'self'"}
    assert headers["X-Content-Type-Options"] == "nosniff"
    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    assert response.content_type == kinds.get(path.rpartition(".")[2], "text/html")


def test_the_page_is_small_and_names_no_other_origin() -> None:
    assert sum(len(folder().joinpath(name).read_bytes()) for name in FILES) < MAX_BYTES
    for name in FILES:
        if not name.startswith("vendor/"):
            text = folder().joinpath(name).read_text().replace("http://www.w3.org/2000/svg", "")
            assert not _IS_ADDRESS.search(text), name


def test_all_files_are_served() -> None:
    found = {
        f"{prefix}{each.name}"
        for prefix, place in (("", folder()), ("vendor/", folder().joinpath("vendor")))
        for each in place.iterdir()
        if each.is_file() and not each.name.startswith("LICENSE")
    }
    assert found == set(FILES)


async def test_without_the_page_its_addresses_are_unknown(start: Any) -> None:
    server = await start(webui=False)
    for path in PAGES:
        async with server.session.get(server.url + path) as response:
            assert response.status == 404


async def test_with_keys_the_page_needs_none_and_the_events_an_administrators(start: Any) -> None:
    server = await start(api_keys=("boss",))
    async with server.session.get(server.url) as response:
        assert response.status == 200
    async with server.session.get(server.url + "/events") as response:
        assert response.status == 401
    async with server.session.get(server.url + "/events", headers={"X-Api-Key": "boss"}) as response:
        assert response.status == 200


async def events_of(response: Any, n: int) -> list[dict[str, Any]]:
    """Return the next events of a stream."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(20):
        while len(found) < n:
            line = (await response.content.readline()).decode()
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
    return found


async def test_events_tell_of_states_and_ended_requests_without_their_texts(start: Any) -> None:
    server = await start()
    await server.ok("/completion", {"prompt": "a secret before", "max_tokens": 2, "ignore_eos": True})
    async with server.session.get(server.url + "/events") as response:
        assert response.content_type == "text/event-stream"
        before, state = await events_of(response, 2)
        assert (before["type"], before["finish_reason"]) == ("request", "limit")
        assert state["type"] == "state"
        assert {slot["state"] for slot in state["slots"]} == {"idle"}
        assert state["cache"]["cells"]["total"] > 0
        reply = await server.ok("/completion", {"prompt": "a secret now", "max_tokens": 2, "ignore_eos": True})
        update = state
        while update["type"] != "request":
            (update,) = await events_of(response, 1)
    assert update["fields"]["prompt_tokens"] == reply["timings"]["cache_n"] + reply["timings"]["prompt_n"]
    assert "secret" not in json.dumps([before, state, update])


async def test_prefixes_come_to_those_who_ask_for_them(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "INTERVAL_S", 0.01)
    server = await start(cache_debug_text=True)
    for prompt in ("one prompt", "one more", "other"):
        await server.ok("/completion", {"prompt": prompt, "n_predict": 1, "ignore_eos": True})

    async def listed(top: int) -> list[list[dict[str, Any]]]:
        """Return the lists that come before and after another request."""
        path = f"/events?top={top}" if top else "/events"
        async with server.session.get(server.url + path) as response:
            found = await events_of(response, 12)
            await server.ok("/completion", {"prompt": f"at last {top}", "n_predict": 1, "ignore_eos": True})
            found += await events_of(response, 12)
        return [each["prefixes"] for each in found if each["type"] == "prefixes"]

    assert await listed(0) == []
    before, after = await listed(2000)
    assert after == (await server.get("/cache?top=2000"))[1]["prefixes"]
    assert {each["text"] for each in after} - {each["text"] for each in before}
    lists = await listed(1)
    assert {each["text"] for (each,) in lists} == {after[0]["text"]}
    async with server.session.get(server.url + "/events?top=2001") as response:
        assert response.status == 400


async def test_without_the_debug_flag_prefixes_have_no_text(start: Any) -> None:
    server = await start()
    await server.ok("/completion", {"prompt": "a secret prompt", "max_tokens": 1, "ignore_eos": True})
    async with server.session.get(server.url + "/events?top=9") as response:
        found = await events_of(response, 3)
    (listed,) = (each["prefixes"] for each in found if each["type"] == "prefixes")
    assert listed
    assert not any("text" in each for each in listed)
    assert "secret" not in json.dumps(found)


async def test_a_server_that_stops_before_the_first_event_says_so(start: Any) -> None:
    server = await start()
    told = server.service.activity

    async def never() -> EngineState:
        told.close()
        raise UnavailableError("restarting")

    told._read = never
    status, reply = await server.get("/events")
    assert (status, reply["error"]["type"]) == (503, "unavailable_error")


async def test_the_engine_is_asked_only_while_somebody_watches(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "INTERVAL_S", 0.01)
    server = await start()
    service = server.service
    for _ in range(2):
        async with server.session.get(server.url + "/events") as response:
            await events_of(response, 3)
            assert service.activity._polling is not None
        async with asyncio.timeout(5):
            while service.activity._polling is not None:
                await asyncio.sleep(0.01)


def state_of(*slots: SlotState) -> EngineState:
    return EngineState(slots=slots, cache=CacheStats())


async def no_prefixes(query: InspectCache) -> CacheState:
    raise AssertionError("nobody asked for prefixes")


async def test_a_watcher_that_does_not_read_misses_the_oldest_updates() -> None:
    async def never() -> EngineState:
        raise UnavailableError("restarting")

    told = Activity(never, no_prefixes)
    updates = told.watch()
    first = asyncio.ensure_future(anext(updates))
    await asyncio.sleep(0)
    n = activity._MAX_UNREAD + 10
    for i in range(n):
        told.record(f"{i}", "eos", {})
    unread = [await first, *[await anext(updates) for _ in range(activity._MAX_UNREAD - 1)]]
    names = [each.update.request_id for each in unread if isinstance(each.update, RequestUpdate)]
    assert names == [f"{i}" for i in range(n - activity._MAX_UNREAD, n)]
    await updates.aclose()


async def test_watching_ends_when_the_server_is_about_to_stop() -> None:
    async def read() -> EngineState:
        return state_of()

    told = Activity(read, no_prefixes)
    updates = told.watch()
    await anext(updates)
    told.close()
    assert [each async for each in updates if not isinstance(each.update, StateUpdate)] == []
    assert told._polling is None
    with pytest.raises(UnavailableError):
        await anext(told.watch())


async def test_there_is_a_limit_of_watchers() -> None:
    async def read() -> EngineState:
        return state_of()

    told = Activity(read, no_prefixes)
    watching = [told.watch() for _ in range(activity.MAX_WATCHERS)]
    assert isinstance((await anext(watching[0])).update, StateUpdate)
    waiting = [asyncio.ensure_future(anext(each)) for each in watching[1:]]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await anext(told.watch())
    await watching[0].aclose()
    assert isinstance((await anext(told.watch())).update, StateUpdate)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def test_the_phases_of_a_slot() -> None:
    slot = SlotState(0, 100, 7)
    assert SlotActivity.of(slot).state == "idle"
    phases = [(0, 0), (5, 0), (5, 1)]
    running = [SlotState(0, 100, 7, "r", 9, n_computed, n_generated) for n_computed, n_generated in phases]
    assert [SlotActivity.of(each).state for each in running] == ["loading", "prefill", "decode"]
