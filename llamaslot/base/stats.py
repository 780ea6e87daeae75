"""Statistics of the engine and its prefix cache, as plain values that msgspec can encode.

`GET /cache` is `CacheState` as JSON, and `/metrics` names fields of `EngineState` by their path: a counter is
listed once here and once in the table of `llamaslot.service.metrics`. The cache counts in a `CacheStats` itself.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from llamaslot.base.commands import ContextShift
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.tokens import SessionMatch

Miss: TypeAlias = Literal[
    "",
    "cold",
    "salted",
    "diverged",
    "changed",
    "evicted",
    "no_checkpoint",
    "off",
    "unsupported",
    "self_test_pending",
    "self_test_failed",
]
"""Reason why no more of a prompt was cached when its request got a slot.

    ""             everything computed of it so far was cached: the rest is new
    cold           nothing was cached, or too little to be worth sharing (64 tokens)
    salted         the same, in the namespace of a salt: nothing is revealed about other namespaces
    diverged       the cached tokens continue differently
    changed        the same, within the last reply of its session
    evicted        more of it was cached once
    no_checkpoint  KV of more of it is cached, but no checkpoint from which to continue it
    off            `cache_prompt` was false, or the prompt is scored
    unsupported    nothing of this model is reused
    self_test_pending, self_test_failed
                   nothing is reused before the self-test of reuse has passed (`MISS_FLAGS`)
"""
MISS_FLAGS: dict[Miss, str] = dict.fromkeys(("self_test_pending", "self_test_failed"), "--reuse-self-test on")
"""Flags of the server with which a request would not have missed for this reason."""


class Warmed(msgspec.Struct):
    """A prompt that was computed for later requests; the reply to `POST /cache/warm` as JSON."""

    tokens: int
    cached: int
    """Of them, those whose KV was reused."""
    computed: int
    """At least the last one, and after a preemption some of them again."""
    pinned: bool
    """True if this request pinned it."""


class CacheProbe(msgspec.Struct):
    """Cached tokens of a prompt that is not run; the reply to `POST /cache/probe` as JSON."""

    prompt_tokens: int
    cells: int
    """Tokens whose KV is in the pool."""
    ram: int
    """Tokens after those that would be loaded from RAM."""
    disk: int
    """Tokens after those that would be read from disk."""
    computed: int
    """Tokens that would be computed: at least the last one."""
    matched: int
    """Leading tokens that are known, even where their KV is gone or not worth loading."""
    miss: Miss | None
    """Reason why no more is cached; null if all is."""
    diverged_at: int | None = None
    """Character of the prompt, as `/apply-template` returns it, where it diverges from the cached tokens."""
    session_match: SessionMatch | None = None
    """Result of comparing it with its session; null without one."""
    approximate_tokens: int = 0
    """Tokens taken from the session although tokenizing the text alone gives others."""


class CellStats(msgspec.Struct):
    """Cells of the KV pool, by what uses them."""

    total: int = 0
    used: int = 0
    idle: int = 0
    """Cells that only idle prefixes use: they are evicted when others need them."""
    pinned: int = 0
    """Cells that running requests use."""
    free: int = 0


class TierStats(msgspec.Struct):
    """Offloaded prefixes in one tier."""

    total_bytes: int = 0
    """The limit now; 0 where nothing is offloaded."""
    used_bytes: int = 0
    tokens: int = 0
    segments: int = 0


class RamStats(TierStats):
    """Offloaded prefixes in host memory."""

    max_bytes: int = 0
    """The limit while memory is ample."""
    saved_bytes: int = 0
    """KV saved from the pool since the engine started."""
    state: Literal["normal", "reduced", "growing"] = "normal"
    """`reduced` while memory is short and for a while after, then `growing`; a fixed limit never changes."""
    reason: str = ""
    """Why the limit is less than `max_bytes`, or would be if it were not fixed."""


class DiskStats(TierStats):
    """Offloaded prefixes on disk."""

    corrupt_files: int = 0
    """Files that did not match their checksum: moved aside, and their prefixes computed again."""
    written_bytes: int = 0
    """KV written since the engine started."""
    failed_writes: int = 0
    """Segments that could not be written, such as to a full disk; each try counts."""
    total_written_bytes: int = 0
    """KV written to the folder by all servers that have used it."""


class RemoteStats(msgspec.Struct):
    """Exchange with the store that several servers share, since the engine started."""

    is_available: bool = False
    """False without a store, and for a while after it did not answer."""
    lookups: int = 0
    """Requests for which it was asked."""
    fetched_tokens: int = 0
    fetched_bytes: int = 0
    """Bytes of KV; what came too late counts too."""
    uploads: int = 0
    uploaded_bytes: int = 0
    failed_uploads: int = 0
    failures: int = 0
    """Lookups and fetches that failed or took too long."""
    corrupt_objects: int = 0
    """Objects that were not what was uploaded: deleted, and their tokens computed."""


class CheckpointStats(msgspec.Struct):
    """Checkpoints of a model whose state cannot be trimmed."""

    total_bytes: int = 0
    """The limit; 0 where none are taken."""
    used_bytes: int = 0
    """Bytes of all checkpoints."""
    count: int = 0
    """Checkpoints now."""
    taken: int = 0
    restored: int = 0
    evicted: int = 0
    """Evicted from RAM because the limit, or that of checkpoints on a path, was reached; the disk may have them."""


class AnchorStats(msgspec.Struct):
    """Replies whose generated tokens are remembered, because tokenizing their text would give others."""

    replies: int = 0
    bytes: int = 0


class SessionStats(msgspec.Struct):
    """Named conversations whose last sequence is remembered."""

    known: int = 0
    bytes: int = 0


class MessageStats(msgspec.Struct):
    """Assistant messages whose tokens are remembered."""

    known: int = 0
    bytes: int = 0


class PinStats(msgspec.Struct):
    """Prefixes that `POST /cache/warm` has pinned."""

    prefixes: int = 0
    tokens: int = 0
    max_tokens: int = 0
    """The limit of `tokens`."""


class SequenceStats(msgspec.Struct):
    """Sequence ids."""

    slots: int = 0
    reserved: int = 0
    """Spare ids, which keep idle prefixes."""
    used: int = 0
    """Ids that hold tokens."""
    total: int = 0
    """Ids of the context: with a unified pool one spare and one scratch id are among them."""


class RequestStats(msgspec.Struct):
    """Ended requests by what they reused; those that never got a slot or had `cache_prompt: false` are left out."""

    hits: int = 0
    """Requests that reused a part of their prompt: `same_slot`, `cross_slot`, `from_ram`, `from_disk` and
    `from_remote` add up to them.
    """
    misses: int = 0
    hit_rate: float = 0.0
    same_slot: int = 0
    """Hits that found everything in their slot."""
    cross_slot: int = 0
    """Hits that copied from another sequence, and loaded nothing."""
    from_ram: int = 0
    """Hits that loaded something from RAM, and read nothing from disk."""
    from_disk: int = 0
    from_remote: int = 0
    anchored: int = 0
    """Hits whose prompt began with the tokens of an anchor, wherever their KV was."""
    in_session: int = 0
    """Hits whose prompt began with the tokens of its session, found by their text."""
    restored: int = 0
    """Hits whose prompt had tokens of remembered messages."""
    waits: int = 0
    """Requests that waited for a prefix that another one was computing."""


class PromptStats(msgspec.Struct):
    """Prompt tokens of the requests that `RequestStats` counts."""

    total: int = 0
    matched: int = 0
    """Tokens that were reused."""
    hit_rate: float = 0.0
    restored: int = 0
    """Tokens of remembered messages, reused or not."""
    ahead: int = 0
    """Tokens computed ahead of conversations' next turns, by no request."""


