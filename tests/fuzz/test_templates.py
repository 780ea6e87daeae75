"""Mutated and hostile chat templates are refused, or render; they read nothing of the server."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

import llamaslot.text
from llamaslot.base.commands import TextPart
from llamaslot.base.errors import ConfigError, InvalidRequestError
from llamaslot.text.template import ChatTemplate
from tests.conftest import LONG, new_seed

N = 10_000 if LONG else 50
FOLDERS = (Path(llamaslot.text.__file__).parent / "templates", Path(__file__).parent.parent / "text" / "templates")
SOURCES = [path.read_text() for folder in FOLDERS for path in sorted(folder.glob("*.jinja"))]
CONTROL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")
TOOL: Any = {"type": "function", "function": {"name": "f", "description": "?", "parameters": {"type": "object"}}}
CALL: Any = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello <|im_end|>"}],
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "{{ 7 * 7 }}"}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "call00001"},
        {"role": "assistant", "content": "<think>"},
    ],
]
INSERTED = (
    "{{ messages }}",
    "{{ tools }}",
    "{{ loop }}",
    "{{ self }}",
    "{% break %}",
    "{% continue %}",
    "{% generation %}",
    "{% endfor %}",
    "{% set messages = none %}",
    "{% set x = messages[99] %}",
    "{{ x.y.z }}",
    "{{ messages[0].__class__ }}",
    "{% if true %}",
    "{% endif %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% block a %}",
    "{# ",
    "{% raw %}",
    "{{ raise_exception('no') }}",
    "{{ strftime_now('%Y') }}",
    "{{ strftime_now(5) }}",
    "{{ messages | tojson(indent='x') }}",
    "{{ 1 / 0 }}",
    "{{ 'a' | int(base=99) }}",
    "{{ [] | first }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "\0",
    "\ud800",
)
HOSTILE = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.environ }}",
    "{{ self._TemplateReference__context }}{{ self.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ namespace.__init__.__globals__['sys'].modules }}",
    "{{ strftime_now.__self__.__class__ }}{{ raise_exception.__globals__ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "{{ '%s' | format(raise_exception.__code__) }}",
    "{{ ().__class__.__bases__[0] }}{{ messages | map(attribute='__class__') | list }}",
    "{{ messages | attr('__class__') }}{{ joiner | attr('__init__') | attr('__globals__') }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__ }}",
    "{{ messages.append(1) }}{{ messages.clear() }}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{% for i in range(1000000000) %}{% endfor %}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% if true %}" * 300 + "x" + "{% endif %}" * 300,
    "{{ " + " + ".join(["1"] * 5000) + " }}",
)


def mutated(source: str, chance: random.Random) -> str:
    """A template whose tags, operators, names or characters were removed, repeated, exchanged or replaced."""
    for _ in range(chance.choice((1, 1, 2, 6))):
        parts = re.split(r"(\{[%{#].*?[%}#]\}|\s+|\W)", source, flags=re.DOTALL)
        i, j = chance.randrange(len(parts)), chance.randrange(len(parts))
        match chance.randrange(6):
            case 0:
                parts[i] = ""
            case 1:
                parts[i], parts[j] = parts[j], parts[i]
            case 2:
                parts[i] = parts[j]
            case 3:
                parts.insert(i, chance.choice(INSERTED))
            case 4:
                del parts[i:]
            case _:
                at = chance.randrange(len(parts[i]) + 1)
                parts[i] = parts[i][:at] + chance.choice("{}%#'\"|.[](),:-~=!<> aé0") + parts[i][at + 1 :]
        source = "".join(parts)
    return source


def rendered(source: str) -> list[str]:
    """The prompts that a template makes, fewer if it refuses some; any other error fails the test."""
    try:
        template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", adds_bos=True, control_tokens=CONTROL)
    except ConfigError:
        return []
    prompts = []
    for conversation in CONVERSATIONS:
        try:
            parts = template.render(conversation, tools=[TOOL], kwargs={"enable_thinking": False})
        except InvalidRequestError:
            continue
        assert all(isinstance(part, TextPart) for part in parts)
        prompts.append("".join(part.text for part in parts))
    return prompts


def test_a_mutated_template_is_refused_or_renders() -> None:
    seed = new_seed()
    print(f"seed {seed}")
    chance = random.Random(seed)
    n_rendered = 0
    for _ in range(N):
        source = mutated(chance.choice(SOURCES), chance)
        try:
            n_rendered += bool(rendered(source))
        except Exception as error:
            raise AssertionError(f"{error!r} for the template {source!r}") from error
    assert N / 10 < n_rendered < N


@pytest.mark.parametrize("source", HOSTILE, ids=lambda source: source[:40])
def test_a_hostile_template_sees_nothing_of_the_server(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "do-not-tell")
    for prompt in rendered(source):
        for word in ("do-not-tell", "<class", "<module", "<function", "<code", "root:", "uid="):
            assert word not in prompt
