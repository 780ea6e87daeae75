"""The prompt worker in a process of its own: only the prompt on which it crashes or hangs fails.

When the process ends, a new one is started, and first gets copies of what was remembered; replies that are being
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

from llamaslot.base.commands import DropSession, Needs, Prepare
from llamaslot.base.errors import InvalidRequestError, LlamaslotError, ServerError, UnavailableError
from llamaslot.base.stats import AnchorStats, ReplyStats, SessionStats
from llamaslot.base.text_records import TextRecord
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
    Stop,
)
from llamaslot.processes.supervisor import Exit, Supervisor
from llamaslot.prompts.prompt_jobs import (
    ClearTexts,
    DroppedSession,
    Job,
    Release,
    Restore,
    TextRecords,
    activity_of,
)
from llamaslot.prompts.prompt_worker import PendingJob, PromptQueue, invalid_unicode
from llamaslot.prompts.token_memory import TokenMemory

_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Keeps llama.cpp from creating a context on a GPU, which would take its memory."""
_READY_TIMEOUT_S = 30.0
"""Least time that the first process gets to load the vocabulary and to try the chat template."""
_PAUSE_S = 1.0
"""Time before the process is started again, for each process in a row that did not carry out a single job."""
_MAX_PAUSE_S = 30.0
_MIN_LOST = 0.02
"""Fraction of the time limit. Less time than this without a CPU does not extend a job's deadline."""
_ALMOST = 0.1
"""Fraction of the time limit: a job with less time left, when another has none, also fails, since it would hang the
next process.
"""
_MAX_TRIES = 3
"""Processes that may end on a job before it fails, whatever ended them."""

_log = structlog.get_logger(__name__)


