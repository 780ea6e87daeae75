"""Templates see what llama-server shows them; whatever they do, the answer is a prompt or one clean error."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from llamaslot.base.errors import ConfigError, InvalidRequestError
from llamaslot.text import jinja_sandbox
from llamaslot.text.template import ChatTemplate
from tests.text.rendering import rendered

CHAT = """\
{%- for m in messages %}
    {{- '<' + m.role + '>' + m.content + '</>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}
"""

TOOLS = """\
{{- bos_token }}
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{ tool.function | tojson }}{% endfor %}
{%- endif %}
{%- for m in messages %}
    {{- '<' ~ m['role'] ~ '>' ~ m['content'] }}
    {%- for call in m.tool_calls or [] %}
        {{- '[' ~ call.id ~ ' ' ~ call.function.name }}
        {%- for key, value in call.function.arguments | items %}{{ ' ' ~ key ~ '=' ~ value }}{% endfor %}
        {{- ']' }}
    {%- endfor %}
{%- endfor %}
"""

USER = {"role": "user", "content": "hi"}
PARTS = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "ill"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}},
}


FUNCTION = {"name": "add", "description": "", "parameters": TOOL["function"]["parameters"]}


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, **{"bos_token": "<s>", "eos_token": "</s>"} | options)


def render(source: str, *messages: dict[str, Any], **options: Any) -> str:
    return rendered(template(source), messages, **options)


class TestMessages:
    """Messages of clients, in the form that templates read."""

    def test_a_conversation(self) -> None:
        messages = [{"role": "system", "content": "be"}, USER]

        assert render(CHAT, *messages) == "<system>be</><user>hi</><assistant>"
        assert render(CHAT, *messages, add_generation_prompt=False) == "<system>be</><user>hi</>"

    def test_the_request_is_left_as_it_was(self) -> None:
        messages = [
            {"role": "developer", "content": PARTS},
            USER,
            {"role": "assistant", "tool_calls": [CALL]},
            USER,
        ]
        before = json.dumps(messages)

        render(TOOLS, *messages)

        assert json.dumps(messages) == before

    @pytest.mark.parametrize(
        ("source", "prompt"),
        [
            ("{{ messages[0].content }}", "Wh\nill"),
            ("{% for p in messages[0].content %}{{ p.text }}.{% endfor %}", "Wh.ill."),
            (
                "{% set c = messages[0].content %}{% if c is string %}{{ c }}{% else %}"
                "{% for p in c %}{{ p.text }}{% endfor %}{% endif %}",
                "Whill",
            ),
            ("{% set c = messages[0].content %}{{ c if c is string else c | tojson }}", "Wh\nill"),
        ],
        ids=["text only", "parts only", "both", "parts only as JSON"],
    )
    def test_parts_come_as_the_template_reads_them(self, source: str, prompt: str) -> None:
        assert render(source, {"role": "user", "content": PARTS}) == prompt

    def test_text_becomes_a_part_for_a_template_that_reads_parts_only(self) -> None:
        source = "{% for p in messages[0].content %}{{ p.type }}:{{ p.text }}{% endfor %}"

        assert render(source, USER) == "text:hi"

    def test_developer_is_the_system(self) -> None:
        assert render(CHAT, {"role": "developer", "content": "be"}, USER).startswith("<system>be</>")
        assert "<developer>" in render("{# <|channel|> #}" + CHAT, {"role": "developer", "content": "be"}, USER)

    @pytest.mark.parametrize(
        "refusal", ["{{ raise_exception('no') }}", "{% continue %}"], ids=["refused", "ignored"]
    )
    def test_a_system_message_goes_into_the_next_where_there_is_no_such_role(self, refusal: str) -> None:
        source = (
            "{% for m in messages %}{% if m.role == 'system' %}" + refusal + "{% endif %}"
            "<{{ m.role }}>{{ m.content }}{% endfor %}"
        )
        system = {"role": "system", "content": "be"}

        assert render(source, system, {"role": "user", "content": PARTS}) == "<user>be\nWh\nill"
        assert render(source, system) == "<user>be"

    def test_null_content_is_empty(self) -> None:
        assert render(CHAT, USER, {"role": "assistant", "content": None}, USER).count("<assistant></>") == 1
        assert (
            render(CHAT, USER, {"role": "assistant", "reasoning_content": "?"}, USER).count("<assistant></>") == 1
        )
        for message in ({"role": "tool"}, {"role": "tool", "content": None}):
            assert "<tool>" in render(CHAT, USER, message, USER)

    def test_a_refusal_is_text(self) -> None:
        parts = [{"type": "refusal", "refusal": "No."}]
        assert "<assistant>No.</>" in render(CHAT, USER, {"role": "assistant", "content": parts}, USER)

    @pytest.mark.parametrize(
        ("message", "said"),
        [
            ({}, "'messages[1].role' must be text"),
            ({"role": 123}, "'messages[1].role' must be text"),
            ({"role": "user"}, "'messages[1]' must contain 'content'"),
            ({"role": "assistant"}, "'messages[1]' must contain 'content' or 'tool_calls'"),
            ({"role": "user", "content": None}, "'messages[1].content' must be text or a list of parts"),
            ({"role": "user", "content": 42}, "'messages[1].content' must be a list"),
            ({"role": "user", "content": ["x"]}, "'messages[1].content[0]' must be an object"),
            ({"role": "user", "content": [{"type": "text"}]}, "'messages[1].content[0].text' must be text"),
            (
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
                "'messages[1].content[0]' is of type 'image_url'",
            ),
            ({"role": "assistant", "tool_calls": 3}, "'messages[1].tool_calls' must be a list"),
            ({"role": "assistant", "tool_calls": [{"type": "x"}]}, "'messages[1].tool_calls[0]' must be an object"),
            (
                {"role": "assistant", "tool_calls": [{"type": "function", "function": {}}]},
                "'messages[1].tool_calls[0].function.name' must be text",
            ),
            ("hi", "'messages[1]' must be an object"),
        ],
    )
    def test_a_bad_message_is_named(self, message: Any, said: str) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            render(CHAT, USER, message)

        assert caught.value.message.startswith(said)
        assert caught.value.param == said.split("'")[1]

    def test_no_messages(self) -> None:
        with pytest.raises(InvalidRequestError, match="'messages' must not be empty"):
            render(CHAT)


class TestContinuing:
    """A last message of the assistant is the beginning of the reply."""

    @pytest.mark.parametrize(("content", "text"), [("Whill", "Whill"), (PARTS, "Wh\n\nill")])
    def test_the_text_follows_the_generation_prompt(self, content: Any, text: str) -> None:
        assert render(CHAT, USER, {"role": "assistant", "content": content}) == "<user>hi</><assistant>" + text

    def test_without_the_generation_prompt_it_is_a_message_like_others(self) -> None:
        prompt = render(CHAT, USER, {"role": "assistant", "content": "yes"}, add_generation_prompt=False)

        assert prompt == "<user>hi</><assistant>yes</>"

    def test_thoughts_that_the_generation_prompt_opens_are_closed(self) -> None:
        source = CHAT + "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
        begun = {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}

        assert render(source, USER, begun).endswith("<assistant><think>\nhm\n</think>\n\nYes")
        assert render(source, USER, begun | {"content": ""}).endswith("<assistant><think>\nhm")

    @pytest.mark.parametrize(
        ("messages", "said"),
        [
            ([USER, {"role": "assistant", "tool_calls": [CALL]}], "with tool calls cannot be continued"),
        ],
    )
    def test_what_cannot_be_continued(self, messages: list[dict[str, Any]], said: str) -> None:
        with pytest.raises(InvalidRequestError, match=said):
            render(CHAT, *messages)


class TestTools:
    """Descriptions, calls and results."""

    MESSAGES = (USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "2"})

    def test_arguments_are_an_object_where_the_template_wants_one(self) -> None:
        assert render(TOOLS, *self.MESSAGES) == "<s><user>hi<assistant>[call_1 add a=1 b=é]<tool>2"

    def test_arguments_are_text_where_the_template_joins_them(self) -> None:
        source = "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function.arguments + '!' }}{% endfor %}"

        assert render(source, *self.MESSAGES) == '{"a": 1, "b": "é"}!'

    @pytest.mark.parametrize(
        ("arguments", "written"),
        [
            ('{"a": 1, "b": "é', "a=1 b=é"),
            ('{"a": 1, "b', "a=1"),
            ("[2]", "arguments=[2]"),
            ("no JSON", "arguments=no JSON"),
            ("[" * 100_000, f"arguments={'[' * 100_000}"),
        ],
        ids=["cut text", "cut name", "list", "broken", "too deep"],
    )
    def test_arguments_that_are_no_json_object_are_one_for_the_template(self, arguments: str, written: str) -> None:
        call = CALL | {"function": {"name": "add", "arguments": arguments}}

        assert render(TOOLS, USER, {"role": "assistant", "tool_calls": [call]}, USER) == (
            f"<s><user>hi<assistant>[call_1 add {written}]<user>hi"
        )

    def test_no_arguments_are_an_empty_object(self) -> None:
        call = CALL | {"function": {"name": "add", "arguments": ""}}

        assert render(TOOLS, USER, {"role": "assistant", "tool_calls": [call]}, USER) == (
            "<s><user>hi<assistant>[call_1 add]<user>hi"
        )

    def test_tools_are_described(self) -> None:
        function = '{"name": "add", "description": "", "parameters": {"type": "object", "properties": {"a": {}}}}'

        assert render(TOOLS, USER, tools=[TOOL]) == f"<s><tools>{function}<user>hi"
        assert render(TOOLS, USER, tools=[]) == "<s><user>hi"

    @pytest.mark.parametrize(
        ("tool", "said"),
        [
            ({"type": "code"}, r"'tools\[0\]' must be an object of type 'function'"),
            ({"type": "function"}, r"'tools\[0\].function' must be an object"),
            ({"type": "function", "function": {}}, r"'tools\[0\].function.name' must be text"),
        ],
    )
    def test_a_bad_tool_is_named(self, tool: dict[str, Any], said: str) -> None:
        with pytest.raises(InvalidRequestError, match=said) as caught:
            render(TOOLS, USER, tools=[tool])

        assert caught.value.message.startswith(f"'{caught.value.param}' ")


class TestTokens:
    """BOS and EOS, which the tokenizer may add as well."""

    SOURCE = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"

    @pytest.mark.parametrize(
        ("options", "prompt"),
        [
            ({}, "<s>hi</s>"),
            ({"adds_bos": True}, "hi</s>"),
            ({"adds_bos": True, "adds_eos": True}, "hi"),
            ({"bos_token": "", "eos_token": "", "adds_bos": True, "adds_eos": True}, "hi"),
        ],
    )
    def test_what_the_tokenizer_adds_is_left_out(self, options: dict[str, Any], prompt: str) -> None:
        assert rendered(template(self.SOURCE, **options), [USER]) == prompt

    def test_only_one_bos_is_left_out(self) -> None:
        prompt = rendered(
            template("{{ bos_token }}{{ messages[0].content }}", adds_bos=True),
            [{"role": "user", "content": "<s>hi"}],
        )

        assert prompt == "<s>hi"


class TestLanguage:
    """Constructs of templates beyond plain Jinja."""

    @pytest.mark.parametrize(
        ("source", "prompt"),
        [
            ("{{ {'é': '<a & b>'} | tojson }}", '{"é": "<a & b>"}'),
            ("{{ {'b': 1, 'a': [2]} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": [\n    2\n  ]\n}'),
            ("{{ ('<' | safe) + '>' }}", "<>"),
            ("{{ messages[0].content | e }}|{{ '<' }}", "hi|<"),
            ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
            ("{% set n = namespace(x=1) %}{% for i in [2, 3] %}{% set n.x = n.x * i %}{% endfor %}{{ n.x }}", "6"),
            ("a {% generation %}{{ messages[0].content }}{% endgeneration %} b", "a hi b"),
            ("{%- macro m(x) -%}{{ x | upper }}{%- endmacro -%}{{ m('a') }}{{ 'a-b'.split('-')[-1] }}", "Ab"),
            ("{{ messages[::-1][0].get('name', 'nobody') }}", "nobody"),
            ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
            ("{{ enable_thinking }}", "True"),
            (
                "{{ strftime_now('%Y-%m-%d') }} {{ date_string }} {{ datetime }}",
                "2025-03-09 09 Mar 2025 Mar 09 2025",
            ),
        ],
    )
    def test_renders(self, source: str, prompt: str) -> None:
        assert rendered(template(source, now=lambda: datetime(2025, 3, 9)), [USER]) == prompt

    @pytest.mark.parametrize(
        ("source", "prompt"),
        [
            ("{% set l = [1] %}{% set _ = l.append(2) %}{{ l }} {{ l.pop(0) }} {{ l }}", "[1, 2] 1 [2]"),
            ("{% set l = [1] %}{% set _ = l.extend(l | map('string')) %}{{ l }}", "[1, '1']"),
            ("{% set d = {} %}{% set _ = d.update({'a': 1}) %}{{ d }}", "{'a': 1}"),
            ("{% set _ = messages.append({'role': 'x'}) %}{{ messages | map(attribute='role') | join }}", "userx"),
            ("{% set _ = messages[0].pop('content') %}{{ messages }}", "[{'role': 'user'}]"),
            ("{% set _ = tools[0].clear() %}{{ tools }}", "[{}]"),
            ("{% set _ = own.list.insert(0, 3) %}{{ own.list }}", "[3, 1]"),
            ("{{ messages | map(attribute='role') | tojson }}", '["user"]'),
            ("{{ {'b': 1}.items() | tojson }} {{ {'b': 1}.keys() | tojson }}", '[["b", 1]] ["b"]'),
            (
                "{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}",
                '{"a":"\\u00e9","b":1}',
            ),
            ("{{ 'a' + none_such + 'b' }}{{ none_such + 'c' }}{{ messages[7].content.x['y'] }}", "abc"),
            ("{{ functions }}", json.dumps([FUNCTION], indent=4)),
        ],
    )
    def test_renders_what_llama_server_renders_and_changes_only_copies(self, source: str, prompt: str) -> None:
        kwargs = {"own": {"list": [1]}}
        before = json.dumps([USER, TOOL, kwargs])

        for _ in range(2):
            assert render(source, USER, tools=[TOOL], kwargs=kwargs) == prompt
        assert json.dumps([USER, TOOL, kwargs]) == before

    def test_functions_of_the_caller_come_first(self) -> None:
        assert render("{{ functions }}", USER, tools=[TOOL], kwargs={"functions": "mine"}) == "mine"

    def test_further_variables(self) -> None:
        source = "{{ enable_thinking }} {{ date_string }} {{ messages | length }} {{ own }}"
        kwargs = {"enable_thinking": False, "date_string": "today", "messages": [], "own": 3}

        assert render(source, USER, kwargs=kwargs) == "False today 1 3"

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ("a\n{% if %}", "error in line 2 of the chat template: Expected an expression"),
            ("a\nb\n{% for m in messages %}", "error in line 3 of"),
            (
                "\n{{ 1 | no_such_filter }}",
                "error in line 2 of the chat template: No filter named 'no_such_filter'",
            ),
            ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "does not compile: SyntaxError"),
            ("{{ " + "(" * 20_000 + ")" * 20_000 + " }}", "does not compile: RecursionError"),
        ],
    )
    def test_a_source_that_is_no_template(self, source: str, said: str) -> None:
        with pytest.raises(ConfigError) as caught:
            template(source)

        assert f"the chat template {said}" in caught.value.message or said in caught.value.message


class TestFailing:
    """A template that cannot or must not do what it says."""

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ("{{ raise_exception('only cats') }}", "the chat template refuses the messages: only cats"),
            ("{% for m in 1 + none_such %}{% endfor %}", "the chat template refuses the messages: 'none_such' is"),
            ("{{ [].none_such() }}", "the chat template refuses the messages: 'list object' has no attribute"),
            ("{{ 1 / 0 }}", "the chat template fails on the messages: ZeroDivisionError: "),
            ("{{ messages[0].content + 1 }}", "the chat template fails on the messages: TypeError: "),
            (
                "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
                "the chat template fails on the messages: Recursion",
            ),
        ],
    )
    def test_is_the_requests_error(self, source: str, said: str) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            render(source, USER)

        assert caught.value.message.startswith(said)
        assert caught.value.param == "messages"

    @pytest.mark.parametrize(
        "source",
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ ''['__cl' + 'ass__']['__mro__'] }}",
            "{{ (''|attr('__class__')).__mro__ }}",
            "{{ raise_exception.__globals__['json'] }}",
            "{{ strftime_now.__self__.__class__.__base__ }}",
            "{{ '{0.__class__.__mro__}'.format('') }}",
            "{{ ('{0.__class__.__mro__}'.format)('') }}",
            "{{ self.__init__.__globals__ }}",
            "{{ cycler.__init__.__globals__.os.system('id') }}",
            "{% include '/etc/hostname' %}",
            "{% import 'os' as os %}{{ os }}",
            "{{ ''.__class__.none_such }}",
            "{{ ''.__class__['none_such'] }}",
            "{{ 'text' + ''.__class__ }}",
            "{{ ''.__class__ + 'text' }}",
            "{{ [].__class__.append }}",
            "{{ range(999999999) | list }}",
        ],
    )
    def test_there_is_no_way_out_of_the_sandbox(self, source: str) -> None:
        with pytest.raises(InvalidRequestError, match=r"the chat template (refuses|fails)"):
            render(source, USER)


def test_a_prompt_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamaslot.text.template.MAX_CHARACTERS", 100)
    source = "{{ messages[0].content }}{% for i in range(messages[0].content | length) %}!{% endfor %}"
    chat = ChatTemplate(source, bos_token="", eos_token="")
    assert chat.render([{"role": "user", "content": "x" * 50}])[0].text == "x" * 50 + "!" * 50
    with pytest.raises(InvalidRequestError, match="longer than 100 characters"):
        chat.render([{"role": "user", "content": "x" * 51}])


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "{% set l = [1] %}{% for x in l %}{% set _ = l.append(x) %}{% endfor %}",
        "{% set l = [1] %}{% for x in range(99) %}{% set _ = l.extend(l) %}{% endfor %}",
        "{% set l = [1] %}{% for x in range(99) %}{% set _ = l.extend(l | map('string')) %}{% endfor %}",
        "{% set l = [[]] %}{% for x in l %}{% set _ = l.insert(0, x) if x else l.extend([x] * 4096) %}{% endfor %}",
        "{% set d = {} %}{% for a in range(9999) %}{% for b in range(9999) %}{% set _ = d.update({(a, b): 1}) %}"
        "{% endfor %}{% endfor %}",
    ],
)
def test_a_list_or_dict_without_end_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert jinja_sandbox.MAX_ITEMS == 2**20
    monkeypatch.setattr(jinja_sandbox, "MAX_ITEMS", 5000)
    with pytest.raises(InvalidRequestError, match="has more than 5000 items"):
        render(source, USER)
