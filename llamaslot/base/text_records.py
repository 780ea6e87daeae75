"""Text anchors, sessions and remembered replies as records, which are stored and cross process boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec

_OVERHEAD = 200
"""Bytes that a record takes in addition to its content, about."""
RecordKind: TypeAlias = Literal["anchor", "session", "reply"]


class TextRecord(msgspec.Struct, frozen=True):
    """A text anchor, a session or a remembered reply; `llamaslot.prompts` encodes and decodes its content."""

    kind: RecordKind
    digest: bytes
    """Identifies it among the records of its kind."""
    content: bytes
    parent: bytes = b""
    """Digest of the anchor that an anchor continues, or of the session that a branch belongs to; empty for none."""
    owner: str = ""
    """The `Caller.owner` whose share is charged for a reply; on disk it is in the content only."""

    @property
    def n_bytes(self) -> int:
        """Bytes in memory, estimated."""
        return len(self.content) + _OVERHEAD


class TextStore(Protocol):
    """Records on disk; used by one thread at a time. When they exceed the limit, the oldest are deleted.

    A delete that fails is tried again later.
    """

    def records(self) -> Sequence[TextRecord]:
        """Return all records, the oldest of each kind first."""

    def write(self, record: TextRecord) -> None:
        """Write a record, in place of an earlier one of that kind and digest."""

    def drop_session(self, digest: bytes) -> None:
        """Delete a session, its branches and its replies."""

    def clear_texts(self) -> None:
        """Delete all records."""
