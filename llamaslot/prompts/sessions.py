"""Sessions: the last prompt and reply of each conversation that its client named.

The next prompt of the conversation is compared with it first, by text (`prompts/session_matching.py`). A session
only gives token ids; whether their KV is cached is for the prefix cache to say.

Agents send the requests of sub-agents and of titles under the name of the main conversation. Conversations that
begin with other tools, another system prompt or another question are branches: each is a `Session` of its own,
whose `parent` is the digest of the name.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from llamaslot.base.text_records import TextRecord
from llamaslot.base.tokens import WIDTH, Tokens, n_common, packed, unpacked

if TYPE_CHECKING:
    from llamaslot.prompts.detokenized import DetokenizedText

MAX_BYTES = 32 * 2**20
"""Memory that all sessions may take; estimated."""
MAX_RECORD_BYTES = 10 * 2**20
"""Bytes of all their records, in memory and on disk: they have no texts, so that the records of all sessions that
`MAX_BYTES` admits are about this large, if these have 100 tokens or more.
"""
OVERHEAD = 400
"""Bytes that a session takes in addition to its tokens and their text, about."""
_TOKEN_BYTES = 16
"""Bytes that a token takes with its text and the offset of its end, about."""
_MAX_BRANCHES = 8
_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(tuple[bytes, int, int, int, bool, tuple[tuple[int, bytes], ...]]).decode


@dataclass(slots=True)
class Session:
    """The tokens of a prompt and of the reply to it.

    First come those that the model wants before every prompt (such as BOS), then those of the prompt's text, then
    those of the reply as far as it was sent, then what was generated after that:

        | added | prompt | sent | not sent |
                n_added  n_prompt n_text
    """

    tokens: Tokens
    n_added: int
    n_prompt: int
    n_text: int
    is_text: bool = True
    """True if the prompt was text, and its tokens detokenize to that text. Prompts of token ids match no text."""
    branches: tuple[tuple[int, bytes], ...] = ()
    """Earlier token sequences of the session that branch off this one, the oldest first: how many tokens each
    shares with it, and its other tokens, packed. Dropping the session drops their KV too.
    """
    parent: bytes = b""
    """Digest of the session that it is a branch of; empty if it is none."""
    detokenized: DetokenizedText | None = field(default=None, compare=False)
    """Text of `text_tokens`, once it was needed."""

    @classmethod
    def of(cls, record: TextRecord) -> Session:
        """Return the session of a record; raises `msgspec.MsgspecError`."""
        tokens, n_added, n_prompt, n_text, is_text, branches = _decode(record.content)
        return cls(unpacked(tokens), n_added, n_prompt, n_text, is_text, branches, record.parent)

    def record(self, digest: bytes) -> TextRecord:
        """Return it as a record."""
        counts = self.n_added, self.n_prompt, self.n_text
        content = _encode((packed(self.tokens), *counts, self.is_text, self.branches))
        return TextRecord("session", digest, content, self.parent)

    def continuing(self, earlier: Session) -> Session:
        """Return the same with the branches of the session that it replaces, and that one if it is a branch."""
        n = n_common(earlier.tokens, self.tokens)
        branches = [
            (at, rest) if at <= n else (n, packed(earlier.tokens[n:at]) + rest) for at, rest in earlier.branches
        ]
        if n < len(earlier.tokens):
            branches.append((n, packed(earlier.tokens[n:])))
        return replace(self, branches=tuple(branches[-_MAX_BRANCHES:]))

    @property
    def paths(self) -> list[bytes]:
        """The tokens of all its sequences, packed; its own last."""
        own = packed(self.tokens)
        return [*(own[: n * WIDTH] + rest for n, rest in reversed(self.branches)), own]

    @property
    def added_tokens(self) -> Tokens:
        """Tokens that stand for no text."""
        return self.tokens[: self.n_added]

    @property
    def text_tokens(self) -> Tokens:
        """Tokens that stand for the text of the prompt and of the reply as far as it was sent."""
        return self.tokens[self.n_added : self.n_text]

    @property
    def has_reply(self) -> bool:
        """True if its text ends with a reply."""
        return self.n_prompt < self.n_text

    @property
    def n_bytes(self) -> int:
        """Bytes in memory, estimated."""
        return _TOKEN_BYTES * len(self.tokens) + sum(len(rest) for _, rest in self.branches) + OVERHEAD


def session_digest(namespace: str, session_id: str, branch: str = "") -> bytes:
    """Return the 16 bytes by which a session or branch is known, here and on disk; they do not disclose its id."""
    digest = hashlib.blake2b(namespace.encode(), digest_size=16, person=b"branch" if branch else b"")
    digest.update(b"\0" + session_id.encode(errors="surrogatepass"))
    if branch:
        digest.update(b"\0" + branch.encode())
    return digest.digest()
