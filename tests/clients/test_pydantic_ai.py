"""pydantic-ai: agents with a tool and a structured result, over each API."""

from __future__ import annotations

from collections.abc import Callable

import pydantic
import pytest
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.conftest import Lead
from tests.clients.servers import Server, call

Connect = Callable[[Server], Model]


class Weather(pydantic.BaseModel):
    city: str
    degrees: int


def chat(server: Server) -> Model:
    return OpenAIChatModel("demo", provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key="none"))


def responses(server: Server) -> Model:
    return OpenAIResponsesModel("demo", provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key="none"))


def messages(server: Server) -> Model:
    return AnthropicModel("demo", provider=AnthropicProvider(base_url=server.url, api_key="none"))


@pytest.mark.parametrize("connect", [chat, responses, messages])
async def test_an_agent_calls_a_tool_and_returns_a_structured_result(connect: Connect, lead: Lead) -> None:
    server = lead(call("degrees_in", city="Oslo"), call("final_result", city="Oslo", degrees=21))
    agent = Agent(connect(server), output_type=Weather, instructions="Be brief.")
    asked = []

    @agent.tool_plain
    def degrees_in(city: str) -> int:
        """Return the temperature."""
        asked.append(city)
        return 21

    result = await agent.run("How warm is it in Oslo?")
    assert (asked, result.output) == (["Oslo"], Weather(city="Oslo", degrees=21))
    assert result.usage.requests == 2


@pytest.mark.parametrize("connect", [chat, responses])
async def test_an_agent_streams_a_schema_that_the_server_follows(connect: Connect, server: Server) -> None:
    class Move(pydantic.BaseModel):
        steps: int = pydantic.Field(ge=1, le=9)

    agent = Agent(connect(server), output_type=NativeOutput(Move))
    async with agent.run_stream("Go!") as run:
        assert isinstance(await run.get_output(), Move)


@pytest.mark.parametrize("connect", [chat, responses, messages])
async def test_an_agent_streams_text(connect: Connect, server: Server) -> None:
    agent = Agent(connect(server))
    async with agent.run_stream("Hello! My name is Ada.") as run:
        pieces = [piece async for piece in run.stream_text(delta=True)]
    assert "Ada" in "".join(pieces)
