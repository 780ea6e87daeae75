"""Live requests: HTTP requests for completions, from their arrival to the end of their replies.

While a request is prepared it has no completions: a client that goes away, a deadline or an error ends the job of
the prompt worker. Then each completion has a state (`COMPLETION_TABLE`; `service/service.py` carries them out):

    WAITING    no engine has it. SEND gives it to one, at once unless there is none or a suspect has to run alone
    SENT       an engine has it. If that is lost, it waits for the next one; a suspect that ran alone when the
               engine crashed ends, and so does one that was cancelled
    RUNNING    the engine has started it. If the engine is lost, it ends
    DONE       its terminal event has arrived, or was made here
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import TypeAlias

import msgspec

from llamaslot.base.callers import Caller
from llamaslot.base.commands import Generate, GenerateParams
from llamaslot.base.errors import LlamaslotError, ServerError, next_state
from llamaslot.base.events import Cancelled, Failed, Finished, Output, Progress
from llamaslot.base.generation.token_probs import FLOAT_MIN, ProbRows, TokenProbs
from llamaslot.base.prompt_jobs import ReplyOptions
from llamaslot.base.tokens import TokenizedPrompt
from llamaslot.service.limits import Capacity, ProbsLimit, ReplyBudget, request_digest

MAX_INPUTS_SENT = 256
"""Most inputs of a request for vectors that an engine has, or two for each slot if that is more.

The scheduler goes through its queue for each plan: with 2,000 texts in it, each took 2.5 to 4 ms longer.
"""


class CompletionState(Enum):
    """State of a completion."""

    WAITING = "waiting"
    SENT = "sent"
    RUNNING = "running"
    DONE = "done"


class CompletionEvent(Enum):
    """Event that changes the state of a completion."""

    SEND = "send"
    START = "start"
    LOSE = "lose"
    END = "end"


COMPLETION_TABLE: dict[tuple[CompletionState, CompletionEvent], CompletionState] = {
    (CompletionState.WAITING, CompletionEvent.SEND): CompletionState.SENT,
    (CompletionState.SENT, CompletionEvent.START): CompletionState.RUNNING,
    # After a preemption.
    (CompletionState.RUNNING, CompletionEvent.START): CompletionState.RUNNING,
    (CompletionState.SENT, CompletionEvent.LOSE): CompletionState.WAITING,
    (CompletionState.WAITING, CompletionEvent.END): CompletionState.DONE,
    (CompletionState.SENT, CompletionEvent.END): CompletionState.DONE,
    (CompletionState.RUNNING, CompletionEvent.END): CompletionState.DONE,
}
"""Every legal transition; any other pair raises and changes nothing."""


class Completion:
    """One completion, with the text and the tokens that it has produced so far."""

    def __init__(
        self, index: int, params: GenerateParams, prompt: TokenizedPrompt, prompt_number: int, live: LiveRequest
    ) -> None:
        self.index = index
        self.params = params
        self.prompt = prompt
        self.prompt_number = prompt_number
        """Index of its prompt in `LiveRequest.prompts`."""
        self.live = live
        self.state = CompletionState.WAITING
        self.is_cancelled = False
        """True if the engine was told to cancel it."""
        self.diverged_at = -1
        """`Progress.diverged_at`."""
        self.tokens = array("i")
        self.probs = ProbRows()
        """Those of `tokens`, if the request asks for them and the reply has them at its end."""
        self.prompt_probs = ProbRows()
        """Those of the prompt, if the request asks for them; complete before the first text."""
        self.end: Finished
        """Its terminal event; set when it has finished."""
        self._text = bytearray()

    def handle(self, event: CompletionEvent) -> None:
        """Go to the next state, or raise `IllegalTransitionError` and change nothing."""
        self.state = next_state(COMPLETION_TABLE, self.state, event, f"completion {self.id}")

    @property
    def is_in_engine(self) -> bool:
        """True while an engine has it."""
        return self.state in (CompletionState.SENT, CompletionState.RUNNING)

    @property
    def id(self) -> str:
        """The id under which the engine has it."""
        return self.params.completion_id

    @property
    def prompt_text(self) -> str:
        """The text of its prompt as the model sees it; empty if the reply does not show it."""
        return self.live.texts[self.prompt_number]

    @property
    def echo(self) -> str:
        """The text of its prompt as the client gave it; empty if the reply does not begin with it."""
        return self.live.echoes[self.prompt_number]

    @property
    def digest(self) -> bytes:
        """The digest by which it is suspected of crashing the engine."""
        return request_digest(self.params, self.prompt)

    @property
    def has_probs(self) -> bool:
        """True if probabilities are asked for."""
        return self.params.sampling.n_probs >= 0

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of its tokens; -inf without any."""
        values = self.probs.values()
        if self.params.sampling.post_sampling_probs:
            values = [math.log(value) if value > 0 else FLOAT_MIN for value in values]
        return math.fsum(values) / len(values) if values else -math.inf

    @property
    def text(self) -> str:
        """All text so far."""
        return self._text.decode(errors="surrogatepass")

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
            n_bytes += len(event.vector)
            # What it carried is kept here.
            self.end = msgspec.structs.replace(event, probs=None, tokens=(), generated=None)
        elif event.prompt_probs is not None:
            self.prompt_probs.extend(event.prompt_probs)
            n_bytes += event.prompt_probs.n_bytes
        return n_bytes


