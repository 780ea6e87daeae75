"""Statistics and state of the engine: slots, queue, decode calls, prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from llamaslot.base.backend import Vocab
from llamaslot.base.commands import InspectCache, InspectEngine, ProbePrompt
from llamaslot.base.errors import LlamaslotError
from llamaslot.base.namespaces import salt_namespace
from llamaslot.base.stats import CacheProbe, CacheState, EngineState, Miss, SlotState
from llamaslot.scheduler.request import Slot
from llamaslot.scheduler.scheduler import Scheduler
from llamaslot.scheduler.step import StepPlan, StepResult

Respond: TypeAlias = Callable[[msgspec.Struct | LlamaslotError], None]
"""Sends the reply to one query. Called exactly once unless the engine stops first."""


class Reports:
    """Counts decoded tokens, and answers queries between two steps.

    `why_not_reused` returns the reason why requests reuse nothing now; empty if the self-test allows reuse.
    """

    def __init__(self, scheduler: Scheduler, vocab: Vocab, why_not_reused: Callable[[], Miss]) -> None:
        self._scheduler = scheduler
        self._vocab = vocab
        self._why_not_reused = why_not_reused
        self._n_decode_calls = 0
        self._n_decoded = 0
        self._n_busy_slots = 0

    def count(self, plan: StepPlan, result: StepResult) -> None:
        """Count an executed step."""
        if plan.work:
            self._n_decode_calls += 1
            self._n_busy_slots += len(plan.work)
            self._n_decoded += sum(n for _, n in result.decoded.sent.values())

    def engine_state(self, _: InspectEngine) -> EngineState:
        """Return the state of slots, queue and cache."""
        scheduler = self._scheduler
        return EngineState(
            slots=tuple(map(self._slot_state, scheduler.slots)),
            n_queued=len(scheduler.queue),
            n_decode_calls=self._n_decode_calls,
            n_decoded_tokens=self._n_decoded,
            n_busy_slots_total=self._n_busy_slots,
            cache=scheduler.cache_stats(),
        )

    def cache_state(self, query: InspectCache) -> CacheState:
        """Return the statistics of the cache, and the prefixes with the most hits."""
        detokenize = self._vocab.detokenize if query.text else None
        listing = self._scheduler.cache.listing(self._scheduler.cache_stats(), query.top, detokenize)
        return listing if query.tenants else msgspec.structs.replace(listing, tenants=msgspec.UNSET)

    def probe(self, query: ProbePrompt) -> CacheProbe:
        """Return what is cached of a prompt."""
        params, prompt = query.params, query.prompt
        n_tokens = prompt.n_tokens
        if not params.cache_prompt:
            return CacheProbe(n_tokens, 0, 0, 0, n_tokens, 0, "off")
        why_not = self._why_not_reused() or ("" if self._scheduler.cache.settings.can_reuse else "unsupported")
        if why_not:
            return CacheProbe(n_tokens, 0, 0, 0, n_tokens, 0, why_not)
        found = self._scheduler.cache.probe(salt_namespace(params.cache_salt), prompt.packed_tokens)
        if found.miss == "diverged" and prompt.is_reply_edited:
            found.miss = "changed"
        found.session_match = prompt.session_match or None
        found.approximate_tokens = prompt.n_approximate
        return found

    def _slot_state(self, slot: Slot) -> SlotState:
        n_ctx, n_held = self._scheduler.n_ctx_slot, self._scheduler.cache.length(slot.id)
        request = slot.request
        if request is None:
            return SlotState(slot.id, n_ctx, n_held)
        return SlotState(
            id=slot.id,
            n_ctx=n_ctx,
            n_held=n_held,
            request_id=request.id,
            n_prompt=request.n_prompt,
            n_prompt_computed=request.n_prompt_computed,
            n_generated=request.n_generated,
            max_tokens=request.params.max_tokens,
            sampling=request.params.sampling,
        )
