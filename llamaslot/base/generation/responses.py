"""Parts of a Responses request that shape its reply, and the earlier items that it refers to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

CallKind: TypeAlias = Literal["function", "custom", "local_shell"]


class CallForm(msgspec.Struct, frozen=True):
    """The form in which calls of a tool are reported that the model knows as a function."""

    kind: CallKind = "function"
    name: str = ""
    """The client's name of the tool."""
    namespace: str = ""


class ResponseFields(msgspec.Struct, frozen=True):
    """Fields of a Responses request that its reply repeats or depends on."""

    echo: bytes = b"{}"
    """A JSON object of the request's fields that the reply repeats."""
    input: bytes = b"[]"
    """The request's own input items, a JSON list; each has an id. Empty if the response is not to be stored."""
    store: bool = True
    previous: str = ""
    """Id of the response that this one continues."""
    user_texts: tuple[str, ...] = ()
    """All that the user wrote, for a compaction."""
    returns_reasoning: bool = False
    """Reasoning items have `encrypted_content`."""
    forms: Mapping[str, CallForm] = {}
    """By the name of the function that the model calls; none for functions that the request calls the same."""


class References(msgspec.Struct, frozen=True):
    """References of a request to earlier responses: the one that it continues, and items by their ids."""

    previous: str = ""
    items: tuple[str, ...] = ()


class EarlierItems(msgspec.Struct, frozen=True):
    """The items that `References` stand for."""

    history: tuple[bytes, ...] = ()
    """JSON lists of items, in the order of the conversation."""
    items: Mapping[str, bytes] = {}
    """JSON objects by id."""

    @property
    def size(self) -> int:
        """Bytes of all items."""
        return sum(map(len, self.history)) + sum(map(len, self.items.values()))


class ListItems(msgspec.Struct, frozen=True, tag="list_items"):
    """List some of the items or messages of a conversation, which may be long; answered by `JsonReply`."""

    lists: tuple[bytes, ...]
    """JSON lists of items, in the order of the conversation."""
    limit: int
    is_descending: bool
    after: str = ""
    """The id of the item before the first one; empty for all."""
    client: str = ""

    @property
    def size(self) -> int:
        """Bytes of all items."""
        return sum(map(len, self.lists))
