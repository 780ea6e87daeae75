"""The prompt worker: reads, renders and tokenizes on threads of its own, so that no step waits.

Its jobs are in `base/prompt_jobs.py`, the lanes in which they wait for it in `prompts/lanes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
import numpy as np
import structlog

from llamaslot.base.cache_ids import cache_ids_of
from llamaslot.base.commands import DropPaths, Generate, GenerateParams
from llamaslot.base.errors import InvalidRequestError, LlamaslotError, ServerError, about
from llamaslot.base.namespaces import salt_namespace
from llamaslot.base.prompt_jobs import (
    AnswerBody,
    BadBody,
    ClearTexts,
    DropSession,
    Job,
    JobResult,
    ListItems,
    Locate,
    Located,
    Needs,
    NextTurn,
    PredictedPrompt,
    Prepare,
    Prepared,
    Release,
    Remember,
)
from llamaslot.base.stats import AnchorStats, MessageStats, SessionStats
from llamaslot.base.text_records import RememberedReply, Session, TextAnchor, TextRecord, session_digest
from llamaslot.base.threads import started_executor
from llamaslot.base.tokens import n_common, unpacked
from llamaslot.prompts.divergences import EarlierPrompts
from llamaslot.prompts.lanes import JOBS_AT_ONCE, PROMPT_LANE, activity_of, is_short, lane_of
from llamaslot.prompts.remembering import PromptContext
from llamaslot.prompts.tokenizer import Tokenizer
from llamaslot.protocol.request_reader import RequestReader
from llamaslot.protocol.responses import list_items

_THREAD_NAMES = ("llamaslot-tokenizer", "llamaslot-queries", "llamaslot-grammars")
"""By lane."""

MIN_NEW_TOKENS = 64
"""Fewest tokens of a predicted prompt that are worth computing ahead, as many as a prefix that is worth sharing."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Request:
    """State of a request from `Prepare` to `Release`."""

    prompts: list[PromptContext]
    body: Prepare | None = None
    """Its body, if its next turn may be predicted."""


