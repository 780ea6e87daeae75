"""Images end to end: a real server with the embedded model and a projector with random weights."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.app.test_mmproj import WIDTH
from tests.image_bodies import base64_of, url_of
from tests.live import WRITE_SOON, Server, serving
from tests.vision_files import picture, write_projector

CAT, DOG = (picture(seed, 100, 60) for seed in (1, 2))
LONG = " Look at it closely, and say what you see." * 12


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_projector(tmp_path_factory.mktemp("projector") / "mmproj.gguf", "mlp", n_embd=WIDTH)


def n_encoded(server: Server) -> int:
    with urllib.request.urlopen(f"{server.url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    (line,) = (each for each in lines if each.startswith("llamaslot_image_tiles_encoded_total "))
    return int(float(line.rpartition(" ")[2]))


def user(image: bytes, text: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url_of(image)}}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


def chat(server: Server, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, "ignore_eos": True, **fields}
    reply: dict[str, Any] = server.post("/v1/chat/completions", body)
    return reply


def text_of(reply: dict[str, Any]) -> str:
    text: str = reply["choices"][0]["message"]["content"]
    return text


def test_an_image_is_encoded_once(projector: Path, tmp_path: Path) -> None:
    """Not in the second turn, nor for another user, nor after a restart; another image is never reused."""
    disk = tmp_path / "disk"
    flags = ["--mmproj", projector, "-c", "2048", "--cache-disk", disk, "--metrics"]
    first = [user(CAT, f"What is it?{LONG}")]
    with serving(tmp_path, *flags, fault=WRITE_SOON) as server:
        assert server.get("/props")["modalities"]["vision"]
        one = chat(server, first)
        assert n_encoded(server) == 1
        second = [*first, {"role": "assistant", "content": text_of(one)}, {"role": "user", "content": "And now?"}]
        two = chat(server, second)
        other = chat(server, [user(CAT, "Whose is it?")])
        assert n_encoded(server) == 1
        for reply in (two, other):
            assert reply["timings"]["cache_n"] >= 64
        assert chat(server, second, cache_prompt=False)["choices"][0]["message"]["content"] == text_of(two)
        # Computed again, but what it was encoded to may be kept.
        assert n_encoded(server) <= 2
        dog = chat(server, [user(DOG, f"What is it?{LONG}")])
        assert dog["timings"]["cache_n"] < 64
        assert text_of(dog) != text_of(one)
        assert text_of(chat(server, [user(DOG, f"What is it?{LONG}")], cache_prompt=False)) == text_of(dog)
        assert server.stop() == 0
    with serving(tmp_path, *flags) as server:
        again = chat(server, second)
        assert again["timings"]["cache_n"] >= 64
        assert text_of(again) == text_of(two)
        assert n_encoded(server) == 0
        assert server.stop() == 0


def test_each_api_takes_the_same_image(projector: Path, tmp_path: Path) -> None:
    data = base64_of(CAT)
    with serving(tmp_path, "--mmproj", projector, "-c", "2048", "--metrics") as server:
        chat(server, [user(CAT, LONG)])
        source = {"type": "base64", "media_type": "image/png", "data": data}
        text = {"type": "text", "text": LONG}
        message = {"role": "user", "content": [{"type": "image", "source": source}, text]}
        anthropic = server.post("/v1/messages", {"messages": [message], "max_tokens": 3})
        assert anthropic["usage"]["cache_read_input_tokens"] > 64
        counted = server.post("/v1/messages/count_tokens", {"messages": [message]})
        assert counted["input_tokens"] > 64
        item = {"role": "user", "content": [
            {"type": "input_image", "image_url": url_of(CAT)}, {"type": "input_text", "text": LONG},
        ]}  # fmt: skip
        response = server.post("/v1/responses", {"input": [item], "max_output_tokens": 16})
        assert response["usage"]["input_tokens_details"]["cached_tokens"] > 64
        ollama = {"role": "user", "content": LONG, "images": [data]}
        server.post(
            "/api/chat", {"model": "demo", "messages": [ollama], "stream": False, "options": {"num_predict": 3}}
        )
        prompt = {"prompt_string": f"<__media__>{LONG}", "multimodal_data": [data]}
        for _ in range(2):
            native = server.post("/completion", {"prompt": prompt, "n_predict": 3})
        assert native["timings"]["cache_n"] > 64
        probe = server.post("/cache/probe", {"messages": [user(CAT, LONG)]})
        assert probe["prompt_tokens"] - probe["computed"] > 64
        # The native prompt and Ollama's have the image at another place, so it is computed there; but once.
        assert n_encoded(server) <= 3
        assert server.get("/slots")
        assert server.get("/cache?text=1")
        assert server.stop() == 0


def test_an_image_without_tokens_is_refused_by_its_field(projector: Path, tmp_path: Path) -> None:
    with serving(tmp_path, "--mmproj", projector, "-c", "1024") as server:
        narrow = picture(3, 2, 600)
        for images, place in (([narrow], 0), ([CAT, narrow], 1)):
            parts = [{"type": "image_url", "image_url": {"url": url_of(each)}} for each in images]
            with pytest.raises(urllib.error.HTTPError) as refused:
                chat(server, [{"role": "user", "content": parts}])
            error = json.load(refused.value)["error"]
            assert (refused.value.code, error["param"]) == (400, f"messages[0].content[{place}].image_url.url")
            assert "too narrow" in error["message"]
        assert chat(server, [user(CAT, "Hello")])["usage"]["prompt_tokens"] > 64
