"""Miss reasons: why no more of a prompt is cached.

A ghost list remembers digests of prefixes that were computed before, whether or not their KV is still cached.
With it a miss can be reported as `evicted` instead of `cold`. A path is recorded in blocks of tokens, each as a
digest of all tokens up to its end.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator

from llamaslot.base.stats import Miss
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.match import Match

BLOCK_TOKENS = 64
MAX_BLOCKS = 2**15
"""Most blocks that are remembered: those of two million tokens, in a few megabytes."""


def miss_reason(match: Match, ghosts: GhostList, min_shared: int) -> Miss:
    """Return why no more of the tokens are cached; empty if all are, or if nothing explains it."""
    n = match.n_cached
    if n * WIDTH == len(match.tokens):
        return ""
    if match.n_without_state >= min_shared:
        return "no_checkpoint"
    if ghosts.continues(match.namespace, match.tokens, n + match.n_without_state):
        return "evicted"
    if n < min_shared:
        return "salted" if match.namespace else "cold"
    return "diverged" if any(each.diverges_at(n) for each in (match, match.public) if each is not None) else ""


class GhostList:
    """The `max_blocks` latest blocks of all namespaces."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def add(self, namespace: str, tokens: bytes, start: int) -> None:
        """Record that `tokens` were computed from position `start` on."""
        for digest in _digests(namespace, tokens, start):
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def continues(self, namespace: str, tokens: bytes, n: int) -> bool:
        """True if the first whole block that ends after `n` tokens was computed before."""
        return next(_digests(namespace, tokens, n), b"") in self._blocks


def _digests(namespace: str, tokens: bytes, start: int) -> Iterator[bytes]:
    """Yield the digests of the whole blocks that end after `start` tokens."""
    digest = hashlib.blake2b(namespace.encode() + b"\0", digest_size=8)
    done = 0
    for end in range((start // BLOCK_TOKENS + 1) * BLOCK_TOKENS * WIDTH, len(tokens) + 1, BLOCK_TOKENS * WIDTH):
        digest.update(tokens[done:end])
        done = end
        yield digest.copy().digest()
