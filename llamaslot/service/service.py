"""The async facade: render a conversation, admit a request, stream its events, cancel it when nobody listens.

It exchanges messages with the engine and nothing else: `connect` gives it the way down, `receive` is the way up.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import structlog

from llamaslot.base.commands import (
    Cancel,
    ClearCache,
    Command,
    Detokenize,
    DropSession,
    Inspect,
    InspectCache,
    PromptPart,
    SlotAction,
    SlotVerb,
    Submit,
    SubmitAll,
    TextPart,
    Tokenize,
)
from llamaslot.base.errors import (
    InvalidRequestError,
    LlamaslotError,
    QueueFullError,
    ServerError,
    UnavailableError,
    from_failure,
)
from llamaslot.base.events import (
    TERMINAL,
    Accepted,
    Answer,
    CacheCleared,
    Cancelled,
    Detokenized,
    Event,
    Failed,
    Finished,
    Output,
    Progress,
    SessionDropped,
    SlotActed,
    Stopped,
    Tokenized,
)
from llamaslot.base.model import ModelInfo
from llamaslot.base.stats import CacheState, State
from llamaslot.service.metrics import Metrics, per_second
from llamaslot.text.template import ChatTemplate

_log = structlog.get_logger(__name__)
_T = TypeVar("_T", Tokenized, Detokenized, State, CacheState, SessionDropped, SlotActed, CacheCleared)

_MAX_RETRY_AFTER = 60

Outcome: TypeAlias = Output | Finished | LlamaslotError
"""What comes of a request once it was accepted."""


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """How much may be in flight."""

    max_queue: int = 256
    """Requests that may wait for a slot; one more is refused."""


class Service:
    """The way to the engine for everything above. Lives on the engine's event loop."""

    def __init__(
        self, info: ModelInfo, chat_template: ChatTemplate, settings: ServiceSettings, metrics: Metrics
    ) -> None:
        self.info = info
        self.chat_template = chat_template
        self.settings = settings
        self.metrics = metrics
        self._send: Callable[[Command], None] | None = None
        self._generations: dict[str, Generation] = {}
        self._answers: dict[str, asyncio.Future[Any]] = {}
        self._ids = itertools.count(1)
        self._mean_seconds = 0.0
        self._refusal: LlamaslotError | None = None
        self.stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the engine has ended; its result is why, empty when it was told to."""

    def connect(self, send: Callable[[Command], None]) -> None:
        """Give the service its way to the engine."""
        self._send = send

    @property
    def n_in_flight(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._generations)

    def refuse(self, error: LlamaslotError) -> None:
        """Take no more requests; those in flight go on."""
        self._refusal = error

    def check_room(self, n: int) -> None:
        """Raise if `n` more requests cannot be taken: `UnavailableError` when shutting down, `QueueFullError` when
        too many are in flight, `InvalidRequestError` when so many never can be.
        """
        if self._refusal:
            raise self._refusal
        most = self.info.n_slots + self.settings.max_queue
        if n > most:
            raise InvalidRequestError(f"{n} completions were asked for at once; the server takes {most}", param="n")
        if self.n_in_flight + n > most:
            rounds = self.n_in_flight / self.info.n_slots
            retry_after = min(max(1, math.ceil(rounds * self._mean_seconds)), _MAX_RETRY_AFTER)
            self.metrics.record_end("refused", None)
            _log.warning("request.refused", in_flight=self.n_in_flight, wanted=n, retry_after=retry_after)
            raise QueueFullError(
                f"{self.n_in_flight} requests are in flight and {self.settings.max_queue} may wait; try later",
                retry_after=retry_after,
            )

    def generate(self, submit: Submit) -> Generation:
        """Submit a request. Raises what `check_room` raises."""
        (generation,) = self.generate_all((submit,))
        return generation

    def generate_all(self, submits: Sequence[Submit]) -> list[Generation]:
        """Submit requests for one prompt. Raises what `check_room` raises."""
        self.check_room(len(submits))
        generations = [Generation(submit, self) for submit in submits]
        self._generations |= {generation.request_id: generation for generation in generations}
        self.send(submits[0] if len(submits) == 1 else SubmitAll(tuple(submits)))
        return generations

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[TextPart, ...]:
        """The prompt of a conversation; raises `InvalidRequestError` when the template refuses."""
        return self.chat_template.render_parts(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, kwargs=kwargs
        )

    async def tokenize(
        self, prompt: tuple[PromptPart, ...], *, add_special: bool, with_pieces: bool = False
    ) -> Tokenized:
        """Token ids of prompt parts, each with its bytes if they are wanted."""
        return await self._ask(Tokenize(self._question_id(), prompt, add_special, with_pieces), Tokenized)

    async def detokenize(self, tokens: tuple[int, ...]) -> str:
        """The text of token ids."""
        return (await self._ask(Detokenize(self._question_id(), tokens), Detokenized)).content

    async def state(self) -> State:
        """The slots and the queue as of the next step."""
        return await self._ask(Inspect(self._question_id()), State)

    async def cache(self, *, top: int, text: bool = False) -> CacheState:
        """The prefix cache as of the next step, with its `top` prefixes, spelled out if `text` is true."""
        return await self._ask(InspectCache(self._question_id(), top, text), CacheState)

    async def drop_session(self, session_id: str, cache_salt: str) -> SessionDropped:
        """Forget a conversation, and give up what only it has of the cache."""
        return await self._ask(DropSession(self._question_id(), session_id, cache_salt), SessionDropped)

    async def act_on_slot(self, slot: int, action: SlotVerb, filename: str = "") -> SlotActed:
        """Save what a slot holds to a file, restore it from there, or erase it, once the slot is idle."""
        question = SlotAction(self._question_id(), slot, action, filename)
        try:
            return await self._ask(question, SlotActed)
        except asyncio.CancelledError:
            self.send(Cancel(question.request_id))
            raise

    async def clear_cache(self) -> CacheCleared:
        """Give up all idle prefixes, and whatever is stored."""
        return await self._ask(ClearCache(self._question_id()), CacheCleared)

    async def exposition(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return self.metrics.exposition(await self.state())

    def send(self, command: Command) -> None:
        """Pass a command to the engine."""
        if self._send is None:
            raise UnavailableError("the engine is not running")
        self._send(command)

    def receive(self, events: list[Event]) -> None:
        """Take a step's events from the engine."""
        for event in events:
            if isinstance(event, Output):
                if generation := self._generations.get(event.request_id):
                    generation.put(event)
            elif isinstance(event, Stopped):
                self._engine_stopped(event)
            elif isinstance(event, Answer):
                self._answer(event.request_id, event)
            elif isinstance(event, Failed) and event.request_id in self._answers:
                self._answer(event.request_id, _error_of(event))
            else:
                self._pass_on(event)

    async def _ask(
        self,
        question: Tokenize | Detokenize | Inspect | InspectCache | DropSession | SlotAction | ClearCache,
        kind: type[_T],
    ) -> _T:
        if self.stopped.done():
            raise self._refusal or UnavailableError("the engine is not running")
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._answers[question.request_id] = future
        try:
            self.send(question)
            return await future
        finally:
            self._answers.pop(question.request_id, None)

    def _question_id(self) -> str:
        return f"question-{next(self._ids)}"

    def _answer(self, question: str, value: Any) -> None:
        future = self._answers.pop(question, None)
        if future is None or future.done():
            return
        if isinstance(value, LlamaslotError):
            future.set_exception(value)
        else:
            future.set_result(value)

    def _pass_on(self, event: Accepted | Finished | Failed | Cancelled) -> None:
        generation = self._generations.get(event.request_id)
        if generation is None:
            return
        generation.put(event)
        if isinstance(event, TERMINAL):
            del self._generations[event.request_id]
            self._log_end(event, generation.client_id)

    def _log_end(self, event: Finished | Failed | Cancelled, client_id: str) -> None:
        reason = _reason(event)
        progress = event.progress
        self.metrics.record_end(reason, progress)
        log = _log.bind(request_id=event.request_id)
        if client_id:
            log = log.bind(client_request_id=client_id)
        if isinstance(event, Failed):
            log = log.bind(type=event.error_type, error=event.message)
        if progress is None:
            log.info("request.done", finish_reason=reason)
            return
        seconds = (progress.prompt_ms + progress.predicted_ms) / 1e3
        self._mean_seconds = 0.9 * self._mean_seconds + 0.1 * seconds if self._mean_seconds else seconds
        log.info("request.done", **_figures(progress), finish_reason=reason)

    def _engine_stopped(self, event: Stopped) -> None:
        self._refusal = (
            ServerError("the engine stopped because of an internal error")
            if event.reason
            else UnavailableError("the server is shutting down")
        )
        for future in self._answers.values():
            if not future.done():
                future.set_exception(self._refusal)
        self._answers.clear()
        if not self.stopped.done():
            self.stopped.set_result(event.reason)


