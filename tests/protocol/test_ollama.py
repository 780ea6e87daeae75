"""Ollama's bodies become the bodies of chats and texts that stand for the same request."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from llamaslot.base.errors import LlamaslotError
from llamaslot.protocol.bodies import ChatBody, CompletionBody, ResponseFormat, SamplingOptions, decode
from llamaslot.protocol.ollama import MAX_NAME_CHARS, OllamaChatBody, OllamaGenerateBody, converted

HI = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


def chat(messages: Any = (HI,), **fields: Any) -> ChatBody:
    body = converted(decode(msgspec.json.encode({"messages": messages, **fields}), OllamaChatBody))
    assert isinstance(body, ChatBody)
    return body


def generate(**fields: Any) -> ChatBody | CompletionBody | None:
    return converted(decode(msgspec.json.encode(fields), OllamaGenerateBody))


def test_a_tool_turn() -> None:
    call = {"id": "call_1", "function": {"index": 0, "name": "look", "arguments": {"at": "ü", "n": 1.5}}}
    now = {"function": {"name": "now"}}
    messages = [
        {"role": "System", "content": "Be brief.", "images": []},
        HI,
        {"role": "assistant", "content": "Let me see.", "thinking": "Hm.", "tool_calls": [call, now]},
        {"role": "tool", "content": "a tree", "tool_name": "look", "tool_call_id": "call_1"},
        {"role": "assistant", "content": None},
    ]  # fmt: skip
    functions = [{"name": "look", "arguments": '{"at": "ü", "n": 1.5}'}, {"name": "now", "arguments": "{}"}]
    assert chat(messages).messages == [
        {"role": "system", "content": "Be brief."},
        HI,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"type": "function", "function": each} for each in functions],
        },
        {"role": "tool", "content": "a tree", "name": "look"},
        {"role": "assistant", "content": ""},
    ], "without ids, which clients do not keep"


def test_a_tool_is_a_function_if_it_does_not_say() -> None:
    function = {"name": "look", "parameters": SCHEMA}
    assert chat(tools=[{"function": function}]).tools == [{"type": "function", "function": function}]
    assert chat(tools=[]).tools is None


def test_options_are_fields_for_sampling_and_for_the_cache() -> None:
    options = {"temperature": 0, "top_k": 3.0, "stop": ["a"], "session_id": "mine", "mirostat_tau": 2, "seed": -1}
    body = chat(options={**options, "num_ctx": 9, "num_gpu": "all", "use_mmap": 1, "n": 5, "stream": False})
    assert {name: getattr(body, name) for name in options} == options
    assert body.stream is True
    assert body.n is None
    assert chat(options={"num_predict": 5}).n_predict == 5
    assert chat(options={"num_predict": -2}).n_predict == -1
    assert chat().n_predict is None
    assert chat(stream=False).stream is False
    text = generate(prompt="a", raw=True, options=options)
    assert isinstance(text, CompletionBody)
    assert {name: getattr(text, name) for name in options} == options


def test_all_fields_for_sampling_may_be_options() -> None:
    assert set(SamplingOptions.__struct_fields__) < set(ChatBody.__struct_fields__)
    assert all(getattr(chat(), name) is None for name in SamplingOptions.__struct_fields__)


@pytest.mark.parametrize(
    ("think", "effort", "is_on"),
    [(None, None, None), (True, None, True), (False, None, False), ("low", "low", True), ("max", "high", True)],
)
def test_thinking(think: Any, effort: str | None, is_on: bool | None) -> None:
    for body in (chat(think=think), generate(prompt="a", think=think)):
        assert isinstance(body, ChatBody)
        assert body.reasoning_effort == effort
        assert body.chat_template_kwargs == (None if is_on is None else {"enable_thinking": is_on})


def test_formats() -> None:
    for nothing in (None, ""):
        assert chat(format=nothing).response_format is None
    assert chat(format="json").response_format == ResponseFormat("json_object")
    form = chat(format=SCHEMA).response_format
    assert form is not None
    assert form.json_schema is not None
    assert (form.type, form.json_schema.schema) == ("json_schema", SCHEMA)


def test_probabilities() -> None:
    for asked, wanted in (
        ({}, (None, None)),
        ({"logprobs": True}, (True, 0)),
        ({"logprobs": True, "top_logprobs": 3}, (True, 3)),
        ({"top_logprobs": 3}, (None, None)),
    ):
        body = chat(**asked)
        assert (body.logprobs, body.top_logprobs) == wanted
        text = generate(prompt="a", raw=True, **asked)
        assert isinstance(text, CompletionBody)
        assert (text.logprobs, text.top_logprobs) == (wanted[1], None)


def test_a_question_is_a_chat() -> None:
    body = generate(prompt="Hi", system="Be brief.", template="", images=[], context=[1, 2])
    assert isinstance(body, ChatBody)
    assert body.messages == [{"role": "system", "content": "Be brief."}, HI]
    body = generate(prompt="Hi", raw=False, system="", suffix="")
    assert isinstance(body, ChatBody)
    assert body.messages == [HI]


def test_a_raw_prompt_and_one_with_a_gap_are_texts() -> None:
    body = generate(prompt="Hi", raw=True, system="", context=[])
    assert isinstance(body, CompletionBody)
    assert (body.prompt, body.suffix) == ("Hi", None)
    for prompt in ("Hi", ""):
        body = generate(prompt=prompt, suffix="there")
        assert isinstance(body, CompletionBody)
        assert (body.prompt, body.suffix) == (prompt, "there")


def test_nothing_to_complete_is_a_request_to_load() -> None:
    system = {"system": "Be brief.", "keep_alive": "5m"}
    for fields in ({}, {"prompt": ""}, {"prompt": None, "keep_alive": 0}, system):
        assert generate(model="x", **fields) is None
    for messages in ([], None):
        body = decode(msgspec.json.encode({"messages": messages, "keep_alive": -1}), OllamaChatBody)
        assert converted(body) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 5}, "model"),
        ({"model": "x" * (MAX_NAME_CHARS + 1)}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"keep_alive": []}, "keep_alive"),
        ({"think": "very"}, "think"),
        ({"think": 1}, "think"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"options": []}, "options"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"top_k": 0.5}}, "options.top_k"),
        ({"options": {"num_predict": "all"}}, "options.num_predict"),
        ({"options": {"num_predict": -3}}, "options.num_predict"),
        ({"options": {"num_ctx": "4k"}}, "options.num_ctx"),
        ({"options": {"stop": [5]}}, "options.stop[0]"),
        ({"format": "yaml"}, "format"),
        ({"format": True}, "format"),
        ({"format": ["json"]}, "format"),
    ],
    ids=str,
)
def test_wrong_values_are_named(fields: dict[str, Any], param: str) -> None:
    for convert in (chat, lambda **fields: generate(prompt="Hi", **fields)):
        with pytest.raises(LlamaslotError, match=re.escape(f"'{param}'")) as refused:
            convert(**fields)
        assert refused.value.param == param


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([HI, {"content": "Hi"}], "messages[1].role"),
        ([{**HI, "content": [{"type": "text", "text": "Hi"}]}], "messages[0].content"),
        ([{**HI, "images": [5]}], "messages[0].images[0]"),
        ([{**HI, "images": "iVBORw0KGgo="}], "messages[0].images"),
        ([{**HI, "thinking": 5}], "messages[0].thinking"),
        ([{"role": "tool", "tool_name": []}], "messages[0].tool_name"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
    ids=str,
)
def test_wrong_messages_are_named(messages: Any, param: str) -> None:
    with pytest.raises(LlamaslotError) as refused:
        chat(messages)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"images": ["iVBORw0KGgo="], "raw": True}, "images"),
        ({"images": ["iVBORw0KGgo="], "suffix": "x"}, "images"),
        ({"images": [None]}, "images"),
        ({"raw": True, "system": "Be brief."}, "system"),
        ({"raw": True, "context": [1]}, "context"),
        ({"suffix": "x", "context": [1]}, "context"),
        ({"context": [-1]}, "context"),
        ({"context": "x"}, "context"),
        ({"prompt": ["Hi"]}, "prompt"),
    ],
    ids=str,
)
def test_fields_of_a_question_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(LlamaslotError) as refused:
        generate(**{"prompt": "Hi", **fields})
    assert (refused.value.param or "").partition("[")[0] == param
