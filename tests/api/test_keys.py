"""API keys: who may do what, and a file of keys that changes while the server runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from llamaslot.api.context import ApiSettings
from llamaslot.api.credentials import Access, ApiKeys
from llamaslot.api.http_server import create_app
from llamaslot.api.middleware import ACCESS
from llamaslot.api.routes import ROUTES as ROUTE_TABLE
from llamaslot.api.web_page import PAGES
from llamaslot.base.errors import ConfigError
from llamaslot.base.namespaces import tenant_name
from tests.fake_backend import FakeBackend

ROUTES = {
    Access.PUBLIC: {("GET", "/health"), ("GET", "/v1/health"), *(("GET", path) for path in PAGES)},
    Access.USER: {
        ("GET", "/models"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{name}"),
        ("GET", "/props"),
        ("GET", "/openapi.json"),
        ("GET", "/slots"),
        ("GET", "/cache"),
        ("GET", "/metrics"),
        ("POST", "/chat/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/chat/completions/input_tokens"),
        ("POST", "/v1/chat/completions/input_tokens"),
        ("POST", "/v1/completions"),
        ("POST", "/chat/completions/input_tokens"),
        ("POST", "/v1/chat/completions/input_tokens"),
        ("POST", "/responses"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/responses/input_tokens"),
        ("POST", "/v1/responses/compact"),
        ("POST", "/v1/responses/{response_id}/cancel"),
        ("GET", "/v1/responses/{response_id}"),
        ("DELETE", "/v1/responses/{response_id}"),
        ("GET", "/v1/responses/{response_id}/input_items"),
        ("GET", "/v1/chat/completions"),
        ("GET", "/v1/chat/completions/{completion_id}"),
        ("POST", "/v1/chat/completions/{completion_id}"),
        ("DELETE", "/v1/chat/completions/{completion_id}"),
        ("GET", "/v1/chat/completions/{completion_id}/messages"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/api/chat"),
        ("POST", "/api/generate"),
        ("POST", "/api/embed"),
        ("POST", "/api/embeddings"),
        ("POST", "/api/show"),
        ("GET", "/api/tags"),
        ("GET", "/api/ps"),
        ("GET", "/api/version"),
        ("POST", "/completion"),
        ("POST", "/infill"),
        ("POST", "/completions"),
        ("POST", "/v1/embeddings"),
        ("POST", "/embedding"),
        ("POST", "/embeddings"),
        ("POST", "/v1/rerank"),
        ("POST", "/v1/reranking"),
        ("POST", "/rerank"),
        ("POST", "/reranking"),
        ("POST", "/apply-template"),
        ("POST", "/cache/probe"),
        ("POST", "/cache/warm"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/tokenizer_info"),
        ("GET", "/lora-adapters"),
        ("DELETE", "/sessions/{session_id}"),
    },
    Access.ADMIN: {
        ("GET", "/cache/advice"),
        ("GET", "/events"),
        ("POST", "/cache/clear"),
        ("POST", "/models/load"),
        ("POST", "/models/unload"),
        ("POST", "/slots/{id_slot}"),
        ("POST", "/lora-adapters"),
    },
}
"""Every route by what it needs: a new one is an administrator's until it has a line here."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("\n boss \n\nanna user\ndora user\nbert  admin\n")
    return path


def routes_of(app: web.Application) -> set[tuple[str, str]]:
    return {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource}


async def test_each_route_asks_for_the_key_that_it_should(start: Any, file: Path) -> None:
    app = create_app(ApiSettings())
    needed = {each: access for access, routes in ROUTES.items() for each in routes}
    needed |= {("HEAD", path): access for (method, path), access in needed.items() if method == "GET"}
    assert routes_of(app) == set(needed)
    handlers = {route.handler for route in app.router.routes()}
    assert handlers == set(app[ACCESS]), "every handler has its access, and nothing else has"
    # With this flag, what shows all keys' use is the administrators'.
    needed |= {(method, "/cache"): Access.ADMIN for method in ("GET", "HEAD")}
    server = await start(api_key_file=str(file), cache_salt_from_api_key=True)
    for (method, path), access in needed.items():
        url = server.url + path.replace("{id_slot}", "0").replace("{session_id}", "a").replace("{name}", "a")
        for key, granted in (("", 0), ("wrong", 0), ("anna", Access.USER), ("boss", Access.ADMIN)):
            async with server.session.request(method, url, headers={"X-Api-Key": key}) as response:
                refusal = response.status if response.status in (401, 403) else None
            assert refusal == (None if granted >= access else 403 if granted else 401), (method, path, key)


