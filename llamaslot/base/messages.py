"""The typed messages between service and engine, and nothing else between them.

Commands go down, events come up, one list of events per step. All are plain values that msgspec can encode,
so that the engine can move into a process of its own without a redesign. A submitted request is answered by
`Accepted` and any number of `Output`s, then by exactly one of `TERMINAL`; a refused one by `Failed` alone.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

FinishReason: TypeAlias = Literal["eos", "limit", "word"]
SessionMatch: TypeAlias = Literal["", "new", "exact", "extend", "diverge", "tokens"]
"""What came of holding a prompt against the text of its session's last sequence.

    ""         it has no session
    new        nothing is known of the session
    exact      it is the session's text, and has its tokens
    extend     it begins with that text, and with its tokens
    diverge    it begins with a part of that text, and with the tokens of that part
    tokens     its tokens are its own, or an anchor's
"""
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
SlotVerb: TypeAlias = Literal["save", "restore", "erase"]


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """Prompt text; where `special` is false, control tokens spelled in it stay plain text."""

    text: str
    special: bool = True


class TokensPart(msgspec.Struct, frozen=True, tag="tokens"):
    """Prompt given as token ids."""

    tokens: tuple[int, ...]


PromptPart: TypeAlias = TextPart | TokensPart


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is chosen; names and defaults are llama-server's."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    """Tokens that the penalties look back on: 0 none, -1 the whole context."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: dict[int, float] = {}
    ignore_eos: bool = False


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """One completion asked for."""

    request_id: str
    prompt: tuple[PromptPart, ...]
    add_special: bool = True
    """Whether the model's BOS goes before a prompt that starts with text."""
    sampling: Sampling = Sampling()
    max_tokens: int = -1
    """Tokens to generate: -1 up to the end of the slot's context, 0 none (the prompt is evaluated)."""
    stop: tuple[str, ...] = ()
    cache_prompt: bool = True
    cache_salt: str = ""
    """Requests share what is computed only with those of the same salt."""
    group: str = ""
    """The same for requests that were asked for together, such as the choices of one prompt; may be empty."""
    id_slot: int = -1
    """The slot to run in, or -1 for the best one."""
    return_tokens: bool = False
    """Whether `Accepted` carries the prompt's token ids."""
    client_id: str = ""
    """The client's own name for the request, for the log only."""
    session_id: str = ""
    """The client's own name for the conversation; empty for none."""


class SubmitAll(msgspec.Struct, frozen=True, tag="submit_all"):
    """Completions of one prompt, accepted together: tokenized once, and computed once for those of a group."""

    submits: tuple[Submit, ...]


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop a request, queued or running; unknown ids are ignored."""

    request_id: str


class Tokenize(msgspec.Struct, frozen=True, tag="tokenize"):
    """Turn prompt parts into token ids; answered by `Tokenized`."""

    request_id: str
    prompt: tuple[PromptPart, ...]
    add_special: bool = False
    with_pieces: bool = False


class Detokenize(msgspec.Struct, frozen=True, tag="detokenize"):
    """Turn token ids into text; answered by `Detokenized`."""

    request_id: str
    tokens: tuple[int, ...]


class Inspect(msgspec.Struct, frozen=True, tag="inspect"):
    """Ask for the state of the slots and the queue; answered by `State`."""

    request_id: str


class InspectCache(msgspec.Struct, frozen=True, tag="inspect_cache"):
    """Ask for the state of the prefix cache; answered by `CacheState`."""

    request_id: str
    top: int = 20
    """Prefixes to list at most, those with the most hits first."""
    text: bool = False
    """Whether to spell them out: they are what users wrote."""


class DropSession(msgspec.Struct, frozen=True, tag="drop_session"):
    """Forget a session, and give up what only it has of the cache; answered by `SessionDropped`."""

    request_id: str
    session_id: str
    cache_salt: str = ""


class SlotAction(msgspec.Struct, frozen=True, tag="slot_action"):
    """Write what a slot holds to a file, let it hold what a file has, or let it drop everything; answered by
    `SlotActed`, once no request runs in it.
    """

    request_id: str
    slot: int
    action: SlotVerb
    filename: str = ""


class ClearCache(msgspec.Struct, frozen=True, tag="clear_cache"):
    """Give up every idle prefix, and nothing that runs; answered by `CacheCleared`."""

    request_id: str


Command: TypeAlias = (
    Submit
    | SubmitAll
    | Cancel
    | Tokenize
    | Detokenize
    | Inspect
    | InspectCache
    | DropSession
    | SlotAction
    | ClearCache
)


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The prompt is tokenized and valid; the request waits for a slot or has one."""

    request_id: str
    n_prompt: int
    prompt_tokens: tuple[int, ...] = ()


