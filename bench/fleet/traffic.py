"""Conversations that go on at once: each sends its whole history with every turn, as agents and chats do.

Nothing is retried silently: every attempt is a record with its outcome, and a turn that failed is tried again as a
client program would.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import aiohttp

from bench.client import Message
from bench.tokens import Tokens

Api = Literal["chat", "messages", "responses"]
Outcome = Literal["ok", "refused", "broken", "unreachable"]
"""`refused`: another status than 200; `broken`: the stream ended early; `unreachable`: no answer at all."""

SILENCE_S = 300.0
ATTEMPTS = 5
RETRY_S = 0.5
WORKER_HEADERS = ("x-smg-routed-worker-id", "x-routed-worker")
"""Header by which smg, and nginx by the fleet's configuration, name the worker that answered."""
_PATHS: dict[Api, str] = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
_LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete")


@dataclass(frozen=True)
class Attempt:
    """One request; times in seconds, tokens by the reply's own count."""

    api: str
    conversation: int
    turn: int
    outcome: Outcome
    detail: str
    worker: str
    started: float
    """Time by `time.perf_counter`."""
    ttft: float
    """Time from sending the request to its first text; 0 if none came."""
    seconds: float
    n_computed: int
    n_output: int


@dataclass
class Conversation:
    """A history that grows; `name` is its session, sent in a header."""

    number: int
    name: str
    system: str
    messages: list[Message] = field(default_factory=list)
    turn: int = 0
    worker: str = ""
    """The one that answered last."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of each kind of text."""

    system: int
    user: int
    reply: int

    def longest(self, n_turns: int) -> int:
        """Tokens of a conversation after so many turns, with what a template adds."""
        return self.system + n_turns * (self.user + self.reply + 16) + 32


@dataclass(frozen=True)
class Target:
    """Address of a server or gateway, and the model's name there: smg refuses any other name."""

    url: str
    model: str


