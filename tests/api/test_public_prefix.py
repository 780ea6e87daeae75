"""`cache_public`: who may share a prefix with all API keys, what they get of it, and how it is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llamaslot.base.namespaces import tenant_name
from tests.fake_backend import FakeBackend

PATHS = ["/completion", "/v1/completions", "/v1/chat/completions"]
SYSTEM = "You answer in one sentence, and never tell who asked what before. " * 2


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("boss\nanna user\ndora user\n")
    return path


async def tenants(start: Any, file: Path, **given: Any) -> Any:
    """A server on which each key is a tenant."""
    backend = FakeBackend(n_ctx=4096, n_reserved=8)
    engine = given.pop("engine", {"ram_bytes": 10**7})
    settings = {"api_key_file": str(file), "cache_salt_from_api_key": True, **given}
    return await start(backend=backend, engine=engine, **settings)


async def ask(server: Any, key: str, text: str = SYSTEM, path: str = "/completion", **fields: Any) -> Any:
    """Send a prompt, which is all of the conversation where the endpoint takes one."""
    messages = [{"role": "system", "content": text}]
    body = {"prompt": text, "messages": messages, "max_tokens": 4, "temperature": 0, **fields}
    status, reply = await server.post(path, body, headers={"X-Api-Key": key})
    return reply if status == 200 else (status, reply["error"]["param"], reply["error"]["message"])


@pytest.mark.parametrize("path", PATHS)
async def test_what_an_administrator_publishes_is_cached_for_every_key(start: Any, file: Path, path: str) -> None:
    server = await tenants(start, file)
    first = await ask(server, "boss", path=path, cache_public=True)
    assert first["timings"]["cache_n"] == 0
    n_prompt = first["timings"]["prompt_n"]
    for key in ("anna", "dora"):
        reply = await ask(server, key, path=path)
        assert reply["timings"]["cache_n"] == n_prompt - 1
        assert reply["cache"]["ram"] == n_prompt - 1
    assert (await ask(server, "anna", path=path, cache_salt="own"))["timings"]["cache_n"] == n_prompt - 1
    assert (await ask(server, "anna", path=path, cache_prompt=False))["timings"]["cache_n"] == 0
    _, state = await server.get("/cache", headers={"X-Api-Key": "boss"})
    found = {each["tenant"]: each for each in state["tenants"]}
    assert found["public"]["requests"] == 1
    assert found["public"]["ram_bytes"] > 0
    assert found[tenant_name("anna")]["requests"] == 3
    assert state["public_tokens"] == 3 * (n_prompt - 1)


async def test_what_a_key_sends_is_not_public_even_if_it_begins_with_what_is(start: Any, file: Path) -> None:
    server = await tenants(start, file)
    await ask(server, "boss", cache_public=True, max_tokens=0)
    for key in ("anna", "boss"):
        await ask(server, key, SYSTEM + "My secret is Rosebud.")
        await ask(server, key, SYSTEM + "My secret is Rosebud.", cache_public=False)
        await ask(server, key, "Another secret is Rosebud.", cache_public=None)
    n_system = len(SYSTEM) + 1  # BOS is one of them
    assert (await ask(server, "dora", SYSTEM + "My secret is Rosebud."))["timings"]["cache_n"] == n_system
    again = await ask(server, "boss", SYSTEM + "My secret is Rosebud.", cache_public=True)
    assert again["timings"]["cache_n"] == n_system


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_that_may_not_publish_gets_an_error_that_names_the_field(
    start: Any, file: Path, path: str
) -> None:
    server = await tenants(start, file)
    status, param, message = await ask(server, "anna", path=path, cache_public=True)
    assert (status, param) == (403, "cache_public")
    assert "administrator" in message
    for fields in ({"cache_salt": "own"}, {"cache_prompt": False}):
        status, param, message = await ask(server, "boss", path=path, cache_public=True, **fields)
        assert (status, param) == (400, "cache_public")
        assert next(iter(fields)) in message
    assert (await ask(server, "boss", path=path, cache_public=1))[:2] == (400, "cache_public")
    assert (await ask(server, "dora", path=path))["timings"]["cache_n"] == 0, "nothing was published"


@pytest.mark.slow
async def test_without_tenants_or_without_ram_there_is_nothing_to_publish_to(start: Any, file: Path) -> None:
    for key, settings in (("boss", {"api_key_file": str(file)}), ("", {"api_key_file": ""})):
        server = await tenants(start, file, cache_salt_from_api_key=False, **settings)
        status, param, message = await ask(server, key, cache_public=True)
        assert (status, param) == (400, "cache_public")
        assert "--cache-salt-from-api-key" in message
    server = await tenants(start, file, engine={})
    status, param, message = await ask(server, "boss", cache_public=True)
    assert (status, param) == (400, "cache_public")
    assert "RAM" in message


async def test_publishing_keeps_kv_where_the_default_is_not_to(start: Any, file: Path) -> None:
    server = await tenants(start, file, cache_prompt=False)
    await ask(server, "boss", cache_public=True)
    assert (await ask(server, "anna", cache_prompt=True))["timings"]["cache_n"] == len(SYSTEM)


async def test_an_administrator_drops_what_is_public_by_its_session(start: Any, file: Path) -> None:
    server = await tenants(start, file)

    async def drop(key: str, **body: Any) -> tuple[int, Any]:
        url, headers = server.url + "/sessions/prompt", {"X-Api-Key": key}
        async with server.session.delete(url, headers=headers, json=body) as response:
            return response.status, await response.json()

    await ask(server, "boss", cache_public=True, session_id="prompt", max_tokens=0)
    for key in ("anna", "boss"):
        assert (await drop(key))[0] == 404, "a session of its own"
    status, refused = await drop("anna", cache_public=True)
    assert (status, refused["error"]["param"]) == (403, "cache_public")
    assert (await drop("boss", cache_public=True, cache_salt="own"))[0] == 400
    assert (await ask(server, "anna"))["timings"]["cache_n"] == len(SYSTEM)
    status, dropped = await drop("boss", cache_public=True)
    assert status == 200
    assert dropped["dropped_ram_tokens"] >= len(SYSTEM)
    assert (await ask(server, "dora"))["timings"]["cache_n"] == 0
    assert (await ask(server, "anna"))["timings"]["cache_n"] == len(SYSTEM), "what was loaded is her own"
