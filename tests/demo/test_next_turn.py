"""A real server that computes next turns ahead writes what one writes that does not, and computes fewer tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.live import Server, serving

TEMPLATE = """
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}
"""
"""Without the reasoning of earlier turns, so that each prompt differs from what was generated."""
GRAMMAR = 'root ::= [a-z ]{20,40} "\n</think>\n\n" [a-z ]{400,420} [.]'
QUESTIONS = (
    "my word is kestrel, please keep it",
    "what did i ask you to keep",
    "say it again, and then say why",
    "now tell me a story with it",
)
TIE = 0.05
"""Log-probability by which the best token leads at least; with less, other shapes of a step may choose another."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    folder = tmp_path_factory.mktemp("next_turn")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    with ExitStack() as stack:
        both = []
        for n in (0, 100_000):
            (folder / f"{n}").mkdir()
            flags = ("--chat-template-file", template, "--warm-ahead", str(n), "--metrics", "-np", "2")
            both.append(stack.enter_context(serving(folder / f"{n}", *flags)))
        for server in both:
            # They decide which steps are padded, and so how results are rounded.
            deadline = time.monotonic() + 60
            while server.get("/cache?top=1")["costs_pending"]:
                assert time.monotonic() < deadline, "costs are not measured"
                time.sleep(0.1)
        yield both[0], both[1]


def ask(server: Server, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "grammar": GRAMMAR, "logprobs": True, "top_logprobs": 2}
    return server.post("/v1/chat/completions", body)


def n_ahead(server: Server) -> int:
    return int(server.get("/cache?top=1")["prompt_tokens"]["ahead"])


def converse(server: Server, start: str, *, waits: bool) -> tuple[list[list[dict[str, Any]]], list[int]]:
    """Return the log-probabilities of each turn's tokens, and how many tokens of its prompt it computed."""
    messages: list[dict[str, Any]] = []
    rows, computed = [], []
    for i, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": f"{start} {question}"})
        before = n_ahead(server)
        reply = ask(server, messages)
        (choice,) = reply["choices"]
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
        rows.append(choice["logprobs"]["content"])
        computed.append(reply["timings"]["prompt_n"])
        if waits and i:
            # The first reply has not come back yet, so its next turn is not predicted.
            deadline = time.monotonic() + 20
            while n_ahead(server) == before:
                assert time.monotonic() < deadline, "nothing was computed ahead"
                time.sleep(0.02)
    return rows, computed


@pytest.mark.slow
def test_greedy_texts_are_those_of_a_server_that_computes_nothing_ahead(servers: tuple[Server, Server]) -> None:
    off, on = servers
    n_equal = 0
    for start in ("hello,", "dear friend,"):
        plain, slow = converse(off, start, waits=False)
        ahead, quick = converse(on, start, waits=True)
        assert n_ahead(off) == 0
        for one, other in zip(plain, ahead, strict=True):
            at = next(
                (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a["token"] != b["token"]), None
            )
            if at is not None:
                best, second = one[at]["top_logprobs"]
                assert best["logprob"] - second["logprob"] < TIE, (start, at, best, second)
                # From here on the conversations differ.
                break
        else:
            assert [each["token"] for rows in plain for each in rows] == [
                each["token"] for rows in ahead for each in rows
            ]
            n_equal += 1
            # What the first two turns compute is the same; then the reply before is already there.
            assert slow[:2] == quick[:2]
            assert all(a < b - 40 for a, b in zip(quick[2:], slow[2:], strict=True)), (slow, quick)
    assert n_equal