class PromptWorker:
    """Carries out jobs, on as many threads for each lane as it runs at once.

    With `shows_text`, answers to `Locate` may have text of prompts; with `predicts` it keeps bodies for `NextTurn`.
    """

    def __init__(
        self, tokenizer: Tokenizer, reader: RequestReader, *, shows_text: bool = False, predicts: bool = False
    ) -> None:
        self._shows_text = shows_text
        self._tokenizer = tokenizer
        self._reader = reader
        self._predicts = predicts
        self._requests: dict[str, _Request] = {}
        self.chat_template = reader.template.source
        """Jinja source of the chat template in use."""
        self.earlier = EarlierPrompts()
        """To find out why prompts diverge from what was cached."""
        self._threads = [
            started_executor(n, name, tokenizer.stack_bytes)
            for n, name in zip(JOBS_AT_ONCE, _THREAD_NAMES, strict=True)
        ]

    @property
    def stats(self) -> tuple[AnchorStats, SessionStats, MessageStats]:
        """Counts of what is remembered, and estimated bytes."""
        amount = self._tokenizer.memory.amount
        return (
            AnchorStats(*amount(TextAnchor)),
            SessionStats(*amount(Session)),
            MessageStats(*amount(RememberedReply)),
        )

    def start(self) -> None:
        """Probe for exact cut points, so that no request need wait for that."""
        self._threads[PROMPT_LANE].submit(self._probe)

    def _probe(self) -> None:
        try:
            if not self._tokenizer.probe_cut_points():
                _log.warning("text_anchors.off", reason="no control token of this vocabulary has exact cut points")
        except Exception:
            _log.exception("prompt_worker.failed", job="probe")

    def carry_out(self, job: Job, on_prompt: Callable[[], None] = lambda: None) -> Future[JobResult]:
        """Carry out a job on a thread of its lane. The future has its result or a `LlamaslotError`.

        `on_prompt` is called before each prompt of a body but the first: the time limit is one of each prompt.
        """
        return self._threads[lane_of(job)].submit(self._carry_out, job, on_prompt)

    def _carry_out(self, job: Job, on_prompt: Callable[[], None]) -> JobResult:  # noqa: PLR0911 - one for each kind
        """Return a job's result; raises `LlamaslotError` for what cannot be read or tokenized.

        `Prepare`, `AnswerBody` and `ListItems` may run beside others, those one at a time.
        """
        try:
            match job:
                case Prepare():
                    return self._prepare(job, on_prompt)
                case AnswerBody():
                    return self._reader.answer(job)
                case ListItems():
                    return list_items(job)
                case Remember():
                    return self._remember(job)
                case Locate():
                    return self._locate(job)
                case DropSession():
                    return self._drop_session(job)
                case NextTurn():
                    return self._next_turn(job)
                case Release():
                    self._requests.pop(job.request_id, None)
                case ClearTexts():
                    self._tokenizer.memory.clear()
                    self.earlier.clear()
                    # A next turn would bring back what was cleared.
                    for each in [*self._requests.values()]:
                        each.body = None
            return None
        except LlamaslotError:
            raise
        except BaseException as error:
            _log.error("prompt_worker.failed", job=type(job).__name__, exc_info=error)
            raise ServerError(f"{activity_of(job)} failed") from None

    def _prepare(self, job: Prepare, on_prompt: Callable[[], None]) -> Prepared | Needs | BadBody:
        try:
            read = self._reader.read(job)
        except InvalidRequestError as error:
            return BadBody(error.info())
        if isinstance(read, Needs):
            return read
        contexts: list[PromptContext] = []
        requests, options = read
        for each in requests:
            if contexts:
                on_prompt()
            with about(each.field):
                contexts.append(self._tokenizer.tokenize_prompt(each))
                if each.params.vector is not None and not contexts[-1].prompt.n_tokens:
                    raise InvalidRequestError("Input content cannot be empty", param="input")
                if job.purpose != "inspect":
                    self._tokenizer.check_fits(contexts[-1].prompt)
        is_run, chat = job.purpose == "run", contexts[0].request.chat
        if job.purpose != "warm" and requests[0].params.vector is None:
            # What is warmed or embedded has no reply to be remembered.
            # Of a long body too much would be kept, and the prediction would take long.
            is_predicted = self._predicts and is_run and chat is not None and chat.returns and is_short(job)
            kept = [each.without_files for each in contexts]
            self._requests[job.context.request_id] = _Request(kept, job if is_predicted else None)
        shows_text = is_run and (job.context.shows_prompt or options.verbose)
        return Prepared(
            tuple(Generate(each.request.params, each.prompt) for each in contexts),
            tuple(
                self._tokenizer.detokenize(each.prompt.tokens.tolist()) if shows_text else "" for each in contexts
            ),
            tuple(self._tokenizer.echo(each) if options.echo else "" for each in contexts),
            options,
        )

    def _context(self, job: Remember | Locate) -> PromptContext | None:
        """Return a prompt of a request, if it was prepared and not released."""
        request = self._requests.get(job.request_id)
        return request.prompts[job.prompt] if request is not None else None

    def _remember(self, job: Remember) -> tuple[TextRecord, ...]:
        context = self._context(job)
        if context is None:
            return ()
        self.earlier.add(context, job.generated)
        generated, format_ = unpacked(job.generated), self._reader.output_format
        return self._tokenizer.remember(context, generated, job.n_sent, job.completion_id, format_)

    def _locate(self, job: Locate) -> Located:
        context = self._context(job)
        if context is None:
            return Located(-1)
        n_characters = self._tokenizer.n_characters(context, job.n_tokens)
        if not job.explains:
            return Located(n_characters)
        divergence = self.earlier.find_divergence(
            context,
            job.n_tokens,
            self._tokenizer.pieces,
            n_added=self._tokenizer.n_added(context),
            reasoning=self._reader.output_format.reasoning,
            shows_text=self._shows_text,
        )
        return Located(n_characters, divergence)

    def _next_turn(self, job: NextTurn) -> PredictedPrompt | None:
        request = self._requests.pop(job.request_id, None)
        if request is None or request.body is None:
            return None
        (context,), generated = request.prompts, unpacked(job.generated)
        message = self._tokenizer.returned_message(
            context, generated, job.n_sent, job.completion_id, self._reader.output_format
        )
        if message is None:
            return None
        reply = msgspec.json.encode(message)
        read = self._reader.read(msgspec.structs.replace(request.body, purpose="warm", reply=reply))
        # What this body needed before, it has.
        assert not isinstance(read, Needs)
        ((following,), _) = read
        prompt = self._tokenizer.tokenize_prompt(following).prompt
        self._tokenizer.check_fits(prompt)
        n_new = prompt.n_tokens - n_common(prompt.tokens, np.concatenate([context.prompt.tokens, generated]))
        if not MIN_NEW_TOKENS <= n_new <= job.max_new:
            return None
        # It activates no adapter, since what invokes one comes with the turn itself.
        records = self._tokenizer.remember_branch(following, cache_ids_of(prompt, None))
        if following.session_id and not records:
            # It was dropped meanwhile.
            return None
        params = GenerateParams(
            f"{job.completion_id}-next",
            max_tokens=0,
            cache_salt=following.params.cache_salt,
            adapters=following.params.adapters,
            is_background=True,
        )
        return PredictedPrompt(Generate(params, prompt), n_new, records)

    def _drop_session(self, job: DropSession) -> DropPaths:
        digest = session_digest(salt_namespace(job.cache_salt), job.session_id)
        dropped = self._tokenizer.memory.drop_session(digest)
        self.earlier.drop_session(digest)
        paths = tuple((salt_namespace(job.cache_salt, key), path) for each in dropped for key, path in each.paths)
        return DropPaths(paths, digest)
