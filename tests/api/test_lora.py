"""LoRA adapters over HTTP: the field `lora`, `/lora-adapters`, and what other endpoints do with them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llamaslot.backend.disk import SlotFiles
from llamaslot.base.cache_ids import MAX_MARKED_FOR_ADAPTERS
from llamaslot.base.model import Adapter
from tests.fake_backend import FakeBackend

PROMPT = "a prompt that all of these requests begin with, longer than what is worth sharing " * 2
GREEDY = {"temperature": 0, "ignore_eos": True}
CHAT = "/v1/chat/completions"


def backend(*scales: float) -> FakeBackend:
    """A model with an adapter for each scale at start."""
    made = FakeBackend(n_ctx=4096, n_reserved=4, n_adapters=len(scales))
    adapters = (
        Adapter(f"/models/{i}.gguf", f"digest-{i}", scale, f"task {i}", "Do: ") for i, scale in enumerate(scales)
    )
    made.info = msgspec.structs.replace(made.info, adapters=tuple(adapters))
    return made


@pytest.fixture
async def server(start: Any) -> Any:
    return await start(backend=backend(1.0, 0.0))


async def complete(server: Any, *scales: float | None, n: int = 8, prompt: str = PROMPT, **fields: Any) -> Any:
    """A completion with these scales of adapters; with the server's own without any."""
    lora = {"lora": [{"id": i, "scale": scale} for i, scale in enumerate(scales)]} if scales else {}
    return await server.ok("/completion", {"prompt": prompt, "n_predict": n, **GREEDY, **lora, **fields})


async def scales_of(server: Any) -> list[float]:
    status, found = await server.get("/lora-adapters")
    assert status == 200
    return [each["scale"] for each in found]


async def test_the_adapters_are_listed_as_by_llama_server(server: Any) -> None:
    status, found = await server.get("/lora-adapters")
    assert status == 200
    assert found[0] == {
        "id": 0,
        "path": "/models/0.gguf",
        "scale": 1.0,
        "task_name": "task 0",
        "prompt_prefix": "Do: ",
    }
    assert [each["id"] for each in found] == [0, 1]


async def test_a_server_without_adapters_lists_none_and_takes_an_empty_list(start: Any) -> None:
    server = await start()
    assert await server.get("/lora-adapters") == (200, [])
    assert await server.ok("/lora-adapters", []) == {"success": True}
    await complete(server, lora=[])
    for path, field in (("/completion", "lora"), (CHAT, "lora")):
        body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "lora": [{"id": 0, "scale": 1}]}
        status, reply = await server.post(path, body)
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
        assert field in reply["error"]["message"]


async def test_replies_depend_on_the_adapters_and_only_on_them(server: Any) -> None:
    texts = {}
    for scales in ((0, 0), (1, 0), (0, 1), (1, 1), (0.5, 0)):
        texts[scales] = (await complete(server, *scales))["content"]
    assert len(set(texts.values())) == len(texts)
    for scales, text in texts.items():
        again = await complete(server, *scales)
        assert again["content"] == text
        assert again["timings"]["prompt_n"] == 1
    assert (await complete(server))["content"] == texts[1, 0]
    # Those that are not named have the scale 0, and [] names none, so it is as if the field were not there.
    assert (await complete(server, lora=[{"id": 1, "scale": 1}]))["content"] == texts[0, 1]
    assert (await complete(server, lora=[{"id": 1}]))["content"] == texts[0, 0]
    assert (await complete(server, lora=[]))["content"] == texts[1, 0]
    assert (await complete(server, lora=[{"id": 0, "scale": 9}, {"id": 0, "scale": 1}]))["content"] == texts[1, 0]


async def test_the_settings_of_a_reply_name_the_adapters_that_were_applied(server: Any) -> None:
    assert (await complete(server))["generation_settings"]["lora"] == [{"id": 0, "scale": 1.0}]
    assert (await complete(server, 0, 0.5))["generation_settings"]["lora"] == [{"id": 1, "scale": 0.5}]
    assert (await complete(server, 0, 0))["generation_settings"]["lora"] == []


