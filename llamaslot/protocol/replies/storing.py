"""Stored chats: the fields of a request that ask for its completion to be stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from llamaslot.base.errors import InvalidRequestError
from llamaslot.base.generation.chats import ChatToStore
from llamaslot.protocol.bodies import ChatBody, Metadata


def chat_to_store(body: ChatBody, request_id: str) -> ChatToStore | None:
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
