"""LoRA adapters beside llama-server on real weights: the same greedy text with the same scales."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.lora_files import write_adapter
from tests.live import Server, serving
from tests.real.conftest import REAL, path_of
from tests.real.test_llama_server import FLAGS, llama_server

pytestmark = pytest.mark.skipif(not REAL, reason="long: make test-real")

SCALES = ((0.0, 0.0), (1.0, 0.0), (0.0, 0.5), (1.0, 0.5), (-0.5, 0.0))
PROMPTS = "The capital of Norway is", "Once upon a time there was a king who"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Both servers with two adapters, which change what SmolLM2 says and leave words."""
    folder, model = tmp_path_factory.mktemp("lora"), path_of("smollm2")
    files = [write_adapter(folder / f"{i}.gguf", model, i, strength=0.15) for i in range(2)]
    flags = ("-m", model, *FLAGS, "--lora", ",".join(map(str, files)))
    with serving(folder, *flags) as own, llama_server(folder, *flags) as peer:
        yield own, peer


def complete(server: Server, prompt: str, scales: tuple[float, ...]) -> list[int]:
    lora = [{"id": i, "scale": scale} for i, scale in enumerate(scales)]
    body = {"prompt": prompt, "n_predict": 16, "temperature": 0, "lora": lora, "return_tokens": True}
    tokens: list[int] = server.post("/completion", body)["tokens"]
    return tokens


def test_the_same_scales_give_the_same_text(pair: tuple[Server, Server]) -> None:
    own, peer = pair
    different = 0
    for prompt in PROMPTS:
        replies = {scales: complete(own, prompt, scales) for scales in SCALES}
        assert len({tuple(tokens) for tokens in replies.values()}) > 2
        for scales, tokens in replies.items():
            expected = complete(peer, prompt, scales)
            assert tokens[:4] == expected[:4], (prompt, scales)
            different += tokens != expected
    # Rounding may lead to another word further on (fact 9).
    assert different <= 2


def test_the_adapters_are_listed_and_set_alike(pair: tuple[Server, Server]) -> None:
    listed = [server.get("/lora-adapters") for server in pair]
    assert listed[0] == listed[1]
    body = [{"id": 1, "scale": 0.5}]
    assert pair[0].post("/lora-adapters", body) == pair[1].post("/lora-adapters", body) == {"success": True}
    assert pair[0].get("/lora-adapters") == pair[1].get("/lora-adapters")
