"""Body, reply and parameters of each endpoint, by its handler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, get_args

import msgspec

from llamaslot.api import cache_endpoints, server_endpoints, slot_endpoints, token_endpoints
from llamaslot.api.anthropic import messages, reply_bodies
from llamaslot.api.anthropic.errors import AnthropicError
from llamaslot.api.completions import chat_completions, native_completion, stored_chats, text_completions
from llamaslot.api.generation.pages import MAX_LIMIT, ListReply
from llamaslot.api.generation.reply_stats import TokenCount
from llamaslot.api.http_errors import ErrorBody, Handler
from llamaslot.api.middleware import SESSION_HEADERS
from llamaslot.api.openapi import reply_types
from llamaslot.api.responses import endpoints as responses
from llamaslot.api.responses import events
from llamaslot.api.responses import reply_bodies as responses_bodies
from llamaslot.api.responses.compaction import Compaction
from llamaslot.api.responses.replay import N_FIRST
from llamaslot.base.commands import CacheCleared
from llamaslot.base.stats import CacheProbe, CacheState
from llamaslot.protocol import bodies
from llamaslot.protocol.anthropic import CountTokensBody, MessagesBody
from llamaslot.protocol.responses import ResponsesBody

JSON: Final = "application/json"
_STRING = {"type": "string"}


class Parameter(msgspec.Struct, frozen=True):
    """A parameter of the query or of a header."""

    name: str
    place: str
    schema: Mapping[str, Any]
    required: bool = False


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """Types of an endpoint's body and reply; `chunk` is that of the events of a streamed reply."""

    reply: Any
    other_replies: tuple[Any, ...] = ()
    """Types of which the reply may be instead."""
    body: Any = None
    other_bodies: tuple[Any, ...] = ()
    body_required: bool = True
    chunk: Any = None
    other_chunks: tuple[Any, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    content_type: str = JSON
    """The reply's."""
    error: Any = ErrorBody


_SESSION = tuple(Parameter(name, "header", {"type": "string"}) for name in SESSION_HEADERS)
"""Only the first one that a request has is read: the others may be of any length."""


def _page(min_limit: int) -> tuple[Parameter, ...]:
    """Return the parameters of a list."""
    return (
        Parameter("limit", "query", {"type": "integer", "minimum": min_limit, "maximum": MAX_LIMIT}),
        Parameter("order", "query", {"enum": ["asc", "desc"]}),
        Parameter("after", "query", _STRING),
    )


_ACTION = Parameter("action", "query", {"enum": ["save", "restore", "erase"]}, required=True)
_TOP = Parameter("top", "query", {"type": "integer", "minimum": 1, "maximum": cache_endpoints.MAX_TOP})

OPERATIONS: dict[Handler, Operation] = {
    server_endpoints.health: Operation(reply=reply_types.Health),
    server_endpoints.models: Operation(reply=reply_types.Models),
    server_endpoints.model: Operation(reply=reply_types.Model),
    server_endpoints.props: Operation(reply=reply_types.Props),
    server_endpoints.metrics: Operation(reply=str, content_type="text/plain"),
    slot_endpoints.slots: Operation(
        reply=list[reply_types.Slot], parameters=(Parameter("fail_on_no_slot", "query", _STRING),)
    ),
    slot_endpoints.act: Operation(
        body=bodies.SlotBody,
        other_bodies=(Any,),  # `erase` ignores its body
        body_required=False,
        reply=reply_types.SlotActionReply,
        parameters=(_ACTION,),
    ),
    cache_endpoints.cache: Operation(reply=CacheState, parameters=(_TOP,)),
    cache_endpoints.probe: Operation(
        body=bodies.ChatBody, other_bodies=(bodies.CompletionBody,), reply=CacheProbe, parameters=_SESSION
    ),
    cache_endpoints.clear: Operation(reply=CacheCleared),
    cache_endpoints.drop_session: Operation(
        body=bodies.SessionBody, body_required=False, reply=reply_types.SessionDropped
    ),
    chat_completions.chat_completions: Operation(
        body=bodies.ChatBody, reply=reply_types.ChatReply, chunk=reply_types.ChatChunk, parameters=_SESSION
    ),
    chat_completions.count_tokens: Operation(body=bodies.ChatBody, reply=TokenCount, parameters=_SESSION),
    stored_chats.list_chats: Operation(
        reply=ListReply[reply_types.StoredChatReply], parameters=(*_page(0), Parameter("model", "query", _STRING))
    ),
    stored_chats.retrieve: Operation(reply=reply_types.StoredChatReply),
    stored_chats.update: Operation(body=bodies.StoredChatBody, reply=reply_types.StoredChatReply),
    stored_chats.delete: Operation(reply=stored_chats.ChatDeleted),
    stored_chats.list_messages: Operation(reply=ListReply[dict[str, Any]], parameters=_page(0)),
    messages.messages: Operation(
        body=MessagesBody,
        reply=reply_bodies.AnthropicMessage,
        chunk=reply_bodies.Event,
        error=AnthropicError,
        parameters=_SESSION,
    ),
    messages.count_tokens: Operation(
        body=CountTokensBody, reply=TokenCount, error=AnthropicError, parameters=_SESSION
    ),
    responses.create: Operation(
        body=ResponsesBody,
        reply=responses_bodies.Response,
        chunk=events.Created,
        other_chunks=get_args(events.AnyEvent)[1:],
        parameters=_SESSION,
    ),
    responses.compact: Operation(body=ResponsesBody, reply=Compaction, parameters=_SESSION),
    responses.cancel: Operation(reply=responses_bodies.Response),
    responses.count: Operation(body=ResponsesBody, reply=responses_bodies.InputTokens, parameters=_SESSION),
    responses.retrieve: Operation(
        reply=responses_bodies.Response,
        chunk=events.Created,
        other_chunks=get_args(events.AnyEvent)[1:],
        parameters=(
            Parameter("stream", "query", {"type": "boolean"}),
            Parameter("starting_after", "query", {"type": "integer", "minimum": 0, "maximum": N_FIRST - 1}),
        ),
    ),
    responses.delete: Operation(reply=responses_bodies.Deleted),
    responses.input_items: Operation(reply=ListReply[dict[str, Any]], parameters=_page(1)),
    token_endpoints.apply_template: Operation(body=bodies.ChatBody, reply=reply_types.TemplateReply),
    text_completions.completions: Operation(
        body=bodies.CompletionBody, reply=reply_types.TextReply, chunk=reply_types.TextReply, parameters=_SESSION
    ),
    native_completion.completion: Operation(
        body=bodies.CompletionBody,
        reply=reply_types.NativeReply,
        other_replies=(list[reply_types.NativeReply], reply_types.PickedFields, list[reply_types.PickedFields]),
        chunk=reply_types.NativeChunk,
        other_chunks=(reply_types.NativeReply, reply_types.PickedFields),
        parameters=_SESSION,
    ),
    native_completion.infill: Operation(
        body=bodies.InfillBody,
        reply=reply_types.NativeReply,
        other_replies=(list[reply_types.NativeReply], reply_types.PickedFields, list[reply_types.PickedFields]),
        chunk=reply_types.NativeChunk,
        other_chunks=(reply_types.NativeReply, reply_types.PickedFields),
        parameters=_SESSION,
    ),
    token_endpoints.tokenize: Operation(body=bodies.TokenizeBody, reply=reply_types.TokenizeReply),
    token_endpoints.detokenize: Operation(body=bodies.DetokenizeBody, reply=reply_types.DetokenizeReply),
    token_endpoints.tokenizer_info: Operation(reply=token_endpoints.TokenizerInfo),
}
"""Every handler of the route table is here, but for that of `/openapi.json` itself."""
