"""Turns: which client is served next, at the slots, the engine's queue and the tokenizer.

A client is an API key; without keys a session, else an address.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

import msgspec

from llamaslot.base.namespaces import tenant_name

T = TypeVar("T")

MAX_CLIENTS = 1024
"""Clients whose last turn is remembered: those that had one most recently."""
MAX_ROUND_TURNS = 64
"""Turns after which a client counts as one that had none: a stream of new clients cannot keep it waiting longer."""


class Sender(msgspec.Struct, frozen=True):
    """The sender of a request, by digests that do not disclose its key and address."""

    key: str = ""
    """The key's `tenant_name`; empty if the server has no API keys: clients may then send whatever they like."""
    address: str = ""

    @classmethod
    def of(cls, api_key: str | None, address: str) -> Sender:
        """Return the sender with this key (None for a server without keys) and address."""
        return cls("" if api_key is None else tenant_name(api_key), _digest("address", address))

    @property
    def owner(self) -> str:
        """The id whose share of a memory is charged for what is kept for the sender: the key's, else the address's.

        Unlike the client of a turn it is never a session, since a client may open any number of sessions.
        """
        return self.key or self.address

    def client(self, session_id: str) -> str:
        """Return the id by which a request takes turns: the key's, else the session's, else the address's."""
        if self.key:
            return self.key
        return _digest("session", session_id) if session_id else self.address


def _digest(kind: Literal["session", "address"], name: str) -> str:
    return hashlib.blake2b(f"{kind} {name}".encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


class Turns:
    """Numbers the turns that clients take; the next one to be served is the one whose last turn is oldest."""

    def __init__(self) -> None:
        self.n_taken = 0
        self._last: dict[str, int] = {}

    def last(self, client: str) -> int:
        """Return the number of a client's last turn; 0 if it had none, or so long ago that it is forgotten."""
        return self._last.get(client, 0)

    def next(self, waiting: Iterable[T], client_of: Callable[[T], str | None]) -> T:
        """Return the first item of the client whose turn it is; items of no client come before all others."""

        def place(item: T) -> int:
            client = client_of(item)
            if client is None:
                return -1
            last = self.last(client)
            return last if last > self.n_taken - MAX_ROUND_TURNS else 0

        return min(waiting, key=place)

    def take(self, client: str) -> None:
        """Count a turn of a client."""
        self.n_taken += 1
        self._last.pop(client, None)
        self._last[client] = self.n_taken
        if len(self._last) > MAX_CLIENTS:
            del self._last[next(iter(self._last))]
