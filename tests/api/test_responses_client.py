"""The openai client's `responses` takes every reply and every event, and turns errors into its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseReasoningItem
from pydantic import BaseModel

from tests.api.test_tools import CALL, PARAMETERS, served
from tests.fake_backend import FakeBackend

TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False},
    {"type": "custom", "name": "edit"},
]
SHORT: dict[str, Any] = {"max_output_tokens": 6, "extra_body": {"ignore_eos": True}}
TEXT = f"<think>Hm.</think>\n\nLet me see.\n{CALL}"


def client_of(server: Any, key: str = "any") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
async def server(start: Any) -> Any:
    return await start(backend=FakeBackend(n_ctx=2048))


@pytest.fixture
async def client(server: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(server) as client:
        yield client


async def test_text(client: openai.AsyncOpenAI) -> None:
    reply = await client.responses.create(model="any", input="Hello", instructions="Be brief.", **SHORT)
    assert reply.id.startswith("resp_")
    assert reply.output[0].id is not None
    assert reply.output[0].id.startswith("msg_")
    assert len(reply.output_text) == 6
    assert (reply.status, reply.usage and reply.usage.output_tokens) == ("incomplete", 6)
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert type(reply).model_validate(reply.to_dict()) == reply, "all fields that the type requires are there"


async def test_events(client: openai.AsyncOpenAI) -> None:
    stream = await client.responses.create(model="any", input="Hello", stream=True, **SHORT)
    events = [event async for event in stream]
    for event in events:
        assert type(event).model_validate(event.to_dict()) == event, "all fields that the type requires are there"
    assert [event.type for event in events if event.type != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].type == "response.incomplete"
    assert text == events[-1].response.output_text


async def test_reasoning_and_calls(start: Any) -> None:
    patch = '<tool_call>\n{"name": "edit", "arguments": {"input": "text"}}\n</tool_call>'
    server = await served(start, "hermes-thinking", *[TEXT + patch] * 3)
    async with client_of(server) as client:
        asked: dict[str, Any] = {"model": "any", "input": "The weather?", "tools": TOOLS}
        reply = await client.responses.create(**asked, include=["reasoning.encrypted_content"])
        reasoning, message, call, edit = reply.output
        assert isinstance(reasoning, ResponseReasoningItem)
        assert reasoning.content is not None
        assert reasoning.content[0].text == "Hm."
        assert message.type == "message"
        assert isinstance(call, ResponseFunctionToolCall)
        assert json.loads(call.arguments)["days"] == 3
        assert (edit.type, getattr(edit, "input", None)) == ("custom_tool_call", "text")
        assert type(reply).model_validate(reply.to_dict()) == reply
        async for event in await client.responses.create(**asked, stream=True):
            assert type(event).model_validate(event.to_dict()) == event
        async with client.responses.stream(**asked) as stream:
            arguments = [
                event.delta async for event in stream if event.type == "response.function_call_arguments.delta"
            ]
            final = await stream.get_final_response()
        assert final.output_text == "Let me see."
        assert [item.type for item in final.output] == [item.type for item in reply.output]
        assert "".join(arguments) == call.arguments


async def test_a_conversation(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="any", input="One", **SHORT)
    second = await client.responses.create(model="any", input="Two", previous_response_id=first.id, **SHORT)
    assert second.previous_response_id == first.id
    assert await client.responses.retrieve(second.id) == second
    items = [item async for item in await client.responses.input_items.list(second.id, order="asc", limit=1)]
    assert [item.type for item in items] == ["message"] * 3, "the client asks for further pages"
    assert items[1].to_dict() == first.output[0].to_dict()
    counted = await client.responses.input_tokens.count(model="any", input="Two", previous_response_id=first.id)
    assert second.usage is not None
    assert counted.input_tokens == second.usage.input_tokens
    own: list[Any] = [{"role": "user", "content": "One"}, *first.output, {"role": "user", "content": "Two"}]
    third = await client.responses.create(model="any", input=own, **SHORT)
    assert third.usage is not None
    assert third.usage.input_tokens == second.usage.input_tokens
    await client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError, match="was deleted"):
        await client.responses.retrieve(second.id)


async def test_structured_output(client: openai.AsyncOpenAI) -> None:
    class Flag(BaseModel):
        on: bool

    reply = await client.responses.parse(model="any", input="On or off?", text_format=Flag)
    assert isinstance(reply.output_parsed, Flag)


@pytest.mark.slow
async def test_errors(start: Any) -> None:
    server = await start(api_keys=("secret",), backend=FakeBackend(n_ctx=60_000), request_timeout=1)
    async with client_of(server, "secret") as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="any", input="x", background=True)
        assert refused.value.param == "background"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.responses.create(model="any", input="x", previous_response_id="resp_none")
        assert unknown.value.param == "previous_response_id"
        stream = await client.responses.create(model="any", input="x", stream=True, extra_body={"ignore_eos": True})
        *_, error, failed = [event async for event in stream]
        assert (error.type, failed.type) == ("error", "response.failed")
        for event in (error, failed):
            assert type(event).model_validate(event.to_dict()) == event
    async with client_of(server, "wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.responses.create(model="any", input="x")
