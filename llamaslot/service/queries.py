"""Queries: answered by the prompt worker, by the engine, or by both in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec import convert, structs

from llamaslot.base import commands
from llamaslot.base.commands import PromptQuery, Query, QueryBody
from llamaslot.base.errors import LlamaslotError, UnavailableError
from llamaslot.base.events import Reply
from llamaslot.base.prompt import CountedTokens, TokenizedPrompt
from llamaslot.base.stats import CacheProbe, CacheState, EngineState
from llamaslot.prompts.prompt_jobs import (
    ClearTexts,
    DroppedSession,
    Job,
    Locate,
    Located,
    Release,
    TokenizePrompt,
)
from llamaslot.prompts.prompt_worker import PromptWorker, on_result


class _Pending(NamedTuple):
    """A query that the prompt worker has."""

    future: asyncio.Future[Any]
    submit: commands.Submit | None
    """The request whose prompt is tokenized, and kept by the prompt worker until it is released."""


class Queries:
    """Queries that are not answered. `emit` gets the replies that the engine does not give."""

    def __init__(self, prompts: PromptWorker, emit: Callable[[Reply], None]) -> None:
        self._prompts = prompts
        self._emit = emit
        self._send: Callable[[Query], None] | None = None
        self._in_prompt_worker: dict[str, _Pending] = {}
        """Those that may be cancelled."""
        self._in_engine: dict[str, QueryBody] = {}

    def connect(self, send: Callable[[Query], None]) -> None:
        """Set the function that passes queries to the engine."""
        self._send = send

    def disconnect(self) -> None:
        """Refuse the queries that the engine has, and further ones: it has ended."""
        self._send = None
        for request_id in list(self._in_engine):
            self._refuse(request_id)

    def ask(self, query: Query) -> None:
        """Have a query answered."""
        request_id, body = query.request_id, query.body

        def failed(error: LlamaslotError) -> None:
            self._emit(Reply(request_id, error=error.info()))

        needs_both = isinstance(body, commands.DropSession | commands.ClearCache)
        if needs_both and self._send is None:
            # Else the prompt worker would forget what the disk still has.
            failed(restarting_error())
            return
        match body:
            case commands.DropSession():
                on_result(self._prompts.call(body), lambda dropped: self._drop(query, dropped), failed)
            case commands.ProbeCache(submit):
                self._call(
                    request_id,
                    TokenizePrompt(submit),
                    lambda tokenized: self._pass_on(
                        Query(request_id, commands.ProbePrompt(submit.without_prompt(), tokenized))
                    ),
                )
            case commands.CountTokens(submit):
                self._call(
                    request_id,
                    TokenizePrompt(submit),
                    lambda tokenized: self._counted(request_id, submit, tokenized),
                )
            case commands.ClearCache():
                # First the texts: what is being remembered now is dropped too.
                on_result(self._prompts.call(ClearTexts()), lambda _: self._pass_on(query), failed)
            case commands.ParseBody():
                self._call(request_id, body, lambda parsed: self._parsed(query, body, parsed))
            case _ if isinstance(body, PromptQuery):
                self._call(request_id, body, lambda answer: self._emit(Reply(request_id, answer)))
            case _:
                self._pass_on(query)

    def cancel(self, request_id: str) -> None:
        """Cancel a query that the prompt worker has; other ids are ignored."""
        query = self._in_prompt_worker.pop(request_id, None)
        if query is None:
            return
        query.future.cancel()
        if query.submit is not None:
            self._release(query.submit)

    def cancel_all(self) -> None:
        """Cancel all queries that the prompt worker has."""
        for request_id in list(self._in_prompt_worker):
            self.cancel(request_id)

    def replied(self, reply: Reply) -> Reply | None:
        """Take the engine's reply; return it with what the prompt worker adds, None if that comes later."""
        body = self._in_engine.pop(reply.request_id, None)
        if reply.error is not None:
            if isinstance(body, commands.ProbePrompt):
                self._release(body.submit)
            return reply
        if isinstance(body, commands.ProbePrompt):
            self._locate(reply.request_id, body, convert(reply.body, CacheProbe))
            return None
        # From another process the body arrives as builtins.
        if isinstance(body, commands.InspectEngine):
            state = convert(reply.body, EngineState)
            state.cache.anchors, state.cache.sessions, state.cache.messages = self._prompts.stats
            return Reply(reply.request_id, state)
        if isinstance(body, commands.InspectCache):
            listing = convert(reply.body, CacheState)
            listing.anchors, listing.sessions, listing.messages = self._prompts.stats
            return Reply(reply.request_id, listing)
        return reply

    def _locate(self, request_id: str, query: commands.ProbePrompt, probe: CacheProbe) -> None:
        """Reply with the character at which a prompt departs from what is cached."""
        job = Locate(query.submit.request_id, probe.prompt_tokens - probe.computed)
        has_diverged = probe.miss in {"diverged", "changed"}

        def located(place: Located) -> None:
            if has_diverged and place.n_characters >= 0:
                probe.diverged_at = place.n_characters
            self._emit(Reply(request_id, probe))

        on_result(self._prompts.call(job), located, lambda error: self._emit(Reply(request_id, error=error.info())))
        self._release(query.submit)

    def _parsed(self, query: Query, job: commands.ParseBody, parsed: commands.ParsedBody) -> None:
        """Reply with a parsed body; a deferred one is read again where its grammar delays no prompts."""
        if parsed.is_deferred:
            self.ask(Query(query.request_id, structs.replace(job, may_compile=True)))
        else:
            self._emit(Reply(query.request_id, parsed))

    def _counted(self, request_id: str, submit: commands.Submit, tokenized: TokenizedPrompt) -> None:
        self._emit(Reply(request_id, CountedTokens(tokenized.n_tokens)))
        self._release(submit)

    def _call(self, request_id: str, job: Job, then: Callable[[Any], None]) -> None:
        """Have the prompt worker carry out a job, which may be cancelled; an error is the reply to the query."""
        future = self._prompts.call(job)
        submit = job.submit if isinstance(job, TokenizePrompt) else None
        self._in_prompt_worker[request_id] = _Pending(future, submit)

        def done(result: Any) -> None:
            if self._in_prompt_worker.pop(request_id, None) is not None:
                then(result)

        def failed(error: LlamaslotError) -> None:
            if self._in_prompt_worker.pop(request_id, None) is not None:
                self._emit(Reply(request_id, error=error.info()))

        on_result(future, done, failed)

    def _drop(self, query: Query, dropped: DroppedSession) -> None:
        """Continue `DropSession` in the engine, which has the session's KV, and the disk with its record."""
        paths = commands.DropPaths(dropped.namespace, dropped.paths, dropped.digest)
        self._pass_on(Query(query.request_id, paths))

    def _pass_on(self, query: Query) -> None:
        self._in_engine[query.request_id] = query.body
        if self._send is not None:
            self._send(query)
        else:
            self._refuse(query.request_id)

    def _refuse(self, request_id: str) -> None:
        body = self._in_engine.pop(request_id)
        if isinstance(body, commands.ProbePrompt):
            self._release(body.submit)
        self._emit(Reply(request_id, error=restarting_error().info()))

    def _release(self, submit: commands.Submit) -> None:
        """Have the prompt worker release a prompt to which there will be no reply."""
        on_result(self._prompts.call(Release(submit.request_id)), _ignore, _ignore)


def _ignore(_: object) -> None:
    """Leave a result or an error aside."""


def restarting_error() -> UnavailableError:
    """Return the error of queries while there is no engine."""
    return UnavailableError("the engine is restarting; try later", retry_after=1)