class SpeculationStats(msgspec.Struct):
    """Drafts of replies, whose tokens were computed in one step."""

    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Drafted tokens that were sampled: each saved a step."""


class CacheStats(msgspec.Struct, kw_only=True):
    """State of the cache now, and its counters since the start; `*_tokens` count tokens."""

    cells: CellStats = msgspec.field(default_factory=CellStats)
    ram: RamStats = msgspec.field(default_factory=RamStats)
    disk: DiskStats = msgspec.field(default_factory=DiskStats)
    remote: RemoteStats = msgspec.field(default_factory=RemoteStats)
    checkpoints: CheckpointStats = msgspec.field(default_factory=CheckpointStats)
    anchors: AnchorStats = msgspec.field(default_factory=AnchorStats)
    sessions: SessionStats = msgspec.field(default_factory=SessionStats)
    messages: MessageStats = msgspec.field(default_factory=MessageStats)
    sequences: SequenceStats = msgspec.field(default_factory=SequenceStats)
    pins: PinStats = msgspec.field(default_factory=PinStats)
    requests: RequestStats = msgspec.field(default_factory=RequestStats)
    prompt_tokens: PromptStats = msgspec.field(default_factory=PromptStats)
    speculation: SpeculationStats = msgspec.field(default_factory=SpeculationStats)
    miss_reasons: dict[Miss, int] = {}
    """Ended requests by their `Miss`."""
    copied_tokens: int = 0
    """Copied from one sequence to another."""
    evicted_tokens: int = 0
    """Evicted because cells were needed, without having been offloaded."""
    offloaded_tokens: int = 0
    """Offloaded from the pool to RAM."""
    loaded_tokens: int = 0
    """Loaded from RAM into the pool."""
    public_tokens: int = 0
    """Of them, those that tenants loaded from the public namespace."""
    written_tokens: int = 0
    """Written to disk."""
    read_tokens: int = 0
    """Read from disk."""
    moved_prefixes: int = 0
    """Idle prefixes moved from a slot to a spare sequence."""
    dropped_prefixes: int = 0
    """Prefixes dropped for lack of sequence ids: `--cache-seqs` is too low for the load."""
    preemptions: int = 0
    """Times that a running request went back to the queue because cells were short."""
    layout_changes: int = 0
    """Times that the pool was partitioned or unified again, to suit the running requests."""
    context_shifts: int = 0
    """Times that a part of a full context was discarded, so that its reply could continue."""


class CachePrefix(msgspec.Struct):
    """One node of the radix tree: a prefix that adds a run of tokens to its parent's."""

    parent: int | None
    """Index in the list of the longest shorter prefix, which comes before this one; None at a root."""
    namespace: int
    """Prefixes of different namespaces are never shared; numbered within one answer, in the order of the list."""
    tokens: int
    """Tokens from the root to the end of the node."""
    edge_tokens: int
    """Tokens that the node adds to its parent in the tree."""
    ram_tokens: int
    """Of `edge_tokens`, those whose KV is in RAM, whether or not it is also in the pool."""
    disk_tokens: int
    """Of `edge_tokens`, those whose KV is on disk."""
    hits: int
    """Requests that started from it or from one of its descendants."""
    holders: tuple[int, ...]
    """Sequence ids that hold it; none if its KV is not in the pool."""
    pinned: bool
    """True if a running request uses it."""
    last_used: int
    """Rank among the listed nodes by last use: 0 for the latest, equal for nodes that were used together."""
    checkpoint: int | None
    """Bytes of the checkpoint after its last token; None without one."""
    text: str | UnsetType = UNSET
    """The edge's first tokens as text, if that was asked for."""
    evicted_last: bool = False
    """True if it belongs to a prefix that `POST /cache/warm` has pinned."""