class Progress(msgspec.Struct, frozen=True):
    """Figures of one request, counted where its tokens went into the model."""

    n_prompt: int
    """Tokens of the prompt."""
    n_cached: int
    """Prompt tokens whose KV was reused, that is, which were never computed for this request."""
    n_prompt_computed: int
    """Prompt tokens sent to the model, those computed again after a preemption included."""
    n_generated: int
    """Tokens sampled, the end-of-generation token included."""
    queue_ms: float
    """From submission until the request first got a slot."""
    prompt_ms: float
    """From the slot to the first sampled token."""
    predicted_ms: float
    """From the first sampled token to the latest."""
    n_held: int = 0
    """Tokens whose KV the slot holds."""
    slot: int = -1
    """The slot that the request runs in or ran in last, -1 before its first."""
    n_copied: int = 0
    """Of `n_cached`, those that its slot took over from another sequence."""
    n_loaded: int = 0
    """Of `n_cached`, those that were loaded from RAM."""
    n_read: int = 0
    """Of `n_loaded`, those that were read from disk for it."""
    n_anchored: int = 0
    """Tokens of the prompt that an anchor gave; whether their KV was still there `n_cached` says."""
    load_ms: float = 0.0
    """Of `prompt_ms`, what passed until they were loaded and computing began; 0 where nothing was loaded."""
    session_match: SessionMatch = ""
    n_approximate: int = 0
    """Tokens of the prompt that its session gave behind the first one that the text would not have given."""
    miss: Miss = ""
    diverged_at: int = -1
    """The character of the prompt's text at which what was known goes on in another way; -1 where it does not, or
    that has not been found out yet.
    """


class Output(msgspec.Struct, frozen=True, tag="output"):
    """Newly generated text, never a part of a character or of a stop string, and its tokens."""

    request_id: str
    content: str
    tokens: tuple[int, ...]
    progress: Progress


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The request came to its end; `content` is the last text, which no `Output` carried."""

    request_id: str
    reason: FinishReason
    progress: Progress
    content: str = ""
    tokens: tuple[int, ...] = ()
    stopping_word: str = ""
    truncated: bool = False
    """Whether the end of the slot's context, not `max_tokens`, was the limit."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request was refused or failed; the fields are those of an error in `llamaslot.base.errors`."""

    request_id: str
    error_type: str
    message: str
    param: str | None = None
    n_prompt_tokens: int = 0
    n_ctx: int = 0
    progress: Progress | None = None
    """What had been done, where the request was accepted before."""


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled"):
    """The request was cancelled; its slot keeps what was computed."""

    request_id: str
    progress: Progress | None = None
    """None where not even the prompt was tokenized."""


class Tokenized(msgspec.Struct, frozen=True, tag="tokenized"):
    """The answer to `Tokenize`; `pieces` are the tokens' bytes, if they were wanted."""

    request_id: str
    tokens: tuple[int, ...]
    pieces: tuple[bytes, ...] = ()


class Detokenized(msgspec.Struct, frozen=True, tag="detokenized"):
    """The answer to `Detokenize`."""

    request_id: str
    content: str


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


class CacheCleared(msgspec.Struct, frozen=True, tag="cache_cleared"):
    """The answer to `ClearCache`."""

    request_id: str
    n_tokens: int
    """Tokens that the pool had and has no more."""
    n_ram_tokens: int = 0
    """Tokens that were stored in RAM."""
    n_disk_tokens: int = 0
    """Tokens that were stored on disk."""


class SessionDropped(msgspec.Struct, frozen=True, tag="session_dropped"):
    """The answer to `DropSession`."""

    request_id: str
    is_known: bool
    """Whether there was one."""
    n_tokens: int = 0
    """Tokens that the pool had and has no more."""
    n_ram_tokens: int = 0
    """Tokens that were stored in RAM."""
    n_disk_tokens: int = 0
    """Tokens that were stored on disk."""


class SlotActed(msgspec.Struct, frozen=True, tag="slot_acted"):
    """The answer to `SlotAction`."""

    request_id: str
    n_tokens: int
    """Tokens that were saved, restored or erased."""
    n_bytes: int = 0
    """Bytes of the file."""
    ms: float = 0.0
    """What it took: reading or writing the file, and saving or loading KV; not the wait for an idle slot."""


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The engine ended and answers nothing more; `reason` is empty when it was told to."""

    reason: str


Answer: TypeAlias = Tokenized | Detokenized | State | CacheState | SessionDropped | SlotActed | CacheCleared
"""What answers a question rather than a request."""
Event: TypeAlias = Accepted | Output | Finished | Failed | Cancelled | Answer | Stopped
TERMINAL = (Finished, Failed, Cancelled)
