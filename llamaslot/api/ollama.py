"""Ollama's API: chats and texts, streamed as lines of JSON, vectors, and what its clients ask about the model.

Errors in Ollama's form are in `http_errors.py`.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from llamaslot.api import http_errors
from llamaslot.api.bodies import LATER, encode, joined_lists, json_response, list_of, read, with_values
from llamaslot.api.context import LOADING_S, READINESS, started
from llamaslot.api.embeddings import VectorWriter, numbers_of
from llamaslot.api.generation.reply_parts import CacheUse, Prob, ProbsWriter, cache_use
from llamaslot.api.generation.request_handling import ReplyWriter, complete, end_reason
from llamaslot.api.sse import JSON_LINES, json_line
from llamaslot.base.errors import LlamaslotError
from llamaslot.base.events import Finished, Output, Progress
from llamaslot.base.model import CPU, ModelInfo
from llamaslot.base.tokens import ids_of
from llamaslot.formats.calls import Delta, is_object
from llamaslot.service.live_request import Completion, LiveRequest
from llamaslot.service.models import ServedModel
from llamaslot.service.service import Service

API_VERSION = "0.12.11"
"""Version of Ollama whose API this is; clients compare it with the one that they need."""
_LATEST = "latest"
"""Tag that Ollama's clients add to a name without one."""
_NEVER = datetime.max.replace(microsecond=0, tzinfo=UTC)
_NS_PER_MS = 1e6
_TOKENS_PER_PIECE = 4096
"""Tokens of a `context` that are encoded at a time."""

DoneReason: TypeAlias = Literal["stop", "length", "load"]


class OllamaFunction(msgspec.Struct):
    """The function of a call; the arguments are an object."""

    index: int
    name: str
    arguments: msgspec.Raw


class OllamaCall(msgspec.Struct):
    """A call of a tool."""

    function: OllamaFunction


class OllamaMessage(msgspec.Struct, kw_only=True):
    """A message by the assistant, or a part of it, in which calls are whole."""

    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaReply(msgspec.Struct, kw_only=True):
    """Fields of replies and their parts; the last part has the durations, in nanoseconds, and `cache`."""

    model: str
    created_at: datetime
    done: bool = False
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    """From the time when the engine got the request until it got a slot; loading the model comes before that."""
    prompt_eval_count: int | UnsetType = UNSET
    """Tokens of the prompt, cached or not."""
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    cache: CacheUse | UnsetType = UNSET
    logprobs: list[Prob] | UnsetType = UNSET


class OllamaChatReply(OllamaReply, kw_only=True):
    """A reply of `/api/chat`, or a part of it."""

    message: OllamaMessage


class OllamaGenerateReply(OllamaReply, kw_only=True):
    """A reply of `/api/generate`, or a part of it."""

    response: str
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET
    """The tokens of the prompt and the reply, if the chat template was applied."""


class OllamaEmbedReply(msgspec.Struct, kw_only=True):
    """Vectors, with the durations in nanoseconds unless there was nothing to embed."""

    model: str
    embeddings: Sequence[Sequence[float]]
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    """As in `OllamaReply`."""
    prompt_eval_count: int | UnsetType = UNSET


class OllamaEmbeddingsReply(msgspec.Struct):
    """A vector in the older form; without numbers if there was nothing to embed."""

    embedding: Sequence[float]


async def chat(request: web.Request) -> web.StreamResponse:
    """Complete a conversation in Ollama's format."""
    return await complete(request, "ollama_chat", OllamaChatWriter)


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer a question, or complete a text, in Ollama's format."""
    return await complete(request, "ollama_generate", OllamaGenerateWriter)


async def embed(request: web.Request) -> web.StreamResponse:
    """Return the vectors of texts in Ollama's format."""
    return await complete(request, "ollama_embed", OllamaEmbedWriter)


async def embeddings(request: web.Request) -> web.StreamResponse:
    """Return the vector of a text in Ollama's older format."""
    return await complete(request, "ollama_embeddings", OllamaEmbeddingsWriter)


