"""Remembered messages on disk: found after a restart, until their session or the cache is dropped."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llamaslot.backend.disk import DiskStore
from llamaslot.base.commands import ClearCache
from llamaslot.base.events import Finished, Progress
from llamaslot.base.prompt_jobs import DropSession, Prepare
from llamaslot.formats.format import ParsedMessage
from llamaslot.formats.recognition import format_of
from tests.engine.harness import Harness, running
from tests.fake_backend import FakeBackend
from tests.prompt_threads import CONTEXT

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
CALL = '<tool_call>\n{"name" : "look","arguments": {"far":true} }\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
QUESTION = {"role": "user", "content": "What is there?"}


@asynccontextmanager
async def served(folder: Path, **settings: Any) -> AsyncIterator[Harness]:
    """An engine whose first reply is a call if `leads`."""
    grammars = (
        [f"start: {json.dumps(CALL)} ' '?".replace("'", '"'), 'start: "x"'] if settings.pop("leads", False) else []
    )
    store = DiskStore(folder)
    store.open(b"k" * 32, 10**7)
    backend = FakeBackend(n_slots=2, n_ctx=1024, n_reserved=2)
    try:
        async with running(
            backend, disk=store, ram_bytes=10**6, template=TEMPLATE, grammars=grammars, **settings
        ) as engine:
            yield engine
    finally:
        store.close()


async def chat(engine: Harness, *messages: dict[str, Any], **fields: Any) -> tuple[dict[str, Any], Progress]:
    """The message that a conversation is answered with, and the progress of its request."""
    request_id = f"request {len(engine.ends)}"
    body = msgspec.json.encode(
        {"messages": messages, "tools": [TOOL], "temperature": 0, "max_tokens": 99, **fields}
    )
    context = msgspec.structs.replace(CONTEXT, request_id=request_id)
    job = Prepare("chat", body, context, may_compile=True)
    # The reader is on the event loop here, as all that the harness runs.
    read = engine.local.prompts.worker._reader.read(job)
    assert isinstance(read, tuple), read
    (request,), options = read
    end = await engine.send(request)
    assert isinstance(end, Finished)
    message = ParsedMessage(format_of(TEMPLATE, {}), options.parser, request_id)
    message.push(engine.text(request_id), end.reason)
    calls = [
        {"type": "function", "id": each.id, "function": {"name": each.name, "arguments": each.arguments}}
        for each in message.calls
    ]
    return {"role": "assistant", "content": message.content, "tool_calls": calls}, end.progress


@pytest.mark.parametrize("drop", [DropSession("mine"), ClearCache()], ids=lambda drop: type(drop).__name__)
async def test_messages_survive_a_restart_until_they_are_dropped(tmp_path: Path, drop: Any) -> None:
    async with served(tmp_path, leads=True) as engine:
        message, _ = await chat(engine, QUESTION, session_id="mine")
        (call,) = message["tool_calls"]
        n_sent = len(engine.text("request 0"))
    rest = QUESTION, message, {"role": "tool", "tool_call_id": call["id"], "content": "a wall"}
    async with served(tmp_path, restore_messages=False) as engine:
        assert (await chat(engine, *rest))[1].n_restored == 0
    async with served(tmp_path) as engine:
        assert (await chat(engine, *rest))[1].n_restored == n_sent
        await engine.ask(drop)
        assert (await chat(engine, *rest))[1].n_restored == 0
    async with served(tmp_path) as engine:
        assert (await chat(engine, *rest))[1].n_restored == 0
