"""Real servers that share a real store: conversations move, and no failure of the store is one of a request.

`make test-remote` runs this against redis-server or valkey-server, `make test-slow` with fakeredis behind TCP: it
takes longer than what `tests/engine/test_remote_worker.py` has of it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import pytest

from bench.projector_files import picture, write_projector
from tests.app.test_crashes import wait
from tests.app.test_images import LONG as QUESTION
from tests.app.test_images import n_encoded, user
from tests.app.test_mmproj import WIDTH
from tests.conftest import LONG
from tests.live import Server, serving
from tests.store_proxy import WRITES, Fault, StoreProxy
from tests.store_server import PROGRAM, StoreServer, store_server

pytestmark = pytest.mark.skipif(not (PROGRAM or LONG), reason="long: make test-remote")

KEY = {"LLAMASLOT_CACHE_REMOTE_KEY": "a secret of 32 bytes, as it seems"}
RETRY_S = 0.3
SOON = f"""
from llamaslot.backend.remote import redis_store
from llamaslot.kvcache.tiers import pacing, remote_tier
pacing.PARTIAL_DELAY_S, pacing.RETRY_DELAY_S = 0.1, {RETRY_S}
redis_store._TRANSFER_TIMEOUT_S = 1.5
"""
"""Fault: delays and timeouts of 2 to 30 seconds are shortened to at most 1.5."""
FETCHES = f"""{SOON}
def init(self, *args, _init=remote_tier.RemoteTier.__init__, **fields):
    _init(self, *args, **fields | {{"prefill_seconds": lambda n: 0.003 * n}})
