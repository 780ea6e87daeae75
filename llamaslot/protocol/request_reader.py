"""Request reader: converts the body of a request to its prompts and the options of its reply.

Bodies of `/apply-template`, `/tokenize` and `/detokenize` are answered here. They need only chat template and
vocabulary.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET

from llamaslot.base.commands import Constraint, ImagePart, PromptPart, TextPart, TokensPart
from llamaslot.base.errors import ContextSizeError, InvalidRequestError, LlamaslotError, NotSupportedError, about
from llamaslot.base.generation.tools import ParserOptions, encoded_tools
from llamaslot.base.model import ModelInfo
from llamaslot.base.prompt_jobs import (
    AnswerBody,
    BodyKind,
    ChatToStore,
    EarlierItems,
    Needs,
    Prepare,
    ReplyOptions,
    RequestPolicy,
)
from llamaslot.protocol.anthropic import CountTokensBody, MessagesBody, chat_of, field_names
from llamaslot.protocol.bodies import (
    AnyBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    InfillBody,
    Metadata,
    Options,
    RerankBody,
    TokenizeBody,
    decode,
    renamed,
    too_deep,
)
from llamaslot.protocol.chat_prompt import ChatReader, checked_messages, conversation_branch, wants_reply
from llamaslot.protocol.constraints import RAW_GRAMMAR, ConstraintReader, read_tools
from llamaslot.protocol.images import (
    MEDIA_MARKER,
    ImageReader,
    RequestImages,
    UnknownSizesError,
    given_image,
    with_texts,
)
from llamaslot.protocol.ollama import (
    FIELD_NAMES,
    GENERATE_FIELD_NAMES,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    converted,
    embedding_of,
)
from llamaslot.protocol.replies.meaning import digest_of
from llamaslot.protocol.replies.restoring import ReplyRestorer
from llamaslot.protocol.responses import ResponsesBody, read_compaction, read_response, references
from llamaslot.protocol.text_requests import (
    CONTINUATIONS,
    BodyTokenizer,
    InfillPrompts,
    Prompt,
    TextRequest,
    checked,
    n_choices,
    open_ended,
    parse_prompt,
    prompts_of,
    refuse_missing,
    text_requests,
    wants_probs,
    warming,
)
from llamaslot.protocol.vector_requests import embedding_requests, rerank_requests
from llamaslot.text.conversation import clean_message, refuse_field
from llamaslot.text.grammars.compiling import GrammarChecker, Trial, UnknownGrammarError
from llamaslot.text.template import ChatTemplate

_MAX_TOKENS = 2**20
"""Most tokens of a text to tokenize. Limited, because each may become a JSON object."""
_MAX_REPLY_BYTES = 16 * 2**20
"""Most bytes of an answer, which the parent process keeps until the client has read it."""

_BLOCKS = ("image", "tool_use", "tool_result", "thinking", "redacted_thinking")
"""Types of content that only Anthropic's messages have."""

ReadBody: TypeAlias = tuple[tuple[TextRequest, ...], ReplyOptions]
"""A request for each prompt of a body, and the options of its reply."""


