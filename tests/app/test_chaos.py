"""Faults of all kinds at once, by a seeded schedule, on a real server; and what must hold once it is idle again.

LLAMASLOT_CHAOS_SEED repeats a run, LLAMASLOT_CHAOS_SECONDS sets how long faults are injected in the long form.

Where each fault alone is injected (paths below `tests/`):

| fault | test |
|---|---|
| client leaves while queued, loading, prefilling, decoding | `api/test_disconnect.py` |
| slow reader, of HTTP/1.0 too | `api/test_sse.py`, `api/test_slow_readers.py`, here |
| idle connections, half-sent bodies, few descriptors | `api/test_connections.py`, `app/test_serve.py`, here |
| KV pool full in mid-decode | `engine/test_engine.py`, `scheduler/test_scheduler.py` |
| llama_decode returns 1, -1, 2, < -1 | `engine/test_engine.py`, `engine/test_compute_faults.py` |
| logits NaN or infinite, bad cells | `engine/test_compute_faults.py`, `backend/test_sampler.py` |
| engine aborts, hangs, raises, is killed; parent is killed | `app/test_crashes.py` |
| prompt worker crashes, hangs, is killed | `processes/test_prompt_supervisor.py` |
| a vocabulary of quadratic time | `processes/test_slow_vocabulary.py` |
| one and two SIGTERM, while loading and while serving | `app/test_serve.py`, `app/test_crashes.py` |
| disk full, read-only, gone | `app/test_disk_limits.py` (by the kernel), here (by patched methods) |
| disk slow, hung | `engine/test_disk_worker.py`, `app/test_serve.py`, here |
| files on disk damaged, killed while writing | `demo/test_restart.py`, `backend/test_disk_store.py` |
| memory short | `engine/test_no_memory.py` |
| clock jumps by a day | here |
| model file replaced or gone; truncated | `app/test_crashes.py`; here |
| two servers on one port; on one cache folder | `app/test_serve.py`; here |
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from llamaslot.app.model_files import resolve_model
from llamaslot.backend.llama import LlamaSettings
from tests.app.test_crashes import STORY, engine_of, is_healthy, n_running, outcome, wait
from tests.conftest import LONG, new_seed
from tests.live import WRITE_SOON, Server, serving
from tests.noise import Noise

SEED = int(os.environ.get("LLAMASLOT_CHAOS_SEED") or new_seed())
SECONDS = float(os.environ.get("LLAMASLOT_CHAOS_SECONDS", "120")) if LONG else 3.0
N_CLIENTS = 6
PROMPTS = [f"{i}. {STORY * (1 + 5 * (i % 3))}" for i in range(6)]
REPLY = {"n_predict": 24, "temperature": 0, "return_tokens": True}
FAULT = """
import errno, os, random, time
chance = random.Random({seed})
# The wall clock jumps by up to a day, both ways, whenever it is read.
_time = time.time
time.time = lambda: _time() + chance.uniform(-86_400, 86_400)
from llamaslot.backend.disk import DiskStore
def faulty(method, codes):
    def call(self, *arguments):
        if os.path.exists({flag!r}) and chance.random() < 0.2:
            code = chance.choice(codes)
            if code:
                raise OSError(code, os.strerror(code))
            time.sleep(chance.uniform(0, 0.5))
        return method(self, *arguments)
    return call
