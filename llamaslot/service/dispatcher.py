"""Dispatcher: passes each request to the prompt worker, then to the engine, and the engine's events back.

    Submit --> prompt worker --> Generate --> engine --> Started, Output, ..., Finished
                                                 |
                       Remember, Locate <--------+

It keeps each request until its terminal event, and accepts it as soon as its prompt is tokenized and valid.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog
from msgspec import structs

from llamaslot.base import commands
from llamaslot.base.commands import EngineCommand, Generate, Query, Submit, TokenQuery, WriteTexts
from llamaslot.base.errors import (
    ContextSizeError,
    InvalidRequestError,
    LlamaslotError,
    NotFoundError,
    ServerError,
    stopped_error,
)
from llamaslot.base.events import (
    TERMINAL,
    Accepted,
    Cancelled,
    Event,
    Failed,
    Finished,
    Progress,
    Reply,
    Started,
    Stopped,
)
from llamaslot.base.model import ModelInfo
from llamaslot.base.prompt import TokenizedPrompt
from llamaslot.base.stats import CacheState, EngineState
from llamaslot.prompts.prompt_jobs import (
    ClearTexts,
    DroppedSession,
    Locate,
    Located,
    Release,
    Remember,
    TextRecords,
    TokenizePrompt,
)
from llamaslot.prompts.prompt_worker import PromptWorker

_POLL_S = 0.01
"""Time between two looks at whether all requests have ended."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Prompt:
    """The prompt that the completions of a request share."""

    submit: Submit
    submitted: float
    completions: dict[str, _Completion] = field(default_factory=dict)
    """Those that have not ended, by id."""
    tokenizing: asyncio.Future[TokenizedPrompt] | None = None
    """None once the completions were accepted or refused."""


@dataclass(slots=True, eq=False)
class _Completion:
    """A completion between its `Submit` and its terminal event."""

    submit: Submit
    prompt: _Prompt
    diverged_at: int = -1
    """`Progress.diverged_at`."""

    @property
    def is_sent(self) -> bool:
        """True if the engine has it."""
        return self.prompt.tokenizing is None


