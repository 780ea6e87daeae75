"""The benchmark of tool loops, on a real server of this project. Never timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import toolloop
from bench.client import parse_stream
from tests.bench.forked_servers import forked_servers

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.content %}
{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
"""Calls in the form of Qwen3."""


@pytest.mark.slow
def test_calls_that_come_back_cost_nothing_only_with_message_memory(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolloop, "STEPS", 3)
    monkeypatch.setattr(toolloop, "SYSTEM_TOKENS", 60)
    monkeypatch.setattr(toolloop, "RESULT_TOKENS", 20)
    monkeypatch.setattr(toolloop, "CONTEXT", 4096)
    monkeypatch.setattr(toolloop, "SERVERS", toolloop.SERVERS[1:])
    flags = ("--chat-template", TEMPLATE)
    with forked_servers():
        toolloop.run(model=tiny_model, title="tiny", repeats=1, threads=1, folder=tmp_path, server_flags=flags)
    steps = json.loads((tmp_path / "toolloop.json").read_text())["steps"]
    assert len(steps) == 2 * 2 * 3
    without, restored = ([step for step in steps if step["server"] == name] for name in NAMES)
    assert not any(step["restored_tokens"] for step in without)
    for step in restored:
        assert (step["restored_tokens"] > 0) == (step["number"] > 1)
        if step["number"] > 1:
            [other] = [
                each for each in without if (each["number"], each["reasons"]) == (step["number"], step["reasons"])
            ]
            assert step["computed_tokens"] < 70
            assert step["computed_tokens"] < other["computed_tokens"]


NAMES = tuple(setup.name for setup in toolloop.SERVERS[1:])


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        (
            [
                {"content": "<tool"},
                {"content": '_call>\n{"name": "read'},
                {"content": '_file", '},
                {"content": "x"},
            ],
            3,
        ),
        ([{"reasoning_content": "why"}, {"content": '<tool_call>{"name": "a"'}], 1),
        ([{"content": "<tools"}, {"content": "x"}], 1),
        ([{"tool_calls": [{"index": 0, "id": "a", "function": {"name": "a"}}]}, {"content": "x"}], 1),
    ],
)
def test_a_call_counts_once_its_name_is_known(deltas: list[dict[str, Any]], expected: int) -> None:
    chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
    events = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks]
    received = [(float(at), event) for at, event in enumerate((*events, b"data: [DONE]\n\n"), start=1)]
    assert toolloop._ttft(parse_stream(0.0, received, ended=9.0)) == expected
