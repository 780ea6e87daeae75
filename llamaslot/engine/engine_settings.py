"""Settings of the engine, and the limits that follow from the loaded model."""

from __future__ import annotations

from dataclasses import dataclass

from llamaslot.base.backend import Backend
from llamaslot.base.commands import Submit
from llamaslot.base.errors import ContextSizeError, InvalidRequestError
from llamaslot.base.model import ModelInfo
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.offload.disk_io import SegmentDisk


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Policies of the engine; sizes and costs come from the backend."""

    gap_ms: float
    """About how long prefill may make the time between two tokens of a stream."""
    session_min_match: float
    """Fraction of a session's text that a prompt must keep to continue from the session's tokens."""
    idle_cells: int | None = None
    """Cells that idle prefixes may keep; None for all that nothing else needs."""
    offload_after: int | None = None
    """Further prompt tokens after which an idle prefix is offloaded; None for only when its cells are needed.
    """
    ram_bytes: int = 0
    """Host memory for what leaves the pool."""
    disk_bytes_per_day: int = 0
    """Bytes that may be written to disk a day; 0 for any number."""
    text_anchors: bool = True
    """Continue conversations that come back as text from the tokens that were generated for them."""
    debug_invariants: bool = False
    """Compare the cache with the backend whenever nothing runs; a difference ends the engine."""


def cache_settings(backend: Backend, settings: EngineSettings, disk: SegmentDisk | None) -> CacheSettings:
    """Settings of the cache for a backend and a disk."""
    info, cost = backend.info, backend.info.kv_cost
    return CacheSettings(
        n_slots=info.n_slots,
        n_cells=info.n_ctx,
        n_seqs=backend.n_seqs,
        unified=info.unified,
        can_trim=info.reuse,
        idle_cells=settings.idle_cells,
        offload_after=settings.offload_after,
        ram_bytes=settings.ram_bytes,
        disk_bytes=disk.capacity if disk is not None else 0,
        disk_bytes_per_day=settings.disk_bytes_per_day,
        segment_size=info.segment_size,
        prefill_us=cost.prefill_us if cost is not None else 0.0,
        save_us=cost.first_save_us if cost is not None else 0.0,
        load_us=cost.load_us if cost is not None else 0.0,
        gap_ms=settings.gap_ms,
        stream_copy_ms=info.stream_copy_ms,
    )


def check_submit(submit: Submit, n_prompt: int, info: ModelInfo) -> None:
    """Raise `InvalidRequestError` or `ContextSizeError` for a request that cannot run."""
    if not n_prompt:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    if n_prompt >= info.n_ctx_slot:
        raise ContextSizeError.of(n_prompt, info.n_ctx_slot)
    if not -1 <= submit.id_slot < info.n_slots:
        raise InvalidRequestError(f"id_slot must be between -1 and {info.n_slots - 1}", param="id_slot")
    for token in submit.sampling.logit_bias:
        if not 0 <= token < info.n_vocab:
            raise InvalidRequestError(
                f"logit_bias names token {token}; the vocabulary has {info.n_vocab}", param="logit_bias"
            )
