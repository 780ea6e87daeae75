"""Counts of a flat block cache in the manner of vLLM, to compare the radix tree with.

Prompts are cut into blocks of four tokens. Each block is keyed by a hash over its tokens and the key of the block
before it, so that one key stands for a whole prefix; all blocks are in one dictionary, and nothing links branches:

    [a b c d] -> h1 = hash(h0, a b c d)      a prompt is looked up block by block
    [e f g h] -> h2 = hash(h1, e f g h)      until a key is missing
    [i j]        not a whole block: never shared

Blocks are evicted one by one, the least recently used first, and of one prompt the last first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 4
"""Tokens of a block."""


class BlockCache:
    """The keys of all cached blocks, for requests that come one after another."""

    def __init__(self, max_tokens: int | None = None) -> None:
        self._max_blocks = None if max_tokens is None else max_tokens // BLOCK
        self._keys: OrderedDict[int, None] = OrderedDict()
        """The least recently used first."""
        self.n_evicted = 0

    def __len__(self) -> int:
        """Blocks that are cached."""
        return len(self._keys)

    def request(self, prompt: Sequence[int]) -> int:
        """Run a request: the tokens of its prompt that are cached; at least its last token is computed."""
        keys, key = [], 0
        for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
            key = hash((key, *prompt[start : start + BLOCK]))
            keys.append(key)
        n_hits = next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while self._max_blocks is not None and len(self._keys) > self._max_blocks:
            self._keys.popitem(last=False)
            self.n_evicted += 1
        return min(n_hits, (len(prompt) - 1) // BLOCK) * BLOCK
