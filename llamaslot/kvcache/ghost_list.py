"""Ghost list: digests of prefixes that were computed once, wherever their KV is now.

It tells a request whose prefix is not cached any more that it was evicted. A path is recorded in blocks of tokens
from its start, each by a digest of all tokens up to its end.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from itertools import takewhile

from llamaslot.base.tokens import WIDTH

BLOCK_TOKENS = 64
MAX_BLOCKS = 2**15
"""Two million tokens, a few megabytes."""


class GhostList:
    """Blocks of all namespaces, the latest `max_blocks` of them."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def add(self, namespace: str, tokens: bytes, start: int) -> None:
        """Record that these tokens were computed from `start` on."""
        for digest in _digests(namespace, tokens, start):
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def continues(self, namespace: str, tokens: bytes, n: int) -> bool:
        """True if the first whole block that ends after the first `n` tokens was computed once."""
        end = (n // BLOCK_TOKENS + 1) * BLOCK_TOKENS * WIDTH
        return end <= len(tokens) and self.computed_end(namespace, tokens[:end], n) > n

    def computed_end(self, namespace: str, tokens: bytes, n: int) -> int:
        """The end of the whole blocks after the first `n` tokens that were computed once; `n` without any."""
        computed = takewhile(self._blocks.__contains__, _digests(namespace, tokens, n))
        n_computed = sum(1 for _ in computed)
        return (n // BLOCK_TOKENS + n_computed) * BLOCK_TOKENS if n_computed else n


def _digests(namespace: str, tokens: bytes, start: int) -> Iterator[bytes]:
    """Yield the digests of the blocks that end after the first `start` tokens."""
    digest = hashlib.blake2b(namespace.encode() + b"\0", digest_size=8)
    done = 0
    for end in range((start // BLOCK_TOKENS + 1) * BLOCK_TOKENS * WIDTH, len(tokens) + 1, BLOCK_TOKENS * WIDTH):
        digest.update(tokens[done:end])
        done = end
        yield digest.copy().digest()