def default_grammars(grammars: Sequence[Constraint]) -> Iterator[Constraint]:
    """Return an iterator over the grammars of requests that have none (`--grammar-file`), usable on any thread.

    One is for all requests; of several, the k-th is for the k-th request, and later requests get none.
    """
    return itertools.repeat(grammars[0]) if len(grammars) == 1 else iter(grammars)


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
        settings: RequestPolicy,
        trial: Trial,
        *,
        named_tokens: Mapping[str, int] = MappingProxyType({}),
        grammars: Iterable[tuple[str, str]] = (),
        tags: Mapping[str, int] = MappingProxyType({}),
        restorer: ReplyRestorer | None = None,
    ) -> None:
        self._info = info
        self.template = template
        self._tokenizer = tokenizer
        self._settings = settings
        checker = GrammarChecker(trial)
        self._restorer = restorer
        self._constraints = ConstraintReader(checker, self._token_of, tags)
        self._known_constraints = ConstraintReader(checker, self._token_of, tags, may_compile=False)
        self._chats = ChatReader(template, named_tokens, self._tag_tokens, settings)
        self.output_format = self._chats.format
        """The format in which the model writes chat messages."""
        self._images = ImageReader(info.projector)
        self._defaults = default_grammars([self._constraints.grammar(*each) for each in grammars])
        self._infill = InfillPrompts(info, tokenizer.tokenize, self._check_size)

    def read(self, job: Prepare) -> ReadBody | Needs:
        """Read the body of a request for completions; raises `InvalidRequestError`."""
        try:
            return self._read(job)
        except UnknownGrammarError:
            return Needs(may_compile=True)
        except UnknownSizesError as error:
            return Needs(layouts=error.sizes)
        except RecursionError as error:
            raise too_deep() from error

    def _read(self, job: Prepare) -> ReadBody | Needs:  # noqa: PLR0911 - one for each kind
        match job.kind:
            case "chat":
                return self._chat(decode(job.body, ChatBody), job)
            case "responses" | "compact":
                return self._response(job)
            case "messages":
                return self._messages(job)
            case "ollama_chat" | "ollama_generate":
                return self._ollama(job)
            case "any":
                return self._any(job)
            case "embedding" | "embeddings" | "rerank" | "ollama_embed" | "ollama_embeddings":
                return self._vectors(job)
            case _:
                return self._completions(job)

    def _any(self, job: Prepare) -> ReadBody | Needs:
        """Read a body of any API, whose fields tell which one that is."""
        body = decode(job.body, AnyBody)
        read = self._read(msgspec.structs.replace(job, kind=_kind_of(body)))
        if isinstance(read, Needs) or job.purpose != "warm":
            return read
        requests, options = read
        return tuple(warming(each, body.pin) for each in requests), options

    def _completions(self, job: Prepare) -> ReadBody:
        """Read a body with prompts."""
        if job.kind == "infill":
            return self._texts(decode(job.body, InfillBody), job)
        return self._texts(decode(job.body, CompletionBody), job)

    def _texts(self, body: CompletionBody | InfillBody, job: Prepare, **of_api: Any) -> ReadBody:
        """Read prompts: the body of a job, or one converted from another API's body; `of_api` is as in `_chat`."""
        if isinstance(body, InfillBody):
            refuse_missing(body)
            prompts = [self._infill.of_parts(body, self._settings)]
        else:
            refuse_missing(body, is_text=job.kind != "native")
            images = self._images_of(body, job)
            prompts = prompts_of(body, self._info.n_vocab, self._settings.max_prompts, images)
            if body.suffix:
                self._check_sizes(prompts)
                prompts = [self._infill.of_suffix(prompt, body, self._settings) for prompt in prompts]
        self._check_sizes(prompts)
        own = self._constraints_for(job).read(body)
        default = next(self._defaults, None) if job.purpose == "run" else None
        constraint = own or default
        requests = text_requests(
            body, prompts, job.context, self._settings, self._info, tokens_of=self._tokens_of, constraint=constraint
        )
        if job.purpose != "run" and len(requests) > 1:
            raise InvalidRequestError("'prompt' must be one prompt to probe or warm the cache", param="prompt")
        if job.purpose == "warm":
            requests = tuple(map(open_ended, requests))
        return requests, _reply_options(body, requests[0], self._settings, **of_api)

    def _vectors(self, job: Prepare) -> ReadBody:
        """Read a body with inputs to embed, or with documents to be scored."""
        if job.kind == "rerank":
            # A server without a format refuses such bodies unread.
            assert self._info.rerank is not None
            body = decode(job.body, RerankBody)
            read = rerank_requests(body, job, self._settings, self._info, self._info.rerank)
        elif job.kind in ("ollama_embed", "ollama_embeddings"):
            read = self._ollama_vectors(job)
        else:
            read = embedding_requests(decode(job.body, EmbeddingBody), job, self._settings, self._info)
        for request in read[0]:
            if not request.is_cut:
                with about(request.field):
                    self._check_size(request.parts)
        return read

    def _ollama_vectors(self, job: Prepare) -> ReadBody:
        """Read a body with inputs to embed in Ollama's form."""
        body: OllamaEmbedBody | OllamaEmbeddingsBody
        if job.kind == "ollama_embed":
            body = decode(job.body, OllamaEmbedBody)
            is_cut = body.truncate is not False
        else:
            body, is_cut = decode(job.body, OllamaEmbeddingsBody), False
        found = embedding_of(body, self._info.n_vector)
        # A request has a prompt, but one without inputs will not be run.
        embedding = found or EmbeddingBody(input=[0], model=body.model)
        try:
            requests, options = embedding_requests(embedding, job, self._settings, self._info)
        except LlamaslotError as error:
            raise renamed(error, FIELD_NAMES) from error
        options = msgspec.structs.replace(options, generates=found is not None)
        return tuple(replace(each, is_cut=is_cut and found is not None) for each in requests), options

    def _messages(self, job: Prepare) -> ReadBody:
        """Read a body in Anthropic's form."""
        body = decode(job.body, MessagesBody if job.purpose == "run" else CountTokensBody)
        omits = body.thinking is not None and body.thinking.display == "omitted"
        try:
            return self._chat(chat_of(body), job, omit_reasoning=omits)
        except LlamaslotError as error:
            raise renamed(error, field_names(body)) from error

    def _ollama(self, job: Prepare) -> ReadBody:
        """Read a body in Ollama's form."""
        body: OllamaChatBody | OllamaGenerateBody
        if job.kind == "ollama_chat":
            body, names = decode(job.body, OllamaChatBody), FIELD_NAMES
        else:
            body, names = decode(job.body, OllamaGenerateBody), GENERATE_FIELD_NAMES
        model, request = body.model or "", converted(body)
        if request is None:
            # A request has a prompt, but this one will not be run.
            unused = msgspec.structs.replace(job, purpose="inspect")
            return self._texts(CompletionBody(prompt=[0]), unused, model=model, generates=False)
        try:
            if isinstance(request, CompletionBody):
                return self._texts(request, job, model=model, is_text=True)
            context = body.context if isinstance(body, OllamaGenerateBody) else None
            before = checked(context or (), self._info.n_vocab, "context")
            return self._chat(request, job, before=before, call_ids=False, model=model)
        except LlamaslotError as error:
            raise renamed(error, names) from error

    def _chat(self, body: ChatBody, job: Prepare, **of_api: Any) -> ReadBody:
        """Read a chat: the body of a job, or one converted from another API's body.

        `of_api` has fields of `ReplyOptions` that chats do not have, and arguments of `_one_chat`.
        """
        refuse_missing(body)
        images = self._images_of(body, job)
        text = msgspec.structs.replace(body, messages=images.in_messages(body.messages))
        if job.purpose == "warm":
            return self._warming(text, job, images)
        to_store = _chat_to_store(body, job.context.request_id) if job.purpose == "run" else None
        return self._one_chat(text, job, images, chat=to_store, **of_api)

    def _images_of(self, body: ChatBody | CompletionBody, job: Prepare) -> RequestImages:
        return RequestImages(self._images, job.layouts, f"{job.context.key_secret}\n{body.cache_salt or ''}")

    def _one_chat(
        self,
        body: ChatBody,
        job: Prepare,
        images: RequestImages,
        *,
        before: tuple[int, ...] = (),
        call_ids: bool = True,
        **of_api: Any,
    ) -> ReadBody:
        """Read a chat, in whose messages markers stand for `images`, after the tokens `before`.

        Without `call_ids` its messages have no ids of calls, and its reply gets none.
        """
        chats, is_run = self._chats, job.purpose == "run"
        # The prompt.
        use, variables = read_tools(body), chats.variables(body)
        messages, has_reply = checked_messages(body), wants_reply(body)
        parts = chats.render_messages(body, messages, use.definitions, wants_reply=has_reply)
        reasoning_open = chats.reasoning_open(body, "".join(part.text for part in parts))
        # What its reply must match. If it is only counted or probed, a grammar need not be valid.
        thinking = chats.thinking(variables, reasoning_open)
        own = constraint = default = None
        if is_run:
            constraints = self._constraints_for(job)
            own = constraints.read(body)
            constraint = constraints.for_reply(chats.format, own, use, thinking)
        is_raw = own is not None and own.param == RAW_GRAMMAR
        budget = chats.budget(body, thinking, is_raw=is_raw)
        prompt: Prompt = (*((TokensPart(before),) if before else ()), *images.put_into(parts))
        self._check_size(prompt)
        if is_run:
            default = next(self._defaults, None)
        if default is not None and own is None:
            # A default grammar covers the whole output, and may not allow a forced end of the reasoning.
            constraint, budget = default, None
        (request,) = text_requests(
            body,
            [prompt],
            job.context,
            self._settings,
            self._info,
            tokens_of=self._tokens_of,
            constraint=constraint,
            reasoning_budget=budget,
            preserved_tokens=chats.preserved_tokens,
            session_branch=conversation_branch(self.template, body),
        )
        parser = ParserOptions(
            packed_tools=encoded_tools(use.tools),
            parse_tools=use.mode != "none",
            parallel=use.parallel,
            calls_only=use.mode == "required",
            reasoning_open=reasoning_open,
            reasoning_format=body.reasoning_format or self._settings.reasoning_format,
            call_ids=call_ids,
        )
        request = replace(request, tools=parser.packed_tools)
        # Remembered replies as their tokens. The reply may then have to be parsed differently.
        found = None
        is_text = not before and not images
        if request.params.cache_prompt and self._restorer is not None and has_reply and is_text:
            of_template = json.dumps(variables, sort_keys=True).encode()
            found = self._restorer.prompt(
                self.template.prepared(messages),
                parts,
                # Renderings that are not prompts are only compared as text.
                lambda messages, wants_reply: chats.render_messages(
                    body, messages, use.definitions, wants_reply=wants_reply, only_text=not wants_reply
                ),
                digest_of(request.namespace.encode(), of_template),
                lambda bare: msgspec.structs.replace(parser, reasoning_open=chats.format.reasoning_open_at(bare)),
                variables=digest_of(of_template, b"tools" if use.definitions else b""),
            )
        if found is not None:
            turn, rest, text = found
            request = replace(request, chat=turn, rest=rest)
            if turn.begun:
                parser = msgspec.structs.replace(parser, reasoning_open=chats.reasoning_open(body, text))
        return (request,), _reply_options(body, request, self._settings, parser=parser, **of_api)

    def _warming(self, body: ChatBody, job: Prepare, images: RequestImages) -> ReadBody:
        """Read a chat that is computed for later ones, which have all of its messages.

        If the last message needs a reply, the prompt is the chat's own. Otherwise it ends before the next message.
        """
        change = msgspec.structs.replace
        messages = checked_messages(body)
        if job.reply:
            messages = [*messages, msgspec.json.decode(job.reply)]
        # Bodies of other APIs may have got an empty question in place of none.
        if messages[-1]["role"] == "user" and not messages[-1].get("content"):
            messages = messages[:-1]
        if body.continue_final_message or (messages and messages[-1]["role"] in ("user", "tool", "function")):
            return self._one_chat(body, job, images)
        last = clean_message(messages[-1], len(messages) - 1) if messages else {}
        read = []
        for text in CONTINUATIONS:
            following: list[dict[str, Any]] = [
                {"role": "tool", "tool_call_id": call.get("id", ""), "content": text}
                for call in last.get("tool_calls", ())
            ]
            following = following or [{"role": "user", "content": text}]
            longer = change(body, messages=[*messages, *following], add_generation_prompt=None)
            read.append(self._one_chat(longer, job, images))
        (one, *others), options = [request for (request,), _ in read], read[0][1]
        return (replace(one, others=tuple(others)),), options

    def _response(self, job: Prepare) -> ReadBody | Needs:
        """Read a body of the Responses API."""
        body = decode(job.body, ResponsesBody)
        missing = references(body) if job.earlier is None else None
        if missing is not None:
            return Needs(missing)
        unique_id = job.context.request_id.partition("_")[2]
        read = read_response if job.kind == "responses" else read_compaction
        chat, fields, names = read(body, job.earlier or EarlierItems(), unique_id)
        try:
            # Tools may have more text than the part of them that is in the prompt.
            self._check_size((TextPart(fields.echo.decode()),))
            return self._chat(chat, job, response=fields)
        except LlamaslotError as error:
            raise renamed(error, names) from error

    def _constraints_for(self, job: Prepare) -> ConstraintReader:
        return self._constraints if job.may_compile else self._known_constraints

    def _check_sizes(self, prompts: Sequence[Prompt]) -> None:
        """Check the size of each prompt of a body."""
        for i, prompt in enumerate(prompts):
            with about(f"prompt[{i}]" if len(prompts) > 1 else ""):
                self._check_size(prompt)

    def _check_size(self, prompt: Prompt) -> None:
        """Raise `ContextSizeError` for a prompt that cannot fit into a slot.

        Millions of ids or texts, or a text of many MiB, would block the server's event loop, through which they
        pass.
        """
        n_min = sum(map(_n_least, prompt))
        if n_min > self._info.n_ctx_slot:
            is_whole = self._info.embeds_whole
            raise ContextSizeError.of(n_min, self._info.n_ctx_slot, at_least=True, is_whole=is_whole)
        self._tokenizer.check_size(prompt)

    def answer(self, job: AnswerBody) -> bytes:
        """Answer a body that needs only the chat template or the vocabulary; raises `InvalidRequestError`."""
        try:
            match job.kind:
                case "apply_template":
                    reply: Any = {"prompt": "".join(part.text for part in self._rendered(job))}
                case "tokenize":
                    reply = self._tokenize(job)
                case "detokenize":
                    tokens = checked(decode(job.body, DetokenizeBody).tokens or (), self._info.n_vocab, "tokens")
                    text = self._tokenizer.detokenize(tokens)
                    # Under llama-server's name and vLLM's.
                    reply = {"content": text, "prompt": text}
            data = msgspec.json.encode(reply)
        except RecursionError as error:
            raise too_deep() from error
        if len(data) > _MAX_REPLY_BYTES:
            raise InvalidRequestError(
                f"the reply would have {len(data)} bytes (limit: {_MAX_REPLY_BYTES}); send less at a time"
            )
        return data

    def _rendered(self, job: AnswerBody, *, keeps_added: bool = False) -> tuple[TextPart, ...]:
        body = decode(job.body, ChatBody)
        refuse_missing(body)

        def marker(part: Mapping[str, Any], where: str) -> str:
            _, field = given_image(part, where)
            self._images.check_supported(field)
            if job.kind == "tokenize":
                refuse_field(field, "is an image, whose tokens have no ids", NotSupportedError)
            return MEDIA_MARKER

        body = msgspec.structs.replace(body, messages=with_texts(body.messages, marker))
        return self._chats.render(body, keeps_added=keeps_added)

    def _tokenize(self, job: AnswerBody) -> dict[str, Any]:
        """Return the token ids of a text, or of mixed texts and ids, with the text of each token if requested."""
        body = decode(job.body, TokenizeBody)
        has_messages = body.messages is not UNSET and bytes(body.messages) != b"null"
        if body.prompt is not None or has_messages:
            adds = body.add_special_tokens is not False
            own = body.prompt
            text = (TextPart(own),) if own is not None else self._rendered(job, keeps_added=not adds)
            tokens = self._tokens(text, "prompt" if own is not None else "messages", add_special=adds)
            reply = {"tokens": tokens, "count": len(tokens), "max_model_len": self._info.n_ctx_slot}
            if body.return_token_strs:
                reply["token_strs"] = [self._tokenizer.piece(token).decode(errors="replace") for token in tokens]
            return reply
        if body.content is None or body.content == []:
            return {"tokens": []}
        special = body.parse_special is not False
        parts = parse_prompt(body.content, self._info.n_vocab, "content", special=special)
        tokens = self._tokens(parts, "content", add_special=bool(body.add_special))
        if not body.with_pieces:
            return {"tokens": tokens}
        return {"tokens": [{"id": token, "piece": _piece(self._tokenizer.piece(token))} for token in tokens]}

    def _tokens(self, prompt: Prompt, param: str, *, add_special: bool) -> list[int]:
        tokens = self._tokenizer.tokenize(prompt, add_special=add_special)
        if len(tokens) > _MAX_TOKENS:
            message = f"'{param}' has {len(tokens)} tokens (limit: {_MAX_TOKENS}); send less at a time"
            raise InvalidRequestError(message, param=param)
        return tokens

    def _tokens_of(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.tokenize((TextPart(text, special=False),)))

    def _tag_tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.tokenize((TextPart(text),)))

    def _token_of(self, text: str) -> int | None:
        tokens = self._tokenizer.tokenize((TextPart(text),))
        return tokens[0] if len(tokens) == 1 else None


