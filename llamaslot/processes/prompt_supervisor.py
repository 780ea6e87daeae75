"""The prompt worker in a process of its own: only the prompt on which it crashes or hangs fails.

When the process ends, a new one is started, which gets copies of what was remembered; replies that are being
generated at that time are not remembered. If several jobs were running when it crashed, they are tried again one by
one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import structlog

from llamaslot.base.commands import DropPaths
from llamaslot.base.errors import InvalidRequestError, LlamaslotError, ServerError, UnavailableError
from llamaslot.base.prompt_jobs import ClearTexts, DropSession, Job, NextTurn, PredictedPrompt, Prepare, Remember
from llamaslot.base.stats import AnchorStats, MessageStats, SessionStats
from llamaslot.base.threads import ProcessTimes, process_times, starved_seconds
from llamaslot.processes.messages import (
    FromPrompts,
    JobDone,
    LoadVocab,
    NextPrompt,
    NumberedJob,
    PromptWorkerReady,
    Refused,
    SetModel,
    TextStats,
)
from llamaslot.processes.supervisor import Exit, Supervisor
from llamaslot.prompts.lanes import Lanes, PendingJob, activity_of
from llamaslot.prompts.token_memory import TokenMemory

_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Keeps llama.cpp from creating a context on a GPU, which would take its memory."""
_READY_TIMEOUT_S = 30.0
"""Least time that a process gets to load the vocabulary, to try the chat template and to take over records."""
_PAUSE_S = 1.0
"""Time before the process is started again, for each process in a row that answered no job."""
_MAX_PAUSE_S = 30.0
_MIN_LOST = 0.02
"""Fraction of the time limit. Less time than this without a CPU does not extend a deadline."""
_ALMOST = 0.1
"""Fraction of the time limit: a job with less time left, when another has none, also fails, since it would hang the
next process.
"""
_MAX_TRIES = 3
"""Processes that may end on a job before it fails, whatever ended them."""

_log = structlog.get_logger(__name__)


