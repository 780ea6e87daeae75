"""Limits of requests: at the limit they are taken, one above it the error names the flag."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import openai
import pytest

from llamaslot.base.callers import Caller
from llamaslot.base.commands import TextPart
from llamaslot.base.namespaces import tenant_name
from llamaslot.base.prompt_jobs import RequestContext
from llamaslot.protocol.bodies import CompletionBody
from llamaslot.protocol.text_requests import text_requests
from tests.api.conftest import Server, Start
from tests.fake_backend import FakeBackend
from tests.fake_clock import LoopClock
from tests.prompt_threads import SETTINGS

NATIVE, TEXT = "/completion", "/v1/completions"
ENDLESS: dict[str, Any] = {"prompt": "x", "ignore_eos": True}


async def refused(server: Server, path: str, body: dict[str, Any], **kwargs: Any) -> tuple[int, str, str]:
    """The status, field and message of a refused request."""
    status, reply = await server.post(path, body, **kwargs)
    assert status >= 400, reply
    return status, reply["error"]["param"], reply["error"]["message"]


async def test_the_number_of_choices_is_limited(start: Start) -> None:
    server = await start(max_choices=6)
    reply = await server.ok(TEXT, {"prompt": ["x", "y"], "n": 3, "max_tokens": 1})
    assert len(reply["choices"]) == 6
    for body, param in (
        ({"prompt": ["x"] * 7}, "prompt"),
        ({"prompt": "x", "n": 7}, "n"),
        ({"prompt": ["x"] * 4, "n": 2}, "n"),
        ({"prompt": "x", "n_cmpl": 7}, "n_cmpl"),
    ):
        status, field, message = await refused(server, TEXT, {**body, "max_tokens": 1})
        assert (status, field) == (400, param)
        assert "--max-choices" in message


async def test_stop_strings_are_limited(start: Start) -> None:
    server = await start(max_stop_strings=3, max_stop_chars=10)
    for stop in (["abc", "def", "ghij"], "0123456789"):
        await server.ok(NATIVE, {"prompt": "x", "n_predict": 1, "stop": stop})
    for stop, flag in (
        (["a", "b", "c", "d"], "--max-stop-strings"),
        (["abcd", "defg", "hij"], "--max-stop-chars"),
        ("0" * 11, "--max-stop-chars"),
    ):
        status, field, message = await refused(server, NATIVE, {"prompt": "x", "stop": stop})
        assert (status, field) == (400, "stop")
        assert flag in message


async def test_one_client_cannot_fill_the_queue(start: Start) -> None:
    server = await start(backend=FakeBackend(n_ctx=20_000, n_slots=1), max_queue=4, max_queue_per_client=2)
    mine = {"X-Session-ID": "mine"}
    tasks = [asyncio.create_task(server.post(NATIVE, ENDLESS, headers=mine)) for _ in range(3)]
    await server.state_where(lambda state: state.n_queued == 2)
    async with server.session.post(server.url + NATIVE, json=ENDLESS, headers=mine) as response:
        assert response.status == 429
        assert "--max-queue-per-client" in (await response.json())["error"]["message"]
        assert 1 <= int(response.headers["Retry-After"]) <= 60
    status, _, message = await refused(server, NATIVE, {**ENDLESS, "n": 4})
    assert status == 400
    assert "--max-queue-per-client" in message
    tasks += [asyncio.create_task(server.post(NATIVE, ENDLESS)) for _ in range(2)]
    await server.state_where(lambda state: state.n_queued == 4)
    status, _, message = await refused(server, NATIVE, ENDLESS, headers={"X-Session-ID": "a third"})
    assert status == 429
    assert "--max-queue)" in message
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await server.idle()
    await server.ok(NATIVE, {"prompt": "x", "n_predict": 1, "n": 3})


class Slow(FakeBackend):
    """A step takes as long as an HTTP request, so that a request arrives while another one runs."""

    def decode(self, runs: Any, draws: Any = ()) -> Any:
        """Compute after a while."""
        time.sleep(0.003)
        return super().decode(runs, draws)


async def test_many_requests_of_one_client_delay_another_by_one_request(start: Start) -> None:
    server = await start(backend=Slow(n_ctx=2000, n_slots=1), api_keys=("many", "one"))
    ended: list[str] = []

    async def ask(key: str) -> None:
        body = {"prompt": key, "n_predict": 12, "ignore_eos": True}
        assert (await server.post(NATIVE, body, headers={"Authorization": f"Bearer {key}"}))[0] == 200
        ended.append(key)

    tasks = [asyncio.create_task(ask("many")) for _ in range(30)]
    await server.state_where(lambda state: state.n_queued > 20)
    n_before = len(ended)
    await ask("one")
    assert len(ended) - n_before <= 3, "the one that ran, and replies that were on their way"
    await asyncio.gather(*tasks)


def test_the_key_tells_clients_apart_then_the_session_then_the_address() -> None:
    with_key = Caller.of("key", "address")
    assert with_key.client("session") == Caller.of("key", "another").client("")
    assert with_key.client("session") != Caller.of("another", "address").client("session")
    assert with_key.client("session") == tenant_name("key"), "it has the name that GET /cache shows"
    assert "key" not in with_key.client("session")
    without = Caller.of(None, "address")
    assert without.client("session") == Caller.of(None, "another").client("session")
    assert without.client("") != Caller.of(None, "another").client("")
    assert len({without.client(session_id) for session_id in ("", "session", "another")}) == 3
    assert Caller.of("", "address").client("") == Caller.of("", "another").client(""), "a server with keys"


@pytest.mark.parametrize("key", ["key", None])
@pytest.mark.parametrize("session_id", ["mine", None])
def test_a_session_in_the_body_tells_clients_apart_as_one_in_the_headers(
    key: str | None, session_id: str | None
) -> None:
    caller = Caller.of(key, "address")
    context = RequestContext("r", caller)
    body = CompletionBody(prompt="x", session_id=session_id)
    (read,) = text_requests(body, [(TextPart("x"),)], context, SETTINGS, FakeBackend().info, tokens_of=lambda _: ())
    assert read.params.client == caller.client(session_id or "")


class Stuck(FakeBackend):
    """Prefill takes until the test says so."""

    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)
        self.gate = threading.Event()
        self.is_stuck = False

    def decode(self, runs: Any, draws: Any = ()) -> Any:
        if any(len(run.tokens) > 1 for run in runs):
            self.is_stuck = True
            assert self.gate.wait(10)
        return super().decode(runs, draws)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_requests_end_at_their_deadline_whether_they_wait_or_run(start: Start, stream: bool) -> None:
    clock = LoopClock()
    server = await start(backend=FakeBackend(n_ctx=20_000, n_slots=1), request_timeout=200)
    tasks = [
        asyncio.create_task(server.session.post(server.url + NATIVE, json={**ENDLESS, "stream": stream}))
        for _ in range(2)
    ]
    await server.state_where(lambda state: state.n_queued == 1 and state.slots[0].n_generated > 2)
    clock.advance(190)
    await asyncio.sleep(0.05)
    assert server.service.capacity.n_in_flight == 2
    clock.advance(20)
    async with asyncio.timeout(5):
        for task in tasks:
            response = await task
            text = await response.text()
            assert response.status == (200 if stream else 504)
            assert text.count("timeout_error") == text.count("--request-timeout") == 1
            assert "[DONE]" not in text
    await server.idle()
    assert server.service.capacity.n_in_flight == 0
    await server.ok(NATIVE, {"prompt": "x", "n_predict": 1})


async def test_a_prefill_ends_at_its_deadline_and_openai_does_not_ask_again(start: Start) -> None:
    clock = LoopClock()
    backend = Stuck(n_ctx=20_000, n_slots=1, n_ubatch=64)
    server = await start(backend=backend, request_timeout=200)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=2) as client:
        task = asyncio.create_task(client.completions.create(model="any", prompt="x" * 5000))
        while not backend.is_stuck:
            await asyncio.sleep(0.005)
        clock.advance(201)
        await asyncio.sleep(0.01)
        backend.gate.set()
        with pytest.raises(openai.InternalServerError) as ended:
            await task
    assert ended.value.status_code == 504
    state = await server.idle()
    assert 0 < state.n_decoded_tokens < 1000


@pytest.mark.parametrize("prompt", [[1] * 2000, ["a", 1] * 2000], ids=["ids", "texts"])
async def test_prompts_of_too_many_parts_are_refused_before_they_are_passed_on(
    prompt: list[Any], start: Start
) -> None:
    server = await start(backend=FakeBackend(n_ctx=1024))
    status, reply = await server.post(NATIVE, {"prompt": prompt})
    assert (status, reply["error"]["type"]) == (400, "exceed_context_size_error")


async def test_the_fields_that_a_reply_is_reduced_to_are_limited(start: Start) -> None:
    server = await start()
    body = {"prompt": "x", "n_predict": 1}
    assert await server.ok(NATIVE, body | {"response_fields": ["content"] * 256})
    status, param, message = await refused(server, NATIVE, body | {"response_fields": ["content"] * 257})
    assert (status, param) == (400, "response_fields")
    assert "256" in message


async def test_a_bias_may_not_name_more_tokens_than_the_limit(start: Start) -> None:
    server = await start(max_logit_bias_entries=5)
    body = {"prompt": "x", "n_predict": 1}
    assert await server.ok(NATIVE, body | {"logit_bias": [["abcde", 1.0]]})
    status, param, message = await refused(server, NATIVE, body | {"logit_bias": [["abcdef", 1.0]]})
    assert (status, param) == (400, "logit_bias")
    assert "--max-logit-bias-entries" in message
