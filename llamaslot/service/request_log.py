"""The log line and the metrics of each request that has ended."""

from __future__ import annotations

from typing import Any

import structlog

from llamaslot.base.events import Cancelled, Failed, Finished, Progress
from llamaslot.service.metrics import Metrics, per_second

_MEAN_DECAY = 0.9
"""Weight of earlier requests in the mean duration."""
_log = structlog.get_logger(__name__)


class RequestLog:
    """Logs and counts ends; `has_remote` says whether there is a remote tier, whose tokens the log then names."""

    def __init__(self, metrics: Metrics, *, has_remote: bool) -> None:
        self.metrics = metrics
        self.mean_seconds = 0.0
        """Mean time that requests spend in their slots, the latest ones first."""
        self._has_remote = has_remote

    def record(self, event: Finished | Failed | Cancelled, client_request_id: str) -> None:
        """Log and count the end of a request."""
        reason = _reason(event)
        progress = event.progress
        self.metrics.record_end(reason, progress)
        log = _log.bind(request_id=event.request_id)
        if client_request_id:
            log = log.bind(client_request_id=client_request_id)
        if isinstance(event, Failed):
            log = log.bind(type=event.error.type, error=event.error.message)
        if progress is None:
            log.info("request.done", finish_reason=reason)
            return
        seconds = (progress.prompt_ms + progress.predicted_ms) / 1e3
        decay = _MEAN_DECAY if self.mean_seconds else 0.0
        self.mean_seconds = decay * self.mean_seconds + (1 - decay) * seconds
        log.info("request.done", **_log_fields(progress, self._has_remote), finish_reason=reason)


def _reason(event: Finished | Failed | Cancelled) -> str:
    if isinstance(event, Finished):
        return event.reason
    return "error" if isinstance(event, Failed) else "cancelled"


def _log_fields(progress: Progress, has_remote: bool) -> dict[str, Any]:
    return {
        "slot": progress.slot,
        "queue_ms": round(progress.queue_ms, 2),
        "ttft_ms": round(progress.queue_ms + progress.prompt_ms, 2),
        "prompt_tokens": progress.n_prompt,
        "prefix_cache_tokens": progress.n_cached,
        "prefix_cache_ratio": round(progress.n_cached / progress.n_prompt, 4),
        "prefix_copied_tokens": progress.n_copied,
        "prefix_loaded_tokens": progress.n_loaded,
        "prefix_read_tokens": progress.n_read,
        **({"prefix_fetched_tokens": progress.n_fetched} if has_remote else {}),
        "prefix_anchored_tokens": progress.n_anchored,
        **({"restored_tokens": progress.n_restored} if progress.n_restored else {}),
        "prefix_miss": progress.miss or None,
        **({"diverged_at": progress.diverged_at} if progress.diverged_at >= 0 else {}),
        **({"session_match": progress.session_match} if progress.session_match else {}),
        **({"approximate_tokens": progress.n_approximate} if progress.n_approximate else {}),
        "load_ms": round(progress.load_ms, 2),
        "generated_tokens": progress.n_generated,
        "tokens_per_second": round(per_second(progress), 2),
    }
