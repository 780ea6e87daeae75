"""The endpoints of stored chat completions, which are found with the API key that made them only."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from llamaslot.api.completions.chat_store import CHATS
from llamaslot.api.generation.pages import ListReply, Paging, page_of_stored
from llamaslot.api.json_bodies import LATER, json_reply, json_response, list_of, read, with_values
from llamaslot.api.middleware import key_namespace
from llamaslot.protocol.bodies import StoredChatBody

_FILTER = "metadata["


class ChatDeleted(msgspec.Struct):
    """Result of deleting a completion."""

    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: Literal[True] = True


async def list_chats(request: web.Request) -> web.StreamResponse:
    """Return the stored chat completions, those of a `model` or with some `metadata` only if that is asked for."""
    paging, model = Paging(request, "asc", 0), request.query.get("model")
    wanted = [
        (name.removeprefix(_FILTER).removesuffix("]"), value)
        for name, value in request.query.items()
        if name.startswith(_FILTER)
    ]
    chats = [
        chat
        for chat in request.app[CHATS].all_of(key_namespace(request))
        if model in (None, chat.model) and all(chat.metadata.get(name) == value for name, value in wanted)
    ]
    page = paging.page(chats, lambda chat: chat.id)
    body = ListReply(LATER, page.first_id, page.last_id, page.has_more)
    return await json_reply(request, with_values(body, list_of(chat.body() for chat in page.data)))


async def retrieve(request: web.Request) -> web.StreamResponse:
    """Return a stored chat completion."""
    return await json_reply(request, request.app[CHATS].get(*_key(request)).body())


async def update(request: web.Request) -> web.StreamResponse:
    """Replace the metadata of a stored chat completion."""
    body = await read(request, StoredChatBody)
    return await json_reply(request, request.app[CHATS].update(*_key(request), body.metadata or {}).body())


async def delete(request: web.Request) -> web.Response:
    """Delete a stored chat completion."""
    namespace, chat_id = _key(request)
    request.app[CHATS].delete(namespace, chat_id)
    return json_response(ChatDeleted(chat_id))


async def list_messages(request: web.Request) -> web.StreamResponse:
    """Return the messages that a stored chat completion answers."""
    paging = Paging(request, "asc", 0)
    return await page_of_stored(request, (request.app[CHATS].get(*_key(request)).messages,), paging)


def _key(request: web.Request) -> tuple[str, str]:
    return key_namespace(request), request.match_info["completion_id"]
