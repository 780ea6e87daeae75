"""The last sequence of each conversation that its client gave a name: a *session*.

The next prompt of the conversation is held against it first, by its text (`prompts/continuing.py`). Nothing here
decides what is reused: whether the KV of these tokens is in a tier is the tree's to say. Sessions belong to one
thread, once the server serves; others may ask how many there are.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, replace

from llamaslot.base.tokens import WIDTH, Tokens, n_common, packed

MOST_BYTES = 32 * 2**20
"""About what all sessions may take, in memory and again on disk."""
OVERHEAD = 400
"""Bytes that a session takes about, beside its tokens and their text."""
_TOKEN_BYTES = 16
"""About what a token takes, with its text and where that ends."""
_MOST_OTHERS = 8


@dataclass(frozen=True, slots=True)
class Session:
    """A prompt and the reply to it.

    Its tokens are those that the model wants in front of every prompt, the text's, those of the reply as far as it
    was sent, and what was generated behind that:

        | added | prompt | sent | |
                n_added  n_prompt n_text
    """

    tokens: Tokens
    n_added: int
    n_prompt: int
    n_text: int
    is_text: bool = True
    """Whether the prompt came as text, which its tokens spell: token ids never stand for one."""
    others: tuple[tuple[int, bytes], ...] = ()
    """Earlier sequences of the session that are no part of this one, the oldest first: with how many of its tokens
    each begins, and the others, packed.
    """

    def behind(self, before: Session) -> Session:
        """The same as what comes after another one: that is kept in mind, and what was with it."""
        n = n_common(before.tokens, self.tokens)
        rests = [(at, rest) if at <= n else (n, packed(before.tokens[n:at]) + rest) for at, rest in before.others]
        if n < len(before.tokens):
            rests.append((n, packed(before.tokens[n:])))
        return replace(self, others=tuple(rests[-_MOST_OTHERS:]))

    @property
    def paths(self) -> list[bytes]:
        """The tokens of all its sequences, packed; its own last."""
        own = packed(self.tokens)
        return [*(own[: n * WIDTH] + rest for n, rest in reversed(self.others)), own]

    @property
    def added(self) -> Tokens:
        """What no text stands for."""
        return self.tokens[: self.n_added]

    @property
    def spelled(self) -> Tokens:
        """What stands for the text."""
        return self.tokens[self.n_added : self.n_text]

    @property
    def has_reply(self) -> bool:
        """Whether the text ends with a reply."""
        return self.n_prompt < self.n_text

    @property
    def n_bytes(self) -> int:
        """About what it takes of memory."""
        return _TOKEN_BYTES * len(self.tokens) + sum(len(rest) for _, rest in self.others) + OVERHEAD


def digest_of(space: str, session_id: str) -> bytes:
    """By what a session of a namespace is known, here and on disk: 16 bytes that do not tell its id."""
    digest = hashlib.blake2b(space.encode(), digest_size=16)
    digest.update(b"\0" + session_id.encode(errors="surrogatepass"))
    return digest.digest()


class Sessions:
    """Sessions by digest, at most `most_bytes` of them: the least recently used goes first."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self.n_bytes = 0

    def __len__(self) -> int:
        """Number of sessions."""
        return len(self._sessions)

    def find(self, digest: bytes) -> Session | None:
        """The session of that digest, used now."""
        session = self._sessions.get(digest)
        if session is not None:
            self._sessions.move_to_end(digest)
        return session

    def put(self, digest: bytes, session: Session) -> list[bytes]:
        """Know a session by that digest, in place of another one, unless it is too large; the digests of those
        that had to go for it.
        """
        self.drop(digest)
        if session.n_bytes > self._most_bytes:
            return []
        self._sessions[digest] = session
        self.n_bytes += session.n_bytes
        gone = []
        while self.n_bytes > self._most_bytes:
            gone.append(next(iter(self._sessions)))
            self.drop(gone[-1])
        return gone

    def drop(self, digest: bytes) -> Session | None:
        """Forget a session, and return it."""
        session = self._sessions.pop(digest, None)
        if session is not None:
            self.n_bytes -= session.n_bytes
        return session

    def clear(self) -> None:
        """Forget all."""
        self._sessions.clear()
        self.n_bytes = 0
