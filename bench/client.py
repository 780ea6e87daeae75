"""A streaming client for OpenAI-compatible servers that measures when each chunk comes.

While an answer streams it only records the bytes and their times; they are parsed when the answer is complete, so
that a busy client does not slow a server on the same machine. It depends on no server but for llama-server's names
of fields.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import aiohttp

SILENCE_SECONDS = 600.0
Message = dict[str, Any]


class BenchmarkError(Exception):
    """A measurement that failed or cannot be trusted; the message is for the terminal."""


@dataclass(frozen=True)
class Answer:
    """One streamed answer; times are in seconds on the clock of `time.perf_counter`."""

    text: str
    started: float
    arrivals: tuple[float, ...]
    """When each chunk with content, reasoning or a part of a tool call came."""
    pieces: tuple[str, ...] = field(repr=False)
    """The text of each of these chunks, empty for a part of a tool call."""
    ended: float
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    """Both 0 if the server does not report them."""
    timings: dict[str, Any] = field(repr=False)
    """llama-server's timings, if there are any."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    content: str = field(default="", repr=False)
    """The text without the reasoning."""
    restored_tokens: int = 0
    """Tokens of earlier replies that llamaslot put back into the prompt."""

    @property
    def ttft(self) -> float:
        """Time to the first chunk with content."""
        return self.arrivals[0] - self.started

    @property
    def total(self) -> float:
        """Time to the end of the stream."""
        return self.ended - self.started

    @property
    def gaps(self) -> list[float]:
        """Times between neighbouring chunks with content."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def computed(self) -> int:
        """Prompt tokens that the server computed rather than reused, as it counts them."""
        if "prompt_n" not in self.timings:
            raise BenchmarkError("the server does not say how many prompt tokens it computed")
        return int(self.timings["prompt_n"])


@dataclass(frozen=True)
class Completion:
    """A streamed completion of token ids, in llama-server's format; times as in `Answer`."""

    tokens: tuple[int, ...]
    started: float
    arrivals: tuple[float, ...]
    """When each chunk with text or tokens came; the end of the stream if none did."""
    counts: tuple[int, ...]
    """The number of tokens in each of these chunks."""
    ended: float
    timings: dict[str, Any] = field(repr=False)

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.arrivals[0] - self.started

    @property
    def computed(self) -> int:
        """Prompt tokens that the server computed rather than reused, as it counts them."""
        return int(self.timings["prompt_n"])


