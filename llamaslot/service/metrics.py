"""Prometheus metrics, under llama-server's names and names of our own; the load also under vLLM's.

`Metrics.record` adds a request that has ended to them, and writes its log line.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llamaslot.base.events import Cancelled, Failed, Finished, Progress
from llamaslot.base.stats import EngineState

_log = structlog.get_logger(__name__)

disable_created_metrics()  # type: ignore[no-untyped-call]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_RATES = (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 500, 1000)

_REQUEST_COUNTERS = (
    ("llamacpp:prompt_tokens", "Prompt tokens computed.", "n_prompt_computed"),
    ("llamacpp:prompt_seconds", "Time spent on prompts.", "prompt_ms"),
    ("llamacpp:prompt_tokens_cached", "Prompt tokens whose KV was reused.", "n_cached"),
    ("llamacpp:tokens_predicted", "Tokens generated.", "n_generated"),
    ("llamacpp:tokens_predicted_seconds", "Time spent on generating.", "predicted_ms"),
    ("llamaslot_prompt_tokens", "Prompt tokens of all requests, reused or computed.", "n_prompt"),
    ("llamaslot_prefix_cache_tokens", "Prompt tokens taken from the cache.", "n_cached"),
)
"""Sums over ended requests of a field of `Progress`; milliseconds are exported as seconds."""
_COUNTERS = (
    ("llamacpp:n_decode", "Calls of llama_decode.", "n_decode_calls"),
    ("llamaslot_decoded_tokens", "Tokens of requests that were sent to llama_decode.", "n_decoded_tokens"),
    (
        "llamaslot_device_sampled_tokens",
        "Tokens sampled on the device (--backend-sampling).",
        "backend.n_device_sampled",
    ),
    (
        "llamaslot_sampler_changes",
        "Changes of a sequence's samplers on the device, after which llama.cpp builds its graph again.",
        "backend.n_sampler_changes",
    ),
    ("llamaslot_image_tiles_encoded", "Tiles of images computed by the projector.", "backend.n_tiles_encoded"),
    ("llamaslot_prefix_cache_miss_requests", "Requests that reused nothing.", "cache.requests.misses"),
    ("llamaslot_prefix_cache_anchored_requests", "Hits that used an anchor's tokens.", "cache.requests.anchored"),
    (
        "llamaslot_prefix_cache_restored_requests",
        "Hits that used the tokens of remembered messages.",
        "cache.requests.restored",
    ),
    ("llamaslot_restored_tokens", "Prompt tokens of remembered messages.", "cache.prompt_tokens.restored"),
    ("llamaslot_ahead_tokens", "Tokens computed ahead of next turns.", "cache.prompt_tokens.ahead"),
    ("llamaslot_prefix_cache_session_requests", "Hits on the session's tokens.", "cache.requests.in_session"),
    ("llamaslot_prefix_cache_wait_requests", "Requests that waited for a prefix.", "cache.requests.waits"),
    ("llamaslot_prefix_cache_copied_tokens", "Tokens copied from another sequence.", "cache.copied_tokens"),
    ("llamaslot_prefix_cache_evicted_tokens", "Tokens evicted without being offloaded.", "cache.evicted_tokens"),
    ("llamaslot_prefix_cache_offloaded_tokens", "Tokens offloaded from the pool to RAM.", "cache.offloaded_tokens"),
    ("llamaslot_ram_saved_bytes", "Bytes of KV saved from the pool to RAM.", "cache.ram.saved_bytes"),
    ("llamaslot_prefix_cache_loaded_tokens", "Tokens loaded from RAM.", "cache.loaded_tokens"),
    ("llamaslot_prefix_cache_public_tokens", "Tokens loaded from the public prefix.", "cache.public_tokens"),
    ("llamaslot_prefix_cache_dropped_prefixes", "Prefixes dropped for lack of ids.", "cache.dropped_prefixes"),
    ("llamaslot_disk_written_tokens", "Tokens written to disk.", "cache.written_tokens"),
    ("llamaslot_disk_written_bytes", "Bytes of KV written to disk.", "cache.disk.written_bytes"),
    (
        "llamaslot_disk_lifetime_written_bytes",
        "Bytes of KV written to the folder by all servers so far.",
        "cache.disk.total_written_bytes",
    ),
    ("llamaslot_disk_failed_writes", "Segments that could not be written.", "cache.disk.failed_writes"),
    ("llamaslot_disk_read_tokens", "Tokens read from disk.", "cache.read_tokens"),
    ("llamaslot_disk_corrupt_files", "Files that did not match their checksum.", "cache.disk.corrupt_files"),
    ("llamaslot_remote_fetched_tokens", "Tokens fetched from the remote tier.", "cache.remote.fetched_tokens"),
    ("llamaslot_remote_fetched_bytes", "Bytes fetched from the remote tier.", "cache.remote.fetched_bytes"),
    ("llamaslot_remote_uploaded_bytes", "Bytes uploaded to the remote tier.", "cache.remote.uploaded_bytes"),
    ("llamaslot_remote_failed_uploads", "Segments that were not uploaded.", "cache.remote.failed_uploads"),
    ("llamaslot_remote_failures", "Lookups and fetches that failed.", "cache.remote.failures"),
    ("llamaslot_remote_corrupt_objects", "Objects that were not as uploaded.", "cache.remote.corrupt_objects"),
    ("llamaslot_checkpoints_taken", "Checkpoints taken.", "cache.checkpoints.taken"),
    ("llamaslot_checkpoints_restored", "Checkpoints restored.", "cache.checkpoints.restored"),
    ("llamaslot_checkpoints_evicted", "Checkpoints evicted from RAM.", "cache.checkpoints.evicted"),
    ("llamaslot_preemptions", "Times that a running request went back to the queue.", "cache.preemptions"),
    ("llamaslot_context_shifts", "Times that a full context was shifted.", "cache.context_shifts"),
    ("llamaslot_layout_changes", "Times that the layout of the KV pool changed.", "cache.layout_changes"),
    ("llamacpp:spec_decode_num_draft_tokens", "Tokens drafted.", "cache.speculation.drafted_tokens"),
    (
        "llamacpp:spec_decode_num_accepted_tokens",
        "Drafted tokens that were accepted.",
        "cache.speculation.accepted_tokens",
    ),
    ("llamacpp:spec_decode_num_drafts", "Drafts that were verified.", "cache.speculation.drafts"),
)
"""Name, text and path of fields of `EngineState` that only grow."""
_COUNTER_WITHOUT_SUFFIX = "llamacpp:n_tokens_max"
"""A counter of llama-server's whose name has no `_total`; the client library gives every counter that suffix."""
_GAUGES = (
    ("llamacpp:requests_deferred", "Requests that wait for a slot.", "n_queued"),
    (
        "llamaslot_step_threads",
        "Threads of a small step: fewer while others use the CPUs.",
        "backend.n_step_threads",
    ),
    ("llamaslot_prefix_cache_hit_rate", "Matched tokens / prompt tokens so far.", "cache.prompt_tokens.hit_rate"),
    ("llamaslot_cells", "Cells of the KV pool.", "cache.cells.total"),
    ("llamaslot_cells_used", "Cells of the KV pool that hold a token.", "cache.cells.used"),
    ("llamaslot_cells_idle", "Cells that only idle prefixes use.", "cache.cells.idle"),
    ("llamaslot_cells_pinned", "Cells that running requests use.", "cache.cells.pinned"),
    ("llamaslot_ram_bytes", "Bytes of RAM that offloaded prefixes may take now.", "cache.ram.total_bytes"),
    ("llamaslot_ram_max_bytes", "Bytes that they may take while memory is ample.", "cache.ram.max_bytes"),
    ("llamaslot_ram_used_bytes", "Bytes of RAM that offloaded prefixes take.", "cache.ram.used_bytes"),
    (
        "llamaslot_page_locked_bytes",
        "Bytes of host memory for KV that a GPU copies directly.",
        "backend.page_locked_bytes",
    ),
    ("llamaslot_ram_tokens", "Tokens of the prefixes in RAM.", "cache.ram.tokens"),
    ("llamaslot_ram_segments", "Segments in RAM.", "cache.ram.segments"),
    ("llamaslot_disk_bytes", "Bytes of disk that offloaded prefixes may take.", "cache.disk.total_bytes"),
    ("llamaslot_disk_used_bytes", "Bytes of disk that offloaded prefixes take.", "cache.disk.used_bytes"),
    ("llamaslot_disk_tokens", "Tokens of the prefixes on disk.", "cache.disk.tokens"),
    ("llamaslot_disk_segments", "Segments on disk.", "cache.disk.segments"),
    ("llamaslot_checkpoint_bytes", "Bytes of RAM that checkpoints may take.", "cache.checkpoints.total_bytes"),
    ("llamaslot_checkpoint_used_bytes", "Bytes of RAM that checkpoints take.", "cache.checkpoints.used_bytes"),
    ("llamaslot_checkpoints", "Checkpoints of partial states.", "cache.checkpoints.count"),
    ("llamaslot_anchors", "Replies whose generated tokens are remembered.", "cache.anchors.replies"),
    ("llamaslot_messages", "Assistant messages whose tokens are remembered.", "cache.messages.known"),
    ("llamaslot_sessions", "Named conversations that are remembered.", "cache.sessions.known"),
    ("llamaslot_sequences_used", "Sequence ids that hold tokens.", "cache.sequences.used"),
)
_REUSE = ("same_slot", "cross_slot", "from_ram", "from_disk", "from_remote")
_MEAN_DECAY = 0.9
"""Weight of earlier requests in the mean duration."""


