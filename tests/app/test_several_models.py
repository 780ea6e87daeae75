"""A server that has several models: real processes, which are loaded, unloaded, killed."""

from __future__ import annotations

import json
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from llamaslot.app.model_files import resolve_model
from tests.app.test_crashes import STORY, wait
from tests.live import Server, serving

NAMES = "abcd"
LONG_STORY = STORY * 20
BUDGET_MIB = 2000
N_SWAPS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four models, and one that is broken."""
    folder = tmp_path_factory.mktemp("models")
    for name in NAMES:
        shutil.copy(resolve_model("demo"), folder / f"{name}.gguf")
    (folder / "broken.gguf").write_bytes(resolve_model("demo").read_bytes()[:100_000])
    (folder / "readme.txt").write_text("no model")
    return folder


def states(server: Server) -> dict[str, str]:
    return {each["id"]: each["status"]["value"] for each in server.get("/v1/models")["data"]}


def complete(server: Server, name: str, prompt: str = LONG_STORY, **fields: Any) -> dict[str, Any]:
    body = {"model": name, "prompt": f"{name}: {prompt}", "n_predict": 8, "temperature": 0, **fields}
    reply: dict[str, Any] = server.post("/completion", body)
    return reply


def refusal(server: Server, path: str, body: Any = None) -> tuple[int, str]:
    try:
        server.get(path) if body is None else server.post(path, body)
    except urllib.error.HTTPError as error:
        told = json.load(error)["error"]
        # Ollama's errors are texts.
        return error.code, told if isinstance(told, str) else told["message"]
    raise AssertionError(f"{path} was answered")


def engines(server: Server) -> Iterator[psutil.Process]:
    for child in psutil.Process(server.process.pid).children():
        if "llamaslot.app.runtime.engine_main" in child.cmdline():
            yield child


def test_models_are_loaded_when_they_are_named_and_lose_no_prefix(folder: Path, tmp_path: Path) -> None:
    with serving(tmp_path, "--models-dir", folder, "--models-max", "2", "-c", "8192", "-cram", "512") as server:
        assert set(states(server)) == {*NAMES, "broken"}
        assert refusal(server, "/v1/embeddings", {"model": "a", "input": "x"})[0] == 501
        assert refusal(server, "/rerank", {"model": "a", "query": "x", "documents": ["x"]})[0] == 501
        assert set(states(server).values()) == {"unloaded"}
        sizes = {each["name"]: each["size"] for each in server.get("/api/tags")["models"]}
        assert sizes["a:latest"] == (folder / "a.gguf").stat().st_size
        cold = {name: complete(server, name) for name in "abc"}
        assert {name for name, state in states(server).items() if state == "loaded"} == {"b", "c"}
        for name in "abcab":
            again = complete(server, name)
            assert again["model"] == name
            assert again["content"] == cold[name]["content"]
            assert again["timings"]["cache_n"] > 300, "what it had is in RAM"
        assert server.get("/slots?model=b")
        assert server.get("/props?model=b")["model_alias"] == "b"
        props = server.get("/props")
        assert (props["role"], props["max_instances"], props["models_autoload"]) == ("router", 2, True)
        for name in ("b", "a"):
            chat = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            assert server.post("/v1/chat/completions", chat)["model"] == name
        # Ollama's replies say how long that took.
        body = {"model": "c", "prompt": "x", "stream": False, "options": {"num_predict": 2}}
        started = time.perf_counter()
        loaded = server.post("/api/generate", body)
        whole_s = time.perf_counter() - started
        assert whole_s / 2 < loaded["total_duration"] / 1e9 < whole_s
        assert loaded["load_duration"] > 2 * server.post("/api/generate", body)["load_duration"]
        assert server.stop() == 0


def test_a_model_that_embeds_is_not_loaded_for_a_chat(folder: Path, tmp_path: Path) -> None:
    with serving(tmp_path, "--models-dir", folder, "-c", "1024", "--embeddings", "--pooling", "last") as server:
        chat = {"model": "a", "messages": [{"role": "user", "content": "Hello"}]}
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/messages", {**chat, "max_tokens": 3}),
            ("/completion", {"model": "a", "prompt": "x"}),
            ("/api/generate", {"model": "a", "prompt": "x"}),
        ):
            assert refusal(server, path, body)[0] == 501
        assert set(states(server).values()) == {"unloaded"}
        assert len(server.post("/v1/embeddings", {"model": "a", "input": ["x", "y"]})["data"]) == 2
        # Only once it is loaded is it known that its file makes it no reranker.
        assert refusal(server, "/rerank", {"model": "a", "query": "x", "documents": ["x"]})[0] == 501
        assert states(server)["a"] == "loaded"


def test_a_model_that_cannot_be_loaded_costs_no_other_anything(folder: Path, tmp_path: Path) -> None:
    with serving(tmp_path, "--models-dir", folder, "-c", "2048") as server:
        complete(server, "a")
        status, message = refusal(server, "/completion", {"model": "broken", "prompt": "x"})
        assert status == 500
        assert "model 'broken' could not be loaded: " in message
        described = {each["id"]: each["status"] for each in server.get("/models")["data"]}
        assert described["broken"]["failed"]
        assert "could not be loaded" in described["broken"]["reason"]
        assert complete(server, "a")["timings"]["cache_n"] > 100
        assert refusal(server, "/completion", {"model": "nosuch", "prompt": "x"})[0] == 404
        assert refusal(server, "/completion", {"prompt": "x"}) == (400, "model name is missing from the request")
        assert refusal(server, "/slots?model=b") == (400, "model 'b' is not loaded")
        assert refusal(server, "/completion", {"model": 5, "prompt": "x"})[0] == 400
        assert server.stop() == 0


def test_a_file_that_was_replaced_is_loaded_anew(folder: Path, tmp_path: Path) -> None:
    """Nothing of the old one is used, and no other model waits."""
    models = tmp_path / "models"
    shutil.copytree(folder, models)
    args = ("--models-dir", models, "--models-max", "1", "-c", "2048", "-cram", "64", "--load-timeout", "20")
    with serving(tmp_path, *args) as server:
        complete(server, "a")
        complete(server, "b")
        (models / "a.gguf").unlink()
        shutil.copy(folder / "b.gguf", models / "a.gguf")
        assert complete(server, "a")["timings"]["cache_n"] == 0
        assert complete(server, "b")["timings"]["cache_n"] > 100
        assert server.stop() == 0


def test_models_are_loaded_and_unloaded_by_name(folder: Path, tmp_path: Path) -> None:
    args = ("--models-dir", folder, "--no-models-autoload", "-c", "2048", "-cram", "256")
    with serving(tmp_path, *args) as server:
        assert refusal(server, "/completion", {"model": "a", "prompt": "x"})[0] == 400
        assert server.post("/models/load", {"model": "a"}) == {"success": True}
        wait(lambda: states(server)["a"] == "loaded")
        assert refusal(server, "/models/load", {"model": "a"})[0] == 400
        complete(server, "a")
        before = sum(each.memory_info().rss for each in engines(server))
        assert server.post("/models/unload", {"model": "a"}) == {"success": True}
        wait(lambda: states(server)["a"] == "unloaded")
        assert sum(each.memory_info().rss for each in engines(server)) < before
        assert refusal(server, "/models/unload", {"model": "a"})[0] == 400
        server.post("/models/load", {"model": "a"})
        wait(lambda: states(server)["a"] == "loaded")
        assert complete(server, "a")["timings"]["cache_n"] > 100


def test_tables_of_a_file_have_options_of_each_model(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "models.toml"
    config.write_text(f"""
