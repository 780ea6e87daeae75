"""Parts of a chat that its request asks to store."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class ChatToStore(msgspec.Struct, frozen=True):
    """What is stored of a chat beside its reply."""

    messages: bytes
    """The request's messages, each with an id, as a JSON list."""
    metadata: Mapping[str, str] = {}
