"""The four-turn chat as a whole, on a tiny model: the real server, its own process, HTTP. Counts only, no times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import chat, synthetic
from bench.client import BenchmarkError


@pytest.mark.slow
def test_with_the_cache_later_turns_compute_only_what_is_new(tmp_path: Path) -> None:
    model = synthetic.ensure("tiny", folder=tmp_path)
    chat.run(model=model, title="tiny", repeats=1, folder=tmp_path, server_flags=["-t", "1"])

    runs: list[dict[str, Any]] = json.loads((tmp_path / "chat.json").read_text())["runs"]
    assert len(runs) == len(chat.SYSTEM_TOKENS) * 2 * chat.TURNS
    for run in runs:
        assert run["computed_tokens"] + run["cached_tokens"] == run["prompt_tokens"]
        assert 0 < run["ttft"] < run["total"]
        if not run["cached"]:
            assert run["computed_tokens"] == run["prompt_tokens"]
        elif run["number"] > 1:
            assert run["computed_tokens"] <= run["new_tokens"] + 1
    longest = max(run["prompt_tokens"] for run in runs)
    assert longest > 1000 + chat.TURNS * chat.USER_TOKENS + (chat.TURNS - 1) * chat.ANSWER_TOKENS
    assert (tmp_path / "chat.png").read_bytes().startswith(b"\x89PNG")


def test_a_server_that_cannot_start_is_reported_with_its_own_words(tiny_model: Path, tmp_path: Path) -> None:
    flags = ["-fa", "off", "-ctv", "q8_0"]
    with pytest.raises(BenchmarkError, match=r"(?s)status 2 .*--cache-type-v needs flash attention"):
        chat.run(model=tiny_model, title="wrong", repeats=1, folder=tmp_path, server_flags=flags)


def test_a_file_that_is_no_model_is_reported(tmp_path: Path) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"GGUF and nothing else")
    with pytest.raises(BenchmarkError, match=r"broken\.gguf: llama.cpp cannot read its vocabulary"):
        chat.run(model=model, title="broken", repeats=1, folder=tmp_path, server_flags=[])