class Traffic:
    """Sends turns of conversations to one address and records every attempt."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, api: Api, tokens: Tokens, lengths: Lengths
    ) -> None:
        self._session = session
        self._url = target.url
        self._model = target.model
        self._api: Api = api
        self._tokens = tokens
        self._lengths = lengths
        self.attempts: list[Attempt] = []
        self.on_text: Callable[[Conversation, str], None] = lambda _conversation, _worker: None
        """Called when the first text of a reply has come."""

    def conversations(self, n: int, n_systems: int, words: random.Random, start: int = 0) -> list[Conversation]:
        """Return new conversations that share `n_systems` system prompts in turn."""
        systems = [self._tokens.draw(words, self._lengths.system) for _ in range(n_systems)]
        prefix = f"{words.getrandbits(64):x}"
        return [Conversation(start + i, f"{prefix}-{start + i}", systems[i % n_systems]) for i in range(n)]

    def draw_like(self, text: str, words: random.Random) -> str:
        """Return new text with as many tokens."""
        return self._tokens.draw(words, max(len(self._tokens.of(text)), 1))

    async def run(self, chosen: Iterable[Conversation], n_turns: int, seed: str, pause_s: float) -> None:
        """Take `n_turns` turns of each conversation, all of them at once, with pauses of `pause_s` on average."""

        async def talk(one: Conversation) -> None:
            words = random.Random(f"{seed} {one.number} {one.turn}")
            for _ in range(n_turns):
                await asyncio.sleep(words.uniform(0, 2 * pause_s))
                if not await self.turn(one, words):
                    return

        async with asyncio.TaskGroup() as group:
            for each in chosen:
                group.create_task(talk(each))

    async def turn(self, one: Conversation, words: random.Random) -> bool:
        """Ask and append the answer; False if every attempt failed."""
        one.messages.append({"role": "user", "content": self._tokens.draw(words, self._lengths.user)})
        one.turn += 1
        for i in range(ATTEMPTS):
            if i:
                await asyncio.sleep(RETRY_S)
            text, attempt = await self.ask(one)
            self.attempts.append(attempt)
            if attempt.outcome == "ok":
                one.messages.append({"role": "assistant", "content": text})
                one.worker = attempt.worker
                return True
        return False

    async def ask(self, one: Conversation) -> tuple[str, Attempt]:
        """Send a conversation once, and read the stream to its end."""
        stream = _Stream()
        started = perf_counter()
        outcome: Outcome = "unreachable"
        detail = worker = ""
        try:
            url, headers = f"{self._url}{_PATHS[self._api]}", {"X-Session-ID": one.name}
            async with self._session.post(url, json=self._body(one), headers=headers) as response:
                worker = next((response.headers[name] for name in WORKER_HEADERS if name in response.headers), "")
                worker = worker.removeprefix("http://")
                if response.status != 200:
                    outcome, detail = "refused", f"{response.status} {(await response.text())[:200]}"
                else:
                    outcome = "broken"
                    async for line in response.content:
                        if stream.read(line, perf_counter()):
                            self.on_text(one, worker)
                    outcome, detail = (
                        ("ok", "")
                        if stream.is_complete and not stream.error
                        else ("broken", stream.error or "cut off")
                    )
        except (aiohttp.ClientError, TimeoutError) as error:
            detail = f"{type(error).__name__}: {error}"[:200]
        ended = perf_counter()
        return "".join(stream.texts), Attempt(
            self._api, one.number, one.turn, outcome, detail, worker, started,
            stream.first - started if stream.first else 0.0, ended - started, stream.n_computed, stream.n_output,
        )  # fmt: skip

    def _body(self, one: Conversation) -> dict[str, Any]:
        common = {"model": self._model, "stream": True, "temperature": 0}
        n = self._lengths.reply
        if self._api == "messages":
            return {**common, "system": one.system, "messages": one.messages, "max_tokens": n}
        messages = [{"role": "system", "content": one.system}, *one.messages]
        if self._api == "responses":
            # The system prompt is not in `instructions`, because smg reads only `input` to choose a worker. Each
            # request brings the whole conversation, because a stored response is known to one worker only.
            return {**common, "input": messages, "max_output_tokens": n, "store": False}
        return {**common, "messages": messages, "max_tokens": n, "stream_options": {"include_usage": True}}


class _Stream:
    """Events that a stream of any of the three APIs has sent so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.first = 0.0
        self.n_computed = self.n_output = 0
        self.is_complete = False
        self.error = ""

    def read(self, line: bytes, now: float) -> bool:
        """Take in a line; True if it brings the first text."""
        if not line.startswith(b"data:"):
            return False
        data = line[5:].strip()
        if data == b"[DONE]":
            self.is_complete = True
            return False
        event = json.loads(data)
        if event.get("error"):
            self.error = str(event["error"])[:200]
        self.is_complete |= event.get("type") in _LAST_EVENTS
        self._count(event)
        text = _text(event)
        if not text:
            return False
        self.texts.append(text)
        is_first, self.first = not self.first, self.first or now
        return is_first

    def _count(self, event: dict[str, Any]) -> None:
        """Read the counts: llama-server's timings, or Anthropic's usage, where what is cached is apart."""
        timings = event.get("timings") or (event.get("response") or {}).get("timings")
        usage = event.get("usage") or (event.get("message") or {}).get("usage") or {}
        if timings:
            self.n_computed, self.n_output = int(timings["prompt_n"]), int(timings["predicted_n"])
        elif "input_tokens" in usage:
            self.n_computed = usage["input_tokens"] + (usage.get("cache_creation_input_tokens") or 0)
        if str(event.get("type", "")).startswith("message_") and usage:
            self.n_output = usage.get("output_tokens", self.n_output)


def _text(event: dict[str, Any]) -> str:
    """Return the text that an event brings."""
    match event.get("type"):
        case "content_block_delta":
            return str(event["delta"].get("text") or "")
        case "response.output_text.delta":
            return str(event["delta"])
        case None:
            return "".join(choice.get("delta", {}).get("content") or "" for choice in event.get("choices", ()))
        case _:
            return ""


def new_session(api_key: str = "") -> aiohttp.ClientSession:
    """A session for any number of streams; connections are kept, as clients keep theirs."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S),
        read_bufsize=2**20,
    )