class OllamaEmbedWriter(VectorWriter):
    """Writes the replies of `/api/embed`."""

    def __init__(self, request: web.Request, service: Service, live: LiveRequest) -> None:
        super().__init__(request, service, live)
        self._live = live

    def whole(self) -> Iterator[bytes]:
        """Yield the vectors, or none of a request without inputs."""
        form, end = self.options.vectors, self._live.end
        assert form is not None
        reply = OllamaEmbedReply(model=form.model or _with_tag(self.model), embeddings=LATER)
        if end is not None and end.progress is not None:
            durations = _durations(end.progress, self.request)
            reply.total_duration, reply.load_duration = durations["total_duration"], durations["load_duration"]
            reply.prompt_eval_count = durations["prompt_eval_count"]
        return with_values(reply, list_of(self.piece(numbers_of(each)) for each in self.completions))


class OllamaEmbeddingsWriter(VectorWriter):
    """Writes the replies of `/api/embeddings`."""

    def whole(self) -> Iterator[bytes]:
        """Yield the vector, or none of a request without a prompt."""
        return self.piece(OllamaEmbeddingsReply(numbers_of(self.completions[0]) if self.completions else ()))


class OllamaReplyWriter(ReplyWriter):
    """Writes Ollama's replies; each is of one completion, or of none if the model was only to be loaded."""

    content_type = JSON_LINES
    probs_fields = ("options.num_predict", "top_logprobs")

    def __init__(self, request: web.Request, service: Service, live: LiveRequest) -> None:
        super().__init__(request, service, live)
        self.model = self.options.model or _with_tag(self.model)
        # A comment would not be JSON: an empty part keeps the connection open.
        self.ping = b"".join(json_line([encode(self._part(Delta(), ()))]))
        is_chat = bool(live.completions) and not self.options.is_text
        self._message = self.new_message(live.completions[0]) if is_chat else None
        self._n_calls = 0
        """Calls that were written."""

    @abstractmethod
    def _part(self, added: Delta, calls: Sequence[OllamaCall], **fields: Any) -> OllamaReply:
        """Return a reply, or a part of one, with this text."""

    def _context(self, completion: Completion) -> Iterator[bytes] | None:
        """Return the JSON of what the last part has as `context`; None for nothing."""
        return None

    def events(self, completion: Completion, output: Output | Finished) -> Iterator[bytes]:
        """Yield new text, reasoning and calls, and at the end everything else."""
        added, calls = self._added(output.content, output)
        probs = self.probs_writers[0].native(output.probs or ())
        if added.content or added.reasoning or calls or probs:
            yield from json_line([encode(self._part(added, calls, logprobs=probs or UNSET))])
        if isinstance(output, Finished):
            yield from json_line(self._last(completion, Delta(), ()))

    def failure(self, error: LlamaslotError) -> Iterator[bytes]:
        """Yield the error as the last line."""
        yield from json_line([http_errors.body(error, self.request)])

    def whole(self) -> Iterator[bytes]:
        """Yield the whole reply."""
        if not self.completions:
            yield encode(self._part(Delta(), (), done=True, done_reason="load"))
            return
        (completion,) = self.completions
        added, calls = self._added(completion.text, completion.end)
        probs = ProbsWriter(completion.params).native_later(completion.probs) if completion.has_probs else None
        yield from self._last(completion, added, calls, probs)

    def _added(self, text: str, event: Output | Finished) -> tuple[Delta, list[OllamaCall]]:
        """Add text to the message; return what that adds, and the calls that are complete now."""
        if self._message is None:
            return Delta(text), []
        end = end_reason(event)
        added = self._message.push(text, end)
        if end is None and all(part.name is None for part in added.tool_calls):
            return added, []
        # The last one is complete at the end, the others once the next one begins.
        calls = self._message.calls
        n_before, self._n_calls = self._n_calls, len(calls) - (end is None)
        return added, [
            OllamaCall(OllamaFunction(index, call.name, _one_line(call.arguments)))
            for index, call in enumerate(calls[n_before : self._n_calls], n_before)
            # One that is cut must not be run.
            if is_object(call.arguments)
        ]

    def _last(
        self,
        completion: Completion,
        added: Delta,
        calls: Sequence[OllamaCall],
        probs: Iterable[bytes] | None = None,
    ) -> Iterator[bytes]:
        """Yield the last part of a reply, with this text."""
        end, later = completion.end, list[Iterable[bytes]]()
        reason = self._message.reason if self._message is not None else end.reason
        fields: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if reason == "limit" else "stop",
            **_durations(end.progress, self.request),
            "cache": cache_use(end.progress),
        }
        if probs is not None:
            fields["logprobs"] = LATER
            later.append(probs)
        if (context := self._context(completion)) is not None:
            fields["context"] = LATER
            later.append(context)
        yield from with_values(self._part(added, calls, **fields), *later)


