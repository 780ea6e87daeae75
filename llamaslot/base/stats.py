"""Statistics and state of the engine and its prefix cache, as plain values that msgspec can encode."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from llamaslot.base.commands import Sampling

Miss: TypeAlias = Literal["", "cold", "salted", "diverged", "changed", "evicted", "off", "unsupported"]
"""Why no more of a prompt was known when it got its slot.

    ""           all that was computed of it so far was known: what follows is new
    cold         nothing of it was
    salted       the same, in the namespace of a salt: of others nothing is told
    diverged     what is known goes on in another way
    changed      the same, within the last reply of its session
    evicted      more of it was known once
    off          `cache_prompt` was false
    unsupported  the model's KV cannot be trimmed
"""


class SlotReport(msgspec.Struct, frozen=True):
    """One slot as `/slots` shows it."""

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
    sampling: Sampling = Sampling()


class CacheFigures(msgspec.Struct, frozen=True):
    """What the pool holds now, and what the prefix cache has done since the start.

    Requests that never got a slot and those with `cache_prompt: false` count as neither hit nor miss.
    """

    cells_total: int = 0
    cells_used: int = 0
    cells_idle: int = 0
    """Cells that only idle prefixes use: they are given up when others need them."""
    cells_pinned: int = 0
    """Cells that running requests use."""
    seqs_slots: int = 0
    seqs_reserved: int = 0
    """Sequence ids for idle prefixes, beside the slots'."""
    seqs_used: int = 0
    seqs_total: int = 0
    """Sequence ids of the context, one to park by and one for scratch among them where cells are shared."""
    n_hits: int = 0
    """Requests that reused a part of their prompt."""
    n_misses: int = 0
    """Requests that reused nothing."""
    n_cross_slot: int = 0
    """Hits of which the slot copied something from another sequence, and loaded nothing."""
    n_from_ram: int = 0
    """Hits of which something was loaded, and nothing read; those of no other kind found it all in their slot."""
    n_from_disk: int = 0
    """Hits for which something was read from disk."""
    n_anchored_hits: int = 0
    """Hits whose prompt began with the tokens of an anchor, wherever their KV was."""
    n_session_hits: int = 0
    """Hits whose prompt began with the tokens of its session, found by their text."""
    misses: dict[Miss, int] = {}
    """Requests by the reason why no more of their prompt was reused."""
    n_waits: int = 0
    """Requests that waited for a prefix that another one computed."""
    n_prompt: int = 0
    """Prompt tokens of hits and misses."""
    n_matched: int = 0
    """Those of them that were reused."""
    n_copied: int = 0
    """Tokens that sequences took over from others."""
    n_evicted: int = 0
    """Tokens that were given up, and stored nowhere, because room was needed."""
    n_stored: int = 0
    """Tokens that left the pool and were stored."""
    n_loaded: int = 0
    """Tokens that were loaded into the pool again."""
    n_parked: int = 0
    """Idle paths that moved from a slot to a reserved sequence."""
    n_lost_paths: int = 0
    """Idle paths that were given up because no sequence id was left: `--cache-seqs` is too low for the load."""
    n_preempted: int = 0
    """Times that a running request went back to the queue because cells were short."""
    ram_total: int = 0
    """Bytes of the host's memory that stored prefixes may take; 0 where none are stored."""
    ram_used: int = 0
    ram_tokens: int = 0
    """Tokens that are stored there."""
    ram_segments: int = 0
    disk_total: int = 0
    """Bytes of the disk that stored prefixes may take; 0 where there is none."""
    disk_used: int = 0
    disk_tokens: int = 0
    """Tokens that are stored there."""
    disk_segments: int = 0
    n_anchors: int = 0
    """Replies whose tokens are remembered, since their text would give others."""
    anchor_bytes: int = 0
    n_sessions: int = 0
    """Conversations with a name whose last sequence is remembered."""
    session_bytes: int = 0
    n_read: int = 0
    """Tokens that were read from the disk."""
    n_written: int = 0
    """Tokens that were written to it."""
    n_bad: int = 0
    """Files that were not as they were written: moved aside, and computed again."""

    @property
    def n_same_slot(self) -> int:
        """Hits that found all of it in their slot."""
        return self.n_hits - self.n_cross_slot - self.n_from_ram - self.n_from_disk


class State(msgspec.Struct, frozen=True, tag="state"):
    """The answer to `Inspect`."""

    request_id: str
    slots: tuple[SlotReport, ...]
    n_queued: int
    n_decode_calls: int
    n_decoded_tokens: int
    n_busy_slots_total: int
    """Sum over decode calls of the slots that took part."""
    cache: CacheFigures = CacheFigures()


class CachePrefix(msgspec.Struct, frozen=True):
    """One node of the radix tree: a prefix, of which its parent holds all but the last tokens."""

    parent: int
    """Index of the longest shorter prefix in the list, -1 where there is none; it comes before this one."""
    namespace: int
    """Prefixes of different namespaces are never shared; numbered within one answer, as listed."""
    n_tokens: int
    """Tokens from the root to the end of the node."""
    n_edge: int
    """Those that the node adds to its parent in the tree."""
    hits: int
    """Requests that started from it or from what branches off behind it."""
    holders: tuple[int, ...]
    """The sequence ids that hold it."""
    pinned: bool
    """Whether a running request goes through it."""
    last_used: int
    """Rank among all nodes by their last use: 0 for the latest, the same where they were used together."""
    text: str = ""
    """The edge's first tokens as text, where that was asked for."""


class CacheState(msgspec.Struct, frozen=True, tag="cache_state"):
    """The answer to `InspectCache`."""

    request_id: str
    figures: CacheFigures
    n_namespaces: int
    n_nodes: int
    n_leaves: int
    n_tokens: int
    """Tokens in all nodes."""
    n_pinned_tokens: int
    """Those that running requests go through."""
    prefixes: tuple[CachePrefix, ...]
    """The nodes with the most hits, none before its ancestors."""
