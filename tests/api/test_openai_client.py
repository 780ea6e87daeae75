"""The openai client takes every reply and turns every error into its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from llamaslot.base.errors import QueueFullError

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture
async def server(start: Any) -> Any:
    return await start(api_keys=("secret",), max_queue=2)


@pytest.fixture
async def client(server: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


async def test_chat(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(model="any", messages=MESSAGES, max_tokens=200, n=2, temperature=0)
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == reply.choices[1].message.content
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


async def test_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="any",
        messages=MESSAGES,
        max_tokens=6,
        stop=["\n"],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    *chunks, last = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len("".join(chunk.choices[0].delta.content or "" for chunk in chunks)) == 6
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 6


async def test_logprobs(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "any", "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
    chat = {**asked, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    reply = await client.chat.completions.create(**chat)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(each.token for each in logprobs.content) == reply.choices[0].message.content
    assert {len(each.top_logprobs) for each in logprobs.content} == {2}
    streamed = []
    async for chunk in await client.chat.completions.create(**chat, stream=True):
        if (part := chunk.choices[0].logprobs) is not None:
            streamed += part.content or []
    assert streamed == logprobs.content
    text = await client.completions.create(**asked, prompt="Once", logprobs=2)
    legacy = text.choices[0].logprobs
    assert legacy is not None
    assert "".join(legacy.tokens or []) == text.choices[0].text
    assert len(legacy.token_logprobs or []) == len(legacy.top_logprobs or []) == len(legacy.text_offset or []) == 6


async def test_completions(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model="any", prompt="Once", max_tokens=6, temperature=0)
    stream = await client.completions.create(model="any", prompt="Once", max_tokens=6, temperature=0, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


async def test_models(client: openai.AsyncOpenAI) -> None:
    [model] = [model async for model in await client.models.list()]
    assert model.id == "fake.gguf"
    assert await client.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.models.retrieve("another/model")
    assert unknown.value.param == "model"


async def test_errors(server: Any, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="any", messages=MESSAGES, temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="context"):
        await client.completions.create(model="any", prompt="x" * 2000, stream=True)
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="any", prompt="x", n=10)
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.InternalServerError, match="--embeddings") as unserved:
        await client.embeddings.create(model="any", input="x")
    assert (unserved.value.status_code, unserved.value.response.headers["X-Should-Retry"]) == (501, "false")
    with pytest.raises(openai.BadRequestError) as unbuilt:
        await client.chat.completions.create(model="any", messages=MESSAGES, modalities=["text", "audio"])
    assert (unbuilt.value.param, unbuilt.value.type) == ("modalities", "not_supported_error")
    server.service.capacity.refusal = QueueFullError("too many", retry_after=1)
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(model="any", prompt="x")
