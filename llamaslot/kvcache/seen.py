"""What was computed once, wherever it is now: so that a request can be told that more of its prompt was known.

A path is noted in blocks of tokens from its start, each by a digest of all tokens up to its end, so the length of
what was known is known to a block.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator

from llamaslot.base.tokens import WIDTH

BLOCK = 64
"""Tokens."""
_MOST = 2**15
"""Blocks that are remembered: two million tokens, some megabytes."""


class Seen:
    """The blocks of all namespaces, the latest `most` of them."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def note(self, space: str, tokens: bytes, start: int) -> None:
        """These tokens were computed from `start` on."""
        for digest in _digests(space, tokens, start):
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def continues(self, space: str, tokens: bytes, n: int) -> bool:
        """Whether the first whole block of these tokens that ends behind the first `n` was computed once."""
        end = (n // BLOCK + 1) * BLOCK * WIDTH
        if end > len(tokens):
            return False
        return next(_digests(space, tokens[:end], n)) in self._blocks


def _digests(space: str, tokens: bytes, start: int) -> Iterator[bytes]:
    """Those of the blocks that end behind the first `start` tokens."""
    digest = hashlib.blake2b(space.encode() + b"\0", digest_size=8)
    done = 0
    for end in range((start // BLOCK + 1) * BLOCK * WIDTH, len(tokens) + 1, BLOCK * WIDTH):
        digest.update(tokens[done:end])
        done = end
        yield digest.copy().digest()