async def test_a_route_without_an_access_level_is_an_administrators(start: Any, file: Path) -> None:
    async def forgotten(request: web.Request) -> web.Response:
        return web.Response(text="a secret")

    app = create_app(ApiSettings(api_key_file=str(file)))
    app.router.add_get("/forgotten", forgotten)
    server = await start(app=app)
    for key, status in (("", 401), ("anna", 403), ("boss", 200)):
        async with server.session.get(server.url + "/forgotten", headers={"X-Api-Key": key}) as response:
            assert response.status == status


def test_no_handler_has_two_access_levels() -> None:
    levels: dict[Any, set[Access]] = {}
    for handler, access in ((route.handler, route.access) for route in ROUTE_TABLE):
        levels.setdefault(handler, set()).add(access)
    assert all(len(each) == 1 for each in levels.values())


async def test_a_user_drops_sessions_of_its_own_only(start: Any, file: Path) -> None:
    server = await start(api_key_file=str(file), cache_salt_from_api_key=True)
    for own in ({}, {"cache_salt": "team"}):
        body = {"prompt": "Hello", "n_predict": 1, "session_id": "mine", **own}
        assert (await server.post("/completion", body, headers={"X-Api-Key": "anna"}))[0] == 200
        # Neither another user nor an administrator names a session of anna's, not even by her own salt.
        for key, status in (("dora", 404), ("bert", 404), ("anna", 200), ("anna", 404)):
            async with server.session.delete(
                server.url + "/sessions/mine", json=own, headers={"X-Api-Key": key}
            ) as response:
                assert response.status == status, (key, own)


async def test_a_user_drops_no_session_that_all_keys_share(start: Any, file: Path) -> None:
    server = await start(api_key_file=str(file))
    body = {"prompt": "Hello", "n_predict": 1, "session_id": "shared"}
    assert (await server.post("/completion", body, headers={"X-Api-Key": "anna"}))[0] == 200
    for key, status in (("anna", 403), ("boss", 200)):
        async with server.session.delete(server.url + "/sessions/shared", headers={"X-Api-Key": key}) as response:
            assert response.status == status


async def test_a_user_sees_no_text_in_the_cache(start: Any, file: Path) -> None:
    server = await start(api_key_file=str(file), cache_debug_text=True)
    await server.post("/completion", {"prompt": "Hello", "n_predict": 1}, headers={"X-Api-Key": "boss"})
    for key, shown in (("anna", False), ("boss", True)):
        _, cache = await server.get("/cache", headers={"X-Api-Key": key})
        assert any("text" in prefix for prefix in cache["prefixes"]) is shown


async def test_administrators_see_what_each_key_has_in_the_cache(start: Any, file: Path) -> None:
    server = await start(api_key_file=str(file), cache_salt_from_api_key=True)
    for key, salt in (("anna", "x"), ("anna", "y"), ("boss", "x")):
        body = {"prompt": "Hello", "n_predict": 1, "cache_salt": salt}
        assert (await server.post("/completion", body, headers={"X-Api-Key": key}))[0] == 200
    assert (await server.get("/cache", headers={"X-Api-Key": "anna"}))[0] == 403
    _, cache = await server.get("/cache", headers={"X-Api-Key": "boss"})
    found = {each["tenant"]: (each["cells"], each["requests"]) for each in cache["tenants"]}
    assert {name: n for name, (_, n) in found.items()} == {tenant_name("anna"): 2, tenant_name("boss"): 1}
    assert sum(cells for cells, _ in found.values()) == cache["cells"]["used"]
    assert found[tenant_name("anna")][0] == 2 * found[tenant_name("boss")][0]