class OllamaChatWriter(OllamaReplyWriter):
    """Writes the replies of `/api/chat`."""

    id_prefix = "chatcmpl-"

    def _part(self, added: Delta, calls: Sequence[OllamaCall], **fields: Any) -> OllamaReply:
        message = OllamaMessage(
            content=added.content, thinking=added.reasoning or UNSET, tool_calls=list(calls) or UNSET
        )
        return OllamaChatReply(model=self.model, created_at=datetime.now(UTC), message=message, **fields)


class OllamaGenerateWriter(OllamaReplyWriter):
    """Writes the replies of `/api/generate`."""

    id_prefix = "cmpl-"

    def __init__(self, request: web.Request, service: Service, live: LiveRequest) -> None:
        super().__init__(request, service, live)
        self._tokens = array("i")
        """Tokens of a stream so far."""

    def events(self, completion: Completion, output: Output | Finished) -> Iterator[bytes]:
        """Yield the parts of an event."""
        self._tokens.extend(output.tokens)
        return super().events(completion, output)

    def _context(self, completion: Completion) -> Iterator[bytes] | None:
        if self.options.is_text:
            return None
        generated = self._tokens if self.options.stream else completion.tokens
        # Tokens of images stand for nothing without their images, which would have to come back too.
        tokens = [*(token for token in ids_of(completion.prompt.packed_tokens) if token >= 0), *generated]
        return joined_lists(
            tokens[start : start + _TOKENS_PER_PIECE] for start in range(0, len(tokens), _TOKENS_PER_PIECE)
        )

    def _part(self, added: Delta, calls: Sequence[OllamaCall], **fields: Any) -> OllamaReply:
        return OllamaGenerateReply(
            model=self.model,
            created_at=datetime.now(UTC),
            response=added.content,
            thinking=added.reasoning or UNSET,
            **fields,
        )


def _one_line(arguments: str) -> msgspec.Raw:
    """Return arguments without line breaks, which a model may have written between them."""
    return msgspec.Raw(msgspec.json.format(arguments.encode(), indent=-1))


def _durations(progress: Progress, request: web.Request) -> dict[str, int]:
    """Return counts, and durations of at least a nanosecond, because clients divide by them."""
    times = (1e3 * request[LOADING_S] + progress.queue_ms, progress.prompt_ms, progress.predicted_ms)
    load, prompt, predicted = (max(round(ms * _NS_PER_MS), 1) for ms in times)
    return {
        "total_duration": load + prompt + predicted,
        "load_duration": load,
        "prompt_eval_count": progress.n_prompt,
        "prompt_eval_duration": prompt,
        "eval_count": progress.n_generated,
        "eval_duration": predicted,
    }


class OllamaDetails(msgspec.Struct, kw_only=True):
    """Facts about the model's file."""

    parent_model: str = ""
    format: Literal["gguf"] = "gguf"
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaListed(msgspec.Struct, kw_only=True):
    """The model in a list."""

    name: str
    model: str
    size: int
    digest: str
    """Identifies the file by its name, size and number of parameters."""
    details: OllamaDetails
    modified_at: datetime
    """Start of the server."""
    capabilities: list[str]


