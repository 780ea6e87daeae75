"""Events that the engine sends to the service, one list of them per step.

All are plain values that msgspec can encode, so that the engine can run in a process of its own. A submitted
request is answered by `Accepted` and any number of `Output`s, then by exactly one of `TERMINAL`; a refused one by
`Failed` alone.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from llamaslot.base.stats import CacheState, Miss, State

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