DiskStore.write = faulty(DiskStore.write, [0, errno.ENOSPC, errno.EROFS, errno.EIO])
DiskStore.read = faulty(DiskStore.read, [0, errno.EIO, errno.ENOENT])
DiskStore.erase = faulty(DiskStore.erase, [0, errno.EROFS])
DiskStore.mark_used = faulty(DiskStore.mark_used, [0, errno.ENOSPC])
"""


class Client(threading.Thread):
    """Sends requests, and abandons some of them in different ways; keeps the replies of the others."""

    def __init__(self, server: Server, seed: int, must_end: threading.Event) -> None:
        super().__init__()
        self.replies: list[tuple[int, str, list[int]]] = []
        """The prompt's index, the text and its tokens."""
        self.errors: list[tuple[int, Any]] = []
        self.failure: BaseException | None = None
        self._server = server
        self._chance = random.Random(seed)
        self._must_end = must_end

    def run(self) -> None:
        """Send until told to end."""
        try:
            while not self._must_end.is_set():
                self._chance.choices(
                    [self.ask, self.leave, self.half_send, self.read_slowly, self.stay_silent], [8, 4, 1, 1, 1]
                )[0]()
        except BaseException as error:
            self.failure = error

    def ask(self) -> None:
        """Wait for a whole reply."""
        i = self._chance.randrange(len(PROMPTS))
        status, reply, _ = outcome(self._server, {"prompt": PROMPTS[i], **REPLY})
        if status == 200:
            self.replies.append((i, reply["content"], reply["tokens"]))
        else:
            self.errors.append((status, reply))

    def leave(self) -> None:
        """Leave at any time: while queued, loading, prefilling, decoding or reading."""
        with self.connected() as client:
            client.sendall(
                self.request({"n_predict": 300, "ignore_eos": True, "stream": self._chance.random() < 0.5})
            )
            client.settimeout(self._chance.choice([0.001, 0.02, 0.2]))
            with contextlib.suppress(TimeoutError, ConnectionError):
                client.recv(2**16)
            if self._chance.random() < 0.5:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    def half_send(self) -> None:
        """Send a part of a request, and leave after a while."""
        whole = self.request(REPLY)
        with self.connected() as client:
            client.sendall(whole[: self._chance.randrange(len(whole))])
            time.sleep(0.1)

    def read_slowly(self) -> None:
        """Read a stream byte by byte with pauses."""
        with self.connected() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            client.sendall(self.request({"n_predict": 200, "ignore_eos": True, "stream": True}))
            client.settimeout(1)
            with contextlib.suppress(TimeoutError, ConnectionError):
                for _ in range(20):
                    client.recv(16)
                    time.sleep(0.02)

    def stay_silent(self) -> None:
        """Connect, and send nothing."""
        with self.connected():
            time.sleep(0.1)

    def connected(self) -> socket.socket:
        address = urlsplit(self._server.url)
        return socket.create_connection((address.hostname, address.port), timeout=30)

    def request(self, body: dict[str, Any]) -> bytes:
        data = json.dumps({"prompt": self._chance.choice(PROMPTS), **body}).encode()
        head = f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
        return head.encode() + data


class Prober(threading.Thread):
    """Asks for `/health` all the time, on one connection."""

    def __init__(self, server: Server, must_end: threading.Event) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.statuses: set[int] = set()
        self._connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
        self._must_end = must_end

    def run(self) -> None:
        """Ask until told to end."""
        while not self._must_end.is_set():
            started = time.monotonic()
            self._connection.request("GET", "/health")
            with self._connection.getresponse() as reply:
                self.statuses.add(reply.status)
                reply.read()
            self.seconds.append(time.monotonic() - started)
            time.sleep(0.02)
        self._connection.close()

    @property
    def p99(self) -> float:
        """Seconds that 99 of 100 answers take at most."""
        return sorted(self.seconds)[int(0.99 * len(self.seconds))]


def prompt_worker_of(server: Server) -> psutil.Process:
    children = psutil.Process(server.process.pid).children()
    return next(each for each in children if "llamaslot.app.runtime.prompt_main" in each.cmdline())


def kill(find: Callable[[Server], psutil.Process], server: Server, number: int) -> None:
    with contextlib.suppress(StopIteration, psutil.NoSuchProcess):
        find(server).send_signal(number)


def meddle(server: Server, disk: Path, chance: random.Random, seconds: float) -> None:
    """Do to the server from outside what a careless operator or a lack of luck would."""
    until = time.monotonic() + seconds
    actions: list[Callable[[], Any]] = [
        lambda: kill(engine_of, server, signal.SIGKILL),
        lambda: kill(prompt_worker_of, server, signal.SIGKILL),
        lambda: outcome_of(server, "/cache/clear"),
        lambda: [path.unlink(missing_ok=True) for path in sorted((disk / "segments").glob("*"))[::2]],
    ]
    # Each of them at least once, and the first one while the disk has everything.
    due = list(actions)
    while due or time.monotonic() < until:
        time.sleep(chance.uniform(0.3, 6.0 if LONG else 0.8))
        (due.pop(0) if due else chance.choice(actions))()


def outcome_of(server: Server, path: str) -> None:
    with contextlib.suppress(OSError):
        server.post(path, {})


def is_same(noise: Noise, i: int, tokens: list[int], expected: list[int]) -> bool:
    """True if tokens are the expected ones up to a near-tie."""
    at = next((n for n, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), None)
    if at is None:
        return len(tokens) == len(expected)
    history = [*noise.tokenize(PROMPTS[i]), *expected[:at]]
    return noise.explains(history, tokens[at], expected[at])