class Dispatcher:
    """Tokenizes prompts with `prompts`, passes events to `on_events`. All methods are called on one event loop."""

    def __init__(
        self,
        info: ModelInfo,
        prompts: PromptWorker,
        on_events: Callable[[list[Event]], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._info = info
        self._prompts = prompts
        self._on_events = on_events
        self._clock = clock
        self._send: Callable[[EngineCommand], None]
        self._completions: dict[str, _Completion] = {}
        self._queries: dict[str, asyncio.Future[Any]] = {}
        """Queries that the prompt worker answers."""
        self._n_remembering = 0
        self._outbox: list[Event] = []
        self._is_closing = False
        self._refusal: LlamaslotError | None = None
        """The error of further requests once the engine has ended."""

    def connect(self, send: Callable[[EngineCommand], None]) -> None:
        """Set the function that passes commands to the engine."""
        self._send = send

    def send(self, command: commands.Command) -> None:
        """Carry out a command; its events follow later."""
        match command:
            case Submit():
                self._submit(command)
            case commands.Cancel(request_id):
                self._cancel(request_id)
            case Query(request_id, commands.DropSession() as body):
                self._drop_session(request_id, body)
            case Query(_, commands.ClearCache()):
                self._then(self._prompts.call(ClearTexts()), lambda _: self._send(command), self._ignore)
            case Query(request_id, body) if isinstance(body, TokenQuery):
                self._answer(request_id, body)
            case _:
                self._send(command)

    def receive(self, events: list[Event]) -> None:
        """Take the events of an engine step."""
        for event in events:
            match event:
                case Started():
                    self._locate(event)
                case Stopped():
                    self._refusal = stopped_error(event.reason)
                    self._end_all(self._refusal)
                    self._outbox.append(event)
                case Reply():
                    self._add_stats(event)
                    self._outbox.append(event)
                case _:
                    self._pass_on(event)
        self._flush()

    async def close(self, seconds: float) -> None:
        """End all requests as unavailable, and wait until their replies are remembered, at most `seconds`."""
        self._is_closing = True
        error = stopped_error("")
        for request_id, completion in list(self._completions.items()):
            if completion.is_sent:
                self._send(commands.Cancel(request_id))
            else:
                self._fail(request_id, error)
        until = asyncio.get_running_loop().time() + seconds
        while (self._completions or self._n_remembering) and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(_POLL_S)

    def _submit(self, submit: Submit) -> None:
        prompt = _Prompt(submit, self._clock())
        prompt.completions = {each.request_id: _Completion(each, prompt) for each in submit.completions()}
        self._completions |= prompt.completions
        if self._refusal is not None:
            self._not_tokenized(prompt, self._refusal)
            return
        prompt.tokenizing = self._prompts.call(TokenizePrompt(submit))
        self._then(
            prompt.tokenizing,
            lambda tokenized: self._tokenized(prompt, tokenized),
            lambda error: self._not_tokenized(prompt, error),
        )

    def _tokenized(self, prompt: _Prompt, tokenized: TokenizedPrompt) -> None:
        prompt.tokenizing = None
        try:
            check_submit(prompt.submit, len(tokenized.tokens), self._info)
        except LlamaslotError as error:
            self._not_tokenized(prompt, error)
            return
        waited = self._clock() - prompt.submitted
        shown = tuple(tokenized.tokens.tolist()) if prompt.submit.return_tokens else ()
        for request_id, completion in prompt.completions.items():
            self._outbox.append(Accepted(request_id, len(tokenized.tokens), shown))
            self._send(Generate(structs.replace(completion.submit, prompt=()), tokenized, waited))
        self._flush()

    def _not_tokenized(self, prompt: _Prompt, error: LlamaslotError) -> None:
        prompt.tokenizing = None
        for request_id in list(prompt.completions):
            self._fail(request_id, error)

    def _cancel(self, request_id: str) -> None:
        query = self._queries.pop(request_id, None)
        if query is not None:
            query.cancel()
        completion = self._completions.get(request_id)
        if completion is None:
            return
        if completion.is_sent:
            self._send(commands.Cancel(request_id))
            return
        self._remove(request_id)
        self._emit(Cancelled(request_id))

    def _fail(self, request_id: str, error: LlamaslotError) -> None:
        self._remove(request_id)
        self._emit(Failed(request_id, error.info()))

    def _end_all(self, error: LlamaslotError) -> None:
        for request_id in list(self._completions):
            self._fail(request_id, error)
        for query in self._queries.values():
            query.cancel()
        self._queries.clear()

    def _remove(self, request_id: str) -> None:
        """Forget a completion, and with the last one of its prompt the prompt."""
        prompt = self._completions.pop(request_id).prompt
        del prompt.completions[request_id]
        if prompt.completions or self._refusal is not None:
            return
        if prompt.tokenizing is not None:
            prompt.tokenizing.cancel()
        self._then(self._prompts.call(Release(prompt.submit.request_id)), self._ignore, self._ignore)

    def _pass_on(self, event: Any) -> None:
        completion = self._completions.get(event.request_id)
        if completion is None:
            return
        if completion.diverged_at >= 0 and event.progress is not None:
            event = structs.replace(event, progress=located(event.progress, completion.diverged_at))
        if isinstance(event, TERMINAL):
            # Before the client learns of the end: jobs run in order, so its next prompt finds the reply.
            if not isinstance(event, Failed) and event.generated is not None:
                self._remember(completion, event)
            self._remove(event.request_id)
        if isinstance(event, Cancelled) and self._is_closing:
            event = Failed(event.request_id, stopped_error("").info(), event.progress)
        self._outbox.append(event)

    def _remember(self, completion: _Completion, event: Finished | Cancelled) -> None:
        assert event.generated is not None
        self._n_remembering += 1

        def remembered(new: TextRecords | None) -> None:
            self._n_remembering -= 1
            if new is not None and new.records:
                self._send(WriteTexts(new.records))

        job = Remember(completion.prompt.submit.request_id, event.generated.packed_tokens, event.generated.n_sent)
        self._then(self._prompts.call(job), remembered, lambda _: remembered(None))

    def _locate(self, event: Started) -> None:
        """Find the character at which a prompt departs from what was cached."""
        completion = self._completions.get(event.request_id)
        if completion is None or event.miss not in ("diverged", "changed"):
            return

        def found(place: Located) -> None:
            completion.diverged_at = place.n_characters

        job = Locate(completion.prompt.submit.request_id, event.n_matched)
        self._then(self._prompts.call(job), found, self._ignore)

    def _answer(self, request_id: str, body: TokenQuery) -> None:
        future = self._queries[request_id] = self._prompts.call(body)

        def respond(reply: Reply) -> None:
            if self._queries.pop(request_id, None) is not None:
                self._emit(reply)

        self._then(
            future,
            lambda answer: respond(Reply(request_id, answer)),
            lambda error: respond(Reply(request_id, error=error.info())),
        )

    def _drop_session(self, request_id: str, body: commands.DropSession) -> None:
        def dropped(session: DroppedSession) -> None:
            paths = commands.DropPaths(session.namespace, session.paths, session.digest)
            if session.paths:
                self._send(Query(request_id, paths))
            else:
                error = NotFoundError(f"there is no session {body.session_id!r}")
                self._emit(Reply(request_id, error=error.info()))

        self._then(
            self._prompts.call(body),
            dropped,
            lambda error: self._emit(Reply(request_id, error=error.info())),
        )

    def _add_stats(self, reply: Reply) -> None:
        """Add the counts of what is remembered to the engine's statistics."""
        if isinstance(reply.body, EngineState):
            reply.body.cache.anchors, reply.body.cache.sessions = self._prompts.stats
        elif isinstance(reply.body, CacheState):
            reply.body.anchors, reply.body.sessions = self._prompts.stats

    def _emit(self, event: Event) -> None:
        """Pass on an event of its own, not before the caller returns."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(event)

    def _flush(self) -> None:
        if self._outbox:
            events, self._outbox = self._outbox, []
            self._on_events(events)

    def _then(
        self,
        future: asyncio.Future[Any],
        then: Callable[[Any], None],
        failed: Callable[[LlamaslotError], None],
    ) -> None:
        """Continue with the result or the error of a job, not at all if it was cancelled."""

        def done(_: object) -> None:
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                then(future.result())
            elif isinstance(error, LlamaslotError):
                failed(error)
            else:
                _log.error("prompt_worker.failed", exc_info=error)
                failed(ServerError("the prompt could not be tokenized"))

        future.add_done_callback(done)

    def _ignore(self, _: object) -> None:
        """Leave a result or an error aside; errors that are not a user's were logged."""


def located(progress: Progress, diverged_at: int) -> Progress:
    """Return the progress with the character at which the prompt departs from what was cached."""
    return structs.replace(progress, diverged_at=diverged_at)


def check_submit(submit: Submit, n_prompt: int, info: ModelInfo) -> None:
    """Raise `InvalidRequestError` or `ContextSizeError` for a request that cannot run."""
    if not n_prompt:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    if n_prompt >= info.n_ctx_slot:
        raise ContextSizeError.of(n_prompt, info.n_ctx_slot)
    if not -1 <= submit.id_slot < info.n_slots:
        raise InvalidRequestError(f"id_slot must be between -1 and {info.n_slots - 1}", param="id_slot")
    for token in submit.sampling.logit_bias:
        if not 0 <= token < info.n_vocab:
            raise InvalidRequestError(
                f"logit_bias names token {token}; the vocabulary has {info.n_vocab}", param="logit_bias"
            )
