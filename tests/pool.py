"""Comparison of the KV cache with the fake backend's pool, cell by cell."""

from __future__ import annotations

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
        # After the tokens that the cache marks with a digest, other adapters begin. Those of images are negative.
        digests = [i for (i, own), (_, token) in zip(held, seen, strict=False) if own < 0 <= token]
        start = digests[-1] + 1 if digests else len(computed)
        parts = (computed[:start], computed[start:])
        adapters = [{token // N_TOKENS for token in part if token >= 0} for part in parts]
        assert all(len(each) <= 1 for each in adapters), f"sequence {seq} has KV of other adapters"
        assert adapters[0] != adapters[1] or not computed, f"sequence {seq} has digests and no other adapters"
        held = [(i, seen[i][1] if i in digests else token) for i, token in held]
        end = tree.end_node(seq)
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
