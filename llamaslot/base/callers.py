"""Callers: who sent a request, and the three principals that follow from that.

    owner       pays for memory (replies, stored chats, bodies): its API key, else its address
    client      takes turns, and has a limit of requests: its API key, else its session, else its address
    namespace   shares KV (`base/namespaces.py`): its salt and, with --cache-salt-from-api-key, its API key

All namespaces of one API key are a tenant in `GET /cache`. An owner is never a session, since a client may open any
number of sessions.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from llamaslot.base.namespaces import tenant_name


class Caller(msgspec.Struct, frozen=True):
    """The sender of a request, by digests that do not disclose its key and address."""

    key: str = ""
    """The key's `tenant_name`; empty if the server has no API keys: clients may then send whatever they like."""
    address: str = ""
    session_id: str = ""
    """The session that the headers name; empty without one."""
    client_request_id: str = ""
    """The client's `X-Request-Id`; empty without a valid one."""

    @classmethod
    def of(cls, api_key: str | None, address: str) -> Caller:
        """Return the caller with this key (None for a server without keys) and address."""
        return cls("" if api_key is None else tenant_name(api_key), _digest("address", address))

    @property
    def owner(self) -> str:
        """The id of the owner."""
        return self.key or self.address

    @property
    def known_client(self) -> str:
        """The id of the client before the body is read; empty where only the body may name it, by its session."""
        return self.client() if self.key or self.session_id else ""

    def client(self, session_id: str = "") -> str:
        """Return the id of the client, of a request whose body names a session or not."""
        if self.key:
            return self.key
        session_id = session_id or self.session_id
        return _digest("session", session_id) if session_id else self.address


class Amounts:
    """Amounts of a limited resource that owners or clients hold."""

    def __init__(self) -> None:
        self.total = 0
        self.each: dict[str, int] = {}
        """By owner or client; without those that hold nothing."""

    def __getitem__(self, holder: str) -> int:
        """Return what one holds."""
        return self.each.get(holder, 0)

    def add(self, holder: str, n: int) -> None:
        """Count `n` more, or with a negative number less."""
        self.total += n
        amount = self.each.pop(holder, 0) + n
        if amount:
            self.each[holder] = amount


def _digest(kind: Literal["session", "address"], name: str) -> str:
    return hashlib.blake2b(f"{kind} {name}".encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
