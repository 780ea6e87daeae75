"""anthropic: messages, tools, structured output and token counts."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import pydantic
import pytest

from tests.clients.conftest import Lead
from tests.clients.servers import Server, call

ASKED: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 512,
    "messages": [{"role": "user", "content": "Hello! My name is Ada."}],
}


class Move(pydantic.BaseModel):
    direction: Literal["left", "right"]
    steps: int


def client_of(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture
def client(server: Server) -> anthropic.Anthropic:
    return client_of(server)


def test_a_message_whole_and_streamed(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASKED)
    assert "Ada" in whole.content[0].text
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (
        final.usage.cache_read_input_tokens
        == client.messages.count_tokens(model="demo", messages=ASKED["messages"]).input_tokens - 1
    )


def test_the_tool_runner(lead: Lead) -> None:
    client = client_of(lead(call("get_weather", city="Oslo"), "It is sunny."))
    asked = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Return the weather.

        Args:
            city: The city.
        """
        asked.append(city)
        return "sunny"

    last = client.beta.messages.tool_runner(**ASKED, tools=[get_weather]).until_done()
    assert asked == ["Oslo"]
    assert last.content[-1].text == "It is sunny."


def test_a_forced_call(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"steps": {"enum": [1, 2]}}, "required": ["steps"]}
    tool: Any = {"name": "go", "input_schema": schema}
    message = client.messages.create(**ASKED, tools=[tool], tool_choice={"type": "tool", "name": "go"})
    assert message.stop_reason == "tool_use"
    assert message.content[-1].input["steps"] in {1, 2}


def test_parsed_output(client: anthropic.Anthropic) -> None:
    parsed = client.messages.parse(**ASKED, output_format=Move)
    assert isinstance(parsed.parsed_output, Move)
