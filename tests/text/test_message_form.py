"""Templates see content as text or as parts, and reasoning under the name or in the part that they read."""

from __future__ import annotations

from typing import Any

import pytest

from llamaslot.text.template import ChatTemplate
from tests.text.rendering import rendered

THOUGHTS_IN_PARTS = """\
{%- for m in messages %}
    {{- '<' ~ m.role ~ '>' }}
    {%- if m.content is string or m.role == 'tool' %}{{ m.content }}{% else %}
        {%- for part in m.content %}
            {%- if part.type == 'thinking' and m.role == 'user' %}{{ raise_exception('no') }}{% endif %}
            {{- '[' ~ part.thinking ~ ']' if part.type == 'thinking' else part.text }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}"""

USER = {"role": "user", "content": "hi"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def render(source: str, *messages: dict[str, Any]) -> str:
    return rendered(ChatTemplate(source, bos_token="<s>", eos_token="</s>"), messages)


@pytest.mark.parametrize("content", ["Yes.", None, [{"type": "text", "text": "Yes."}]])
def test_reasoning_becomes_a_part_where_the_template_reads_it_there(content: Any) -> None:
    reply = {"role": "assistant", "content": content, "reasoning_content": "Why not."}
    text = "Yes." if content else ""
    assert render(THOUGHTS_IN_PARTS, USER, reply, USER) == f"<user>hi<assistant>[Why not.]{text}<user>hi"


def test_reasoning_is_no_part_for_a_template_that_prints_any_part() -> None:
    reply = {"role": "assistant", "content": "Yes.", "reasoning_content": "Why not."}
    assert render("{% for m in messages %}{{ m.content }};{% endfor %}", USER, reply, USER) == "hi;Yes.;hi;"


def test_reasoning_is_no_part_of_a_question_or_result() -> None:
    """A template may refuse it there, or print the list."""
    asked = {"role": "assistant", "content": "", "reasoning_content": "Why not.", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call00001", "content": "2", "reasoning_content": "Hm."}
    prompt = render(THOUGHTS_IN_PARTS, USER | {"reasoning_content": "Hm."}, asked, result)
    assert prompt == "<user>hi<assistant>[Why not.]<tool>2"
    system = {"role": "system", "content": "be", "reasoning_content": "Hm."}
    assert render(THOUGHTS_IN_PARTS, system, USER) == "<system>[Hm.]be<user>hi"
