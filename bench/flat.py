"""A flat block cache in the manner of vLLM, to compare the radix tree with.

Prompts are cut into blocks of four tokens. Each block is keyed by a hash over its tokens and the key of the block
before it, so that one key stands for a whole prefix; all blocks lie in one dictionary, and nothing knows what
branches off where:

    [a b c d] -> h1 = hash(h0, a b c d)      a prompt is looked up block by block
    [e f g h] -> h2 = hash(h1, e f g h)      until a key is missing
    [i j]        not a whole block: never shared

A block is in use while a running request goes through it. What is unused is kept, and given up block by block, the
least recently used first. A request lets go of its last block first: a block never goes before those behind it.

`FlatLedger` lets the engine run on it. What may be reused and what goes is decided by the blocks alone; that
decision is carried out on real sequences, as everything in the ledger is: reusing is a `Copy` of leading blocks
from a sequence that holds them, evicting removes a block's cells from every one that does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from llamaslot.base.tokens import WIDTH, Tokens, packed
from llamaslot.kvcache.ledger import Fetched
from llamaslot.kvcache.shared import SharedLedger

BLOCK = 4
"""Tokens of a block."""
_SIZE = BLOCK * WIDTH


@dataclass(slots=True, eq=False)
class Block:
    """Tokens behind those of the blocks before it."""

    key: bytes
    space: str
    before: Block | None
    run: bytes
    start: int
    """Tokens in front of this block."""
    n_users: int = 0
    """Running requests that go through it."""

    def path(self) -> bytes:
        """All tokens up to the end of this block."""
        runs, block = [], self
        while block is not None:
            runs.append(block.run)
            block = block.before
        return b"".join(reversed(runs))


class BlockCache:
    """All blocks whose KV is kept, by key."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, Block] = {}
        self._unused: OrderedDict[bytes, Block] = OrderedDict()
        """Blocks that no running request goes through, the least recently used first."""
        self.n_evicted = 0

    def __len__(self) -> int:
        """Blocks that are kept."""
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        """All of them."""
        return iter(self._blocks.values())

    def match(self, space: str, tokens: bytes) -> list[Block]:
        """The leading blocks of `tokens` that are kept; changes nothing."""
        found: list[Block] = []
        for at in range(0, len(tokens) - _SIZE + 1, _SIZE):
            block = self._blocks.get(_key(space, found[-1] if found else None, tokens[at : at + _SIZE]))
            if block is None:
                break
            found.append(block)
        return found

    def use(self, block: Block) -> None:
        """A running request goes through this block."""
        self._unused.pop(block.key, None)
        block.n_users += 1

    def put(self, space: str, before: Block | None, run: bytes) -> Block:
        """The block with these tokens behind another one, in use now; kept from now on if it was not."""
        key = _key(space, before, run)
        block = self._blocks.get(key)
        if block is None:
            start = before.start + BLOCK if before is not None else 0
            block = self._blocks[key] = Block(key, space, before, run, start)
        self.use(block)
        return block

    def let_go(self, blocks: Sequence[Block]) -> None:
        """A request that went through these blocks has ended."""
        for block in reversed(blocks):
            block.n_users -= 1
            if block.n_users == 0:
                self._unused[block.key] = block

    def evict(self, n: int) -> list[Block]:
        """Give up so many unused blocks, or all there are."""
        gone = [self._unused.popitem(last=False)[1] for _ in range(min(n, len(self._unused)))]
        for block in gone:
            del self._blocks[block.key]
        self.n_evicted += len(gone)
        return gone


@dataclass(slots=True)
class _Running:
    """What a running sequence holds: whole blocks, and the tokens behind them."""

    space: str
    blocks: list[Block]
    rest: bytes = field(default=b"")


class FlatLedger(SharedLedger):
    """A ledger in which only whole blocks are reused and given up, as a `BlockCache` says.

    What it inherits keeps account of which sequence holds which cells, and decides nothing about reuse. It needs
    as many reserved ids as there are branches, and is no use for requests that keep to themselves.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.blocks = BlockCache()
        self._running: dict[int, _Running] = {}

    def claim(self, choices: Sequence[int], space: str, tokens: bytes) -> tuple[int, int]:
        """Let a slot hold the leading blocks of `tokens` that are kept; the slot, and the tokens they have."""
        blocks = self.blocks.match(space, tokens)
        for block in blocks:
            self.blocks.use(block)
        seq, n = super().claim(choices, space, tokens[: len(blocks) * _SIZE])
        assert n == len(blocks) * BLOCK, "a block is kept whose cells are not"
        self._running[seq] = _Running(space, blocks)
        return seq, n

    def fetch(self, _seq: int, _tokens: bytes, _most: int | None = None) -> Fetched:
        """Nothing is taken over but what `claim` took."""
        return Fetched.ALL

    def append(self, seq: int, tokens: Tokens) -> None:
        """A running sequence computed these tokens; each block that they fill can be reused at once."""
        super().append(seq, tokens)
        running = self._running[seq]
        rest = running.rest + packed(tokens)
        while len(rest) >= _SIZE:
            before = running.blocks[-1] if running.blocks else None
            running.blocks.append(self.blocks.put(running.space, before, rest[:_SIZE]))
            rest = rest[_SIZE:]
        running.rest = rest

    def unpin(self, seq: int) -> None:
        """The request in a slot has ended; its whole blocks stay, idle."""
        super().unpin(seq)
        running = self._running.pop(seq)
        self.truncate(seq, len(running.blocks) * BLOCK)
        self.blocks.let_go(running.blocks)

    def spoil(self, seq: int) -> None:
        """A decode failed; there is nothing to compare then."""
        raise AssertionError(f"a decode of sequence {seq} failed")

    def evict(self, n_cells: int) -> int:
        """Give up unused blocks until so many cells are free, or all there are; the cells that this frees."""
        n_used = self.n_used
        while (n_freed := n_used - self.n_used) < n_cells:
            gone = self.blocks.evict(-(-(n_cells - n_freed) // BLOCK))
            if not gone:
                break
            self._cut_blocks(gone)
            self.counts.n_lost_tokens += len(gone) * BLOCK
        return n_freed

    def _cut_blocks(self, gone: Sequence[Block]) -> None:
        """Let every sequence drop these blocks; what lies behind one of them is among them."""
        keys = {block.key for block in gone}
        for block in gone:
            if block.before is None or block.before.key not in keys:
                match = self.tree.match(block.space, block.path())
                for seq in list(self.tree.holders(match.node)):
                    self.truncate(seq, block.start)

    def check(self, range_of: Callable[[int], range]) -> None:
        """See `Ledger.check`; while nothing runs, the cells in use are those of the blocks, and no others.

        Two blocks may share cells where they begin alike: what is inherited keeps no token twice.
        """
        super().check(range_of)
        assert not self._running
        assert self.n_used <= len(self.blocks) * BLOCK
        for block in self.blocks:
            path = block.path()
            assert self.tree.match(block.space, path).n == block.start + BLOCK == len(path) // WIDTH


def _key(space: str, before: Block | None, run: bytes) -> bytes:
    return blake2b((before.key if before is not None else space.encode()) + run, digest_size=16).digest()