async def test_requests_at_once_give_what_they_give_alone(server: Any, start: Any) -> None:
    chosen = [(i % 3 / 2, i % 2) for i in range(12)]
    replies = await asyncio.gather(*(complete(server, *scales, prompt=f"{PROMPT}{scales}") for scales in chosen))
    fresh = await start(backend=backend(1.0, 0.0))
    for scales, reply in zip(chosen, replies, strict=True):
        alone = await complete(fresh, *scales, prompt=f"{PROMPT}{scales}", cache_prompt=False)
        assert alone["content"] == reply["content"]


async def test_all_choices_of_a_prompt_have_its_adapters(server: Any) -> None:
    chosen = [(0, 1), (1, 0), (0, 0)]

    async def choices(scales: tuple[float, float]) -> list[str]:
        lora = [{"id": i, "scale": scale} for i, scale in enumerate(scales)]
        body = {"prompt": PROMPT, "max_tokens": 8, "n": 3, **GREEDY, "lora": lora}
        return [each["text"] for each in (await server.ok("/v1/completions", body))["choices"]]

    together = await asyncio.gather(*map(choices, chosen))
    for scales, texts in zip(chosen, together, strict=True):
        assert texts == [(await complete(server, *scales, cache_prompt=False))["content"]] * 3


async def test_a_slot_is_restored_for_its_adapters_alone(start: Any, tmp_path: Path) -> None:
    made = backend(0.0, 0.0)
    assert made.info.segment_size is not None
    store = SlotFiles(tmp_path, lambda: b"k" * 32, made.info.segment_size, made.info.n_ctx_slot)
    server = await start(backend=made, engine={"snapshots": store})
    first = await complete(server, 1, 0, id_slot=0)
    await server.ok("/slots/0?action=save", {"filename": "a"})
    await server.post("/cache/clear", {})
    await server.ok("/slots/1?action=restore", {"filename": "a"})
    for scales in ((0, 1), (0, 0), (0.5, 0)):
        assert (await complete(server, *scales))["timings"]["cache_n"] == 0
    again = await complete(server, 1, 0)
    assert again["timings"]["prompt_n"] == 1
    assert again["content"] == first["content"]


async def test_new_scales_count_for_later_requests_only(server: Any) -> None:
    running = asyncio.create_task(complete(server, n=600))
    await server.state_where(lambda state: any(slot.n_generated > 2 for slot in state.slots))
    assert await server.ok("/lora-adapters", [{"id": 1, "scale": 1.5}]) == {"success": True}
    assert await scales_of(server) == [0.0, 1.5]
    assert (await running)["content"] == (await complete(server, 1, n=600))["content"]
    assert (await complete(server))["content"] == (await complete(server, 0, 1.5))["content"]
    await server.ok("/lora-adapters", [])
    assert await scales_of(server) == [0.0, 0.0]
    assert (await complete(server))["content"] == (await complete(server, 0, 0))["content"]


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        ([{"id": 2, "scale": 1}], "names adapter 2, but the ids are 0 to 1"),
        ([{"scale": 1}], "is required"),
        ([{"id": -1, "scale": 1}], "an integer"),
        ([{"id": 0, "scale": "much"}], "a number"),
        ([{"id": 0, "scale": 1e300}], "<= 1"),
        ([0], "an object"),
        ({"id": 0, "scale": 1}, "a list"),
        ("all", "a list"),
    ],
)
async def test_wrong_adapters_are_refused_by_name(server: Any, lora: Any, reason: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    for path, body in (
        ("/completion", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x"}),
        (CHAT, {"messages": messages}),
        ("/v1/messages", {"messages": messages, "max_tokens": 1}),
        ("/v1/responses", {"input": "x"}),
    ):
        status, reply = await server.post(path, {**body, "lora": lora})
        assert status == 400, (path, reply)
        assert reason in reply["error"]["message"]
        assert "lora" in reply["error"]["message"]
    before = await scales_of(server)
    status, reply = await server.post("/lora-adapters", lora)
    assert status == 400
    assert (await scales_of(server)) == before


async def test_every_api_that_generates_takes_the_field(server: Any) -> None:
    messages, lora = [{"role": "user", "content": PROMPT}], [{"id": 1, "scale": 1}]
    for path, body in (
        (CHAT, {"messages": messages, "max_tokens": 1}),
        ("/v1/messages", {"messages": messages, "max_tokens": 1}),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 1}),
        ("/api/chat", {"messages": messages, "stream": False, "options": {"num_predict": 1}}),
    ):
        own = (
            {**body, "options": {**body["options"], "lora": lora}} if "options" in body else {**body, "lora": lora}
        )
        await server.post("/cache/clear", {})
        await server.ok(path, body)
        probe = {"messages": messages, "lora": lora}
        probed = await server.ok("/cache/probe", probe)
        assert probed["computed"] == probed["prompt_tokens"]
        await server.ok(path, own)
        assert (await server.ok("/cache/probe", probe))["computed"] < 20, path