class TenantStats(msgspec.Struct):
    """An API key's KV now, and how many of its requests ran since the start."""

    tenant: str
    """Digest of the key; `public` for what all share, empty for KV computed without
    `--cache-salt-from-api-key`."""
    cells: int
    ram_bytes: int
    disk_bytes: int
    """Includes files that are being written."""
    requests: int
    """Requests that got a slot, each counted once even if it was preempted; each of `n` choices is one."""


class CacheState(CacheStats, kw_only=True):
    """The statistics together with a snapshot of the radix tree; the reply to `InspectCache`."""

    namespaces: int
    nodes: int
    leaves: int
    tokens: int
    """Tokens in the pool, shared ones once; `nodes` and `leaves` are also those of the pool."""
    tokens_pinned: int
    """Tokens that running requests use."""
    prefixes: tuple[CachePrefix, ...]
    """The nodes with the most hits, none before its ancestors."""
    costs_pending: str = ""
    """Why costs are not measured yet; empty once they are."""
    tenants: tuple[TenantStats, ...] | UnsetType = UNSET
    """Those that have KV or sent requests, if that was asked for."""


class SlotState(msgspec.Struct):
    """State of a slot and of the request that runs in it."""

    id: int
    n_ctx: int
    n_held: int
    """Tokens whose KV the slot holds."""
    request_id: str = ""
    """The running request, or empty."""
    n_prompt: int = 0
    n_prompt_computed: int = 0
    n_generated: int = 0
    max_tokens: int = -1
    speculates: bool = False
    """True if its reply may be drafted."""
    shift: ContextShift = ContextShift()
    sampling: Sampling = Sampling()


class BackendStats(msgspec.Struct):
    """Counts of the backend, so far or now."""

    n_device_sampled: int = 0
    """Tokens sampled on the device."""
    n_sampler_changes: int = 0
    """Changes of a sequence's samplers on the device, each of which takes time."""
    n_step_threads: int = 0
    """Threads that a step of few tokens computes with."""
    page_locked_bytes: int = 0
    """Page-locked host memory for KV, in use or not."""
    n_tiles_encoded: int = 0
    """Tiles of images that the projector has computed."""


class EngineState(msgspec.Struct):
    """Slots, queue, decode counters and cache statistics; the reply to `InspectEngine`."""

    slots: tuple[SlotState, ...] = ()
    n_queued: int = 0
    n_decode_calls: int = 0
    n_decoded_tokens: int = 0
    n_busy_slots_total: int = 0
    """Sum over decode calls of the slots that took part."""
    backend: BackendStats = msgspec.field(default_factory=BackendStats)
    cache: CacheStats = msgspec.field(default_factory=CacheStats)
