"""The agent example runs real tools through the openai client, which the embedded model calls."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.demo.chat_template import CHAT_TEMPLATE
from tests.live import Server, serving

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent.py"


def call(tool: str, **arguments: Any) -> str:
    """A call as Hermes models write it."""
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


REPLIES = (
    call("get_weather", city="Oslo"),
    "The weather in Oslo is rainy, 7 degrees.",
    call("add", numbers=[17, 25]),
    "The sum is 42.",
    call("read_note", name="shopping"),  # not the parameter's name
    call("read_note", title="shopping"),
    call("save_note", title="shopping", text="buy bread and milk"),
    "Done: saved as note 1.",
    call("read_note", title="shopping"),
    "The note says: buy bread and milk.",
    "You are welcome!",
)


def run(server: Server) -> str:
    """What the example prints."""
    done = subprocess.run(
        [sys.executable, EXAMPLE, server.url], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_embedded_model_calls_the_tools_and_tells_their_results(demo: Server) -> None:
    printed = run(demo)
    assert re.findall(r"^(\w+\(.*) -> (.*)$", printed, re.MULTILINE) == [
        ('get_weather({"city": "Oslo"})', "rainy, 7 degrees"),
        ('add({"numbers": [17, 25]})', "42"),
        ('save_note({"title": "shopping", "text": "buy bread and milk"})', "saved as note 1"),
        ('read_note({"title": "shopping"})', "buy bread and milk"),
    ]
    for answer in (
        "in Oslo is rainy, 7 degrees.",
        "The sum is 42.",
        "saved as note 1.",
        "says: buy bread and milk.",
    ):
        assert f"{answer}\n" in printed


@pytest.mark.slow
def test_it_runs_each_call_and_sends_its_result(tmp_path: Path) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text(CHAT_TEMPLATE)
    flags: list[str | Path] = ["--chat-template-file", template]
    for index, reply in enumerate(REPLIES):
        grammar = tmp_path / f"{index}.gbnf"
        grammar.write_text(f"root ::= {json.dumps(reply)}\n")
        flags += ["--grammar-file", grammar]
    question = {"role": "user", "content": "What is the weather in Oslo?"}
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    asked = {"role": "assistant", "tool_calls": [{"id": "call00001", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "call00001", "content": "rainy, 7 degrees"}
    body = {"messages": [question, asked, result], "tools": runpy.run_path(str(EXAMPLE))["DEFINITIONS"]}
    with serving(tmp_path, *flags) as server:
        n_answering = server.post("/v1/chat/completions/input_tokens", body)["input_tokens"]
        printed = run(server)
    found = re.findall(r"^(\w+)\(.*\) -> (.*)$", printed, re.MULTILINE)
    assert found[:2] == [("get_weather", "rainy, 7 degrees"), ("add", "42")]
    assert found[2][1].startswith("error: read_note() got an unexpected keyword argument")
    assert found[3:] == [
        ("read_note", "error: no note called shopping"),
        ("save_note", "saved as note 1"),
        ("read_note", "buy bread and milk"),
    ]
    for reply in REPLIES:
        assert reply in printed or reply.startswith("<tool_call>")
    # Tokens that were generated may differ from those of their text.
    n_second = int(re.findall(r"\[(\d+) prompt tokens", printed)[1])
    assert abs(n_second - n_answering) <= 3
    computed = [int(n) for n in re.findall(r"(\d+) computed\]", printed)]
    assert len(computed) == len(REPLIES)
    # Behind the first question, each step computes the new question or the result of its tool.
    assert max(computed[1:]) <= 128 < computed[0], computed