ReplyEvent: TypeAlias = Output | Finished | Failed | Cancelled
Batch: TypeAlias = list[tuple[Completion, Output | Finished]]
Sink: TypeAlias = Callable[[Completion, Output], None]


class LiveRequest:
    """A request whose reply is not complete. `next_batch` returns the events of its completions.

    What they produce, and what is kept of the body, is charged to the owner's share of `budget`.
    """

    def __init__(self, caller: Caller, deadline: float | None, capacity: Capacity, budget: ReplyBudget) -> None:
        self.caller = caller
        self.client = caller.known_client
        """Whose limit of requests it counts against; empty while only the body can name it."""
        self.deadline = deadline
        """Time on the event loop's clock at which it must have ended, if any."""
        self.timer: asyncio.TimerHandle | None = None
        """Ends its completions at the deadline."""
        self.is_expired = False
        self.n_reserved = 0
        """Places it takes in `Capacity`: 1 until its body is read, then one for each unfinished completion.

        All inputs of a request for vectors take one together.
        """
        self.n_running = 0
        """Completions that have not ended."""
        self.end: Finished | Failed | Cancelled | None = None
        """The worst end so far of a request for vectors, with the sums of all."""
        self.id = ""
        """Request id, and key of its prompts in the prompt worker; empty once released."""
        self.prepared_at = 0.0
        """When its preparation began, on the service's clock."""
        self.prompts: Sequence[Generate] = ()
        self.texts: Sequence[str] = ()
        self.echoes: Sequence[str] = ()
        self.options = ReplyOptions()
        self.completions: list[Completion] = []
        self._later: Iterator[Completion] = iter(())
        """Inputs that are sent to the engine once earlier ones have ended."""
        self.is_closed = False
        """True once its handler has ended."""
        self._capacity = capacity
        self._budget = budget
        self._probs: ProbsLimit | None = None
        self._n_probs = 0
        self._n_bytes = 0
        """Bytes that are charged."""
        self._queue: asyncio.Queue[tuple[Completion, ReplyEvent | Exception]] = asyncio.Queue()
        self._failure: Exception | None = None
        self._sink: Sink | None = None
        self._is_ready: Callable[[], bool] = lambda: False
        self._n_unread = 0
        """Completions whose end was not read."""

    def reserve(self, n: int, client: str) -> None:
        """Take `n` places of a client, in place of those that it has; raises what `Capacity.check` raises."""
        n_before = self.n_reserved
        self.count(-n_before)
        try:
            self._capacity.check(n, client, is_accepted=n_before > 0)
        except LlamaslotError:
            self.count(n_before)
            raise
        self.client = client
        self.count(n)

    def count(self, n: int) -> None:
        """Take `n` more places, or less."""
        self.n_reserved += n
        self._capacity.n_of_client.add(self.client, n)

    def begin(self, probs: ProbsLimit | None) -> None:
        """Make the completions of the prompts.

        With `probs`, the limit of probabilities in the reply, tokens and probabilities are kept for it; without,
        they are passed on only.
        """
        self._probs = probs
        for number, each in enumerate(self.prompts):
            for params in each.params.completions():
                self.completions.append(Completion(len(self.completions), params, each.prompt, number, self))
        self._n_unread = self.n_running = len(self.completions)

    def first_inputs(self, n_slots: int) -> Sequence[Completion]:
        """Return the completions to be sent to the engine at first: of a request for vectors, so many at most."""
        n = max(MAX_INPUTS_SENT, 2 * n_slots) if self.is_batch else len(self.completions)
        self._later = iter(self.completions[n:])
        return self.completions[:n]

    def next_input(self) -> Completion | None:
        """Return the next input to be sent to the engine as one has ended; None if there is none."""
        return next((each for each in self._later if each.state is CompletionState.WAITING), None)

    def end_one(self) -> None:
        """Give back the place of a completion that has ended."""
        self.n_running -= 1
        if not self.is_batch:
            self.count(-1)
        elif not self.n_running:
            self.count(-self.n_reserved)

    def add_end(self, event: Finished | Failed | Cancelled) -> None:
        """Add the end of an input to that of a request for vectors."""
        worst = event if self.end is None or _BADNESS[type(event)] > _BADNESS[type(self.end)] else self.end
        request_id = event.completion_id
        if len(self.completions) > 1:
            request_id = request_id.rpartition("-")[0]
        progress = _sum_of(event.progress, self.end.progress if self.end is not None else None)
        self.end = msgspec.structs.replace(worst, completion_id=request_id, progress=progress)
        if isinstance(self.end, Finished):
            self.end = msgspec.structs.replace(self.end, vector=b"")

    @property
    def is_batch(self) -> bool:
        """True for a prepared request for vectors, whose inputs count as one request."""
        return self.options.vectors is not None

    def close(self) -> None:
        """Release the memory; further events take none."""
        self.is_closed = True
        if self.timer is not None:
            self.timer.cancel()
        self._budget.charge(self.caller.owner, -self._n_bytes)
        self._n_bytes = 0

    @property
    def is_done(self) -> bool:
        """True if the ends of all completions were read."""
        return self._n_unread == 0

    def listen(self, sink: Sink, is_ready: Callable[[], bool]) -> None:
        """Pass each `Output` to `sink` at once if `is_ready()` and no earlier event waits for `next_batch`.

        `next_batch` returns all other events, and raises what the sink raised.
        """
        self._sink, self._is_ready = sink, is_ready

    async def next_batch(self) -> Batch:
        """Return the events that have arrived since the last call, at least one; none once all are finished.

        May be cancelled without loss. Raises the error of a failed completion after all events before it.
        """
        if self.is_done:
            return []
        batch: Batch = []
        if self._failure is None:
            self._take(*await self._queue.get(), batch)
        while self._failure is None and not self._queue.empty():
            self._take(*self._queue.get_nowait(), batch)
        if self._failure is not None and not batch:
            raise self._failure
        return batch

    def put(self, completion: Completion, event: ReplyEvent) -> None:
        """Take an event of a completion. An error of the sink or of the budget is this request's alone."""
        if self.is_closed:
            return
        try:
            can_pass = self._sink is not None and self._queue.empty() and self._is_ready()
            if self._sink is None or not isinstance(event, Output) or not can_pass:
                if isinstance(event, Output | Finished):
                    # The client of a stream may read slowly.
                    self.charge(_waiting_bytes(event))
                self._queue.put_nowait((completion, event))
            else:
                self._add(completion, event)
                self._sink(completion, event)
        except Exception as error:
            self._queue.put_nowait((completion, error))

    def _take(self, completion: Completion, event: ReplyEvent | Exception, batch: Batch) -> None:
        match event:
            case Output() | Finished():
                self.charge(-_waiting_bytes(event))
                try:
                    self._add(completion, event)
                except LlamaslotError as error:
                    self._failure = error
                    return
                self._n_unread -= isinstance(event, Finished)
                batch.append((completion, event))
            case Failed():
                self._failure = event.error.exception()
            case Cancelled():
                self._failure = ServerError("the request was cancelled")
            case Exception():
                self._failure = event

    def _add(self, completion: Completion, event: Output | Finished) -> None:
        n_bytes = completion.add(event, keeps_tokens=self._probs is not None)
        if self._probs is not None:
            self._n_probs += sum(each.n_entries for each in _probs_of(event))
            if self._n_probs > self._probs.most:
                raise self._probs.error(f"already has {self._n_probs}")
            n_bytes *= self._probs.n_copies
        self.charge(n_bytes)

    def charge(self, n_bytes: int) -> None:
        """Count bytes that are kept until the end; raises `QueueFullError` if the owner has too many."""
        if self.is_closed:
            return
        self._budget.charge(self.caller.owner, n_bytes, n_own=self._n_bytes)
        self._n_bytes += n_bytes


