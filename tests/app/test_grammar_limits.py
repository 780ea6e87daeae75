"""Grammars that are too deep or too expensive, and limits of threads, under a real server: one request fails."""

from __future__ import annotations

import concurrent.futures
import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.live import Server, serving

USER = [{"role": "user", "content": "hi"}]
DEEP_GBNF = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(4000)) + 'r4000 ::= "a"\n'
DEEP = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/0"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {
        **{f"{i}": {"properties": {"": {"$ref": f"#/$defs/{i + 1}"}}, "required": [""]} for i in range(1200)},
        "1200": {"const": 1},
    },
}
STATES = " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(16))
COSTLY = {
    "type": "object",
    "properties": {"a": {"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}b.*$"} for i in range(22)]}},
    "required": ["a"],
}
"""Short enough for the prompt, which has the schemas of tools."""
FUNCTION = {"name": "f", "parameters": COSTLY, "strict": True}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gbnf": ("/completion", {"prompt": "a", "grammar": DEEP_GBNF}, "grammar"),
    "lark": ("/v1/completions", {"prompt": "a", "grammar": f"start: T\nT: {STATES}"}, "grammar"),
    "regex": ("/completion", {"prompt": "a", "guided_regex": "(" * 5000 + ")" * 5000}, "guided_regex"),
    "json_schema": ("/completion", {"prompt": "a", "json_schema": DEEP}, "json_schema"),
    "structured_outputs": (
        "/v1/completions",
        {"prompt": "a", "structured_outputs": {"json": DEEP}},
        "outputs.json",
    ),
    "response_format": (
        "/v1/chat/completions",
        {
            "messages": USER,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": DEEP}},
        },
        "response_format.json_schema.schema",
    ),
    "tools": (
        "/v1/chat/completions",
        {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
        "tools",
    ),
    "text.format": (
        "/v1/responses",
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": COSTLY}}},
        "text.format.schema",
    ),
    "responses' tools": (
        "/v1/responses",
        {"input": "hi", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
        "tools",
    ),
    "output_format": (
        "/v1/messages",
        {"messages": USER, "max_tokens": 9, "output_format": {"type": "json_schema", "schema": DEEP}},
        "schema",
    ),
    "messages' tools": (
        "/v1/messages",
        {
            "messages": USER,
            "max_tokens": 9,
            "tools": [{"name": "f", "input_schema": COSTLY}],
            "tool_choice": {"type": "any"},
        },
        "tools",
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), "-m", "demo", "--parallel", "2") as started:
        yield started


def children(server: Server) -> dict[str, psutil.Process]:
    """The server's processes by the last part of their modules' names."""
    found = {}
    for each in psutil.Process(server.process.pid).children(recursive=True):
        module = next((part for part in each.cmdline() if part.startswith("llamaslot.")), "")
        found.setdefault(module.rpartition(".")[2], each)
    return found


def refusal(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.post(path, body)
    with caught.value as error:
        assert error.code == 400, error.read()
        reply: dict[str, Any] = json.loads(error.read())
    return reply["error"]


def small(server: Server, i: int) -> Any:
    return server.post("/completion", {"prompt": "a", "n_predict": 9, "json_schema": {"const": i}})["content"]


def test_requests_are_served_where_no_thread_can_be_started(server: Server) -> None:
    """A new thread's stack exceeds the limit of address space, so starting one fails as at a limit of threads."""
    # The process that tries grammars is started for the first one.
    assert small(server, 76) == "76"
    before = {name: child.pid for name, child in children(server).items()}
    limited = [children(server)["engine_main"], children(server)["prompt_main"]]
    for process in limited:
        size = process.memory_info().vms + 7 * 2**20
        process.rlimit(psutil.RLIMIT_AS, (size, psutil.RLIM_INFINITY))
    try:
        assert small(server, 77) == "77"
        assert small(server, 78) == "78"
    finally:
        for process in limited:
            process.rlimit(psutil.RLIMIT_AS, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
    now = {name: child.pid for name, child in children(server).items()}
    assert now == before


def test_a_server_ends_in_order_where_no_thread_can_be_started(tmp_path: Path) -> None:
    fault = """
import threading
start = threading.Thread.start
def limited(thread):
    if getattr(thread._target, "__name__", "") == "_do_shutdown":
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = limited
"""
    with serving(tmp_path, "-m", "demo", "--in-process", fault=fault) as started:
        assert started.stop() == 0
        assert "Traceback" not in started.log.read_text()


@pytest.mark.slow
def test_no_grammar_ends_a_process(server: Server) -> None:
    before = {name: child.pid for name, child in children(server).items()}
    for path, body, field in CASES.values():
        error = refusal(server, path, body)
        assert field in error["message"], error
        assert "simplify" in error["message"] or "regex" in error["message"], error
        assert field in error.get("param", field)
    now = {name: child.pid for name, child in children(server).items()}
    assert {name: now[name] for name in before} == before


def test_small_schemas_are_answered_beside_expensive_ones(server: Server) -> None:
    bombs: list[dict[str, Any]] = [{"prompt": "a", "grammar": f'start: T | "{i}"\nT: {STATES}'} for i in range(3)]
    bombs += [{"prompt": "a", "json_schema": {**COSTLY, "maxProperties": i}} for i in range(1, 4)]
    with concurrent.futures.ThreadPoolExecutor(len(bombs)) as threads:
        running = [threads.submit(refusal, server, "/completion", bomb) for bomb in bombs]
        assert [small(server, i) for i in range(3)] == ["0", "1", "2"]
        for each in running:
            assert "simplify" in each.result()["message"]
