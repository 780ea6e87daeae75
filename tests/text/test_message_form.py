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


@pytest.mark.parametrize(
    ("written", "thought"),
    [
        ("{{ m.thinking }}{{ m.content }}", "Why not."),
        ("{{ m.reasoning_content or m.thinking }}{{ m.content }}", "Why not."),
        (
            "{% for p in ([{'text': m.content}] if m.content is string else m.content) %}"
            "{{ '[' ~ p.thinking ~ ']' if p.type == 'thinking' else p.text }}{% endfor %}",
            "[Why not.]",
        ),
    ],
    ids=["thinking", "either name", "part"],
)
def test_reasoning_is_read_by_a_template_that_refuses_calls(written: str, thought: str) -> None:
    refused = "{% if m.tool_calls %}{{ raise_exception('no tools') }}{% endif %}"
    reply = {"role": "assistant", "content": "Yes.", "reasoning_content": "Why not."}
    prompt = render("{% for m in messages %}" + refused + written + ";{% endfor %}", USER, reply, USER)
    assert prompt == f"hi;{thought}Yes.;hi;"


def test_reasoning_is_no_part_of_a_question_or_result() -> None:
    """A template may refuse it there, or print the list."""
    asked = {"role": "assistant", "content": "", "reasoning_content": "Why not.", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call00001", "content": "2", "reasoning_content": "Hm."}
    prompt = render(THOUGHTS_IN_PARTS, USER | {"reasoning_content": "Hm."}, asked, result)
    assert prompt == "<user>hi<assistant>[Why not.]<tool>2"
    system = {"role": "system", "content": "be", "reasoning_content": "Hm."}
    assert render(THOUGHTS_IN_PARTS, system, USER) == "<system>[Hm.]be<user>hi"


@pytest.mark.parametrize(
    "written",
    [
        "[{{ m.content | string }}]",
        "{% for p in ([m.content] if m.content is string else m.content) %}[{{ p }}]{% endfor %}",
        "[{{ m.content if m.content is string else m.content[0].text }}]",
    ],
    ids=["as Python", "one by one", "the first"],
)
@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_parts_are_text_in_a_role_whose_parts_the_template_writes_otherwise(role: str, written: str) -> None:
    source = (
        "{% for m in messages %}{% if m.role == '" + role + "' %}" + written + "{% elif m.content is string %}"
        "{{ m.content }}{% else %}{{ m.content | map(attribute='text') | join }}{% endif %};{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calling = [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": parts}]
    messages = [{"role": "system", "content": parts}, USER | {"content": parts}, *calling]
    messages += [{"role": "assistant", "content": parts}, USER]
    prompt = render(source, *messages)
    texts = {each: "[a\nb]" if each == role else "ab" for each in ("system", "user", "tool", "assistant")}
    asked = "[]" if role == "assistant" else ""
    assert prompt == "{system};{user};{asked};{tool};{assistant};hi;".format(asked=asked, **texts)


def test_text_stays_text_in_a_role_of_text_where_other_roles_have_parts_only() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %};{% endfor %}"
    )
    calling = [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}]
    assert render(source, USER, *calling) == "hi;;2;"
