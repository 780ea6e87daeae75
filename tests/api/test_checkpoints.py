"""Models with sliding windows or recurrent states reuse prefixes by checkpoints: chats over HTTP on real ones."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from bench import synthetic
from llamaslot.backend.disk import SlotFiles
from llamaslot.backend.llama import LlamaBackend, LlamaSettings, self_test
from llamaslot.base.model import CheckpointLimits
from llamaslot.base.stats import CacheState
from llamaslot.cli.cache_command import summary

SYSTEM = "you answer in few words and say what you know " * 30
MAX_AGAIN = 64
"""Tokens that a turn may compute in addition to its own."""
LIMITS = CheckpointLimits(64 * 2**20, 32, 256)
THINKING_TEMPLATE = """
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content and loop.last %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
POLICIES = {"checkpoint_bytes": LIMITS.ram_bytes, "checkpoint_step": LIMITS.step}


@pytest.fixture(scope="module", params=["tiny-lfm2", "tiny-mamba", "tiny-swa"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaBackend]:
    model = synthetic.ensure(request.param, folder=tmp_path_factory.mktemp("models"))
    with patch.object(self_test, "START_LIMIT_S", 60):
        backend = LlamaBackend(LlamaSettings(model, n_ctx=4096, n_slots=2, n_ubatch=128, checkpoints=True))
    yield backend
    backend.close()


@pytest.fixture
async def server(start: Any, backend: LlamaBackend) -> AsyncIterator[Any]:
    server = await start(
        backend=backend,
        template=synthetic.CHAT_TEMPLATE,
        engine={**POLICIES, "ram_bytes": 64 * 2**20, "debug_invariants": True},
    )
    yield server
    await server.idle()
    await server.ok("/cache/clear", {})


class Chat:
    """A conversation that grows turn by turn."""

    def __init__(self, server: Any, system: str = SYSTEM) -> None:
        self.server = server
        self.messages = [{"role": "system", "content": system}]

    async def turn(self, question: str, **fields: Any) -> dict[str, Any]:
        """Ask a question; returns the usage and the `cache` of the reply."""
        self.messages.append({"role": "user", "content": question})
        body = {"messages": self.messages, "max_tokens": 20, "temperature": 0, "ignore_eos": True, **fields}
        reply = await self.server.ok("/v1/chat/completions", body)
        self.messages.append(reply["choices"][0]["message"])
        return {
            "total": reply["usage"]["total_tokens"],
            "prompt": reply["usage"]["prompt_tokens"],
            **reply["cache"],
        }


async def test_the_next_turn_of_a_chat_computes_only_what_is_new(server: Any) -> None:
    chat = Chat(server)
    first = await chat.turn("what is it that you know")
    assert first["computed"] == first["prompt"] > 300
    last = first
    for question in ("and what else", "tell me more of that", "is that all"):
        turn = await chat.turn(question)
        n_new = turn["prompt"] - last["total"]
        assert 0 < n_new < 40
        assert turn["computed"] <= n_new + MAX_AGAIN
        assert turn["cells"] + turn["ram"] + turn["computed"] == turn["prompt"]
        last = turn


async def test_another_chat_with_the_same_system_prompt_computes_its_own_messages(server: Any) -> None:
    # The first one leaves a checkpoint at the end of the system prompt.
    await Chat(server).turn("what is it that you know")
    for question in ("who are you", "where do you live", "why"):
        assert (await Chat(server).turn(question))["computed"] <= 20 + MAX_AGAIN


async def test_a_thinking_model_computes_again_only_what_its_template_strips(
    start: Any, backend: LlamaBackend
) -> None:
    """The reasoning of a reply is not in the prompt of the next turn, which continues where that reply began."""
    server = await start(backend=backend, template=THINKING_TEMPLATE, engine={**POLICIES, "ram_bytes": 64 * 2**20})
    chat = Chat(server)
    grammar = 'root ::= "<think>" [a-z ]{150} "</think>" [a-z ]{20}'
    turns = []
    for question in ("what is it that you know", "and what else", "tell me more of that"):
        turns.append(await chat.turn(question, grammar=grammar, max_tokens=300, ignore_eos=False))
        assert len(chat.messages[-1]["reasoning_content"]) > 120
    for last, turn in itertools.pairwise(turns):
        assert turn["prompt"] < last["total"], "nothing was stripped"
        assert turn["computed"] <= turn["prompt"] - last["prompt"] + MAX_AGAIN
    await server.idle()
    await server.ok("/cache/clear", {})


@pytest.mark.slow
async def test_where_system_prompts_depart_is_learned_from_the_second_one(
    start: Any, backend: LlamaBackend
) -> None:
    """No control token is there, so the first prompt has no checkpoint near it."""
    server = await start(
        backend=backend, template=synthetic.CHAT_TEMPLATE, engine={**POLICIES, "checkpoint_step": 4000}
    )
    words = SYSTEM.split()
    systems = [" ".join([*words[:160], each, *words[160:200]]) for each in ("one", "two", "three", "four")]
    first, second, third, fourth = [await Chat(server, system).turn("who are you") for system in systems]
    assert (second["miss"], second["computed"]) == ("no_checkpoint", second["prompt"])
    assert third["cells"] + third["computed"] == third["prompt"]
    assert third["computed"] < first["prompt"] / 2
    assert fourth["computed"] <= third["computed"]
    assert third["miss"] == "diverged"
    await server.idle()
    await server.ok("/cache/clear", {})


async def test_cache_shows_checkpoints(server: Any, backend: LlamaBackend) -> None:
    assert backend.info.checkpoint_size is not None
    before = (await server.get("/cache"))[1]["checkpoints"]
    assert (before["count"], before["used_bytes"], before["total_bytes"]) == (0, 0, LIMITS.ram_bytes)
    chat = Chat(server)
    for question in ("what is it that you know", "and what else"):
        await chat.turn(question)
    _, state = await server.get("/cache")
    now = state["checkpoints"]
    sizes = [prefix["checkpoint"] for prefix in state["prefixes"] if prefix["checkpoint"] is not None]
    assert len(sizes) == now["count"] > 0
    assert sum(sizes) == now["used_bytes"] <= now["count"] * backend.info.checkpoint_size.of(4096)
    assert now["taken"] >= now["count"]
    [line] = [each for each in summary(msgspec.convert(state, CacheState)) if each.startswith("states ")]
    assert f"     {now['count']} checkpoints, " in line
    assert line.endswith(f" of 64 MiB; {now['taken']} taken, {now['restored']} restored, 0 evicted")
    metrics = dict(line.rsplit(" ", 1) for line in (await server.service.exposition()).decode().splitlines())
    assert float(metrics["llamaslot_checkpoints"]) == now["count"]
    assert float(metrics["llamaslot_checkpoint_used_bytes"]) == now["used_bytes"]
    assert float(metrics["llamaslot_checkpoint_bytes"]) == now["total_bytes"]
    for name in ("taken", "restored", "evicted"):
        assert float(metrics[f"llamaslot_checkpoints_{name}_total"]) == now[name]


async def test_a_slot_is_saved_erased_and_restored(start: Any, backend: LlamaBackend, tmp_path: Path) -> None:
    info = backend.info
    assert info.segment_size is not None
    store = SlotFiles(tmp_path, lambda: b"k" * 32, info.segment_size, info.n_ctx_slot, info.checkpoint_size)
    server = await start(backend=backend, template=synthetic.CHAT_TEMPLATE, engine={**POLICIES, "snapshots": store})
    chat = Chat(server)
    await chat.turn("what is it that you know", id_slot=0)
    saved = await server.ok("/slots/0?action=save", {"filename": "a.bin"})
    erased = await server.ok("/slots/0?action=erase", {})
    assert erased["n_erased"] == saved["n_saved"] > 300
    await server.ok("/cache/clear", {})
    restored = await server.ok("/slots/1?action=restore", {"filename": "a.bin"})
    assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
    second = await chat.turn("and what else", id_slot=1)
    assert second["cells"] == saved["n_saved"]
    assert second["computed"] <= 40
