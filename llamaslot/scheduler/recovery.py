"""Recovery from failed steps: what sequences keep, and which request is at fault.

After a failed decode the backend reports how much each sequence holds, and requests continue from there if they
can. Otherwise the sequence is *invalidated*: it is emptied, and in the next plan its request starts again from what
is cached of its tokens. If the step had several requests, all of them are *suspects*: each is computed alone, and
only one that fails alone is at fault.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llamaslot.base.backend import Status
from llamaslot.kvcache.cache import KVCache
from llamaslot.scheduler.admission import Admission
from llamaslot.scheduler.request import NO_TOKENS, Request, Slot
from llamaslot.scheduler.step import StepPlan, StepResult


class Recovery:
    """Handles failed steps of one scheduler. Times are seconds on its clock."""

    def __init__(self, cache: KVCache, slots: Sequence[Slot], admission: Admission) -> None:
        self._cache = cache
        self._slots = slots
        self._admission = admission
        self.suspects: list[str] = []
        """Ids of requests of a failed step, to be retried one by one before anything else runs."""
        self._invalidated: set[int] = set()
        """Slots whose running request lost its sequence, by a failed step or a change of the pool's layout."""

    def reacquire_invalidated(self) -> None:
        """Restart running requests whose sequence was invalidated, from what is cached of their tokens."""
        for slot in self._invalidated:
            request = self._slots[slot].request
            if request is not None:
                self._cache.acquire([slot], self._admission.match(request), is_new=False)
        self._invalidated.clear()

    def release_running(self) -> None:
        """Unpin the sequences of running requests, which leave the pool; the next plan loads them again."""
        for slot in self._slots:
            if slot.request is not None:
                self._cache.release(slot.id)
                slot.request.restart()
                self._invalidated.add(slot.id)

    def drop_incomplete(self, incomplete: Collection[int], plan: StepPlan, now: float) -> None:
        """Drop sequences whose operations failed; their requests start again from what is cached."""
        self._cache.on_incomplete(plan.operations, incomplete, now)
        for seq in incomplete:
            if seq < len(self._slots) and self._slots[seq].request is not None:
                self._invalidate(seq)
            else:
                self._cache.invalidate(seq)

    def clear_suspects(self, request_ids: Collection[str]) -> None:
        """Remove requests from the suspects: they were computed, or have failed alone."""
        self.suspects = [each for each in self.suspects if each not in request_ids]

    def on_failed(self, plan: StepPlan, result: StepResult) -> Request | None:
        """Keep what a failed decode computed; returns the request at fault, to be ended, if it ran alone."""
        status = result.decoded.status
        if status in (Status.ABORTED, Status.FATAL):
            self._cache.on_step_failed({work.run.seq: work.run.start for work in plan.work})
        for work in plan.work:
            run = work.run
            n_applied = result.lengths[run.seq] - run.start
            # Tokens that were computed have no scores, so a request that scores its prompt must compute them again.
            if not 0 <= n_applied <= len(run.tokens) or (n_applied and not work.request.is_scored):
                self._invalidate(run.seq)
                continue
            self._cache.append(run.seq, run.tokens[:n_applied])
            if len(work.request.tokens) == self._cache.length(work.request.slot):
                self._rewind(work.request)
        if status in (Status.ABORTED, Status.FATAL):
            if not self._cache.settings.can_reuse:
                self._invalidate_others({work.run.seq for work in plan.work})
            running = (slot.id for slot in self._slots if slot.request is not None)
            self._cache.recover_states(slot for slot in running if slot not in self._invalidated)
        # Cells are counted exactly, so this should not happen (fact 12). If it does, evict all idle cells and
        # retry.
        if status is Status.NO_CELLS and self._cache.evict(self._cache.cells.idle):
            return None
        for work in plan.work:
            work.request.draft = NO_TOKENS
        if len(plan.work) > 1 or plan.padding or plan.work[0].run.n_drafted:
            self.suspects = [work.request.id for work in plan.work]
            return None
        request = plan.work[0].request
        self.clear_suspects([request.id])
        self._cache.invalidate(request.slot)
        return request

    def _invalidate_others(self, seqs: Collection[int]) -> None:
        """Invalidate running requests that were not in a failed step.

        A step may also move the recurrent states of other sequences in llama.cpp; if it fails, these are lost.
        """
        for slot in self._slots:
            if slot.request is not None and slot.id not in seqs:
                self._invalidate(slot.id)

    def _invalidate(self, slot: int) -> None:
        self._cache.invalidate(slot)
        self._invalidated.add(slot)

    def _rewind(self, request: Request) -> None:
        """Drop a request's last token, so that it is computed again: its logits were never sampled from."""
        if self._cache.settings.can_trim and len(request.tokens) > 1:
            self._cache.truncate(request.slot, len(request.tokens) - 1)
        else:
            self._invalidate(request.slot)
