"""Ollama's API, whole and as lines of JSON; grammars lead the fake model to write tool calls."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from llamaslot.api.ollama import API_VERSION
from llamaslot.base.backend import Status
from llamaslot.base.errors import QueueFullError
from llamaslot.base.model import CPU, FimTokens
from llamaslot.formats.calls import ToolCall
from llamaslot.formats.recognition import format_of
from tests.api.test_restored_messages import QUESTION, TEMPLATE, chats
from tests.api.test_tools import CALL, CITY, NOW, WEATHER, served, template
from tests.api.test_warm_ahead import ANSWERS, REPLIES, settled
from tests.fake_backend import FakeBackend
from tests.formats.messages import EXCERPTS

CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO = [{"role": "user", "content": "Hello"}]
SHORT = {"num_predict": 20, "temperature": 0, "ignore_eos": True}
PLAIN: dict[str, Any] = {"model": "mine:latest", "messages": HELLO, "options": SHORT}
TOOLS: dict[str, Any] = {"messages": HELLO, "tools": [WEATHER, NOW]}
DURATIONS = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}
LAST = {"done", "done_reason", "prompt_eval_count", "eval_count", "cache", *DURATIONS}


async def lines(server: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a stream, divided as Ollama's client divides them."""
    async with server.session.post(server.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "application/x-ndjson"
        text = await response.text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The reply that the lines of a stream add up to."""
    *before, whole = parts
    assert [part["done"] for part in parts] == [*([False] * len(before)), True]
    assert all(set(part) <= {"model", "created_at", "message", "response", "thinking", "done"} for part in before)
    assert {part["model"] for part in parts} == {whole["model"]}
    texts: dict[str, Any] = {}
    for part in parts:
        fields = part.get("message") or {key: part[key] for key in ("response", "thinking") if key in part}
        for name, value in fields.items():
            texts[name] = value if name == "role" else texts.get(name, type(value)()) + value
    return {**whole, **({"message": texts} if "message" in whole else texts)}


def plain(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply without what differs between two requests: times, and what was cached."""
    assert set(reply) >= LAST
    created = datetime.fromisoformat(reply["created_at"])
    assert reply["created_at"].endswith("Z")
    assert abs(datetime.now(UTC) - created) < timedelta(minutes=5)
    assert all(isinstance(reply[name], int) and reply[name] > 0 for name in DURATIONS)
    assert reply["total_duration"] == sum(reply[name] for name in DURATIONS - {"total_duration"})
    return {name: value for name, value in reply.items() if name not in {"created_at", "cache", *DURATIONS}}


async def both(server: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The whole reply, which is the same as what a stream adds up to; streams are the default."""
    whole = await server.ok(path, {**body, "stream": False})
    assert plain(joined(await lines(server, path, body))) == plain(whole)
    return whole


async def test_a_chat(server: Any) -> None:
    first = await both(server, CHAT, PLAIN)
    own = {"messages": HELLO, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    chat = await server.ok("/v1/chat/completions", own)
    assert first["message"] == {"role": "assistant", "content": chat["choices"][0]["message"]["content"]}
    usage = chat["usage"]
    assert (first["prompt_eval_count"], first["eval_count"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert (first["model"], first["done_reason"]) == ("mine:latest", "length")
    assert first["cache"]["miss"] == "cold"
    again = await server.ok(CHAT, {**PLAIN, "stream": False})
    assert again["cache"]["cells"] == again["prompt_eval_count"] - 1
    assert again["cache"]["computed"] == 1


async def test_why_a_reply_ended(server: Any) -> None:
    text = (await both(server, CHAT, PLAIN))["message"]["content"]
    stopped = await both(server, CHAT, {**PLAIN, "options": {**SHORT, "stop": ["\0", text[5:7]]}})
    assert (stopped["message"]["content"], stopped["done_reason"]) == (text[: text.index(text[5:7])], "stop")
    none = await both(server, CHAT, {**PLAIN, "options": {**SHORT, "num_predict": 0}})
    assert (none["message"]["content"], none["done_reason"], none["eval_count"]) == ("", "length", 0)


@pytest.mark.parametrize("family", [name for name in EXCERPTS if name != "gpt-oss"])
async def test_calls_of_every_family_are_objects_without_ids(start: Any, family: str) -> None:
    text = format_of(EXCERPTS[family], {}).render([ToolCall("get_weather", CITY, "a1b2c3d4e")])
    server = await served(start, family, text, text)
    whole = await both(server, CHAT, TOOLS)
    function = {"index": 0, "name": "get_weather", "arguments": json.loads(CITY)}
    assert whole["message"] == {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    assert whole["done_reason"] == "stop"


async def test_thinking_text_and_several_calls(start: Any) -> None:
    text = f"<think>Hm, {{.\n</think>\n\nLet me see.\n{CALL}\n{CALL.replace('Zürich', 'Rome')}"
    server = await served(start, "hermes-thinking", *[text] * 3)
    message = (await both(server, CHAT, TOOLS))["message"]
    assert (message["thinking"], message["content"]) == ("Hm, {.", "Let me see.")
    functions = [call["function"] for call in message["tool_calls"]]
    assert [(each["index"], each["arguments"]["city"]) for each in functions] == [(0, "Zürich"), (1, "Rome")]
    parts = await lines(server, CHAT, {**TOOLS, "logprobs": True})
    with_calls = [part for part in parts if "tool_calls" in part["message"]]
    assert [len(part["message"]["tool_calls"]) for part in with_calls] == [1, 1], "each as soon as it is complete"


async def test_arguments_on_several_lines_are_written_as_one(start: Any) -> None:
    arguments = '{\n "a": 1.0,\n "b": 1e400, "c": 123456789012345678901234567890\n}'
    text = f'<tool_call>\n{{"name": "now", "arguments": {arguments}}}\n</tool_call>'
    server = await served(start, "hermes", text, text)
    await lines(server, CHAT, TOOLS)
    async with server.session.post(server.url + CHAT, json={**TOOLS, "stream": False}) as response:
        reply = await response.text()
    assert '"arguments":{"a":1.0,"b":1e400,"c":123456789012345678901234567890}' in reply


async def test_ends_of_lines_in_a_text_do_not_end_a_line(start: Any) -> None:
    text = "a\u2028b\u2029c\x85d\ne\x0bf"
    server = await served(start, "hermes", text, text)
    assert (await both(server, CHAT, {"model": "\u2028", "messages": HELLO}))["message"]["content"] == text


async def test_a_call_that_is_cut_is_left_out(start: Any) -> None:
    server = await served(start, "hermes", CALL, CALL)
    whole = await both(server, CHAT, {**TOOLS, "options": {"num_predict": 60}})
    assert (whole["message"], whole["done_reason"]) == ({"role": "assistant", "content": ""}, "length")


async def test_a_tool_turn_is_restored_without_ids(start: Any) -> None:
    backend = FakeBackend(n_ctx=4096, n_slots=2, n_reserved=2)
    call = '<tool_call>{"name" : "look","arguments": {"far":true, "at" :"é"} }</tool_call>'
    grammars = [f'start: {json.dumps(text)} " "?' for text in (call, "There is a tree.")]
    server = await start(backend=backend, template=TEMPLATE, engine={"grammars": grammars})
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": HELLO, "tools": [tool], "stream": False, "options": {"temperature": 0}}
    first = await server.ok(CHAT, body)
    result = {"role": "tool", "content": "a tree", "tool_name": "look"}
    second = await server.ok(CHAT, {**body, "messages": [*HELLO, first["message"], result]})
    assert second["message"]["content"].strip() == "There is a tree."
    # The reply's tokens but the last, which was never computed.
    assert second["cache"]["restored_tokens"] >= first["eval_count"] - 1
    assert second["cache"]["cells"] >= first["prompt_eval_count"] + first["eval_count"] - 1


async def test_the_next_turn_is_computed_ahead(start: Any) -> None:
    server = (await chats(start, *REPLIES, warm_ahead=10_000)).server
    messages, computed = [], []
    for answer in ANSWERS:
        messages.append(QUESTION)
        ahead = await settled(server)
        reply = await server.ok(CHAT, {"messages": messages, "stream": False, "options": {"temperature": 0}})
        messages.append({"role": "assistant", "content": reply["message"]["content"]})
        assert reply["message"]["content"].strip() == answer.strip()
        computed.append((ahead, reply["cache"]["computed"]))
    assert [ahead > len(ANSWERS[0]) for ahead, _ in computed] == [False, False, True, True]
    assert all(n < 60 for _, n in computed[2:])


async def test_a_format(start: Any) -> None:
    server = await served(start, "hermes")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    options = {"temperature": 0, "num_predict": 60}
    reply = await server.ok(CHAT, {"messages": HELLO, "stream": False, "options": options, "format": schema})
    assert json.loads(reply["message"]["content"])["n"] in {1, 2}
    body = {"prompt": "Hello", "stream": False, "options": options, "format": "json"}
    for more in ({}, {"raw": True}):
        assert (await server.ok(GENERATE, {**body, **more}))["response"].startswith("{")


async def test_probabilities_are_beside_the_text(server: Any) -> None:
    for path, body in ((CHAT, PLAIN), (GENERATE, {"prompt": "Hello", "options": SHORT, "raw": True})):
        asked = {**body, "logprobs": True, "top_logprobs": 2}
        whole = await server.ok(path, {**asked, "stream": False})
        parts = await lines(server, path, asked)
        assert "logprobs" not in parts[-1]
        assert [row for part in parts[:-1] for row in part["logprobs"]] == whole["logprobs"]
        text = whole["message"]["content"] if path == CHAT else whole["response"]
        assert "".join(row["token"] for row in whole["logprobs"]) == text
        assert all(len(row["top_logprobs"]) == 2 for row in whole["logprobs"])
        alone = await server.ok(path, {**body, "logprobs": True, "stream": False})
        assert all(row["top_logprobs"] == [] for row in alone["logprobs"])


async def test_a_question_is_answered_as_in_a_chat(start: Any) -> None:
    text = "<think>Hm.</think>\n\nHello!"
    server = await served(start, "hermes-thinking", text, text, text)
    whole = await both(server, GENERATE, {"model": "x", "prompt": "Hello", "system": "Be brief."})
    assert (whole["thinking"], whole["response"]) == ("Hm.", "Hello!")
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    chat = await server.ok(CHAT, {"messages": messages, "stream": False})
    assert chat["prompt_eval_count"] == whole["prompt_eval_count"]
    assert chat["cache"]["computed"] == 1


async def test_a_context_is_continued_by_its_tokens(server: Any) -> None:
    body = {"prompt": "Hello", "options": SHORT}
    first = await both(server, GENERATE, body)
    context = first["context"]
    assert len(context) == first["prompt_eval_count"] + first["eval_count"]
    second = await both(server, GENERATE, {**body, "prompt": "More", "context": context})
    question = (await server.ok("/apply-template", {"messages": [{"role": "user", "content": "More"}]}))["prompt"]
    assert second["prompt_eval_count"] == len(context) + len(question)
    assert second["context"][: len(context)] == context
    third = await server.ok(GENERATE, {**body, "context": second["context"], "stream": False})
    # All but the token that was sampled last.
    assert third["cache"]["cells"] >= len(second["context"]) - 1


async def test_a_raw_prompt_is_completed_as_it_is(start: Any) -> None:
    text = " <think>x</think> y "
    server = await served(start, "hermes-thinking", text, text)
    whole = await both(server, GENERATE, {"prompt": "Hello", "raw": True})
    assert whole["response"] == text
    assert "thinking" not in whole
    assert "context" not in whole
    assert whole["prompt_eval_count"] == len("<Hello")


async def test_a_gap_is_filled(start: Any) -> None:
    backend = FakeBackend(n_ctx=1024)
    backend.info = msgspec.structs.replace(backend.info, fim=FimTokens(1, 2, 3))
    server = await start(backend=backend)
    whole = await both(server, GENERATE, {"prompt": "def f(", "suffix": "return x", "options": SHORT})
    own = {"prompt": "def f(", "suffix": "return x", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    assert whole["response"] == (await server.ok("/v1/completions", own))["choices"][0]["text"]
    assert "context" not in whole
    assert "insert" in (await server.ok("/api/show", {"model": "x"}))["capabilities"]


@pytest.mark.parametrize("body", [{"model": "x", "keep_alive": "5m"}, {"stream": False, "options": {"num_ctx": 9}}])
async def test_a_request_for_nothing_finds_the_model_loaded(start: Any, body: dict[str, Any]) -> None:
    server = await start(backend=FakeBackend(n_ctx=20_000, n_slots=1), alias="own")
    busy = {"prompt": "x", "ignore_eos": True, "stream": True}
    async with server.session.post(server.url + "/completion", json=busy) as running:
        await running.content.readuntil(b"\n\n")
        for path, fields in ((CHAT, {}), (CHAT, {"messages": []}), (GENERATE, {}), (GENERATE, {"prompt": ""})):
            reply = await server.ok(path, {**body, **fields})
            text = {"message": {"role": "assistant", "content": ""}} if path == CHAT else {"response": ""}
            del reply["created_at"]
            assert reply == {"model": body.get("model", "own:latest"), **text, "done": True, "done_reason": "load"}
        assert not running.content.at_eof(), "it still has the only slot"


async def test_thinking_is_turned_on_and_off(start: Any) -> None:
    source = "{{ enable_thinking }}{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    server = await start(template=source, reasoning=False)
    cases = ((None, "False"), (True, "True"), (False, "False"), ("low", "Truelow"), ("max", "Truehigh"))
    for think, words in cases:
        reply = await server.ok(CHAT, {**PLAIN, "think": think, "stream": False})
        assert reply["prompt_eval_count"] == len(f"<{words}Hello<think>"), think


async def test_the_model_is_described(start: Any) -> None:
    backend = FakeBackend()
    facts = {"description": "llama 8B Q4_K - Medium", "architecture": "llama", "n_params": 8, "size_bytes": 5}
    backend.info = msgspec.structs.replace(backend.info, **facts, device=CPU)
    server = await start(backend=backend, template=template("hermes-thinking"), alias="b:7,a")
    listed = (await server.get("/api/tags"))[1]["models"]
    (model,) = listed
    details = {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "8B",
        "quantization_level": "Q4_K_M",
    }
    assert (model["name"], model["model"], model["size"], model["details"]) == ("a:latest", "a:latest", 5, details)
    assert len(bytes.fromhex(model["digest"])) == 32
    assert model["capabilities"] == ["completion", "tools", "thinking"]
    assert datetime.fromisoformat(model["modified_at"]) <= datetime.now(UTC)
    (running,) = (await server.get("/api/ps"))[1]["models"]
    same = ("name", "model", "size", "digest", "details")
    assert {key: running[key] for key in same} == {key: model[key] for key in same}
    assert (running["size_vram"], running["context_length"]) == (0, 256)
    assert running["expires_at"].startswith("9999-12-31T23:59:59")
    server.service.is_loaded = False
    assert (await server.get("/api/ps"))[1] == {"models": []}
    for body in ({"model": "any"}, {"name": "any", "verbose": True}, {}):
        shown = await server.ok("/api/show", body)
        assert (shown["details"], shown["capabilities"]) == (details, model["capabilities"])
        assert shown["template"] == template("hermes-thinking")
        assert shown["parameters"].split() == ["num_ctx", "256"]
        assert shown["model_info"] == {
            "general.architecture": "llama",
            "general.basename": "fake",
            "general.parameter_count": 8,
            "llama.context_length": 256,
            "llama.embedding_length": 1,
        }
    assert (await server.get("/api/version"))[1] == {"version": API_VERSION}
    for path in ("/api/tags", "/api/ps", "/api/version"):
        async with server.session.head(server.url + path) as response:
            assert response.status == 200


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {**PLAIN, "options": {"temperature": "hot"}}, "'options.temperature': expected a number or null"),
        (CHAT, {**PLAIN, "options": {"stop": ["x"] * 300}}, "'options.stop' has 300 strings"),
        (CHAT, {**PLAIN, "options": {"id_slot": 99}}, "'options.id_slot' must be below"),
        (CHAT, {**PLAIN, "format": {"type": "object", "not": {}}}, "'format': JSON Schema's 'not'"),
        (CHAT, {**PLAIN, "messages": [{**HELLO[0], "images": ["a"]}]}, "'messages[0].images[0]': image input"),
        (CHAT, {**PLAIN, "messages": [{"role": "boss", "content": ""}]}, "'messages[0].role' must be one of"),
        (CHAT, {**PLAIN, "tools": [{"type": "web_search"}]}, "'tools[0]' must be an object of type 'function'"),
        (CHAT, {**PLAIN, "messages": [{**HELLO[0], "content": "x" * 2000}]}, "exceeds the available context size"),
        (GENERATE, {"prompt": "x" * 2000}, "exceeds the available context size"),
        (GENERATE, {"prompt": "x", "context": [10**6]}, "'context' holds token 1000000"),
        (GENERATE, {"prompt": "x", "context": [97] * 2000}, "exceeds the available context size"),
        (GENERATE, {"prompt": "x", "suffix": "y"}, "'suffix' needs a model whose vocabulary"),
        (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, "'template': templates of requests"),
        (GENERATE, {"prompt": 5}, "'prompt': expected a string or null"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_errors_have_the_form_of_ollama(server: Any, path: str, body: Any, message: str) -> None:
    status, reply = await server.post(path, body)
    assert (status, reply.keys()) == (400, {"error"})
    assert message in reply["error"]


async def test_errors_of_the_middleware_have_it_too(start: Any) -> None:
    server = await start(api_keys=("secret",), max_body_bytes=1000)
    key = {"Authorization": "Bearer secret"}
    large = {**PLAIN, "messages": [{"role": "user", "content": "x" * 2000}]}

    async def refused(path: str = CHAT, body: Any = PLAIN, method: str = "POST", **headers: str) -> Any:
        async with server.session.request(method, server.url + path, json=body, headers=headers) as response:
            reply = await response.json()
        assert reply.keys() == {"error"}
        return response.status, reply["error"]

    assert await refused() == (401, "Invalid API Key")
    assert (await refused(**key, Origin="https://example.org"))[0] == 403
    assert (await refused(method="PUT", **key))[0] == 405
    assert (await refused(body=large, **key))[0] == 413
    said = "this server does not compute embeddings; start it with --embeddings"
    for path in ("/api/embed", "/api/embeddings"):
        assert await refused(path, **key) == (501, said)
    assert (await server.post(CHAT, {**PLAIN, "stream": False}, headers=key))[0] == 200
    server.service.capacity.refusal = QueueFullError("too many", retry_after=1)
    assert await refused(**key) == (429, "too many")


async def test_an_error_in_a_stream_is_its_last_line(start: Any) -> None:
    backend = FakeBackend()
    server = await start(backend=backend)
    backend.failures.extend([(Status.OK, 1)] * 3 + [(Status.FATAL, 0)])
    *before, last = await lines(server, CHAT, PLAIN)
    assert before
    assert not any(part["done"] for part in before)
    assert last.keys() == {"error"}


@pytest.mark.slow
async def test_pings_are_empty_parts(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=20_000, n_slots=1), sse_ping_interval=1)
    body = {**PLAIN, "options": {**SHORT, "num_predict": 19_000}}
    async with server.session.post(server.url + CHAT, json=body) as first:
        await first.content.readuntil(b"\n")
        async with server.session.post(server.url + CHAT, json=body) as second:
            line = json.loads(await asyncio.wait_for(second.content.readuntil(b"\n"), 30))
    assert (line["message"], line["done"]) == ({"role": "assistant", "content": ""}, False)


async def test_sessions_have_their_header_and_their_option(server: Any) -> None:
    body = {**PLAIN, "stream": False}
    await server.post(CHAT, body, headers={"X-Session-ID": "mine"})
    again = await server.ok(CHAT, {**body, "options": {**SHORT, "session_id": "mine"}})
    assert again["cache"]["session_match"] not in (None, "new")
    assert (await server.ok(CHAT, body))["cache"]["session_match"] is None
