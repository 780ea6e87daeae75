"""The anthropic client takes every reply and turns every error into its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pydantic
import pytest

from llamaslot.base.backend import Status
from llamaslot.base.errors import QueueFullError
from tests.api.test_messages import WEATHER
from tests.api.test_tools import CALL, CITY, leading_to, template
from tests.fake_backend import FakeBackend

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, Any] = {"model": "any", "max_tokens": 400, "messages": MESSAGES}
REPLY = f"<think>\nHm, {{.\n</think>\n\nLet me see.\n{CALL}\n{CALL.replace('Zürich', 'Rome')}"


class Place(pydantic.BaseModel):
    days: int
    city: str


@pytest.fixture
async def connect(start: Any) -> AsyncIterator[Any]:
    """Start a server whose k-th request gets the k-th text, and a client for it."""
    clients = []

    async def connected(*texts: str, **settings: Any) -> tuple[Any, anthropic.AsyncAnthropic]:
        server = await start(
            backend=settings.pop("backend", FakeBackend(n_ctx=4096)),
            template=template("hermes-thinking"),
            engine=leading_to(*texts, "x") if texts else {},
            api_keys=("secret",),
            **settings,
        )
        clients.append(anthropic.AsyncAnthropic(base_url=server.url, api_key="secret", max_retries=0))
        return server, clients[-1]

    yield connected
    for client in clients:
        await client.close()


async def test_a_message(connect: Any) -> None:
    _, client = await connect()
    sampling = {"temperature": 0, "top_k": 3, "top_p": 0.5}
    message = await client.messages.create(**ASKED, system="Be brief.", extra_body=sampling)
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake.gguf")
    assert isinstance(message.content[0], anthropic.types.TextBlock)
    assert message.stop_reason == "end_turn"
    assert message.usage.cache_read_input_tokens == message.usage.cache_creation_input_tokens == 0
    assert message._request_id
    counted = await client.messages.count_tokens(model="any", system="Be brief.", messages=MESSAGES)
    assert counted.input_tokens == message.usage.input_tokens
    again = await client.messages.create(**ASKED, system="Be brief.")
    assert again.usage.input_tokens == 1
    assert again.usage.cache_read_input_tokens == counted.input_tokens - 1


async def test_the_client_adds_the_events_of_a_stream_up(connect: Any) -> None:
    _, client = await connect(REPLY, REPLY)
    asked = {**ASKED, "tools": [WEATHER]}
    whole = await client.messages.create(**asked)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    texts = []
    async with client.messages.stream(**asked) as stream:
        async for event in stream:
            if event.type == "text":
                texts.append(event.text)
            elif event.type == "content_block_stop" and event.content_block.type == "tool_use":
                assert event.content_block.input["days"] == 3
        streamed = await stream.get_final_message()
    assert "".join(texts) == "Let me see."
    assert [block.model_dump(exclude={"id"}) for block in streamed.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, None) == ("tool_use", None)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.usage.cache_read_input_tokens == whole.usage.input_tokens - 1


async def test_a_tool_turn(connect: Any) -> None:
    _, client = await connect(REPLY, "It is sunny.")
    asked = {**ASKED, "tools": [WEATHER], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    first = await client.messages.create(**asked)
    calls = [block for block in first.content if block.type == "tool_use"]
    assert calls[0].input == json.loads(CITY)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls]
    history = [*MESSAGES, first.to_param(), {"role": "user", "content": results}]
    second = await client.messages.create(**{**asked, "messages": history})
    assert second.content[-1].text == "It is sunny."


async def test_the_tool_runner_of_the_client_runs_a_turn(connect: Any) -> None:
    _, client = await connect(REPLY, "It is sunny.")
    asked = []

    @anthropic.beta_async_tool
    async def get_weather(city: str, days: int = 1) -> str:
        """Return the weather.

        Args:
            city: The city.
            days: The number of days.
        """
        asked.append((city, days))
        return "sunny"

    last = await client.beta.messages.tool_runner(**ASKED, tools=[get_weather]).until_done()
    assert asked == [("Zürich", 3), ("Rome", 3)]
    assert last.content[-1].text == "It is sunny."


async def test_text_by_a_model_of_pydantic(connect: Any) -> None:
    _, client = await connect()
    off: dict[str, Any] = {"type": "disabled"}
    parsed = await client.messages.parse(**ASKED, output_format=Place, thinking=off)
    if parsed.stop_reason == "end_turn":
        assert isinstance(parsed.parsed_output, Place)
    assert parsed.content[0].text.startswith("{")


async def test_errors(connect: Any) -> None:
    server, client = await connect()
    with pytest.raises(anthropic.BadRequestError, match=r"'tools\[0\].type'") as bad:
        await client.messages.create(**ASKED, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert bad.value.type == "invalid_request_error"
    assert bad.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
        await client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": "x" * 5000}]})
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="wrong").messages.create(**ASKED)
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.batches.list()
    server.service.capacity.refusal = QueueFullError("too many", retry_after=1)
    with pytest.raises(anthropic.RateLimitError):
        await client.messages.create(**ASKED)


async def test_an_error_in_a_stream(connect: Any) -> None:
    backend = FakeBackend(n_ctx=4096)
    _, client = await connect(backend=backend)
    backend.failures.extend([(Status.OK, 1)] * 5 + [(Status.FATAL, 0)])
    with pytest.raises(anthropic.APIStatusError) as failed:
        async with client.messages.stream(**ASKED, extra_body={"ignore_eos": True}) as stream:
            await stream.until_done()
    assert failed.value.type == "api_error"
