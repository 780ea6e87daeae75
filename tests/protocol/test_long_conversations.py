"""Conversations of many messages, and requests of many tools, are read in linear time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from llamaslot.base.errors import InvalidRequestError
from llamaslot.protocol.anthropic import conversation_of
from llamaslot.protocol.responses import ItemReader, Toolbox
from llamaslot.text.conversation import parsed_arguments, volatile_pattern, without_volatile
from llamaslot.text.message_order import PREAMBLE, MessageOrder, Preambles, with_accepted_roles
from llamaslot.text.template import ChatTemplate

N = 100_000
NO_RESULTS = "{% for m in messages %}{% if m.role == 'user' %}user: {{ m.content }}\n{% endif %}{% endfor %}"


def users() -> Any:
    (message,) = conversation_of(None, [{"role": "user", "content": "x"}] * N)
    return message["content"]


def assistants() -> Any:
    block = {"type": "text", "text": "some words"}
    (message,) = conversation_of(None, [{"role": "assistant", "content": [block]}] * N)
    return message["content"].split("\n")


def items_of(role: str) -> Any:
    turns = ItemReader()
    for _ in range(N):
        turns.add({"role": role, "content": "some words"}, "input")
    (message,) = with_accepted_roles(turns.messages(), later_system=True, user_twice=False)
    return message["content"].split("\n\n")


def reminders() -> Any:
    result = {"role": "tool", "tool_call_id": "a", "content": "some words"}
    reminder = {"role": "system", "content": "some words"}
    (message,) = with_accepted_roles([result, *[reminder] * (N - 1)], later_system=False, user_twice=False)
    return message["content"].split("\n\n")


def tools() -> Any:
    toolbox = Toolbox([{"type": "function", "name": f"f{i}"} for i in range(N)])
    with pytest.raises(InvalidRequestError, match="two tools called 'f5'"):
        Toolbox([*toolbox.shown, {"type": "function", "name": "f5"}])
    return toolbox.functions


def headers() -> Any:
    """Like those with which the system prompts of Claude Code begin."""
    system = {"role": "system", "content": "x-anthropic-billing-header: cc_version=2.1.197.8a5;\nsome words"}
    volatile = volatile_pattern("claude-code")
    assert volatile is not None
    return without_volatile(volatile, [system] * N)


def calls_of(form: MessageOrder) -> Any:
    """Results in another order than that of their calls."""
    function = {"name": "f", "arguments": "{}"}
    calls = [{"type": "function", "id": f"call {i}", "function": function} for i in range(N)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "some words"} for call in reversed(calls)]
    found = form.fitted([{"role": "assistant", "content": "", "tool_calls": calls}, *results])
    return [each for each in found if each["role"] == "tool"]


def replies(*, merged: bool) -> Any:
    reply, question = {"role": "assistant", "content": "some words"}, {"role": "user", "content": "?"}
    if merged:
        _, message, _ = MessageOrder(repeats=False).alternated([question, *[reply] * N, question])
    else:
        _, message = ChatTemplate(NO_RESULTS, bos_token="", eos_token="").prepared([question, *[reply] * N])
    return message["content"].split("\n\n")


def texts_beside_calls() -> Any:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": "", PREAMBLE: "some words", "tool_calls": [call]}] * N
    preambles = Preambles("<call>", messages)
    names = [each["tool_calls"][0]["function"]["name"] for each in preambles.marked(messages)]
    prompt = preambles.written("".join(f"<call>{name}</call>" for name in names))
    assert prompt == "some words\n<call>f</call>" * N
    return prompt.split("some words")[1:]


def arguments() -> Any:
    texts = parsed_arguments('{"a": ["b", ' + '{"c": "d"}, ' * N)["a"][1:]
    assert parsed_arguments("{" + '"a": {' * N) == {"arguments": "{" + '"a": {' * N}, "nested too deep"
    return texts


def results() -> Any:
    template = ChatTemplate(NO_RESULTS, bos_token="", eos_token="")
    question = {"role": "user", "content": "?"}
    result = {"role": "tool", "tool_call_id": "a", "content": "some words"}
    (part,) = template.render([question, *[result] * N])
    assert part.text.count("user: ") == 2
    return part.text.split("tool_response")[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "read",
    [
        *(users, assistants, lambda: items_of("user"), lambda: items_of("system"), reminders, headers, tools),
        *(
            results,
            arguments,
            lambda: calls_of(MessageOrder(parallel=False)),
            lambda: calls_of(MessageOrder(ids="[A-Za-z0-9]{9}")),
        ),
        lambda: calls_of(MessageOrder(orphans_after=frozenset())),
        *(lambda: replies(merged=True), lambda: replies(merged=False), texts_beside_calls),
    ],
)
def test_long_requests_are_read_in_linear_time(read: Callable[[], Any]) -> None:
    started = time.process_time()
    assert len(read()) == N
    assert time.process_time() - started < 6, "copying all that was read for each further message takes minutes"