class PromptSupervisor(Supervisor):
    """Keeps a prompt worker running in `module`. All methods are called on the event loop.

    `config` is sent to each new process. A job that takes more than `timeout` seconds fails.
    """

    def __init__(self, module: str, config: Any, *, timeout: float) -> None:
        super().__init__(module, FromPrompts, _NO_GPU)
        self._config = config
        self._timeout = timeout
        self._model: SetModel | None = None
        self.chat_template = ""
        """Jinja source of the chat template in use."""
        self.stats: TextStats = AnchorStats(), SessionStats(), MessageStats()
        """Counts of what is remembered, and estimated bytes, as of the last job."""
        self.lanes = Lanes()
        self._is_ready = False
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Retrieve the exception: if the engine fails to load, nobody awaits it.
        self._loaded.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._refusal: LlamaslotError | None = None
        self._start_timer: asyncio.TimerHandle | None = None
        """Until a process that was started again must be ready."""
        self._overdue: list[PendingJob] = []
        self._memory = TokenMemory(clock=time.monotonic)
        """A copy of what is remembered, for a new process."""
        self._has_answered = False
        """True if the present process has answered a job."""
        self._n_failures = 0
        """Processes in a row that answered none."""
        self._n_crashed_starts = 0
        """Processes in a row that crashed before they were ready."""
        self.on_restarted: Callable[[], None] = lambda: None
        """Called when another process takes jobs."""

    async def set_model(self, model: SetModel) -> None:
        """Take jobs for a loaded model.

        Raises `LlamaslotError`, also for a chat template that does not end when it is tried.
        """
        for each in model.records:
            self._memory.add(each)
        # Without the records: some may be dropped later.
        self._model = msgspec.structs.replace(model, records=())
        self._send_model(self._model)
        limit = self._start_limit
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
        await self._end_child(seconds)

    def call(self, job: Job) -> asyncio.Future[Any]:
        """Start a job; the future is that of `Lanes.add`, or fails at once if the server is shutting down."""
        if self.is_stopping:
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            future.set_exception(UnavailableError("the server is shutting down"))
            return future
        future = self.lanes.add(job)
        self._send_jobs()
        return future

    def _on_started(self) -> None:
        self._has_answered = False
        if self._loaded.done():
            self._watch_start(asyncio.get_running_loop().time() + self._start_limit)
        self.send(LoadVocab(self._config))
        if self._model is not None:
            self._send_model(self._model)

    def _send_model(self, model: SetModel) -> None:
        self.send(msgspec.structs.replace(model, records=self._memory.records()))

    def _receive(self, message: FromPrompts) -> None:
        match message:
            case PromptWorkerReady():
                self.chat_template, self.stats = message.chat_template, message.stats
                self._on_loaded()
            case Refused(error):
                self._refusal = error.exception()
            case NextPrompt(number):
                self._restart_time(number)
            case JobDone():
                self._job_done(message)

    def _on_loaded(self) -> None:
        """Send the jobs that wait for a process."""
        if self.is_stopping:
            return
        self._stop_start_timer()
        self._is_ready = True
        if not self._loaded.done():
            self._loaded.set_result(None)
        else:
            self.on_restarted()
        self._send_jobs()

    def _send_jobs(self) -> None:
        """Send the jobs that may run now."""
        while self._is_ready and (pending := self.lanes.begin_next()) is not None:
            try:
                self.send(NumberedJob(pending.number, pending.job))
            except UnicodeEncodeError:
                self.lanes.end(pending.number).fail(InvalidRequestError("the text is invalid Unicode"))
                continue
            except MemoryError:
                error = UnavailableError("there is not enough memory for the body; try later", retry_after=1)
                self.lanes.end(pending.number).fail(error)
                continue
            loop = asyncio.get_running_loop()
            pending.until = loop.time() + self._timeout
            # Most jobs end before the CPU times of the process have to be read.
            pending.timer = loop.call_later(self._timeout / 4, self._watch, pending)

    def _restart_time(self, number: int) -> None:
        """Restart the time limit of a running job."""
        pending = self.lanes.jobs[number]
        if pending.timer is not None:
            pending.timer.cancel()
        pending.until = asyncio.get_running_loop().time() + self._timeout
        self._watch(pending)

    def _watch(self, pending: PendingJob) -> None:
        """Schedule the check whether the job has exceeded its time."""
        loop = asyncio.get_running_loop()
        times = process_times(self.pid, loop.time())
        pending.timer = loop.call_at(pending.until, self._end_overdue, pending, times)

    def _end_overdue(self, pending: PendingJob, before: ProcessTimes) -> None:
        """Kill the process; but if it did not get a CPU for some time, extend the job's limit by that time."""
        now = asyncio.get_running_loop().time()
        lost = self._lost_seconds(pending.until, before)
        if lost > _MIN_LOST * self._timeout:
            pending.until = now + lost
            self._watch(pending)
            return
        self._overdue = [each for each in self.lanes.running if each.until - now < _ALMOST * self._timeout]
        self._kill_child()

    def _lost_seconds(self, until: float, before: ProcessTimes) -> float:
        """Return for how many seconds before its deadline, which is now, the process got no CPU."""
        now = asyncio.get_running_loop().time()
        # This process may have been stopped, too, such as by `docker pause`.
        return max(starved_seconds(before, process_times(self.pid, now)), now - until)

    @property
    def _start_limit(self) -> float:
        """Seconds within which a process must be ready."""
        return max(self._timeout, _READY_TIMEOUT_S)

    def _watch_start(self, until: float) -> None:
        """Schedule the check whether a process that was started again has become ready."""
        loop = asyncio.get_running_loop()
        self._start_timer = loop.call_at(until, self._end_start, until, process_times(self.pid, loop.time()))

    def _end_start(self, until: float, before: ProcessTimes) -> None:
        """Kill the process, which is not ready; but if it did not get a CPU for some time, extend its limit."""
        lost = self._lost_seconds(until, before)
        if lost > _MIN_LOST * self._start_limit:
            self._watch_start(asyncio.get_running_loop().time() + lost)
            return
        _log.error("prompt_worker.not_ready", pid=self.pid, seconds=self._start_limit)
        self._kill_child()

    def _stop_start_timer(self) -> None:
        if self._start_timer is not None:
            self._start_timer.cancel()

    def _job_done(self, done: JobDone) -> None:
        self.stats = done.stats
        self._has_answered = True
        pending = self.lanes.end(done.number)
        if pending.timer is not None:
            pending.timer.cancel()
        if done.error is not None:
            pending.fail(done.error.exception())
        else:
            self._note(pending.job, done.result)
            if not pending.future.done():
                pending.future.set_result(done.result)
        self._send_jobs()

    def _note(self, job: Job, result: object) -> None:
        """Keep copies of what another process must know."""
        match job, result:
            case Remember(), tuple(records):
                for record in records:
                    self._memory.add(record)
            case NextTurn(), PredictedPrompt(records=records):
                for record in records:
                    self._memory.add(record)
            case DropSession(), DropPaths():
                self._memory.drop_session(result.session)
            case ClearTexts(), _:
                self._memory.clear()

    def _on_ended(self, end: Exit) -> float | None:
        """Find the job that ended the process; return the seconds until the next start."""
        was_ready, self._is_ready = self._is_ready, False
        self._stop_start_timer()
        running = self.lanes.running
        for pending in running:
            pending.is_running = False
            if pending.timer is not None:
                pending.timer.cancel()
        refusal, self._refusal = self._refusal, None
        if self.is_stopping:
            error = UnavailableError("the server is shutting down")
            self._fail(list(self.lanes.jobs.values()), error)
            if not self._loaded.done():
                self._loaded.set_exception(error)
            return None
        reason = refusal.message if refusal is not None else end.text
        _log.error("prompt_worker.ended", reason=reason, jobs=[type(each.job).__name__ for each in running])
        self._n_failures = 0 if self._has_answered else self._n_failures + 1
        has_crashed = end.is_crash and not was_ready and refusal is None
        self._n_crashed_starts = self._n_crashed_starts + 1 if has_crashed else 0
        if self._n_crashed_starts > 1 and self._memory.records():
            # It may be the records: the next process would crash on them, too.
            _log.error("prompt_worker.texts_dropped", reason="it crashed twice while it took them over")
            self._memory.clear()
        if self._n_failures >= _MAX_TRIES or refusal is not None:
            failed = refusal or UnavailableError(f"the prompt worker does not start: {end.text}", retry_after=1)
            if not self._loaded.done():
                self._loaded.set_exception(failed)
                return None
            waiting = UnavailableError(f"the prompt worker does not start: {failed.message}", retry_after=1)
            self._fail([each for each in self.lanes.jobs.values() if each not in running], waiting)
        self._blame(running, end)
        return min(_PAUSE_S * self._n_failures, _MAX_PAUSE_S)

    def _blame(self, running: list[PendingJob], end: Exit) -> None:
        """Fail the job that ended the process, or have the candidates tried one at a time."""
        overdue, self._overdue = self._overdue, []
        is_only_one = len(running) == 1 and end.is_crash and not overdue
        for pending in running:
            pending.n_tries += 1
            activity = activity_of(pending.job)
            if pending in overdue:
                kinds = ("text", "native", "infill", "ollama_generate")
                has_prompt = isinstance(pending.job, Prepare) and pending.job.kind in kinds
                param = "prompt" if has_prompt else None
                message = f"{activity} took more than {self._timeout:g} s (--prompt-timeout)"
                pending.fail(InvalidRequestError(message, param=param))
            elif is_only_one or pending.n_tries >= _MAX_TRIES:
                pending.fail(ServerError(f"{activity} ended the prompt worker: {end.text}"))
            else:
                pending.is_suspect |= end.is_crash and not overdue
            if pending.future.done():
                del self.lanes.jobs[pending.number]

    def _fail(self, jobs: Sequence[PendingJob], error: LlamaslotError) -> None:
        """Fail jobs of which none is running."""
        for pending in jobs:
            pending.fail(error)
            del self.lanes.jobs[pending.number]
