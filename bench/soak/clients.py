"""Clients of a soak: conversations, bursts, disconnects, slow readers. Each goes on until the soak ends."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import aiohttp

SILENCE_S = 120
"""A stream without an event for so long is called hung."""
KEEP_ALIVE_S = 1
"""Short, so that no connection is left when the server is idle."""
MAX_TURNS = 6
BURST = 24
"""Requests at once, several times as many as there are slots."""
PAUSE_S = 0.2
_LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete")
"""Types of the events that end streams of Messages and Responses."""
_WORDS = (
    *(
        "cat",
        "dog",
        "bird",
        "house",
        "garden",
        "river",
        "stone",
        "tree",
        "king",
        "queen",
        "boat",
        "bread",
        "letter",
    ),
    *("red", "small", "old", "happy", "lost", "found", "went", "saw", "gave", "took", "said", "asked", "sang"),
    *(
        "and",
        "then",
        "but",
        "because",
        "while",
        "under",
        "over",
        "near",
        "the",
        "a",
        "with",
        "from",
        "two",
        "three",
    ),
)
KEYS = ("first-user", "second-user", "third-user")
"""API keys of the clients: three tenants that share nothing."""
_SYSTEM = "You tell short stories for children. " * 30
"""A prompt that conversations share."""


@dataclass
class Load:
    """Counts and times of all clients; `open` is cleared to let the server become idle."""

    session: aiohttp.ClientSession
    chance: random.Random
    open: asyncio.Event = field(default_factory=asyncio.Event)
    n_active: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)
    """Seconds between neighbouring events of streams, since `take_gaps`."""
    unexpected: list[str] = field(default_factory=list)
    """Descriptions of the first outcomes that should not be."""

    def take_gaps(self) -> list[float]:
        """Return the gaps since the last call."""
        gaps, self.gaps = self.gaps, []
        return gaps

    def words(self, n: int) -> str:
        """Random text."""
        return " ".join(self.chance.choices(_WORDS, k=n))

    def note(self, outcome: str, detail: str = "") -> None:
        """Count an outcome; one that has a detail is unexpected."""
        self.outcomes[outcome] += 1
        if detail and len(self.unexpected) < 20:
            self.unexpected.append(f"{outcome}: {detail[:500]}")

    def headers(self) -> dict[str, str]:
        """Headers with a random client's key."""
        return authorization(self.chance.choice(KEYS))

    async def post(
        self,
        path: str,
        body: dict[str, Any],
        *,
        headers: dict[str, str] | None = None,
        stop_after: int | None = None,
    ) -> str:
        """Send a request, read its reply to the end or for so many events, and return its text."""
        events = await self.events(path, body, headers=headers, stop_after=stop_after)
        return "".join(map(_text_of, events))

    async def events(
        self,
        path: str,
        body: dict[str, Any],
        *,
        headers: dict[str, str] | None = None,
        stop_after: int | None = None,
    ) -> list[dict[str, Any]]:
        """Send a request and return its events, or its whole reply as one; none after an error."""
        self.n_active += 1
        try:
            async with self.session.post(path, json=body, headers=headers or self.headers()) as response:
                if response.status != 200:
                    self._refused(response.status, await response.text())
                    return []
                if not body.get("stream"):
                    self.note("whole")
                    return [await response.json()]
                return await self._streamed(response, stop_after)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            self.note("broken", f"{path}: {error!r}")
            return []
        finally:
            self.n_active -= 1

    def _refused(self, status: int, text: str) -> None:
        # 503 is the engine's end, which a soak with faults brings about.
        self.note(f"status {status}", "" if status in (429, 503) else text)

    async def _streamed(self, response: aiohttp.ClientResponse, stop_after: int | None) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        last = None
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            data, now = line[6:].strip(), perf_counter()
            event = {"type": "message_stop"} if data == b"[DONE]" else json.loads(data)
            if event.get("error") or event.get("type") == "error":
                self._refused(_status_of(event.get("error") or event), data.decode())
                return []
            if event.get("type") in _LAST_EVENTS:
                self.note("streamed")
                return events if data == b"[DONE]" else [*events, event]
            if last is not None:
                self.gaps.append(now - last)
            last = now
            events.append(event)
            if len(events) == stop_after:
                self.note("disconnected")
                return events
        self.note("unfinished", f"a stream ended without its last event, after {len(events)} events")
        return []


