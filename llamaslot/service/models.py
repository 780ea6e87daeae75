"""The models of a server: which of them are loaded, and which make room for others.

    state       event                                             next state
    UNLOADED    a request wants it, and there is room             LOADING
    LOADING     it is loaded                                      LOADED
    LOADING     that fails                                        UNLOADED; what waits fails with the reason
    LOADED      a request wants it, and its engine has ended      LOADING
    LOADED      another one needs its room, an administrator      LEAVING: new requests wait
                unloads it, or it was idle for `idle_seconds`
    LEAVING     nothing uses it any more                          UNLOADED
    LEAVING     the other one needs no room any more, or the      LOADED
                engine is busy with it
    UNLOADED    its engine was restarted, with it (`is_one`)      LOADED

Models are loaded one after another, in the order in which they were wanted. The one that has been unused for
longest makes room first; a pinned one never does. An unloaded model may keep its processes, with its radix tree
and what is in RAM: then it continues where it was. At most `max_kept` models have processes; those of others end,
and what they have in RAM goes to disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol, TypeAlias

import structlog

from llamaslot.base.errors import (
    InvalidRequestError,
    LlamaslotError,
    NotFoundError,
    QueueFullError,
    ServerError,
    UnavailableError,
    stopped_error,
)
from llamaslot.base.model import ModelInfo
from llamaslot.service.service import Service

_log = structlog.get_logger(__name__)

_UNLOAD_TIMEOUT_S = 120.0
"""Time that an engine gets to move its pool to RAM and to free the model; then it is ended."""
_RETRY_S = 1.0
"""Time after a failed load in which it is not tried again, or as long as that took: requests get the same error."""
_IDLE_POLL_S = 0.25
"""Time between two looks for models that nobody uses."""
KEPT_BYTES = 320 * 2**20
"""About what the processes of an unloaded model take, without what they keep in RAM (`--cache-ram`)."""
_GROWTH = 1.15
"""Memory of a model once it is used, as a multiple of that when it was loaded: buffers are touched later."""

ModelTask: TypeAlias = Literal["completion", "embedding", "rerank"]


class Processes(Protocol):
    """The engine and the prompt worker of one model, from `load` to `stop`."""

    @property
    def has_ended(self) -> bool:
        """True if the engine has ended and is not started again."""

    @property
    def n_bytes(self) -> int:
        """Memory that they take, with that of devices."""

    async def load(self) -> Service:
        """Start them, load the model, and return its service. Raises `LlamaslotError`."""

    async def stop(self) -> str:
        """End them, as far as they run; return why that is not possible, or an empty text."""


class ModelState(Enum):
    """State of a model (see the table above)."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "leaving"


