"""Comparison of the KV cache with the fake backend's pool, cell by cell."""

from __future__ import annotations

from llamaslot.base.tokens import unpacked
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.scheduler.scheduler import Scheduler
from tests.fake_backend import N_TOKENS, FakeBackend


def check_pool(scheduler: Scheduler, backend: FakeBackend, *, computing: bool = False) -> None:
    """Verify that every sequence holds in the backend what the cache says; `computing` ones may hold more.

    Between a change and the step that carries it out there is nothing to compare.
    """
    cache = scheduler.cache
    tree = cache._tree
    tree.check()
    if cache._sequences.operations:
        return
    for seq in range(backend.n_seqs):
        held, in_cells = list(enumerate(tokens_of(tree, seq))), backend.seen(seq)
        seen = [(position, token % N_TOKENS) for position, token in in_cells]
        assert len({token // N_TOKENS for _, token in in_cells}) <= 1, f"sequence {seq} has KV of other adapters"
        running = seq < len(scheduler.slots) and scheduler.slots[seq].request is not None
        assert seen[: len(held)] == held, seq
        assert seen == held or (running and computing), seq
        assert tree.is_pinned(seq) == (running and cache._sequences.in_use(seq)), seq
    if not computing:
        cache.check(backend.seq_range)
        assert backend.cells_used == cache.cells.used


def tokens_of(tree: RadixTree, seq: int) -> list[int]:
    """All tokens that a sequence holds."""
    end = tree.end_node(seq)
    return unpacked(end.prefix()).tolist() if end is not None else []