Client = Callable[[Load], Awaitable[None]]


async def converse(load: Load) -> None:
    """Hold a conversation of a few turns; some are named, some begin with the shared system prompt."""
    chance, headers = load.chance, load.headers()
    messages = [{"role": "system", "content": _SYSTEM}] if chance.random() < 0.7 else []
    named = {"session_id": f"talk-{chance.randrange(500)}"} if chance.random() < 0.3 else {}
    for _ in range(chance.randint(1, MAX_TURNS)):
        messages.append({"role": "user", "content": load.words(chance.randint(3, 60))})
        body = {"messages": messages, "max_tokens": chance.randint(4, 60), "stream": chance.random() < 0.8}
        await load.open.wait()
        body |= {**named, "temperature": chance.choice((0, 0.8))}
        text = await load.post("/v1/chat/completions", body, headers=headers)
        if not text:
            return
        messages.append({"role": "assistant", "content": text})
        await asyncio.sleep(chance.random() * PAUSE_S)


async def burst(load: Load) -> None:
    """Send more requests at once than there are slots, half of which ask for two choices."""
    await load.open.wait()
    bodies = [
        {"prompt": load.words(load.chance.randint(1, 200)), "max_tokens": 8, "n": 1 + i % 2, "stream": i % 3 == 0}
        for i in range(BURST)
    ]
    await asyncio.gather(*(load.post("/v1/completions", body) for body in bodies))
    await asyncio.sleep(5 + 5 * load.chance.random())


async def disconnect(load: Load) -> None:
    """Close a stream after a few events, or before the first: while it is queued, or its prompt is computed."""
    await load.open.wait()
    n_events = load.chance.choice((None, 1, 2, 20))
    body = {
        "prompt": load.words(load.chance.randint(1, 600)),
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
    }
    if n_events is not None:
        await load.post("/v1/completions", body, stop_after=n_events)
    else:
        try:
            async with asyncio.timeout(load.chance.random() / 10):
                await load.post("/v1/completions", body, stop_after=1)
        except TimeoutError:
            load.note("disconnected")
    await asyncio.sleep(load.chance.random())


async def read_slowly(load: Load) -> None:
    """Read a long stream a little at a time, for a few seconds, and leave."""
    await load.open.wait()
    body = {"prompt": load.words(20), "max_tokens": 600, "ignore_eos": True, "stream": True}
    load.n_active += 1
    try:
        async with load.session.post("/v1/completions", json=body, headers=load.headers()) as response:
            until = perf_counter() + 8
            while perf_counter() < until and load.open.is_set() and await response.content.read(64):
                await asyncio.sleep(0.05)
        load.note("read slowly")
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        load.note("broken", repr(error))
    finally:
        load.n_active -= 1
    await asyncio.sleep(load.chance.random())


CLIENTS: tuple[Client, ...] = (converse, converse, converse, burst, disconnect, disconnect, read_slowly)


def authorization(key: str) -> dict[str, str]:
    """The header that carries an API key."""
    return {"Authorization": f"Bearer {key}"}


def connected(url: str, key: str = "") -> aiohttp.ClientSession:
    """A session whose requests carry a key, if there is one."""
    return aiohttp.ClientSession(
        url,
        headers=authorization(key) if key else None,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S),
        read_bufsize=2**14,
    )


def _status_of(error: dict[str, Any]) -> int:
    """The status of an error in a stream; Messages and Responses name a type or code instead."""
    status = error.get("code")
    if isinstance(status, int):
        return status
    return 503 if error.get("type") == "overloaded_error" or status == "unavailable_error" else 500


def _text_of(reply: Any) -> str:
    choices = reply.get("choices")
    if not choices:
        return ""
    choice = choices[0]
    found = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    return found.get("content") or ""
