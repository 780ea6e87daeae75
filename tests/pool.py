"""Comparison of the KV cache with the fake backend's pool, cell by cell."""

from __future__ import annotations

from itertools import pairwise

from llamaslot.base.namespaces import is_shifted
from llamaslot.base.tokens import unpacked
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.scheduler.scheduler import Scheduler
from tests.fake_backend import N_TOKENS, FakeBackend, is_moved, token_of


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
        seen = [(position, token_of(token)) for position, token in in_cells]
        computed = [token for _, token in in_cells if not is_moved(token)]
        end = tree.end_node(seq)
        # The cache marks tokens with digests, before an image or where other adapters begin. Those of images are
        # negative in the cells too.
        marks = {
            i: own >> 10 & 2**20 - 1 for (i, own), (_, token) in zip(held, seen, strict=False) if own < 0 <= token
        }
        adapters = [(i, token // N_TOKENS) for i, token in enumerate(computed) if token >= 0]
        starts = [i for (_, before), (i, own) in pairwise(adapters) if own != before]
        has_key = end is not None and "+" in end.namespace
        is_told = has_key or all(i - 1 in marks for i in starts)
        assert len(starts) <= 1 and is_told, f"sequence {seq} has KV of other adapters"  # noqa: PT018
        for i in marks:
            is_last = i + 1 not in marks and i + 1 < len(computed)
            assert not is_last or computed[i + 1] < 0 or i + 1 in starts, f"sequence {seq} has digests of nothing"
        held = [(i, marks.get(i, token)) for i, token in held]
        may_be_moved = end is not None and is_shifted(end.namespace)
        assert may_be_moved or len(computed) == len(in_cells), f"sequence {seq} has KV of other positions"
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
