"""Servers and their store start, end and are killed at any time; stores with TLS, a password, a limit and a TTL."""

from __future__ import annotations

import concurrent.futures
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import synthetic
from tests.app.test_crashes import engine_of, is_healthy, wait
from tests.app.test_remote_tier import (
    FETCHES,
    GRID,
    LOOKUP,
    ask,
    ask_and_upload,
    cold,
    going_on,
    objects,
    opening,
    remote,
    server,
)
from tests.certificates import make
from tests.conftest import LONG
from tests.live import Server
from tests.store_proxy import Fault, StoreProxy
from tests.store_server import PROGRAM, StoreServer, store_server

pytestmark = pytest.mark.skipif(not (PROGRAM or LONG), reason="long: make test-remote")
needs_program = pytest.mark.skipif(
    not PROGRAM, reason="the server in this process cannot do this: make test-remote"
)


@pytest.fixture
def store() -> Iterator[StoreServer]:
    with store_server() as started:
        yield started


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@needs_program
def test_a_store_may_start_after_its_servers(tmp_path: Path) -> None:
    port = free_port()
    with server(tmp_path, port) as a:
        wait(lambda: len(a.log_lines("remote.unavailable")) == 1)
        assert (remote(a)["lookups"], remote(a)["failures"]) == (0, 0)
        [line] = a.log_lines("remote.unavailable")
        assert (line["flag"], line["url"]) == ("--cache-remote", f"redis://127.0.0.1:{port}")
        first = ask(a, opening("cat"))
        assert first.n_remote == 0
        wait(lambda: remote(a)["failures"] == 1)
        with store_server(port=port) as store:
            wait(lambda: bool(remote(a)["is_available"]))
            # What could not be uploaded is tried again.
            wait(lambda: bool(objects(store)))
            assert ask(a, opening("cat")).text == first.text
            assert not a.log_lines("remote.available")
            ask(a, opening("dog"))
            assert [len(a.log_lines(f"remote.{each}")) for each in ("unavailable", "available")] == [1, 1]
        assert a.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_ends_leaves_what_it_has_uploaded(tmp_path: Path, store: StoreServer, number: int) -> None:
    with server(tmp_path, store.port, fault=FETCHES) as a:
        first = ask_and_upload(a, opening("cat"))
        assert a.stop(number) == (0 if number == signal.SIGTERM else -number)
    with server(tmp_path, store.port, fault=FETCHES) as b:
        moved = going_on(opening("cat"), first.text)
        there = ask(b, moved)
        assert there.n_remote >= first.n_prompt - GRID
        assert there.text == cold(b, moved)
        assert b.stop() == 0


def test_an_engine_that_is_killed_starts_warm(tmp_path: Path, store: StoreServer) -> None:
    with server(tmp_path, store.port, fault=FETCHES, in_process=False) as a:
        first = ask_and_upload(a, opening("cat"))
        engine_of(a).kill()
        wait(lambda: len(a.log_lines("engine.ended")) == 1)
        wait(lambda: is_healthy(a))
        again = ask(a, opening("cat"))
        assert (again.n_remote >= first.n_prompt - GRID, again.text) == (True, first.text)
        assert a.stop() == 0


def test_what_is_not_used_expires(tmp_path: Path, store: StoreServer) -> None:
    with server(tmp_path, store.port, "--cache-remote-ttl", "1", fault=FETCHES) as a:
        first = ask_and_upload(a, opening("cat"))
        a.post("/cache/clear", {})
        ask_and_upload(a, opening("dog"))
        time.sleep(1.1)
        with server(tmp_path, store.port, fault=FETCHES) as b:
            reply = ask(b, opening("dog"))
            assert reply.n_remote == 0
            assert ask(b, opening("cat")).text == first.text
            assert b.stop() == 0
        assert a.stop() == 0


def test_the_store_stays_within_its_size(tmp_path: Path, store: StoreServer) -> None:
    limit = 2**20
    with server(tmp_path, store.port, "--cache-remote-size", "1") as a:
        replies = {
            name: ask_and_upload(a, opening(name)).text for name in ("ant", "bee", "cat", "dog", "eel", "fox")
        }
        sizes = [sum(len(data) for data in each.values()) for each in objects(store).values()]
        assert len(sizes) < len(replies)
        assert sum(sizes) <= limit
        a.post("/cache/clear", {})
        assert {name: ask(a, opening(name)).text for name in replies} == replies
        assert a.stop() == 0