models-max = 2
cache-ram = 256
[models.small]
model = "{folder / "a.gguf"}"
alias = "tiny, little"
ctx-size = 2048
parallel = 2
pin = true
n-predict = 3
[models.other]
model = "{folder / "b.gguf"}"
ctx-size = 4096
sleep-idle-seconds = 1
""")
    with serving(tmp_path, "--config", config, "-m", folder / "c.gguf") as server:
        wait(lambda: states(server)["small"] == "loaded")
        assert len(server.get("/slots?model=little")) == 2
        assert server.post("/completion", {"model": "tiny", "prompt": "x"})["tokens_predicted"] == 3
        assert server.post("/completion", {"prompt": "x", "n_predict": 1})["model"] == "c", "the first of -m"
        complete(server, "other")
        assert states(server) == {"small": "loaded", "other": "loaded", "c": "unloaded"}
        wait(lambda: states(server)["other"] == "sleeping")
        assert complete(server, "other")["timings"]["cache_n"] > 100


def test_presets_of_llama_server_are_served(folder: Path, tmp_path: Path) -> None:
    """With a model in the hub's cache, which needs no network."""
    file, snapshot = (
        tmp_path / "presets.ini",
        tmp_path / "hub" / "models--owner--Some-GGUF" / "snapshots" / "c0ffee",
    )
    snapshot.mkdir(parents=True)
    (snapshot / "some-Q8_0.gguf").symlink_to(folder / "b.gguf")
    file.write_text(f"""version = 1
[*]
c = 2048
n = 3
[small]
m = {folder / "a.gguf"}
np = 2
load-on-startup = 1
[owner/Some-GGUF:Q8_0]
""")
    environ = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    args = ("--models-preset", file, "--models-max", "1", "--offline", "-cram", "64")
    with serving(tmp_path, *args, environ=environ) as server:
        wait(lambda: states(server) == {"small": "loaded", "owner/Some-GGUF:Q8_0": "unloaded"})
        assert len(server.get("/slots?model=small")) == 2
        for name in states(server):
            assert server.post("/completion", {"model": name, "prompt": "x"})["tokens_predicted"] == 3
        # The one of the start has made room.
        assert states(server)["owner/Some-GGUF:Q8_0"] == "loaded"
        path = server.get("/props?model=owner/Some-GGUF:Q8_0")["model_path"]
        assert Path(path).name == "some-Q8_0.gguf"


