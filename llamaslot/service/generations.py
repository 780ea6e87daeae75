"""The completions that one HTTP request asks for: run side by side, read as one sequence of events.

Leaving the block cancels every completion that still runs. This one path covers a client that goes away, an error,
and a refusal of the last of several completions.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TypeAlias

import msgspec

from llamaslot.base.commands import Submit
from llamaslot.base.errors import LlamaslotError, ServerError
from llamaslot.base.events import Accepted, Cancelled, Failed, Finished, Output
from llamaslot.base.generation.token_probs import FLOAT_MIN, ProbRows, TokenProbs
from llamaslot.service.reply_budget import ProbsLimit, ReplyBudget

RequestEvent: TypeAlias = Accepted | Output | Finished | Failed | Cancelled


class Generation:
    """One completion in flight, with the text and the tokens that it has produced so far."""

    def __init__(self, index: int, submit: Submit, put: Callable[[Generation, RequestEvent], None]) -> None:
        self.index = index
        self.submit = submit
        self.n_prompt = 0
        self.prompt_tokens: tuple[int, ...] = ()
        """The prompt's token ids, if `submit` asks for them."""
        self.tokens = array("i")
        self.probs = ProbRows()
        """Those of `tokens`, if the request asks for them and the reply has them at its end."""
        self.prompt_probs = ProbRows()
        """Those of the prompt, if the request asks for them; complete before the first text."""
        self.finished: Finished | None = None
        self._text = bytearray()
        self._put = put

    @property
    def has_probs(self) -> bool:
        """True if probabilities are asked for."""
        return self.submit.sampling.n_probs >= 0

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens, if they have some; that of no tokens is less than any."""
        values = self.probs.values()
        if self.submit.sampling.post_sampling_probs:
            values = [math.log(value) if value > 0 else FLOAT_MIN for value in values]
        return math.fsum(values) / len(values) if values else -math.inf

    @property
    def text(self) -> str:
        """All text so far."""
        return self._text.decode(errors="surrogatepass")

    @property
    def end(self) -> Finished:
        """The terminal event of a completion that has it."""
        assert self.finished is not None
        return self.finished

    def put(self, event: RequestEvent) -> None:
        """Receive an event from the engine."""
        self._put(self, event)

    def add(self, event: Output | Finished, *, keeps_tokens: bool = True) -> int:
        """Append an event's text and tokens; return how many bytes that takes."""
        text = event.content.encode(errors="surrogatepass")
        self._text += text
        n_bytes = len(text)
        if keeps_tokens:
            self.tokens.extend(event.tokens)
            n_bytes += 4 * len(event.tokens)
            if event.probs is not None:
                self.probs.extend(event.probs)
                n_bytes += event.probs.n_bytes
        if isinstance(event, Finished):
            # What it carried is kept here.
            self.finished = msgspec.structs.replace(event, probs=None, tokens=(), generated=None)
        elif event.prompt_probs is not None:
            self.prompt_probs.extend(event.prompt_probs)
            n_bytes += event.prompt_probs.n_bytes
        return n_bytes


Batch: TypeAlias = list[tuple[Generation, Output | Finished]]
Sink: TypeAlias = Callable[[Generation, Output], None]