async def test_what_is_warmed_and_probed_is_that_of_the_same_adapters(server: Any) -> None:
    body = {"prompt": PROMPT, "lora": [{"id": 1, "scale": 1}]}
    await server.ok("/cache/warm", body)
    n = (await server.ok("/cache/probe", {"prompt": PROMPT}))["prompt_tokens"]
    assert (await server.ok("/cache/probe", {"prompt": PROMPT}))["computed"] == n
    assert (await server.ok("/cache/probe", {**body}))["computed"] < n
    assert (await complete(server, 0, 1))["timings"]["cache_n"] > 0


async def test_a_dropped_session_takes_what_it_has_with_all_adapters(server: Any) -> None:
    for scales in ((1, 0), (0, 1)):
        await complete(server, *scales, session_id="mine")
    async with server.session.delete(f"{server.url}/sessions/mine") as response:
        dropped = await response.json()
    assert dropped["dropped_tokens"] >= 2 * len(PROMPT)
    for scales in ((1, 0), (0, 1)):
        assert (await complete(server, *scales, n=1))["timings"]["cache_n"] == 0


async def test_a_session_continues_from_the_tokens_of_its_own_adapters(server: Any) -> None:
    """What another model would have said is not in its text."""
    first = await complete(server, 1, 0, session_id="mine")
    for scales in ((1, 0), (0, 1)):
        text = PROMPT + first["content"] + " and then"
        warm = await complete(server, *scales, prompt=text, session_id="mine")
        cold = await complete(server, *scales, prompt=text, cache_prompt=False)
        assert warm["content"] == cold["content"]


INVOKED = " <sum>"


async def alora_server(start: Any, **engine: Any) -> Any:
    """A server with an adapter that is active from `INVOKED` on, and another one that is always active."""
    made = backend(0.0, 0.0)
    first, second = made.info.adapters
    own = {"invocation": tuple(INVOKED.encode()), "invocation_text": INVOKED}
    made.info = msgspec.structs.replace(made.info, adapters=(msgspec.structs.replace(first, **own), second))
    return await start(backend=made, engine=engine)


async def test_what_invokes_an_adapter_is_listed_as_by_llama_server(start: Any) -> None:
    server = await alora_server(start)
    _, (first, second) = await server.get("/lora-adapters")
    assert (first["alora_invocation_string"], first["alora_invocation_tokens"]) == (INVOKED, [*INVOKED.encode()])
    assert not {"alora_invocation_string", "alora_invocation_tokens"} & {*second}