HOSTILE = {
    "a huge list": Fault("answer", LOOKUP, answer=b"*2147483647\r\n"),
    "a huge value": Fault("answer", LOOKUP, answer=b"$2147483647\r\n"),
    "nested lists": Fault("answer", LOOKUP, answer=b"*1\r\n" * 100_000),
    "many values": Fault("answer", LOOKUP, answer=b"*1000000\r\n" + b"$-1\r\n" * 1_000_000),
    "a line without end": Fault("answer", LOOKUP, answer=b"+" * 2**16, is_endless=True),
    "a long error": Fault("answer", LOOKUP, answer=b"-ERR " + b"x" * 50_000_000 + b"\r\n"),
    "a value without end": Fault("answer", LOOKUP, answer=b"*1\r\n$4000\r\n" + b"x" * 2**16, is_endless=True),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_prompt_that_needs_no_lookup_does_not_wait_for_a_hostile_store(
    tmp_path: Path, store: StoreServer, name: str
) -> None:
    proxy = StoreProxy(store.port)
    short = [{"role": "user", "content": "Hi"}]
    with server(tmp_path, proxy.port, fault=FETCHES, in_process=False) as a:
        ask(a, short, max_tokens=1)
        engine = engine_of(a)
        before = engine.memory_info().rss
        proxy.fault = HOSTILE[name]
        times = []
        with concurrent.futures.ThreadPoolExecutor() as pool:
            others = [pool.submit(ask, a, opening(f"{i}"), max_tokens=1) for i in range(6)]
            while not all(each.done() for each in others) or len(times) < 10:
                began = time.perf_counter()
                ask(a, short, max_tokens=1)
                times.append(time.perf_counter() - began)
        assert proxy.n_faults
        assert max(times) < 2
        assert engine.memory_info().rss - before < 2**27
        assert engine.memory_info().vms < 2**35
        print(name, f"{max(times):.3f} s, +{(engine.memory_info().rss - before) / 2**20:.0f} MiB")
        assert a.stop() == 0
    proxy.close()


def log_probs(server: Server, prompt: str, **fields: bool) -> dict[int, float]:
    """Log-probabilities of the likeliest next tokens, the likeliest first."""
    reply = server.post(
        "/completion", {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": 50, **fields}
    )
    return {each["id"]: each["logprob"] for each in reply["completion_probabilities"][0]["top_logprobs"]}


def distance(one: dict[int, float], other: dict[int, float]) -> float:
    """Greatest difference among the tokens that are likeliest by `other`."""
    least = min(one.values())
    return max(abs(one.get(token, least) - other[token]) for token in list(other)[:5])


@pytest.mark.parametrize("shape", ["tiny-granite", "tiny-swa"])
def test_checkpoints_move_too(tmp_path: Path, store: StoreServer, shape: str) -> None:
    """Weights are random, so log-probabilities tell more than texts, which rounding changes."""
    model = synthetic.ensure(shape, folder=tmp_path)
    flags = ("-m", model, "--cache-ram", "64")
    with (
        server(tmp_path, store.port, *flags, fault=FETCHES) as a,
        server(tmp_path, store.port, *flags, fault=FETCHES) as b,
    ):
        for each in (a, b):
            wait(lambda each=each: each.get("/props")["prefix_reuse"]["self_test"] == "passed")  # type: ignore[misc]
        first = ask_and_upload(a, opening("cat"))
        wait(lambda: any(b"state" in each for each in objects(store).values()))
        moved = going_on(opening("cat"), first.text)
        prompt = a.post("/apply-template", {"messages": moved})["prompt"]
        there = log_probs(b, prompt)
        assert b.get("/cache")["remote"]["fetched_tokens"] >= first.n_prompt - GRID
        alone = log_probs(a, prompt, cache_prompt=False)
        # Wrong state would differ by more than one other word within the window.
        other = log_probs(a, prompt.replace(first.text, f"{first.text} aa"), cache_prompt=False)
        assert distance(there, alone) < distance(other, alone) / 4
        assert [each.stop() for each in (a, b)] == [0, 0]


@needs_program
def test_tls_and_a_password_are_required(tmp_path: Path) -> None:
    cert, key = make(tmp_path, "store")
    port = free_port()
    tls = ("--tls-port", str(port), "--tls-cert-file", str(cert), "--tls-key-file", str(key))
    url = f"rediss://127.0.0.1:{port}"
    password = {"LLAMASLOT_CACHE_REMOTE_PASSWORD": "hush"}
    with store_server(*tls, "--tls-auth-clients", "no", "--requirepass", "hush") as store:
        with server(tmp_path, url, "--cache-remote-ca", cert, **password) as a:
            ask_and_upload(a, opening("cat"))
            assert remote(a)["failures"] == 0
            assert "hush" not in a.log.read_text()
            assert a.stop() == 0
        assert objects(store, password="hush")
        for flags, environ in ((("--cache-remote-ca", cert), {}), ((), password)):
            with server(tmp_path, url, *flags, **environ) as b:
                assert ask(b, opening("cat")).n_remote == 0
                wait(lambda b=b: remote(b)["failures"] == 1)  # type: ignore[misc]
                assert len(b.log_lines("remote.unavailable")) == 1
                assert b.stop() == 0
