"""The prompt worker in a process of its own: a prompt on which it crashes or hangs fails, and no other.

Jobs wait here in lanes (`lane_of`): long queries, large bodies, and bodies whose grammars must be compiled wait
apart from prompts. The process has `JOBS_AT_ONCE` of each lane; clients take turns. When it ends, a new one is
started, and first gets the records of what was remembered and the prompts of requests that have not ended. If
several jobs were running when it crashed, they are tried again one by one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from llamaslot.base.commands import DropSession
from llamaslot.base.errors import InvalidRequestError, LlamaslotError, ServerError, UnavailableError
from llamaslot.base.generation import replies
from llamaslot.base.process_times import ProcessTimes, process_times, starved_seconds
from llamaslot.base.stats import AnchorStats, ReplyStats, SessionStats
from llamaslot.base.text_records import RecordKind, TextRecord
from llamaslot.base.turns import Turns
from llamaslot.processes.child import Exit
from llamaslot.processes.messages import (
    FromPrompts,
    JobDone,
    LoadVocab,
    NumberedJob,
    PromptWorkerReady,
    Refused,
    SetModel,
    Stop,
)
from llamaslot.processes.supervisor import Supervisor
from llamaslot.prompts import sessions, text_anchors
from llamaslot.prompts.lru_cache import LruCache
from llamaslot.prompts.prompt_jobs import (
    ClearTexts,
    DroppedSession,
    Job,
    Release,
    Restore,
    TextRecords,
    TokenizePrompt,
    activity_of,
    client_of,
)
from llamaslot.prompts.prompt_worker import (
    JOBS_AT_ONCE,
    MAX_LONG_QUERIES,
    PromptWorker,
    invalid_unicode,
    is_long_query,
    lane_of,
    too_many_queries,
)

_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""So that llama.cpp makes no context on a GPU, which would take its memory."""
_READY_TIMEOUT_S = 30.0
"""Least time that the first process gets to load the vocabulary and to try the chat template."""
_PAUSE_S = 1.0
"""Time before the process is started again if it did not carry out a single job, times such processes in a row."""
_MAX_PAUSE_S = 30.0
_MIN_LOST = 0.02
"""Fraction of the time limit: a shorter time in which a process did not get a CPU is not given to its job again."""
_ALMOST = 0.1
"""Fraction of the time limit: a job that has less left when another one has none would hang the next process."""
_MAX_TRIES = 3
"""Processes that may end on a job before it fails, whatever ended them."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Pending:
    """A job that is not answered."""

    number: int
    job: Job
    future: asyncio.Future[Any]
    lane: _Lane
    client: str | None = None
    """None for a job that goes before those of clients."""
    n_tries: int = 0
    is_suspect: bool = False
    """True if it, or another job that ran beside it, has crashed the process: it is tried alone."""
    timer: asyncio.TimerHandle | None = None
    """Watches the time of a running job."""
    until: float = 0.0
    """When it has had its time, on the clock of the event loop."""


class _Lane:
    """Jobs of which as many as `n_at_once` are carried out at once."""

    def __init__(self, n_at_once: int) -> None:
        self.waiting: OrderedDict[int, _Pending] = OrderedDict()
        self.turns = Turns()
        self.running: dict[int, _Pending] = {}
        self._n_at_once = n_at_once

    def next(self) -> _Pending | None:
        """Return the job whose turn it is, if one may be carried out; of a client one at a time is."""
        if len(self.running) >= self._n_at_once:
            return None
        busy = {each.client for each in self.running.values() if each.client is not None}
        free = [each for each in self.waiting.values() if each.client not in busy]
        return self.turns.next(free, lambda each: each.client) if free else None

    @property
    def n_queries(self) -> int:
        """Long queries, waiting or running."""
        return sum(is_long_query(each.job) for each in (*self.waiting.values(), *self.running.values()))

    def end(self, number: int) -> _Pending | None:
        """Return the job of that number if it was running; it is not any more."""
        ended = self.running.pop(number, None)
        if ended is not None and ended.timer is not None:
            ended.timer.cancel()
        return ended

    def put_back(self, pending: _Pending) -> None:
        """Make a job the next one."""
        self.waiting[pending.number] = pending
        self.waiting.move_to_end(pending.number, last=False)


class PromptSupervisor(PromptWorker):
    """Keeps a prompt worker running in `module`. All methods are called on the event loop.

    `config` is sent to each new process. A job that takes more than `timeout` seconds fails.
    """

    def __init__(self, module: str, config: Any, *, timeout: float) -> None:
        self._config = config
        self._timeout = timeout
        self._model: SetModel | None = None
        self._chat_template = ""
        self._process = Supervisor(
            module,
            FromPrompts,
            on_started=self._has_started,
            on_message=self._receive,
            on_ended=self._ended,
            env=_NO_GPU,
        )
        self._is_ready = False
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # If the engine fails to load, nothing waits for it.
        self._loaded.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._refusal: LlamaslotError | None = None
        self._numbers = itertools.count(1)
        self._lanes = tuple(map(_Lane, JOBS_AT_ONCE))
        self._overdue: list[_Pending] = []
        self._records: dict[RecordKind, LruCache[TextRecord]] = {
            "anchor": LruCache(text_anchors.MAX_BYTES),
            "session": LruCache(sessions.MAX_RECORD_BYTES),
            "reply": LruCache(replies.MAX_BYTES, time.monotonic),
        }
        """Copies of what is remembered, to be restored in a new process."""
        self._prompts: dict[str, TokenizePrompt] = {}
        """Tokenized and not released, by request id."""
        self._stats = AnchorStats(), SessionStats(), ReplyStats()
        self._n_answered = 0
        """Jobs that the present process has answered."""
        self._n_failures = 0
        """Processes in a row that answered none."""
        self.on_restarted: Callable[[], None] = lambda: None
        """Called when another process takes jobs."""

    @property
    def stats(self) -> tuple[AnchorStats, SessionStats, ReplyStats]:
        """Counts of what is remembered, and estimated bytes, as of the last job."""
        return self._stats

    @property
    def chat_template(self) -> str:
        """Jinja source of the chat template in use."""
        return self._chat_template

    @property
    def pid(self) -> int:
        """The id of its process, 0 without one."""
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """True while its process is stopped, by a signal or a debugger."""
        return self._process.is_stopped

    async def start(self) -> None:
        """Start to load the vocabulary; raises `OSError`."""
        await self._process.start()

    async def set_model(self, model: SetModel, records: Sequence[TextRecord]) -> None:
        """Take jobs for a loaded model; `records` are those of an earlier server.

        Raises `LlamaslotError`, also for a chat template that does not end when it is tried.
        """
        self._model = model
        for each in records:
            self._records[each.kind].put(each.digest, each, each.owner)
        self._process.send(self._model)
        limit = max(self._timeout, _READY_TIMEOUT_S)
        try:
            await asyncio.wait_for(asyncio.shield(self._loaded), limit)
        except TimeoutError:
            self.kill()
            flag = model.template_flag or "--chat-template takes another"
            message = f"the chat template ({flag}) did not render small messages within {limit:g} s"
            raise InvalidRequestError(f"{message} (--prompt-timeout)", param="--chat-template") from None

    async def stop(self, seconds: float) -> None:
        """Kill it, since it has nothing to save and may be at a job that hangs; wait at most `seconds`."""
        self.kill()
        await self._process.stop(Stop(), seconds)

    def kill(self) -> None:
        """End it at once."""
        self._process.is_stopping = True
        self._process.kill()

    def call(self, job: Job) -> asyncio.Future[Any]:
        """Start a job; at most `MAX_LONG_QUERIES` long queries wait, further ones fail at once."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        lane = self._lanes[lane_of(job)]
        if self._process.is_stopping:
            future.set_exception(UnavailableError("the server is shutting down"))
        elif is_long_query(job) and lane.n_queries >= MAX_LONG_QUERIES:
            future.set_exception(too_many_queries())
        else:
            if isinstance(job, Release):
                self._prompts.pop(job.request_id, None)
            pending = _Pending(next(self._numbers), job, future, lane, client_of(job))
            lane.waiting[pending.number] = pending
            future.add_done_callback(lambda _: lane.waiting.pop(pending.number, None))
            self._send_next()
        return future

    def interrupt(self) -> None:
        """Have it stop as soon as possible, such as while it loads the vocabulary; it has nothing to save."""
        self.kill()

    def _has_started(self) -> None:
        self._n_answered = 0
        if self._process.is_stopping:
            self._process.send(Stop())
            return
        self._process.send(LoadVocab(self._config))
        if self._model is not None:
            self._process.send(self._model)

    def _receive(self, message: FromPrompts) -> None:
        match message:
            case PromptWorkerReady():
                self._chat_template = message.chat_template
                self._has_loaded()
            case Refused(error):
                self._refusal = error.exception()
            case JobDone():
                self._done(message)

    def _has_loaded(self) -> None:
        """Bring a new process to the state of the one before, and send it the jobs."""
        self._is_ready = True
        known = tuple(record for records in self._records.values() for record in records.values())
        first: list[Job] = [*reversed(self._prompts.values()), Restore(known)]
        for job in first:
            # Not waited for: they were answered before.
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._lanes[0].put_back(_Pending(next(self._numbers), job, future, self._lanes[0]))
        if not self._loaded.done():
            self._loaded.set_result(None)
        else:
            self.on_restarted()
        self._send_next()

    def _send_next(self) -> None:
        """Send what may be carried out now: the next jobs of each lane that is free, but a suspect alone."""
        if not self._is_ready or any(each.is_suspect for lane in self._lanes for each in lane.running.values()):
            return
        waiting = [pending for lane in self._lanes for pending in lane.waiting.values()]
        if any(pending.is_suspect for pending in waiting):
            # First the jobs that restore the state of the process before, then one suspect after the other.
            alone = [each for each in waiting if self._is_replayed(each)] + [p for p in waiting if p.is_suspect]
            while alone and not any(lane.running for lane in self._lanes):
                self._send(alone.pop(0))
            return
        for lane in self._lanes:
            while (pending := lane.next()) is not None:
                self._send(pending)

    def _send(self, pending: _Pending) -> None:
        lane = pending.lane
        lane.waiting.pop(pending.number)
        try:
            self._process.send(NumberedJob(pending.number, pending.job))
        except UnicodeEncodeError:
            _fail(pending, invalid_unicode())
            return
        if pending.client is not None:
            lane.turns.take(pending.client)
        lane.running[pending.number] = pending
        loop = asyncio.get_running_loop()
        pending.until = loop.time() + self._timeout
        # Most jobs are done before the accounts of the process need be read.
        pending.timer = loop.call_later(self._timeout / 4, self._watch, pending)

    def _watch(self, pending: _Pending) -> None:
        """Look again when the job has had its time."""
        loop = asyncio.get_running_loop()
        times = process_times(self.pid, loop.time())
        pending.timer = loop.call_at(pending.until, self._end_overdue, pending, times)

    def _end_overdue(self, pending: _Pending, before: ProcessTimes) -> None:
        """End the process, unless it was kept from running: then the job gets that time in addition."""
        now = asyncio.get_running_loop().time()
        # This process may have been stopped, too, such as by `docker pause`.
        lost = max(starved_seconds(before, process_times(self.pid, now)), now - pending.until)
        if lost > _MIN_LOST * self._timeout:
            pending.until = now + lost
            self._watch(pending)
            return
        running = [each for lane in self._lanes for each in lane.running.values()]
        self._overdue = [each for each in running if each.until - now < _ALMOST * self._timeout]
        self._process.kill()

    def _done(self, done: JobDone) -> None:
        self._stats = done.anchors, done.sessions, done.messages
        pending = next((ended for lane in self._lanes if (ended := lane.end(done.number)) is not None), None)
        if pending is None:
            return
        self._n_answered += 1
        if not pending.future.done():
            if done.error is not None:
                pending.future.set_exception(done.error.exception())
            else:
                self._note(pending.job, done.result)
                pending.future.set_result(done.result)
        self._send_next()

    def _note(self, job: Job, result: object) -> None:
        """Keep copies of what must be restored in a new process."""
        match job, result:
            case TokenizePrompt(), _:
                self._prompts[job.submit.request_id] = job
            case _, TextRecords(records):
                for record in records:
                    self._records[record.kind].put(record.digest, record, record.owner)
            case DropSession(), DroppedSession():
                for kept in (self._records["session"], self._records["reply"]):
                    for each in [each for each in kept.values() if result.digest in (each.digest, each.parent)]:
                        kept.drop(each.digest)
            case ClearTexts(), _:
                for kept in self._records.values():
                    kept.clear()

    def _ended(self, end: Exit) -> float | None:
        """Find the job that ended the process; return the seconds until the next start."""
        self._is_ready = False
        running = [pending for lane in self._lanes for pending in lane.running.values()]
        for pending in running:
            pending.lane.end(pending.number)
        if self._process.is_stopping:
            error = UnavailableError("the server is shutting down")
            for pending in running:
                _fail(pending, error)
            self._fail_all(error)
            if not self._loaded.done():
                self._loaded.set_exception(error)
            return None
        refusal, self._refusal = self._refusal, None
        reason = refusal.message if refusal is not None else end.text
        _log.error("prompt_worker.ended", reason=reason, jobs=[type(each.job).__name__ for each in running])
        self._n_failures = 0 if self._n_answered else self._n_failures + 1
        if self._n_failures >= _MAX_TRIES or refusal is not None:
            failed = refusal or UnavailableError(f"the prompt worker does not start: {end.text}", retry_after=1)
            if not self._loaded.done():
                self._loaded.set_exception(failed)
                return None
            self._fail_all(UnavailableError(f"the prompt worker does not start: {failed.message}", retry_after=1))
        self._blame(running, end)
        return min(_PAUSE_S * self._n_failures, _MAX_PAUSE_S)

    def _blame(self, running: list[_Pending], end: Exit) -> None:
        """Fail the job that ended the process, or have the candidates tried one at a time."""
        overdue, self._overdue = self._overdue, []
        is_only_one = len(running) == 1 and end.is_crash and not overdue
        for pending in running:
            pending.n_tries += 1
            if pending in overdue:
                message = f"{activity_of(pending.job)} took more than {self._timeout:g} s (--prompt-timeout)"
                param = "prompt" if isinstance(pending.job, TokenizePrompt) else None
                _fail(pending, InvalidRequestError(message, param=param))
            elif is_only_one or pending.n_tries >= _MAX_TRIES:
                _fail(pending, ServerError(f"{activity_of(pending.job)} ended the prompt worker: {end.text}"))
            elif not pending.future.done():
                pending.is_suspect |= end.is_crash and not overdue
                pending.lane.put_back(pending)
            if pending.future.done() and isinstance(pending.job, TokenizePrompt):
                self._prompts.pop(pending.job.submit.request_id, None)
            elif isinstance(pending.job, Restore):
                for each in self._records.values():
                    each.clear()
        # They are put there again for the next process.
        for pending in [each for each in self._lanes[0].waiting.values() if self._is_replayed(each)]:
            pending.future.cancel()
            self._lanes[0].waiting.pop(pending.number)

    def _is_replayed(self, pending: _Pending) -> bool:
        job = pending.job
        return isinstance(job, Restore) or (
            isinstance(job, TokenizePrompt) and self._prompts.get(job.submit.request_id) is job
        )

    def _fail_all(self, error: LlamaslotError) -> None:
        for lane in self._lanes:
            for pending in list(lane.waiting.values()):
                _fail(pending, error)


def _fail(pending: _Pending, error: LlamaslotError) -> None:
    if not pending.future.done():
        pending.future.set_exception(error)