class OllamaLoaded(msgspec.Struct, kw_only=True):
    """The model in the list of those in memory."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: datetime
    size_vram: int
    context_length: int
    """Tokens that one slot can hold."""


class OllamaModels(msgspec.Struct):
    """The list of models, which has one."""

    models: list[OllamaListed]


class OllamaRunning(msgspec.Struct):
    """The list of models in memory, which has one or none."""

    models: list[OllamaLoaded]


class OllamaShown(msgspec.Struct, kw_only=True):
    """The model in detail."""

    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    """Under the names of GGUF; the length of the context is that of a slot."""
    capabilities: list[str]
    modified_at: datetime


class OllamaVersion(msgspec.Struct):
    """The version of the API."""

    version: str


class OllamaShowBody(msgspec.Struct, kw_only=True):
    """`POST /api/show`: any name stands for the one model."""

    model: str | None = None
    name: str | None = None


async def tags(request: web.Request) -> web.Response:
    """Return the models in Ollama's list."""
    models = request.app[READINESS].check().all
    return json_response(
        OllamaModels(
            [
                OllamaListed(**_identity(each), modified_at=_modified(), capabilities=_capabilities(each))
                for each in models
            ]
        )
    )


async def ps(request: web.Request) -> web.Response:
    """Return the models that are loaded in Ollama's list of those in memory."""
    loaded = [each for each in request.app[READINESS].check().all if each.is_ready and each.info is not None]
    return json_response(
        OllamaRunning(
            [
                OllamaLoaded(
                    **_identity(each),
                    expires_at=_NEVER,
                    size_vram=0 if info.device == CPU else info.size_bytes,
                    context_length=info.n_ctx_slot,
                )
                for each in loaded
                if (info := each.info) is not None
            ]
        )
    )


async def show(request: web.Request) -> web.Response:
    """Return what Ollama's clients need to know of a model: its template, its context, what it can do."""
    body = await read(request, OllamaShowBody)
    model = request.app[READINESS].check().find(body.model or body.name or "")
    info = model.info
    facts: dict[str, str | int] = {}
    if info is not None:
        facts = {
            "general.architecture": info.architecture,
            "general.basename": info.name,
            "general.parameter_count": info.n_params,
            f"{info.architecture}.context_length": info.n_ctx_slot,
            f"{info.architecture}.embedding_length": info.n_embd,
        }
    return json_response(
        OllamaShown(
            parameters=f"{'num_ctx':<30} {info.n_ctx_slot}" if info is not None else "",
            template=model.service.chat_template if model.service is not None else "",
            details=_details(info),
            model_info=facts,
            capabilities=_capabilities(model),
            modified_at=_modified(),
        )
    )


async def version(request: web.Request) -> web.Response:
    """Return the version of Ollama whose API this is."""
    return json_response(OllamaVersion(API_VERSION))


def _identity(model: ServedModel) -> dict[str, Any]:
    info = model.info
    facts = f"{model.id} {info.architecture} {info.n_params} {info.size_bytes}" if info is not None else model.id
    return {
        "name": _with_tag(model.id),
        "model": _with_tag(model.id),
        "size": info.size_bytes if info is not None else model.file_bytes,
        # Clients show the first twelve digits, and some fail if there are fewer.
        "digest": hashlib.sha256(facts.encode(errors="replace")).hexdigest(),
        "details": _details(info),
    }


def _details(info: ModelInfo | None) -> OllamaDetails:
    """Return what is known of a model's format; little before it was loaded for the first time."""
    if info is None:
        return OllamaDetails(family="", families=[], parameter_size="", quantization_level="")
    # As in `llama 8B Q4_K - Medium`.
    _, size, kind = (*info.description.split(maxsplit=2), "", "", "")[:3]
    kind, _, variant = kind.partition(" - ")
    if variant in ("Small", "Medium", "Large"):
        kind += f"_{variant[0]}"
    return OllamaDetails(
        family=info.architecture,
        families=[info.architecture],
        parameter_size=size,
        quantization_level=kind,
    )


def _capabilities(model: ServedModel) -> list[str]:
    """Return what a model does here; tools are told to every model that generates text."""
    if model.task != "completion":
        # Ollama reranks nothing, so it has no word for that.
        return ["embedding"] if model.task == "embedding" else []
    found = ["completion", "tools"]
    if model.info is not None and model.info.projector is not None:
        found.append("vision")
    if model.info is not None and model.info.fim is not None:
        found.append("insert")
    if model.service is not None and model.service.output_format.reasoning is not None:
        found.append("thinking")
    return found


def _with_tag(name: str) -> str:
    """Return a name as Ollama lists it, which always has a tag."""
    return name if ":" in name else f"{name}:{_LATEST}"


def _modified() -> datetime:
    return datetime.fromtimestamp(started(), UTC)