class Generation:
    """One request in flight, as an async context manager; leaving it before its end cancels the request."""

    def __init__(self, submit: Submit, service: Service) -> None:
        self.request_id = submit.request_id
        self.client_id = submit.client_id
        self._service = service
        self._events: asyncio.Queue[Accepted | Output | Finished | Failed | Cancelled] = asyncio.Queue()
        self._sink: Callable[[Outcome], None] | None = None
        self._ended = False

    async def __aenter__(self) -> Generation:
        """Nothing to wait for: the request is in flight already."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the request if it has not ended."""
        self.cancel()

    def cancel(self) -> None:
        """Tell the engine to stop the request; harmless when it has ended."""
        if not self._ended:
            self._ended = True
            self._service.send(Cancel(self.request_id))

    def put(self, event: Accepted | Output | Finished | Failed | Cancelled) -> None:
        """Take an event of this request."""
        if isinstance(event, TERMINAL):
            self._ended = True
        if self._sink is None:
            self._events.put_nowait(event)
        elif isinstance(event, Output):
            self._sink(event)
        elif not isinstance(event, Accepted):
            self._sink(_outcome(event))

    async def accepted(self) -> Accepted:
        """Wait until the prompt was found valid; raises the error by which it was refused."""
        event = await self._events.get()
        if isinstance(event, Accepted):
            return event
        raise _error_of(event)

    def listen(self, sink: Callable[[Outcome], None]) -> None:
        """Pass every event after `Accepted` to `sink` the moment it comes, and those that came already.

        The last one is `Finished`, or the error of a request that failed or was cancelled.
        """
        self._sink = sink
        while not self._events.empty():
            self.put(self._events.get_nowait())