_BADNESS: dict[type[msgspec.Struct], int] = {Finished: 0, Cancelled: 1, Failed: 2}
_SUMS = ("n_prompt", "n_cached", "n_prompt_computed", "n_copied", "n_loaded", "n_read", "n_fetched")
"""Fields of `Progress` that are added up over the inputs of a request."""


def _sum_of(one: Progress | None, other: Progress | None) -> Progress | None:
    """Return the progress of a request with several inputs, whose time ends with the last one."""
    if one is None or other is None:
        return one or other
    queue_ms = min(one.queue_ms, other.queue_ms)
    ms = max(each.queue_ms + each.prompt_ms for each in (one, other))
    sums = {name: getattr(one, name) + getattr(other, name) for name in _SUMS}
    return msgspec.structs.replace(one, queue_ms=queue_ms, prompt_ms=ms - queue_ms, **sums)


def _probs_of(event: Output | Finished) -> Iterator[TokenProbs]:
    for probs in (event.probs, event.prompt_probs if isinstance(event, Output) else None):
        if probs is not None:
            yield probs


def _waiting_bytes(event: Output | Finished) -> int:
    """Return the bytes that an event takes in the queue, about; of the only last one, those of its vector."""
    if isinstance(event, Finished):
        return len(event.vector)
    return 512 + len(event.content) + sum(each.n_bytes for each in _probs_of(event))
