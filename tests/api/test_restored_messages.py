"""Messages that come back: which are restored, which are not, and with what tokens the prompt then continues."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from llamaslot.base.commands import Generate
from llamaslot.base.events import Finished
from llamaslot.base.tokens import Tokens, ids_of
from llamaslot.formats.recognition import format_of
from llamaslot.prompts.token_memory import TokenMemory
from llamaslot.protocol.replies import meaning
from tests.conftest import LONG
from tests.fake_backend import BOS, FakeBackend, FakeVocab
from tests.text.test_message_order import SOURCES

CHAT = "/v1/chat/completions"
THINK = "<think>"
TEMPLATE = """
{%- set ns = namespace(last=-1) %}
{%- for t in tools %}{{ t.function.name }}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '[assistant]' }}
{%- if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- (c.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '</s>\n' }}
{%- else %}{{ '[' + m.role + ']' + m.content + '</s>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' + ('' if enable_thinking else '<think></think>') }}{% endif %}
"""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
QUESTION = {"role": "user", "content": "What is there?"}
CALL = '<tool_call>{"name" : "look","arguments": {"far":true, "n":1,"at" :"é"} }</tool_call>'
TWO_CALLS = CALL + '<tool_call>{"arguments":{}, "name":"look"}</tool_call>'
REASONED = "<think>I should look. </think>\n" + CALL
END = 257


class Chats:
    """A server whose k-th reply is the k-th text, and the prompts that its engine got."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.vocab = FakeVocab()
        self.prompts: list[list[int]] = []
        self.generated: list[list[int]] = []
        service = server.service
        send, receive = service._send, server.local._receive

        def sent(command: Any) -> None:
            if isinstance(command, Generate):
                self.prompts.append(ids_of(command.prompt.packed_tokens))
            send(command)

        def received(events: Sequence[Any]) -> None:
            for event in events:
                if isinstance(event, Finished) and event.generated is not None:
                    self.generated.append(ids_of(event.generated.packed_tokens))
            receive(events)

        service.connect(sent)
        server.local.engine._on_events = received

    @property
    def text(self) -> str:
        """The last prompt."""
        return self.vocab.detokenize(self.prompts[-1]).decode()

    async def ask(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """The reply to a conversation."""
        body = {"messages": list(messages), "tools": [TOOL], "temperature": 0, **fields}
        return await self.server.ok(CHAT, body)


async def chats(
    start: Any,
    *texts: str,
    n_ctx: int = 4096,
    template: str = TEMPLATE,
    warm_ahead: int = 0,
    n_adapters: int = 0,
    invocation: bytes = b"",
    **settings: Any,
) -> Chats:
    """A server that replies with texts, and then with what the fake model likes.

    The choice at the end of each text has all before it computed.
    """
    grammars = [f'start: {json.dumps(text)} " "?' for text in texts] + ["start: /x{1,9}/"] * (len(texts) == 1)
    backend = FakeBackend(n_ctx=n_ctx, n_slots=2, n_reserved=2, n_adapters=n_adapters, invocation=invocation)
    return Chats(
        await start(
            backend=backend,
            template=template,
            warm_ahead=warm_ahead,
            engine={"grammars": grammars, **settings},
            metrics=True,
        )
    )


def reply_of(reply: dict[str, Any]) -> dict[str, Any]:
    return reply["choices"][0]["message"]


def results(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": "a wall"} for call in message["tool_calls"]]


def with_call(message: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A message of which the first call is changed."""
    call, *others = message["tool_calls"]
    function = {**call["function"], **{k: v for k, v in changes.items() if k != "id"}}
    return {**message, "tool_calls": [{**call, "id": changes.get("id", call["id"]), "function": function}, *others]}


def without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


async def test_a_prompt_continues_with_the_tokens_of_a_call(start: Any) -> None:
    chat = await chats(start, REASONED, "It is a wall.")
    message = reply_of(await chat.ask(QUESTION))
    assert message["reasoning_content"] == "I should look."
    first, generated = chat.prompts[-1], chat.generated[-1]
    assert generated[-1] == END
    second = await chat.ask(QUESTION, without_reasoning(message), *results(message))
    n_restored = len(generated) - 1
    assert chat.prompts[-1][: len(first) + n_restored] == first + generated[:-1]
    assert (
        chat.text[len(chat.vocab.detokenize(first + generated[:-1]).decode()) :]
        == "</s>\n[tool]a wall</s>\n[assistant]"
    )
    cache = second["cache"]
    assert cache["restored_tokens"] == n_restored
    assert cache["computed"] <= len(chat.prompts[-1]) - len(first) - n_restored + 1
    assert second["usage"]["prompt_tokens"] == len(chat.prompts[-1])
    for _ in range(500):
        _, listing = await chat.server.get("/cache")
        if listing["messages"]["known"] == 2:
            break
        # The last reply is remembered while its client gets it.
        await asyncio.sleep(0.01)
    assert listing["messages"]["known"] == 2
    assert listing["messages"]["bytes"] > 0
    assert (listing["requests"]["restored"], listing["prompt_tokens"]["restored"]) == (1, n_restored)
    async with chat.server.session.get(chat.server.url + "/metrics") as response:
        metrics = await response.text()
    assert f"llamaslot_restored_tokens_total {n_restored}.0" in metrics


async def test_a_prompt_goes_on_at_the_end_of_turn_behind_an_id_that_follows_the_arguments(start: Any) -> None:
    template = TEMPLATE.replace("+ '}\n</tool", """+ ', "id": "' + c.id + '"}\n</tool""")
    chat = await chats(start, CALL, "x", TWO_CALLS, "x", template=template)
    messages: list[dict[str, Any]] = [QUESTION]
    for _ in range(2):
        message = reply_of(await chat.ask(*messages))
        messages += [message, *results(message)]
        before = chat.vocab.detokenize(chat.prompts[-1] + chat.generated[-1][:-1]).decode()
        await chat.ask(*messages, max_tokens=0)
        told = "[tool]a wall</s>\n" * len(message["tool_calls"])
        assert chat.text == f"{before}</s>\n{told}[assistant]"


async def test_a_prompt_goes_on_at_the_end_of_turn_behind_a_list_of_calls(start: Any) -> None:
    # The template writes no calls: they are written as a list if there are several.
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>\n{% endfor %}[assistant]"
    calls = ", ".join('{"name":"look",  "arguments":{}}' for _ in range(2))
    chat = await chats(start, f"[{calls}]", "x", template=template)
    message = reply_of(await chat.ask(QUESTION))
    assert len(message["tool_calls"]) == 2
    before = chat.vocab.detokenize(chat.prompts[-1] + chat.generated[-1][:-1]).decode()
    assert (await chat.ask(QUESTION, message, *results(message)))["cache"]["restored_tokens"] > 0
    assert chat.text.startswith(f"{before}</s>\n[")


async def test_a_prompt_goes_on_behind_calls_with_and_without_arguments_that_no_token_ends(start: Any) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>"
        "{{ c.function.name }}\n{% for key, value in c.function.arguments.items() %}<arg_key>{{ key }}</arg_key>\n"
        "<arg_value>{{ value }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endfor %}<|assistant|>"
    )
    calls = (
        "<tool_call>look\n</tool_call>",
        "<tool_call>look<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>",
    )
    for text in (*calls, "".join(calls), "".join(reversed(calls))):
        chat = await chats(start, text, "x", template=template)
        message = reply_of(await chat.ask(QUESTION))
        before = chat.vocab.detokenize(chat.prompts[-1] + chat.generated[-1][:-1]).decode()
        await chat.ask(QUESTION, message, *results(message))
        told = "<|tool|>a wall" * len(message["tool_calls"])
        assert chat.text == f"{before}{told}<|assistant|>"


SAME = {
    "all as it was": lambda m: m,
    "without its reasoning": without_reasoning,
    "content of null": lambda m: {**m, "content": None},
    "empty content": lambda m: {**m, "content": ""},
    "content of spaces": lambda m: {**m, "content": " \n"},
    "no content": lambda m: {key: value for key, value in m.items() if key != "content"},
    "an empty part": lambda m: {**m, "content": [{"type": "text", "text": ""}]},
    "arguments in another order": lambda m: with_call(m, arguments='{"at":"\\u00e9","n":1,"far":true}'),
    "an integer as a float": lambda m: with_call(m, arguments='{"at": "é", "n": 1.0, "far": true}'),
    "arguments as an object": lambda m: with_call(m, arguments={"n": 1, "far": True, "at": "é"}),
}
CHANGED = {
    "another content": lambda m: {**m, "content": "Hm."},
    "another reasoning": lambda m: {**m, "reasoning_content": "I should not look."},
    "another argument": lambda m: with_call(m, arguments='{"at": "é", "n": 1, "far": true, "more": null}'),
    "another value": lambda m: with_call(m, arguments='{"at": "é", "n": 2, "far": true}'),
    "true for 1": lambda m: with_call(m, arguments='{"at": "é", "n": true, "far": true}'),
    "a text for a number": lambda m: with_call(m, arguments='{"at": "é", "n": "1", "far": true}'),
    "another name": lambda m: with_call(m, name="see"),
    "another id": lambda m: with_call(m, id="call_2"),
    "a call more": lambda m: {**m, "tool_calls": [*m["tool_calls"], {**m["tool_calls"][0], "id": "call_2"}]},
    "no calls": lambda m: {"role": "assistant", "content": "Hm."},
}


@pytest.mark.parametrize("change", SAME)
async def test_an_unchanged_message_is_restored(start: Any, change: str) -> None:
    chat = await chats(start, REASONED, "x")
    message = reply_of(await chat.ask(QUESTION))
    reply = await chat.ask(QUESTION, SAME[change](message), *results(message))
    assert reply["cache"]["restored_tokens"] == len(chat.generated[0]) - 1


@pytest.mark.parametrize("change", CHANGED)
async def test_a_changed_message_is_rendered(start: Any, change: str) -> None:
    chat = await chats(start, REASONED, "x", "x")
    message = reply_of(await chat.ask(QUESTION))
    changed = CHANGED[change](message)
    reply = await chat.ask(QUESTION, changed, *(results(message) if "tool_calls" in changed else [QUESTION]))
    assert reply["cache"]["restored_tokens"] == 0
    assert '{"name" :' not in chat.text
    plain = (
        await chat.server.ok(
            "/apply-template",
            {
                "messages": [QUESTION, changed, *(results(message) if "tool_calls" in changed else [QUESTION])],
                "tools": [TOOL],
            },
        )
    )["prompt"]
    assert chat.text == "<s>" + plain


async def test_a_message_in_another_conversation_is_rendered(start: Any) -> None:
    chat = await chats(start, REASONED, "x", "x", "x", "x", "x", "x")
    message = reply_of(await chat.ask(QUESTION))
    rest = message, *results(message)
    other = {"role": "user", "content": "What is here?"}
    for messages, fields in (
        ([other, *rest], {}),
        ([QUESTION, other, *rest], {}),
        ([{"role": "system", "content": "Look."}, QUESTION, *rest], {}),
        ([QUESTION, *rest], {"cache_salt": "mine"}),
        ([QUESTION, *rest], {"cache_prompt": False}),
        ([QUESTION, *rest], {"chat_template_kwargs": {"style": "short"}}),
    ):
        assert (await chat.ask(*messages, **fields))["cache"]["restored_tokens"] == 0, (messages, fields)
    assert (await chat.ask(QUESTION, *rest))["cache"]["restored_tokens"] > 0


async def test_a_message_behind_another_text_is_rendered(start: Any) -> None:
    chat = await chats(start, CALL, "x", "x")
    message = reply_of(await chat.ask(QUESTION))
    other = {"type": "function", "function": {"name": "listen", "parameters": {"type": "object", "properties": {}}}}
    rest = QUESTION, message, *results(message)
    assert (await chat.ask(*rest, tools=[TOOL, other]))["cache"]["restored_tokens"] == 0
    assert (await chat.ask(*rest))["cache"]["restored_tokens"] > 0


async def test_a_message_is_found_though_one_before_it_was_remembered_later(start: Any) -> None:
    chat = await chats(start, "A wall.", CALL, "A wall.", "x", "x")
    told = reply_of(await chat.ask(QUESTION, cache_salt="another"))
    message = reply_of(await chat.ask(QUESTION, told, QUESTION))
    again = reply_of(await chat.ask(QUESTION))
    assert again["content"].strip() == told["content"].strip()
    reply = await chat.ask(QUESTION, told, QUESTION, message, *results(message))
    assert reply["cache"]["restored_tokens"] == len(chat.generated[1]) - 1


async def test_a_reply_without_cache_prompt_is_not_remembered(start: Any) -> None:
    chat = await chats(start, CALL, "x")
    message = reply_of(await chat.ask(QUESTION, cache_prompt=False))
    assert (await chat.ask(QUESTION, message, *results(message)))["cache"]["restored_tokens"] == 0


async def test_messages_are_found_only_in_their_namespace(start: Any) -> None:
    chat = await chats(start, REASONED, REASONED, "x", "x")
    mine = reply_of(await chat.ask(QUESTION, cache_salt="mine"))
    yours = reply_of(await chat.ask(QUESTION, cache_salt="yours"))
    assert (await chat.ask(QUESTION, mine, *results(mine), cache_salt="yours"))["cache"]["restored_tokens"] == 0
    assert (await chat.ask(QUESTION, yours, *results(yours), cache_salt="yours"))["cache"]["restored_tokens"] > 0


async def test_messages_are_found_only_with_the_key_that_got_them(start: Any) -> None:
    server = await start(
        backend=FakeBackend(n_ctx=4096, n_slots=2, n_reserved=2),
        template=TEMPLATE,
        engine={"grammars": [f"start: {json.dumps(CALL)}", *['start: "x"'] * 2]},
        api_keys=("one", "two"),
        cache_salt_from_api_key=True,
    )

    async def ask(key: str, *messages: dict[str, Any]) -> dict[str, Any]:
        body = {"messages": messages, "tools": [TOOL]}
        status, reply = await server.post(CHAT, body, headers={"Authorization": f"Bearer {key}"})
        assert status == 200, reply
        return dict(reply)

    message = reply_of(await ask("one", QUESTION))
    told = QUESTION, message, *results(message)
    assert (await ask("two", *told))["cache"]["restored_tokens"] == 0
    assert (await ask("one", *told))["cache"]["restored_tokens"] > 0


async def test_restoring_can_be_turned_off(start: Any) -> None:
    chat = await chats(start, CALL, "x", restore_messages=False)
    message = reply_of(await chat.ask(QUESTION))
    assert (await chat.ask(QUESTION, message, *results(message)))["cache"]["restored_tokens"] == 0
    assert (await chat.server.get("/cache"))[1]["messages"]["known"] == 0


@pytest.mark.parametrize("is_interleaved", [False, True])
async def test_parallel_calls_that_the_client_divides_are_one_message(start: Any, is_interleaved: bool) -> None:
    chat = await chats(start, "I look. " + TWO_CALLS, "x", "x")
    message = reply_of(await chat.ask(QUESTION))
    one, two = message["tool_calls"]
    parts = [
        {"role": "assistant", "content": message["content"]},
        *({"role": "assistant", "content": None, "tool_calls": [call]} for call in (one, two)),
    ]
    first, second = results(message)
    divided = [*parts[:2], first, parts[2], second] if is_interleaved else [*parts, first, second]
    n_restored = len(chat.generated[0]) - 1
    third = await chat.ask(QUESTION, *divided)
    assert third["cache"]["restored_tokens"] == n_restored
    text = chat.text
    await chat.ask(QUESTION, message, first, second)
    assert chat.text == text
    fourth = await chat.ask(QUESTION, *divided, reply_of(third), QUESTION)
    assert fourth["cache"]["restored_tokens"] == n_restored + len(chat.generated[1]) - 1


async def test_a_call_that_the_client_did_not_get_is_not_restored(start: Any) -> None:
    chat = await chats(start, TWO_CALLS, "x")
    message = reply_of(await chat.ask(QUESTION, parallel_tool_calls=False))
    assert len(message["tool_calls"]) == 1
    assert (await chat.ask(QUESTION, message, *results(message)))["cache"]["restored_tokens"] == 0
    assert chat.text.count("<tool_call>") == 1


async def test_a_message_to_another_recipient_that_the_client_did_not_get_is_not_restored(start: Any) -> None:
    # gpt-oss writes messages to tools that were not offered.
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}{% for c in m.tool_calls or [] %} to=functions."
        "{{ c.function.name }}<|channel|>commentary<|message|>{{ c.function.arguments | tojson }}{% else %}"
        "<|message|>{{ m.content }}{% endfor %}<|end|>{% endfor %}<|start|>assistant"
    )
    call = " to=functions.look<|channel|>commentary<|message|>{ }"
    to_browser = f" to=browser.open<|message|>it<|end|><|start|>assistant{call}"
    for text in (call, to_browser):
        chat = await chats(start, text, "x", template=template)
        message = reply_of(await chat.ask(QUESTION))
        assert len(message["tool_calls"]) == 1
        reply = await chat.ask(QUESTION, message, *results(message))
        assert (reply["cache"]["restored_tokens"] > 0) is (text == call)
        assert "browser" not in chat.text