@dataclass(eq=False, slots=True)
class ServedModel:
    """One model of the server. Only `Models` changes it."""

    names: Sequence[str]
    """Its names; the first one is its id."""
    launch: Callable[[], Processes] | None = None
    """Return processes for it; None for the only model of a server, which is loaded from the start."""
    n_bytes: int = 0
    """Bytes that it takes while it is loaded: estimated at first, then as measured."""
    file_bytes: int = 0
    """Bytes of its files; 0 if they are not known."""
    idle_seconds: float = 0
    """Unload it after so many seconds without a request; 0: never."""
    tags: Sequence[str] = ()
    task_by_flags: ModelTask = "completion"
    """Its task, by its flags."""
    has_projector: bool = False
    """True if it has a projector, by its flags."""
    adapter_scales: Sequence[float] = ()
    """Of its last service, for the next one."""
    is_pinned: bool = False
    loads_at_start: bool = False
    """True if it is loaded at the start, as each pinned one is."""
    info: ModelInfo | None = None
    """As of when it was last loaded."""
    state: ModelState = ModelState.UNLOADED
    processes: Processes | None = None
    service: Service | None = None
    """Since the model was loaded in these processes."""
    n_uses: int = 0
    """Requests that use it."""
    n_waiting: int = 0
    """Requests that wait until it is loaded."""
    used_at: float = 0.0
    was_idle: bool = False
    """True if it was unloaded because nobody used it."""
    failure: ServerError | UnavailableError | None = None
    """Why it could not be loaded when that was last tried."""
    retry_at: float = 0.0
    """Time at which that is tried again."""
    loading: asyncio.Future[None] | None = field(default=None, repr=False)
    """Done when a load has ended; requests for it wait for that."""

    @property
    def id(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def task(self) -> ModelTask:
        """Its task; until it was loaded, by its flags alone: its file may say that it is a reranker."""
        if self.info is None:
            return self.task_by_flags
        return "rerank" if self.info.pooling == "rank" else "embedding" if self.info.pooling else "completion"

    @property
    def takes_images(self) -> bool:
        """True if prompts may have images; until it was loaded, by its flags: one that was found may be useless."""
        return self.has_projector if self.info is None else self.info.projector is not None

    @property
    def is_running(self) -> bool:
        """True if its engine runs, or is started again."""
        return self.service is not None and not (self.processes is not None and self.processes.has_ended)

    @property
    def is_ready(self) -> bool:
        """True if it takes requests."""
        is_loaded = self.service is not None and self.service.is_loaded
        return self.state is ModelState.LOADED and self.is_running and is_loaded

    @property
    def status(self) -> Literal["unloaded", "loading", "loaded", "sleeping"]:
        """Its state in llama-server's words."""
        match self.state:
            case ModelState.UNLOADED:
                return "sleeping" if self.was_idle and self.is_running else "unloaded"
            case ModelState.LOADING:
                return "loading"
            case _:
                return "loaded"


class Models:
    """The models, of which at most `max_loaded` are loaded, and take at most `max_bytes` (0: no limit).

    `default` is the model of requests that name none, if there is one. A request waits at most `timeout` seconds
    for a model, and at most `max_waiting` wait for one. Every method is called on the event loop.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        default: ServedModel | None = None,
        max_loaded: int = 0,
        max_bytes: int = 0,
        max_kept: int = 0,
        max_waiting: int = 256,
        autoload: bool = True,
        timeout: float = 600,
    ) -> None:
        self.all = list(models)
        self.default = default
        self.max_loaded = max_loaded or len(self.all)
        self.autoload = autoload
        self._max_bytes = max_bytes
        self._max_kept = max(max_kept or len(self.all), self.max_loaded)
        self._max_waiting = max_waiting
        self._timeout = timeout
        self._by_name = {name: each for each in self.all for name in each.names}
        self._turn = asyncio.Lock()
        """Held by what loads or unloads a model."""
        self._changed = asyncio.Event()
        """Set when a request has left a model, or waits no longer."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Loads that requests wait for."""
        self._commands: set[asyncio.Task[None]] = set()
        """Loads and unloads for administrators; cancelled when the server stops."""
        self._refusal: ServerError | UnavailableError | None = None

    @classmethod
    def of_one(cls, model: ServedModel, service: Service, **limits: Any) -> Models:
        """Return those of a server of one model, which is loaded already, and answers to any name."""
        model.service, model.state, model.info = service, ModelState.LOADED, service.info
        model.used_at = asyncio.get_running_loop().time()
        return cls([model], default=model, **limits)

    @property
    def is_one(self) -> bool:
        """True for a server of one model, which answers to any name, and whose processes are not replaced."""
        return self.all[0].launch is None

    @property
    def services(self) -> list[Service]:
        """The services of all models that have processes."""
        return [each.service for each in self.all if each.service is not None]

    @property
    def n_in_flight(self) -> int:
        """Requests that run, or wait for a slot or a model."""
        return sum(each.capacity.n_in_flight for each in self.services) + sum(each.n_waiting for each in self.all)

    # Requests

    def find(self, name: str) -> ServedModel:
        """Return the model of a name. Raises `NotFoundError`, or `InvalidRequestError` if there must be a name."""
        if self.default is not None and (self.is_one or not name):
            return self.default
        if not name:
            raise InvalidRequestError("model name is missing from the request", param="model")
        # Ollama's clients always give a tag.
        found = self._by_name.get(name) or self._by_name.get(name.removesuffix(":latest"))
        if found is None:
            known = ", ".join(each.id for each in self.all)
            raise NotFoundError(f"model '{name}' not found; this server has {known}", param="model")
        return found

    def running(self, name: str) -> Service:
        """Return the service of a model, for what does not need it to be loaded.

        Raises `InvalidRequestError` if the model has no processes.
        """
        model = self.find(name)
        if model.service is None:
            raise InvalidRequestError(f"model '{model.id}' is not loaded", param="model")
        return model.service

    def any_running(self) -> Service:
        """Return the service of any model, for what is no model's own. Raises `InvalidRequestError` without one."""
        service = next((each.service for each in self.all if each.is_running), None)
        if service is None:
            raise InvalidRequestError("no model is loaded", param="model")
        return service

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Service]:
        """Give the service of a model, which stays loaded until the caller leaves the block.

        An unloaded model is loaded first. Raises its error if that fails, `UnavailableError` if there is no room
        for it within the time limit, and `QueueFullError` if too many wait for it.
        """
        model = self.find(name)
        if not model.is_ready:
            if not self.autoload and model.state is ModelState.UNLOADED:
                raise InvalidRequestError(f"model '{model.id}' is not loaded", param="model")
            if model.n_waiting >= self._max_waiting:
                message = f"{model.n_waiting} requests wait for model '{model.id}' to be loaded (--max-queue)"
                raise QueueFullError(message, retry_after=1)
            await self._wait_for(model)
        assert model.service is not None
        model.n_uses += 1
        model.used_at = self._now()
        try:
            yield model.service
        finally:
            model.n_uses -= 1
            model.used_at = self._now()
            self._changed.set()

    @property
    def have_idle_time(self) -> bool:
        """True if a model is unloaded once nobody has used it for some time."""
        return any(each.idle_seconds for each in self.all)

    def load_first(self) -> None:
        """Begin to load the models that are loaded at the start."""
        for model in self.all:
            if model.loads_at_start:
                self._spawn(self._wait_for(model), self._commands)

    def load(self, name: str) -> None:
        """Begin to load a model. Raises `InvalidRequestError` if it is loaded."""
        model = self.find(name)
        if model.is_ready or model.state is ModelState.LOADING:
            raise InvalidRequestError("model is already running", param="model")
        self._spawn(self._wait_for(model), self._commands)

    def unload(self, name: str) -> None:
        """Begin to unload a model, at the first moment in which nothing uses it.

        Raises `InvalidRequestError` if it is not loaded.
        """
        model = self.find(name)
        if model.status not in ("loaded", "sleeping"):
            raise InvalidRequestError("model is not running", param="model")
        model.was_idle = False
        self._spawn(self._unload_when_unused(model), self._commands)

    async def _wait_for(self, model: ServedModel) -> None:
        """Wait until a model is loaded; it is not loaded for those who wait no longer."""
        model.n_waiting += 1
        try:
            async with asyncio.timeout(self._timeout):
                while not model.is_ready:
                    if model.loading is None:
                        model.loading = asyncio.get_running_loop().create_future()
                        model.loading.add_done_callback(_ignored)
                        self._spawn(self._load_in_turn(model, model.loading), self._tasks)
                    # Others wait for it too.
                    await asyncio.shield(model.loading)
        except TimeoutError:
            message = f"model '{model.id}' was not loaded within {self._timeout:g} s (--load-timeout)"
            raise UnavailableError(message, retry_after=1) from None
        finally:
            model.n_waiting -= 1
            self._changed.set()

    # Loading and unloading

    async def _load_in_turn(self, model: ServedModel, loading: asyncio.Future[None]) -> None:
        """Load a model when it is its turn, and tell those who wait by `loading`."""
        async with self._turn:
            if loading.done():
                # It stayed loaded.
                return
            error: LlamaslotError | None = None
            try:
                self._check(model)
                if not model.is_ready and await self._make_room(model):
                    await self._try_load(model)
            except LlamaslotError as failed:
                error = failed
            except Exception as failed:
                # A bug: those who wait must not wait for ever.
                _log.exception("model.failed", model=model.id)
                error = ServerError(f"model '{model.id}' could not be loaded: {failed}")
            model.loading = None
            if error is not None:
                loading.set_exception(error)
            else:
                loading.set_result(None)
                # The next turn may be that of a model that needs the room of this one.
                while model.is_ready and model.n_waiting:
                    await asyncio.sleep(0)

    def _check(self, model: ServedModel) -> None:
        """Raise the reason why a model is not loaded now."""
        if self._refusal is not None:
            raise self._refusal
        if model.failure is not None and self._now() < model.retry_at:
            seconds = math.ceil(model.retry_at - self._now())
            raise type(model.failure)(model.failure.message, retry_after=seconds)

    async def _try_load(self, model: ServedModel) -> None:
        model.state, started = ModelState.LOADING, self._now()
        try:
            async with asyncio.timeout(self._timeout):
                await self._load_or_launch(model)
        except Exception as error:
            pause = max(_RETRY_S, self._now() - started)
            reason, seconds = str(error) or f"it took more than {self._timeout:g} s", math.ceil(pause)
            if isinstance(error, UnavailableError):
                # Its processes go on, with what they have cached.
                model.failure = UnavailableError(reason, retry_after=seconds)
            else:
                message = f"model '{model.id}' could not be loaded: {reason}"
                model.failure = ServerError(message, retry_after=seconds)
                await self._end(model)
            model.retry_at = self._now() + pause
            is_expected = isinstance(error, LlamaslotError | OSError)
            _log.error("model.failed", model=model.id, reason=reason, exc_info=not is_expected)
            raise model.failure from None
        else:
            assert model.service is not None
            model.state, model.failure, model.was_idle = ModelState.LOADED, None, False
            model.info, model.used_at = model.service.info, self._now()
            if self._refusal is not None:
                model.service.capacity.refusal = self._refusal
        finally:
            if model.state is ModelState.LOADING:
                model.state = ModelState.UNLOADED

    async def _load_or_launch(self, model: ServedModel) -> None:
        """Load a model in its processes or, if it has none, in new ones."""
        while model.is_running:
            assert model.service is not None
            try:
                await model.service.load()
            except UnavailableError:
                if model.service.is_connected:
                    raise
                # The engine has ended: it is started again, with the model loaded, or new processes are.
            else:
                return
        await self._end(model)
        assert model.launch is not None
        model.processes = model.launch()
        model.service = await model.processes.load()
        if len(model.adapter_scales) == len(model.service.adapter_scales):
            model.service.adapter_scales = tuple(model.adapter_scales)
        n_bytes = model.processes.n_bytes
        # Its pool was made for the estimate, so more than that is used only if it is used already.
        model.n_bytes = max(n_bytes, min(int(n_bytes * _GROWTH), model.n_bytes))

    async def _make_room(self, model: ServedModel) -> bool:
        """Unload others until there is room for a model; return False if nobody waits for it any more.

        Raises `UnavailableError` if no other model can make room.
        """
        leaving: ServedModel | None = None
        try:
            while self._lacks_room(model):
                if not model.n_waiting or self._refusal is not None:
                    return False
                chosen = self._next_to_leave(model, leaving)
                if chosen.state is ModelState.UNLOADED:
                    await self._end(chosen)
                    continue
                if leaving is not None and leaving is not chosen:
                    self._stay(leaving)
                leaving = chosen
                leaving.state = ModelState.LEAVING
                if await self._unload_unused(leaving):
                    leaving = None
                else:
                    await self._until_changed()
            await self._end_kept(model)
            return True
        finally:
            if leaving is not None:
                self._stay(leaving)

    def _next_to_leave(self, model: ServedModel, leaving: ServedModel | None) -> ServedModel:
        """Return which model makes room for another one, by its processes alone if it is not loaded.

        `leaving` has been chosen before, and is still used. Raises `UnavailableError` if there is none.
        """
        others = [each for each in self.all if each.state is not ModelState.UNLOADED and each is not model]
        candidates = [each for each in others if not each.is_pinned]
        unused = [each for each in candidates if not each.n_uses]
        kept = self._kept(model)
        if not unused and kept and len(others) < self.max_loaded:
            return kept[0]
        if not candidates:
            message = f"there is no room for model '{model.id}': the models that are loaded are pinned"
            raise UnavailableError(message, retry_after=60)
        # Of those in use, the one that leaves already has fewer requests from moment to moment.
        return min(unused or ([leaving] if leaving else candidates), key=lambda each: each.used_at)

    def _stay(self, model: ServedModel) -> None:
        """Return a leaving model to `LOADED`, and wake the requests that waited for it."""
        model.state = ModelState.LOADED
        if model.loading is not None and not model.loading.done() and model.is_ready:
            model.loading.set_result(None)
            model.loading = None

    def _lacks_room(self, model: ServedModel) -> bool:
        """Return True if a model can be loaded only once another one is unloaded."""
        loaded = [each for each in self.all if each is not model and each.state is not ModelState.UNLOADED]
        return len(loaded) >= self.max_loaded or (bool(loaded) and not self._has_bytes_for(model))

    def _has_bytes_for(self, model: ServedModel) -> bool:
        others = [each for each in self.all if each is not model and each.processes is not None]
        taken = sum(KEPT_BYTES if each.state is ModelState.UNLOADED else each.n_bytes for each in others)
        return not self._max_bytes or taken + model.n_bytes <= self._max_bytes

    def _kept(self, model: ServedModel) -> list[ServedModel]:
        """Return the other unloaded models that have processes, the one unused for longest first."""
        unloaded = [each for each in self.all if each.state is ModelState.UNLOADED and each.processes is not None]
        return sorted((each for each in unloaded if each is not model), key=lambda each: each.used_at)

    async def _end_kept(self, model: ServedModel) -> None:
        """End processes of unloaded models as far as a model that is about to be loaded needs their room."""
        while kept := self._kept(model):
            n_running = sum(each.processes is not None for each in self.all if each is not model)
            if n_running < self._max_kept and self._has_bytes_for(model):
                return
            await self._end(kept[0])

    async def _unload_when_unused(self, model: ServedModel) -> None:
        """Unload a model at the first moment in which nothing uses it, unless that does not come in time."""
        until = self._now() + self._timeout
        while self._now() < until:
            async with self._turn:
                if not model.is_ready or await self._try_unload(model):
                    return
            await self._until_changed()
        _log.warning("model.not_unloaded", model=model.id, reason="requests used it all the time")

    async def _try_unload(self, model: ServedModel, *, is_urgent: bool = True) -> bool:
        """Unload a loaded model in this turn; return False if that is not possible."""
        model.state = ModelState.LEAVING
        try:
            return await self._unload_unused(model, is_urgent=is_urgent)
        finally:
            if model.state is ModelState.LEAVING:
                self._stay(model)

    async def _unload_unused(self, model: ServedModel, *, is_urgent: bool = True) -> bool:
        """Unload a model that is leaving; return False if a request uses it, or the engine is busy with it.

        Its memory is measured before.
        """
        if model.n_uses:
            return False
        try:
            is_unloaded = model.is_running and await self._unload_measured(model, is_urgent=is_urgent)
        except (LlamaslotError, TimeoutError):
            is_unloaded = False
            if not self.is_one:
                # Its engine is being started again, or hangs, and others need its room.
                await self._end(model)
        if not (self.is_one or model.is_running):
            await self._end(model)
            is_unloaded = True
        if is_unloaded:
            model.state = ModelState.UNLOADED
        return is_unloaded

    async def _unload_measured(self, model: ServedModel, *, is_urgent: bool) -> bool:
        """Have the engine unload a model, and measure it before; return False if the engine is busy with it."""
        assert model.service is not None
        model.service.check_running()
        async with asyncio.timeout(_UNLOAD_TIMEOUT_S):
            if model.processes is not None:
                n_bytes, state = model.processes.n_bytes, await model.service.engine_state()
                model.n_bytes = max(n_bytes - state.cache.ram.used_bytes, 0)
            return await model.service.unload(is_urgent=is_urgent)

    async def _until_changed(self) -> None:
        """Wait until a request has left a model, or a moment, for an engine that is busy."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), _IDLE_POLL_S)

    async def _end(self, model: ServedModel) -> None:
        """End the processes of a model."""
        if model.service is not None:
            model.adapter_scales = model.service.adapter_scales
            model.service = None
        if model.processes is not None and (reason := await model.processes.stop()):
            _log.error("model.not_ended", model=model.id, reason=reason)
        model.processes = None

    async def unload_idle(self) -> None:
        """Unload models that nobody has used for their `idle_seconds`, until this is cancelled."""
        while True:
            await asyncio.sleep(_IDLE_POLL_S)
            for model in self.all:
                if self.is_one and model.service is not None and model.service.is_loaded:
                    # An engine that ended while its model was unloaded was started again, with the model.
                    model.state = ModelState.LOADED
                if self._is_idle(model):
                    async with self._turn:
                        # It may have been used meanwhile.
                        if self._is_idle(model):
                            model.was_idle = await self._try_unload(model, is_urgent=False)

    def _is_idle(self, model: ServedModel) -> bool:
        idle_s = self._now() - model.used_at
        return model.is_ready and not model.n_uses and 0 < model.idle_seconds <= idle_s

    # The end

    def refuse(self) -> None:
        """Refuse new requests from now on: the server stops."""
        self._refusal = stopped_error("")
        for task in self._commands:
            task.cancel()
        for service in self.services:
            service.capacity.refusal = self._refusal
        self._changed.set()

    async def close(self, seconds: float) -> None:
        """End all requests as unavailable, and wait until their replies are remembered, at most `seconds`."""
        self.refuse()
        tasks = [*self._tasks, *self._commands]
        for task in tasks:
            task.cancel()
        for model in self.all:
            if model.loading is not None and not model.loading.done():
                model.loading.set_exception(stopped_error(""))
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(each.close(seconds) for each in self.services))

    async def stop(self) -> str:
        """End all processes; return why that is not possible, or an empty text."""
        reasons = await asyncio.gather(*(each.processes.stop() for each in self.all if each.processes is not None))
        return next(filter(None, reasons), "")

    @staticmethod
    def _spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        """Run something in the background; what it raises is told to those who wait, or is in the log."""
        # Not in the context of a request, whose id would be in all log lines of the processes that it starts.
        task = asyncio.create_task(work, context=Context())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(_ignored)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _ignored(future: asyncio.Future[None]) -> None:
    """Take the error of a future for which nobody waits any more."""
    if not future.cancelled():
        future.exception()
