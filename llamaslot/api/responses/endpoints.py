"""The endpoints of OpenAI's Responses API. Stored responses are found with the API key that made them only."""

from __future__ import annotations

import re
from contextlib import closing

from aiohttp import web

from llamaslot.api.context import READINESS
from llamaslot.api.generation.request_handling import complete, count_prompt_tokens
from llamaslot.api.json_bodies import json_response
from llamaslot.api.middleware import KEYS, caller_of, given_key, valid_unicode
from llamaslot.api.responses.reply_bodies import Deleted, InputTokens
from llamaslot.api.responses.responses import STORE_ACCESS, ResponsesReplyWriter
from llamaslot.api.responses.store import ResponseStore, StoreAccess, StoredResponse
from llamaslot.base.commands import JsonReply
from llamaslot.base.errors import InvalidRequestError, NotSupportedError
from llamaslot.base.generation.responses import ListItems
from llamaslot.base.namespaces import tenant_name

RESPONSES = web.AppKey("RESPONSES", ResponseStore)
_DEFAULT_LIMIT, MAX_LIMIT = 20, 100
_IS_COUNT = re.compile(r"[0-9]{1,9}").fullmatch


async def create(request: web.Request) -> web.StreamResponse:
    """Reply to text or items, and store the response unless `store` is false."""
    with closing(_store_access(request)) as access:
        request[STORE_ACCESS] = access
        return await complete(request, "responses", ResponsesReplyWriter, access.find)


async def count(request: web.Request) -> web.Response:
    """Return the tokens of the prompt that a response would be generated for."""
    with closing(_store_access(request)) as access:
        return json_response(InputTokens(await count_prompt_tokens(request, "responses", access.find)))


async def retrieve(request: web.Request) -> web.Response:
    """Return a stored response."""
    if request.query.get("stream") == "true":
        raise NotSupportedError("'stream': a stored response is returned as a whole", param="stream")
    return web.Response(body=_stored(request).body, content_type="application/json")


async def delete(request: web.Request) -> web.Response:
    """Delete a stored response; those that continue it keep its items."""
    response = _stored(request)
    request.app[RESPONSES].delete(response.namespace, response.id)
    return json_response(Deleted(response.id))


async def input_items(request: web.Request) -> web.Response:
    """Return the items that a stored response answers, those of earlier turns included."""
    limit, order = request.query.get("limit", str(_DEFAULT_LIMIT)), request.query.get("order", "desc")
    if not _IS_COUNT(limit) or not 1 <= int(limit) <= MAX_LIMIT:
        raise InvalidRequestError(f"'limit' must be an integer from 1 to {MAX_LIMIT}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequestError("'order' must be asc or desc", param="order")
    caller = caller_of(request)
    job = ListItems(
        tuple(_stored(request).input_lists()),
        int(limit),
        is_descending=order == "desc",
        after=valid_unicode(request.query.get("after", "")),
        client=caller.sender.client(caller.session_id),
    )
    reply = await request.app[READINESS].check().ask(job, JsonReply)
    return web.Response(body=reply.data, content_type="application/json")


def _stored(request: web.Request) -> StoredResponse:
    return request.app[RESPONSES].get(_namespace(request), request.match_info["response_id"])


def _store_access(request: web.Request) -> StoreAccess:
    return StoreAccess(request.app[RESPONSES], _namespace(request))


def _namespace(request: web.Request) -> str:
    """Return the namespace of the request's API key; all requests share one on a server without keys."""
    return tenant_name(given_key(request)) if request.app[KEYS] else ""
