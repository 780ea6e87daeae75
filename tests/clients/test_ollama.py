"""ollama: chats, tools, schemas, questions, and what it asks about the model."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any, Literal

import ollama
import pydantic
import pytest

from tests.clients.conftest import Lead
from tests.clients.servers import Server, call, serving

HELLO: list[Any] = [{"role": "user", "content": "Hello! My name is Ada."}]


class Move(pydantic.BaseModel):
    direction: Literal["left", "right"]
    steps: Literal[1, 2]


@pytest.fixture
def client(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url)


def test_a_chat_whole_and_streamed(client: ollama.Client) -> None:
    whole = client.chat("demo", HELLO)
    assert "Ada" in whole.message.content
    assert (whole.model, whole.done, whole.done_reason) == ("demo", True, "stop")
    *parts, last = client.chat("demo:latest", HELLO, stream=True, options={"temperature": 0, "num_ctx": 4096})
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert not any(part.done for part in parts)
    assert (last.model, last.done_reason, last.message.content) == ("demo:latest", "stop", "")
    assert (last.prompt_eval_count, last.eval_count) == (whole.prompt_eval_count, whole.eval_count)
    assert last.total_duration == last.load_duration + last.prompt_eval_duration + last.eval_duration


def test_without_waiting(server: Server, client: ollama.Client) -> None:
    async def asked() -> str:
        stream = await ollama.AsyncClient(host=server.url).chat("demo", HELLO, stream=True)
        return "".join([part.message.content async for part in stream])

    assert asyncio.run(asked()) == client.chat("demo", HELLO).message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_turn(lead: Lead, stream: bool) -> None:
    def degrees_in(city: str) -> str:
        """Return the temperature.

        Args:
            city: The city.
        """
        return f"21 degrees in {city}"

    client = ollama.Client(host=lead(call("degrees_in", city="Oslo"), "It is 21 degrees.").url)
    messages: list[Any] = [{"role": "user", "content": "How warm is it in Oslo?"}]
    for _ in range(2):
        reply: Any = client.chat("demo", messages, tools=[degrees_in], stream=stream)
        parts = list(reply) if stream else [reply]
        messages += [part.message for part in parts if part.message.content or part.message.tool_calls]
        for part in parts:
            for asked in part.message.tool_calls or ():
                assert asked.function.name == "degrees_in"
                result = degrees_in(**asked.function.arguments)
                messages.append({"role": "tool", "tool_name": asked.function.name, "content": result})
    texts = [message["content"] for message in messages]
    assert texts[:3] == ["How warm is it in Oslo?", "", "21 degrees in Oslo"]
    assert "".join(texts[3:]) == "It is 21 degrees."


def test_a_schema(client: ollama.Client) -> None:
    reply = client.chat("demo", HELLO, format=Move.model_json_schema(), think=False)
    assert Move.model_validate_json(reply.message.content)


def test_a_question_and_its_context(client: ollama.Client) -> None:
    whole = client.generate("demo", HELLO[0]["content"])
    *parts, last = client.generate("demo", HELLO[0]["content"], stream=True)
    assert "".join(part.response for part in parts) == whole.response
    assert whole.context == last.context
    assert len(whole.context) == whole.prompt_eval_count + whole.eval_count
    again = client.generate("demo", "What is my name?", context=whole.context)
    assert "Ada" in again.response
    assert list(again.context[: len(whole.context)]) == list(whole.context)
    raw = client.generate("demo", "Hello", raw=True, options={"num_predict": 3}, logprobs=True, top_logprobs=2)
    assert raw.context is None
    assert "".join(row.token for row in raw.logprobs) == raw.response
    assert client.generate("demo", keep_alive="5m").done_reason == "load"


def test_vectors(tmp_path: Path) -> None:
    with serving(tmp_path, "--embeddings", "--pooling", "last", "-c", "2048", template=None) as server:
        client = ollama.Client(host=server.url)
        got = client.embed("demo", ["Hello!", "My name is Ada."])
        assert (got.model, len(got.embeddings)) == ("demo", 2)
        assert all(math.isclose(sum(x * x for x in each), 1, rel_tol=1e-4) for each in got.embeddings)
        assert 0 < got.load_duration < got.total_duration
        (one,) = client.embed("demo", "Hello!").embeddings
        assert one == pytest.approx(list(got.embeddings[0]), abs=1e-3)
        raw = client.embeddings("demo", "Hello!").embedding
        length = math.sqrt(sum(x * x for x in raw))
        assert [x / length for x in raw] == pytest.approx(list(one), abs=1e-3)
        assert len(client.embed("demo", "Hello!", dimensions=8).embeddings[0]) == 8
        long = "Hello! " * 5_000
        assert client.embed("demo", long).prompt_eval_count < 2048
        with pytest.raises(ollama.ResponseError, match="context size") as failed:
            client.embed("demo", long, truncate=False)
        assert failed.value.status_code == 400
        assert client.show("demo").capabilities == ["embedding"]


def test_the_model_is_listed(client: ollama.Client) -> None:
    (listed,) = client.list().models
    (running,) = client.ps().models
    assert listed.model == running.model == "demo:latest"
    assert listed.details.format == "gguf"
    assert running.context_length == client.show("demo").modelinfo["llama.context_length"]
    assert "tools" in client.show("demo:latest").capabilities


def test_errors(client: ollama.Client) -> None:
    for asked, status, message in (
        (lambda: client.chat("demo", HELLO, options={"temperature": "hot"}), 400, "'options.temperature'"),
        (lambda: list(client.chat("demo", HELLO, stream=True, format={"not": {}})), 400, "'format'"),
        (lambda: client.generate("demo", "a", template="{{ .Prompt }}"), 400, "'template'"),
        (lambda: client.embed("demo", "a"), 501, "embeddings"),
        (lambda: client.pull("demo"), 404, "/api/pull"),
    ):
        with pytest.raises(ollama.ResponseError, match=message) as failed:
            asked()
        assert failed.value.status_code == status
