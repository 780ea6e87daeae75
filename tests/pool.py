"""Comparison of the KV cache with the fake backend's pool, cell by cell."""

from __future__ import annotations

from itertools import pairwise

from llamaslot.base.cache_ids import MAX_MARKED_TOKEN
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
        # Ids that are negative in the tree alone are those of marked tokens: images are so in the cells too.
        marked = {i: marked_token(own) for (i, own), (_, cell) in zip(held, seen, strict=False) if own < 0 <= cell}
        adapters = [(i, token // N_TOKENS) for i, token in enumerate(computed) if token >= 0]
        starts = [i for (_, before), (i, own) in pairwise(adapters) if own != before]
        has_key = end is not None and "+" in end.namespace
        assert len(starts) <= 1, f"sequence {seq} has KV of several adapters"
        assert has_key or all(i - 1 in marked for i in starts), f"sequence {seq} has KV of other adapters"
        ends = [i for i in marked if i + 1 not in marked and i + 1 < len(computed)]
        assert all(computed[i + 1] < 0 or i + 1 in starts for i in ends), f"sequence {seq} has marks of nothing"
        held = [(i, marked.get(i, token)) for i, token in held]
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


def marked_token(marked_id: int) -> int:
    """The token that a marked id stands for; the ten bits below it are of a digest."""
    return marked_id >> 10 & MAX_MARKED_TOKEN
