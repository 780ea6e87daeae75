"""Records of the token memory: which tokens stood for a text when this server generated or computed it.

There are three kinds, by the way in which a text is recognized when it comes back: a text anchor by the exact text,
a session by its name, a remembered reply by its meaning. A record is one value in the prompt worker's memory
(`prompts/token_memory.py`), in the parent's copy of it, in messages between processes, and on disk.

Text anchors and replies form chains: a record has only the tokens that its parent and those before it do not have.
A prompt that begins with remembered replies takes over the tokens up to the last of them:

    text, template's markup   reply 1    results, markup   reply 2     results, markup
    |------- link 1 ------------------|------- link 2 --------------|------ rest ------|

`state` is a digest of all tokens from the start of the chain to the end of a link. That of an empty chain depends
on the namespace and on the template's variables. So a reply is only found after the tokens that it followed. A chat
request brings along what is needed to remember its own reply (`ChatTurn`).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import msgspec
from msgspec import structs

from llamaslot.base.generation.tools import ParserOptions
from llamaslot.base.tokens import WIDTH, Tokens, n_common, packed, unpacked

MAX_BYTES = 32 * 2**20
"""Memory that all records may take, estimated: in the prompt worker, in the parent, and again on disk."""
OVERHEAD = 600
"""Approximate bytes that a record takes in addition to its tokens and texts."""
_MAX_BRANCHES = 8


class Remembered(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The fields of all kinds of records."""

    key: bytes
    """Digest of 16 bytes by which it is found among the records of its kind. The namespace is a part of it."""
    tokens: bytes
    """Packed, without those of the records that it continues."""
    parent: bytes = b""
    """Key of the record of its kind that it continues; empty for none."""
    session: bytes = b""
    """Digest of the session with which it is dropped; empty for none."""
    owner: str = ""
    """The `Caller.owner` whose share is charged for it."""

    @property
    def n_bytes(self) -> int:
        """Bytes in memory, estimated."""
        return len(self.tokens) + OVERHEAD


class TextAnchor(Remembered, frozen=True, kw_only=True, tag="anchor"):
    """The tokens of a prompt and its reply, found by their exact text (`prompts/cut_points.py`)."""

    start: int
    """Number of tokens of the records that it continues."""


class Session(Remembered, frozen=True, kw_only=True, tag="session"):
    """The last prompt of a named conversation, with its reply, found by the name.

    First come the tokens that the model wants before every prompt (such as BOS), then those of the prompt's text,
    then those of the reply as far as it was sent, then what was generated after that:

        | added | prompt | sent | not sent |
                n_added  n_prompt n_text

    Agents send the requests of sub-agents and of titles under the name of the main conversation. Conversations that
    begin with other tools, another system prompt or another question are branches: each is a record of its own.
    """

    n_added: int
    n_prompt: int
    n_text: int
    namespace_key: str = ""
    """What its namespace has besides the salt: `adapters_key` of its LoRA adapters, and `CacheIds.key`."""
    is_text: bool = True
    """True if the prompt was text, and its tokens detokenize to that text. Prompts of token ids match no text."""
    branches: tuple[tuple[int, bytes, str], ...] = ()
    """Earlier token sequences of the session that branch off this one, or have another namespace, the oldest first:
    how many tokens each shares with it, its other tokens, packed, and its `namespace_key`. Their KV is dropped with
    the session too.
    """

    def continuing(self, earlier: Session) -> Session:
        """Return the same with the branches of the session that it replaces, and that one if it is a branch."""
        before = earlier.ids
        n = n_common(before, self.ids)
        branches = [
            (at, rest, key) if at <= n else (n, packed(before[n:at]) + rest, key)
            for at, rest, key in earlier.branches
        ]
        branches.append((n, packed(before[n:]), earlier.namespace_key))
        # Drop branches that this session itself continues, such as predicted next turns.
        branches = [each for each in branches if not self._is_begun(each, self.tokens, self.namespace_key)]
        return structs.replace(self, branches=tuple(branches[-_MAX_BRANCHES:]))

    def with_branch(self, tokens: Tokens, namespace_key: str) -> Session:
        """Return the same with another sequence of the session, in place of those that it continues."""
        n, path = n_common(self.ids, tokens), packed(tokens)
        branches = [each for each in self.branches if not self._is_begun(each, path, namespace_key)]
        branches.append((n, path[n * WIDTH :], namespace_key))
        return structs.replace(self, branches=tuple(branches[-_MAX_BRANCHES:]))

    def _is_begun(self, branch: tuple[int, bytes, str], path: bytes, namespace_key: str) -> bool:
        """True if a path of a namespace begins with a branch."""
        at, rest, key = branch
        return key == namespace_key and path.startswith(self.tokens[: at * WIDTH] + rest)

    @property
    def ids(self) -> Tokens:
        """All its tokens."""
        return unpacked(self.tokens)

    @property
    def paths(self) -> list[tuple[str, bytes]]:
        """The `namespace_key` of each of its sequences, and its tokens, packed; its own last."""
        branches = [(key, self.tokens[: n * WIDTH] + rest) for n, rest, key in reversed(self.branches)]
        return [*branches, (self.namespace_key, self.tokens)]

    @property
    def text_tokens(self) -> Tokens:
        """Tokens that stand for the text of the prompt and of the reply as far as it was sent."""
        return self.ids[self.n_added : self.n_text]

    @property
    def has_reply(self) -> bool:
        """True if its text ends with a reply."""
        return self.n_prompt < self.n_text

    @property
    def n_bytes(self) -> int:
        """Bytes in memory, estimated."""
        return len(self.tokens) + sum(len(rest) for _, rest, _ in self.branches) + OVERHEAD


