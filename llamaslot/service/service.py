"""The engine as HTTP handlers see it: submit requests, query, and collect metrics.

It exchanges commands and events with the dispatcher and nothing else: `connect` sets where commands go, `receive`
takes events.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec
import structlog

from llamaslot.base.commands import (
    Cancel,
    Command,
    CountTokens,
    InspectEngine,
    ProbeCache,
    PromptQuery,
    Query,
    QueryBody,
    Submit,
)
from llamaslot.base.errors import (
    DeadlineError,
    InvalidRequestError,
    LlamaslotError,
    QueueFullError,
    UnavailableError,
    stopped_error,
)
from llamaslot.base.events import (
    TERMINAL,
    Accepted,
    Cancelled,
    Event,
    Failed,
    Finished,
    Output,
    Progress,
    Reply,
    SelfTestEnded,
    Stopped,
)
from llamaslot.base.model import ModelInfo
from llamaslot.base.stats import EngineState
from llamaslot.formats.recognition import format_of
from llamaslot.service.generations import Generation, Generations
from llamaslot.service.metrics import Metrics, per_second
from llamaslot.service.reply_budget import ProbsLimit, ReplyBudget

_log = structlog.get_logger(__name__)
_R = TypeVar("_R", bound=msgspec.Struct)

_CANCELLABLE = PromptQuery | ProbeCache | CountTokens
"""Queries that read or tokenize texts, which may be long."""
_MAX_RETRY_AFTER_S = 60
"""OpenAI's clients ignore a longer one."""
_MEAN_DECAY = 0.9
"""Weight of earlier requests in the mean duration."""


class _Limit(NamedTuple):
    """A limit of the requests that run and wait, and how many there are."""

    flag: str
    most: int
    n_in_flight: int
    whose: str = ""
    """Words for the error message, if it is not a limit of all requests."""


