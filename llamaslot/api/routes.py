"""The endpoints: routes with their handlers, access, and types, and `GET /openapi.json`, which describes them.

Where an endpoint encodes a struct, that struct is used. The types here stand for replies that are put together as
mappings; a test decodes real replies with them, and unknown fields are errors.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType, structs

from llamaslot import __version__
from llamaslot.api import anthropic, cache_endpoints, embeddings, ollama, server_endpoints
from llamaslot.api.bodies import MAX_LIMIT, ListReply
from llamaslot.api.completions import native_completion as native
from llamaslot.api.completions import openai_completions as openai
from llamaslot.api.completions import stored_chats
from llamaslot.api.completions.native_completion import generation_settings
from llamaslot.api.completions.openai_completions import ChatChoice, ChatChunkChoice, Envelope, TextChoice
from llamaslot.api.credentials import Access
from llamaslot.api.generation.reply_parts import CacheUse, Prob, PromptProgress, Timings, TokenCount
from llamaslot.api.http_errors import AnthropicError, ErrorBody, Handler, OllamaError, is_anthropic, is_ollama
from llamaslot.api.middleware import SESSION_HEADERS
from llamaslot.api.model_choice import Requires
from llamaslot.api.responses import bodies as response_types
from llamaslot.api.responses import responses
from llamaslot.api.responses.responses import LLAMA_SERVER_PATH, N_FIRST, Compaction
from llamaslot.api.sse import EVENTS, JSON_LINES
from llamaslot.base.advice import CacheAdvice
from llamaslot.base.commands import CacheCleared, ContextShift
from llamaslot.base.events import FinishReason
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.model import Capabilities, SelfTestOutcome
from llamaslot.base.stats import CacheProbe, CacheState, Warmed
from llamaslot.protocol import bodies
from llamaslot.protocol.anthropic import CountTokensBody, MessagesBody
from llamaslot.protocol.ollama import OllamaChatBody, OllamaEmbedBody, OllamaEmbeddingsBody, OllamaGenerateBody
from llamaslot.protocol.responses import ResponsesBody
from llamaslot.service.activity import PrefixesUpdate, RequestUpdate, StateUpdate


class ChatReply(Envelope, kw_only=True):
    """A chat completion."""

    choices: Sequence[ChatChoice]


class StoredChatReply(ChatReply, kw_only=True):
    """A stored chat completion."""

    metadata: dict[str, str]


class ChatChunk(Envelope, kw_only=True):
    """An event of a streamed chat completion."""

    choices: Sequence[ChatChunkChoice]


class TextReply(Envelope, kw_only=True):
    """A text completion in OpenAI's format, or an event of a streamed one."""

    choices: Sequence[TextChoice]


_SETTINGS = [(name, type(value)) for name, value in generation_settings(Sampling(), -1, ContextShift()).items()]
GenerationSettings = msgspec.defstruct("GenerationSettings", _SETTINGS, kw_only=True, forbid_unknown_fields=True)
"""Settings of a request that reveal nothing of its text."""
DefaultParams = msgspec.defstruct(
    "DefaultParams", [("stream", bool)], bases=(GenerationSettings,), kw_only=True, forbid_unknown_fields=True
)


