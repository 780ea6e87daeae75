"""The child processes of a model: started, loaded, connected to a service, ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from llamaslot.app.cache_budgets import restart_flags
from llamaslot.app.config import Config
from llamaslot.base.errors import ConfigError, LlamaslotError
from llamaslot.processes.engine_supervisor import EngineSupervisor
from llamaslot.processes.messages import Loaded, SetModel
from llamaslot.processes.prompt_supervisor import PromptSupervisor

if TYPE_CHECKING:
    from llamaslot.api.context import ApiSettings
    from llamaslot.service.service import Service

_ENGINE_MAIN = "llamaslot.app.runtime.engine_main"
_PROMPT_MAIN = "llamaslot.app.runtime.prompt_main"
_END_TIMEOUT_S = 20.0
"""Time that an engine's process may take to end: 5 s each to flush the disk, to end threads, to close the disk."""
_PROMPT_TIMEOUT_S = 2.0
"""Time that the prompt worker may take to end."""

OnProgress: TypeAlias = Callable[[str, float], None]
"""Gets what is being done and the fraction done."""


class Runtime:
    """Start `engine` and `prompts`, then call `load`, `connect` and `stop` in this order, the last one in any case.

    `template` is what `read_template` returns. With `memory_bytes`, as in `LoadEngine`, an engine that ends while
    the model is unloaded is not started again.
    """

    def __init__(
        self, config: Config, template: tuple[str, str], on_progress: OnProgress, *, memory_bytes: int = 0
    ) -> None:
        self._template = template
        self._max_queue = config.max_queue
        self._config = msgspec.to_builtins(config)
        self.prompts = PromptSupervisor(_PROMPT_MAIN, self._config, timeout=config.prompt_timeout)
        self._is_interrupted = False
        self._is_one_of_several = memory_bytes > 0
        self.engine = EngineSupervisor(_ENGINE_MAIN, self._config, on_progress, memory_bytes=memory_bytes)

    async def load(self, settings: ApiSettings) -> Loaded | None:
        """Wait until model and vocabulary are loaded; None if that was interrupted. Raises `ConfigError`."""
        loaded = await self.engine.loaded()
        if loaded is None:
            return None
        # The sizes of the pool and of checkpoints must not depend on what memory is free when it is started again.
        self.engine.config = {**self._config, **restart_flags(loaded.info)}
        try:
            of_requests = settings.request_policy(loaded.info, self._max_queue)
            await self.prompts.set_model(SetModel(loaded.info, *self._template, of_requests, loaded.records))
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

        service.connect(self.engine.send, self._why_stopped)
        self.engine.listen(
            service.receive,
            service.engine_lost,
            on_restarted,
            # Loaded for nobody, it would take the memory of others.
            is_wanted=lambda: service.is_loaded or not self._is_one_of_several,
        )
        self.prompts.on_restarted = lambda: service.metrics.record_restart("prompt_worker")

    def interrupt(self) -> None:
        """Have `load` stop as soon as possible."""
        self._is_interrupted = True
        self.engine.interrupt()
        self.prompts.kill()

    def kill(self) -> None:
        """End the child processes at once."""
        self.engine.kill()
        self.prompts.kill()

    async def stop(self) -> str:
        """End all in order; return why that is not possible, or an empty text."""
        reason = await self.engine.stop(_END_TIMEOUT_S)
        await self.prompts.stop(_PROMPT_TIMEOUT_S)
        return reason

    def _why_stopped(self) -> str:
        """Return why no request is carried out though no process has ended; empty if they are."""
        for process, name in ((self.engine, "engine"), (self.prompts, "prompt worker")):
            if process.is_suspended:
                return f"the {name} is stopped, by a signal or a debugger"
        return ""