class Service:
    """The engine as HTTP handlers see it. Every method is called on the server's event loop.

    At most `max_queue` requests may wait for a slot, and of one client at most `max_queue_per_client` (0 for no
    limit of its own); one more is refused. A request ends with an error after `request_timeout` seconds (0: never).
    `has_remote` says whether there is a remote tier, whose tokens the log then names.
    """

    def __init__(
        self,
        info: ModelInfo,
        chat_template: str,
        metrics: Metrics,
        *,
        max_queue: int,
        max_queue_per_client: int = 0,
        request_timeout: float = 0,
        has_remote: bool = False,
    ) -> None:
        self.info = info
        self.chat_template = chat_template
        """Jinja source of the template in use."""
        self.output_format = format_of(chat_template, {})
        """The format in which models write that use the template, to parse their output."""
        self.max_queue = max_queue
        self.max_in_flight = info.n_slots + max_queue
        """Completions that may run and wait together."""
        self._max_per_client = max_queue_per_client
        self.request_timeout = request_timeout
        self._has_remote = has_remote
        self.metrics = metrics
        self.reply_budget = ReplyBudget()
        self._send: Callable[[Command], None] | None = None
        self._why_down: Callable[[], str] = lambda: ""
        self._generations: dict[str, Generation] = {}
        self._n_of_client: Counter[str] = Counter()
        """Requests of each client that were submitted and have not ended, and prompts that it has tokenized."""
        self._n_tokenizing = 0
        """Prompts that are tokenized, and not run."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """By request id: the timer that ends it at its deadline."""
        self._expired: set[str] = set()
        """Requests that are being cancelled because of their deadline."""
        self._replies: dict[str, asyncio.Future[Any]] = {}
        self._ids = itertools.count(1)
        self._mean_seconds = 0.0
        self._refusal: LlamaslotError | None = None
        self.stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the engine has ended; its result is the reason, empty after an ordinary stop."""

    def connect(self, send: Callable[[Command], None], why_down: Callable[[], str] = lambda: "") -> None:
        """Set the function that passes commands on, and one that says why the engine does not run."""
        self._send = send
        self._why_down = why_down

    def check_running(self) -> None:
        """Raise `UnavailableError` while the engine is restarting, or stopped by a signal."""
        if reason := self._why_down():
            raise UnavailableError(reason, retry_after=1)

    @property
    def n_in_flight(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._generations)

    def owner_of(self, request_id: str) -> str:
        """Return the `Sender.owner` of a completion that runs; empty for an unknown one."""
        generation = self._generations.get(request_id)
        return generation.submit.owner if generation is not None else ""

    def refuse(self, error: LlamaslotError) -> None:
        """Refuse further requests with this error; those in flight continue."""
        self._refusal = error

    def check_capacity(self, n: int, client: str = "") -> None:
        """Raise if `n` more requests of a client cannot be taken: `UnavailableError` when shutting down,
        `QueueFullError` when too many are in flight, `InvalidRequestError` when `n` always exceeds the limit.
        """
        if self._refusal:
            raise self._refusal
        limits = [_Limit("--max-queue", self.max_in_flight, self.n_in_flight + self._n_tokenizing)]
        if self._max_per_client:
            most = self.info.n_slots + self._max_per_client
            limits.append(_Limit("--max-queue-per-client", most, self._n_of_client[client], " of this client"))
        for limit in limits:
            if n > limit.most:
                message = f"{n} completions were asked for at once; the server takes {limit.most} ({limit.flag})"
                raise InvalidRequestError(message, param="n")
        for limit in limits:
            if limit.n_in_flight + n > limit.most:
                raise self._queue_full(limit, n)

    def _queue_full(self, limit: _Limit, n: int) -> QueueFullError:
        """Return the error of one request too many, and count it."""
        rounds = limit.n_in_flight / self.info.n_slots
        retry_after = min(max(1, math.ceil(rounds * self._mean_seconds)), _MAX_RETRY_AFTER_S)
        self.metrics.record_end("refused", None)
        _log.warning(
            "request.refused", in_flight=limit.n_in_flight, wanted=n, flag=limit.flag, retry_after=retry_after
        )
        message = (
            f"{limit.n_in_flight} requests{limit.whose} run or wait, and the limit is {limit.most} ({limit.flag} "
            "and the slots); try later"
        )
        return QueueFullError(message, retry_after=retry_after)

    def deadline(self) -> float | None:
        """Return the time on the event loop's clock at which a request that arrives now must have ended, if any."""
        return asyncio.get_running_loop().time() + self.request_timeout if self.request_timeout else None

    @asynccontextmanager
    async def limited_by(self, deadline: float | None) -> AsyncIterator[None]:
        """Cancel what runs in the `async with` block at a deadline, and raise `DeadlineError` in its place."""
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError:
            raise self.deadline_error() from None

    def deadline_error(self) -> DeadlineError:
        """Return the error of a request that has not ended at its deadline."""
        return DeadlineError(f"the request took more than {self.request_timeout:g} s (--request-timeout)")

    def generate(
        self, submits: Sequence[Submit], deadline: float | None = None, probs: ProbsLimit | None = None
    ) -> Generations:
        """Submit the completions of one request, of one prompt or several, all or none.

        Raises what `check_capacity` raises, and `InvalidRequestError` for a reply over the limit `probs`, without
        which tokens and probabilities are passed on and not kept. Those that have not ended by `deadline` fail with
        `deadline_error`.
        """
        client = submits[0].client
        self.check_capacity(sum(submit.n for submit in submits), client)
        if probs is not None:
            probs.check(submits, self.info.n_ctx_slot)
        completions = [completion for submit in submits for completion in submit.completions()]
        generations = Generations(
            completions, self.cancel, self.reply_budget, n_ctx=self.info.n_ctx_slot, probs=probs
        )
        self._generations |= {each.submit.request_id: each for each in generations.all}
        self._n_of_client[client] += len(completions)
        if deadline is not None:
            loop = asyncio.get_running_loop()
            for each in completions:
                self._timers[each.request_id] = loop.call_at(deadline, self._expire, each.request_id)
        for submit in submits:
            self.send(submit)
        return generations

    async def ask_about(self, query: ProbeCache | CountTokens, reply_type: type[_R]) -> _R:
        """Return the reply to a query about a prompt, which counts as a request of its client meanwhile.

        Raises what `check_capacity` raises, or the error of the reply.
        """
        client = query.submit.client
        self.check_capacity(1, client)
        self._n_tokenizing += 1
        self._n_of_client[client] += 1
        try:
            return await self.ask(query, reply_type)
        finally:
            self._n_tokenizing -= 1
            self._release_client(client)

    async def ask(self, body: QueryBody, reply_type: type[_R]) -> _R:
        """Return the reply to a query, or raise its error.

        If this is cancelled, so is a query that the prompt worker has not begun; others run, unheard.
        """
        if self.stopped.done():
            raise self._refusal or UnavailableError("the engine is not running")
        request_id = f"query-{next(self._ids)}"
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies[request_id] = future
        try:
            self.send(Query(request_id, body))
            return msgspec.convert(await future, reply_type)
        finally:
            if self._replies.pop(request_id, None) is not None and isinstance(body, _CANCELLABLE):
                self.send(Cancel(request_id))

    async def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return self.metrics.exposition(await self.ask(InspectEngine(), EngineState))

    def send(self, command: Command) -> None:
        """Pass a command to the dispatcher."""
        if self._send is None:
            raise UnavailableError("the engine is not running")
        self._send(command)

    def receive(self, events: list[Event]) -> None:
        """Distribute a step's events."""
        for event in events:
            match event:
                case Output():
                    if generation := self._generations.get(event.request_id):
                        generation.put(event)
                case Reply():
                    self._resolve(event)
                case SelfTestEnded(info):
                    # The backend does not know the limits that the server has chosen.
                    self.info = msgspec.structs.replace(info, checkpoint_limits=self.info.checkpoint_limits)
                case Stopped():
                    self._engine_stopped(event)
                case _:
                    self._pass_on(event)

    def _expire(self, request_id: str) -> None:
        """End a request at its deadline: it fails once the engine has freed its slot."""
        self._expired.add(request_id)
        self.cancel(request_id)

    def cancel(self, request_id: str) -> bool:
        """Cancel a completion, if it runs or waits: it fails. Return False if it has ended."""
        if request_id not in self._generations:
            return False
        self.send(Cancel(request_id))
        return True

    def _resolve(self, reply: Reply) -> None:
        future = self._replies.pop(reply.request_id, None)
        if future is None or future.done():
            return
        if reply.error is not None:
            future.set_exception(reply.error.exception())
        else:
            future.set_result(reply.body)

    def _pass_on(self, event: Accepted | Finished | Failed | Cancelled) -> None:
        generation = self._generations.get(event.request_id)
        if generation is None:
            return
        if isinstance(event, Cancelled) and event.request_id in self._expired:
            event = Failed(event.request_id, self.deadline_error().info(), event.progress)
        generation.put(event)
        if isinstance(event, TERMINAL):
            self._remove(generation.submit)
            self._log_end(event, generation.submit.client_request_id)

    def _remove(self, submit: Submit) -> None:
        del self._generations[submit.request_id]
        self._release_client(submit.client)
        self._expired.discard(submit.request_id)
        timer = self._timers.pop(submit.request_id, None)
        if timer is not None:
            timer.cancel()

    def _release_client(self, client: str) -> None:
        """Count one request of a client less."""
        self._n_of_client[client] -= 1
        if not self._n_of_client[client]:
            del self._n_of_client[client]

    def _log_end(self, event: Finished | Failed | Cancelled, client_request_id: str) -> None:
        reason = _reason(event)
        progress = event.progress
        self.metrics.record_end(reason, progress)
        log = _log.bind(request_id=event.request_id)
        if client_request_id:
            log = log.bind(client_request_id=client_request_id)
        if isinstance(event, Failed):
            log = log.bind(type=event.error.type, error=event.error.message)
        if progress is None:
            log.info("request.done", finish_reason=reason)
            return
        seconds = (progress.prompt_ms + progress.predicted_ms) / 1e3
        decay = _MEAN_DECAY if self._mean_seconds else 0.0
        self._mean_seconds = decay * self._mean_seconds + (1 - decay) * seconds
        log.info("request.done", **_log_fields(progress, self._has_remote), finish_reason=reason)

    def _engine_stopped(self, event: Stopped) -> None:
        self._refusal = stopped_error(event.reason)
        for future in self._replies.values():
            if not future.done():
                future.set_exception(self._refusal)
        self._replies.clear()
        if not self.stopped.done():
            self.stopped.set_result(event.reason)


