"""Runtime: the engine and its prompt worker, in this process or each in one of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec

from llamaslot.app.cache.cache_budgets import restart_flags
from llamaslot.app.config import Config
from llamaslot.base.backend import Backend
from llamaslot.base.errors import ConfigError, LlamaslotError
from llamaslot.processes.engine_supervisor import EngineSupervisor
from llamaslot.processes.messages import Loaded, SetModel
from llamaslot.processes.prompt_supervisor import PromptSupervisor
from llamaslot.prompts.prompt_jobs import Restore
from llamaslot.prompts.prompt_worker import LocalPrompts, PromptQueue

if TYPE_CHECKING:
    from llamaslot.engine.engine import Engine
    from llamaslot.service.service import Service

_ENGINE_MAIN = "llamaslot.app.runtime.engine_main"
_PROMPT_MAIN = "llamaslot.app.runtime.prompt_main"
_END_TIMEOUT_S = 20.0
"""Time that an engine's process may take to end: 5 s each to flush the disk, to end threads, to close the disk."""
_PROMPT_TIMEOUT_S = 2.0
"""Time that the prompt worker may take to end."""

OnProgress: TypeAlias = Callable[[str, float], None]
"""Gets what is being done and the fraction done."""


class Runtime(Protocol):
    """Call `start`, `load`, `connect` and `stop` in this order, the last one in any case."""

    @property
    def prompts(self) -> PromptQueue:
        """The prompt worker, once the model is loaded."""

    async def start(self) -> None:
        """Start the processes, if there are any; raises `OSError`."""

    async def load(self) -> Loaded | None:
        """Load the model; None if that was interrupted. Raises `ConfigError`."""

    def connect(self, service: Service) -> None:
        """Run the engine for a service, and count restarts."""

    def interrupt(self) -> None:
        """Have `load` stop as soon as possible."""

    def kill(self) -> None:
        """End child processes at once."""

    async def stop(self) -> str:
        """End all in order; return why that is not possible, or an empty text."""


class InProcessRuntime:
    """Everything in this process. `template` is what `read_template` returns, here and below."""

    def __init__(
        self, config: Config, template: tuple[str, str], on_progress: OnProgress, backend: Backend | None
    ) -> None:
        # Not imported at the top: the parent of child processes does not need llama.cpp.
        from llamaslot.app.runtime.engine_host import EngineHost  # noqa: PLC0415

        self._config = config
        self._template = template
        self._on_progress = on_progress
        self._given = backend
        self._is_interrupted = False
        self._host = EngineHost(config)
        self._prompts: LocalPrompts | None = None
        self._engine: Engine | None = None
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """There is nothing to start before `load`."""

    async def load(self) -> Loaded | None:
        """Load the model."""
        from llamaslot.app.runtime.prompt_config import prompt_worker  # noqa: PLC0415

        def on_progress(text: str, fraction: float) -> bool:
            self._on_progress(text, fraction)
            return not self._is_interrupted

        await self._host.lock()
        loaded = await self._host.load(on_progress, self._given)
        if loaded is not None:
            model = SetModel(loaded.info, *self._template)
            self._prompts = LocalPrompts(prompt_worker(self._config, self._host.backend.vocab, model))
            self._prompts.call(Restore(loaded.records))
            self._prompts.threads.start()
        return loaded

    @property
    def prompts(self) -> LocalPrompts:
        """The prompt worker, once the model is loaded."""
        assert self._prompts is not None
        return self._prompts

    def connect(self, service: Service) -> None:
        """Run the engine for a service, and count restarts."""
        self._engine = self._host.start(service.receive)
        service.connect(self._engine.send)
        self._running = asyncio.create_task(self._engine.run(), name="engine")

    def interrupt(self) -> None:
        """Have `load` stop as soon as possible."""
        self._is_interrupted = True

    def kill(self) -> None:
        """There are no child processes."""

    async def stop(self) -> str:
        """End all in order."""
        if self._engine is not None and self._running is not None:
            self._engine.stop()
            await self._running
        if self._prompts is not None:
            # Its threads must not outlive the vocabulary.
            ends = map(asyncio.wrap_future, self._prompts.close())
            _, pending = await asyncio.wait(ends, timeout=_PROMPT_TIMEOUT_S)
            if pending:
                return "a prompt is still being tokenized"
        return await self._host.close()


class MultiProcessRuntime:
    """The engine and the prompt worker each in a process of its own, started again when it ends."""

    def __init__(self, config: Config, template: tuple[str, str], on_progress: OnProgress) -> None:
        self._template = template
        self._config = msgspec.to_builtins(config)
        self.prompts = PromptSupervisor(_PROMPT_MAIN, self._config, timeout=config.prompt_timeout)
        self._is_interrupted = False
        self.engine = EngineSupervisor(_ENGINE_MAIN, self._config, on_progress)

    @property
    def _why_stopped(self) -> str:
        """Why no request is carried out though no process has ended; empty if they are."""
        for process, name in ((self.engine, "engine"), (self.prompts, "prompt worker")):
            if process.is_stopped:
                return f"the {name} is stopped, by a signal or a debugger"
        return ""

    async def start(self) -> None:
        """Start both processes, which begin to load."""
        await self.engine.start()
        await self.prompts.start()

    async def load(self) -> Loaded | None:
        """Wait until the model and its vocabulary are loaded."""
        loaded = await self.engine.loaded()
        if loaded is None:
            return None
        # The sizes of the pool and of checkpoints must not depend on what memory is free when it is started again.
        self.engine.config = {**self._config, **restart_flags(loaded.info)}
        try:
            await self.prompts.set_model(SetModel(loaded.info, *self._template), loaded.records)
        except LlamaslotError as error:
            if self._is_interrupted:
                return None
            raise ConfigError(error.message, param=error.param) from None
        return loaded

    def connect(self, service: Service) -> None:
        """Run the engine for a service, and count restarts."""

        def on_restarted() -> None:
            service.metrics.record_restart("engine")
            service.engine_restarted()

        service.connect(self.engine.send, lambda: self._why_stopped)
        self.engine.listen(service.receive, service.engine_lost, on_restarted)
        self.prompts.on_restarted = lambda: service.metrics.record_restart("prompt_worker")

    def interrupt(self) -> None:
        """Have `load` stop as soon as possible."""
        self._is_interrupted = True
        self.engine.interrupt()
        self.prompts.interrupt()

    def kill(self) -> None:
        """End the child processes at once."""
        self.engine.kill()
        self.prompts.kill()

    async def stop(self) -> str:
        """End all in order."""
        reason = await self.engine.stop(_END_TIMEOUT_S)
        await self.prompts.stop(_PROMPT_TIMEOUT_S)
        return reason
