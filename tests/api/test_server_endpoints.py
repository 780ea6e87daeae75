"""Models, properties, slots, metrics, tokens."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec

from llamaslot.base.events import ModelInfoChanged
from llamaslot.base.model import CheckpointLimits, StateKind
from llamaslot.protocol.bodies import TokenizeBody, decode
from tests.fake_backend import FakeBackend


async def test_health(server: Any) -> None:
    for path in ("/health", "/v1/health"):
        assert await server.get(path) == (200, {"status": "ok"})


async def test_models(start: Any) -> None:
    server = await start(alias="house-model")
    for path in ("/models", "/v1/models"):
        _, reply = await server.get(path)
        [model] = reply["data"]
        assert (model["id"], model["aliases"], model["object"]) == ("house-model", ["house-model"], "model")
        assert model["meta"]["n_vocab"] == 258


async def test_a_model_with_several_names(start: Any) -> None:
    server = await start(alias="small, org/model,,fim,")
    names = ["fim", "org/model", "small"]
    _, reply = await server.get("/v1/models")
    assert (reply["data"][0]["id"], reply["data"][0]["aliases"]) == (names[0], names)
    for name in names:
        assert await server.get(f"/v1/models/{name}") == (200, reply["data"][0])
    assert (await server.get("/props"))[1]["model_alias"] == names[0]
    assert (await server.ok("/completion", {"prompt": "x", "max_tokens": 1}))["model"] == names[0]
    status, reply = await server.get("/v1/models/fake.gguf")
    assert (status, reply["error"]["type"]) == (404, "not_found_error")


async def test_tags(start: Any) -> None:
    server = await start(tags="small, chat,,small")
    assert (await server.get("/v1/models"))[1]["data"][0]["tags"] == ["chat", "small"]


async def test_the_owner_by_which_gateways_know_an_engine(start: Any) -> None:
    for settings, owner in (({}, "llamaslot"), ({"owned_by": "vllm"}, "vllm")):
        server = await start(**settings)
        assert (await server.get("/v1/models"))[1]["data"][0]["owned_by"] == owner


async def test_props(start: Any) -> None:
    server = await start(n_predict=64)
    _, props = await server.get("/props")
    assert props["total_slots"] == 4
    assert props["model_path"] == "fake.gguf"
    assert "messages" in props["chat_template"]
    defaults = props["default_generation_settings"]
    assert defaults["n_ctx"] == 1024
    assert defaults["params"]["n_predict"] == 64
    assert defaults["params"]["seed"] == 2**32 - 1
    assert defaults["params"]["temperature"] == 0.8
    assert defaults["params"]["stream"] is False
    body = {**defaults["params"], "prompt": "x", "messages": [{"role": "user", "content": "x"}], "n_predict": 2}
    for path in ("/completion", "/v1/completions", "/v1/chat/completions"):
        await server.ok(path, body)


async def test_props_say_what_is_reused(start: Any) -> None:
    server = await start(backend=FakeBackend(can_trim=False))
    reuse = (await server.get("/props"))[1]["prefix_reuse"]
    assert (reuse["enabled"], reuse["reason"]) == (False, "turned off by the test")
    assert reuse["state"]["kind"] == "none"
    assert reuse["state"]["can_trim"] is False
    assert (reuse["self_test"], reuse["checkpoints"]) == ("", None)


async def test_props_follow_the_self_test_and_keep_the_limits_of_checkpoints(start: Any) -> None:
    server = await start(backend=FakeBackend(kind=StateKind.HYBRID))
    tested = msgspec.structs.replace(server.service.info, self_test="passed")
    server.service.info = msgspec.structs.replace(
        tested,
        self_test="pending",
        self_test_reason="it has not run yet",
        checkpoint_limits=CheckpointLimits(2**20, 32, 1024),
    )
    reuse = (await server.get("/props"))[1]["prefix_reuse"]
    assert (reuse["enabled"], reuse["self_test"]) == (False, "pending")
    assert reuse["reason"].startswith("it has not run yet; ")
    assert "--reuse-self-test on" in reuse["reason"]
    server.service.receive([ModelInfoChanged(tested)])
    reuse = (await server.get("/props"))[1]["prefix_reuse"]
    assert (reuse["enabled"], reuse["reason"], reuse["self_test"]) == (True, "", "passed")
    assert reuse["checkpoints"] == {
        "checkpoint_bytes": 64,
        "total_bytes": 2**20,
        "max_per_path": 32,
        "interval_tokens": 1024,
    }


async def test_slots_show_running_requests(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=20_000, n_slots=2))
    _, slots = await server.get("/slots")
    assert [slot["id"] for slot in slots] == [0, 1]
    assert not any(slot["is_processing"] or "params" in slot for slot in slots)
    assert (await server.get("/slots?fail_on_no_slot=1"))[0] == 200
    body = {"prompt": "Hello", "ignore_eos": True, "max_tokens": 10_000, "n": 2, "top_k": 7, "stop": ["\n\n"]}
    running = asyncio.create_task(server.post("/completion", body))
    await server.state_where(lambda state: all(slot.n_generated > 2 for slot in state.slots))
    _, slots = await server.get("/slots")
    for slot in slots:
        assert slot["is_processing"] is True
        assert slot["params"]["top_k"] == 7
        assert not {"stop", "logit_bias", "stream"} & set(slot["params"])
        [token] = slot["next_token"]
        assert token["has_next_token"] is True
        assert token["n_remain"] + token["n_decoded"] == 10_000
    status, reply = await server.get("/slots?fail_on_no_slot=1")
    assert (status, reply["error"]["type"]) == (503, "unavailable_error")
    running.cancel()
    await asyncio.wait([running])
    await server.idle()
    _, slots = await server.get("/slots")
    assert [slot["next_token"][0]["n_remain"] for slot in slots] == [-1, -1]
    assert all(slot["n_held"] > 0 for slot in slots)


async def test_disabled_endpoints_name_their_flag(start: Any) -> None:
    server = await start(slots=False, metrics=False)
    for path in ("/slots", "/metrics"):
        status, reply = await server.get(path)
        assert (status, reply["error"]["type"]) == (501, "not_supported_error")
        assert "-" + path.replace("/", "-") in reply["error"]["message"]


async def test_metrics_agree_with_timings(start: Any) -> None:
    server = await start(metrics=True)
    body = {"prompt": "Hello there", "ignore_eos": True, "max_tokens": 5}
    timings = [(await server.ok("/completion", body))["timings"] for _ in range(2)]
    async with server.session.get(server.url + "/metrics") as response:
        assert response.content_type == "text/plain"
        assert int(response.headers["Process-Start-Time-Unix"]) > 0
        lines = (await response.text()).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values["llamacpp:prompt_tokens_total"]) == sum(t["prompt_n"] for t in timings)
    assert float(values["llamacpp:prompt_tokens_cached_total"]) == sum(t["cache_n"] for t in timings) > 0
    assert float(values["llamacpp:tokens_predicted_total"]) == 10


async def test_the_load_has_the_names_and_labels_of_vllm(start: Any) -> None:
    """Idle prefixes are no load: a warm server is as free as a cold one."""
    server = await start(backend=FakeBackend(n_ctx=20_000, n_slots=2), metrics=True, alias='the "model"')
    running = [
        asyncio.create_task(server.post("/completion", {"prompt": text, "ignore_eos": True, "max_tokens": 9000}))
        for text in ("a" * 100, "b" * 100, "c" * 100)
    ]
    await server.state_where(lambda state: state.n_queued == 1 and all(slot.n_generated for slot in state.slots))
    n_running, n_waiting, usage = await load(server)
    assert (n_running, n_waiting) == (2, 1)
    assert 200 / 20_000 <= usage <= 0.9
    for each in running:
        each.cancel()
    await asyncio.wait(running)
    await server.idle()
    assert (await server.get("/cache"))[1]["cells"]["used"] > 100
    assert await load(server) == (0, 0, 0)


async def load(server: Any) -> tuple[float, float, float]:
    """The gauges by which gateways balance workers: requests that run and wait, and the KV that is in use."""
    async with server.session.get(server.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("vllm:"))
    assert len(values) == 3
    label = '{model_name="the \\"model\\""}'
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    running, waiting, usage = (float(values[f"vllm:{name}{label}"]) for name in names)
    return running, waiting, usage


async def test_tokenize_and_back(server: Any) -> None:
    text = "Grüße </s>"
    plain = await server.ok("/tokenize", {"content": text, "parse_special": False})
    assert plain["tokens"] == list(text.encode())
    assert await server.ok("/detokenize", plain) == {"content": text, "prompt": text}
    special = await server.ok("/tokenize", {"content": text, "add_special": True})
    assert special["tokens"] == [256, *"Grüße ".encode(), 257]
    assert (await server.ok("/detokenize", special))["content"] == "<s>" + text
    mixed = await server.ok("/tokenize", {"content": ["a", 98, "c"]})
    assert mixed["tokens"] == [97, 98, 99]
    for nothing in ({}, {"content": None}, {"content": []}, {"content": "", "add_special": None}):
        assert await server.ok("/tokenize", nothing) == {"tokens": []}
    for nothing in ({}, {"tokens": None}, {"tokens": []}):
        assert (await server.ok("/detokenize", nothing))["content"] == ""


async def test_tokenize_as_vllm_does(server: Any) -> None:
    _, info = await server.get("/tokenizer_info")
    assert (info["bos_token"], info["eos_token"], info["model_max_length"]) == ("<s>", "</s>", 1024)
    assert "messages" in info["chat_template"]
    text = "Grüße </s>"
    tokens = [256, *"Grüße ".encode(), 257]
    for more, expected in (({}, tokens), ({"add_special_tokens": False}, tokens[1:])):
        reply = await server.ok("/tokenize", {"prompt": text, **more})
        assert reply == {"tokens": expected, "count": len(expected), "max_model_len": 1024}
    assert (await server.ok("/detokenize", {"tokens": tokens[1:-1]}))["prompt"] == "Grüße "


async def test_the_messages_of_a_chat_are_tokenized_as_vllm_does(server: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    reply = await server.ok("/tokenize", {**chat, "model": "any", "return_token_strs": True})
    counted = await server.ok("/v1/chat/completions/input_tokens", chat)
    assert reply["count"] == len(reply["tokens"]) == counted["input_tokens"]
    assert "".join(reply["token_strs"]) == "<s>user: Hi\nassistant: "
    without = await server.ok("/tokenize", {**chat, "add_generation_prompt": False, "add_special_tokens": False})
    assert bytes(without["tokens"]) == b"user: Hi\n"
    for messages, param in (([{"role": "x"}], "messages[0].role"), ("x", "messages")):
        status, error = await server.post("/tokenize", {"messages": messages})
        assert (status, error["error"]["param"]) == (400, param)


async def test_without_special_tokens_the_template_keeps_its_bos(start: Any) -> None:
    backend = FakeBackend()
    backend.info = msgspec.structs.replace(backend.info, adds_bos=True)
    server = await start(backend=backend, template="{{ bos_token }}{{ messages[0].content }}")
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    assert (await server.ok("/tokenize", chat))["tokens"] == [256, *b"Hi"]
    without = await server.ok("/tokenize", {**chat, "add_special_tokens": False})
    assert bytes(without["tokens"]) == b"<s>Hi", "the fake vocabulary does not parse it"


async def test_messages_are_not_decoded_before_the_chat_is(server: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    raw = json.dumps({"messages": messages}).encode()
    assert decode(raw, TokenizeBody).messages == msgspec.Raw(json.dumps(messages).encode())
    assert await server.ok("/tokenize", {"messages": None, "content": "a"}) == {"tokens": [97]}


async def test_tokens_that_are_not_utf8_are_returned_as_bytes(server: Any) -> None:
    reply = await server.ok("/tokenize", {"content": "aü", "with_pieces": True})
    assert reply["tokens"] == [
        {"id": 97, "piece": "a"},
        {"id": 195, "piece": [195]},
        {"id": 188, "piece": [188]},
    ]
