"""On real weights: replies match their schema, forced calls can be made, and a seed repeats a reply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.live import Server, serving
from tests.real.conftest import NAMES, REAL, path_of
from tests.real.conversations import GEMMA_TEMPLATE

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
ASKED = [
    {"role": "user", "content": "Ada is 36 and lives in Oslo with two cats. Describe her, and the weather there."}
]
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "likes": {"enum": ["cats", "dogs", None]},
        },
        "required": ["name", "age", "likes"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"type": "number", "multipleOf": 0.5}, "minItems": 2, "maxItems": 4},
    "references": {
        "$defs": {"place": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}}},
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/place"}, "to": {"$ref": "#/$defs/place"}},
        "required": ["from", "to"],
    },
    "one of": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "a"}, "n": {"type": "integer"}},
                "required": ["kind"],
            },
            {
                "type": "object",
                "properties": {"kind": {"const": "b"}, "ok": {"type": "boolean"}},
                "required": ["kind"],
            },
        ]
    },
    "pattern": {"type": "string", "pattern": "^[A-Z][a-z]{2,8} [0-9]{4}$"},
}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
COUNT: dict[str, Any] = {
    "type": "object",
    "properties": {"animal": {"enum": ["cat", "dog"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["animal", "n"],
    "additionalProperties": False,
}
PARAMETERS = {"get_weather": WEATHER, "count_animals": COUNT}
ONE_CALL = {"parallel_tool_calls": False}
"""Small models go on with calls until the limit cuts one."""
LIMIT = 160
SAMPLED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.02}


@pytest.fixture(scope="module", params=NAMES)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with real weights."""
    model = path_of(request.param)
    # Gemma's file has no template.
    template = ("--chat-template-file", GEMMA_TEMPLATE) if request.param == "gemma3" else ()
    folder = tmp_path_factory.mktemp("real")
    with serving(folder, "--in-process", "-m", model, "-c", "4096", "-np", "1", *template) as server:
        yield server


@pytest.mark.parametrize("temperature", [0, 1] if REAL else [1])
@pytest.mark.parametrize("name", SCHEMAS if REAL else ["object"])
def test_replies_match_their_schema(real: Server, name: str, temperature: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMAS[name], "strict": True}}
    body = {"messages": ASKED, "response_format": form, "max_tokens": LIMIT, "temperature": temperature, "seed": 1}
    [choice] = real.post(CHAT, body)["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMAS[name])


def called_in_chat(real: Server, **fields: Any) -> tuple[str, Any]:
    """Return the name and the arguments of the forced call of a chat."""
    tools = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in PARAMETERS.items()]
    body = {"messages": ASKED, "tools": tools, "tool_choice": "required", "max_tokens": LIMIT, **ONE_CALL, **fields}
    [choice] = real.post(CHAT, body)["choices"]
    assert choice["finish_reason"] == "tool_calls", choice
    function = choice["message"]["tool_calls"][0]["function"]
    return function["name"], json.loads(function["arguments"])


def called_in_messages(real: Server, **fields: Any) -> tuple[str, Any]:
    """The same of Messages."""
    tools = [{"name": n, "input_schema": p} for n, p in PARAMETERS.items()]
    fields.pop("seed", None)
    body = {"model": "m", "messages": ASKED, "tools": tools, "max_tokens": LIMIT}
    body["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    got = real.post("/v1/messages", {**body, **fields})
    assert got["stop_reason"] == "tool_use", got
    [call] = [block for block in got["content"] if block["type"] == "tool_use"][:1]
    return call["name"], call["input"]


def called_in_responses(real: Server, **fields: Any) -> tuple[str, Any]:
    """The same of Responses."""
    tools = [{"type": "function", "name": n, "parameters": p} for n, p in PARAMETERS.items()]
    fields.pop("seed", None)
    body = {"model": "m", "input": ASKED[0]["content"], "tools": tools, "tool_choice": "required", **ONE_CALL}
    got = real.post("/v1/responses", {**body, "max_output_tokens": LIMIT, **fields})
    assert got["status"] == "completed", got
    call = next(item for item in got["output"] if item["type"] == "function_call")
    return call["name"], json.loads(call["arguments"])


@pytest.mark.parametrize("temperature", [0, 1] if REAL else [0])
@pytest.mark.parametrize("called", [called_in_chat, called_in_messages, called_in_responses])
def test_a_forced_call_can_be_made(real: Server, called: Any, temperature: int) -> None:
    name, arguments = called(real, temperature=temperature, seed=2)
    jsonschema.validate(arguments, PARAMETERS[name])


@pytest.mark.parametrize("only", PARAMETERS if REAL else ["count_animals"])
def test_a_named_function_is_called(real: Server, only: str) -> None:
    choice = {"type": "function", "function": {"name": only}}
    name, arguments = called_in_chat(real, tool_choice=choice, temperature=0)
    assert name == only
    jsonschema.validate(arguments, PARAMETERS[only])


def test_a_seed_repeats_a_reply(real: Server) -> None:
    def text(seed: int, **fields: Any) -> str:
        body = {"messages": ASKED, "max_tokens": 16, "seed": seed, **SAMPLED, **fields}
        content: str = real.post(CHAT, body)["choices"][0]["message"]["content"]
        return content

    seeds = range(8 if REAL else 2)
    cold = [text(seed, cache_prompt=False) for seed in seeds]
    assert [text(seed, cache_prompt=False) for seed in seeds] == cold
    assert len(set(cold)) > 1
    # A cached prompt ends in another chunk, so its texts may be others; but they, too, are always the same.
    text(0)
    assert [text(seed) for seed in seeds] == [text(seed) for seed in seeds]
