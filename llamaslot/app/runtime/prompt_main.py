"""The prompt worker's process, started by `processes/prompt_supervisor.py` with the number of its socket.

It has the vocabulary only. It ends with its parent, whose end closes the socket.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import NoReturn

import uvloop

from llamaslot.app.config import Config
from llamaslot.app.runtime.child_setup import channel_to_parent, configured, socket_of
from llamaslot.app.runtime.prompt_config import prompt_worker
from llamaslot.backend.llama import LlamaVocab
from llamaslot.backend.llama.constraint_tokenizer import token_texts
from llamaslot.backend.memory import trim_heap
from llamaslot.base.errors import LlamaslotError
from llamaslot.processes.channel import Channel
from llamaslot.processes.messages import (
    JobDone,
    LoadVocab,
    NextPrompt,
    NumberedJob,
    PromptWorkerReady,
    Refused,
    SetModel,
    Stop,
    ToPrompts,
)
from llamaslot.processes.threads import start_default_executor
from llamaslot.processes.trial_process import TrialProcess
from llamaslot.prompts.prompt_jobs import JobResult
from llamaslot.prompts.prompt_worker import PromptThreads, invalid_unicode


class PromptMain:
    """Carries out the parent's jobs."""

    def __init__(self) -> None:
        self._channel: Channel[ToPrompts] = channel_to_parent(ToPrompts, self._receive)
        self._config: Config
        self._vocab: LlamaVocab
        self._worker: PromptThreads

    async def run(self, fd: int) -> None:
        """Serve the parent until it says stop, or ends."""
        await self._channel.connect(socket_of(fd))
        await asyncio.Event().wait()

    def _receive(self, message: ToPrompts) -> None:
        match message:
            case LoadVocab():
                self._load(message)
            case SetModel():
                self._use(message)
            case NumberedJob():
                self._start(message)
            case Stop():
                # Nothing here has to be saved, and a thread may hang.
                os._exit(0)

    def _load(self, message: LoadVocab) -> None:
        self._config = configured(message.config)
        try:
            self._vocab = LlamaVocab.load(Path(self._config.model))
        except LlamaslotError as error:
            self._refuse(error)

    def _refuse(self, error: LlamaslotError) -> NoReturn:
        self._channel.send(Refused(error.info()))
        # A small message is sent at once.
        os._exit(1)

    def _use(self, message: SetModel) -> None:
        try:
            trials = TrialProcess(lambda: (token_texts(self._vocab), sorted(self._vocab.eog)))
            self._worker = prompt_worker(self._config, self._vocab, message, trials)
        except LlamaslotError as error:
            self._refuse(error)
        self._worker.start()
        trim_heap()
        gc.freeze()
        self._channel.send(PromptWorkerReady(self._worker.chat_template))

    def _start(self, numbered: NumberedJob) -> None:
        loop, number = asyncio.get_running_loop(), numbered.number

        def on_prompt() -> None:
            loop.call_soon_threadsafe(self._channel.send, NextPrompt(number))

        future = self._worker.carry_out(numbered.job, numbered.lane, on_prompt)
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(self._answer, number, done))

    def _answer(self, number: int, future: Future[JobResult]) -> None:
        anchors, sessions, messages = self._worker.stats
        error = future.exception()
        if error is None:
            done = JobDone(number, future.result(), anchors=anchors, sessions=sessions, messages=messages)
            try:
                self._channel.send(done)
            except UnicodeEncodeError:
                error = invalid_unicode()
            else:
                return
        assert isinstance(error, LlamaslotError)
        self._channel.send(
            JobDone(number, error=error.info(), anchors=anchors, sessions=sessions, messages=messages)
        )


def main() -> None:
    """Run until the parent ends."""

    async def run() -> None:
        start_default_executor()
        await PromptMain().run(int(sys.argv[1]))

    uvloop.run(run())


if __name__ == "__main__":
    main()
