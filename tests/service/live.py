"""Live requests of tests, which are begun and left without an HTTP handler."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any

from llamaslot.base.callers import Caller
from llamaslot.base.commands import EngineCommand, Generate
from llamaslot.base.events import Finished, Output
from llamaslot.prompts.tokenizer import Tokenizer
from llamaslot.protocol.text_requests import TextRequest
from llamaslot.service.limits import ProbsLimit
from llamaslot.service.live_request import LiveRequest
from llamaslot.service.metrics import Metrics
from llamaslot.service.service import Service
from tests.fake_backend import FakeBackend, FakeVocab
from tests.prompt_threads import SETTINGS, prepare_text, prompt_thread

_open: dict[LiveRequest, AbstractAsyncContextManager[LiveRequest]] = {}


async def begin(
    service: Service, *requests: TextRequest, probs: ProbsLimit | None = None, client_request_id: str = ""
) -> LiveRequest:
    """A request that the engine has, or the error with which it was refused."""
    params = requests[0].params
    caller = Caller(params.client, requests[0].owner, client_request_id=client_request_id)
    manager = service.open(caller)
    live = await manager.__aenter__()
    try:
        await service.prepare(live, prepare_text(*requests))
        service.start(live, probs)
    except BaseException:
        await manager.__aexit__(*sys.exc_info())
        raise
    _open[live] = manager
    return live


async def leave(live: LiveRequest) -> None:
    """Leave a request as its handler does."""
    await _open.pop(live).__aexit__(None, None, None)


async def events(live: LiveRequest) -> AsyncIterator[Output | Finished]:
    """The events of a request's completions; raises the error of one that failed."""
    try:
        while batch := await live.next_batch():
            for _, event in batch:
                yield event
    finally:
        await leave(live)


async def result(
    service: Service, *requests: TextRequest, client_request_id: str = ""
) -> tuple[str, tuple[int, ...], Finished]:
    """All text, all tokens and the end of a completion."""
    live = await begin(service, *requests, client_request_id=client_request_id)
    tokens = [token async for event in events(live) for token in event.tokens]
    (completion,) = live.completions
    return completion.text, tuple(tokens), completion.end


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Wire:
    """A service with a prompt worker on the fake vocabulary, and an engine whose side the test plays."""

    def __init__(self, *, n_slots: int = 2, max_queue: int = 1000, **limits: Any) -> None:
        self.clock = Clock()
        self.prompts = prompt_thread(Tokenizer(FakeVocab(), 1000, min_match=0.8))
        info = FakeBackend(n_slots=n_slots).info
        named: dict[str, Any] = {"names": ["test"], "policy": SETTINGS}
        self.service = Service(
            info, self.prompts, Metrics(), max_queue=max_queue, clock=self.clock, **named, **limits
        )
        self.sent: list[EngineCommand] = []
        self.service.connect(self.sent.append)

    def receive(self, *given: Any) -> None:
        """Have the engine send events."""
        self.service.receive(list(given))

    @property
    def generates(self) -> list[str]:
        """The completions that the engine has got, in order."""
        return [each.params.completion_id for each in self.sent if isinstance(each, Generate)]

    async def close(self, lives: Iterable[LiveRequest] = ()) -> None:
        """End the threads."""
        for live in lives:
            await leave(live)
        await asyncio.sleep(0.01)
        self.prompts.close()