async def test_a_stop_string_is_not_restored(start: Any) -> None:
    chat = await chats(start, "One. Two. Three.", "x", "x")
    message = reply_of(await chat.ask(QUESTION, stop=[" Three"]))
    assert message["content"] == "One. Two."
    reply = await chat.ask(QUESTION, message, QUESTION)
    assert reply["cache"]["restored_tokens"] == len("One. Two.")
    assert "Three" not in chat.text


async def test_a_reply_that_was_cut_is_restored_as_far_as_it_was_sent(start: Any) -> None:
    chat = await chats(start, "One. Two. Three.", CALL, "x", "x")
    message = reply_of(await chat.ask(QUESTION, max_tokens=8))
    assert message["content"] == "One. Two"
    called = await chat.ask(QUESTION, message, QUESTION, max_tokens=60)
    assert called["cache"]["restored_tokens"] == 8
    assert "One. Two</s>" in chat.text
    # Its arguments are no JSON: it is rendered, which this template does with a line break before it.
    cut = reply_of(called)
    assert cut["tool_calls"]
    after = await chat.ask(QUESTION, message, QUESTION, cut, *results(cut))
    assert after["cache"]["restored_tokens"] == 8
    assert after["cache"]["cells"] == called["usage"]["prompt_tokens"]


@pytest.mark.parametrize("cut", [{"max_tokens": len(CALL.encode()) - 14}, {"stop": ["</tool_call>"]}], ids=list)
async def test_a_call_that_was_cut_behind_its_arguments_is_rendered(start: Any, cut: dict[str, Any]) -> None:
    chat = await chats(start, CALL, "x")
    message = reply_of(await chat.ask(QUESTION, **cut))
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"far": True, "n": 1, "at": "é"}
    assert (await chat.ask(QUESTION, message, *results(message)))["cache"]["restored_tokens"] == 0
    assert "}\n</tool_call></s>" in chat.text