@pytest.mark.slow
def test_faults_at_once_leave_no_stuck_slot_and_change_no_text(tmp_path: Path) -> None:
    print(f"LLAMASLOT_CHAOS_SEED={SEED}")
    chance = random.Random(SEED)
    disk = tmp_path / "disk"
    args = ("-np", "2", "--cache-disk", disk, "--cache-ram", "8", "--debug-invariants", "-c", "4096")
    must_end = threading.Event()
    fault = FAULT.format(seed=SEED, flag=str(tmp_path / "faults"))
    with serving(tmp_path, *args, fault=WRITE_SOON + fault) as server:
        expected = [server.post("/completion", {"prompt": prompt, **REPLY})["tokens"] for prompt in PROMPTS]
        wait(lambda: server.get("/cache")["disk"]["tokens"] > 400, seconds=40)
        (tmp_path / "faults").touch()
        clients = [Client(server, chance.randrange(2**32), must_end) for _ in range(N_CLIENTS)]
        prober = Prober(server, must_end)
        threads = [*clients, prober]
        for each in threads:
            each.start()
        try:
            meddle(server, disk, chance, SECONDS)
        finally:
            must_end.set()
            for each in threads:
                each.join(60)
        assert not any(each.is_alive() for each in threads), "a request never ended"
        assert server.process.poll() is None
        assert not [each.failure for each in clients if each.failure]
        # Nothing is stuck: it is idle again, and serves at once.
        wait(lambda: is_healthy(server) and n_running(server) == 0, seconds=40)
        assert server.get("/slots")
        for i, prompt in enumerate(PROMPTS):
            reply = server.post("/completion", {"prompt": prompt, **REPLY})
            clients[0].replies.append((i, reply["content"], reply["tokens"]))
        assert {status for each in clients for status, _ in each.errors} <= {429, 503}, clients[0].errors
        assert prober.statuses <= {200, 503}
        assert not LONG or prober.p99 < 0.1, f"/health p99 is {prober.p99 * 1e3:.0f} ms"
        assert not [line for line in server.log_lines("engine.ended") if line["crashed"]], "only kills end it"
        assert server.stop() == 0
        n_kills = len(server.log_lines("engine.ended"))
    replies = [reply for client in clients for reply in client.replies]
    print(
        f"{len(replies)} replies, {sum(len(c.errors) for c in clients)} errors, {n_kills} kills, {prober.p99:.3f} s"
    )
    assert len(replies) > len(PROMPTS)
    assert n_kills
    noise = Noise(LlamaSettings(model=resolve_model("demo"), n_ctx=4096, n_threads=1, n_threads_batch=1))
    different = {(i, tuple(tokens)) for i, _, tokens in replies if tokens != expected[i]}
    assert all(is_same(noise, i, list(tokens), expected[i]) for i, tokens in different), different