class Client:
    """One server's endpoints, over one HTTP session; made by `connected`."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def healthy(self) -> bool:
        """True if the server is ready; not every server has `/health`."""
        try:
            async with self._session.get("/health") as response:
                if response.status != 404:
                    return response.status == 200
            async with self._session.get("/v1/models") as response:
                return response.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def get(self, path: str) -> Any:
        """GET a path and return the JSON body."""
        async with self._session.get(path) as response:
            await _check(response)
            return await response.json()

    async def counter(self, name: str) -> float:
        """Read a metric without labels from `/metrics`; raises `BenchmarkError` if it is not there."""
        async with self._session.get("/metrics") as response:
            await _check(response)
            lines = (await response.text()).splitlines()
        for line in lines:
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise BenchmarkError(f"/metrics has no {name}")

    async def post(self, path: str, **body: Any) -> Any:
        """POST a JSON body and return the JSON answer."""
        async with self._session.post(path, json=body) as response:
            await _check(response)
            return await response.json()

    async def chat(self, messages: Sequence[Message], **parameters: Any) -> Answer:
        """Stream one chat completion; raises `BenchmarkError` when the server refuses or breaks off."""
        body = {
            "model": "benchmark",
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **parameters,
        }
        started = perf_counter()
        return parse_stream(started, await self._stream("/v1/chat/completions", body), ended=perf_counter())

    async def complete(self, prompt: Sequence[int], **parameters: Any) -> Completion:
        """Stream one completion of token ids; raises `BenchmarkError` when the server refuses or breaks off."""
        body = {"prompt": list(prompt), "stream": True, "return_tokens": True, **parameters}
        started = perf_counter()
        return parse_completion(started, await self._stream("/completion", body), ended=perf_counter())

    async def _stream(self, path: str, body: dict[str, Any]) -> list[tuple[float, bytes]]:
        """POST a JSON body; returns the pieces of the answer, and when each came."""
        received: list[tuple[float, bytes]] = []
        async with self._session.post(path, json=body) as response:
            await _check(response)
            async for data in response.content.iter_any():
                received.append((perf_counter(), data))
        return received


@asynccontextmanager
async def connected(base_url: str) -> AsyncIterator[Client]:
    """A client of the server at `base_url` (without a path): any number of streams, answers of any length."""
    async with aiohttp.ClientSession(
        base_url,
        # A connection of its own for each request: none is kept that the server may be about to close.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=SILENCE_SECONDS),
    ) as session:
        yield Client(session)


def parse_stream(started: float, received: Sequence[tuple[float, bytes]], *, ended: float) -> Answer:
    """The answer in a stream of server-sent events, given as pieces of bytes and when each came."""
    arrivals: list[float] = []
    pieces: list[str] = []
    contents: list[str] = []
    finish_reason = ""
    usage: dict[str, Any] = {}
    timings: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    restored = 0
    done = False
    for came, payload in _events(received):
        if payload == b"[DONE]":
            done = True
            continue
        chunk = json.loads(payload)
        if "error" in chunk:
            raise BenchmarkError(f"the server broke off: {chunk['error']['message']}")
        for choice in chunk["choices"]:
            finish_reason = choice.get("finish_reason") or finish_reason
            delta = choice.get("delta", {})
            if content := delta.get("content") or delta.get("reasoning_content"):
                arrivals.append(came)
                pieces.append(content)
                contents.append(delta.get("content") or "")
            elif parts := delta.get("tool_calls"):
                arrivals.append(came)
                pieces.append("")
                for part in parts:
                    _extend(calls, part)
        restored = chunk.get("cache", {}).get("restored_tokens", restored)
        usage = chunk.get("usage") or usage
        timings = chunk.get("timings") or timings
    if not (done and arrivals):
        raise BenchmarkError("the stream ended without content or [DONE]")
    return Answer(
        text="".join(pieces),
        content="".join(contents),
        started=started,
        arrivals=tuple(arrivals),
        pieces=tuple(pieces),
        ended=ended,
        finish_reason=finish_reason,
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        timings=timings,
        tool_calls=tuple(calls[index] for index in sorted(calls)),
        restored_tokens=restored,
    )


def parse_completion(started: float, received: Sequence[tuple[float, bytes]], *, ended: float) -> Completion:
    """The completion in a stream of llama-server's own events."""
    tokens: list[int] = []
    arrivals: list[float] = []
    counts: list[int] = []
    timings: dict[str, Any] | None = None
    for came, payload in _events(received):
        if payload == b"[DONE]":
            continue
        chunk = json.loads(payload)
        if "error" in chunk:
            raise BenchmarkError(f"the server broke off: {chunk['error']['message']}")
        if chunk["content"] or chunk["tokens"]:
            tokens += chunk["tokens"]
            arrivals.append(came)
            counts.append(len(chunk["tokens"]))
        if chunk["stop"]:
            timings = chunk["timings"]
    if timings is None:
        raise BenchmarkError("the stream ended before the completion did")
    if not arrivals:
        arrivals, counts = [ended], [0]
    return Completion(tuple(tokens), started, tuple(arrivals), tuple(counts), ended, timings)


def _extend(calls: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    """Add a part of a tool call in OpenAI's form to the calls by their index."""
    call = calls.setdefault(part["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
    if "id" in part:
        call["id"] = part["id"]
    for name in ("name", "arguments"):
        call["function"][name] += part["function"].get(name) or ""


def _events(received: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """The payload of each `data:` line, with the time at which its end came."""
    events: list[tuple[float, bytes]] = []
    rest = b""
    for came, data in received:
        *lines, rest = (rest + data).split(b"\n")
        events += [(came, line[5:].strip()) for line in lines if line.startswith(b"data:")]
    return events


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise BenchmarkError(f"{response.url.path} answered {response.status}: {(await response.text())[:500]}")