async def test_an_unknown_address_is_shown_to_users_only(start: Any, file: Path) -> None:
    server = await start(api_key_file=str(file))
    assert (await server.get("/nowhere"))[0] == 401
    assert (await server.get("/nowhere", headers={"X-Api-Key": "anna"}))[0] == 404


def test_a_key_has_the_role_of_its_line(file: Path) -> None:
    keys = ApiKeys(["own"], str(file))
    found = {key: keys.access_of(key) for key in ("own", "boss", "anna", "bert", "", "ann", "user")}
    assert found == {
        **{"own": Access.ADMIN, "boss": Access.ADMIN, "anna": Access.USER, "bert": Access.ADMIN},
        **{"": None, "ann": None, "user": None},
    }
    assert ApiKeys(["anna"], str(file)).access_of("anna") is Access.ADMIN, "a flag wins over the file"


def test_a_changed_file_is_read_again_and_a_broken_one_is_not_used(file: Path) -> None:
    keys = ApiKeys([], str(file))
    file.write_text("carl user\n")
    assert keys.access_of("carl") is None, "it is looked at once a second"
    keys.changes.check()
    assert keys.access_of("carl") is Access.USER
    assert keys.access_of("anna") is None
    for broken in ("", "carl boss\n", "a b c\n", None):
        with capture_logs() as logs:
            if broken is None:
                file.unlink()
            else:
                file.write_text(broken)
            keys.changes.check()
            assert keys.access_of("carl") is Access.USER
            assert keys.access_of("carl") is Access.USER
        assert [line["event"] for line in logs] == ["api_keys.reload_failed"]
    assert keys, "a server that had keys never opens itself"


@pytest.mark.parametrize("text", ["", "\n  \n", "key boss\n", "a b c\n"])
def test_a_file_without_valid_keys_is_refused_at_the_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"key"):
        ApiKeys([], str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        ApiKeys([], str(tmp_path / "nowhere"))


async def test_a_user_sees_nothing_of_what_other_keys_do(start: Any, file: Path) -> None:
    settings = {"api_key_file": str(file), "metrics": True}
    for is_separate in (True, False):
        server = await start(**settings, backend=FakeBackend(n_ctx=8192), cache_salt_from_api_key=is_separate)
        anna, dora, boss = ({"X-Api-Key": key} for key in ("anna", "dora", "boss"))
        body = {"prompt": "Hello", "n_predict": 8000, "ignore_eos": True, "stream": True, "temperature": 0.625}
        async with server.session.post(server.url + "/completion", json=body, headers=anna) as running:
            await running.content.readany()
            for headers, sees_it in ((anna, True), (dora, not is_separate), (boss, True)):
                status, slots = await server.get("/slots", headers=headers)
                assert status == 200, slots
                (busy,) = [slot for slot in slots if slot["is_processing"]]
                assert (busy["params"]["temperature"] == 0.625) is sees_it
                assert (busy["n_prompt_tokens"] > 0) is sees_it
                assert (busy["next_token"][0]["n_decoded"] > 0) is sees_it
                assert busy["request_id"].startswith("cmpl-") is sees_it
            running.close()
        await server.idle()
        for headers, sees_all in ((anna, not is_separate), (boss, True)):
            assert any(slot["n_held"] for slot in (await server.get("/slots", headers=headers))[1]) is sees_all
            for path in ("/cache", "/metrics"):
                async with server.session.get(server.url + path, headers=headers) as response:
                    assert response.status == (200 if sees_all else 403)
        prompt = {"prompt": "Hello", "n_predict": 1}
        for headers, cached in ((dora, not is_separate), (anna, True)):
            _, probe = await server.post("/cache/probe", prompt, headers=headers)
            assert (probe["cells"] > 0) is cached
        stored = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "store": True}
        _, chat = await server.post("/v1/chat/completions", stored, headers=anna)
        for headers, found in ((dora, False), (boss, False), (anna, True)):
            _, listed = await server.get("/v1/chat/completions", headers=headers)
            assert bool(listed["data"]) is found
            status, _ = await server.get(f"/v1/chat/completions/{chat['id']}", headers=headers)
            assert status == (200 if found else 404)
        shown = json.dumps((await server.get("/props", headers=dora))[1])
        assert "0.625" not in shown
