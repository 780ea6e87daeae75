"""The server as a process: what it says at start, how it ends, and how it refuses to start."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import time
import urllib.error
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conftest import LONG
from tests.forked import Command
from tests.gguf_copies import rewritten
from tests.live import Server, serving

IMPORTS = "import atexit, sys\natexit.register(lambda: print('numpy' in sys.modules, flush=True))"
"""Tells at the end of the parent process, which takes less time to start without numpy; others end without this."""
FEW_DESCRIPTORS = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))"


def refused(folder: Path, *args: str | Path) -> str:
    """The one line by which the server refuses to start."""
    done = Command("serve", *args, folder=folder).finish()
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert "Traceback" not in done.stderr
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_it_says_what_runs_where_and_reuses_the_first_turn(tiny_model: Path, tmp_path: Path) -> None:
    args = ("-m", tiny_model, "-c", "2048", "-np", "2", "--alias", "tiny", "--metrics")
    with serving(tmp_path, *args, fault=IMPORTS, is_forked=False) as server:
        start = server.log.read_text()
        for words in (
            "2 slots, 2,048 cells",
            "4 more sequences for idle prefixes",
            "on CPU",
            "Prefix reuse: on; 3 layers: KV of every token in 3",
            f"listening on {server.url}",
            "curl",
        ):
            assert words in start
        assert "KV pool" not in start
        assert server.get("/health") == {"status": "ok"}
        body = {"prompt": "hello there", "n_predict": 5, "temperature": 0, "ignore_eos": True}
        first = server.post("/completion", body)
        body["prompt"] += first["content"] + " and more"
        second = server.post("/completion", body)
        assert second["timings"]["cache_n"] == first["tokens_cached"]
        done = server.log_lines("request.done")
        assert [line["prefix_cache_tokens"] for line in done] == [0, first["tokens_cached"]]
        assert done[1]["prefix_cache_ratio"] == pytest.approx(
            first["tokens_cached"] / done[1]["prompt_tokens"], abs=1e-4
        )
        assert {"queue_ms", "ttft_ms", "tokens_per_second", "generated_tokens", "slot"} <= done[0].keys()
        assert server.stop(within=3) == 0, "nothing is in flight"
        assert server.log_lines("server.stopped")
        assert server.log.read_text().splitlines()[-1] == "False", "the parent has imported numpy"


@pytest.mark.slow
def test_it_says_once_how_large_the_pool_became_and_why(tiny_model: Path, tmp_path: Path) -> None:
    args = ("-m", tiny_model, "-ngl", "0", "--kv-mem-fraction", "1", "--in-process")
    with serving(tmp_path, *args) as server:
        lines = [line for line in server.log.read_text().splitlines() if line.startswith("KV pool: (")]
        assert len(lines) == 1
        assert "- 0% of" in lines[0]
        assert "/ 768 bytes a cell" in lines[0]
        assert lines[0].endswith("16,384 allocated (default limit; --ctx-size overrides it)")
        # It is logged behind the line by which a start is noticed.
        until = time.monotonic() + 10
        while not (ready := server.log_lines("server.ready")) and time.monotonic() < until:
            time.sleep(0.01)
        assert ready[0]["cells"] == 16384


@pytest.mark.slow
def test_it_lets_running_requests_finish_before_it_ends(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, "-m", tiny_model) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        body = {"prompt": "a", "n_predict": 2000, "ignore_eos": True}
        reply = pool.submit(server.post, "/completion", body)
        while not any(slot["is_processing"] for slot in server.get("/slots")):
            time.sleep(0.01)
        assert server.stop() == 0
        assert reply.result()["tokens_predicted"] == 2000


def test_a_second_signal_ends_it_at_once(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, "-m", tiny_model) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        body = {"prompt": "a", "n_predict": -1, "ignore_eos": True}
        reply = pool.submit(server.post, "/completion", body)
        while not any(slot["is_processing"] for slot in server.get("/slots")):
            time.sleep(0.01)
        server.process.terminate()
        while not server.log_lines("server.draining"):
            time.sleep(0.01)
        assert server.stop(within=3) == 0
        assert reply.exception() is not None or reply.result()["tokens_predicted"] < 4000


def test_wrong_models_and_flags_are_one_line(tiny_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("not a model")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_model.read_bytes()[:100_000])
    empty = tmp_path / "empty.gguf"
    empty.touch()
    assert "cannot load" in refused(tmp_path, "-m", cut)
    diffusion = rewritten(tiny_model, tmp_path / "diffusion.gguf", "llada")
    assert "is a diffusion model (llada); only" in refused(tmp_path, "-m", diffusion)
    for words, *args in (
        ("nosuch.gguf", "-m", "nosuch.gguf"),
        ("not a GGUF file", "-m", text),
        ("not a GGUF file", "-m", empty),
        ("cannot load", "-m", cut),
        ("did you mean --port", "--prot", "1"),
        ("--kv-mem-fraction", "-m", tiny_model, "-ngl", "0", "--kv-mem-fraction", "1e-9"),
        ("x 768 bytes = ", "-m", tiny_model, "-ngl", "0", "-c", "2000000000"),
        ("--cache-seqs", "-m", tiny_model, "-np", "128", "--cache-seqs", "128"),
        ("--chat-template", "-m", tiny_model, "--chat-template", "{% if %}"),
        ("--device: there is no GPU X; ", "-m", tiny_model, "-dev", "X"),
        ("--override-tensor: there is no memory X; use CPU", "-m", tiny_model, "-ot", "a=X"),
        ("--override-kv: llama.cpp cannot load llama.block_count 0", "--override-kv", "llama.block_count=int:0"),
        (
            "--override-kv: llama.context_length has the type int, not str",
            "--override-kv",
            "llama.context_length=str:9",
        ),
        ("--chat-template-kwargs is not a JSON object", "-m", tiny_model, "--chat-template-kwargs", "[]"),
    ):
        assert words in refused(tmp_path, *args, "--in-process")


def test_a_port_in_use_is_one_line(tiny_model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = refused(tmp_path, "-m", tiny_model, "--port", port)
        assert port in line
        assert "--port" in line


HUNG_DISK = """
import threading
from llamaslot.backend.disk import DiskStore
from llamaslot.engine import disk_worker, engine
engine._FLUSH_TIMEOUT_S = engine._CLOSE_TIMEOUT_S = disk_worker._WRITE_TIMEOUT_S = 0.5
DiskStore.{method} = lambda *_: threading.Event().wait()
"""


def status_of(server: Server, body: dict[str, object]) -> int:
    """The status of the reply to a completion."""
    try:
        server.post("/completion", body)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    return 200


@pytest.mark.skipif(not LONG, reason="takes 9 s; tests/engine/test_disk_worker.py has the short form")
@pytest.mark.parametrize("method", ["write", "read"])
def test_it_ends_although_the_disk_hangs(tmp_path: Path, method: str) -> None:
    args = ("--cache-disk", tmp_path / "disk", "--shutdown-timeout", "1")
    prompt = {"prompt": "Once upon a time there was a cat. " * 20, "n_predict": 1}
    if method == "read":
        with serving(tmp_path, *args) as server:
            server.post("/completion", prompt)
            assert server.stop() == 0
    with (
        serving(tmp_path, *args, fault=HUNG_DISK.format(method=method)) as server,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        pool.submit(status_of, server, prompt)
        endless = pool.submit(status_of, server, {"prompt": "a", "n_predict": -1, "ignore_eos": True})
        while not any(slot["is_processing"] for slot in server.get("/slots")):
            time.sleep(0.01)
        time.sleep(3)
        if method == "write":
            with pytest.raises(urllib.error.HTTPError) as refusal:
                server.post("/cache/clear", {})
            assert refusal.value.code == 503
            with refusal.value as reply:
                assert "--cache-disk" in reply.read().decode()
        started = time.monotonic()
        assert server.stop() == 1
        assert time.monotonic() - started < 10
        assert endless.result() == 503
        assert server.log_lines("server.aborted")


@pytest.mark.slow
def test_silent_connections_do_not_take_all_descriptors(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, "-m", tiny_model, fault=FEW_DESCRIPTORS) as server, contextlib.ExitStack() as stack:
        address = urlsplit(server.url)
        for _ in range(300):
            stack.enter_context(socket.create_connection((address.hostname, address.port), timeout=10))
        started = time.monotonic()
        assert server.get("/health") == {"status": "ok"}
        assert server.post("/completion", {"prompt": "a", "n_predict": 1})["tokens_predicted"] == 1
        assert time.monotonic() - started < 2
        assert server.log_lines("connections.limited")[0]["allowed"] == 128
        assert server.log_lines("connections.full")
