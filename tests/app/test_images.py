"""Images end to end: a real server with the embedded model and a projector with random weights."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from bench.lora_files import write_adapter
from bench.projector_files import picture, write_projector
from tests.app.test_lora import MODEL, SCALES
from tests.app.test_mmproj import WIDTH
from tests.image_bodies import base64_of, block, file_of, item, part
from tests.image_bodies import text as text_part
from tests.live import WRITE_SOON, Server, serving

CAT, DOG = (picture(seed, 100, 60) for seed in (1, 2))
LONG = " Look at it closely, and say what you see." * 12


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_projector(tmp_path_factory.mktemp("projector") / "mmproj.gguf", "mlp", n_embd=WIDTH)


@pytest.fixture(scope="module")
def flags(projector: Path) -> Sequence[str | Path]:
    """Flags of a server with adapters, which writes slots where other servers find them."""
    folder = projector.parent
    (folder / "slots").mkdir()
    adapters = [write_adapter(folder / f"{i}.gguf", MODEL, i, strength=0.5) for i in range(2)]
    of_adapters = "--lora", ",".join(map(str, adapters)), "--lora-init-without-apply"
    debugging = "--metrics", "--debug-invariants", "--cache-debug-text"
    return "--mmproj", projector, "-c", "4096", "--slot-save-path", folder / "slots", *of_adapters, *debugging


@pytest.fixture(scope="module")
def served(flags: Sequence[str | Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of tests that send images of their own."""
    with serving(tmp_path_factory.mktemp("served"), *flags) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def later(flags: Sequence[str | Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that has computed nothing of what the other one has."""
    with serving(tmp_path_factory.mktemp("later"), *flags) as server:
        yield server
        assert server.stop() == 0


def n_encoded(server: Server) -> int:
    with urllib.request.urlopen(f"{server.url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    (line,) = (each for each in lines if each.startswith("llamaslot_image_tiles_encoded_total "))
    return int(float(line.rpartition(" ")[2]))


def user(image: bytes, text: str) -> dict[str, Any]:
    return {"role": "user", "content": [part(image), text_part(text)]}


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
        second = going_on(first, one)
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


def going_on(messages: list[dict[str, Any]], reply: dict[str, Any]) -> list[dict[str, Any]]:
    return [*messages, {"role": "assistant", "content": text_of(reply)}, {"role": "user", "content": "And now?"}]


def test_each_api_takes_the_same_image(served: Server) -> None:
    image, before = picture(10, 100, 60), n_encoded(served)
    data = base64_of(image)
    chat(served, [user(image, LONG)])
    message = {"role": "user", "content": [block(image), text_part(LONG)]}
    anthropic = served.post("/v1/messages", {"messages": [message], "max_tokens": 3})
    assert anthropic["usage"]["cache_read_input_tokens"] > 64
    given = {"role": "user", "content": [item(image), {"type": "input_text", "text": LONG}]}
    response = served.post("/v1/responses", {"input": [given], "max_output_tokens": 16})
    assert response["usage"]["input_tokens_details"]["cached_tokens"] > 64
    ollama = {"role": "user", "content": LONG, "images": [data]}
    served.post(
        "/api/chat", {"model": "demo", "messages": [ollama], "stream": False, "options": {"num_predict": 3}}
    )
    prompt = {"prompt_string": f"<__media__>{LONG}", "multimodal_data": [data]}
    for _ in range(2):
        native = served.post("/completion", {"prompt": prompt, "n_predict": 3})
    assert native["timings"]["cache_n"] > 64
    # The native prompt has the image at another place, so it is computed there; but once.
    assert n_encoded(served) - before <= 2


def test_an_image_counts_as_the_tokens_that_are_computed_of_it(served: Server) -> None:
    """Wherever tokens are counted or shown. The text of a prompt has a marker for it, which may be sent back."""
    image, question = picture(11, 100, 60), "Who lives here?"
    before, messages = n_encoded(served), [user(image, question)]
    shown = served.post("/apply-template", {"messages": messages})["prompt"]
    texts = shown.split("<__media__>")
    assert len(texts) == 2
    n_text = sum(len(served.post("/tokenize", {"content": each})["tokens"]) for each in texts)
    probe = served.post("/cache/probe", {"messages": messages})
    given = {"role": "user", "content": [item(image), {"type": "input_text", "text": question}]}
    of_anthropic = {"role": "user", "content": [block(image), text_part(question)]}
    counts = {
        "probe": probe["prompt_tokens"],
        "chat": served.post("/v1/chat/completions/input_tokens", {"messages": messages})["input_tokens"],
        "anthropic": served.post("/v1/messages/count_tokens", {"messages": [of_anthropic]})["input_tokens"],
        "responses": served.post("/v1/responses/input_tokens", {"input": [given]})["input_tokens"],
    }
    assert probe["matched"] < 64
    assert n_encoded(served) == before, "nothing is encoded to be counted"
    reply = chat(served, messages, id_slot=1)
    assert counts == dict.fromkeys(counts, reply["usage"]["prompt_tokens"])
    assert reply["usage"]["prompt_tokens"] == n_text + 64
    assert served.post("/cache/probe", {"messages": messages})["matched"] >= n_text + 63
    assert served.get("/slots")[1]["n_held"] == reply["usage"]["total_tokens"] - 1
    prefixes = served.get("/cache?top=100")["prefixes"]
    (text,) = (each["text"] for each in prefixes if question in each["text"])
    # What precedes the image is shared with other prompts.
    assert text.removeprefix(texts[0]).startswith(texts[1]), "tokens of images have no text"
    prompt = {"prompt_string": shown, "multimodal_data": [base64_of(image)]}
    native = served.post("/completion", {"prompt": prompt, "n_predict": 12, "temperature": 0, "ignore_eos": True})
    assert (native["content"], native["timings"]["cache_n"]) == (text_of(reply), n_text + 63)
    assert n_encoded(served) == before + 1
    with pytest.raises(urllib.error.HTTPError) as refused:
        served.post("/tokenize", {"messages": messages})
    error = json.load(refused.value)["error"]
    assert (refused.value.code, error["param"]) == (400, "messages[0].content[0].image_url.url")


def test_a_slot_file_has_its_images(served: Server, later: Server) -> None:
    image, other = picture(12, 100, 60), picture(13, 100, 60)
    first = [user(image, f"What is it?{LONG}")]
    one = chat(served, first, id_slot=0)
    n_saved = one["usage"]["total_tokens"] - 1
    assert served.post("/slots/0?action=save", {"filename": "image"})["n_saved"] == n_saved
    second = going_on(first, one)
    two, before = chat(served, second, id_slot=0), n_encoded(later)
    assert later.post("/slots/2?action=restore", {"filename": "image"})["n_restored"] == n_saved
    different = chat(later, [user(other, f"What is it?{LONG}")], id_slot=0)
    assert different["timings"]["cache_n"] < 64
    assert n_encoded(later) == before + 1
    again = chat(later, second, id_slot=2)
    assert text_of(again) == text_of(two)
    assert again["timings"]["cache_n"] >= one["usage"]["prompt_tokens"]
    assert n_encoded(later) == before + 1
    assert later.post("/slots/2?action=erase", {})["n_erased"] == again["usage"]["total_tokens"] - 1
    assert later.get("/slots")[2]["n_held"] == 0
    # It may have been saved to RAM before, as any prefix.
    later.post("/cache/clear", {})
    cold = chat(later, second, id_slot=2)
    assert (text_of(cold), cold["timings"]["cache_n"]) == (text_of(two), 0)
    assert n_encoded(later) == before + 2


def test_images_are_reused_with_the_same_adapters_alone(served: Server, later: Server) -> None:
    def ask(server: Server, image: bytes, scales: Sequence[float], **fields: Any) -> tuple[str, int]:
        lora = [{"id": i, "scale": scale} for i, scale in enumerate(scales)]
        reply = chat(server, [user(image, "Tell me a story.")], lora=lora, **fields)
        return text_of(reply), reply["timings"]["cache_n"]

    for image in (picture(14, 100, 60), picture(15, 100, 60)):
        with ThreadPoolExecutor(len(SCALES)) as pool:
            found = [*pool.map(lambda scales, image=image: ask(served, image, scales), SCALES)]
            before = n_encoded(served)
            again = [*pool.map(lambda scales, image=image: ask(served, image, scales), SCALES)]
        texts = [text for text, _ in found]
        assert max(n for _, n in found) < 64
        assert [text for text, _ in again] == texts
        assert min(n for _, n in again) > 64
        assert n_encoded(served) == before
        assert texts == [ask(later, image, scales, cache_prompt=False)[0] for scales in SCALES]
        assert len(set(texts)) > 2


def test_a_session_is_dropped_with_its_images(later: Server) -> None:
    """Also after several turns, and where the image is at the beginning of the prompt."""
    first = [user(picture(16, 100, 60), f"What is it?{LONG}")]
    one = chat(later, first, session_id="mine")
    two = chat(later, going_on(first, one), session_id="mine")
    assert two["timings"]["cache_n"] > 64
    own = {"prompt_string": f"<__media__>{LONG}", "multimodal_data": [base64_of(picture(17, 100, 60))]}
    body = {"prompt": own, "n_predict": 3, "session_id": "other"}
    for _ in range(2):
        native = later.post("/completion", body)
    assert native["timings"]["cache_n"] > 64
    for name, n_tokens in (("mine", two["usage"]["total_tokens"] - 12), ("other", native["tokens_evaluated"])):
        dropped = later.delete(f"/sessions/{name}")
        assert dropped["dropped_tokens"] + dropped["dropped_ram_tokens"] >= n_tokens, (name, dropped)
    assert later.post("/completion", body)["timings"]["cache_n"] == 0
    assert chat(later, going_on(first, one))["timings"]["cache_n"] < 64


@pytest.mark.slow
def test_memory_does_not_grow_with_the_images_that_were_computed(projector: Path, tmp_path: Path) -> None:
    chance = random.Random(1)
    with serving(tmp_path, "--mmproj", projector, "-c", "1024", "--cache-ram", "1", "--metrics") as server:
        parent = psutil.Process(server.process.pid)
        memory = list[dict[int, int]]()
        for n in (50, 100):
            for _ in range(n):
                # Files of 200 kB.
                image = file_of(Image.frombytes("RGB", (256, 256), chance.randbytes(3 * 256**2)))
                chat(server, [user(image, "Look")], max_tokens=1)
            memory.append({each.pid: each.memory_info().rss for each in (parent, *parent.children())})
        before, after = memory
        assert n_encoded(server) == 150
        assert len(before) == 3
        growth = {pid: after[pid] - before[pid] for pid in before}
        # Files and pixels of 100 images have 20 MB each, their embeddings 5 MB, which the parent does not get.
        assert growth.pop(parent.pid) < 8 * 2**20
        assert max(growth.values()) < 2 * 2**20


def test_an_image_without_tokens_is_refused_by_its_field(served: Server) -> None:
    narrow = picture(3, 2, 600)
    for images, place in (([narrow], 0), ([CAT, narrow], 1)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            chat(served, [{"role": "user", "content": [*map(part, images)]}])
        error = json.load(refused.value)["error"]
        assert (refused.value.code, error["param"]) == (400, f"messages[0].content[{place}].image_url.url")
        assert "too narrow" in error["message"]
    assert chat(served, [user(CAT, "Hello")])["usage"]["prompt_tokens"] > 64
