"""Dispatcher: passes each request to the prompt worker, then to the engine, and the engine's events back.

    Submit --> prompt worker --> Generate --> engine --> Started, Output, ..., Finished
                                                 |
                       Remember, Locate <--------+

It accepts a request as soon as its prompt is tokenized and valid, and keeps it until its terminal event. If the
engine's process ends, requests that had started fail; the others are sent to the next engine (`completions.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog
from msgspec import structs

from llamaslot.base import commands
from llamaslot.base.commands import EngineCommand, Generate, Query, Submit, WriteTexts
from llamaslot.base.errors import (
    LlamaslotError,
    UnavailableError,
    stopped_error,
)
from llamaslot.base.events import (
    TERMINAL,
    Accepted,
    Cancelled,
    EngineEvent,
    Event,
    Failed,
    Finished,
    Output,
    Reply,
    SelfTestEnded,
    Started,
    Stopped,
)
from llamaslot.base.model import ModelInfo
from llamaslot.base.prompt import TokenizedPrompt
from llamaslot.base.text_records import TextRecord
from llamaslot.base.tokens import ids_of
from llamaslot.base.turns import Turns
from llamaslot.prompts.prompt_jobs import (
    Locate,
    Located,
    Release,
    Remember,
    TextRecords,
    TokenizePrompt,
)
from llamaslot.prompts.prompt_worker import PromptWorker, on_result
from llamaslot.service.completions import Completion, Prompt, State, check_submit
from llamaslot.service.queries import Queries
from llamaslot.service.suspects import Suspects

_POLL_S = 0.01
"""Time between two looks at whether all requests have ended."""

_log = structlog.get_logger(__name__)


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
        self._completions: dict[str, Completion] = {}
        self._waiting: list[Completion] = []
        """Those in the state WAITING, in order, and some that were cancelled meanwhile."""
        self._turns = Turns()
        self._alone: Completion | None = None
        """The suspect that the engine has; it gets no other request until that one's end."""
        self._suspects = Suspects(clock)
        self._queries = Queries(prompts, self._emit)
        self.is_connected = False
        """True while an engine takes commands."""
        self._n_remembering = 0
        self._unwritten: list[TextRecord] = []
        """New records that no engine has got yet."""
        self._outbox: list[Event] = []
        self._is_closing = False
        self._refusal: LlamaslotError | None = None
        """The error of further requests once the engine has ended."""

    def connect(self, send: Callable[[EngineCommand], None]) -> None:
        """Set the function that passes commands to the engine."""
        self._send = send
        self._queries.connect(send)
        self.is_connected = True

    def send(self, command: commands.Command) -> None:
        """Carry out a command; its events follow later."""
        match command:
            case Submit():
                self._submit(command)
            case commands.Cancel(request_id):
                self._cancel(request_id)
            case Query():
                self._queries.ask(command)

    def receive(self, events: list[EngineEvent]) -> None:
        """Take the events of an engine step."""
        for event in events:
            match event:
                case Started():
                    self._started(event)
                case SelfTestEnded(info):
                    self._info = info
                    self._outbox.append(event)
                case Stopped():
                    self._refusal = stopped_error(event.reason)
                    self._end_all(self._refusal)
                    self._outbox.append(event)
                case Reply():
                    if (reply := self._queries.replied(event)) is not None:
                        self._outbox.append(reply)
                case _:
                    self._pass_on(event)
        self._flush()

    def engine_lost(self, is_crash: bool) -> None:
        """Fail the requests that had started, and keep the others for the next engine: this one has ended."""
        self.is_connected = False
        in_engine = [each for each in self._completions.values() if each.is_in_engine]
        if is_crash and in_engine:
            self._add_suspects(in_engine)
        message = "the engine ended while it ran this request, and is restarting"
        error = stopped_error("") if self._is_closing else UnavailableError(message, retry_after=1)
        for completion in in_engine:
            request_id = completion.submit.request_id
            has_failed = completion.state is State.STARTED or (is_crash and completion is self._alone)
            if completion.is_cancelled:
                self._remove(request_id)
                self._emit(Cancelled(request_id))
            elif has_failed or self._is_closing:
                self._fail(request_id, error)
            else:
                completion.state = State.WAITING
        self._alone = None
        self._waiting = [each for each in self._completions.values() if each.state is State.WAITING]
        self._queries.disconnect()

    def engine_restarted(self) -> None:
        """Send the requests that wait: another engine takes commands."""
        self.connect(self._send)
        self._write_texts()
        self._send_waiting()

    async def close(self, seconds: float) -> None:
        """End all requests as unavailable, and wait until their replies are remembered, at most `seconds`."""
        self._is_closing = True
        error = stopped_error("")
        for request_id, completion in list(self._completions.items()):
            if completion.is_in_engine and self.is_connected:
                self._send(commands.Cancel(request_id))
            else:
                self._fail(request_id, error)
        until = asyncio.get_running_loop().time() + seconds
        while (self._completions or self._n_remembering) and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(_POLL_S)
        self._end_all(error)
        self._flush()

    def _submit(self, submit: Submit) -> None:
        prompt = Prompt(submit, self._clock())
        prompt.completions = {each.request_id: Completion(each, prompt) for each in submit.completions()}
        self._completions |= prompt.completions
        if self._refusal is not None:
            self._not_tokenized(prompt, self._refusal)
            return
        prompt.tokenizing = self._prompts.call(TokenizePrompt(submit))
        on_result(
            prompt.tokenizing,
            lambda tokenized: self._tokenized(prompt, tokenized),
            lambda error: self._not_tokenized(prompt, error),
        )

    def _tokenized(self, prompt: Prompt, tokenized: TokenizedPrompt) -> None:
        prompt.tokenizing = None
        prompt.tokenized = tokenized
        try:
            check_submit(prompt.submit, tokenized.n_tokens, self._info)
            if self._suspects:
                self._suspects.check(prompt.digest)
        except LlamaslotError as error:
            self._not_tokenized(prompt, error)
            return
        shown = tuple(ids_of(tokenized.packed_tokens)) if prompt.submit.return_tokens else ()
        for request_id, completion in prompt.completions.items():
            self._outbox.append(Accepted(request_id, tokenized.n_tokens, shown))
            completion.state = State.WAITING
            self._waiting.append(completion)
        self._send_waiting()
        self._flush()

    def _send_waiting(self) -> None:
        """Send completions to the engine, clients in turn; a suspect waits until the engine has nothing else."""
        self._waiting = [each for each in self._waiting if each.submit.request_id in self._completions]
        while self._waiting and self.is_connected and self._alone is None:
            completion = self._turns.next(self._waiting, lambda each: each.submit.client)
            prompt = completion.prompt
            if self._suspects and prompt.digest in self._suspects:
                try:
                    self._suspects.check(prompt.digest)
                except LlamaslotError as error:
                    self._waiting.remove(completion)
                    self._fail(completion.submit.request_id, error)
                    continue
                if any(each.is_in_engine for each in self._completions.values()):
                    return
                self._alone = completion
            self._waiting.remove(completion)
            self._turns.take(completion.submit.client)
            assert prompt.tokenized is not None
            completion.state = State.SENT
            waited = self._clock() - prompt.submitted
            self._send(Generate(completion.submit.without_prompt(), prompt.tokenized, waited))

    def _add_suspects(self, in_engine: list[Completion]) -> None:
        """Find the suspects of a crash: what had started, or else what the engine was about to start."""
        started = [each for each in in_engine if each.state is State.STARTED]
        if self._alone is not None:
            self._suspects.refuse(self._alone.prompt.digest)
        else:
            for completion in started or in_engine:
                self._suspects.add(completion.prompt.digest)
        names = [each.submit.request_id for each in started or in_engine]
        _log.warning("engine.suspects", request_ids=names, alone=self._alone is not None)

    def _not_tokenized(self, prompt: Prompt, error: LlamaslotError) -> None:
        prompt.tokenizing = None
        for request_id in list(prompt.completions):
            self._fail(request_id, error)

    def _cancel(self, request_id: str) -> None:
        self._queries.cancel(request_id)
        completion = self._completions.get(request_id)
        if completion is None:
            return
        if completion.is_in_engine:
            completion.is_cancelled = True
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
        self._queries.cancel_all()

    def _remove(self, request_id: str) -> None:
        """Forget a completion, and with the last one of its prompt the prompt."""
        completion = self._completions.pop(request_id)
        if completion is self._alone:
            self._alone = None
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._send_waiting)
        prompt = completion.prompt
        del prompt.completions[request_id]
        if prompt.completions or self._refusal is not None:
            return
        if prompt.tokenizing is not None:
            prompt.tokenizing.cancel()
        on_result(self._prompts.call(Release(prompt.submit.request_id)), _ignore, _ignore)

    def _pass_on(self, event: Output | Finished | Failed | Cancelled) -> None:
        completion = self._completions.get(event.request_id)
        if completion is None:
            return
        if completion.diverged_at >= 0 and event.progress is not None:
            progress = structs.replace(event.progress, diverged_at=completion.diverged_at)
            event = structs.replace(event, progress=progress)
        if isinstance(event, TERMINAL):
            # Before the client learns of the end: jobs run in order, so its next prompt finds the reply.
            if not isinstance(event, Failed) and event.generated is not None:
                self._remember(completion, event)
            if completion is self._alone and isinstance(event, Finished):
                self._suspects.clear(completion.prompt.digest)
            self._remove(event.request_id)
        if isinstance(event, Cancelled) and self._is_closing:
            event = Failed(event.request_id, stopped_error("").info(), event.progress)
        self._outbox.append(event)

    def _remember(self, completion: Completion, event: Finished | Cancelled) -> None:
        assert event.generated is not None
        self._n_remembering += 1

        def remembered(new: TextRecords | None) -> None:
            self._n_remembering -= 1
            if new is not None and new.records:
                self._unwritten += new.records
                self._write_texts()

        job = Remember(
            completion.prompt.submit.request_id,
            event.generated.packed_tokens,
            event.generated.n_sent,
            event.request_id if isinstance(event, Finished) else "",
        )
        on_result(self._prompts.call(job), remembered, lambda _: remembered(None))

    def _write_texts(self) -> None:
        if self._unwritten and self.is_connected:
            records, self._unwritten = tuple(self._unwritten), []
            self._send(WriteTexts(records))

    def _started(self, event: Started) -> None:
        """Note that a completion runs, and find the character at which its prompt departs from what was cached."""
        completion = self._completions.get(event.request_id)
        if completion is None:
            return
        is_first, completion.state = completion.state is State.SENT, State.STARTED
        if not is_first or event.miss not in ("diverged", "changed"):
            return

        def found(place: Located) -> None:
            completion.diverged_at = place.n_characters

        job = Locate(completion.prompt.submit.request_id, event.n_matched)
        on_result(self._prompts.call(job), found, _ignore)

    def _emit(self, event: Event) -> None:
        """Pass on an event that the dispatcher makes itself, after its caller has returned."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(event)

    def _flush(self) -> None:
        if self._outbox:
            events, self._outbox = self._outbox, []
            self._on_events(events)


def _ignore(_: object) -> None:
    """Leave a result or an error aside."""