class Generations:
    """An async context manager. Inside it every completion is accepted, and `next_batch` returns their events.

    What they produce is charged to `budget`. With `probs`, the limit of probabilities in the reply, all of them are
    kept for it; without, tokens and probabilities are passed on and not kept.
    """

    def __init__(
        self,
        submits: Sequence[Submit],
        cancel: Callable[[str], object],
        budget: ReplyBudget | None = None,
        *,
        n_ctx: int = 0,
        probs: ProbsLimit | None = None,
    ) -> None:
        self.all = [Generation(index, submit, self._put) for index, submit in enumerate(submits)]
        self._cancel = cancel
        self._budget = budget or ReplyBudget()
        self._owner = submits[0].owner
        self._n_ctx = n_ctx
        self._probs = probs
        self._n_probs = 0
        self._n_bytes = 0
        """Bytes that are charged."""
        self._queue: asyncio.Queue[tuple[Generation, RequestEvent | Exception]] = asyncio.Queue()
        self._batch: Batch = []
        self._failure: Exception | None = None
        self._sink: Sink | None = None
        self._is_ready: Callable[[], bool] = lambda: False
        self._is_closed = False
        self._n_unaccepted = self._n_unfinished = len(self.all)

    async def __aenter__(self) -> Generations:
        """Wait until every completion is accepted; raise the error of the first that is refused."""
        try:
            while self._n_unaccepted:
                self._take(*await self._queue.get())
                if self._failure is not None:
                    raise self._failure
            if self._probs is not None:
                n_prompts = [each.n_prompt for each in self.all]
                self._probs.check([each.submit for each in self.all], self._n_ctx, n_prompts)
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what still runs, and release the memory."""
        self.close()

    def close(self) -> None:
        """Cancel every completion that has not ended, and release the memory; further events take none."""
        self.cancel()
        self._is_closed = True
        self._budget.charge(self._owner, -self._n_bytes)
        self._n_bytes = 0

    def cancel(self) -> None:
        """Cancel every completion that has not ended."""
        for generation in self.all:
            self._cancel(generation.submit.request_id)

    @property
    def done(self) -> bool:
        """True if all completions are finished."""
        return self._n_unfinished == 0

    def listen(self, sink: Sink, is_ready: Callable[[], bool]) -> None:
        """Pass each `Output` to `sink` at once if `is_ready()` and no earlier event waits for `next_batch`.

        `next_batch` returns all other events, and raises what the sink raised.
        """
        self._sink, self._is_ready = sink, is_ready

    async def next_batch(self) -> Batch:
        """Return the events that have arrived since the last call, at least one; none once all are finished.

        May be cancelled without loss. Raises the error of a failed completion after all events before it.
        """
        if self.done and not self._batch:
            return []
        if not self._batch and self._failure is None:
            self._take(*await self._queue.get())
        while self._failure is None and not self._queue.empty():
            self._take(*self._queue.get_nowait())
        batch, self._batch = self._batch, []
        if self._failure is not None and not batch:
            raise self._failure
        return batch

    def _put(self, generation: Generation, event: RequestEvent) -> None:
        has_earlier = bool(self._batch) or not self._queue.empty()
        try:
            if self._sink is None or not isinstance(event, Output) or has_earlier or not self._is_ready():
                if isinstance(event, Output):
                    # The client of a stream may read slowly.
                    self._charge(_waiting_bytes(event))
                self._queue.put_nowait((generation, event))
            else:
                self._add(generation, event)
                self._sink(generation, event)
        except Exception as error:
            self._queue.put_nowait((generation, error))

    def _take(self, generation: Generation, event: RequestEvent | Exception) -> None:
        match event:
            case Accepted():
                generation.prompt_tokens, generation.n_prompt = event.prompt_tokens, event.n_prompt
                self._n_unaccepted -= 1
            case Output() | Finished():
                if isinstance(event, Output):
                    self._charge(-_waiting_bytes(event))
                try:
                    self._add(generation, event)
                except LlamaslotError as error:
                    self._failure = error
                    return
                self._n_unfinished -= isinstance(event, Finished)
                self._batch.append((generation, event))
            case Failed():
                self._failure = event.error.exception()
            case Cancelled():
                self._failure = ServerError("the request was cancelled")
            case Exception():
                self._failure = event

    def _add(self, generation: Generation, event: Output | Finished) -> None:
        n_bytes = generation.add(event, keeps_tokens=self._probs is not None)
        if self._probs is not None:
            self._n_probs += sum(each.n_entries for each in _probs_of(event))
            if self._n_probs > self._probs.most:
                raise self._probs.error(f"already has {self._n_probs}")
            n_bytes *= self._probs.n_copies
        self._charge(n_bytes)

    def _charge(self, n_bytes: int) -> None:
        if self._is_closed:
            return
        self._budget.charge(self._owner, n_bytes, n_own=self._n_bytes)
        self._n_bytes += n_bytes


def _probs_of(event: Output | Finished) -> Iterator[TokenProbs]:
    for probs in (event.probs, event.prompt_probs if isinstance(event, Output) else None):
        if probs is not None:
            yield probs


def _waiting_bytes(event: Output) -> int:
    """Return the bytes that an event takes in the queue, about."""
    return 512 + len(event.content) + sum(each.n_bytes for each in _probs_of(event))