class PromptSupervisor(PromptQueue):
    """Keeps a prompt worker running in `module`. All methods are called on the event loop.

    `config` is sent to each new process. A job that takes more than `timeout` seconds fails.
    """

    def __init__(self, module: str, config: Any, *, timeout: float) -> None:
        super().__init__()
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
        # Retrieve the exception: if the engine fails to load, nobody awaits it.
        self._loaded.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._refusal: LlamaslotError | None = None
        self._overdue: list[PendingJob] = []
        self._has_body: set[str] = set()
        """Requests whose bodies the present process has, since it answered `Needs`."""
        self._memory = TokenMemory(clock=time.monotonic)
        """A copy of what is remembered, to be restored in a new process."""
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
            self._memory.add(each)
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
        """Start a job, unless the server is shutting down."""
        if self._process.is_stopping:
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            future.set_exception(UnavailableError("the server is shutting down"))
            return future
        return super().call(job)

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
            case NextPrompt(number):
                self._restart_time(number)
            case JobDone():
                self._job_done(message)

    def _has_loaded(self) -> None:
        """Send the remembered records to a new process, then the jobs."""
        if self._process.is_stopping:
            return
        if records := self._memory.records():
            restoring = self.call(Restore(records))
            restoring.add_done_callback(lambda done: done.cancelled() or done.exception())
            # Before the jobs that wait.
            waiting = self.lanes[0].waiting
            waiting.move_to_end(next(reversed(waiting)), last=False)
        self._is_ready = True
        if not self._loaded.done():
            self._loaded.set_result(None)
        else:
            self.on_restarted()
        self._run_next()

    def _run_next(self) -> None:
        """Send the jobs that may run now; a suspect runs alone, after the records are restored."""
        running = [pending for lane in self.lanes for pending in lane.running.values()]
        if not self._is_ready or any(each.is_suspect for each in running):
            return
        waiting = [pending for lane in self.lanes for pending in lane.waiting.values()]
        alone = [each for each in waiting if each.is_suspect]
        if not alone:
            super()._run_next()
        elif not running:
            pending = next((each for each in waiting if isinstance(each.job, Restore)), alone[0])
            pending.lane.begin(pending)
            self._run(pending)

    def _run(self, pending: PendingJob) -> None:
        job = pending.job
        if isinstance(job, Prepare) and job.context.request_id in self._has_body:
            self._has_body.remove(job.context.request_id)
            job = msgspec.structs.replace(job, body=b"")
        elif isinstance(job, Release):
            self._has_body.discard(job.request_id)
        try:
            self._process.send(NumberedJob(pending.number, pending.lane.number, job))
        except UnicodeEncodeError:
            del pending.lane.running[pending.number]
            pending.fail(invalid_unicode())
            return
        pending.until = asyncio.get_running_loop().time() + self._timeout
        # Most jobs end before the CPU times of the process have to be read.
        pending.timer = asyncio.get_running_loop().call_later(self._timeout / 4, self._watch, pending)

    def _restart_time(self, number: int) -> None:
        """Restart the time limit of a running job."""
        for lane in self.lanes:
            if (pending := lane.running.get(number)) is not None and pending.timer is not None:
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
        # This process may have been stopped, too, such as by `docker pause`.
        lost = max(starved_seconds(before, process_times(self.pid, now)), now - pending.until)
        if lost > _MIN_LOST * self._timeout:
            pending.until = now + lost
            self._watch(pending)
            return
        running = [each for lane in self.lanes for each in lane.running.values()]
        self._overdue = [each for each in running if each.until - now < _ALMOST * self._timeout]
        self._process.kill()

    def _job_done(self, done: JobDone) -> None:
        self._stats = done.anchors, done.sessions, done.messages
        self._n_answered += 1
        job = self._done(done.number, done.result, done.error.exception() if done.error is not None else None)
        if job is not None and done.error is None:
            self._note(job, done.result)
        self._run_next()

    def _note(self, job: Job, result: object) -> None:
        """Keep copies of what must be restored in a new process."""
        match job, result:
            case Prepare(context=context), Needs():
                self._has_body.add(context.request_id)
            case _, TextRecords(records):
                for record in records:
                    self._memory.add(record)
            case DropSession(), DroppedSession():
                self._memory.drop_session(result.digest)
            case ClearTexts(), _:
                self._memory.clear()

    def _ended(self, end: Exit) -> float | None:
        """Find the job that ended the process; return the seconds until the next start."""
        self._is_ready = False
        self._has_body.clear()
        running = [pending for lane in self.lanes for pending in lane.running.values()]
        for pending in running:
            del pending.lane.running[pending.number]
            if pending.timer is not None:
                pending.timer.cancel()
        if self._process.is_stopping:
            error = UnavailableError("the server is shutting down")
            for pending in running:
                pending.fail(error)
            self._fail_waiting(error)
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
            error = UnavailableError(f"the prompt worker does not start: {failed.message}", retry_after=1)
            self._fail_waiting(error)
        self._blame(running, end)
        return min(_PAUSE_S * self._n_failures, _MAX_PAUSE_S)

    def _blame(self, running: list[PendingJob], end: Exit) -> None:
        """Fail the job that ended the process, or have the candidates tried one at a time."""
        overdue, self._overdue = self._overdue, []
        is_only_one = len(running) == 1 and end.is_crash and not overdue
        for pending in running:
            pending.n_tries += 1
            activity = activity_of(pending.job)
            if isinstance(pending.job, Restore):
                # The next process would crash on the same records.
                pending.future.cancel()
                self._memory.clear()
            elif pending in overdue:
                has_prompt = isinstance(pending.job, Prepare) and pending.job.kind in ("text", "native", "infill")
                param = "prompt" if has_prompt else None
                message = f"{activity} took more than {self._timeout:g} s (--prompt-timeout)"
                pending.fail(InvalidRequestError(message, param=param))
            elif is_only_one or pending.n_tries >= _MAX_TRIES:
                pending.fail(ServerError(f"{activity} ended the prompt worker: {end.text}"))
            elif not pending.future.done():
                pending.is_suspect |= end.is_crash and not overdue
                pending.lane.put_back(pending)
        for pending in [each for each in self.lanes[0].waiting.values() if isinstance(each.job, Restore)]:
            # The next process gets one of its own.
            pending.future.cancel()
            del self.lanes[0].waiting[pending.number]

    def _fail_waiting(self, error: LlamaslotError) -> None:
        for lane in self.lanes:
            for pending in list(lane.waiting.values()):
                pending.fail(error)
