"""Ghost list: which prefixes were used before, whether or not their KV is still cached, and how long ago.

A path is recorded in blocks of 64 tokens, each as a hash of all tokens up to its end. With it a miss can be
reported as `evicted` instead of `cold`, and the hit rate of a cache of any size can be predicted.

The list is what an LRU cache without a limit would have, the most recently used block first. A block is a hit in a
cache of n blocks exactly if fewer than n blocks come before it: that is its depth (Mattson's stack distance). Of a
path the first blocks are used last, so its depths increase:

    recent  <---------------------------------------------------------------  oldest
    | path of request 9 |  rest of request 8  | rest of 6 |  rest of request 3  |
      a b c d e f g h      i j k l              m n          o p q r s
    a prompt with the blocks a b c i j          is found at the depths 0 1 2 8 9

Blocks that the same request used last are counted together (an *epoch*), so that a lookup adds up few numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import groupby

import numpy as np

from llamaslot.base.tokens import WIDTH

BLOCK_TOKENS = 64
MAX_BLOCKS = 2**15
"""Most blocks that are remembered: those of two million tokens, in a few megabytes."""
_MAX_EPOCHS = 4096
"""Epochs that are told apart; with one more, each two neighbors become one."""


class GhostList:
    """The `MAX_BLOCKS` most recently used blocks of all namespaces, and at which depths prompts found some."""

    def __init__(self) -> None:
        self._epochs: OrderedDict[int, int] = OrderedDict()
        """For each block the epoch of its last use; the least recently used block first."""
        self._n_blocks = [0]
        """Blocks whose last use was in each epoch; the last epoch is the present one."""
        self._found = np.zeros(MAX_BLOCKS, np.int64)
        """Prompt tokens that were found at each depth."""
        self.n_tokens = 0
        """Tokens of all prompts that were looked up."""

    def add(self, namespace: str, tokens: bytes) -> None:
        """Record that a request used `tokens`, which have KV now."""
        epochs, n_blocks = self._epochs, self._n_blocks
        for block in reversed([*_blocks(namespace, tokens)]):
            if (before := epochs.get(block)) is not None:
                n_blocks[before] -= 1
            epochs[block] = len(n_blocks) - 1
            epochs.move_to_end(block)
            n_blocks[-1] += 1
        while len(epochs) > MAX_BLOCKS:
            _, oldest = epochs.popitem(last=False)
            n_blocks[oldest] -= 1
        if len(n_blocks) >= _MAX_EPOCHS:
            for block, epoch in epochs.items():
                epochs[block] = epoch // 2
            n_blocks = self._n_blocks = [sum(n_blocks[i : i + 2]) for i in range(0, len(n_blocks), 2)]
        if n_blocks[-1]:
            n_blocks.append(0)

    def continues(self, namespace: str, tokens: bytes, n: int) -> bool:
        """True if the first whole block that ends after `n` tokens was used before."""
        end = (n // BLOCK_TOKENS + 1) * BLOCK_TOKENS * WIDTH
        if end > len(tokens):
            return False
        *_, block = _blocks(namespace, tokens[:end])
        return block in self._epochs

    def count(self, namespace: str, tokens: bytes, n_cached: int) -> int:
        """Count a prompt of which `n_cached` tokens are cached, at the depths of its blocks.

        Returns how many tokens after the cached ones were used before.
        """
        known = []
        for block in _blocks(namespace, tokens):
            epoch = self._epochs.get(block)
            if epoch is None:
                break
            known.append(epoch)
        depth = 0
        for epoch, blocks in groupby(known):
            start = sum(self._n_blocks[epoch + 1 :])
            depth = start + len([*blocks])
            self._found[start:depth] += BLOCK_TOKENS
        # The rest of what is known is a part of a block: of unknown length if it is not cached any more.
        n_known, n_tokens = len(known) * BLOCK_TOKENS, len(tokens) // WIDTH
        n_rest = n_cached - n_known if n_cached >= n_known else min(BLOCK_TOKENS // 2, n_tokens - n_known)
        if depth < MAX_BLOCKS:
            self._found[depth] += n_rest
        self.n_tokens += n_tokens + 1
        return max(0, n_known - n_cached)

    def hit_rate(self, n_tokens: int) -> float:
        """Predict which fraction of the prompt tokens a cache that keeps `n_tokens` tokens would have."""
        return float(self._found[: n_tokens // BLOCK_TOKENS].sum()) / self.n_tokens if self.n_tokens else 0.0


def _blocks(namespace: str, tokens: bytes) -> Iterator[int]:
    """Yield the hashes of the whole blocks of `tokens`, the first one first."""
    # Python's hash of bytes has a secret key in each process, so that clients cannot choose two with the same.
    block, size = hash(namespace), BLOCK_TOKENS * WIDTH
    for end in range(size, len(tokens) + 1, size):
        block = hash((block, tokens[end - size : end]))
        yield block