async def test_a_cancelled_reply_is_not_restored(start: Any) -> None:
    backend = FakeBackend(n_ctx=2**15, n_slots=1)
    server = await start(backend=backend, template=TEMPLATE)
    body = {
        "messages": [QUESTION],
        "stream": True,
        "max_tokens": 10_000,
        "temperature": 0,
        "ignore_eos": True,
    }
    async with server.session.post(server.url + CHAT, json=body) as response:
        received = ""
        async for line in response.content:
            delta = json.loads(line[6:])["choices"][0]["delta"] if line.startswith(b"data: {") else {}
            received += delta.get("content") or ""
            if len(received) > 20:
                break
    await server.idle()
    # The prompt worker comes to it behind what it would remember of the reply.
    await server.ok(CHAT, {"messages": [QUESTION], "max_tokens": 1, "cache_prompt": False})
    assert (await server.get("/cache"))[1]["messages"]["known"] == 0
    reply = await server.ok(
        CHAT, {"messages": [QUESTION, {"role": "assistant", "content": received}, QUESTION], "max_tokens": 1}
    )
    assert reply["cache"]["restored_tokens"] == 0


async def test_reasoning_of_earlier_turns_stays_stripped(start: Any) -> None:
    chat = await chats(start, REASONED, "<think>A wall.</think>It is a wall.", REASONED, "x", "x")
    called = reply_of(await chat.ask(QUESTION))
    told = reply_of(await chat.ask(QUESTION, called, *results(called)))
    assert "I should look." in chat.text
    turn = QUESTION, called, *results(called), told
    reply = await chat.ask(*turn, QUESTION)
    assert reply["cache"]["restored_tokens"] == 0
    assert "I should look." not in chat.text
    assert "<think>" not in chat.text
    again = reply_of(reply)
    last = await chat.ask(*turn, QUESTION, without_reasoning(again), *results(again))
    assert last["cache"]["restored_tokens"] == len(chat.generated[2]) - 1
    assert chat.text.count("I should look.") == 1


