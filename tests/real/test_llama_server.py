"""Beside llama-server on real weights: no more tokens computed, and the same replies as far as rounding allows.

llama-server is built from the sources of the installed llama-cpp-python (`bench/peers/build.py`), which takes
minutes once.
"""

from __future__ import annotations

import random
import socket
import subprocess
import time
import urllib.error
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import llamaslot
from bench.peers import build
from tests.live import Server, serving
from tests.real.cold import N_SCORES, Comparison, Control, Reply, moves
from tests.real.conftest import NAMES, REAL, note, path_of
from tests.real.conversations import (
    GEMMA_TEMPLATE,
    N_LONG,
    N_SHORT,
    Family,
    cold_model,
    family_of,
    user,
)
from tests.real.test_structured_output import CHAT, PARAMETERS, SCHEMAS

pytestmark = pytest.mark.skipif(not REAL, reason="long: make test-real")

FLAGS = ("-np", "2", "-c", "12288", "-fa", "on", "-t", "1")
TOOLS = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in PARAMETERS.items()]
SYSTEM = {"role": "system", "content": "You are terse."}
CHATS: list[list[dict[str, Any]]] = [
    [user("What is the capital of Norway?")],
    [
        SYSTEM,
        user("Name three rivers."),
        {"role": "assistant", "content": "Rhine, Nile, Po."},
        user("And three lakes?"),
    ],
    [user("  Spaces, then  a tab\t and ünïcode 🦊.  ")],
    [
        user("Write a haiku about rain."),
        {"role": "assistant", "content": "Rain on the roof\n"},
        user("Another one."),
    ],
]


class Pair(NamedTuple):
    """Both servers with one model."""

    name: str
    own: Server
    peer: Server


