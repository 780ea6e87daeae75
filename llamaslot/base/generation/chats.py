"""Parts of a chat that its request asks to store."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class ChatToStore(msgspec.Struct, frozen=True):
    """The fields of a stored chat that its reply does not have."""

    messages: bytes
    """The request's messages, each with an id, as a JSON list."""
    metadata: Mapping[str, str] = {}