class Metrics(Collector):
    """One server's metrics in a registry of their own; `model_name` is a label of those with vLLM's names.

    `has_remote` says whether there is a remote tier, whose tokens the log then names.
    """

    def __init__(self, model_name: str = "", *, has_remote: bool = False) -> None:
        self.mean_seconds = 0.0
        """Mean time that requests spend in their slots; the latest ones weigh most."""
        self._model_name = model_name
        self._has_remote = has_remote
        self._registry = CollectorRegistry()
        self._state = EngineState()
        self._totals = {field: 0.0 for _, _, field in _REQUEST_COUNTERS}
        self._scraped = self._totals.copy()
        """The totals when the metrics were last read."""
        self._max_held = 0
        self._requests = Counter(
            "llamaslot_requests", "Requests by how they ended.", ["finish_reason"], registry=self._registry
        )
        self._restarts = Counter(
            "llamaslot_restarts", "Child processes started again.", ["process"], registry=self._registry
        )
        self._queue_time = self._histogram("llamaslot_queue_seconds", "Time until a request got a slot.", _SECONDS)
        self._ttft = self._histogram("llamaslot_ttft_seconds", "Time until a request's first token.", _SECONDS)
        self._load = self._histogram(
            "llamaslot_load_seconds",
            "Time in which offloaded prefixes were read and loaded for a request.",
            _SECONDS,
        )
        self._duration = self._histogram("llamaslot_request_seconds", "Time until the last token.", _SECONDS)
        self._ratio = self._histogram(
            "llamaslot_prefix_cache_ratio", "Fraction of a request's prompt that was reused.", _RATIOS
        )
        self._rate = self._histogram(
            "llamaslot_tokens_per_second", "Output tokens per second of a request.", _RATES
        )
        self._registry.register(self)

    def record(self, event: Finished | Failed | Cancelled, client_request_id: str) -> tuple[str, dict[str, Any]]:
        """Log and count the end of a request; return the reason and the fields of the log line."""
        if isinstance(event, Finished):
            reason: str = event.reason
        else:
            reason = "error" if isinstance(event, Failed) else "cancelled"
        progress = event.progress
        self.record_end(reason, progress)
        log = _log.bind(request_id=event.completion_id)
        if client_request_id:
            log = log.bind(client_request_id=client_request_id)
        if isinstance(event, Failed):
            log = log.bind(type=event.error.type, error=event.error.message)
        fields = {} if progress is None else _log_fields(progress, self._has_remote)
        if progress is not None:
            seconds = (progress.prompt_ms + progress.predicted_ms) / 1e3
            decay = _MEAN_DECAY if self.mean_seconds else 0.0
            self.mean_seconds = decay * self.mean_seconds + (1 - decay) * seconds
        log.info("request.done", **fields, finish_reason=reason)
        return reason, fields

    def record_end(self, finish_reason: str, progress: Progress | None) -> None:
        """Count a request that has ended; one that was refused has no progress."""
        self._requests.labels(finish_reason).inc()
        if progress is None:
            return
        for field in self._totals:
            self._totals[field] += getattr(progress, field)
        self._max_held = max(self._max_held, progress.n_held)
        self._queue_time.observe(progress.queue_ms / 1e3)
        if progress.n_generated:
            self._ttft.observe((progress.queue_ms + progress.prompt_ms) / 1e3)
        if progress.n_loaded:
            self._load.observe(progress.load_ms / 1e3)
        self._duration.observe((progress.queue_ms + progress.prompt_ms + progress.predicted_ms) / 1e3)
        self._ratio.observe(_ratio(progress.n_cached, progress.n_prompt))
        if progress.n_generated > 1:
            self._rate.observe(per_second(progress))

    def record_restart(self, process: str) -> None:
        """Count a child process that was started again."""
        self._restarts.labels(process).inc()

    def exposition(self, state: EngineState) -> bytes:
        """Return all metrics in Prometheus' text format, with the engine's state as of now."""
        self._state = state
        text, name = generate_latest(self._registry), _COUNTER_WITHOUT_SUFFIX
        self._scraped = self._totals.copy()
        return text.replace(f"# TYPE {name} gauge\n".encode(), f"# TYPE {name} counter\n".encode())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are read from the engine's state and from the sums over ended requests."""
        state, totals = self._state, self._totals
        new = {field: total - self._scraped[field] for field, total in totals.items()}
        for name, text, field in _REQUEST_COUNTERS:
            yield CounterMetricFamily(name, text, totals[field] / 1e3 if field.endswith("_ms") else totals[field])
        for name, text, path in _COUNTERS:
            yield CounterMetricFamily(name, text, attrgetter(path)(state))
        for name, text, path in _GAUGES:
            yield GaugeMetricFamily(name, text, attrgetter(path)(state))
        sequences = state.cache.sequences
        n_busy = sum(bool(slot.request_id) for slot in state.slots)
        for name, text, value in (
            (_COUNTER_WITHOUT_SUFFIX, "Most tokens that a slot has held.", self._max_held),
            (
                "llamacpp:prompt_tokens_seconds",
                "Mean prompt tokens per second of requests that ended since the last scrape.",
                _ratio(new["n_prompt_computed"] * 1e3, new["prompt_ms"]),
            ),
            (
                "llamacpp:predicted_tokens_seconds",
                "Mean generated tokens per second of requests that ended since the last scrape.",
                _ratio(new["n_generated"] * 1e3, new["predicted_ms"]),
            ),
            ("llamacpp:requests_processing", "Requests that hold a slot.", n_busy),
            (
                "llamacpp:n_busy_slots_per_decode",
                "Mean slots that took part in a decode.",
                _ratio(state.n_busy_slots_total, state.n_decode_calls),
            ),
            ("llamaslot_sequences", "Sequence ids, of slots and spare.", sequences.slots + sequences.reserved),
        ):
            yield GaugeMetricFamily(name, text, value)
        yield from self._vllm_gauges(n_busy)
        hits = CounterMetricFamily(
            "llamaslot_prefix_cache_hit_requests",
            "Requests that reused KV, by the slowest tier used.",
            labels=["reuse"],
        )
        for reuse in _REUSE:
            hits.add_metric([reuse], getattr(state.cache.requests, reuse))
        yield hits
        misses = CounterMetricFamily(
            "llamaslot_prefix_cache_miss_reason_requests",
            "Requests by miss reason, partial hits included.",
            labels=["reason"],
        )
        for reason, n in state.cache.miss_reasons.items():
            misses.add_metric([reason], n)
        yield misses

    def _vllm_gauges(self, n_running: int) -> Iterator[Metric]:
        """Yield the load under the names by which gateways such as smg and llm-d balance workers.

        Cells of idle prefixes count as free, as vLLM's cached blocks do that no request refers to: a gateway must
        not take a warm worker for a full one.
        """
        cells = self._state.cache.cells
        for name, text, value in (
            ("vllm:num_requests_running", "Requests that hold a slot.", n_running),
            ("vllm:num_requests_waiting", "Requests that wait for a slot.", self._state.n_queued),
            (
                "vllm:kv_cache_usage_perc",
                "Fraction of the KV pool's cells that running requests use.",
                _ratio(cells.pinned, cells.total),
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def per_second(progress: Progress) -> float:
    """Return the tokens per second after the first token, whose time is the prompt's."""
    return (progress.n_generated - 1) / progress.predicted_ms * 1e3 if progress.predicted_ms > 0 else 0.0


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
