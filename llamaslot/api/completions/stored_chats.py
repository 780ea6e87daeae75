"""Stored chat completions: their store in memory, and its endpoints.

Only the API key that made a completion finds it. The store has a limit of number and one of bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
from aiohttp import web

from llamaslot.api.bodies import (
    LATER,
    ListReply,
    Paging,
    encode,
    json_response,
    list_of,
    page_of_stored,
    read,
    send_json,
    with_values,
)
from llamaslot.api.middleware import key_namespace
from llamaslot.base.callers import OwnerShares
from llamaslot.base.errors import NotFoundError
from llamaslot.protocol.bodies import StoredChatBody

_FILTER = "metadata["


@dataclass(slots=True)
class StoredChat:
    """A chat completion, with the messages that it answers."""

    id: str
    model: str
    reply: bytes
    """As it was returned, a JSON object."""
    messages: bytes
    """A JSON list; each message has an id."""
    metadata: Mapping[str, str]
    owner: str = ""
    """The `Caller.owner` whose share is charged for it."""

    def body(self) -> Iterator[bytes]:
        """Yield the completion with its metadata, a JSON object."""
        yield self.reply.removesuffix(b"}")
        yield b',"metadata":%b}' % encode(self.metadata)

    @property
    def size(self) -> int:
        """Bytes that are kept of it."""
        return (
            len(self.reply) + len(self.messages) + sum(len(key) + len(self.metadata[key]) for key in self.metadata)
        )


class ChatStore:
    """Chat completions by namespace and id; of the owner that holds most, the oldest one is evicted."""

    def __init__(self, *, max_chats: int, max_bytes: int) -> None:
        self._max_chats = max_chats
        self.max_bytes = max_bytes
        self._chats: dict[tuple[str, str], StoredChat] = {}
        """In the order in which they were stored."""
        self._shares: OwnerShares[tuple[str, str]] = OwnerShares(time.monotonic)

    def put(self, namespace: str, chat: StoredChat) -> None:
        """Store a completion, unless it is too large, and evict others for it."""
        if not self._max_chats or chat.size > self.max_bytes:
            return
        while (is_full := len(self._chats) >= self._max_chats) or self._shares.n_bytes + chat.size > self.max_bytes:
            evicted = self._shares.evicted_next(chat.owner, chat.size, by_count=is_full)
            if evicted is None:
                return
            self._drop(evicted)
        self._chats[namespace, chat.id] = chat
        self._shares.add((namespace, chat.id), chat.owner)
        self._shares.charge(chat.owner, chat.size)

    def get(self, namespace: str, chat_id: str) -> StoredChat:
        """Return a completion; raises `NotFoundError`."""
        try:
            return self._chats[namespace, chat_id]
        except KeyError:
            raise NotFoundError(
                f"there is no chat completion '{chat_id}': it was not stored ('store': true), was deleted, or was "
                "evicted (--max-stored-responses, --max-stored-responses-mb)"
            ) from None

    def all_of(self, namespace: str) -> Iterator[StoredChat]:
        """Yield all completions of a namespace, the oldest first."""
        return (chat for (owner, _), chat in self._chats.items() if owner == namespace)

    def update(self, namespace: str, chat_id: str, metadata: Mapping[str, str]) -> StoredChat:
        """Replace the metadata of a completion, and return it; raises `NotFoundError`."""
        chat = self.get(namespace, chat_id)
        before = chat.size
        chat.metadata = metadata
        self._shares.charge(chat.owner, chat.size - before)
        while self._shares.n_bytes > self.max_bytes and (evicted := self._shares.evicted_next(chat.owner, 0)):
            self._drop(evicted)
        return chat

    def delete(self, namespace: str, chat_id: str) -> None:
        """Delete a completion; raises `NotFoundError`."""
        self.get(namespace, chat_id)
        self._drop((namespace, chat_id))

    def _drop(self, key: tuple[str, str]) -> None:
        chat = self._chats.pop(key)
        self._shares.charge(self._shares.remove(key), -chat.size)


CHATS = web.AppKey("CHATS", ChatStore)


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
    return await send_json(request, with_values(body, list_of(chat.body() for chat in page.data)))


async def retrieve(request: web.Request) -> web.StreamResponse:
    """Return a stored chat completion."""
    return await send_json(request, request.app[CHATS].get(*_key(request)).body())


async def update(request: web.Request) -> web.StreamResponse:
    """Replace the metadata of a stored chat completion."""
    body = await read(request, StoredChatBody)
    return await send_json(request, request.app[CHATS].update(*_key(request), body.metadata or {}).body())


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
