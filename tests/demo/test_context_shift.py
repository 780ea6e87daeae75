"""Replies beyond their context on the embedded model; the cases are those of llama-server's own test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live import Server, serving

STORY = "Once upon a time there was a cat called Milo. " * 18
LAYOUTS = {"unified": ("-c", "256", "-np", "1"), "parts": ("-c", "512", "-np", "2", "--no-kv-unified")}


@pytest.fixture(scope="module", params=LAYOUTS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = (*LAYOUTS[request.param], "--context-shift", "--debug-invariants")
    with serving(tmp_path_factory.mktemp("shift"), *flags) as server:
        yield server


def complete(server: Server, **fields: Any) -> Any:
    return server.post("/completion", {"prompt": STORY, "temperature": 0, "ignore_eos": True, **fields})


def test_a_reply_goes_on_and_its_prompt_stays_cached(server: Server) -> None:
    first = complete(server, n_predict=200)
    n_prompt = first["tokens_evaluated"]
    assert 128 < n_prompt < 256
    assert (first["timings"]["predicted_n"], first["truncated"]) == (200, True)
    again = complete(server, n_predict=200)
    assert again["content"] == first["content"]
    assert again["timings"]["cache_n"] == n_prompt - 1
    within = complete(server, n_predict=20)
    assert (within["truncated"], within["content"]) == (False, first["content"][: len(within["content"])])
    assert server.get("/cache")["context_shifts"] >= 2


def test_what_is_kept_makes_a_difference_after_the_shift_only(server: Server) -> None:
    half, prompt = (complete(server, n_predict=150, n_keep=n_keep, return_tokens=True) for n_keep in (0, -1))
    n_before = 256 - half["tokens_evaluated"]
    assert half["tokens"][:n_before] == prompt["tokens"][:n_before]
    assert half["truncated"] is prompt["truncated"] is True


def test_without_the_flag_a_full_context_ends_the_reply(tmp_path: Path) -> None:
    with serving(tmp_path, *LAYOUTS["unified"]) as server:
        reply = complete(server, n_predict=-1)
        assert reply["tokens_evaluated"] + reply["tokens_predicted"] == 256
        assert reply["truncated"]


def test_a_model_that_cannot_be_shifted_says_so_at_the_start(tmp_path: Path) -> None:
    model = Path(__file__).parents[1] / "models" / "window.gguf"
    with serving(tmp_path, "-m", model, *LAYOUTS["unified"], "--context-shift") as server:
        assert "--context-shift is not used: sliding-window model" in server.log.read_text()
        (line,) = server.log_lines("context_shift.disabled")
        assert line["reason"].startswith("sliding-window model")
        reply = complete(server, prompt="Once", n_predict=-1)
        assert reply["tokens_evaluated"] + reply["tokens_predicted"] == 256
