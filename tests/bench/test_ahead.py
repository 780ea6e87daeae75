"""The benchmark of turns that are computed ahead, on real servers of this project. Never timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import ahead
from tests.bench.forked_servers import forked_servers

TEMPLATE = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""


@pytest.mark.slow
def test_only_the_side_that_computes_ahead_finds_the_answer_before_a_turn(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TURNS", 4), ("REASONING_TOKENS", 90), ("ANSWER_TOKENS", 90), ("QUESTION_TOKENS", 10)):
        monkeypatch.setattr(ahead, name, value)
    monkeypatch.setattr(ahead, "OTHER_TOKENS", 20)
    monkeypatch.setattr(ahead, "OTHER_EVERY_S", 0.2)
    monkeypatch.setattr(ahead, "PAUSE_S", 0.5)
    monkeypatch.setattr(ahead, "CONTEXT", 8192)
    monkeypatch.setattr(ahead, "CONVERSATIONS_BESIDE", 1)
    flags = ("--chat-template", TEMPLATE)
    with forked_servers():
        ahead.run(model=tiny_model, title="tiny", repeats=1, threads=1, folder=tmp_path, server_flags=flags)
    result = json.loads((tmp_path / "ahead.json").read_text())
    turns = {(turn["side"], turn["number"]): turn for turn in result["turns"]}
    assert len(turns) == 8
    for number in (3, 4):
        on, off = turns["on", number], turns["off", number]
        assert on["computed_tokens"] < 60 < off["computed_tokens"]
    assert turns["on", 2]["computed_tokens"] > 60
    assert all(result["others"].values())
