"""Durability: what was computed is on disk soon after a request, however few tokens it asks for.

Every kind of request is sent once, with a prompt of its own. A server that is started on the folder then has all of
each prompt but its last token.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest

from bench import synthetic
from tests.live import WRITE_SOON, Server, serving

WORDS = ["cat", "house", "sea", "story", "tree", "river", "stone", "bread", "winter", "market", "lamp", "road"]
FLAGS = ("-np", "4", "-c", "16384", "--cache-idle-cells", "all", "--in-process")
READS_PAY = """
from llamaslot.kvcache.tiers import pacing
pacing.ReadRate.seconds = None
"""
"""Fault for servers that are to read all that the disk has: these models compute faster than many disks read."""
SHORT = 1, 8, 16, 17
"""Tokens that requests ask for: titles, labels and benchmarks ask for few."""
HYBRID = Path(__file__).resolve().parents[1] / "models" / "short_conv.gguf"


def story(name: str, n_words: int) -> str:
    """Text that begins like no other one."""
    return f"{name}: " + " ".join(WORDS[(i * i + len(name)) % len(WORDS)] for i in range(n_words))


def completion(text: str, n: int) -> tuple[str, dict[str, Any]]:
    return "/completion", {"prompt": text, "n_predict": n}


def text_completion(text: str, n: int) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": text, "max_tokens": n}


def choices(text: str, n: int) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": text, "max_tokens": n, "n": 2}


def chat(text: str, n: int) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": n}


def messages(text: str, n: int) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"messages": [{"role": "user", "content": text}], "max_tokens": n}


def responses(text: str, n: int) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": text, "max_output_tokens": n}


def infill(text: str, n: int) -> tuple[str, dict[str, Any]]:
    return "/infill", {"input_prefix": text, "input_suffix": "the end", "n_predict": n}


KINDS = completion, text_completion, choices, chat, messages, responses, infill


@pytest.fixture
def fim_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model, with tokens for `/infill`."""
    add_pad = gguf.GGUFWriter.add_pad_token_id

    def add(writer: gguf.GGUFWriter, pad: int) -> None:
        add_pad(writer, pad)
        for token, key in enumerate(("fim_pre", "fim_suf", "fim_mid"), start=40):
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token)

    monkeypatch.setattr(gguf.GGUFWriter, "add_pad_token_id", add)
    return synthetic.ensure("tiny", folder=tmp_path / "models")


def usage(reply: Any) -> tuple[int, int]:
    """Prompt tokens of a reply, and how many of them were cached."""
    if "tokens_evaluated" in reply:
        return reply["tokens_evaluated"], reply["timings"]["cache_n"]
    used = reply["usage"]
    if "cache_read_input_tokens" in used:
        return used["input_tokens"] + used["cache_read_input_tokens"], used["cache_read_input_tokens"]
    if "input_tokens_details" in used:
        return used["input_tokens"], used["input_tokens_details"]["cached_tokens"]
    return used["prompt_tokens"], used["prompt_tokens_details"]["cached_tokens"]


def wait_until_written(server: Server, n_checkpoints: int = 0) -> None:
    """Wait until the disk has every token that the pool has, and so many checkpoints, and writes nothing more."""
    # Beside partial states, a token that two requests computed may keep both cells.
    n_duplicates = 10 * n_checkpoints
    deadline = time.monotonic() + 30
    while True:
        stats = server.get("/cache")
        disk, ram = stats["disk"], stats["ram"]
        n_missing = stats["cells"]["used"] - n_duplicates - disk["tokens"]
        if n_missing <= 0 and disk["segments"] >= ram["segments"] + n_checkpoints:
            # A partial segment counts until the longer one that replaces it is there, so the sum may be early.
            time.sleep(1.0)
            if server.get("/cache")["disk"]["written_bytes"] == disk["written_bytes"]:
                return
        assert time.monotonic() < deadline, (stats["cells"]["used"], disk, ram)
        time.sleep(0.05)


def computed_after_a_kill(
    folder: Path, asked: Sequence[tuple[str, dict[str, Any]]], *flags: str | Path
) -> list[tuple[int, int]]:
    """Ask, kill the server once it had the time to write, and ask again.

    Returns the tokens of each prompt, and how many of them were computed again.
    """
    args = (*FLAGS, *flags, "--cache-disk", folder / "cache")
    with serving(folder, *args, fault=WRITE_SOON) as server:
        for path, body in asked:
            server.post(path, body)
        wait_until_written(server)
        server.stop(signal.SIGKILL)
    with serving(folder, *args, fault=READS_PAY) as server:
        replies = [usage(server.post(path, body)) for path, body in asked]
    return [(n_prompt, n_prompt - n_cached) for n_prompt, n_cached in replies]