def _outcome(event: Finished | Failed | Cancelled) -> Outcome:
    return event if isinstance(event, Finished) else _error_of(event)


def _error_of(event: Event) -> LlamaslotError:
    if isinstance(event, Failed):
        return from_failure(
            event.error_type, event.message, event.param, n_prompt_tokens=event.n_prompt_tokens, n_ctx=event.n_ctx
        )
    return ServerError("the request was cancelled")


def _reason(event: Finished | Failed | Cancelled) -> str:
    if isinstance(event, Finished):
        return event.reason
    return "error" if isinstance(event, Failed) else "cancelled"


def _figures(progress: Progress) -> dict[str, Any]:
    return {
        "slot": progress.slot,
        "queue_ms": round(progress.queue_ms, 2),
        "ttft_ms": round(progress.queue_ms + progress.prompt_ms, 2),
        "prompt_tokens": progress.n_prompt,
        "prefix_cache_tokens": progress.n_cached,
        "prefix_cache_ratio": round(progress.n_cached / progress.n_prompt, 4),
        "prefix_copied_tokens": progress.n_copied,
        "prefix_loaded_tokens": progress.n_loaded,
        "prefix_read_tokens": progress.n_read,
        "prefix_anchored_tokens": progress.n_anchored,
        "prefix_miss": progress.miss or None,
        **({"diverged_at": progress.diverged_at} if progress.diverged_at >= 0 else {}),
        **({"session_match": progress.session_match} if progress.session_match else {}),
        **({"approximate_tokens": progress.n_approximate} if progress.n_approximate else {}),
        "load_ms": round(progress.load_ms, 2),
        "generated_tokens": progress.n_generated,
        "tokens_per_second": round(per_second(progress), 2),
    }
