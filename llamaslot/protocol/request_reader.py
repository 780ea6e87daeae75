"""Request reader: converts the body of a request to its prompts and the options of its reply."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec
from msgspec import UNSET, UnsetType

from llamaslot.base.commands import (
    AnswerBody,
    JsonReply,
    Needs,
    Prepare,
    TextPart,
    TokensPart,
)
from llamaslot.base.errors import ContextSizeError, InvalidRequestError, LlamaslotError
from llamaslot.base.generation.request_context import ReplyOptions, RequestContext
from llamaslot.base.generation.responses import EarlierItems
from llamaslot.base.model import ModelInfo
from llamaslot.base.namespaces import salt_namespace
from llamaslot.formats.format import Format
from llamaslot.protocol.anthropic import chat as anthropic
from llamaslot.protocol.anthropic.bodies import CountTokensBody, MessagesBody
from llamaslot.protocol.bodies import (
    ChatBody,
    CompletionBody,
    InfillBody,
    Options,
)
from llamaslot.protocol.body_answers import BodyAnswers
from llamaslot.protocol.chat_prompt import ChatReader, conversation_branch
from llamaslot.protocol.decoding import decode, renamed, too_deep
from llamaslot.protocol.default_grammars import DefaultGrammars
from llamaslot.protocol.infill import InfillPrompts
from llamaslot.protocol.replies.restoring import ReplyRestorer
from llamaslot.protocol.replies.storing import chat_to_store
from llamaslot.protocol.responses import chat as responses
from llamaslot.protocol.responses.bodies import ResponsesBody
from llamaslot.protocol.structured_output import ConstraintReader
from llamaslot.protocol.text_requests import (
    BodyTokenizer,
    Prompt,
    TextRequest,
    is_verbose,
    n_choices,
    prompts_of,
    refuse_missing,
    text_requests,
    wants_probs,
)
from llamaslot.text.grammars.compiling import GrammarChecker, LocalTrial, Trial, UnknownGrammarError
from llamaslot.text.template import ChatTemplate


class _Kind(msgspec.Struct):
    """The field that tells a chat from a text completion."""

    messages: msgspec.Raw | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class ReadBody:
    """A request for each prompt of a body, and the options of its reply."""

    requests: tuple[TextRequest, ...]
    options: ReplyOptions


class RequestReader:
    """Reads bodies for a model with this chat template. Usable on any thread.

    `grammars` has the files of `--grammar-file` and their texts; an invalid one raises `InvalidRequestError`.
    `restorer` restores replies in chats; without it replies are neither restored nor remembered. `trial` compiles
    grammars to check them; without it they are compiled on the thread that reads a body.
    """

    def __init__(
        self,
        info: ModelInfo,
        template: ChatTemplate,
        tokenizer: BodyTokenizer,
        named_tokens: Mapping[str, int] = MappingProxyType({}),
        grammars: Iterable[tuple[str, str]] = (),
        *,
        tags: Mapping[str, int] = MappingProxyType({}),
        restorer: ReplyRestorer | None = None,
        trial: Trial | None = None,
    ) -> None:
        self._info = info
        self.template = template
        self._tokenizer = tokenizer
        checker = GrammarChecker(trial or LocalTrial.of_bytes(info.control_tokens, info.n_vocab))
        self._restorer = restorer
        self._constraints = ConstraintReader(checker, self._token_of, tags)
        self._known_constraints = ConstraintReader(checker, self._token_of, tags, may_compile=False)
        self._chats = ChatReader(template, named_tokens, self._tag_tokens)
        self._defaults = DefaultGrammars([self._constraints.grammar(*each) for each in grammars])
        self._infill = InfillPrompts(info, tokenizer.tokenize, self._check_size)
        self._answers = BodyAnswers(self._chats, tokenizer, info)

    def read(self, job: Prepare) -> ReadBody | Needs:
        """Read the body of a request for completions; raises `InvalidRequestError`."""
        try:
            return self._read(job)
        except UnknownGrammarError:
            return Needs(may_compile=True)
        except RecursionError as error:
            raise too_deep() from error

    def _read(self, job: Prepare) -> ReadBody | Needs:
        match job.kind:
            case "chat":
                return self._chat(decode(job.body, ChatBody), job)
            case "responses" | "compact":
                return self._response(job)
            case "messages":
                return self._messages(job)
            case "probe":
                return self._probe(job)
            case _:
                return self._completions(job)

    def _completions(self, job: Prepare) -> ReadBody:
        """Read a body with prompts."""
        body: CompletionBody | InfillBody
        if job.kind == "infill":
            body = decode(job.body, InfillBody)
            refuse_missing(body)
            prompts = [self._infill.of_parts(body, job.context)]
        else:
            body = decode(job.body, CompletionBody)
            refuse_missing(body, is_text=job.kind != "native")
            prompts = prompts_of(body, self._info.n_vocab, job.context.limits.max_prompts)
            if body.suffix:
                for prompt in prompts:
                    self._check_size(prompt)
                prompts = [self._infill.of_suffix(prompt, body, job.context) for prompt in prompts]
        for prompt in prompts:
            self._check_size(prompt)
        own = self._constraints_for(job).read(body)
        default = self._defaults.next() if job.is_run else None
        constraint = own or default
        requests = text_requests(body, prompts, job.context, self._info, self._tokens_of, constraint=constraint)
        return ReadBody(requests, _reply_options(body, requests, job.context))

    def _probe(self, job: Prepare) -> ReadBody:
        """Read a body of `POST /cache/probe`: a chat or, without messages, a body with one prompt."""
        has_messages = decode(job.body, _Kind).messages is not UNSET
        if has_messages:
            return self._chat(decode(job.body, ChatBody), job)
        parsed = self._completions(job)
        if len(parsed.requests) > 1:
            raise InvalidRequestError("'prompt' must be one prompt to probe the cache", param="prompt")
        return parsed

    def _messages(self, job: Prepare) -> ReadBody:
        """Read a body in Anthropic's form."""
        body = decode(job.body, MessagesBody if job.is_run else CountTokensBody)
        try:
            parsed = self._chat(anthropic.chat_of(body), job)
        except LlamaslotError as error:
            raise renamed(error, anthropic.field_names(body)) from error
        omits = body.thinking is not None and body.thinking.display == "omitted"
        options = msgspec.structs.replace(parsed.options, omit_reasoning=omits)
        return replace(parsed, options=options)

    def _chat(self, body: ChatBody, job: Prepare) -> ReadBody:
        """Read a chat: the body of a job, or one converted from another API's body."""
        context = job.context
        refuse_missing(body)
        chat = self._chats.read(body, context, self._constraints_for(job), is_run=job.is_run)
        self._check_size(chat.parts)
        default = self._defaults.next() if job.is_run else None
        budget = chat.reasoning_budget
        if chat.constrains_content or default is None:
            constraint = chat.constraint
        else:
            # A default grammar covers the whole output, and may not allow a forced end of the reasoning.
            constraint, budget = default, None
        (request,) = text_requests(body, [chat.parts], context, self._info, self._tokens_of, constraint=constraint)
        if request.params.cache_prompt and self._restorer is not None:
            namespace = salt_namespace(request.params.cache_salt)
            chat, found = self._chats.with_replies(body, chat, self._restorer, namespace)
            if found is not None:
                request = replace(request, chat=found.turn, rest=found.rest)
        params = msgspec.structs.replace(
            request.params,
            reasoning_budget=budget,
            preserved_tokens=self._chats.preserved_tokens,
            session_branch=conversation_branch(self.template, body),
        )
        request = replace(request, params=params)
        options = msgspec.structs.replace(
            _reply_options(body, (request,), context),
            parser=chat.parser,
            chat=chat_to_store(body, context.request_id) if job.is_run else None,
        )
        return ReadBody((request,), options)

    def _response(self, job: Prepare) -> ReadBody | Needs:
        """Read a body of the Responses API."""
        body = decode(job.body, ResponsesBody)
        missing = responses.references(body) if job.earlier is None else None
        if missing is not None:
            return Needs(missing)
        unique_id = job.context.request_id.partition("_")[2]
        read = responses.read_request if job.kind == "responses" else responses.read_compaction
        request = read(body, job.earlier or EarlierItems(), unique_id)
        try:
            # Tools may have more text than the part of them that is in the prompt.
            self._check_size((TextPart(request.fields.echo.decode()),))
            parsed = self._chat(request.chat, job)
        except LlamaslotError as error:
            raise renamed(error, request.field_names) from error
        return replace(parsed, options=msgspec.structs.replace(parsed.options, response=request.fields))

    def _constraints_for(self, job: Prepare) -> ConstraintReader:
        return self._constraints if job.may_compile else self._known_constraints

    def _check_size(self, prompt: Prompt) -> None:
        """Raise `ContextSizeError` for a prompt that cannot fit into a slot.

        Millions of ids or texts, or a text of many MiB, would block the server's event loop, through which they
        pass.
        """
        n_min = sum(len(part.tokens) if isinstance(part, TokensPart) else 1 for part in prompt)
        if n_min > self._info.n_ctx_slot:
            raise ContextSizeError.of(n_min, self._info.n_ctx_slot, at_least=True)
        self._tokenizer.check_size(prompt)

    def answer(self, job: AnswerBody) -> JsonReply:
        """Answer a body; raises `InvalidRequestError`."""
        try:
            return self._answers.answer(job)
        except RecursionError as error:
            raise too_deep() from error

    @property
    def output_format(self) -> Format:
        """The format in which the model writes chat messages."""
        return self._chats.format

    def _tokens_of(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.tokenize((TextPart(text, special=False),)))

    def _tag_tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.tokenize((TextPart(text),)))

    def _token_of(self, text: str) -> int | None:
        tokens = self._tokenizer.tokenize((TextPart(text),))
        return tokens[0] if len(tokens) == 1 else None


def _reply_options(body: Options, requests: tuple[TextRequest, ...], context: RequestContext) -> ReplyOptions:
    n, params = n_choices(body), requests[0].params
    fields = body.response_fields if isinstance(body, CompletionBody | InfillBody) else None
    return ReplyOptions(
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        timings_per_token=bool(body.timings_per_token),
        return_tokens=bool(body.return_tokens),
        verbose=is_verbose(body, context),
        echo=bool(body.echo),
        n_best=n if params.n > n else 0,
        hides_logprobs=params.sampling.n_probs >= 0 and not wants_probs(body),
        response_fields=tuple(fields or ()),
        sse_ping_interval=body.sse_ping_interval,
    )
