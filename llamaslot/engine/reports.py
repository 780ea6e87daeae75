"""What the engine tells of itself: slots, queue, prefix cache. It counts steps and changes nothing else."""

from __future__ import annotations

from llamaslot.base.backend import Vocab
from llamaslot.base.commands import InspectCache
from llamaslot.base.stats import CacheFigures, CacheState, State
from llamaslot.prompts.worker import PromptWorker
from llamaslot.scheduler import report
from llamaslot.scheduler.scheduler import Scheduler
from llamaslot.scheduler.step import StepPlan, StepResult


class Reports:
    """Answers questions between two steps, and counts what was decoded."""

    def __init__(self, scheduler: Scheduler, prompts: PromptWorker, vocab: Vocab) -> None:
        self._scheduler = scheduler
        self._prompts = prompts
        self._vocab = vocab
        self._n_decode_calls = 0
        self._n_decoded = 0
        self._n_busy_slots = 0

    def count(self, plan: StepPlan, result: StepResult) -> None:
        """Note a step that was carried out."""
        if plan.work:
            self._n_decode_calls += 1
            self._n_busy_slots += len(plan.work)
            self._n_decoded += sum(n for _, n in result.decoded.sent.values())

    def state(self, request_id: str) -> State:
        """The answer to `Inspect`."""
        scheduler = self._scheduler
        return State(
            request_id=request_id,
            slots=report.slots(scheduler.settings, scheduler.ledger, scheduler.slots),
            n_queued=len(scheduler.queue),
            n_decode_calls=self._n_decode_calls,
            n_decoded_tokens=self._n_decoded,
            n_busy_slots_total=self._n_busy_slots,
            cache=self.cache_figures(),
        )

    def cache_figures(self) -> CacheFigures:
        """What the cache holds, and what came of it so far."""
        scheduler, stats = self._scheduler, self._prompts.stats
        return report.figures(
            scheduler.settings,
            scheduler.ledger,
            scheduler.admission,
            scheduler.traffic,
            scheduler.n_preempted,
            anchors=stats[:2],
            sessions=stats[2:],
        )

    def cache_state(self, question: InspectCache) -> CacheState:
        """The answer to `InspectCache`."""
        spell = self._vocab.detokenize if question.text else None
        ledger = self._scheduler.ledger
        return report.state(question.request_id, self.cache_figures(), ledger, question.top, spell)