def test_what_any_request_computed_survives_a_kill(tmp_path: Path, fim_model: Path) -> None:
    asked = [kind(story(f"{kind.__name__} {n}", 40), n) for kind in KINDS for n in SHORT]
    replies = computed_after_a_kill(tmp_path, asked, "-m", fim_model)
    assert min(n_prompt for n_prompt, _ in replies) > 80
    n_computed = [n for _, n in replies]
    assert n_computed == [1] * len(asked), dict(zip([path for path, _ in asked], n_computed, strict=True))


@pytest.mark.slow
def test_a_long_prompt_with_a_short_reply_survives_a_kill(tmp_path: Path, tiny_model: Path) -> None:
    asked = [completion(story(f"long {n}", 430), n) for n in SHORT]
    replies = computed_after_a_kill(tmp_path, asked, "-m", tiny_model)
    assert min(n_prompt for n_prompt, _ in replies) > 1500
    assert [n for _, n in replies] == [1] * len(asked)


def test_prompts_that_share_a_part_survive_a_kill(tmp_path: Path, tiny_model: Path) -> None:
    head = story("shared", 200)
    asked = [completion(f"{head} {story(name, 20)}", 4) for name in ("one", "two", "three")]
    replies = computed_after_a_kill(tmp_path, asked, "-m", tiny_model)
    assert [n for _, n in replies] == [1] * len(asked)


@pytest.mark.slow
def test_a_conversation_with_short_replies_goes_on_after_a_kill_by_checkpoints(tmp_path: Path) -> None:
    """On disk are the deepest checkpoints of each path: those from which the next turns go on."""
    args = (*FLAGS, "-m", HYBRID, "--cache-disk", tmp_path / "cache")
    talks = [[{"role": "user", "content": story(f"cat {n}", 200)}] for n in SHORT]
    with serving(tmp_path, *args, fault=WRITE_SOON) as server:
        for talk, n in zip(talks, SHORT, strict=True):
            reply = server.post("/v1/chat/completions", {"messages": talk, "max_tokens": n})
            talk += [reply["choices"][0]["message"], {"role": "user", "content": "What next?"}]
        wait_until_written(server, len(talks))
        server.stop(signal.SIGKILL)
    with serving(tmp_path, *args, fault=READS_PAY) as server:
        for talk in talks:
            n_prompt, n_cached = usage(server.post("/v1/chat/completions", {"messages": talk, "max_tokens": 4}))
            assert n_prompt > 400
            assert n_prompt - n_cached < 64


@pytest.mark.slow
def test_the_end_of_a_prompt_is_on_disk_soon(tmp_path: Path, tiny_model: Path) -> None:
    """By default, too: partial segments wait a second."""
    with serving(tmp_path, *FLAGS, "-m", tiny_model, "--cache-disk", tmp_path / "cache") as server:
        server.post(*completion(story("soon", 40), 8))
        started = time.monotonic()
        wait_until_written(server)
        # A busy machine may take longer, but not much.
        assert time.monotonic() - started < 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--rope-freq-base", "500"),
        ("--rope-scaling", "yarn", "--rope-scale", "2"),
        ("--override-kv", "llama.rope.freq_base=float:500"),
    ],
)
def test_kv_on_disk_is_not_for_a_server_with_other_positions(
    tiny_model: Path, tmp_path: Path, flags: Sequence[str]
) -> None:
    args = *FLAGS, "-m", tiny_model, "--cache-disk", tmp_path / "cache"
    body = {"prompt": story("positions", 60), "n_predict": 1}
    with serving(tmp_path, *args, fault=WRITE_SOON) as server:
        n_prompt = server.post("/completion", body)["tokens_evaluated"]
        assert server.stop() == 0
    cached = []
    for more in (flags, flags, ()):
        with serving(tmp_path, *args, *more, fault=WRITE_SOON + READS_PAY) as server:
            cached.append(server.post("/completion", body)["timings"]["cache_n"])
            assert server.stop() == 0
    assert cached == [0, n_prompt - 1, n_prompt - 1]
