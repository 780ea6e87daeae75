"""Remembered texts: records of text anchors, sessions and replies, and what remembers a chat's reply.

Records are stored and cross process boundaries. Prompts get the tokens of remembered texts.

A prompt that begins with remembered replies takes over the tokens up to the last of them. They form a chain, in
which each link has the prompt's tokens before its reply:

    text, template's markup   reply 1    results, markup   reply 2     results, markup
    |------- link 1 ------------------|------- link 2 --------------|------ rest ------|

`state` is a digest of all tokens from the start of the chain to the end of a link. That of an empty chain depends
on the namespace and on the template's variables. So a reply is only found after the tokens that it followed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec

from llamaslot.base.generation.tools import ParserOptions

RecordKind: TypeAlias = Literal["anchor", "session", "reply"]
_RECORD_OVERHEAD = 200
"""Approximate bytes of a record in addition to its content."""
MAX_REPLIES_BYTES = 16 * 2**20
"""Limit of the estimated memory of all remembered replies, and of their size on disk."""
REPLY_OVERHEAD = 600
"""Approximate bytes of a reply in addition to its tokens and texts."""


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
        return len(self.content) + _RECORD_OVERHEAD


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


class RememberedReply(msgspec.Struct, frozen=True):
    """A link of the chain: a reply that was sent, and the prompt before it."""

    key: bytes
    """Digest of the state before it, of the conversation that it answered, and of its content and calls."""
    parent: bytes
    """Key of the link before it; empty for none."""
    state: bytes
    n_text: int
    """Characters of the prompt's text between the link before it and the generation prompt."""
    text: bytes
    """Digest of them."""
    opening: str
    """The generation prompt, without what the template writes before earlier replies too."""
    reasoning: bytes
    """Digest of the reasoning that the client got; empty for none."""
    has_reasoning: bool
    """True if its tokens contain reasoning, or tags of it."""
    begun: str
    """The beginning of the message that its prompt had; empty if it had none."""
    closing: str
    """The end of its text."""
    tokens: bytes
    """Tokens of prompt and reply, without the one that ended the generation; packed."""
    n_reply: int
    """Tokens of the reply that were generated."""
    session: bytes = b""
    """Digest of the session that it belongs to; empty for none."""
    owner: str = ""
    """The `Caller.owner` whose share is charged for it."""

    @property
    def n_bytes(self) -> int:
        """Bytes in memory, estimated."""
        # Clients choose the beginning, and characters take up to 4 bytes.
        texts = (self.opening, self.begun, self.closing)
        return len(self.tokens) + sum(map(sys.getsizeof, texts)) + REPLY_OVERHEAD


class _Owned(msgspec.Struct):
    """The owner alone: decoding skips the tokens."""

    owner: str = ""


_owned = msgspec.msgpack.Decoder(_Owned).decode


def owner_of(content: bytes) -> str:
    """Return the owner of a reply that is encoded; empty if it cannot be decoded."""
    try:
        return _owned(content).owner
    except msgspec.MsgspecError:
        return ""


class RestoredReplies(msgspec.Struct, frozen=True):
    """The tokens of remembered replies with which a prompt begins."""

    tokens: bytes
    """Packed."""
    n_reply: int
    """Tokens of replies among them."""
    continued: RememberedReply | None = None
    """The last of them if the prompt's message continues it: it is remembered again with what follows."""


class ChatTurn(msgspec.Struct, frozen=True):
    """Facts about a chat request that are needed to remember its reply."""

    parser: ParserOptions
    """For the whole message, of which the prompt may have the beginning."""
    begun: str
    """That beginning."""
    opening: str
    """As in `RememberedReply`; the text of the prompt ends with it and with `begun`."""
    conversation: bytes
    """Digest of the messages before the reply."""
    parent: bytes
    """Key of the last restored reply; empty for none."""
    state: bytes
    """State after it."""
    start: bytes
    """State of the empty chain."""
    restored: RestoredReplies | None = None


class ReplyStore(Protocol):
    """Remembered replies by key."""

    def find(self, key: bytes) -> RememberedReply | None:
        """Return a reply; does not count as a use."""

    def use(self, key: bytes) -> None:
        """Make a reply and those before it in its chain the most recently used ones."""