@pytest.mark.slow
def test_thirty_swaps_of_four_models_under_load_with_an_engine_killed(folder: Path, tmp_path: Path) -> None:
    """Every request ends rightly, prefixes come back, and memory stays within the budget."""
    args = (
        "--models-dir",
        folder,
        "--models-max",
        "2",
        "-c",
        "8192",
        "-cram",
        "800",
        "--cache-disk",
        tmp_path / "disk",
    )
    budget = ("--models-memory", str(BUDGET_MIB), "--load-timeout", "120")
    with serving(tmp_path, *args, *budget) as server:
        expected = {name: complete(server, name)["content"] for name in NAMES}
        peak, is_over = [0], threading.Event()

        def sample() -> None:
            while not is_over.is_set():
                children = psutil.Process(server.process.pid).children()
                total = 0
                for each in children:
                    try:
                        total += each.memory_info().rss
                    except psutil.NoSuchProcess:
                        continue
                peak[0] = max(peak[0], total)
                time.sleep(0.05)

        sampling = threading.Thread(target=sample)
        sampling.start()
        lost: list[int] = []
        n_answered = [0] * 8

        def client(number: int) -> int:
            n_cached = 0
            for i in range(60):
                if len(server.log_lines("model.unloaded")) >= N_SWAPS:
                    break
                name = NAMES[(number + i) % 4]
                try:
                    reply = complete(server, name)
                except urllib.error.HTTPError as error:
                    lost.append(error.code)
                    continue
                n_answered[number] += 1
                assert reply["content"] == expected[name]
                n_cached += reply["timings"]["cache_n"] > 300
                if (number, i) == (0, 4):
                    next(engines(server)).kill()
            return n_cached

        with ThreadPoolExecutor(8) as pool:
            cached = list(pool.map(client, range(8)))
        is_over.set()
        sampling.join()
        assert len(server.log_lines("model.unloaded")) >= N_SWAPS
        assert set(lost) <= {503}
        assert len(lost) <= 4, "only what the killed engine ran"
        # The first that an engine computes after it was killed finds on disk what had been written.
        assert sum(cached) >= sum(n_answered) - 1, (cached, n_answered)
        assert peak[0] <= BUDGET_MIB * 2**20
        assert server.stop() == 0