async def test_empty_reasoning_in_the_prompt_is_stripped_like_other_reasoning(start: Any) -> None:
    chat = await chats(start, CALL, "A wall.", "x", "x")
    field = {"chat_template_kwargs": {"enable_thinking": False}}
    called = reply_of(await chat.ask(QUESTION, **field))
    told = await chat.ask(QUESTION, called, *results(called), **field)
    assert told["cache"]["restored_tokens"] == len(chat.generated[0]) - 1
    assert chat.text.count("<think></think>") == 2
    later = await chat.ask(QUESTION, called, *results(called), reply_of(told), QUESTION, **field)
    assert later["cache"]["restored_tokens"] == 0
    assert chat.text.count("<think></think>") == 1


async def test_a_reply_that_did_not_reason_is_restored_in_later_turns(start: Any) -> None:
    chat = await chats(start, CALL, "It is  a wall.", "x", "x")
    called = reply_of(await chat.ask(QUESTION))
    told = reply_of(await chat.ask(QUESTION, called, *results(called)))
    reply = await chat.ask(QUESTION, called, *results(called), told, QUESTION)
    assert reply["cache"]["restored_tokens"] == sum(len(each) - 1 for each in chat.generated[:2])


@pytest.mark.parametrize("field", [{}, {"continue_final_message": True}], ids=["by default", "asked for"])
async def test_a_reply_is_continued_with_its_tokens_and_is_one_message(start: Any, field: dict[str, Any]) -> None:
    chat = await chats(start, "<think>Hm.</think>One. Two. Three.", " and a half.", "x", "x")
    first = reply_of(await chat.ask(QUESTION, max_tokens=25))
    assert first["content"] == "One. Tw"
    reply = await chat.ask(QUESTION, without_reasoning(first), **field)
    n_first = len(chat.generated[0])
    assert reply["cache"]["restored_tokens"] == n_first
    assert chat.text.endswith("[assistant]<think>Hm.</think>One. Tw")
    whole = {"role": "assistant", "content": first["content"] + reply_of(reply)["content"]}
    assert whole["content"].strip() == "One. Tw and a half."
    kept = await chat.ask(QUESTION, whole)
    assert kept["cache"]["restored_tokens"] == n_first + len(chat.generated[1]) - 1
    assert chat.prompts[-1] == chat.prompts[0] + chat.generated[0] + chat.generated[1][:-1]


@pytest.mark.slow
async def test_a_reply_behind_another_text_or_with_another_reasoning_is_continued_as_it_is_rendered(
    start: Any,
) -> None:
    chat = await chats(start, "<think>Hm.</think>One. Two. Three.", "x", "x", "x")
    first = reply_of(await chat.ask(QUESTION, max_tokens=25))
    other = {"type": "function", "function": {"name": "hear", "parameters": {"type": "object", "properties": {}}}}
    for message, tool in ((first, other), ({**first, "reasoning_content": "Ha."}, TOOL), (first, TOOL)):
        reply = await chat.ask(QUESTION, message, tools=[tool])
        assert (reply["cache"]["restored_tokens"] > 0) is (message is first and tool is TOOL)
        assert chat.text.startswith("<s>hear") is (tool is other)


