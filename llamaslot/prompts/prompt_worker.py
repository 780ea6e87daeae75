"""The prompt worker: text to tokens on a thread of its own, in the order of arrival, so that no step waits for it.

The engine gives it prompts and, at the end of each request, what was generated; it answers between two steps.
What it takes to remember a reply stays here, by request id, until the reply is remembered or the request released.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import structlog

from llamaslot.base.commands import Detokenized, DropSession, Submit, Tokenize, Tokenized, TokenQuery
from llamaslot.base.errors import LlamaslotError, QueueFullError, ServerError
from llamaslot.base.executors import close_after_queue
from llamaslot.base.namespaces import salt_namespace
from llamaslot.base.prompt import TokenizedPrompt
from llamaslot.base.stats import AnchorStats, SessionStats
from llamaslot.base.tokens import Tokens
from llamaslot.prompts.sessions import Session, session_digest
from llamaslot.prompts.text_store import TextStore
from llamaslot.prompts.tokenizer import Remembered, ReplyContext, Tokenizer

_SHORT_QUERY = 2**14
"""Characters or token ids up to which a query shares the thread of the prompts."""
_MAX_LONG_QUERIES = 4
"""Longer queries in progress or waiting; one more gets a 429."""
T = TypeVar("T")

_log = structlog.get_logger(__name__)


def _at_once(method: Callable[..., None], *arguments: object) -> None:
    method(*arguments)


def _thread(name: str, stack_bytes: int) -> ThreadPoolExecutor:
    """Return a running thread with a stack of that size, or of the usual one for 0."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=f"llamaslot-{name}")
    usual = threading.stack_size(stack_bytes)
    try:
        executor.submit(lambda: None)
    finally:
        threading.stack_size(usual)
    return executor


