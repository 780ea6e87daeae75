"""`GET /openapi.json`: the API in OpenAPI's format, from the route table and the types of bodies and replies.

`OPERATIONS` has body, reply and parameters of each endpoint. Where an endpoint encodes a struct, that struct is
used. The types here stand for replies that are put together as mappings; a test decodes real replies with them, and
unknown fields are errors.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from llamaslot import __version__
from llamaslot.api import anthropic, cache_endpoints, server_endpoints
from llamaslot.api.bodies import MAX_LIMIT, ListReply
from llamaslot.api.completions import native_completion, openai_completions, stored_chats
from llamaslot.api.completions.native_completion import generation_settings
from llamaslot.api.completions.openai_completions import ChatChoice, ChatChunkChoice, Envelope, TextChoice
from llamaslot.api.credentials import Access
from llamaslot.api.generation.reply_parts import CacheUse, Prob, PromptProgress, Timings, TokenCount
from llamaslot.api.http_errors import AnthropicError, ErrorBody, Handler
from llamaslot.api.middleware import SESSION_HEADERS
from llamaslot.api.responses import bodies as responses_bodies
from llamaslot.api.responses import responses
from llamaslot.api.responses.responses import N_FIRST, Compaction
from llamaslot.base.commands import CacheCleared
from llamaslot.base.events import FinishReason
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.model import Capabilities, SelfTestOutcome
from llamaslot.base.stats import CacheProbe, CacheState
from llamaslot.protocol import bodies
from llamaslot.protocol.anthropic import CountTokensBody, MessagesBody
from llamaslot.protocol.responses import ResponsesBody


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


_SETTINGS = [(name, type(value)) for name, value in generation_settings(Sampling(), -1).items()]
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


class Model(msgspec.Struct, forbid_unknown_fields=True):
    """The model in OpenAI's format."""

    id: str
    aliases: list[str]
    tags: list[str]
    object: Literal["model"]
    created: int
    owned_by: str
    meta: ModelMeta


class OllamaModel(msgspec.Struct, forbid_unknown_fields=True):
    """The model in Ollama's format."""

    name: str
    model: str
    type: str
    description: str
    capabilities: list[str]
    details: dict[str, str]


class Models(msgspec.Struct, forbid_unknown_fields=True):
    """The list of models, which has one."""

    object: Literal["list"]
    data: list[Model]
    models: list[OllamaModel]