def _n_least(part: PromptPart) -> int:
    """Return how many tokens a part has at least."""
    match part:
        case TokensPart():
            return len(part.tokens)
        case ImagePart():
            return part.layout.n_tokens
        case _:
            return 1


def _kind_of(body: AnyBody) -> BodyKind:
    """Return the kind of a body by the fields that only one kind has."""
    if body.messages is UNSET:
        return "text" if body.input is UNSET else "responses"
    tools = body.tools if isinstance(body.tools, list) else ()
    is_messages = body.system is not UNSET or any(
        isinstance(tool, dict) and "input_schema" in tool and "function" not in tool for tool in tools
    )
    messages = body.messages if isinstance(body.messages, list) else ()
    is_messages |= any(_has_blocks(each.get("content")) for each in messages if isinstance(each, dict))
    return "messages" if is_messages else "chat"


def _has_blocks(content: object) -> bool:
    """Return True for content of Anthropic's messages that chats do not have."""
    blocks = content if isinstance(content, list) else ()
    return any(isinstance(block, dict) and block.get("type") in _BLOCKS for block in blocks)


def _reply_options(body: Options, request: TextRequest, settings: RequestPolicy, **of_kind: Any) -> ReplyOptions:
    n, params = n_choices(body), request.params
    fields = body.response_fields if isinstance(body, CompletionBody | InfillBody) else None
    return ReplyOptions(
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        timings_per_token=bool(body.timings_per_token),
        return_tokens=bool(body.return_tokens),
        verbose=settings.verbose if body.verbose is None else body.verbose,
        echo=bool(body.echo),
        n_best=n if params.n > n else 0,
        hides_logprobs=params.sampling.n_probs >= 0 and not wants_probs(body),
        response_fields=tuple(fields or ()),
        sse_ping_interval=body.sse_ping_interval,
        **of_kind,
    )


def _chat_to_store(body: ChatBody, request_id: str) -> ChatToStore | None:
    """Return what to store of a chat, None if nothing; raises `InvalidRequestError` for invalid metadata."""
    if not body.store:
        return None
    try:
        # Checked only with `store`: without it metadata has no effect, and clients send other things in it.
        metadata = msgspec.convert(body.metadata or {}, Metadata)
    except msgspec.ValidationError as error:
        message = "'metadata' must have at most 16 texts of 512 characters, with names of 64"
        raise InvalidRequestError(message, param="metadata") from error
    messages = [_with_id(message, f"{request_id}-{index}") for index, message in enumerate(body.messages)]
    return ChatToStore(msgspec.json.encode(messages), metadata)


def _with_id(message: Mapping[str, Any], message_id: str) -> dict[str, Any]:
    """Return a message as the API lists it: content in parts goes to `content_parts`, and `content` is null."""
    content = message.get("content")
    listed = {"content": None, **message, "id": message_id}
    return {**listed, "content": None, "content_parts": content} if isinstance(content, list) else listed


def _piece(piece: bytes) -> str | list[int]:
    """Return a token's bytes as text if they are valid UTF-8, else as numbers."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