async def test_what_precedes_an_invocation_is_shared_with_the_model_alone(start: Any) -> None:
    server = await alora_server(start)
    n = len(PROMPT.encode()) - MAX_MARKED_FOR_ADAPTERS
    invoked = PROMPT + INVOKED + " 1 + 2"
    alone = await complete(server, 0, 0, prompt=invoked)
    first = await complete(server, 1, 0, prompt=invoked)
    assert first["content"] != alone["content"]
    assert n <= first["timings"]["cache_n"] < n + 2
    assert first["content"] == (await complete(server, 1, 0, prompt=invoked, cache_prompt=False))["content"]
    again = await complete(server, 1, 0, prompt=invoked)
    assert (again["content"], again["timings"]["prompt_n"]) == (first["content"], 1)
    # Not with other scales, nor beside an adapter that is always active.
    assert (await complete(server, 0.5, 0, prompt=invoked))["timings"]["cache_n"] == first["timings"]["cache_n"]
    assert (await complete(server, 1, 1, prompt=invoked))["timings"]["cache_n"] == 0
    # So says a probe, when the model alone has computed nothing.
    await server.post("/cache/clear", {})
    await complete(server, 1, 0, prompt=invoked)
    probe = {"prompt": invoked, "lora": [{"id": 0, "scale": 1}]}
    assert (await server.ok("/cache/probe", probe))["computed"] == 1
    # What is invoked so early that its ids could not tell the adapters is shared with the same ones alone.
    early = "abc" + INVOKED + PROMPT
    await complete(server, 0, 0, prompt=early)
    for n_computed in (len("<s>" + early) - 2, 1):
        assert (await server.ok("/cache/probe", probe | {"prompt": early}))["computed"] == n_computed
        await complete(server, 1, 0, prompt=early)
    assert (await server.ok("/cache/probe", {"prompt": invoked}))["computed"] == len(
        " <sum> 1 + 2"
    ) + MAX_MARKED_FOR_ADAPTERS


async def test_a_session_is_dropped_with_what_follows_its_invocations(start: Any) -> None:
    server = await alora_server(start)
    invoked = PROMPT + INVOKED + " 1 + 2"
    await complete(server, 1, 0, prompt=invoked, session_id="mine")
    async with server.session.delete(f"{server.url}/sessions/mine") as response:
        assert (await response.json())["dropped_tokens"] >= len(invoked.encode())
    assert (await complete(server, 1, 0, prompt=invoked))["timings"]["cache_n"] == 0


async def test_a_session_is_dropped_with_turns_that_have_namespaces_of_their_own(start: Any) -> None:
    """Those whose invocation comes so early that its ids could not tell the adapters."""
    server = await alora_server(start)
    early, late = "abc" + INVOKED + PROMPT, PROMPT + INVOKED + " 1 + 2"
    for turns in ((early, late), (late, early), (early, late, early + "d"), (PROMPT, early), (early, PROMPT)):
        for prompt in turns:
            await complete(server, 1, 0, prompt=prompt, session_id="mine")
        async with server.session.delete(f"{server.url}/sessions/mine") as response:
            assert response.status == 200
        for prompt in turns:
            found = await server.ok("/cache/probe", {"prompt": prompt, "lora": [{"id": 0, "scale": 1}]})
            assert found["computed"] == found["prompt_tokens"]


async def test_a_slot_with_an_invoked_adapter_is_saved_and_restored(start: Any, tmp_path: Path) -> None:
    info = backend(0.0).info
    assert info.segment_size is not None
    store = SlotFiles(tmp_path, lambda: b"k" * 32, info.segment_size, info.n_ctx_slot)
    server = await alora_server(start, snapshots=store)
    invoked = PROMPT + INVOKED + " 1 + 2"
    first = await complete(server, 1, 0, prompt=invoked, id_slot=0)
    await server.ok("/slots/0?action=save", {"filename": "a"})
    await server.post("/cache/clear", {})
    await server.ok("/slots/1?action=restore", {"filename": "a"})
    again = await complete(server, 1, 0, prompt=invoked)
    assert (again["content"], again["timings"]["prompt_n"]) == (first["content"], 1)