class TokenBias(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of `logit_bias`; a bias of minus infinity is null."""

    token: int
    bias: float | None


RequestSettings = msgspec.defstruct(
    "RequestSettings",
    [
        ("stop", list[str]),
        ("logit_bias", list[TokenBias]),
        ("grammar", str),
        ("dry_sequence_breakers", list[str]),
        ("stream", bool),
        ("timings_per_token", bool),
    ],
    bases=(GenerationSettings,),
    kw_only=True,
    forbid_unknown_fields=True,
)
"""The settings of a request as its own client sees them."""


class NativeReply(msgspec.Struct, forbid_unknown_fields=True):
    """A text completion in llama-server's format, or the last event of a streamed one."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: Literal[True]
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: RequestSettings  # type: ignore[valid-type]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: FinishReason
    stopping_word: str
    tokens_cached: int
    timings: Timings
    cache: CacheUse
    completion_probabilities: list[Prob] | UnsetType = UNSET


class NativeChunk(msgspec.Struct, forbid_unknown_fields=True):
    """An event of a streamed text completion in llama-server's format."""

    index: int
    content: str
    tokens: list[int]
    stop: Literal[False]
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    completion_probabilities: list[Prob] | UnsetType = UNSET


class Health(msgspec.Struct, forbid_unknown_fields=True):
    """The reply of a server that is ready."""

    status: Literal["ok"]


class ModelMeta(msgspec.Struct, forbid_unknown_fields=True):
    """llama-server's facts about a model."""

    vocab_type: int
    n_vocab: int
    n_ctx: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int


class ModelStatus(msgspec.Struct, forbid_unknown_fields=True):
    """State of one of several models, as in llama-server."""

    value: Literal["unloaded", "loading", "loaded", "sleeping"]
    failed: bool = False
    reason: str = ""
    """Why it could not be loaded."""


class Modalities(msgspec.Struct, forbid_unknown_fields=True):
    """Kinds of input and output of a model, as in the lists of llama-server's router."""

    input_modalities: list[Literal["text", "image"]]
    output_modalities: list[Literal["text"]]


class Model(msgspec.Struct, forbid_unknown_fields=True):
    """A model in OpenAI's format."""

    id: str
    aliases: list[str]
    tags: list[str]
    object: Literal["model"]
    created: int
    owned_by: str
    architecture: Modalities
    meta: ModelMeta | UnsetType = UNSET
    """Unknown until the model is loaded for the first time."""
    status: ModelStatus | UnsetType = UNSET
    """If the server may have several models."""


class OllamaModel(msgspec.Struct, forbid_unknown_fields=True):
    """A model in Ollama's format."""

    name: str
    model: str
    type: str
    description: str
    capabilities: list[str]
    details: dict[str, str]


class Models(msgspec.Struct, forbid_unknown_fields=True):
    """The list of models."""

    object: Literal["list"]
    data: list[Model]
    models: list[OllamaModel]


class DefaultSettings(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of a request that sets none."""

    n_ctx: int
    params: DefaultParams  # type: ignore[valid-type]


class CheckpointProps(msgspec.Struct, forbid_unknown_fields=True):
    """Checkpoints, by which prefixes of a model with a partial state are reused."""

    checkpoint_bytes: int
    """Bytes of the largest one."""
    total_bytes: int
    """Bytes of RAM for all of them."""
    max_per_path: int
    """Checkpoints of one conversation at most."""
    interval_tokens: int
    """Tokens between two of a long prompt."""


class PrefixReuse(msgspec.Struct, forbid_unknown_fields=True):
    """Reuse of prefixes by this model."""

    enabled: bool
    reason: str
    """Why every prompt is computed in full; empty if `enabled`."""
    self_test: SelfTestOutcome
    """Outcome of the self-test of reuse; empty for models that need none."""
    state: Capabilities
    checkpoints: CheckpointProps | None
    """None where none are taken."""


class Props(msgspec.Struct, forbid_unknown_fields=True):
    """The server's properties."""

    default_generation_settings: DefaultSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    media_marker: str
    """The place of an image in a `prompt_string`."""
    endpoint_slots: bool
    endpoint_props: bool
    endpoint_metrics: bool
    chat_template: str
    chat_format: str
    """Name of the format in which the model writes reasoning and tool calls."""
    pooling: str
    """Pooling of a server of embeddings or scores; empty for one that generates text."""
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool
    prefix_reuse: PrefixReuse


class RouterProps(msgspec.Struct, forbid_unknown_fields=True):
    """The properties of a server of several models; `?model=` gives those of one."""

    role: Literal["router"]
    max_instances: int
    """Models that are loaded at once at most."""
    models_autoload: bool
    build_info: str


class NextToken(msgspec.Struct, forbid_unknown_fields=True):
    """Progress of a slot's request."""

    has_next_token: bool
    n_remain: int
    n_decoded: int


class Slot(msgspec.Struct, forbid_unknown_fields=True):
    """State of a slot; the last fields are those of its request."""

    id: int
    n_ctx: int
    n_held: int
    speculative: bool
    is_processing: bool
    next_token: list[NextToken]
    request_id: str | UnsetType = UNSET
    n_prompt_tokens: int | UnsetType = UNSET
    n_prompt_tokens_processed: int | UnsetType = UNSET
    params: GenerationSettings | UnsetType = UNSET  # type: ignore[valid-type]


class SlotActionReply(msgspec.Struct, forbid_unknown_fields=True):
    """Result of a slot action, with the fields of its kind."""

    id_slot: int
    filename: str | UnsetType = UNSET
    n_saved: int | UnsetType = UNSET
    n_written: int | UnsetType = UNSET
    n_restored: int | UnsetType = UNSET
    n_read: int | UnsetType = UNSET
    n_erased: int | UnsetType = UNSET
    timings: dict[str, float] | UnsetType = UNSET


class SessionDropped(msgspec.Struct, forbid_unknown_fields=True):
    """Result of dropping a session."""

    id: str
    deleted: Literal[True]
    dropped_tokens: int
    dropped_ram_tokens: int
    dropped_disk_tokens: int


class TokenPiece(msgspec.Struct, forbid_unknown_fields=True):
    """A token with its text, or with its bytes if they are not valid UTF-8."""

    id: int
    piece: str | list[int]


class TokenizeReply(msgspec.Struct, forbid_unknown_fields=True):
    """The tokens of a text."""

    tokens: list[int | TokenPiece]
    count: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    """In vLLM's form."""
    token_strs: list[str] | UnsetType = UNSET
    """The text of each token, if `return_token_strs` asks for it."""


class DetokenizeReply(msgspec.Struct, forbid_unknown_fields=True):
    """The text of tokens, by llama-server's name and by vLLM's."""

    content: str
    prompt: str


class TemplateReply(msgspec.Struct, forbid_unknown_fields=True):
    """The prompt of a conversation."""

    prompt: str


PATH = "/openapi.json"
_ERROR = "Error"
_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
_IS_VARIABLE = re.compile(r"\{(\w+)(?::[^}]*)?\}")
JSON: Final = "application/json"
_STRING = {"type": "string"}


class Route(msgspec.Struct, frozen=True):
    """An endpoint, with the types that its replies and its body may have; `chunks` are those of streamed events."""

    method: str
    path: str
    handler: Handler
    replies: tuple[Any, ...]
    bodies: tuple[Any, ...] = ()
    chunks: tuple[Any, ...] = ()
    parameters: tuple[dict[str, Any], ...] = ()
    alias: str = ""
    """Another path, as in llama-server."""
    access: Access = Access.USER
    """The access that it requires."""
    body_required: bool = True
    content_type: str = JSON
    """The reply's."""
    stream_type: str = EVENTS
    """That of a reply in `chunks`."""
    requires: Requires = Requires.MODEL
    """Its requirement on the model."""

    @property
    def error(self) -> Any:
        """The type of its errors."""
        if is_ollama(self.path):
            return OllamaError
        return AnthropicError if is_anthropic(self.path) else ErrorBody


async def openapi(request: web.Request) -> web.Response:
    """Return this description of the API."""
    return web.Response(body=_encoded(), content_type=JSON)


@cache
def _encoded() -> bytes:
    """Return the description as JSON; not made before it is asked for, so that it delays no start."""
    return msgspec.json.encode(document(ROUTES))


def _parameter(name: str, place: str, schema: Mapping[str, Any], *, required: bool = False) -> dict[str, Any]:
    """Return a parameter of the path, the query or a header, in OpenAPI's form."""
    return {"name": name, "in": place, "required": required, "schema": schema}


def _page(min_limit: int) -> tuple[dict[str, Any], ...]:
    """Return the parameters of a list."""
    return (
        _parameter("limit", "query", {"type": "integer", "minimum": min_limit, "maximum": MAX_LIMIT}),
        _parameter("order", "query", {"enum": ["asc", "desc"]}),
        _parameter("after", "query", _STRING),
    )


_SESSION = tuple(_parameter(name, "header", _STRING) for name in SESSION_HEADERS)
"""Only the first one that a request has is read: the others may be of any length."""
_ACTION = _parameter("action", "query", {"enum": ["save", "restore", "erase"]}, required=True)
_TOP = _parameter("top", "query", {"type": "integer", "minimum": 1, "maximum": cache_endpoints.MAX_TOP})
_MODEL = _parameter("model", "query", _STRING)
"""Names the model where a server has several, and no body names it."""
_TIER = _parameter("tier", "query", {"enum": ["pool", "ram", "disk"]})
_NO_SLOT = _parameter("fail_on_no_slot", "query", _STRING)
_STREAM = (
    _parameter("stream", "query", {"type": "boolean"}),
    _parameter("starting_after", "query", {"type": "integer", "minimum": 0, "maximum": N_FIRST - 1}),
)
PickedFields: TypeAlias = dict[str, Any]
"""A reply of `/completion` that has the fields of `response_fields` only."""
_NATIVE = (NativeReply, list[NativeReply], PickedFields, list[PickedFields])
_NATIVE_CHUNKS = (NativeChunk, NativeReply, PickedFields)
_RESPONSE = (response_types.Response,)
_EVENTS = get_args(response_types.AnyEvent)
_CHAT, _TEXT, _INFILL = (bodies.ChatBody,), (bodies.CompletionBody,), (bodies.InfillBody,)
_ANY = (*_CHAT, *_TEXT, MessagesBody, ResponsesBody)
_CHATS = "/v1/chat/completions"
_CHAT_BY_ID, _RESPONSE_BY_ID = f"{_CHATS}/{{completion_id}}", "/v1/responses/{response_id}"
_MESSAGE = (anthropic.AnthropicMessage,)
_ITEMS = (ListReply[dict[str, Any]],)
_EMBEDDING = (bodies.EmbeddingBody,)
_NATIVE_EMBEDDINGS = list[embeddings.NativeEmbedding]
_RANKS = (embeddings.RerankReply, list[embeddings.TeiRank])

_ROUTES = (
    Route(
        "GET",
        "/health",
        server_endpoints.health,
        (Health,),
        alias="/v1/health",
        access=Access.PUBLIC,
        requires=Requires.NOTHING,
    ),
    Route("GET", "/v1/models", server_endpoints.models, (Models,), alias="/models", requires=Requires.NOTHING),
    Route("GET", "/v1/models/{name:.+}", server_endpoints.model, (Model,), requires=Requires.NOTHING),
    Route(
        "POST",
        "/models/load",
        server_endpoints.load,
        (server_endpoints.Success,),
        (server_endpoints.ModelBody,),
        access=Access.ADMIN,
        requires=Requires.NOTHING,
    ),
    Route(
        "POST",
        "/models/unload",
        server_endpoints.unload,
        (server_endpoints.Success,),
        (server_endpoints.ModelBody,),
        access=Access.ADMIN,
        requires=Requires.NOTHING,
    ),
    Route(
        "GET",
        "/props",
        server_endpoints.props,
        (Props, RouterProps),
        parameters=(_MODEL,),
        requires=Requires.NOTHING,
    ),
    Route(
        "GET",
        "/slots",
        cache_endpoints.slots,
        (list[Slot],),
        parameters=(_NO_SLOT, _MODEL),
        requires=Requires.PROCESSES,
    ),
    Route(
        "GET",
        "/cache",
        cache_endpoints.cache,
        (CacheState,),
        parameters=(_TOP, _MODEL),
        requires=Requires.PROCESSES,
    ),
    Route(
        "GET",
        "/cache/advice",
        cache_endpoints.advice,
        (CacheAdvice,),
        parameters=(_MODEL,),
        access=Access.ADMIN,
        requires=Requires.PROCESSES,
    ),
    Route(
        "GET",
        "/metrics",
        server_endpoints.metrics,
        (str,),
        parameters=(_MODEL,),
        content_type="text/plain",
        requires=Requires.PROCESSES,
    ),
    Route(
        "GET",
        "/events",
        cache_endpoints.events,
        (str,),
        chunks=(StateUpdate, PrefixesUpdate, RequestUpdate),
        parameters=(_TOP, _MODEL),
        access=Access.ADMIN,
        content_type=EVENTS,
        requires=Requires.PROCESSES,
    ),
    Route("GET", PATH, openapi, (dict[str, Any],), requires=Requires.NOTHING),
    Route(
        "POST",
        _CHATS,
        openai.chat_completions,
        (ChatReply,),
        _CHAT,
        (ChatChunk,),
        _SESSION,
        alias="/chat/completions",
        requires=Requires.COMPLETION,
    ),
    Route(
        "POST",
        f"{_CHATS}/input_tokens",
        openai.count_tokens,
        (TokenCount,),
        _CHAT,
        parameters=_SESSION,
        alias="/chat/completions/input_tokens",
    ),
    Route(
        "GET",
        _CHATS,
        stored_chats.list_chats,
        (ListReply[StoredChatReply],),
        parameters=(*_page(0), _parameter("model", "query", _STRING)),
        requires=Requires.ANY_PROCESSES,
    ),
    Route("GET", _CHAT_BY_ID, stored_chats.retrieve, (StoredChatReply,), requires=Requires.NOTHING),
    Route(
        "POST",
        _CHAT_BY_ID,
        stored_chats.update,
        (StoredChatReply,),
        (bodies.StoredChatBody,),
        requires=Requires.NOTHING,
    ),
    Route("DELETE", _CHAT_BY_ID, stored_chats.delete, (stored_chats.ChatDeleted,), requires=Requires.NOTHING),
    Route(
        "GET",
        f"{_CHAT_BY_ID}/messages",
        stored_chats.list_messages,
        _ITEMS,
        parameters=_page(0),
        requires=Requires.ANY_PROCESSES,
    ),
    Route(
        "POST",
        "/v1/responses",
        responses.create,
        _RESPONSE,
        (ResponsesBody,),
        _EVENTS,
        _SESSION,
        alias=LLAMA_SERVER_PATH,
        requires=Requires.COMPLETION,
    ),
    Route(
        "POST",
        "/v1/responses/input_tokens",
        responses.count,
        (response_types.InputTokens,),
        (ResponsesBody,),
        parameters=_SESSION,
    ),
    Route(
        "POST",
        "/v1/responses/compact",
        responses.compact,
        (Compaction,),
        (ResponsesBody,),
        (),
        _SESSION,
        requires=Requires.COMPLETION,
    ),
    Route("POST", f"{_RESPONSE_BY_ID}/cancel", responses.cancel, _RESPONSE, requires=Requires.NOTHING),
    Route("GET", _RESPONSE_BY_ID, responses.retrieve, _RESPONSE, (), _EVENTS, _STREAM, requires=Requires.NOTHING),
    Route("DELETE", _RESPONSE_BY_ID, responses.delete, (response_types.Deleted,), requires=Requires.NOTHING),
    Route(
        "GET",
        f"{_RESPONSE_BY_ID}/input_items",
        responses.input_items,
        _ITEMS,
        parameters=_page(1),
        requires=Requires.ANY_PROCESSES,
    ),
    Route(
        "POST",
        "/v1/completions",
        openai.completions,
        (TextReply,),
        _TEXT,
        (TextReply,),
        _SESSION,
        requires=Requires.COMPLETION,
    ),
    Route(
        "POST",
        "/v1/messages",
        anthropic.messages,
        _MESSAGE,
        (MessagesBody,),
        (anthropic.Event,),
        _SESSION,
        requires=Requires.COMPLETION,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        anthropic.count_tokens,
        (TokenCount,),
        (CountTokensBody,),
        parameters=_SESSION,
    ),
    Route(
        "POST",
        "/api/chat",
        ollama.chat,
        (ollama.OllamaChatReply,),
        (OllamaChatBody,),
        (ollama.OllamaChatReply,),
        _SESSION,
        stream_type=JSON_LINES,
        requires=Requires.COMPLETION,
    ),
    Route(
        "POST",
        "/api/generate",
        ollama.generate,
        (ollama.OllamaGenerateReply,),
        (OllamaGenerateBody,),
        (ollama.OllamaGenerateReply,),
        _SESSION,
        stream_type=JSON_LINES,
        requires=Requires.COMPLETION,
    ),
    Route(
        "POST",
        "/api/embed",
        ollama.embed,
        (ollama.OllamaEmbedReply,),
        (OllamaEmbedBody,),
        requires=Requires.EMBEDDING,
    ),
    Route(
        "POST",
        "/api/embeddings",
        ollama.embeddings,
        (ollama.OllamaEmbeddingsReply,),
        (OllamaEmbeddingsBody,),
        requires=Requires.EMBEDDING,
    ),
    Route(
        "POST", "/api/show", ollama.show, (ollama.OllamaShown,), (ollama.OllamaShowBody,), requires=Requires.NOTHING
    ),
    Route("GET", "/api/tags", ollama.tags, (ollama.OllamaModels,), requires=Requires.NOTHING),
    Route("GET", "/api/ps", ollama.ps, (ollama.OllamaRunning,), requires=Requires.NOTHING),
    Route("GET", "/api/version", ollama.version, (ollama.OllamaVersion,), requires=Requires.NOTHING),
    Route(
        "POST",
        "/completion",
        native.completion,
        _NATIVE,
        _TEXT,
        _NATIVE_CHUNKS,
        _SESSION,
        alias="/completions",
        requires=Requires.COMPLETION,
    ),
    Route(
        "POST", "/infill", native.infill, _NATIVE, _INFILL, _NATIVE_CHUNKS, _SESSION, requires=Requires.COMPLETION
    ),
    Route(
        "POST",
        "/v1/embeddings",
        embeddings.embeddings,
        (embeddings.EmbeddingsReply, _NATIVE_EMBEDDINGS),
        _EMBEDDING,
        requires=Requires.EMBEDDING,
    ),
    Route(
        "POST",
        "/embedding",
        embeddings.native_embedding,
        (_NATIVE_EMBEDDINGS,),
        _EMBEDDING,
        alias="/embeddings",
        requires=Requires.EMBEDDING,
    ),
    Route(
        "POST",
        "/v1/rerank",
        embeddings.rerank,
        _RANKS,
        (bodies.RerankBody,),
        alias="/v1/reranking",
        requires=Requires.RERANK,
    ),
    Route(
        "POST",
        "/rerank",
        embeddings.rerank,
        _RANKS,
        (bodies.RerankBody,),
        alias="/reranking",
        requires=Requires.RERANK,
    ),
    Route("POST", "/apply-template", server_endpoints.apply_template, (TemplateReply,), _CHAT),
    Route(
        "POST",
        "/cache/clear",
        cache_endpoints.clear,
        (CacheCleared,),
        parameters=(_TIER, _MODEL),
        access=Access.ADMIN,
        requires=Requires.PROCESSES,
    ),
    Route(
        "POST",
        "/cache/probe",
        cache_endpoints.probe,
        (CacheProbe,),
        _ANY,
        (),
        _SESSION,
        requires=Requires.PROCESSES,
    ),
    Route(
        "POST",
        "/cache/warm",
        cache_endpoints.warm,
        (Warmed,),
        (*_ANY, bodies.AnyBody),
        parameters=_SESSION,
    ),
    Route(
        "POST",
        "/slots/{id_slot}",
        cache_endpoints.act,
        (SlotActionReply,),
        (bodies.SlotBody, Any),  # `erase` ignores its body
        parameters=(_ACTION, _MODEL),
        access=Access.ADMIN,
        body_required=False,
    ),
    Route(
        "GET",
        "/lora-adapters",
        server_endpoints.lora_adapters,
        (list[server_endpoints.LoraAdapter],),
        parameters=(_MODEL,),
        requires=Requires.PROCESSES,
    ),
    Route(
        "POST",
        "/lora-adapters",
        server_endpoints.scale_adapters,
        (server_endpoints.Success,),
        (list[bodies.AdapterScale],),
        parameters=(_MODEL,),
        access=Access.ADMIN,
        requires=Requires.PROCESSES,
    ),
    Route("POST", "/tokenize", server_endpoints.tokenize, (TokenizeReply,), (bodies.TokenizeBody,)),
    Route("POST", "/detokenize", server_endpoints.detokenize, (DetokenizeReply,), (bodies.DetokenizeBody,)),
    Route(
        "GET",
        "/tokenizer_info",
        server_endpoints.tokenizer_info,
        (server_endpoints.TokenizerInfo,),
        parameters=(_MODEL,),
        requires=Requires.PROCESSES,
    ),
    Route(
        "DELETE",
        "/sessions/{session_id:.+}",
        cache_endpoints.drop_session,
        (SessionDropped,),
        (bodies.SessionBody,),
        parameters=(_MODEL,),
        body_required=False,
        requires=Requires.PROCESSES,
    ),
)
ROUTES = tuple(structs.replace(route, path=path) for route in _ROUTES for path in (route.path, route.alias) if path)
"""All routes, including aliases."""


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes."""
    types = list(
        dict.fromkeys(
            each for route in routes for each in (*route.bodies, *route.replies, *route.chunks, route.error)
        )
    )
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path, method = _IS_VARIABLE.sub(r"{\1}", route.path), route.method.lower()
        paths.setdefault(path, {})[method] = {
            "operationId": re.sub(r"\W+", "_", f"{method}{path}").rstrip("_"),
            # The first paragraph of the handler's docstring says what its endpoint does.
            "summary": " ".join((inspect.getdoc(route.handler) or "").partition("\n\n")[0].split()),
            **_security(route.access),
            **_parameters(route),
            **_body(route, schema_of),
            "responses": _responses(route, schema_of),
        }
    error = {
        "description": "An error (docs/api.md lists them).",
        "content": {JSON: {"schema": schema_of[ErrorBody]}},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "llamaslot", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {_ERROR: error},
            "securitySchemes": _SECURITY_SCHEMES,
        },
    }


def _security(access: Access) -> dict[str, Any]:
    """Return the schemes of which a request needs one, if the server has keys, and the role of its key."""
    if access is Access.PUBLIC:
        return {"security": []}
    return {"security": [{name: []} for name in _SECURITY_SCHEMES], "x-llamaslot-role": access.name.lower()}


def _parameters(route: Route) -> dict[str, Any]:
    in_path = [_parameter(name, "path", _STRING, required=True) for name in _IS_VARIABLE.findall(route.path)]
    found = [*in_path, *route.parameters]
    return {"parameters": found} if found else {}


def _body(route: Route, schema_of: dict[Any, Any]) -> dict[str, Any]:
    if not route.bodies:
        return {}
    content = {JSON: {"schema": _any_of(route.bodies, schema_of)}}
    return {"requestBody": {"required": route.body_required, "content": content}}


def _responses(route: Route, schema_of: dict[Any, Any]) -> dict[str, Any]:
    content = {route.content_type: {"schema": _any_of(route.replies, schema_of)}}
    if route.chunks:
        # OpenAPI 3.1 cannot describe the events of a stream; 3.2 does it in `itemSchema`.
        content[route.stream_type] = {"x-itemSchema": _any_of(route.chunks, schema_of)}
    error: dict[str, Any] = {"$ref": f"#/components/responses/{_ERROR}"}
    if route.error is not ErrorBody:
        error = {"description": "An error.", "content": {JSON: {"schema": schema_of[route.error]}}}
    return {"200": {"description": "Success", "content": content}, "default": error}


def _any_of(types: Sequence[Any], schema_of: dict[Any, Any]) -> Any:
    return schema_of[types[0]] if len(types) == 1 else {"anyOf": [schema_of[each] for each in types]}