class RememberedReply(Remembered, frozen=True, kw_only=True, tag="reply"):
    """A link of the chain: a reply that was sent, and the prompt before it, found by the reply's meaning.

    Its key is a digest of the state before it, of the conversation that it answered, and of its content and calls.
    Its tokens are those of prompt and reply, without the one that ended the generation.
    """

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
    n_reply: int
    """Tokens of the reply that were generated."""

    @property
    def n_bytes(self) -> int:
        """Bytes in memory, estimated."""
        # Clients choose the beginning, and characters take up to 4 bytes.
        texts = (self.opening, self.begun, self.closing)
        return len(self.tokens) + sum(map(sys.getsizeof, texts)) + OVERHEAD


TextRecord: TypeAlias = TextAnchor | Session | RememberedReply
RecordKind: TypeAlias = type[TextAnchor] | type[Session] | type[RememberedReply]


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
    returns: bool = False
    """True if the last reply in the conversation is one that this server sent after all that is before it."""


def session_digest(namespace: str, session_id: str, branch: str = "") -> bytes:
    """Return the 16 bytes by which a session or branch is known, here and on disk; they do not disclose its id."""
    digest = hashlib.blake2b(namespace.encode(), digest_size=16, person=b"branch" if branch else b"")
    digest.update(b"\0" + session_id.encode(errors="surrogatepass"))
    if branch:
        digest.update(b"\0" + branch.encode())
    return digest.digest()


class ReplyStore(Protocol):
    """Remembered replies by key."""

    def find(self, key: bytes) -> RememberedReply | None:
        """Return a reply; does not count as a use."""

    def use(self, key: bytes) -> None:
        """Make a reply and those before it in its chain the most recently used ones."""


class TextStore(Protocol):
    """Records on disk; used by one thread at a time. When they exceed `MAX_BYTES`, the oldest are deleted.

    A delete that fails is tried again later.
    """

    def records(self) -> Sequence[TextRecord]:
        """Return all records, the oldest first."""

    def write(self, record: TextRecord) -> None:
        """Write a record, in place of an earlier one of that kind and key."""

    def drop_session(self, digest: bytes) -> None:
        """Delete a session, its branches, replies and text anchors."""

    def clear_texts(self) -> None:
        """Delete all records."""
