"""Text anchors: remembered token ids of texts whose re-tokenization would differ.

A conversation comes back as text. Tokens that were generated for a reply need not be those that tokenizing its text
gives, so the prefix match would end at the reply and everything after it be computed again. A *text anchor* maps
the digest of a prompt with its reply (`prompts/cut_points.py`) to their token ids. It continues the anchor that
its prompt began with, so that each token of a conversation is kept once.

Anchors only give token ids; whether their KV is cached is for the prefix cache to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from llamaslot.base.text_records import TextRecord
from llamaslot.base.tokens import WIDTH, Tokens, packed, unpacked
from llamaslot.prompts.lru_cache import LruCache

MAX_BYTES = 8 * 2**20
"""Memory that all anchors may take, and again on disk; estimated."""
OVERHEAD = 200
"""Bytes that an anchor takes in addition to its tokens, about."""
_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(tuple[int, bytes]).decode


@dataclass(frozen=True, slots=True)
class TextAnchor:
    """Token ids of a text, without those of its parent at the start."""

    digest: bytes
    """Identifies the text."""
    parent: bytes
    """Digest of the anchor that it continues; empty for none."""
    start: int
    """Tokens of the parent and its ancestors."""
    tokens: bytes
    """Its own, packed."""

    @classmethod
    def of(cls, record: TextRecord) -> TextAnchor:
        """Return the anchor of a record; raises `msgspec.MsgspecError`."""
        return cls(record.digest, record.parent, *_decode(record.content))

    def record(self) -> TextRecord:
        """Return it as a record."""
        return TextRecord("anchor", self.digest, _encode((self.start, self.tokens)), self.parent)

    @property
    def end(self) -> int:
        """Tokens in all."""
        return self.start + len(self.tokens) // WIDTH

    @property
    def n_bytes(self) -> int:
        """Bytes in memory, estimated."""
        return len(self.tokens) + OVERHEAD


class TextAnchors(LruCache[TextAnchor]):
    """The text anchors of all namespaces. Parents count as used after their children, so that children go first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(max_bytes)

    def find(self, digest: bytes) -> Tokens | None:
        """Return the token ids of a text, int32; None without an anchor for it."""
        chain = self._chain(digest)
        return unpacked(b"".join(anchor.tokens for anchor in reversed(chain))) if chain else None

    def add(self, digest: bytes, tokens: Tokens, parent: bytes) -> TextAnchor | None:
        """Remember the token ids of a text; those of `parent` are not kept again if `tokens` begin with them.

        None if the text has an anchor already, or if the anchor and those that it continues are too large.
        """
        run = packed(tokens)
        shared = b"".join(anchor.tokens for anchor in reversed(self._chain(parent)))
        # The parent may have been dropped since the prompt was tokenized, and added again with other tokens.
        if not shared or not run.startswith(shared):
            parent, shared = b"", b""
        anchor = TextAnchor(digest, parent, len(shared) // WIDTH, run[len(shared) :])
        return anchor if self.insert(anchor) else None

    def insert(self, anchor: TextAnchor) -> bool:
        """Add an anchor; False if its text has one, if it does not fit its parent, or if both are too large."""
        ancestors = self._chain(anchor.parent)
        start = ancestors[0].end if ancestors else 0
        if anchor.digest in self or anchor.start != start or not anchor.tokens:
            return False
        if anchor.n_bytes + sum(each.n_bytes for each in ancestors) > self.max_bytes:
            return False
        self.put(anchor.digest, anchor)
        self._chain(anchor.digest)
        return True

    def _chain(self, digest: bytes) -> list[TextAnchor]:
        """Use an anchor and its ancestors, in this order."""
        chain: list[TextAnchor] = []
        while (anchor := self.get(digest)) is not None:
            chain.append(anchor)
            digest = anchor.parent
        return chain
