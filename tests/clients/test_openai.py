"""openai: chats, tools, structured output, Responses and text completions."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.clients.conftest import Lead
from tests.clients.servers import Server, call

MESSAGES: list[Any] = [{"role": "user", "content": "Hello! My name is Ada."}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}


class Move(pydantic.BaseModel):
    direction: Literal["left", "right"]
    steps: int = pydantic.Field(ge=1, le=9)


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return client_of(server)


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert "Ada" in (whole.choices[0].message.content or "")
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        final = stream.until_done().get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    assert final.usage.prompt_tokens_details is not None
    assert final.usage.prompt_tokens_details.cached_tokens == final.usage.prompt_tokens - 1


def test_a_tool_turn(lead: Lead) -> None:
    client = client_of(lead(call("get_weather", city="Oslo"), "It is sunny in Oslo."))
    first = client.chat.completions.create(model="demo", messages=MESSAGES, tools=[WEATHER])
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    (made,) = message.tool_calls
    assert json.loads(made.function.arguments) == {"city": "Oslo"}
    result = {"role": "tool", "tool_call_id": made.id, "content": "sunny"}
    history = [*MESSAGES, message, result]
    second = client.chat.completions.create(model="demo", messages=history, tools=[WEATHER])
    assert second.choices[0].message.content == "It is sunny in Oslo."


def test_a_streamed_and_a_forced_call(client: openai.OpenAI, lead: Lead) -> None:
    led = client_of(lead(call("get_weather", city="Oslo")))
    with led.chat.completions.stream(model="demo", messages=MESSAGES, tools=[WEATHER]) as stream:
        events = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, json.loads(event.arguments)) for event in events] == [("get_weather", {"city": "Oslo"})]
    choice: Any = {"type": "function", "function": {"name": "move"}}
    tool: Any = openai.pydantic_function_tool(Move, name="move")
    parsed = client.chat.completions.parse(model="demo", messages=MESSAGES, tools=[tool], tool_choice=choice)
    made = (parsed.choices[0].message.tool_calls or ())[0]
    assert isinstance(made.function.parsed_arguments, Move)


def test_parsed_output(client: openai.OpenAI) -> None:
    chat = client.chat.completions.parse(model="demo", messages=MESSAGES, response_format=Move)
    assert isinstance(chat.choices[0].message.parsed, Move)
    response = client.responses.parse(model="demo", input="Go!", text_format=Move)
    assert isinstance(response.output_parsed, Move)


def test_responses(client: openai.OpenAI, lead: Lead) -> None:
    first = client.responses.create(model="demo", input="Hello! My name is Ada.", temperature=0)
    assert "Ada" in first.output_text
    asked: dict[str, Any] = {"model": "demo", "input": "What is my name?", "previous_response_id": first.id}
    with client.responses.stream(**asked, temperature=0) as stream:
        second = stream.until_done().get_final_response()
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert second.usage is not None
    assert client.responses.input_tokens.count(**asked).input_tokens == second.usage.input_tokens
    led = client_of(lead(call("get_weather", city="Oslo"), "Sunny."))
    tool: Any = {"type": "function", **WEATHER["function"], "strict": False}
    made = led.responses.create(model="demo", input="The weather?", tools=[tool]).output[-1]
    assert made.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": made.call_id, "output": "sunny"}
    question: Any = {"role": "user", "content": "The weather?"}
    last = led.responses.create(model="demo", input=[question, made, result], tools=[tool])
    assert last.output_text == "Sunny."


def test_stored_chats(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="demo", messages=MESSAGES, store=True, metadata={"a": "b"})
    listed = client.chat.completions.list(metadata={"a": "b"})
    assert [each.id for each in listed] == [chat.id]
    assert client.chat.completions.retrieve(chat.id).choices == chat.choices
    assert [each.content for each in client.chat.completions.messages.list(chat.id)] == [MESSAGES[0]["content"]]
    assert client.chat.completions.delete(chat.id).deleted


def test_text_and_models(client: openai.OpenAI) -> None:
    text = client.completions.create(model="demo", prompt="Hello", max_tokens=4, logprobs=2, echo=True)
    assert text.choices[0].text.startswith("Hello")
    assert text.choices[0].logprobs is not None
    assert [model.id for model in client.models.list()] == ["demo"]