class PromptWorker:
    """Runs `tokenizer` on one thread, and long queries on a second.

    `post` runs an answer between two engine steps; `fail` ends a request.

    Every method is called on the event loop.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        post: Callable[[Callable[[], None]], None],
        fail: Callable[[str, LlamaslotError], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._post = post
        self._fail = fail
        self._store: TextStore | None = None
        self._write = _at_once
        self._thread = _thread("tokenizer", tokenizer.stack_bytes)
        self._query_thread = _thread("queries", tokenizer.stack_bytes)
        self._queries: dict[str, tuple[asyncio.Future[Any], list[TokenQuery]]] = {}
        """Long queries that are not answered yet, each with its body until the thread takes it."""
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._contexts: dict[str, ReplyContext] = {}
        """Of requests between their prompt and their end."""
        self._n_remembering = 0

    @property
    def is_remembering(self) -> bool:
        """True while replies are being remembered."""
        return self._n_remembering > 0

    @property
    def stats(self) -> tuple[AnchorStats, SessionStats]:
        """Counts of what is remembered, and estimated bytes."""
        anchors, sessions = self._tokenizer.anchors, self._tokenizer.sessions
        return AnchorStats(len(anchors), anchors.n_bytes), SessionStats(len(sessions), sessions.n_bytes)

    def keep_in(self, store: TextStore, write: Callable[..., None]) -> None:
        """Restore the text anchors and sessions of a store, and keep it up to date. To be called before `start`.

        `write` calls methods of the store in order, on a thread that may wait for the disk.
        """
        self._store = store
        self._write = write
        self._tokenizer.restore(store.anchors(), store.sessions())

    def start(self) -> None:
        """Probe for exact cut points, so that the first prompt need not wait for it."""
        self._thread.submit(self._prepare)

    def close(self) -> list[Future[None]]:
        """End the threads, which must not outlive the vocabulary; the futures are done once their calls are."""
        for query_id in list(self._queries):
            self.cancel_query(query_id)
        return [close_after_queue(self._thread), close_after_queue(self._query_thread)]

    def submit(self, submits: Sequence[Submit], then: Callable[[Submit, TokenizedPrompt], None]) -> None:
        """Tokenize the prompt that some requests share, and call `then` for each that was not cancelled meanwhile.

        For each of these, `remember` or `release` must be called at its end.
        """
        by_id = {submit.request_id: submit for submit in submits}

        def tokenized(request_id: str, context: ReplyContext) -> None:
            self._contexts[request_id] = replace(context, submit=by_id[request_id])
            then(by_id[request_id], context.prompt)

        def done(end: Callable[[str, Any], None], result: object) -> None:
            for request_id in by_id:
                if self._waiting.pop(request_id, None) is not None:
                    end(request_id, result)

        method = self._tokenizer.tokenize_prompt
        future = self._call(partial(done, tokenized), partial(done, self._fail), method, submits[0])
        self._waiting |= dict.fromkeys(by_id, future)

    def answer(
        self,
        query_id: str,
        query: TokenQuery,
        respond: Callable[[Tokenized | Detokenized | LlamaslotError], None],
    ) -> None:
        """Answer a query that needs the vocabulary only; long ones on another thread than prompts."""
        method: Callable[[Any], Tokenized | Detokenized] = (
            self._tokenizer.tokenize if isinstance(query, Tokenize) else self._tokenizer.detokenize
        )
        if query.size <= _SHORT_QUERY:
            self._call(respond, respond, method, query)
            return
        if len(self._queries) >= _MAX_LONG_QUERIES:
            message = f"{_MAX_LONG_QUERIES} long texts are being tokenized; try later"
            self._post(partial(respond, QueueFullError(message, retry_after=1)))
            return

        def done(answer: Tokenized | Detokenized | LlamaslotError) -> None:
            if self._queries.pop(query_id, None) is not None:
                respond(answer)

        unread = [query]
        future = self._call(done, done, lambda: method(unread.pop()), thread=self._query_thread)
        self._queries[query_id] = future, unread

    def cancel_query(self, query_id: str) -> None:
        """Cancel a long query; one that the thread has begun is worked out, but not answered."""
        if (entry := self._queries.pop(query_id, None)) is not None:
            future, unread = entry
            future.cancel()
            # The executor's queue keeps cancelled calls until it comes to them.
            unread.clear()

    def cancel(self, request_id: str) -> bool:
        """Cancel a request whose text is being tokenized; False if it is not."""
        future = self._waiting.pop(request_id, None)
        if future is None:
            return False
        if future not in self._waiting.values():
            future.cancel()
        return True

    def cancel_all(self) -> list[str]:
        """Cancel and release all requests; return the ids of those whose text was being tokenized."""
        cancelled = list(self._waiting)
        for each in self._waiting.values():
            each.cancel()
        self._waiting.clear()
        self._contexts.clear()
        return cancelled

    def remember(self, request_id: str, generated: Tokens, n_sent: int) -> None:
        """Remember the tokens of a reply, of which `n_sent` characters were sent, and release its request.

        To be called before the client learns of the end: the thread's order lets its next prompt find them.
        """
        context = self._contexts.pop(request_id)
        self._n_remembering += 1

        def remembered(found: Remembered) -> None:
            self._n_remembering -= 1
            if self._store is not None and found.anchor is not None:
                self._write(self._store.write_anchor, found.anchor)
            if self._store is not None and found.session is not None:
                self._write(self._store.write_session, *found.session)

        method = self._tokenizer.remember
        self._call(remembered, lambda _: remembered(Remembered()), method, context, generated, n_sent)

    def release(self, request_id: str) -> None:
        """Release a request whose reply is not to be remembered."""
        self._contexts.pop(request_id, None)

    def locate(self, request_id: str, n_tokens: int, then: Callable[[int], None]) -> None:
        """Count the characters that the first tokens of a request's prompt stand for."""
        context = self._contexts[request_id]
        self._call(then, lambda _: None, self._tokenizer.n_characters, context, n_tokens)

    def drop_session(
        self,
        query: DropSession,
        then: Callable[[str, list[bytes]], None],
        failed: Callable[[LlamaslotError], None],
    ) -> None:
        """Drop a session, on disk too; `then` gets its namespace and its `Session.paths`, or none without one."""
        namespace = salt_namespace(query.cache_salt)
        digest = session_digest(namespace, query.session_id)

        def dropped(session: Session | None) -> None:
            if self._store is not None:
                self._write(self._store.drop_session, digest)
            then(namespace, session.paths if session is not None else [])

        def not_dropped(_: object) -> None:
            failed(ServerError("the session could not be dropped"))

        self._call(dropped, not_dropped, self._tokenizer.sessions.drop, digest)

    def clear(self, then: Callable[[], None]) -> None:
        """Drop all text anchors and sessions, on disk too, those included that are being remembered."""

        def cleared(_: object) -> None:
            if self._store is not None:
                self._write(self._store.clear_texts)
            then()

        self._call(cleared, cleared, self._tokenizer.clear)

    def _prepare(self) -> None:
        """Run on the thread; nothing is posted, since that would interrupt a multi-step decode."""
        try:
            if not self._tokenizer.prepare():
                _log.warning("text_anchors.off", reason="no control token of this vocabulary has exact cut points")
        except Exception:
            _log.exception("prompt_worker.failed", method="prepare")

    def _call(
        self,
        then: Callable[[T], None],
        failed: Callable[[LlamaslotError], None],
        method: Callable[..., T],
        *arguments: object,
        thread: Executor | None = None,
    ) -> asyncio.Future[T]:
        """Call a tokenizer method on a thread, and pass on its result or error between two engine steps."""
        future = asyncio.get_running_loop().run_in_executor(thread or self._thread, method, *arguments)

        def done() -> None:
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                then(future.result())
            elif isinstance(error, LlamaslotError):
                failed(error)
            else:
                _log.error("prompt_worker.failed", method=method.__name__, exc_info=error)
                failed(ServerError("the prompt could not be tokenized"))

        future.add_done_callback(lambda _: self._post(done))
        return future