async def test_a_beginning_and_its_reply_are_one_message(start: Any) -> None:
    chat = await chats(start, "is  a wall.", "x", "x")
    begun = {"role": "assistant", "content": "It "}
    reply = await chat.ask(QUESTION, begun)
    whole = {"role": "assistant", "content": "It " + reply_of(reply)["content"]}
    n_generated = len(chat.generated[0]) - 1
    later = await chat.ask(QUESTION, whole, QUESTION)
    assert later["cache"]["restored_tokens"] == n_generated
    assert chat.prompts[-1][: len(chat.prompts[0]) + n_generated] == chat.prompts[0] + chat.generated[0][:-1]
    await chat.ask(QUESTION, whole)
    assert chat.prompts[-1] == chat.prompts[0] + chat.generated[0][:-1]


async def test_a_restored_prompt_that_is_too_long_is_rendered(start: Any) -> None:
    spaces = CALL.replace('"far":true', '"far":' + " " * 300 + "true")
    chat = await chats(start, spaces, "x", n_ctx=700)
    message = reply_of(await chat.ask(QUESTION))
    (result,) = results(message)
    reply = await chat.ask(QUESTION, message, {**result, "content": "w" * 290}, max_tokens=2)
    assert reply["cache"]["restored_tokens"] == 0
    assert len(chat.prompts[-1]) + 300 > 700


async def test_a_restored_prompt_leaves_a_token_of_the_context_for_the_reply(start: Any) -> None:
    spaces = CALL.replace('"far":true', '"far":' + " " * 300 + "true")
    chat = await chats(start, spaces, "x", n_ctx=700)
    message = reply_of(await chat.ask(QUESTION))
    (result,) = results(message)
    behind = chat.vocab.tokenize("</s>\n[tool]</s>\n[assistant]", add_special=False, parse_special=True)
    n_before = len(chat.prompts[0]) + len(chat.generated[0]) - 1 + len(behind)
    for n_prompt in (699, 700):
        changed = {**result, "content": "w" * (n_prompt - n_before)}
        reply = await chat.ask(QUESTION, message, changed, max_tokens=1)
        assert (reply["cache"]["restored_tokens"] > 0) is (n_prompt == 699)
        assert (len(chat.prompts[-1]) == 699) is (n_prompt == 699)


async def test_messages_are_dropped_with_their_session_and_with_the_cache(start: Any) -> None:
    chat = await chats(start, CALL, CALL, "x", "x", "x", "x", "x")
    one = reply_of(await chat.ask(QUESTION, session_id="one"))
    two = reply_of(await chat.ask(QUESTION, session_id="two"))

    async def n_restored(message: dict[str, Any]) -> int:
        reply = await chat.ask(QUESTION, message, *results(message))
        return int(reply["cache"]["restored_tokens"])

    assert await n_restored(one)
    async with chat.server.session.delete(chat.server.url + "/sessions/one") as response:
        assert response.status == 200
    assert not await n_restored(one)
    assert await n_restored(two)
    await chat.server.ok("/cache/clear", {})
    assert not await n_restored(two)


async def test_a_message_that_is_restored_outlives_one_that_is_not(start: Any) -> None:
    chat = await chats(start, CALL, CALL, "x", CALL, "x", "x")
    first, other = [reply_of(await chat.ask(QUESTION, cache_salt=salt)) for salt in ("one", "two")]
    await chat.ask(QUESTION, first, *results(first), cache_salt="one", max_tokens=0)
    memory = chat.server.local.prompts.worker._tokenizer.memory
    memory.max_bytes = memory.n_bytes
    await chat.ask(QUESTION, cache_salt="three")
    for salt, message in (("one", first), ("two", other)):
        reply = await chat.ask(QUESTION, message, *results(message), cache_salt=salt, max_tokens=0)
        assert (reply["cache"]["restored_tokens"] > 0) is (salt == "one")