@pytest.mark.slow
def test_a_model_file_that_is_truncated_while_it_is_mapped_ends_the_engine_only(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(resolve_model("demo"), model)
    # Of a pool this small, nothing is measured at start.
    with serving(tmp_path, "-m", model, "-c", "2048") as server:
        os.truncate(model, 4096)
        status, reply, _ = outcome(server, {"prompt": STORY, "n_predict": 2})
        assert (status, "the engine ended" in reply["error"]["message"]) == (503, True)
        wait(lambda: len(server.log_lines("engine.ended")) >= (2 if LONG else 1))
        crash, *later = server.log_lines("engine.ended")
        assert (crash["reason"], crash["crashed"]) == ("SIGBUS", True)
        assert all("cannot load" in end["reason"] for end in later)
        assert server.process.poll() is None
        assert not is_healthy(server)
        assert server.stop() == 0


JUMPING_CLOCK = """
import datetime, sys, time
_time = time.time
def now():
    try:
        with open({file!r}) as file:
            return _time() + float(file.read() or 0)
    except OSError:
        return _time()
time.time = now
class Datetime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)
datetime.datetime = Datetime
if "llamaslot.api.credentials" in sys.modules:
    # Of API keys, which the server reads again.
    sys.modules["llamaslot.api.credentials"]._INTERVAL_S = 0.1
if "llamaslot.app.runtime.engine_main" in sys.orig_argv:
    from llamaslot.kvcache.tiers import pacing
    pacing.PARTIAL_DELAY_S = 0.1
"""
DAY_S = 86_400


@pytest.mark.slow
def test_a_wall_clock_that_jumps_by_a_day_ends_nothing_and_gives_no_budget(tmp_path: Path) -> None:
    jump, keys = tmp_path / "jump", tmp_path / "keys"
    keys.write_text("key-0 admin\n")
    fault = JUMPING_CLOCK.format(file=str(jump))
    args = ("--cache-disk", tmp_path / "disk", "--cache-disk-write-per-day", "1", "--api-key-file", keys)
    body = {"prompt": PROMPTS[0], **REPLY, "n_predict": 8, "session_id": "s"}
    with serving(tmp_path, *args, "-np", "2", "--request-timeout", "600", fault=fault) as server:
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)

        def ask(path: str, key: str, body: dict[str, Any]) -> http.client.HTTPResponse:
            connection.request("POST", path, json.dumps(body), {"Authorization": f"Bearer {key}"})
            return connection.getresponse()

        def is_known(key: str) -> bool:
            with ask("/tokenize", key, {"content": "a"}) as reply:
                reply.read()
                return reply.status == 200

        stream = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
        endless = {"prompt": "a", "n_predict": -1, "ignore_eos": True, "stream": True}
        stream.request("POST", "/completion", json.dumps(endless), {"Authorization": "Bearer key-0"})
        events = stream.getresponse()
        texts, written = [], []
        for n, seconds in enumerate((0, DAY_S, -DAY_S, 0)):
            jump.write_text(str(seconds))
            assert events.readline().startswith(b"data: "), "the stream goes on"
            assert events.readline() == b"\n"
            with ask("/v1/completions", f"key-{n}", {"prompt": "a", "max_tokens": 1}) as reply:
                expected = time.time() + seconds
                assert reply.status == 200
                assert abs(json.load(reply)["created"] - expected) < 60
                assert abs(parsedate_to_datetime(reply.headers["Date"]).timestamp() - expected) < 60
            with ask("/completion", f"key-{n}", body) as reply:
                result = json.load(reply)
            texts.append(result["content"])
            assert n == 0 or result["timings"]["cache_n"] > 0
            for i in range(1 if n else 3):
                with ask("/completion", f"key-{n}", {**REPLY, "prompt": f"{n} {i} {PROMPTS[5]}"}) as reply:
                    reply.read()
                    assert reply.status == 200
            if n == 0:
                wait(lambda: cache_of(server, "key-0")["disk"]["written_bytes"] > 2**20)
            # Writes are due after a tenth of a second.
            time.sleep(0.3)
            written.append(cache_of(server, "key-0")["disk"]["written_bytes"])
            keys.write_text("".join(f"key-{i} admin\n" for i in range(n + 2)))
            wait(lambda n=n: is_known(f"key-{n + 1}"))
            assert connection.sock is not None, "an idle connection stays open"
        assert len(set(texts)) == 1
        stream.close()
        connection.close()
        assert not server.log_lines("engine.ended")
        assert server.stop() == 0
        assert written == written[:1] * 4, "no day has passed"


def cache_of(server: Server, key: str) -> Any:
    """`GET /cache` with a key."""
    request = urllib.request.Request(f"{server.url}/cache", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


@pytest.mark.skipif(not LONG, reason="starts two servers; tests/backend/test_disk_store.py has the short form")
def test_a_second_server_on_the_same_folder_says_so(tiny_model: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with serving(tmp_path, "-m", tiny_model, "--cache-disk", disk) as server:
        command = [sys.executable, "-m", "llamaslot.cli.main", "serve", "--port", "0", "-m", str(tiny_model)]
        second = subprocess.run(
            [*command, "--cache-disk", str(disk)], capture_output=True, text=True, timeout=60, check=False
        )
        assert second.returncode == 2
        assert "--cache-disk" in second.stderr.splitlines()[-1]
        assert server.post("/completion", {"prompt": "a", "n_predict": 1})["tokens_predicted"] == 1


@pytest.mark.skipif(not LONG, reason="opens 2,000 sockets")
def test_live_streams_beside_2000_idle_sockets(tmp_path: Path) -> None:
    with (
        serving(tmp_path, "--max-connections", "2500", "-np", "2") as server,
        contextlib.ExitStack() as stack,
    ):
        address = urlsplit(server.url)
        for _ in range(2000):
            stack.enter_context(socket.create_connection((address.hostname, address.port), timeout=10))
        wait(lambda: psutil.Process(server.process.pid).num_fds() > 2000)
        for _ in range(20):
            started = time.monotonic()
            assert server.get("/health") == {"status": "ok"}
            assert time.monotonic() - started < 0.5
            assert (
                server.post("/completion", {"prompt": STORY, "n_predict": 8, "ignore_eos": True})[
                    "tokens_predicted"
                ]
                == 8
            )
        assert server.stop() == 0
