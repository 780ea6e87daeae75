"""The prompt worker's process, started by `processes/prompt_supervisor.py` with the number of its socket.

It has the vocabulary only. It ends with its parent, whose end closes the socket.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    # Imports leave little garbage, and looking for it is a seventh of their time. On again once all is loaded.
    gc.disable()

import asyncio
import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import NoReturn

import msgspec
import uvloop

from llamaslot.app.config import Config
from llamaslot.app.logs import configure_logging, get_logger
from llamaslot.app.model_config import metadata_overrides
from llamaslot.backend.host import trim_heap
from llamaslot.backend.llama import LlamaVocab
from llamaslot.backend.llama.vocab import token_texts
from llamaslot.base.backend import Vocab
from llamaslot.base.errors import ConfigError, InvalidRequestError, LlamaslotError
from llamaslot.base.files import read_named_text
from llamaslot.base.prompt_jobs import JobResult
from llamaslot.processes.channel import Channel, channel_to_parent, socket_of
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
from llamaslot.prompts.prompt_worker import PromptWorker
from llamaslot.prompts.tokenizer import Tokenizer
from llamaslot.protocol.replies.restoring import ReplyRestorer
from llamaslot.protocol.request_reader import RequestReader
from llamaslot.text.builtin_templates import resolve
from llamaslot.text.conversation import volatile_pattern
from llamaslot.text.grammars.compiling import Trial
from llamaslot.text.template import ChatTemplate

_FALLBACK_TEMPLATE = "chatml"

_log = get_logger(__name__)


def prompt_worker(config: Config, vocab: Vocab, model: SetModel, trial: Trial) -> PromptWorker:
    """Return the prompt worker for a loaded model.

    Raises `ConfigError` for an unusable template.
    """
    info = model.info
    template = _chat_template(config, model)
    tokenizer = Tokenizer(
        vocab,
        info.n_ctx_slot,
        # EOS after every prompt would also follow the text before a cut point.
        use_anchors=config.text_anchors and info.can_reuse and not info.adds_eos and not info.pooling,
        min_match=config.session_min_match,
        template=info.chat_template,
        is_whole=info.embeds_whole,
        clock=time.monotonic,
    )
    tokenizer.add_records(model.records)
    # Prompts of models that reuse nothing gain nothing by it.
    restores = config.restore_messages and info.can_reuse and not info.adds_eos and not info.pooling
    restorer = ReplyRestorer(tokenizer.memory, vocab) if restores else None
    try:
        reader = RequestReader(
            info,
            template,
            tokenizer,
            model.settings,
            trial,
            named_tokens=vocab.named_tokens,
            grammars=[(file, read_named_text(Path(file), "--grammar-file")) for file in config.grammar_file],
            tags=vocab.added_tags,
            restorer=restorer,
        )
    except InvalidRequestError as error:
        raise ConfigError(f"--grammar-file: {error.message}", param="--grammar-file") from None
    return PromptWorker(tokenizer, reader, shows_text=config.cache_debug_text, predicts=config.n_warm_ahead > 0)


def _chat_template(config: Config, model: SetModel) -> ChatTemplate:
    """Return the template to render conversations by: the configured one, the model's own, or ChatML."""
    info, source, flag = model.info, model.template, model.template_flag
    if not config.jinja and not source:
        source, flag = resolve(info.builtin_template), "--no-jinja"
    source = source or info.chat_template
    if not source:
        if not info.pooling:
            _log.warning("template.missing", fallback=_FALLBACK_TEMPLATE)
        source = resolve(_FALLBACK_TEMPLATE)
    try:
        return ChatTemplate(
            source,
            bos_token=info.bos_token,
            eos_token=info.eos_token,
            adds_bos=info.adds_bos,
            adds_eos=info.adds_eos,
            control_tokens=info.control_tokens,
            mark_control_tokens=config.escape_special,
            volatile=volatile_pattern(config.drop_volatile),
        )
    except ConfigError as error:
        origin = flag or "the model's own template (--chat-template takes another)"
        raise ConfigError(f"{origin}: {error.message}", param="--chat-template") from None


class PromptMain:
    """Carries out the parent's jobs."""

    def __init__(self) -> None:
        self._channel: Channel[ToPrompts] = channel_to_parent(ToPrompts, self._receive)
        self._config: Config
        self._vocab: LlamaVocab
        self._worker: PromptWorker

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
        self._config = msgspec.convert(message.config, Config)
        configure_logging(self._config.log_format, self._config.lowest_log_level)
        try:
            overrides = tuple(metadata_overrides(self._config).items())
            self._vocab = LlamaVocab.load(Path(self._config.model), overrides)
        except LlamaslotError as error:
            self._refuse(error)

    def _refuse(self, error: LlamaslotError) -> NoReturn:
        self._channel.send(Refused(error.info()))
        # A small message is sent at once.
        os._exit(1)

    def _use(self, message: SetModel) -> None:
        try:
            trial = TrialProcess(lambda: (token_texts(self._vocab), sorted(self._vocab.eog)))
            self._worker = prompt_worker(self._config, self._vocab, message, trial)
        except LlamaslotError as error:
            self._refuse(error)
        self._worker.start()
        trim_heap()
        gc.freeze()
        gc.enable()
        self._channel.send(PromptWorkerReady(self._worker.chat_template, self._worker.stats))

    def _start(self, numbered: NumberedJob) -> None:
        loop, number = asyncio.get_running_loop(), numbered.number

        def on_prompt() -> None:
            loop.call_soon_threadsafe(self._channel.send, NextPrompt(number))

        future = self._worker.carry_out(numbered.job, on_prompt)
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(self._answer, number, done))

    def _answer(self, number: int, future: Future[JobResult]) -> None:
        stats, error = self._worker.stats, future.exception()
        if error is None:
            try:
                self._channel.send(JobDone(number, future.result(), stats=stats))
            except UnicodeEncodeError:
                error = InvalidRequestError("the text is invalid Unicode")
            else:
                return
        assert isinstance(error, LlamaslotError)
        self._channel.send(JobDone(number, error=error.info(), stats=stats))


def main() -> None:
    """Run until the parent ends."""

    async def run() -> None:
        start_default_executor()
        await PromptMain().run(int(sys.argv[1]))

    uvloop.run(run())


if __name__ == "__main__":
    main()
