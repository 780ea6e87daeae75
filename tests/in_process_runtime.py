"""Runtime of a server with engine and prompt worker in its own process, and a given backend or its model."""

from __future__ import annotations

import asyncio

from llamaslot.api.context import ApiSettings
from llamaslot.app.config import Config
from llamaslot.app.runtime.children import OnProgress
from llamaslot.app.runtime.engine_host import EngineHost
from llamaslot.app.runtime.engine_host import OnProgress as EngineProgress
from llamaslot.app.runtime.prompt_main import prompt_worker
from llamaslot.base.backend import Backend
from llamaslot.engine.engine import Engine
from llamaslot.processes.messages import Loaded, SetModel
from llamaslot.service.service import Service
from tests.fake_backend import byte_trial
from tests.prompt_threads import LocalPrompts


class HostOfBackend(EngineHost):
    """An engine host that is given its backend."""

    def __init__(self, config: Config, backend: Backend) -> None:
        super().__init__(config)
        self._given = backend

    async def _loaded_backend(self, on_progress: EngineProgress) -> Backend:
        return self._given


class NoProcess:
    """Takes the place of a supervisor until the model is loaded."""

    async def start(self) -> None:
        """There is no process."""


class InProcessRuntime:
    """Takes the place of `llamaslot.app.runtime.children.Runtime` where `composition` uses it."""

    def __init__(
        self, config: Config, template: tuple[str, str], on_progress: OnProgress, backend: Backend | None
    ) -> None:
        self._config = config
        self._template = template
        self._on_progress = on_progress
        self._is_interrupted = False
        self._host = EngineHost(config) if backend is None else HostOfBackend(config, backend)
        self.engine = NoProcess()
        self.prompts: LocalPrompts | NoProcess = NoProcess()
        self._engine: Engine | None = None
        self._running: asyncio.Task[None] | None = None

    async def load(self, settings: ApiSettings) -> Loaded | None:
        def on_progress(text: str, fraction: float) -> bool:
            self._on_progress(text, fraction)
            return not self._is_interrupted

        await self._host.lock()
        loaded = await self._host.load(on_progress)
        if loaded is not None:
            of_requests = settings.request_policy(loaded.info, self._config.max_queue)
            model = SetModel(loaded.info, *self._template, of_requests, loaded.records)
            trial = byte_trial(loaded.info.control_tokens, loaded.info.n_vocab)
            worker = prompt_worker(self._config, self._host.backend.vocab, model, trial)
            self.prompts = LocalPrompts(worker)
            worker.start()
        return loaded

    def connect(self, service: Service) -> None:
        self._engine = self._host.start(service.receive)
        service.connect(self._engine.send)
        self._running = asyncio.create_task(self._engine.run(), name="engine")

    def interrupt(self) -> None:
        self._is_interrupted = True

    def kill(self) -> None:
        """There are no child processes."""

    async def stop(self) -> str:
        if self._engine is not None and self._running is not None:
            self._engine.stop()
            await self._running
        if isinstance(self.prompts, LocalPrompts):
            # Its threads must not outlive the vocabulary.
            _, pending = await asyncio.wait([asyncio.wrap_future(self.prompts.close())], timeout=2.0)
            if pending:
                return "a prompt is still being tokenized"
        return await self._host.close()