async def test_no_key_evicts_a_message_of_another_within_its_share(start: Any) -> None:
    server = await start(
        backend=FakeBackend(n_ctx=4096, n_slots=2, n_reserved=2),
        template=TEMPLATE,
        engine={"grammars": [*[f"start: {json.dumps(CALL)}"] * 6, *['start: "x"'] * 6]},
        api_keys=("one", "two"),
    )

    async def ask(key: str, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        body = {"messages": messages, "tools": [TOOL], **fields}
        status, reply = await server.post(CHAT, body, headers={"Authorization": f"Bearer {key}"})
        assert status == 200, reply
        return dict(reply)

    message = reply_of(await ask("one", QUESTION))
    memory = server.local.prompts.worker._tokenizer.memory
    async with asyncio.timeout(10):
        while not memory.n_bytes:
            await asyncio.sleep(0.005)
    memory.max_bytes = 5 * memory.n_bytes // 2
    theirs = [reply_of(await ask("two", QUESTION, cache_salt=salt)) for salt in "abcde"]
    assert (await ask("one", QUESTION, message, *results(message), max_tokens=0))["cache"]["restored_tokens"] > 0
    for salt, each in zip("abcde", theirs, strict=True):
        reply = await ask("two", QUESTION, each, *results(each), cache_salt=salt, max_tokens=0)
        assert (reply["cache"]["restored_tokens"] > 0) is (salt == "e")


async def test_a_dropped_session_leaves_the_messages_of_that_name_in_other_namespaces(start: Any) -> None:
    chat = await chats(start, CALL, CALL, "x", "x", "x", "x")
    salts = "mine", "yours"
    messages = {salt: reply_of(await chat.ask(QUESTION, session_id="one", cache_salt=salt)) for salt in salts}
    path = chat.server.url + "/sessions/one"
    async with chat.server.session.delete(path, json={"cache_salt": "mine"}) as response:
        assert response.status == 200
    for salt, message in messages.items():
        reply = await chat.ask(QUESTION, message, *results(message), cache_salt=salt)
        assert (reply["cache"]["restored_tokens"] > 0) is (salt == "yours")


async def test_sessions_are_extended_by_restored_prompts(start: Any) -> None:
    chat = await chats(start, REASONED, "It is a wall.", "x")
    field = {"session_id": "mine"}
    message = reply_of(await chat.ask(QUESTION, **field))
    second = await chat.ask(QUESTION, without_reasoning(message), *results(message), **field)
    assert second["cache"]["session_match"] == "extend"
    third = await chat.ask(QUESTION, message, *results(message), reply_of(second), QUESTION, **field)
    assert third["cache"]["session_match"] == "tokens"


async def test_each_choice_has_tokens_of_its_own(start: Any) -> None:
    chat = await chats(start, '<tool_call>{"name":"look","arguments":{"n":1}}</tool_call>', "x", "x", "x")
    reply = await chat.ask(QUESTION, n=2, temperature=1)
    messages = [choice["message"] for choice in reply["choices"]]
    assert len({message["tool_calls"][0]["id"] for message in messages}) == 2
    for message in messages:
        assert (await chat.ask(QUESTION, message, *results(message)))["cache"]["restored_tokens"] > 0


class Oracle:
    """Prompts by the definition: a reply is restored where the prompt up to it is the one that it answered."""

    def __init__(self, vocab: FakeVocab) -> None:
        self._vocab = vocab
        self._replies: dict[tuple[str, tuple[int, ...], str], list[int]] = {}

    def prompt(self, messages: Sequence[dict[str, Any]], salt: str) -> list[int]:
        """The tokens of a prompt."""
        tokens = self._text("look", add_special=True)
        for message in messages:
            if message["role"] == "assistant":
                opening = self._text("[assistant]")
                known = self._replies.get((salt, (*tokens, *opening), self._meaning(message)))
                text = message["content"] or ""
                for _, name, values in self._calls(message):
                    call = {"name": name, "arguments": values}
                    text += f"\n<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
                tokens = [*tokens, *opening, *(known or self._text(text)), *self._text("</s>\n")]
            else:
                tokens += self._text(f"[{message['role']}]{message['content']}</s>\n")
        return [*tokens, *self._text("[assistant]")]

    def add(self, prompt: list[int], salt: str, message: dict[str, Any], generated: list[int]) -> None:
        """Remember a reply that was sent to its end."""
        self._replies[salt, tuple(prompt), self._meaning(message)] = generated

    def _text(self, text: str, *, add_special: bool = False) -> list[int]:
        return self._vocab.tokenize(text, add_special=add_special, parse_special=True).tolist()

    def _calls(self, message: dict[str, Any]) -> list[tuple[str, str, Any]]:
        return [
            (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or []
        ]

    def _meaning(self, message: dict[str, Any]) -> str:
        return json.dumps([(message["content"] or "").strip(), self._calls(message)], sort_keys=True)


def changed(message: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A message that comes back with another meaning."""
    if message.get("tool_calls") and rng.random() < 0.7:
        return rng.choice([CHANGED["another value"], CHANGED["another id"], CHANGED["a call more"]])(message)
    return {**message, "content": (message["content"] or "") + rng.choice(["x", " y", ".\n\nz"])}


def rewritten(message: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A message that comes back as clients write it, with the same meaning."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {
            **call,
            "function": {**call["function"], "arguments": laid_out(json.loads(call["function"]["arguments"]), rng)},
        }
        for call in message["tool_calls"]
    ]
    return {**message, "content": message["content"] or rng.choice([None, ""]), "tool_calls": calls}


def laid_out(values: dict[str, Any], rng: random.Random) -> str:
    names = rng.sample(sorted(values), len(values))
    return json.dumps({name: values[name] for name in names}, ensure_ascii=rng.random() < 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40 if LONG else 4))
async def test_prompts_are_those_of_the_definition(start: Any, seed: int) -> None:
    rng = random.Random(seed)
    texts = [rng.choice([CALL, TWO_CALLS, "Look! " + CALL, "A wall.", "A  wall, a door"]) for _ in range(60)]
    chat = await chats(start, *texts, n_ctx=2**14)
    oracle = Oracle(chat.vocab)
    conversations: list[tuple[str, list[dict[str, Any]]]] = []
    n_restored = 0
    for _ in texts:
        if not conversations or rng.random() < 0.15:
            conversations.append(
                (rng.choice(["yours", "mine"]), [{"role": "user", "content": rng.choice(["Where?", "What?"])}])
            )
        # An older branch of a conversation may go on, under another name too.
        salt, messages = rng.choice(conversations)
        salt = salt if rng.random() < 0.9 else rng.choice(["yours", "mine"])
        is_cut = rng.random() < 0.1
        # The template writes equal arguments in the order in which they come.
        reply = await chat.ask(*messages, cache_salt=salt, **({"stop": ["l"]} if is_cut else {}))
        assert chat.prompts[-1] == oracle.prompt(messages, salt)
        n_restored += reply["cache"]["restored_tokens"] > 0
        message = reply_of(reply)
        if is_cut and not (message["content"] or "").strip():
            continue
        generated = chat.generated[-1]
        n_sent = len((message["content"] or "").encode()) if is_cut else len(generated) - (generated[-1] == END)
        oracle.add(chat.prompts[-1], salt, message, generated[:n_sent])
        back = changed(message, rng) if rng.random() < 0.15 else rewritten(message, rng)
        more = (
            results(back) if back.get("tool_calls") else [{"role": "user", "content": rng.choice(["And?", "Why?"])}]
        )
        conversations.append((salt, [*messages, back, *more]))
    assert n_restored > 20


async def test_a_long_tool_loop_that_is_not_remembered_is_read_once(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = await chats(start, "x", n_ctx=2**17)
    counts: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any) -> Any:
            counts[name] += 1
            return original(*args)

        monkeypatch.setattr(owner, name, call)

    counted(meaning, "_call_meaning")
    counted(TokenMemory, "find")
    n, messages = 400, [QUESTION]
    for i in range(n):
        function = {"name": "look", "arguments": json.dumps({"n": i})}
        call = {"id": f"call_{i}", "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        messages += [message, *results(message)]
    reply = await chat.server.ok(f"{CHAT}/input_tokens", {"messages": messages, "tools": [TOOL]})
    assert reply["input_tokens"] > 50 * n
    assert counts["_call_meaning"] == n
    assert counts["find"] <= 40 * n, "not each message with all those behind it"


async def test_a_message_that_is_the_whole_conversation_is_continued(start: Any) -> None:
    server = await start()
    body = {"messages": [{"role": "assistant", "content": "Once upon a"}], "max_tokens": 2}
    assert (await server.ok("/v1/chat/completions", body))["usage"]["completion_tokens"] <= 2


async def test_what_a_variable_of_the_template_does_counts_for_requests_with_it(start: Any) -> None:
    template = TEMPLATE.replace("loop.index0 > ns.last", "(keep_thinking or loop.index0 > ns.last)")
    keeping = {"chat_template_kwargs": {"keep_thinking": True}}
    for fields, others in (({}, keeping), (keeping, {})):
        chat = await chats(start, *[REASONED, "A wall.", "x"] * 2, template=template)
        for each in (fields, others):
            called = reply_of(await chat.ask(QUESTION, **each))
            told = reply_of(await chat.ask(QUESTION, called, *results(called), **each))
            turn = QUESTION, without_reasoning(called), *results(called), told
            reply = await chat.ask(*turn, QUESTION, **each)
            assert (reply["cache"]["restored_tokens"] > 0) is (each is keeping)
            assert chat.text.count("I should look.") == (each is keeping)


async def test_a_question_in_parts_is_the_same_as_its_text(start: Any) -> None:
    chat = await chats(start, CALL, "x", "x")
    message = reply_of(await chat.ask(QUESTION))
    parts = {"role": "user", "content": [{"type": "text", "text": QUESTION["content"]}]}
    reply = await chat.ask(parts, message, *results(message))
    assert reply["cache"]["restored_tokens"] == len(chat.generated[0]) - 1
    divided = {"role": "user", "content": [{"type": "text", "text": text} for text in ("What is ", "there?")]}
    reply = await chat.ask(divided, message, *results(message))
    assert reply["cache"]["restored_tokens"] == 0, "the template writes another text"


async def test_a_reply_that_cannot_be_restored_keeps_none_before_it_from_that(start: Any) -> None:
    chat = await chats(start, "A wall.", CALL, "A wall.", "x", "x")
    other = {"type": "function", "function": {"name": "listen", "parameters": {"type": "object", "properties": {}}}}
    told = reply_of(await chat.ask(QUESTION, cache_salt="another"))
    # Behind the rendered answer, and behind other tools than later.
    message = reply_of(await chat.ask(QUESTION, told, QUESTION, tools=[TOOL, other]))
    again = reply_of(await chat.ask(QUESTION))
    assert again["content"].strip() == told["content"].strip()
    reply = await chat.ask(QUESTION, told, QUESTION, message, *results(message))
    assert reply["cache"]["restored_tokens"] == len(chat.generated[2]) - 1


async def test_a_message_behind_a_question_that_is_now_written_otherwise_is_rendered(start: Any) -> None:
    # As in Mistral Nemo's template, which writes the system message where the last one is a question.
    system = "{% if loop.last and m.role == 'user' %}{{ messages[0].content }}{% endif %}"
    template = TEMPLATE.replace("{%- else %}{{ '['", "{%- elif m.role != 'system' %}" + system + "{{ '['")
    chat = await chats(start, CALL, CALL, "x", "x", template=template)
    rules = {"role": "system", "content": "Look well."}
    first = reply_of(await chat.ask(rules, QUESTION))
    assert chat.text.startswith("<s>lookLook well.[user]")
    turn = rules, QUESTION, first, *results(first)
    reply = await chat.ask(*turn)
    assert reply["cache"]["restored_tokens"] == 0
    assert "Look well." not in chat.text
    second = reply_of(reply)
    reply = await chat.ask(*turn, second, *results(second))
    assert reply["cache"]["restored_tokens"] == len(chat.generated[1]) - 1


async def test_a_reply_is_not_restored_where_the_template_writes_its_reasoning_behind_it(start: Any) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}</s>\n{% endfor %}"
        "[assistant]"
    )
    chat = await chats(start, "A  wall.", "<think>Hm.</think>A  door.", "x", template=template)
    messages = [QUESTION]
    for _ in range(2):
        messages += [reply_of(await chat.ask(*messages)), QUESTION]
    reply = await chat.ask(*messages, max_tokens=1)
    assert reply["cache"]["restored_tokens"] == 0
    plain = await chat.server.ok("/apply-template", {"messages": messages, "tools": [TOOL]})
    assert chat.text == "<s>" + plain["prompt"]


async def test_a_call_is_rendered_by_a_template_that_refuses_a_conversation_that_ends_with_it(start: Any) -> None:
    # Neither the text behind a reply nor the one before it can be found.
    refusal = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
    chat = await chats(start, CALL, "x", template=refusal + TEMPLATE)
    message = reply_of(await chat.ask(QUESTION))
    messages = [QUESTION, message, *results(message)]
    reply = await chat.ask(*messages, max_tokens=1)
    assert reply["cache"]["restored_tokens"] == 0
    plain = await chat.server.ok("/apply-template", {"messages": messages, "tools": [TOOL]})
    assert chat.text == "<s>" + plain["prompt"]


async def test_a_reply_that_cannot_be_restored_leaves_those_before_it(start: Any) -> None:
    # Of questions, only the last one gets a hint.
    hint = "{% if loop.last and 'well' in m.content %}Hint: {% endif %}"
    template = TEMPLATE.replace("{%- else %}{{ '['", "{%- else %}" + hint + "{{ '['")
    chat = await chats(start, "A  wall.", CALL, "x", template=template)
    told = reply_of(await chat.ask(QUESTION))
    turn = QUESTION, told, {"role": "user", "content": "Look well."}
    message = reply_of(await chat.ask(*turn))
    assert "Hint: " in chat.text
    reply = await chat.ask(*turn, message, *results(message))
    assert "Hint: " not in chat.text
    assert reply["cache"]["restored_tokens"] == len(chat.generated[0]) - 1


async def test_a_reply_behind_another_generation_prompt_is_continued_as_it_is_rendered(start: Any) -> None:
    prompt = "{{- '[assistant]' + tools | map(attribute='function.description') | join }}{% endif %}"
    template = TEMPLATE[: TEMPLATE.index("{{ '[assistant]' + (")] + prompt
    chat = await chats(start, "A  wall. A door.", "x", "x", template=template)
    begun = reply_of(await chat.ask(QUESTION, max_tokens=10))
    # It differs by the tools' descriptions, which this template writes nowhere else.
    other = {"type": "function", "function": {**TOOL["function"], "description": "(far)"}}
    for tool in (other, TOOL):
        reply = await chat.ask(QUESTION, begun, tools=[tool], max_tokens=1)
        assert (reply["cache"]["restored_tokens"] > 0) is (tool is TOOL)
        assert chat.text.endswith(f"[assistant]{tool['function'].get('description', '')}{begun['content']}")


class SpacePrefixVocab(FakeVocab):
    """Adds a space before text at the beginning and behind control tokens, as SentencePiece vocabularies do."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        """Return the UTF-8 bytes of `text` and these spaces as tokens."""
        ids = super().tokenize(text, add_special=add_special, parse_special=parse_special).tolist()
        spaced: list[int] = []
        for token in ids:
            if token < BOS and (not spaced or spaced[-1] >= BOS):
                spaced.append(ord(" "))
            spaced.append(token)
        return np.array(spaced, dtype=np.int32)


@pytest.mark.parametrize("end", ["</s>", "", " "], ids=["an end token", "text", "a space"])
async def test_a_reply_is_restored_only_before_text_that_gets_no_space_from_the_vocabulary(
    start: Any, end: str
) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "\n{% endfor %}assistant: "
    backend = FakeBackend(vocab=SpacePrefixVocab(), n_ctx=4096, n_slots=2, n_reserved=2)
    grammars = ['start: "A  wall."', 'start: "x"']
    chat = Chats(await start(backend=backend, template=template, engine={"grammars": grammars}))
    message = reply_of(await chat.server.ok(CHAT, {"messages": [QUESTION]}))
    reply = await chat.server.ok(CHAT, {"messages": [QUESTION, message, QUESTION], "max_tokens": 1})
    assert (reply["cache"]["restored_tokens"] > 0) is (end == "</s>")
    assert f"A  wall.{end}" in chat.text
    assert "A  wall.  " not in chat.text


SPACED = TEMPLATE.replace("{{- '[assistant]' }}", "{{- '[assistant] ' }}")
TRIMMING = TEMPLATE.replace("{{- m.content }}", "{{- m.content | trim }}")


@pytest.mark.parametrize("text", [" two", "two\n", "\n two ", "\t two", "two"])
@pytest.mark.parametrize("template", [TEMPLATE, TRIMMING, SPACED], ids=["keeps", "trims", "adds a space"])
async def test_whitespace_around_a_reply_is_what_the_template_writes(start: Any, text: str, template: str) -> None:
    """Also where the client trims it: the prompt is the one that a server without memory makes."""
    chat = await chats(start, text, "a", "b", template=template)
    message = reply_of(await chat.ask(QUESTION))
    # The fake model may add a space.
    text = message["content"]
    assert text.strip() == "two"
    for content in (text, text.strip(), [{"type": "text", "text": text}]):
        history = [QUESTION, {**message, "content": content}, QUESTION]
        _, plain = await chat.server.post("/apply-template", {"messages": history, "tools": [TOOL]})
        await chat.ask(*history)
        assert chat.text.removeprefix("<s>") == plain["prompt"].removeprefix("<s>"), content


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES if LONG else ["builtin vicuna", "builtin llama3", "two_roles"])
async def test_a_reply_has_the_whitespace_of_any_template(start: Any, name: str) -> None:
    """Where markup of the format is before the text, only that at the end."""
    tags = format_of(SOURCES[name], {}).reasoning
    reasoned = [] if tags is None or "channel" in tags.start else [f"{tags.start}\nI think.\n{tags.end}\n\n two\n"]
    for text in (" two", "\n two \n", "two", *reasoned):
        chat = await chats(start, text, "a", "b", template=SOURCES[name], n_ctx=16384)
        message = reply_of(await chat.ask(QUESTION))
        if not message["content"]:
            # The prompt begins with reasoning.
            continue
        history = [QUESTION, message, QUESTION]
        _, plain = await chat.server.post("/apply-template", {"messages": history, "tools": [TOOL]})
        await chat.ask(*history)
        (before, after), (plain_before, plain_after) = (
            (whole[0], whole[2]) for whole in (each.rpartition("two") for each in (chat.text, plain["prompt"]))
        )
        assert after == plain_after, text
        if before.rstrip()[-5:] == plain_before.rstrip()[-5:]:
            assert before[len(before.rstrip()) :] == plain_before[len(plain_before.rstrip()) :], text


async def test_several_calls_are_restored_in_a_template_that_takes_one_only(start: Any) -> None:
    one = TEMPLATE.replace(
        "{%- for c in m.tool_calls or [] %}",
        "{%- if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('One call!') }}{% endif %}"
        "{%- for c in m.tool_calls or [] %}",
    )
    chat = await chats(start, TWO_CALLS, "It is a wall.", template=one)
    message = reply_of(await chat.ask(QUESTION))
    assert len(message["tool_calls"]) == 2
    first, second = ({**each, "content": f"a wall{n}"} for n, each in enumerate(results(message)))
    await chat.ask(QUESTION, message, first, second)
    assert chat.text.endswith(f"[assistant]{TWO_CALLS}</s>\n[tool]a wall0</s>\n[tool]a wall1</s>\n[assistant]")
    await chat.ask(QUESTION, with_call(message, name="see"), first, second)
    see, look = (f'"name": "{name}"' for name in ("see", "look"))
    places = [chat.text.index(part) for part in (see, "a wall0", look, "a wall1")]
    assert places == sorted(places)
