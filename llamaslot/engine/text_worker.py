"""What the tokenizer's thread is asked to do, and its answers between two steps.

Prompts come in through it, and what is to be remembered of replies goes out, to the disk too, if there is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import structlog

from llamaslot.base.commands import Detokenize, DropSession, Submit, Tokenize
from llamaslot.base.errors import LlamaslotError, ServerError
from llamaslot.engine.disk import DiskWorker
from llamaslot.prompts.anchoring import Prompt
from llamaslot.prompts.anchors import Anchor
from llamaslot.prompts.sessions import Session
from llamaslot.prompts.tokenizer import Tokenizer
from llamaslot.scheduler.request import Request

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class TextWorker:
    """Asks `tokenizer`, and has answers passed on by `post`. `fail` ends a request that cannot be tokenized.

    Every method is called on the event loop.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        post: Callable[[Callable[[], None]], None],
        fail: Callable[[str, LlamaslotError], None],
        disk: DiskWorker | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._post = post
        self._fail = fail
        self._disk = disk
        self._asked: dict[str, asyncio.Future[Any]] = {}
        self._n_remembering = 0
        if disk is not None:
            tokenizer.restore(disk.anchors(), disk.sessions())

    def begin(self) -> None:
        """Have done what the first prompt would wait for."""
        self._tokenizer.run(self._tokenizer.prepare).add_done_callback(_note_prepared)

    def close(self) -> None:
        """See `Tokenizer.close`."""
        self._tokenizer.close()

    @property
    def waiting(self) -> list[str]:
        """The ids of what is being tokenized."""
        return list(self._asked)

    @property
    def is_remembering(self) -> bool:
        """Whether something is still to be remembered of replies."""
        return self._n_remembering > 0

    def ask(
        self,
        command: Submit | Tokenize | Detokenize,
        method: Callable[..., T],
        then: Callable[[T, list[str]], None],
        ids: Sequence[str] = (),
    ) -> None:
        """Work out `method(command)`, and pass the answer on between two steps.

        `ids` are those that wait for it, if it is not `command` alone; `then` is told which of them still do.
        """
        future = self._tokenizer.run(method, command)
        ids = ids or [command.request_id]
        self._asked |= dict.fromkeys(ids, future)

        def done() -> None:
            waiting = [each for each in ids if self._asked.pop(each, None)]
            if not waiting:
                return
            error = future.exception()
            if error is None:
                then(future.result(), waiting)
                return
            if not isinstance(error, LlamaslotError):
                _log.error("tokenizer.failed", request_id=command.request_id, exc_info=error)
                error = ServerError("the prompt could not be tokenized")
            for each in waiting:
                self._fail(each, error)

        future.add_done_callback(lambda _: self._post(done))

    def cancel(self, request_id: str) -> bool:
        """Wait no more for what is being tokenized; whether it was."""
        future = self._asked.pop(request_id, None)
        if future is None:
            return False
        if future not in self._asked.values():
            future.cancel()
        return True

    def forget_waiting(self) -> None:
        """Wait for nothing any more."""
        self._asked.clear()

    def remember(self, request: Request, prompt: Prompt, n_sent: int) -> None:
        """Have remembered which tokens the reply was made of: asked for before its end is told, so that the next
        turn finds it.
        """
        if request.is_private or not request.has_started:
            return
        generated = request.known.view(request.n_prompt).copy()
        disk = self._disk
        if prompt.ending is not None and request.n_generated:

            def named(anchor: Anchor | None) -> None:
                if anchor is not None and disk is not None:
                    disk.write_anchor(anchor)

            self._remember(request, named, self._tokenizer.replied, prompt, generated, n_sent)
        if request.submit.session_id:

            def ended(session: tuple[bytes, Session]) -> None:
                if disk is not None:
                    disk.write_session(*session)

            self._remember(request, ended, self._tokenizer.remembered, request.submit, prompt, generated, n_sent)

    def drop_session(self, command: DropSession, then: Callable[[str, Session | None], None]) -> None:
        """Forget a session, on disk too; `then` gets its namespace and what it was, between two steps."""
        future = self._tokenizer.run(self._tokenizer.drop_session, command)

        def done() -> None:
            if error := future.exception():
                _log.error("session.not_dropped", exc_info=error)
                self._fail(command.request_id, ServerError("the session could not be dropped"))
                return
            space, digest, session = future.result()
            if self._disk is not None:
                self._disk.drop_session(digest)
            then(space, session)

        future.add_done_callback(lambda _: self._post(done))

    def forget_all(self, then: Callable[[], None]) -> None:
        """Forget all replies and sessions, on disk too, those included that are being remembered."""

        def done() -> None:
            if self._disk is not None:
                self._disk.forget_texts()
            then()

        self._tokenizer.run(self._tokenizer.forget).add_done_callback(lambda _: self._post(done))

    def locate(self, request: Request) -> None:
        """Find out at which character a request's prompt left what was known."""
        tokens = request.known.view(0, request.n_known).copy()
        future = self._tokenizer.run(self._tokenizer.n_characters, request.submit, tokens)

        def done() -> None:
            if not future.exception():
                request.diverged_at = future.result()

        future.add_done_callback(lambda _: self._post(done))

    def _remember(self, request: Request, then: Callable[[T], None], method: Callable[..., T], *of: object) -> None:
        future = self._tokenizer.run(method, *of)
        self._n_remembering += 1

        def done() -> None:
            self._n_remembering -= 1
            if error := future.exception():
                _log.error("reply.not_remembered", request_id=request.id, exc_info=error)
            else:
                then(future.result())

        future.add_done_callback(lambda _: self._post(done))


def _note_prepared(prepared: asyncio.Future[bool]) -> None:
    if prepared.cancelled():
        return
    if error := prepared.exception():
        _log.error("anchors.failed", exc_info=error)
    elif not prepared.result():
        _log.warning("anchors.off", reason="text of this vocabulary cannot be cut before its control tokens")
