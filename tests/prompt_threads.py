"""Prompt workers of tests, and jobs for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from llamaslot.api.context import ApiSettings
from llamaslot.base.callers import Caller
from llamaslot.base.commands import GenerateParams, PromptPart, TextPart, TokensPart
from llamaslot.base.errors import LlamaslotError, UnavailableError
from llamaslot.base.model import ModelInfo
from llamaslot.base.prompt_jobs import (
    AnswerBody,
    BodyKind,
    Job,
    JobResult,
    Needs,
    NextTurn,
    Prepare,
    Release,
    Remember,
    ReplyOptions,
    RequestContext,
    RequestPolicy,
    VectorReply,
)
from llamaslot.base.stats import AnchorStats, MessageStats, SessionStats
from llamaslot.prompts.lanes import Lanes, PendingJob
from llamaslot.prompts.prompt_worker import PromptWorker
from llamaslot.prompts.tokenizer import Tokenizer
from llamaslot.protocol.replies.restoring import ReplyRestorer
from llamaslot.protocol.request_reader import ReadBody, RequestReader
from llamaslot.protocol.text_requests import TextRequest
from llamaslot.text.template import ChatTemplate
from tests.fake_backend import FakeBackend, FakeVocab, byte_trial

PLAIN_TEMPLATE = "{{ messages }}"
CONTEXT = RequestContext("r")
SETTINGS = ApiSettings().request_policy(FakeBackend().info, max_queue=10)


class LocalPrompts:
    """Takes the place of `PromptSupervisor`, with the prompt worker in this process."""

    def __init__(self, worker: PromptWorker) -> None:
        self.worker = worker
        self.lanes = Lanes()
        self._is_closed = False
        self._dropped: set[str] = set()
        """Requests of jobs that the end of the worker has dropped, such as their release."""

    @property
    def chat_template(self) -> str:
        return self.worker.chat_template

    @property
    def stats(self) -> tuple[AnchorStats, SessionStats, MessageStats]:
        return self.worker.stats

    @property
    def n_kept(self) -> int:
        """Requests that nothing was to release, not even as the worker ended."""
        for pending in self.lanes.jobs.values():
            self._drop(pending.job)
        return len(self.worker._requests.keys() - self._dropped)

    def call(self, job: Job) -> asyncio.Future[Any]:
        """Start a job, unless the threads have ended."""
        if self._is_closed:
            self._drop(job)
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            future.set_exception(UnavailableError("the server is shutting down"))
            return future
        future = self.lanes.add(job)
        self._begin_jobs()
        return future

    def close(self) -> Future[None]:
        """Fail the jobs that wait, and end the threads; the future is done once their jobs are."""
        self._is_closed = True
        for pending in list(self.lanes.jobs.values()):
            if not pending.is_running:
                self._drop(pending.job)
                pending.fail(UnavailableError("the server is shutting down"))

        def join() -> None:
            for each in self.worker._threads:
                each.shutdown()

        thread = ThreadPoolExecutor(1)
        joining = thread.submit(join)
        thread.shutdown(wait=False)
        return joining

    def _drop(self, job: Job) -> None:
        if isinstance(job, Release | Remember | NextTurn):
            self._dropped.add(job.request_id)

    def _begin_jobs(self) -> None:
        while (pending := self.lanes.begin_next()) is not None:
            self._run(pending)

    def _run(self, pending: PendingJob) -> None:
        loop = asyncio.get_running_loop()

        def ended(future: Future[JobResult]) -> None:
            # The loop may be closed by the time a job ends that nobody waits for.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._has_ended, pending.number, future)

        self.worker.carry_out(pending.job).add_done_callback(ended)

    def _has_ended(self, number: int, future: Future[JobResult]) -> None:
        pending, error = self.lanes.end(number), future.exception()
        if error is not None:
            assert isinstance(error, LlamaslotError)
            pending.fail(error)
        elif not pending.future.done():
            pending.future.set_result(future.result())
        if not self._is_closed:
            self._begin_jobs()


class PrepareText(Prepare, frozen=True, tag="prepare_text"):
    """A job whose body was read already, for tests that choose what only a body's reader sets otherwise."""

    requests: tuple[TextRequest, ...] = ()


class TextReader(RequestReader):
    """A reader that also takes `PrepareText`."""

    def read(self, job: Prepare) -> ReadBody | Needs:
        if isinstance(job, PrepareText):
            is_batch = job.requests[0].params.vector is not None
            return job.requests, ReplyOptions(vectors=VectorReply("native") if is_batch else None)
        return super().read(job)


def text_request(name: str, parts: Sequence[PromptPart] | str, **fields: Any) -> TextRequest:
    """A request for a prompt; `fields` are its own, and those of `GenerateParams`."""
    prompt = (TextPart(parts),) if isinstance(parts, str) else tuple(parts)
    own = {field: fields.pop(field) for field in ("session_id", "session_branch", "owner") if field in fields}
    return TextRequest(GenerateParams(name, **fields), prompt, **own)


def without_bos(text: str) -> tuple[TokensPart]:
    """A prompt of the fake vocabulary's tokens of a text alone."""
    return (TokensPart(tuple(text.encode())),)


def prepare_text(*requests: TextRequest) -> PrepareText:
    """Tokenize the prompts of a body, when it is the turn of its client."""
    params = requests[0].params
    context = msgspec.structs.replace(
        CONTEXT, request_id=params.completion_id, caller=Caller(params.client, "here")
    )
    return PrepareText("native", b"{}", context, requests=requests)


def tokenize(request_id: str, text: str = "hello", **fields: Any) -> PrepareText:
    """Tokenize the prompt of a request."""
    return prepare_text(text_request(request_id, text, **fields))


def parse(kind: BodyKind, body: dict[str, Any], request_id: str = "r", client: str = "") -> Prepare:
    """Prepare the body of a request for completions."""
    context = msgspec.structs.replace(CONTEXT, request_id=request_id, caller=Caller(client))
    return Prepare(kind, msgspec.json.encode(body), context)


def long_query(text: str = "") -> AnswerBody:
    """Tokenize a text that is so long that prompts must not wait for it."""
    return AnswerBody("tokenize", msgspec.json.encode({"content": text + " word" * 10_000}))


def prompt_thread(
    tokenizer: Tokenizer,
    info: ModelInfo | None = None,
    template: str = PLAIN_TEMPLATE,
    grammars: Sequence[str] = (),
    *,
    settings: RequestPolicy = SETTINGS,
    restoring: FakeVocab | None = None,
    predicts: bool = False,
) -> LocalPrompts:
    """A prompt worker in this process, by default for the fake model; `grammars` as of `--grammar-file`.

    Messages of chats are restored for the vocabulary `restoring`.
    """
    info = info or FakeBackend().info
    parsed = ChatTemplate(template, bos_token=info.bos_token, eos_token=info.eos_token, adds_bos=info.adds_bos)
    named = [(f"grammar {i}", grammar) for i, grammar in enumerate(grammars)]
    restorer = ReplyRestorer(tokenizer.memory, restoring) if restoring is not None else None
    vocab = restoring or FakeVocab()
    reader = TextReader(
        info,
        parsed,
        tokenizer,
        settings,
        byte_trial(info.control_tokens, info.n_vocab),
        named_tokens=vocab.named_tokens,
        grammars=named,
        tags=vocab.added_tags,
        restorer=restorer,
    )
    return LocalPrompts(PromptWorker(tokenizer, reader, predicts=predicts))
