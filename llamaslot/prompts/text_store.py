"""What is asked of a disk on which anchors and sessions outlive the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llamaslot.prompts.anchors import Anchor
from llamaslot.prompts.sessions import Session


class TextStore(Protocol):
    """Anchors and sessions on a disk; used by one thread at a time."""

    def anchors(self) -> Sequence[Anchor]:
        """The anchors that are there, none before what it continues."""

    def write_anchor(self, anchor: Anchor) -> None:
        """Keep an anchor, so that it survives the process; the oldest go where they are too many."""

    def sessions(self) -> Sequence[tuple[bytes, Session]]:
        """The sessions that are there, each with its digest, the oldest first."""

    def write_session(self, digest: bytes, session: Session) -> None:
        """Keep a session, in place of another one of that digest; the oldest go where they are too many."""

    def drop_session(self, digest: bytes) -> None:
        """Keep the session of that digest no more."""

    def forget_texts(self) -> None:
        """Keep none of the anchors and sessions so far."""
