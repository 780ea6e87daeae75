"""The generations that one HTTP request starts, run side by side and read as one sequence of events.

Leaving the block leaves every generation, which cancels those that still run: a client that goes away, an error and
a refusal of the last of several all take this one way out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import TypeAlias

from llamaslot.base.commands import Submit
from llamaslot.base.events import Accepted, Finished, Output
from llamaslot.service.service import Outcome, Service


class Choice:
    """One generation and what it has produced so far."""

    def __init__(self, index: int, submit: Submit, accepted: Accepted) -> None:
        self.index = index
        self.submit = submit
        self.accepted = accepted
        self.tokens: list[int] = []
        self.finished: Finished | None = None
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._texts)

    @property
    def end(self) -> Finished:
        """The terminal event; only for a choice that has it."""
        assert self.finished is not None
        return self.finished

    def take(self, event: Output | Finished) -> None:
        """Add an event's text and tokens."""
        self._texts.append(event.content)
        self.tokens.extend(event.tokens)
        if isinstance(event, Finished):
            self.finished = event


Batch: TypeAlias = list[tuple[Choice, Output | Finished]]
Sink: TypeAlias = Callable[[Choice, Output], None]


class Choices:
    """An async context manager; inside it, `all` holds the accepted choices and `next_batch` brings them on."""

    def __init__(self, service: Service, submits: Sequence[Submit]) -> None:
        self._service = service
        self._submits = submits
        self._stack = AsyncExitStack()
        self._queue: asyncio.Queue[tuple[Choice, Outcome | Exception]] = asyncio.Queue()
        self._batch: Batch = []
        self._failure: Exception | None = None
        self._sink: Sink | None = None
        self._is_ready: Callable[[], bool] = lambda: False
        self._n_open = len(submits)
        self.all: list[Choice] = []

    async def __aenter__(self) -> Choices:
        """Submit everything and wait until each is accepted; raises what the first refused one was told."""
        try:
            generations = []
            for _, submits in groupby(self._submits, key=lambda submit: submit.group or submit.request_id):
                for generation in self._service.generate_all(list(submits)):
                    generations.append(await self._stack.enter_async_context(generation))
            for index, (submit, generation) in enumerate(zip(self._submits, generations, strict=True)):
                self.all.append(Choice(index, submit, await generation.accepted()))
            for choice, generation in zip(self.all, generations, strict=True):
                generation.listen(partial(self._put, choice))
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave every generation."""
        await self._stack.aclose()

    @property
    def done(self) -> bool:
        """Whether all are finished."""
        return self._n_open == 0

    def listen(self, sink: Sink, is_ready: Callable[[], bool]) -> None:
        """Pass each `Output` to `sink` the moment it comes, if that is ready and nothing waits for `next_batch`.

        All other events, and those that it was not ready for, `next_batch` gives, and raises what the sink raised.
        """
        self._sink, self._is_ready = sink, is_ready

    async def next_batch(self) -> Batch:
        """Whatever has arrived since the last one, at least one event; empty when all choices are finished.

        May be cancelled without loss. Raises what a generation failed with, after everything that came before.
        """
        if self.done:
            return []
        if self._failure is None:
            self._take(await self._queue.get())
        while self._failure is None and not self._queue.empty():
            self._take(self._queue.get_nowait())
        batch, self._batch = self._batch, []
        if self._failure is not None and not batch:
            raise self._failure
        return batch

    def _put(self, choice: Choice, event: Outcome) -> None:
        if self._sink is None or not isinstance(event, Output) or not self._queue.empty() or not self._is_ready():
            self._queue.put_nowait((choice, event))
            return
        choice.take(event)
        try:
            self._sink(choice, event)
        except Exception as error:
            self._queue.put_nowait((choice, error))

    def _take(self, arrived: tuple[Choice, Outcome | Exception]) -> None:
        choice, event = arrived
        if isinstance(event, Exception):
            self._failure = event
            return
        choice.take(event)
        self._n_open -= isinstance(event, Finished)
        self._batch.append((choice, event))
