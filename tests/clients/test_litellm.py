"""litellm: chats, streams, tools and Responses by its providers for OpenAI, Anthropic, vLLM, Ollama and texts."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

from tests.clients.conftest import Lead
from tests.clients.servers import Server, call

MESSAGES = [{"role": "user", "content": "Hello! My name is Ada."}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
PROVIDERS = {"openai/demo": "/v1", "anthropic/demo": "", "hosted_vllm/demo": "/v1", "ollama_chat/demo": ""}
"""Paths of the API's base, by the model's name."""


def asked(server: Server, model: str) -> dict[str, Any]:
    return {"model": model, "api_base": server.url + PROVIDERS[model], "api_key": "none", "messages": MESSAGES}


@pytest.mark.parametrize("model", PROVIDERS)
def test_a_chat_whole_and_streamed(server: Server, model: str) -> None:
    whole = litellm.completion(**asked(server, model), max_tokens=64)
    assert "Ada" in whole.choices[0].message.content
    chunks = list(litellm.completion(**asked(server, model), max_tokens=64, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert whole.usage.prompt_tokens > 0


@pytest.mark.parametrize("model", PROVIDERS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_turn(lead: Lead, model: str, stream: bool) -> None:
    server = lead(call("get_weather", city="Oslo"), "Sunny.")
    fields = {**asked(server, model), "tools": [TOOL], "stream": stream}
    first = litellm.completion(**fields)
    if stream:
        first = litellm.stream_chunk_builder(list(first), messages=MESSAGES)
    (made,) = first.choices[0].message.tool_calls
    assert json.loads(made.function.arguments) == {"city": "Oslo"}
    history = [*MESSAGES, first.choices[0].message.model_dump()]
    history.append({"role": "tool", "tool_call_id": made.id, "content": "sunny"})
    second = litellm.completion(**{**fields, "messages": history, "stream": False})
    assert second.choices[0].message.content == "Sunny."


def test_text_and_responses(server: Server) -> None:
    base = {"api_base": f"{server.url}/v1", "api_key": "none"}
    text = litellm.text_completion(model="text-completion-openai/demo", prompt="Hello", max_tokens=4, **base)
    assert text.choices[0].text
    response = litellm.responses(model="openai/demo", input="Hello! My name is Ada.", **base)
    assert "Ada" in response.output[-1].content[0].text
