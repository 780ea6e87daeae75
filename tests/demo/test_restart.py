"""A server that is killed while it works, and started again, on the model that comes with the package."""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LONG
from tests.live import WRITE_SOON, Server, serving

pytestmark = pytest.mark.gpu

FILLER = "We met at the market and talked about the weather, the river and the long road home. "
SYSTEM = {"role": "system", "content": "You are a friendly assistant. " + FILLER * 12}
OPENERS = ["My cat is called Milo.", "My dog is called Bruno.", "I live in Oslo.", "My name is Anna."]


def ask(server: Server, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
    """The answer of a greedy turn, and its timings."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 24}
    reply = server.post("/v1/chat/completions", body)
    return reply["choices"][0]["message"]["content"], reply["timings"]


def talk(server: Server, opener: str) -> list[dict[str, str]]:
    """A conversation of two turns."""
    history = [SYSTEM, {"role": "user", "content": opener}]
    for question in ("What did I tell you?", ""):
        text, _ = ask(server, history)
        history.append({"role": "assistant", "content": text})
        if question:
            history.append({"role": "user", "content": question})
    return history


def wait_until_written(server: Server, n_tokens: int) -> None:
    deadline = time.monotonic() + 30
    while server.get("/cache")["disk"]["tokens"] < n_tokens:
        assert time.monotonic() < deadline, server.get("/cache")["disk"]
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Answers of a server without any cache."""
    with serving(tmp_path_factory.mktemp("cold"), "--no-cache-prompt", "--in-process") as server:
        known: dict[str, str] = {}

        def answer(messages: list[dict[str, str]]) -> str:
            key = str(messages)
            if key not in known:
                known[key], _ = ask(server, messages)
            return known[key]

        yield answer


def test_killed_in_the_middle_of_traffic_and_known_again(tmp_path: Path, cold: Any) -> None:
    folder = tmp_path / "cache"
    chance = random.Random(1)
    histories: list[list[dict[str, str]]] = []
    flags = ("--cache-disk", folder, "-np", "2", "--debug-invariants")
    for cycle in range(200 if LONG else 3):
        with serving(tmp_path, *flags, fault=WRITE_SOON) as server:
            disk = server.get("/cache")["disk"]
            if histories:
                assert disk["tokens"] > 0, "it is forgotten"
                history = chance.choice(histories)
                question = [*history, {"role": "user", "content": "What did I tell you?"}]
                text, timings = ask(server, question)
                assert text == cold(question), "another text than without a cache"
                assert timings["cache_n"] >= 0.9 * (timings["cache_n"] + timings["prompt_n"]) - 40
            if cycle < len(OPENERS):
                histories.append(talk(server, OPENERS[cycle]))
                n_known = ask(server, histories[-1])[1]
                wait_until_written(server, n_known["cache_n"] - 64)
            noise = threading.Thread(target=keep_busy, args=(server, chance.random()))
            noise.start()
            time.sleep(chance.uniform(0.05, 0.5))
            server.stop(signal.SIGKILL)
            noise.join()


def keep_busy(server: Server, number: float) -> None:
    """New prompts until the server is gone."""
    for i in range(50):
        try:
            ask(server, [SYSTEM, {"role": "user", "content": f"{FILLER} {number} {i}"}])
        except OSError:
            return


@pytest.mark.slow
def test_a_server_told_to_end_leaves_everything_on_disk(tmp_path: Path, cold: Any) -> None:
    folder = tmp_path / "cache"
    with serving(tmp_path, "--cache-disk", folder) as server:
        history = talk(server, OPENERS[0])
        assert server.stop() == 0
    with serving(tmp_path, "--cache-disk", folder) as server:
        question = [*history, {"role": "user", "content": "What did I tell you?"}]
        text, timings = ask(server, question)
        assert text == cold(question)
        assert timings["prompt_n"] <= 20, "more than what is new"
        assert server.get("/cache")["requests"]["from_disk"] == 1


@pytest.mark.slow
def test_a_long_prompt_is_on_disk_soon_and_read_whole_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    question = [{"role": "system", "content": FILLER * 65}, {"role": "user", "content": OPENERS[0]}]
    with serving(tmp_path, "--cache-disk", folder) as server:
        text, first = ask(server, question)
        assert first["prompt_n"] >= 1266
        wait_until_written(server, first["prompt_n"])
        server.stop(signal.SIGKILL)
    with serving(tmp_path, "--cache-disk", folder) as server:
        again, second = ask(server, question)
        assert again == text
        assert (second["prompt_n"], second["cache_n"]) == (1, first["prompt_n"] - 1)
        assert server.get("/cache")["requests"]["from_disk"] == 1


@pytest.mark.slow
def test_files_of_another_kind_of_kv_are_left_alone(tmp_path: Path, cold: Any) -> None:
    folder = tmp_path / "cache"
    # Of a pool this small, nothing is measured at start.
    flags = ("--cache-disk", folder, "--in-process", "-c", "2048")
    question = [SYSTEM, {"role": "user", "content": OPENERS[0]}]
    with serving(tmp_path, *flags, fault=WRITE_SOON) as server:
        text, _ = ask(server, question)
        wait_until_written(server, 100)
        server.stop(signal.SIGKILL)
    with serving(tmp_path, *flags, "-ctk", "q8_0", "-ctv", "q8_0") as server:
        assert server.get("/cache")["disk"]["tokens"] == 0
        assert ask(server, question)[1]["cache_n"] == 0
    with serving(tmp_path, *flags) as server:
        again, timings = ask(server, question)
        assert (again, timings["prompt_n"]) == (text, 1)


@pytest.mark.slow
def test_damaged_files_are_computed_again(tmp_path: Path, cold: Any) -> None:
    folder = tmp_path / "cache"
    question = [SYSTEM, {"role": "user", "content": OPENERS[1]}]
    with serving(tmp_path, "--cache-disk", folder, "--in-process", fault=WRITE_SOON) as server:
        ask(server, question)
        wait_until_written(server, 100)
        server.stop(signal.SIGKILL)
    kept = tmp_path / "kept"
    shutil.copytree(folder, kept)
    chance = random.Random(4)
    for _ in range(20 if LONG else 1):
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        for path in (folder / "segments").iterdir():
            data = bytearray(path.read_bytes())
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data[: chance.choice([len(data), chance.randrange(len(data))])])
        with serving(tmp_path, "--cache-disk", folder, "--in-process") as server:
            assert ask(server, question)[0] == cold(question)
            assert server.stop() == 0