@contextmanager
def llama_server(folder: Path, *args: str | Path) -> Iterator[Server]:
    """A running llama-server, ended by its process id."""
    log = folder / "llama-server.log"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [str(build.llama_server()), "--host", "127.0.0.1", "--port", str(port), *map(str, args)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    server = Server(process, log)
    server.url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while not is_healthy(server):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.wait(10)


def is_healthy(server: Server) -> bool:
    try:
        server.get("/health")
    except (OSError, urllib.error.HTTPError):
        return False
    return True


@contextmanager
def both(name: str, folder: Path, template: Path | None) -> Iterator[Pair]:
    """Start both servers with the same flags."""
    flags = ("-m", path_of(name), *FLAGS, *(() if template is None else ("--chat-template-file", template)))
    with serving(folder, *flags) as own, llama_server(folder, *flags, "--jinja") as peer:
        deadline = time.monotonic() + 60
        while own.get("/props")["prefix_reuse"]["self_test"] == "pending":
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield Pair(name, own, peer)


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both servers with one model."""
    template = GEMMA_TEMPLATE if request.param == "gemma3" else None
    with both(request.param, tmp_path_factory.mktemp("pair"), template) as started:
        yield started


def ask(server: Server, prompt: str | list[int], n: int, **fields: Any) -> dict[str, Any]:
    """Return a greedy completion with its tokens and log-probabilities."""
    body = {
        "prompt": prompt,
        "n_predict": n,
        "temperature": 0,
        "n_probs": N_SCORES,
        "return_tokens": True,
        **fields,
    }
    got: dict[str, Any] = server.post("/completion", body)
    return got


def reply_of(rows: Sequence[dict[str, Any]]) -> Reply:
    scores = [{each["id"]: each["logprob"] for each in row["top_logprobs"]} for row in rows]
    return Reply([row["id"] for row in rows], scores)


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def workloads(name: str, shared: Path) -> list[tuple[str, list[Family]]]:
    """Return families by twos; the long ones one by one."""
    short = [family_of(name, i, False, shared) for i in range(N_SHORT)]
    some = [(f"short {i}", short[2 * i : 2 * i + 2]) for i in range(N_SHORT // 2)]
    return some + [(f"long {i}", [family_of(name, i, True, shared)]) for i in range(N_LONG)]


def test_no_more_tokens_are_computed_than_by_llama_server(pair: Pair, shared: Path) -> None:
    model, chance = cold_model(pair.name), random.Random(3)
    known: list[list[int]] = []
    """What the server has computed KV for."""
    found: dict[str, tuple[int, int, int]] = {}
    for what, some in workloads(pair.name, shared):
        prompts = [prompt for each in some for prompt in each.prompts]
        # Turns come in their order, and between those of others; some come again.
        order = sorted(range(len(prompts)), key=lambda i: i % 6 + chance.random()) + chance.sample(
            range(len(prompts)), 3
        )
        own = peer = fewest = 0
        for prompt in (prompts[i] for i in order):
            ids = model.tokenize(prompt)
            fewest += max(1, len(ids) - max((shared_length(ids, each) for each in known), default=0))
            replies = [ask(server, prompt, 8) for server in (pair.own, pair.peer)]
            own, peer = (n + got["timings"]["prompt_n"] for n, got in zip((own, peer), replies, strict=True))
            # Of the last token generated there is no KV.
            known.append([*ids, *replies[0]["tokens"][:-1]])
        found[what] = own, peer, fewest
    totals = [sum(each[i] for each in found.values()) for i in range(3)]
    note(
        shared,
        model=pair.name,
        kind="computed prompt tokens",
        **dict(zip(("llamaslot", "llama-server", "fewest"), totals, strict=True)),
    )
    print(found)
    assert all(own <= peer for own, peer, _ in found.values()), found
    if pair.name == "smollm2":
        # With windows, checkpoints decide. Text anchors save more where a reply is tokenized again otherwise.
        assert all(own <= fewest for own, _, fewest in found.values()), found


def test_completions_are_those_of_llama_server(pair: Pair, shared: Path) -> None:
    control = Control()
    some = [family_of(pair.name, i, False, shared) for i in range(3)]
    for each in some:
        each.control(control)
    comparison = Comparison(control)
    for prompt in (prompt for each in some for prompt in each.prompts):
        peer, own = (ask(server, prompt, 16, cache_prompt=False) for server in (pair.peer, pair.own))
        comparison.add(prompt, *(reply_of(each["completion_probabilities"]) for each in (peer, own)))
        assert own["tokens_evaluated"] == peer["tokens_evaluated"]
    parity(pair, shared, "completions beside llama-server", comparison)


def parity(pair: Pair, shared: Path, kind: str, comparison: Comparison) -> None:
    note(
        shared,
        model=pair.name,
        kind=kind,
        replies=comparison.n_texts,
        differing=comparison.n_differing,
        **{"largest move": max(comparison.moves)},
    )
    comparison.check(cold_model(pair.name))


def test_replies_beyond_their_context_are_those_of_llama_server(tmp_path: Path) -> None:
    """On the embedded model, which computes thousands of tokens in a second."""
    model = Path(llamaslot.__file__).parent / "demo" / "demo.gguf"
    flags = ("-m", model, "-np", "1", "-c", "256", "-fa", "on", "-t", "1", "--context-shift")
    story = "Once upon a time there was a cat called Milo. He liked to sleep on the roof, and Ada fed him. " * 30
    n_equal, n = 0, 200
    with serving(tmp_path, *flags) as own_server, llama_server(tmp_path, *flags) as peer_server:
        ids = own_server.post("/tokenize", {"content": story})["tokens"][:250]
        for n_keep, n_discard in [(0, 0), (-1, 0), (100, 0), (8, 100), (3, 20)]:
            fields = {"n_keep": n_keep, "n_discard": n_discard, "ignore_eos": True, "cache_prompt": False}
            peer, own = (ask(server, ids, n, **fields) for server in (peer_server, own_server))
            assert own["truncated"] is peer["truncated"] is True
            assert own["tokens_predicted"] == peer["tokens_predicted"] == n
            one, other = (reply_of(each["completion_probabilities"]) for each in (peer, own))
            assert max(moves(one, other)) < 0.25
            n_equal += one.tokens == other.tokens
    # The others part where rounding decides between two tokens.
    assert n_equal >= 2


def test_chats_are_those_of_llama_server(pair: Pair, shared: Path) -> None:
    control = Control()
    for i in range(3):
        family_of(pair.name, i, False, shared).control(control)
    comparison = Comparison(control)
    for messages in CHATS:
        body = {
            "messages": messages,
            "max_tokens": 16,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": N_SCORES,
        }
        peer, own = (server.post(CHAT, {**body, "cache_prompt": False}) for server in (pair.peer, pair.own))
        rows = [got["choices"][0]["logprobs"]["content"] for got in (peer, own)]
        prompt = pair.own.post("/apply-template", {"messages": messages})["prompt"]
        comparison.add(prompt, *map(reply_of, rows))
        assert own["usage"]["prompt_tokens"] == peer["usage"]["prompt_tokens"]
    parity(pair, shared, "chats beside llama-server", comparison)


FORM = {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMAS["object"]}}


@pytest.mark.parametrize("more", [{}, {"response_format": FORM}], ids=["plain", "schema"])
def test_prompts_are_those_of_llama_server(pair: Pair, more: dict[str, Any]) -> None:
    compare_prompts(pair, more)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_with_tools_are_those_of_llama_server(name: str, tmp_path: Path) -> None:
    # The models' own templates have no tools: there llamaslot describes them in words (docs/api.md).
    with both(name, tmp_path, build.chat_template("Qwen-Qwen2.5-7B-Instruct")) as pair:
        compare_prompts(pair, {"tools": TOOLS})
        compare_prompts(pair, {"tools": TOOLS, "tool_choice": "required"})


def compare_prompts(pair: Pair, more: dict[str, Any]) -> None:
    """Compare the texts of prompts, and how many tokens they have."""
    for messages in CHATS:
        body = {"messages": messages, **more}
        own, peer = (server.post("/apply-template", body)["prompt"] for server in (pair.own, pair.peer))
        assert own == peer
        limited = {**body, "max_tokens": 1, "temperature": 0}
        own, peer = (server.post(CHAT, limited)["usage"]["prompt_tokens"] for server in (pair.own, pair.peer))
        assert own == peer
