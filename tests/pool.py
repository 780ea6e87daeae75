"""Whether the ledger and the fake backend's pool agree, cell by cell."""

from __future__ import annotations

from llamaslot.backend.fake import FakeBackend
from llamaslot.kvcache.shared import SharedLedger
from llamaslot.scheduler.scheduler import Scheduler


def check_pool(scheduler: Scheduler, backend: FakeBackend, *, computing: bool = False) -> None:
    """What the ledger says of every sequence is what the backend holds; `computing` sequences may hold more.

    Between a change and the step that carries it out there is nothing to compare.
    """
    ledger = scheduler.ledger
    ledger.tree.check()
    if not ledger.is_settled:
        return
    for seq in range(backend.n_seqs):
        held, seen = list(enumerate(ledger.tree.tokens(seq).tolist())), backend.seen(seq)
        running = seq < len(scheduler.slots) and scheduler.slots[seq].request is not None
        assert seen[: len(held)] == held, seq
        assert seen == held or (running and computing), seq
        assert ledger.tree.is_pinned(seq) == (running and ledger.holds(seq)), seq
    if not computing:
        ledger.check(backend.seq_range)
        assert backend.cells_used == ledger.n_used
        if isinstance(ledger, SharedLedger):
            assert ledger.cells.high_water == backend.high_water
