"""A server that unloads its model while nobody uses it (`--sleep-idle-seconds`)."""

from __future__ import annotations

import shutil
import time
import urllib.request
from pathlib import Path

import psutil

from llamaslot.app.model_files import resolve_model
from tests.app.test_crashes import STORY, engine_of, outcome, wait
from tests.live import Server, serving

SLEEP = "--sleep-idle-seconds", "1"
LONG_STORY = STORY * 20


def is_sleeping(server: Server) -> bool:
    return bool(server.get("/props")["is_sleeping"])


def complete(server: Server, prompt: str = LONG_STORY) -> tuple[str, int]:
    """The text of a greedy completion, and the prompt's tokens that were reused."""
    body = server.post("/completion", {"prompt": prompt, "n_predict": 16, "temperature": 0})
    return body["content"], body["timings"]["cache_n"]


def test_the_model_is_unloaded_and_loaded_again_for_the_next_request(tmp_path: Path) -> None:
    with serving(tmp_path, *SLEEP, "-c", "32768", "--metrics") as server:
        expected, _ = complete(server)
        before = psutil.Process(engine_of(server).pid).memory_info().rss
        for _ in range(2):
            wait(lambda: is_sleeping(server))
            for path in ("/health", "/v1/models", "/slots", "/cache"):
                server.get(path)
            with urllib.request.urlopen(f"{server.url}/metrics") as reply:
                assert b"llamacpp:tokens_predicted_total" in reply.read()
            assert is_sleeping(server), "looking wakes nobody"
            # The pool alone has 32,768 cells of 1.5 KiB.
            assert psutil.Process(engine_of(server).pid).memory_info().rss < before - 30 * 2**20
            text, n_cached = complete(server)
            assert text == expected
            assert n_cached > 300
            assert not is_sleeping(server)
        assert len(server.log_lines("model.unloaded")) == 2
        assert len(server.log_lines("model.loaded")) == 2
        wait(lambda: is_sleeping(server))
        assert server.post("/tokenize", {"content": "a"})["tokens"]
        wait(lambda: not is_sleeping(server))
        wait(lambda: is_sleeping(server))
        assert server.stop() == 0


def test_a_server_whose_engine_is_killed_in_its_sleep_serves_again(tmp_path: Path) -> None:
    with serving(tmp_path, *SLEEP, "--cache-disk", str(tmp_path / "disk")) as server:
        expected, _ = complete(server)
        wait(lambda: is_sleeping(server))
        # All of the prompt's whole segments are on disk by now, and what is only in RAM is lost.
        wait(lambda: server.get("/cache")["disk"]["tokens"] > 256)
        engine_of(server).kill()
        text, n_cached = complete(server)
        assert text == expected
        assert n_cached >= 256
        assert not is_sleeping(server)
        wait(lambda: is_sleeping(server))


def test_a_model_whose_file_is_gone_says_so_until_it_is_back(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(resolve_model("demo"), model)
    with serving(tmp_path, *SLEEP, "-m", model) as server:
        expected, _ = complete(server)
        wait(lambda: is_sleeping(server))
        hidden = model.rename(tmp_path / "hidden.gguf")
        status, body, _ = outcome(server, {"prompt": STORY, "n_predict": 1})
        assert status == 503
        assert "could not be loaded again" in body["error"]["message"]
        # It is not tried again in each moment.
        time.sleep(1.5)
        hidden.rename(model)
        text, n_cached = complete(server)
        assert text == expected
        assert n_cached > 300