def _reason(event: Finished | Failed | Cancelled) -> str:
    if isinstance(event, Finished):
        return event.reason
    return "error" if isinstance(event, Failed) else "cancelled"


def _log_fields(progress: Progress, has_remote: bool) -> dict[str, Any]:
    return {
        "slot": progress.slot,
        "queue_ms": round(progress.queue_ms, 2),
        "ttft_ms": round(progress.queue_ms + progress.prompt_ms, 2),
        "prompt_tokens": progress.n_prompt,
        "prefix_cache_tokens": progress.n_cached,
        "prefix_cache_ratio": round(progress.n_cached / progress.n_prompt, 4),
        "prefix_copied_tokens": progress.n_copied,
        "prefix_loaded_tokens": progress.n_loaded,
        "prefix_read_tokens": progress.n_read,
        **({"prefix_fetched_tokens": progress.n_fetched} if has_remote else {}),
        "prefix_anchored_tokens": progress.n_anchored,
        **({"restored_tokens": progress.n_restored} if progress.n_restored else {}),
        "prefix_miss": progress.miss or None,
        **({"diverged_at": progress.diverged_at} if progress.diverged_at >= 0 else {}),
        **({"session_match": progress.session_match} if progress.session_match else {}),
        **({"approximate_tokens": progress.n_approximate} if progress.n_approximate else {}),
        "load_ms": round(progress.load_ms, 2),
        "generated_tokens": progress.n_generated,
        "tokens_per_second": round(per_second(progress), 2),
    }
