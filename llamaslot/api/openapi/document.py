"""`GET /openapi.json`: the API in OpenAPI's format, from the route table and the types of bodies and replies.

`OPERATIONS` has body, reply and parameters of each endpoint.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final, TypeAlias, get_args

import msgspec
from aiohttp import web

from llamaslot import __version__
from llamaslot.api import anthropic, cache_endpoints, server_endpoints
from llamaslot.api.completions import native_completion, openai_completions, stored_chats
from llamaslot.api.credentials import Access
from llamaslot.api.generation.pages import MAX_LIMIT, ListReply
from llamaslot.api.generation.reply_stats import TokenCount
from llamaslot.api.http_errors import AnthropicError, ErrorBody, Handler
from llamaslot.api.middleware import SESSION_HEADERS
from llamaslot.api.openapi import reply_types
from llamaslot.api.responses import bodies as responses_bodies
from llamaslot.api.responses import endpoints as responses
from llamaslot.api.responses.endpoints import N_FIRST
from llamaslot.api.responses.responses import Compaction
from llamaslot.base.commands import CacheCleared
from llamaslot.base.stats import CacheProbe, CacheState
from llamaslot.protocol import bodies
from llamaslot.protocol.anthropic import CountTokensBody, MessagesBody
from llamaslot.protocol.responses import ResponsesBody

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

_NATIVE_REPLIES = (
    reply_types.NativeReply,
    list[reply_types.NativeReply],
    reply_types.PickedFields,
    list[reply_types.PickedFields],
)
_NATIVE_CHUNKS = (reply_types.NativeChunk, reply_types.NativeReply, reply_types.PickedFields)
_RESPONSE_EVENTS = get_args(responses_bodies.AnyEvent)

OPERATIONS: dict[Handler, Operation] = {
    server_endpoints.health: Operation(replies=(reply_types.Health,)),
    server_endpoints.models: Operation(replies=(reply_types.Models,)),
    server_endpoints.model: Operation(replies=(reply_types.Model,)),
    server_endpoints.props: Operation(replies=(reply_types.Props,)),
    server_endpoints.metrics: Operation(replies=(str,), content_type="text/plain"),
    server_endpoints.apply_template: Operation(bodies=(bodies.ChatBody,), replies=(reply_types.TemplateReply,)),
    server_endpoints.tokenize: Operation(bodies=(bodies.TokenizeBody,), replies=(reply_types.TokenizeReply,)),
    server_endpoints.detokenize: Operation(bodies=(bodies.DetokenizeBody,), replies=(reply_types.DetokenizeReply,)),
    server_endpoints.tokenizer_info: Operation(replies=(server_endpoints.TokenizerInfo,)),
    cache_endpoints.slots: Operation(
        replies=(list[reply_types.Slot],), parameters=(_parameter("fail_on_no_slot", "query", _STRING),)
    ),
    cache_endpoints.act: Operation(
        bodies=(bodies.SlotBody, Any),  # `erase` ignores its body
        body_required=False,
        replies=(reply_types.SlotActionReply,),
        parameters=(_ACTION,),
    ),
    cache_endpoints.cache: Operation(replies=(CacheState,), parameters=(_TOP,)),
    cache_endpoints.probe: Operation(
        bodies=(bodies.ChatBody, bodies.CompletionBody), replies=(CacheProbe,), parameters=_SESSION
    ),
    cache_endpoints.clear: Operation(replies=(CacheCleared,)),
    cache_endpoints.drop_session: Operation(
        bodies=(bodies.SessionBody,), body_required=False, replies=(reply_types.SessionDropped,)
    ),
    openai_completions.chat_completions: Operation(
        bodies=(bodies.ChatBody,),
        replies=(reply_types.ChatReply,),
        chunks=(reply_types.ChatChunk,),
        parameters=_SESSION,
    ),
    openai_completions.count_tokens: Operation(
        bodies=(bodies.ChatBody,), replies=(TokenCount,), parameters=_SESSION
    ),
    openai_completions.completions: Operation(
        bodies=(bodies.CompletionBody,),
        replies=(reply_types.TextReply,),
        chunks=(reply_types.TextReply,),
        parameters=_SESSION,
    ),
    stored_chats.list_chats: Operation(
        replies=(ListReply[reply_types.StoredChatReply],),
        parameters=(*_page(0), _parameter("model", "query", _STRING)),
    ),
    stored_chats.retrieve: Operation(replies=(reply_types.StoredChatReply,)),
    stored_chats.update: Operation(bodies=(bodies.StoredChatBody,), replies=(reply_types.StoredChatReply,)),
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
        bodies=(ResponsesBody,),
        replies=(responses_bodies.Response,),
        chunks=_RESPONSE_EVENTS,
        parameters=_SESSION,
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


class OpenApi:
    """The description of these routes; computed when it is first asked for, so that it delays no start."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes

    @cached_property
    def body(self) -> bytes:
        """The description as JSON."""
        return msgspec.json.encode(document(self._routes))


OPENAPI = web.AppKey("OPENAPI", OpenApi)


async def openapi(request: web.Request) -> web.Response:
    """Return this description of the API."""
    return web.Response(body=request.app[OPENAPI].body, content_type=JSON)


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