class DefaultSettings(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of a request that names none."""

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
    """Why every prompt is computed whole; empty if `enabled`."""
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
    endpoint_slots: bool
    endpoint_props: bool
    endpoint_metrics: bool
    chat_template: str
    chat_format: str
    """Name of the form in which the model writes reasoning and tool calls."""
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool
    prefix_reuse: PrefixReuse


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


Route: TypeAlias = tuple[str, str, Handler, Access]
"""Method, path, handler, and the access that it requires."""

PATH = "/openapi.json"
_ERROR = "Error"
_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
_IS_VARIABLE = re.compile(r"\{(\w+)(?::[^}]*)?\}")
JSON: Final = "application/json"
_STRING = {"type": "string"}


def _parameter(name: str, place: str, schema: Mapping[str, Any], *, required: bool = False) -> dict[str, Any]:
    """Return a parameter of the path, the query or a header, in OpenAPI's form."""
    return {"name": name, "in": place, "required": required, "schema": schema}


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """Types that an endpoint's body and reply may have; `chunks` are those of streamed events."""

    replies: tuple[Any, ...]
    bodies: tuple[Any, ...] = ()
    body_required: bool = True
    chunks: tuple[Any, ...] = ()
    parameters: tuple[dict[str, Any], ...] = ()
    content_type: str = JSON
    """The reply's."""
    error: Any = ErrorBody


_SESSION = tuple(_parameter(name, "header", {"type": "string"}) for name in SESSION_HEADERS)
"""Only the first one that a request has is read: the others may be of any length."""


def _page(min_limit: int) -> tuple[dict[str, Any], ...]:
    """Return the parameters of a list."""
    return (
        _parameter("limit", "query", {"type": "integer", "minimum": min_limit, "maximum": MAX_LIMIT}),
        _parameter("order", "query", {"enum": ["asc", "desc"]}),
        _parameter("after", "query", _STRING),
    )


_ACTION = _parameter("action", "query", {"enum": ["save", "restore", "erase"]}, required=True)
_TOP = _parameter("top", "query", {"type": "integer", "minimum": 1, "maximum": cache_endpoints.MAX_TOP})

PickedFields: TypeAlias = dict[str, Any]
"""A reply of `/completion` that has the fields of `response_fields` only."""
_NATIVE_REPLIES = (
    NativeReply,
    list[NativeReply],
    PickedFields,
    list[PickedFields],
)
_NATIVE_CHUNKS = (NativeChunk, NativeReply, PickedFields)
_RESPONSE_EVENTS = get_args(responses_bodies.AnyEvent)

OPERATIONS: dict[Handler, Operation] = {
    server_endpoints.health: Operation(replies=(Health,)),
    server_endpoints.models: Operation(replies=(Models,)),
    server_endpoints.model: Operation(replies=(Model,)),
    server_endpoints.props: Operation(replies=(Props,)),
    server_endpoints.metrics: Operation(replies=(str,), content_type="text/plain"),
    server_endpoints.apply_template: Operation(bodies=(bodies.ChatBody,), replies=(TemplateReply,)),
    server_endpoints.tokenize: Operation(bodies=(bodies.TokenizeBody,), replies=(TokenizeReply,)),
    server_endpoints.detokenize: Operation(bodies=(bodies.DetokenizeBody,), replies=(DetokenizeReply,)),
    server_endpoints.tokenizer_info: Operation(replies=(server_endpoints.TokenizerInfo,)),
    cache_endpoints.slots: Operation(
        replies=(list[Slot],), parameters=(_parameter("fail_on_no_slot", "query", _STRING),)
    ),
    cache_endpoints.act: Operation(
        bodies=(bodies.SlotBody, Any),  # `erase` ignores its body
        body_required=False,
        replies=(SlotActionReply,),
        parameters=(_ACTION,),
    ),
    cache_endpoints.cache: Operation(replies=(CacheState,), parameters=(_TOP,)),
    cache_endpoints.probe: Operation(
        bodies=(bodies.ChatBody, bodies.CompletionBody), replies=(CacheProbe,), parameters=_SESSION
    ),
    cache_endpoints.clear: Operation(replies=(CacheCleared,)),
    cache_endpoints.drop_session: Operation(
        bodies=(bodies.SessionBody,), body_required=False, replies=(SessionDropped,)
    ),
    openai_completions.chat_completions: Operation(
        bodies=(bodies.ChatBody,), replies=(ChatReply,), chunks=(ChatChunk,), parameters=_SESSION
    ),
    openai_completions.count_tokens: Operation(
        bodies=(bodies.ChatBody,), replies=(TokenCount,), parameters=_SESSION
    ),
    openai_completions.completions: Operation(
        bodies=(bodies.CompletionBody,), replies=(TextReply,), chunks=(TextReply,), parameters=_SESSION
    ),
    stored_chats.list_chats: Operation(
        replies=(ListReply[StoredChatReply],), parameters=(*_page(0), _parameter("model", "query", _STRING))
    ),
    stored_chats.retrieve: Operation(replies=(StoredChatReply,)),
    stored_chats.update: Operation(bodies=(bodies.StoredChatBody,), replies=(StoredChatReply,)),
    stored_chats.delete: Operation(replies=(stored_chats.ChatDeleted,)),
    stored_chats.list_messages: Operation(replies=(ListReply[dict[str, Any]],), parameters=_page(0)),
    anthropic.messages: Operation(
        bodies=(MessagesBody,),
        replies=(anthropic.AnthropicMessage,),
        chunks=(anthropic.Event,),
        error=AnthropicError,
        parameters=_SESSION,
    ),
    anthropic.count_tokens: Operation(
        bodies=(CountTokensBody,), replies=(TokenCount,), error=AnthropicError, parameters=_SESSION
    ),
    responses.create: Operation(
        bodies=(ResponsesBody,), replies=(responses_bodies.Response,), chunks=_RESPONSE_EVENTS, parameters=_SESSION
    ),
    responses.compact: Operation(bodies=(ResponsesBody,), replies=(Compaction,), parameters=_SESSION),
    responses.cancel: Operation(replies=(responses_bodies.Response,)),
    responses.count: Operation(
        bodies=(ResponsesBody,), replies=(responses_bodies.InputTokens,), parameters=_SESSION
    ),
    responses.retrieve: Operation(
        replies=(responses_bodies.Response,),
        chunks=_RESPONSE_EVENTS,
        parameters=(
            _parameter("stream", "query", {"type": "boolean"}),
            _parameter("starting_after", "query", {"type": "integer", "minimum": 0, "maximum": N_FIRST - 1}),
        ),
    ),
    responses.delete: Operation(replies=(responses_bodies.Deleted,)),
    responses.input_items: Operation(replies=(ListReply[dict[str, Any]],), parameters=_page(1)),
    native_completion.completion: Operation(
        bodies=(bodies.CompletionBody,), replies=_NATIVE_REPLIES, chunks=_NATIVE_CHUNKS, parameters=_SESSION
    ),
    native_completion.infill: Operation(
        bodies=(bodies.InfillBody,), replies=_NATIVE_REPLIES, chunks=_NATIVE_CHUNKS, parameters=_SESSION
    ),
}
"""Every handler of the route table is here, except that of `/openapi.json` itself."""


DESCRIBED = web.AppKey("DESCRIBED", tuple[Route, ...])
"""The routes that the description is of."""


async def openapi(request: web.Request) -> web.Response:
    """Return this description of the API."""
    return web.Response(body=_encoded(request.app[DESCRIBED]), content_type=JSON)


@cache
def _encoded(routes: tuple[Route, ...]) -> bytes:
    """Return the description as JSON; not before it is asked for, so that it delays no start."""
    return msgspec.json.encode(document(routes))


_OWN = Operation(replies=(dict[str, Any],))


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes, whose types are in `OPERATIONS`."""
    operations = {handler: _OWN if handler is openapi else OPERATIONS[handler] for _, _, handler, _ in routes}
    types = list(
        dict.fromkeys(
            each
            for operation in operations.values()
            for each in (*operation.bodies, *operation.replies, *operation.chunks, operation.error)
        )
    )
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, pattern, handler, access in routes:
        path = _IS_VARIABLE.sub(r"{\1}", pattern)
        paths.setdefault(path, {})[method.lower()] = {
            "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").rstrip("_"),
            # The first paragraph of the handler's docstring says what its endpoint does.
            "summary": " ".join((inspect.getdoc(handler) or "").partition("\n\n")[0].split()),
            **_security(access),
            **_parameters(pattern, operations[handler]),
            **_body(operations[handler], schema_of),
            "responses": _responses(operations[handler], schema_of),
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


def _parameters(pattern: str, operation: Operation) -> dict[str, Any]:
    in_path = [_parameter(name, "path", _STRING, required=True) for name in _IS_VARIABLE.findall(pattern)]
    found = [*in_path, *operation.parameters]
    return {"parameters": found} if found else {}


def _body(operation: Operation, schema_of: dict[Any, Any]) -> dict[str, Any]:
    if not operation.bodies:
        return {}
    content = {JSON: {"schema": _any_of(operation.bodies, schema_of)}}
    return {"requestBody": {"required": operation.body_required, "content": content}}


def _responses(operation: Operation, schema_of: dict[Any, Any]) -> dict[str, Any]:
    content = {operation.content_type: {"schema": _any_of(operation.replies, schema_of)}}
    if operation.chunks:
        # OpenAPI 3.1 cannot describe the events of a stream; 3.2 does it in `itemSchema`.
        content["text/event-stream"] = {"x-itemSchema": _any_of(operation.chunks, schema_of)}
    error: dict[str, Any] = {"$ref": f"#/components/responses/{_ERROR}"}
    if operation.error is not ErrorBody:
        error = {"description": "An error.", "content": {JSON: {"schema": schema_of[operation.error]}}}
    return {"200": {"description": "Success", "content": content}, "default": error}


def _any_of(types: Sequence[Any], schema_of: dict[Any, Any]) -> Any:
    return schema_of[types[0]] if len(types) == 1 else {"anyOf": [schema_of[each] for each in types]}
