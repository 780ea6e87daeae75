"""The disk on which text anchors and sessions outlive the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llamaslot.prompts.sessions import Session
from llamaslot.prompts.text_anchors import TextAnchor


class TextStore(Protocol):
    """Text anchors and sessions on disk; used by one thread at a time. What is too much goes, the oldest first."""

    def anchors(self) -> Sequence[TextAnchor]:
        """Return all anchors, the oldest first."""

    def write_anchor(self, anchor: TextAnchor) -> None:
        """Write an anchor."""

    def sessions(self) -> Sequence[tuple[bytes, Session]]:
        """Return all sessions with their digests, the oldest first."""

    def write_session(self, digest: bytes, session: Session) -> None:
        """Write a session, in place of an earlier one of that digest."""

    def drop_session(self, digest: bytes) -> None:
        """Delete a session."""

    def clear_texts(self) -> None:
        """Delete all anchors and sessions."""