remote_tier.RemoteTier.__init__ = init
"""
"""Fault: the server assumes that prefill takes 3 ms a token, as with a small real model. The demo model is so fast
that fetching would not pay."""
GRID = 64
LOOKUP, FETCH, UPLOAD = frozenset({b"MGET"}), frozenset({b"HMGET"}), frozenset({b"HSET"})
"""Redis commands that a lookup, a fetch and an upload begin with."""
MARK = "zanzibar"
"""A word of all prompts, which the store must not have."""
_names = itertools.count()


class Fleet(NamedTuple):
    """Two servers; `a` computes, and `b` fetches through `proxy`."""

    store: StoreServer
    proxy: StoreProxy
    a: Server
    b: Server


@contextlib.contextmanager
def server(
    folder: Path, store: int | str, *args: str | Path, fault: str = SOON, in_process: bool = True, **environ: str
) -> Iterator[Server]:
    """A server with the store of this URL, or on this port."""
    own = folder / f"server{next(_names)}"
    own.mkdir()
    url = store if isinstance(store, str) else f"redis://127.0.0.1:{store}"
    flags = ("--debug-invariants", "--metrics", "-np", "2", "-c", "8192", "--cache-remote", url, *args)
    if in_process:
        flags = ("--in-process", *flags)
    with serving(own, *flags, environ={**KEY, **environ}, fault=fault) as started:
        yield started


@pytest.fixture(scope="module")
def store() -> Iterator[StoreServer]:
    with store_server() as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("remote")


@pytest.fixture(scope="module")
def servers(folder: Path, store: StoreServer) -> Iterator[Fleet]:
    proxy = StoreProxy(store.port)
    with server(folder, store.port, fault=FETCHES) as a, server(folder, proxy.port, fault=FETCHES) as b:
        yield Fleet(store, proxy, a, b)
        assert [each.stop() for each in (a, b)] == [0, 0]
    proxy.close()


@pytest.fixture
def fleet(servers: Fleet) -> Fleet:
    """The servers with empty caches, connected to an empty store."""
    servers.proxy.heal()
    for each in (servers.a, servers.b):
        wait(lambda each=each: bool(remote(each)["is_available"]))  # type: ignore[misc]
        each.post("/cache/clear", {})
    servers.store.connect().flushall()
    servers.proxy.seen.clear()
    servers.proxy.n_faults = 0
    return servers


def remote(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/cache")["remote"]
    return found


def opening(system: str, user: str = "Tell me a story.", n: int = 24) -> list[dict[str, str]]:
    """Return messages of about 13 n tokens, which share a prefix only with those of the same system prompt."""
    system = f"{system} knows the way to {MARK}. " + "You tell short stories of animals and of the sea. " * n
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


class Reply(NamedTuple):
    text: str
    cache: dict[str, Any]
    n_prompt: int

    @property
    def n_remote(self) -> int:
        """Prompt tokens that came from the store."""
        n: int = self.cache["remote"]
        return n


def ask(server: Server, messages: list[dict[str, str]], **fields: Any) -> Reply:
    """Return the greedy reply, after checking that the tokens of all tiers add up to the prompt."""
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, **fields}
    got = server.post("/v1/chat/completions", body)
    n_prompt, cache = got["usage"]["prompt_tokens"], got["cache"]
    assert sum(cache[each] for each in ("cells", "ram", "disk", "remote", "computed")) == n_prompt
    return Reply(got["choices"][0]["message"]["content"], cache, n_prompt)


def cold(server: Server, messages: list[dict[str, str]]) -> str:
    """Return the reply computed without a cache."""
    reply = ask(server, messages, cache_prompt=False)
    assert reply.cache["computed"] == reply.n_prompt
    return reply.text


def ask_and_upload(server: Server, messages: list[dict[str, str]], n: int = 1, **fields: Any) -> Reply:
    """Return the reply once at least `n` objects were uploaded."""
    before = remote(server)["uploads"]
    reply = ask(server, messages, **fields)
    wait(lambda: remote(server)["uploads"] >= before + n)
    return reply


def going_on(messages: list[dict[str, str]], reply: str) -> list[dict[str, str]]:
    return [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": "And then?"}]


def objects(store: StoreServer, password: str | None = None) -> dict[bytes, dict[bytes, bytes]]:
    client = store.connect(password)
    return {name: client.hgetall(name) for name in client.keys("llamaslot:1:*:d:*")}


def scopes(store: StoreServer) -> set[bytes]:
    """Return the key prefixes of all fleets and models that have objects in the store."""
    return {name.rpartition(b":d:")[0] for name in objects(store)}


def test_a_conversation_moves_to_another_server(fleet: Fleet) -> None:
    before = remote(fleet.b)
    first = ask_and_upload(fleet.a, opening("cat"))
    # Later turns are uploaded too, on a slow machine before the end of this test.
    n_bytes = sum(len(each[b"kv"]) for each in objects(fleet.store).values())
    moved = going_on(opening("cat"), first.text)
    there = ask(fleet.b, moved)
    assert there.n_remote >= first.n_prompt - GRID
    assert there.text == ask(fleet.a, moved).text == cold(fleet.b, moved)
    # Another conversation with its system prompt finds that in the pool of the server.
    other = ask(fleet.b, opening("cat", "Where is the dog?"))
    assert other.cache["cells"] + other.cache["ram"] >= first.n_prompt - GRID
    assert other.text == cold(fleet.a, opening("cat", "Where is the dog?"))
    now = remote(fleet.b)
    assert now["fetched_tokens"] - before["fetched_tokens"] == there.n_remote
    assert now["fetched_bytes"] - before["fetched_bytes"] == n_bytes
    assert (now["failures"], now["corrupt_objects"]) == (before["failures"], before["corrupt_objects"])
    assert fleet.b.get("/cache")["requests"]["from_remote"] >= 1
    with urlopen(f"{fleet.b.url}/metrics", timeout=10) as reply:
        metrics = dict(line.rsplit(" ", 1) for line in reply.read().decode().splitlines() if line[0] != "#")
    assert float(metrics["llamaslot_remote_fetched_tokens_total"]) == now["fetched_tokens"]
    assert float(metrics["llamaslot_remote_fetched_bytes_total"]) == now["fetched_bytes"]


def test_no_image_is_encoded_that_another_server_has_computed(
    folder: Path, store: StoreServer, tmp_path: Path
) -> None:
    flags = "--mmproj", write_projector(tmp_path / "mmproj.gguf", "mlp", n_embd=WIDTH)
    with (
        server(folder, store.port, *flags, fault=FETCHES) as a,
        server(folder, store.port, *flags, fault=FETCHES) as b,
    ):
        first: Any = [*opening("cat"), user(picture(1, 100, 60), f"Whose is it?{QUESTION}")]
        reply = ask_and_upload(a, first, 2)
        there = ask(b, going_on(first, reply.text))
        assert there.n_remote >= reply.n_prompt - GRID
        assert (n_encoded(a), n_encoded(b)) == (1, 0)
        assert there.text == ask(a, going_on(first, reply.text)).text
        other = ask(b, [*opening("cat"), user(picture(2, 100, 60), f"Whose is it?{QUESTION}")])  # type: ignore[list-item]
        assert other.cache["computed"] > 64
        assert n_encoded(b) == 1


MISSES = {
    "lookups are cut": Fault("cut", LOOKUP),
    "answers to lookups are cut": Fault("cut", LOOKUP, in_reply=True),
    "lookups hang": Fault("stall", LOOKUP),
    "answers to lookups hang": Fault("stall", LOOKUP, in_reply=True),
    "lookups are late": Fault("delay", LOOKUP, seconds=2.0),
    "fetches are cut": Fault("cut", FETCH),
    "fetched objects are cut": Fault("cut", FETCH, in_reply=True),
    "fetched objects hang": Fault("stall", FETCH, in_reply=True),
}


@pytest.mark.parametrize("name", MISSES)
def test_a_lookup_or_fetch_that_fails_is_a_miss(fleet: Fleet, name: str) -> None:
    first = ask_and_upload(fleet.a, opening("fox"))
    before = remote(fleet.b)
    fleet.proxy.fault = MISSES[name]
    # The reply comes while the fault lasts, after one lookup.
    reply = ask(fleet.b, opening("fox"))
    assert fleet.proxy.n_faults > 0
    assert (reply.text, reply.n_remote) == (first.text, 0)
    wait(lambda: bool(remote(fleet.b)["failures"] == before["failures"] + 1))
    assert remote(fleet.b)["lookups"] == before["lookups"] + 1
    fleet.proxy.heal()
    wait(lambda: bool(remote(fleet.b)["is_available"]))
    fleet.b.post("/cache/clear", {})
    second = ask_and_upload(fleet.a, opening("cow"))
    assert ask(fleet.b, opening("cow"))[:1] == second[:1]
    assert remote(fleet.b)["failures"] == before["failures"] + 1


def test_a_slow_store_is_used_where_that_is_faster_than_to_compute(fleet: Fleet) -> None:
    first = ask_and_upload(fleet.a, opening("owl"))
    before = remote(fleet.b)
    fleet.proxy.fault = Fault("delay", LOOKUP | FETCH, in_reply=True, seconds=0.05)
    reply = ask(fleet.b, opening("owl"))
    assert fleet.proxy.n_faults == 2
    assert reply.text == first.text
    assert reply.n_remote >= first.n_prompt - GRID
    assert remote(fleet.b)["failures"] == before["failures"]


UPLOADS = {
    "uploads are cut": Fault("cut", UPLOAD),
    "uploads hang": Fault("stall", UPLOAD),
    "full": Fault("refuse", WRITES),
}


@pytest.mark.parametrize("name", UPLOADS)
def test_an_upload_that_fails_is_tried_again(fleet: Fleet, name: str) -> None:
    before = remote(fleet.b)
    is_full = name == "full" and PROGRAM
    if is_full:
        fill(fleet.store)
    else:
        fleet.proxy.fault = UPLOADS[name]
    reply = ask(fleet.b, opening("pig"))
    wait(lambda: bool(remote(fleet.b)["failed_uploads"] > before["failed_uploads"]))
    assert ask(fleet.b, opening("pig")).text == reply.text
    assert (remote(fleet.b)["uploads"], remote(fleet.b)["failures"]) == (before["uploads"], before["failures"])
    if is_full:
        fleet.store.connect().config_set("maxmemory", 0)
    fleet.proxy.heal()
    wait(lambda: bool(remote(fleet.b)["uploads"] > before["uploads"]))


def fill(store: StoreServer) -> None:
    """Limit the memory of the store so that it refuses the next upload."""
    client = store.connect()
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 200_000)


def flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :]


@pytest.mark.parametrize("where", ["kv", "code", "index", "on the way"])
def test_flipped_bits_change_no_text(fleet: Fleet, where: str) -> None:
    first = ask_and_upload(fleet.a, opening("bee"))
    before = remote(fleet.b)
    client = fleet.store.connect()
    for name, fields in objects(fleet.store).items():
        if where == "kv":
            client.hset(name, b"kv", flip(fields[b"kv"], len(fields[b"kv"]) // 2))
        elif where == "code":
            client.hset(name, b"kv.code", flip(fields[b"kv.code"], 0))
    if where == "index":
        for i, name in enumerate(client.keys("llamaslot:1:*:i:*")):
            value = client.get(name)
            client.setrange(name, 0, flip(value, i % len(value)))
    elif where == "on the way":
        fleet.proxy.fault = Fault("flip", FETCH, in_reply=True)
    reply = ask(fleet.b, opening("bee"))
    assert (reply.text, reply.n_remote) == (first.text, 0)
    now = remote(fleet.b)
    # An entry of the index that is damaged is as good as none.
    assert now["corrupt_objects"] - before["corrupt_objects"] == (where != "index")
    assert (now["failures"], now["failed_uploads"]) == (before["failures"], before["failed_uploads"])


def test_others_share_nothing(fleet: Fleet, folder: Path) -> None:
    first = ask_and_upload(fleet.a, opening("ant"), cache_salt="pepper")
    for salt in ("salt", None):
        reply = ask(fleet.b, opening("ant"), **({"cache_salt": salt} if salt else {}))
        assert (reply.n_remote, reply.cache["computed"], reply.text) == (0, reply.n_prompt, first.text)
    assert ask(fleet.b, opening("ant"), cache_salt="pepper").n_remote > 0
    own = scopes(fleet.store)
    with server(folder, fleet.store.port, LLAMASLOT_CACHE_REMOTE_KEY="the secret of another fleet") as stranger:
        reply = ask_and_upload(stranger, opening("ant"), cache_salt="pepper")
        assert (reply.n_remote, reply.text) == (0, first.text)
        assert scopes(fleet.store) > own
        stranger.post("/cache/clear", {})
        assert scopes(fleet.store) == own
        assert (remote(stranger)["failures"], remote(stranger)["corrupt_objects"]) == (0, 0)
        assert stranger.stop() == 0


def test_private_prompts_leave_no_trace(fleet: Fleet) -> None:
    before = remote(fleet.a)
    ask(fleet.a, opening("eel"), cache_prompt=False)
    ask_and_upload(fleet.a, opening("cod"))
    now = remote(fleet.a)
    assert (now["lookups"], now["uploads"]) == (before["lookups"] + 1, before["uploads"] + 1)
    assert len(objects(fleet.store)) == 1


def test_clearing_and_deleting_reach_the_store(fleet: Fleet) -> None:
    ask_and_upload(fleet.a, opening("gnu"))
    before = set(objects(fleet.store))
    gone = ask_and_upload(fleet.a, opening("yak"), session_id="mine")
    assert len(objects(fleet.store)) == len(before) + 1
    with urlopen(Request(f"{fleet.a.url}/sessions/mine", method="DELETE"), timeout=60):
        pass
    assert set(objects(fleet.store)) == before
    reply = ask(fleet.b, opening("yak"))
    assert (reply.n_remote, reply.text) == (0, gone.text)
    fleet.a.post("/cache/clear", {})
    assert not objects(fleet.store)
