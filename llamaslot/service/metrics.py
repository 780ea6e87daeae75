"""What the server counts, as Prometheus metrics: llama-server's names, and llamaslot's own beside them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from llamaslot.base.events import Progress
from llamaslot.base.stats import CacheFigures, State

disable_created_metrics()  # type: ignore[no-untyped-call]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_RATES = (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 500, 1000)

_COUNTERS = {
    "n_misses": ("llamaslot_prefix_cache_miss_requests", "Requests that reused nothing."),
    "n_anchored_hits": ("llamaslot_prefix_cache_anchored_requests", "Hits that went on from an anchor's tokens."),
    "n_session_hits": ("llamaslot_prefix_cache_session_requests", "Hits that went on from their session's tokens."),
    "n_waits": ("llamaslot_prefix_cache_wait_requests", "Requests that waited for another one's prefix."),
    "n_copied": ("llamaslot_prefix_cache_copied_tokens", "Tokens taken over from another sequence."),
    "n_evicted": ("llamaslot_prefix_cache_evicted_tokens", "Tokens given up because room was needed."),
    "n_stored": ("llamaslot_prefix_cache_stored_tokens", "Tokens that left the pool for RAM."),
    "n_loaded": ("llamaslot_prefix_cache_loaded_tokens", "Tokens that came back from RAM."),
    "n_written": ("llamaslot_disk_written_tokens", "Tokens that were written to disk."),
    "n_read": ("llamaslot_disk_read_tokens", "Tokens that were read from disk."),
    "n_bad": ("llamaslot_disk_bad_files", "Files that were not as they were written."),
    "n_lost_paths": ("llamaslot_prefix_cache_lost_paths", "Idle paths given up for want of a sequence id."),
    "n_preempted": ("llamaslot_preemptions", "Times that a running request went back to the queue."),
}
_GAUGES = {
    "cells_total": ("llamaslot_cells", "Cells of the KV pool."),
    "cells_used": ("llamaslot_cells_used", "Cells of the KV pool that hold a token."),
    "cells_idle": ("llamaslot_cells_idle", "Cells that only idle prefixes use."),
    "cells_pinned": ("llamaslot_cells_pinned", "Cells that running requests use."),
    "ram_total": ("llamaslot_ram_bytes", "Bytes of RAM that stored prefixes may take."),
    "ram_used": ("llamaslot_ram_used_bytes", "Bytes of RAM that stored prefixes take."),
    "ram_tokens": ("llamaslot_ram_tokens", "Tokens of the prefixes that are stored in RAM."),
    "ram_segments": ("llamaslot_ram_segments", "Segments that are stored in RAM."),
    "disk_total": ("llamaslot_disk_bytes", "Bytes of disk that stored prefixes may take."),
    "disk_used": ("llamaslot_disk_used_bytes", "Bytes of disk that stored prefixes take."),
    "disk_tokens": ("llamaslot_disk_tokens", "Tokens of the prefixes that are stored on disk."),
    "disk_segments": ("llamaslot_disk_segments", "Segments that are stored on disk."),
    "n_anchors": ("llamaslot_anchors", "Replies whose tokens are remembered, since their text would give others."),
    "n_sessions": ("llamaslot_sessions", "Conversations with a name whose last sequence is remembered."),
    "seqs_used": ("llamaslot_sequences_used", "Sequence ids that hold something."),
}
"""Names and texts of what is one of the `CacheFigures`."""


class Metrics:
    """One server's metrics in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter, gauge = self._counter, self._gauge
        self._prompt = counter("llamacpp:prompt_tokens", "Prompt tokens computed.")
        self._prompt_seconds = counter("llamacpp:prompt_seconds", "Time spent on prompts.")
        self._cached = counter("llamacpp:prompt_tokens_cached", "Prompt tokens whose KV was reused.")
        self._predicted = counter("llamacpp:tokens_predicted", "Tokens generated.")
        self._predicted_seconds = counter("llamacpp:tokens_predicted_seconds", "Time spent on generating.")
        self._decodes = counter("llamacpp:n_decode", "Calls of llama_decode.")
        self._tokens_max = gauge("llamacpp:n_tokens_max", "Most tokens that a slot has held.")
        self._prompt_rate = gauge("llamacpp:prompt_tokens_seconds", "Mean prompt tokens per second.")
        self._predicted_rate = gauge("llamacpp:predicted_tokens_seconds", "Mean generated tokens per second.")
        self._processing = gauge("llamacpp:requests_processing", "Requests that hold a slot.")
        self._deferred = gauge("llamacpp:requests_deferred", "Requests that wait for a slot.")
        self._busy = gauge("llamacpp:n_busy_slots_per_decode", "Mean slots that took part in a decode.")
        self._requests = Counter(
            "llamaslot_requests", "Requests by how they ended.", ["finish_reason"], registry=self._registry
        )
        self._all_prompt = counter("llamaslot_prompt_tokens", "Prompt tokens of all requests, reused or computed.")
        self._matched = counter("llamaslot_prefix_cache_tokens", "Prompt tokens taken from the cache.")
        self._hit_rate = gauge("llamaslot_prefix_cache_hit_rate", "Matched tokens / prompt tokens so far.")
        hits = Counter(
            "llamaslot_prefix_cache_hit_requests",
            "Requests that reused something, by where the furthest of it was.",
            ["reuse"],
            registry=self._registry,
        )
        self._same_slot, self._cross_slot = hits.labels("same_slot"), hits.labels("cross_slot")
        self._from_ram, self._from_disk = hits.labels("from_ram"), hits.labels("from_disk")
        self._misses = Counter(
            "llamaslot_prefix_cache_miss_reason_requests",
            "Requests by why no more of their prompt was reused; some of it may have been.",
            ["reason"],
            registry=self._registry,
        )
        self._seqs = gauge("llamaslot_sequences", "Sequence ids, the slots' and the reserved ones.")
        self._cache_counters = {field: counter(*words) for field, words in _COUNTERS.items()}
        self._cache_gauges = {field: gauge(*words) for field, words in _GAUGES.items()}
        self._queue_time = self._histogram("llamaslot_queue_seconds", "Time until a request got a slot.", _SECONDS)
        self._ttft = self._histogram("llamaslot_ttft_seconds", "Time until a request's first token.", _SECONDS)
        self._load = self._histogram(
            "llamaslot_load_seconds", "Time in which stored prefixes were read and loaded for a request.", _SECONDS
        )
        self._duration = self._histogram("llamaslot_request_seconds", "Time until the last token.", _SECONDS)
        self._ratio = self._histogram(
            "llamaslot_prefix_cache_ratio", "Share of a request's prompt that was reused.", _RATIOS
        )
        self._rate = self._histogram("llamaslot_tokens_per_second", "A request's rate of generation.", _RATES)
        self._totals = dict.fromkeys(("computed", "prompt_s", "generated", "generated_s"), 0.0)
        self._most_held = 0
        self._seen: dict[Counter, int] = {}

    def record_end(self, finish_reason: str, progress: Progress | None) -> None:
        """Count a request that came to its end; one that was refused has no progress."""
        self._requests.labels(finish_reason).inc()
        if progress is not None:
            self._record(progress)

    def _record(self, progress: Progress) -> None:
        totals = self._totals
        self._all_prompt.inc(progress.n_prompt)
        self._matched.inc(progress.n_cached)
        for name, counter, value in (
            ("computed", self._prompt, progress.n_prompt_computed),
            ("prompt_s", self._prompt_seconds, progress.prompt_ms / 1e3),
            ("generated", self._predicted, progress.n_generated),
            ("generated_s", self._predicted_seconds, progress.predicted_ms / 1e3),
        ):
            counter.inc(value)
            totals[name] += value
        self._cached.inc(progress.n_cached)
        self._prompt_rate.set(_ratio(totals["computed"], totals["prompt_s"]))
        self._predicted_rate.set(_ratio(totals["generated"], totals["generated_s"]))
        self._most_held = max(self._most_held, progress.n_held)
        self._tokens_max.set(self._most_held)
        self._queue_time.observe(progress.queue_ms / 1e3)
        if progress.n_generated:
            self._ttft.observe((progress.queue_ms + progress.prompt_ms) / 1e3)
        if progress.n_loaded:
            self._load.observe(progress.load_ms / 1e3)
        self._duration.observe((progress.queue_ms + progress.prompt_ms + progress.predicted_ms) / 1e3)
        self._ratio.observe(_ratio(progress.n_cached, progress.n_prompt))
        if progress.n_generated > 1:
            self._rate.observe(per_second(progress))

    def exposition(self, state: State) -> bytes:
        """All metrics in Prometheus' text format, with the engine's state as of now."""
        self._raise(self._decodes, state.n_decode_calls)
        self._busy.set(_ratio(state.n_busy_slots_total, state.n_decode_calls))
        self._processing.set(sum(bool(slot.request_id) for slot in state.slots))
        self._deferred.set(state.n_queued)
        self._show(state.cache)
        return generate_latest(self._registry)

    def _show(self, cache: CacheFigures) -> None:
        self._raise(self._same_slot, cache.n_same_slot)
        self._raise(self._cross_slot, cache.n_cross_slot)
        self._raise(self._from_ram, cache.n_from_ram)
        self._raise(self._from_disk, cache.n_from_disk)
        for reason, n in cache.misses.items():
            self._raise(self._misses.labels(reason), n)
        for field, counter in self._cache_counters.items():
            self._raise(counter, getattr(cache, field))
        for field, gauge in self._cache_gauges.items():
            gauge.set(getattr(cache, field))
        self._hit_rate.set(_ratio(cache.n_matched, cache.n_prompt))
        self._seqs.set(cache.seqs_slots + cache.seqs_reserved)

    def _raise(self, counter: Counter, total: int) -> None:
        """Bring a counter to what the engine has counted."""
        counter.inc(total - self._seen.get(counter, 0))
        self._seen[counter] = total

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def per_second(progress: Progress) -> float:
    """Tokens after the first per second of generating; the first one's time is the prompt's."""
    return (progress.n_generated - 1) / progress.predicted_ms * 1e3 if progress.predicted_ms > 0 else 0.0
