"""`llamaslot chat` as a process of its own against a server on localhost that speaks OpenAI's streaming format."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
import termios
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

KEY = "correct horse"


@dataclass
class Server:
    """Answers `You said N words: MESSAGE`, a word a chunk; tokens of earlier prompts count as cached."""

    key: str = ""
    loading: bool = False
    stall_after: int | None = None
    """Words of the next answer after which it stalls."""
    fail_after: int | None = None
    """Words of the next answer after which an error comes."""
    cut_after: int | None = None
    """Words of the next answer after which the connection ends."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client leaves a stalled answer."""
    url: str = ""

    def refusal(self, request: web.Request) -> web.Response | None:
        if self.loading:
            return error(503, "Loading model", "unavailable_error")
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return error(401, "Invalid API Key", "authentication_error")
        return None

    async def models(self, request: web.Request) -> web.Response:
        return self.refusal(request) or web.json_response({"object": "list", "data": [{"id": "parrot"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        if refusal := self.refusal(request):
            return refusal
        body = await request.json()
        cached = sum(words(message) for message in self.bodies[-1]["messages"]) if self.bodies else 0
        self.bodies.append(body)
        message = body["messages"][-1]["content"]
        if message == "too long":
            return error(400, "the request has 9999 prompt tokens", "exceed_context_size_error")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        reply = f"You said {len(message.split())} words: {message}".split(" ")
        await self.stream(request, response, reply)
        usage = {
            "prompt_tokens": sum(words(message) for message in body["messages"]),
            "completion_tokens": len(reply),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        await send(response, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        await send(response, {"choices": [], "usage": usage, "timings": {"predicted_per_second": 81.25}})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def stream(self, request: web.Request, response: web.StreamResponse, reply: list[str]) -> None:
        await send(response, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]})
        stall, self.stall_after = self.stall_after, None
        fail, self.fail_after = self.fail_after, None
        cut, self.cut_after = self.cut_after, None
        for number, word in enumerate(reply):
            if number == stall:
                try:
                    await asyncio.sleep(60)
                finally:
                    self.gone.set()
            if number == fail:
                await send(response, {"error": {"code": 500, "message": "out of luck", "type": "server_error"}})
                raise asyncio.CancelledError
            if number == cut:
                assert request.transport is not None
                request.transport.close()
                raise asyncio.CancelledError
            await send(response, {"choices": [{"index": 0, "delta": {"content": " " * (number > 0) + word}}]})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Server]:
        application = web.Application()
        application.router.add_get("/v1/models", self.models)
        application.router.add_post("/v1/chat/completions", self.chat)
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}"
            yield self
        finally:
            await runner.cleanup()


def error(status: int, message: str, kind: str) -> web.Response:
    return web.json_response({"error": {"code": status, "message": message, "type": kind}}, status=status)


def words(message: dict[str, str]) -> int:
    return len(message["content"].split())


async def send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server().running() as server:
        yield server


async def start(
    server: Server, *arguments: str, stdin: int = PIPE, stdout: int = PIPE, **environment: str
) -> Process:
    variables = {**os.environ, "COLUMNS": "200", "TERM": "dumb", **environment}
    command = (sys.executable, "-m", "llamaslot.cli.main", "chat", "--url", server.url, *arguments)
    return await asyncio.create_subprocess_exec(*command, env=variables, stdin=stdin, stdout=stdout, stderr=PIPE)


async def finish(process: Process, stdin: str | None = None) -> tuple[int | None, str, list[str]]:
    """The exit status, what went to stdout and the lines of stderr."""
    try:
        data = None if stdin is None else stdin.encode()
        out, err = await asyncio.wait_for(process.communicate(data), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert "Traceback" not in err.decode()
    return process.returncode, (out or b"").decode(), err.decode().splitlines()


async def chat(
    server: Server, stdin: str, *arguments: str, **environment: str
) -> tuple[int | None, str, list[str]]:
    return await finish(await start(server, *arguments, **environment), stdin)


async def test_each_line_is_a_turn_of_one_conversation(server: Server):
    status, out, _ = await chat(server, "hello there\n\nça va, señor?\n")
    assert status == 0
    assert out == "You said 2 words: hello there\nYou said 3 words: ça va, señor?\n"
    assert server.bodies[1]["messages"] == [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "You said 2 words: hello there"},
        {"role": "user", "content": "ça va, señor?"},
    ]


async def test_the_address_may_be_an_argument_without_a_flag(server: Server):
    variables = {**os.environ, "COLUMNS": "200", "TERM": "dumb"}
    command = (sys.executable, "-m", "llamaslot.cli.main", "chat", server.url)
    process = await asyncio.create_subprocess_exec(*command, env=variables, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    status, out, _ = await finish(process, "hi\n")
    assert (status, out) == (0, "You said 1 words: hi\n")


async def test_each_answer_is_followed_by_reused_tokens_and_speed(server: Server):
    _, _, notes = await chat(server, "hello there\nagain\n")
    first, second = notes
    assert first.startswith("2 prompt tokens, 0 cached · TTFT ")
    assert first.endswith(" ms · 6 tokens at 81.2/s")
    assert second.startswith("9 prompt tokens, 2 cached · TTFT ")
    assert second.endswith(" ms · 5 tokens at 81.2/s")


async def test_only_given_options_are_sent(server: Server):
    await chat(server, "hi\n")
    await chat(server, "hi\n", "--temp", "0", "--max-tokens", "5", "--system", "Be brief.")
    plain, full = server.bodies
    assert plain["stream"] is True
    assert plain["stream_options"] == {"include_usage": True}
    assert not {"temperature", "max_tokens"} & plain.keys()
    assert (full["temperature"], full["max_tokens"]) == (0, 5)
    assert full["messages"][0] == {"role": "system", "content": "Be brief."}


async def test_commands_change_the_conversation_and_are_not_sent(server: Server):
    status, out, notes = await chat(server, "one\n/clear\n/system Be kind.\ntwo\n/what\n/exit\nthree\n")
    assert status == 0
    assert out.count("You said") == 2
    assert server.bodies[1]["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "two"},
    ]
    assert "(new conversation)" in notes
    assert "(system prompt: Be kind.)" in notes
    assert any(note.startswith("/what is not a command; /clear starts a new conversation") for note in notes)


@pytest.mark.parametrize("how", ["flag", "environment"])
async def test_the_api_key_is_sent(server: Server, how: str):
    server.key = KEY
    if how == "flag":
        status, out, _ = await chat(server, "hi\n", "--api-key", KEY)
    else:
        status, out, _ = await chat(server, "hi\n", LLAMA_API_KEY=KEY)
    assert (status, out) == (0, "You said 1 words: hi\n")


async def test_a_wrong_api_key_is_one_line(server: Server):
    server.key = KEY
    status, out, notes = await chat(server, "hi\n", "--api-key", "wrong")
    assert (status, out) == (2, "")
    assert notes == [f"llamaslot: {server.url} rejects the API key: Invalid API Key (--api-key)"]


async def test_a_server_that_is_loading_says_so(server: Server):
    server.loading = True
    assert await chat(server, "hi\n") == (2, "", [f"llamaslot: {server.url} answered 503: Loading model"])


async def test_no_server_is_one_line():
    status, _, notes = await chat(Server(url="http://127.0.0.1:9"), "hi\n")
    assert status == 2
    assert notes == [
        "llamaslot: no server answers at http://127.0.0.1:9 (Connection refused); start one with `llamaslot serve`"
    ]


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://", "http://127.0.0.1:high"])
async def test_an_invalid_address_is_one_line(url: str):
    status, _, notes = await chat(Server(url=url), "hi\n")
    assert status == 2
    assert notes == [f"llamaslot: '{url}' is not a URL such as http://127.0.0.1:8080"]


async def test_a_refused_request_prints_the_message_of_the_server(server: Server):
    status, _, notes = await chat(server, "too long\n")
    assert status == 2
    assert notes == [f"llamaslot: {server.url} answered 400: the request has 9999 prompt tokens"]


@pytest.mark.parametrize(("fault", "words"), [("fail_after", "out of luck"), ("cut_after", "was lost")])
async def test_an_answer_that_fails_midway_shows_its_text_and_the_reason(server: Server, fault: str, words: str):
    setattr(server, fault, 3)
    status, out, notes = await chat(server, "hi\n")
    assert (status, out) == (2, "You said 1\n")
    assert words in notes[-1]


async def test_an_interrupt_stops_the_answer_and_not_the_conversation(server: Server):
    server.stall_after = 3
    process = await start(server)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"hello there\n")
    assert await asyncio.wait_for(process.stdout.readexactly(10), 60) == b"You said 2"
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(server.gone.wait(), 60)
    status, out, notes = await finish(process, "go on\n")
    assert (status, out) == (0, "\nYou said 2 words: go on\n")
    assert notes[0] == "(stopped)"
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "You said 2"}


async def test_on_a_terminal_errors_and_interrupts_leave_the_conversation_open(server: Server):
    async with terminal() as (child, typed, shown):
        process = await start(server, stdin=child, stdout=child)
        await until(lambda: shown().endswith("> "))
        typed("too long\n")
        await until(lambda: shown().count("> ") == 2)
        process.send_signal(signal.SIGINT)
        await until(lambda: "(Ctrl-D ends)" in shown())
        typed("hello\n")
        await until(lambda: "You said 1 words: hello" in shown())
        typed("\x04")
        status, _, notes = await finish(process)
    assert status == 0
    assert notes[0].startswith(f"parrot at {server.url}.")
    assert any("9999 prompt tokens" in note for note in notes)
    assert server.bodies[1]["messages"] == [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def terminal() -> AsyncIterator[tuple[int, Callable[[str], None], Callable[[], str]]]:
    """A pseudo-terminal without echo: its file descriptor, a function that types, and the output so far."""
    parent, child = pty.openpty()
    attributes = termios.tcgetattr(child)
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(child, termios.TCSANOW, attributes)
    loop = asyncio.get_running_loop()
    screen = bytearray()
    loop.add_reader(parent, lambda: screen.extend(os.read(parent, 4096)))

    def typed(text: str) -> None:
        os.write(parent, text.encode())

    def shown() -> str:
        return screen.decode(errors="replace")

    try:
        yield child, typed, shown
    finally:
        loop.remove_reader(parent)
        os.close(parent)
        os.close(child)


async def until(true: Callable[[], bool]) -> None:
    for _ in range(6000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not become true in time")
