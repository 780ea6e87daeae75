"""Events of the engine, one list of them per step.

All are plain values that msgspec can encode, since the engine is a process of its own. A `Generate` is answered by
`Started` and any number of `Output`s, then by exactly one of `Finished`, `Failed` and `Cancelled`.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from llamaslot.base.errors import ErrorInfo
from llamaslot.base.generation.token_probs import TokenProbs
from llamaslot.base.model import ModelInfo
from llamaslot.base.stats import Miss
from llamaslot.base.tokens import SessionMatch

FinishReason: TypeAlias = Literal["eos", "limit", "word"]


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The request got a slot; sent before the step that computes it, and again after a preemption."""

    completion_id: str
    n_matched: int = 0
    """Prompt tokens that were cached."""
    miss: Miss = ""
    n_lost: int = 0
    """Prompt tokens after those that had been computed for earlier requests, and are not usable any more."""


class Generated(msgspec.Struct, frozen=True):
    """Tokens of a reply and the length of its text, for records of the token memory."""

    packed_tokens: bytes
    """All tokens that were generated."""
    n_sent: int
    """Characters of text that the client was sent."""


class Progress(msgspec.Struct, frozen=True):
    """Token counts and times of one request, counted where its tokens went into `llama_decode`."""

    n_prompt: int
    """Tokens of the prompt."""
    n_cached: int
    """Prompt tokens whose KV was reused: never computed for this request."""
    n_prompt_computed: int
    """Prompt tokens sent to the model, including those computed again after a preemption."""
    n_generated: int
    """Tokens sampled, including the end-of-generation token."""
    queue_ms: float
    """From submission to the first slot."""
    prompt_ms: float
    """From the slot to the first sampled token."""
    predicted_ms: float
    """From the first sampled token to the latest."""
    n_held: int = 0
    """Tokens whose KV the slot holds."""
    slot: int = -1
    """The slot that the request runs in or ran in last, -1 before its first."""
    n_copied: int = 0
    """Of `n_cached`, tokens copied from another sequence."""
    n_loaded: int = 0
    """Of `n_cached`, tokens loaded from RAM."""
    n_read: int = 0
    """Of `n_loaded`, tokens read from disk for this request."""
    n_fetched: int = 0
    """Of `n_loaded`, tokens fetched from the remote tier for this request."""
    n_anchored: int = 0
    """Prompt tokens taken from an anchor; `n_cached` says how much of their KV was still there."""
    n_restored: int = 0
    """Prompt tokens taken from remembered messages."""
    load_ms: float = 0.0
    """Of `prompt_ms`, the time until loading ended and computing began; 0 where nothing was loaded."""
    session_match: SessionMatch = ""
    n_approximate: int = 0
    """Prompt tokens taken from the session, counted from the first that tokenizing the text would not give."""
    miss: Miss = ""
    diverged_at: int = -1
    """Character of the prompt's text at which the cached tokens continue differently; -1 if they do not, or that is
    not computed yet.
    """
    n_drafted: int = 0
    n_accepted: int = 0
    """Of the drafted tokens, those that were sampled."""


class Prefill(msgspec.Struct, frozen=True):
    """Progress of computing a prompt."""

    n_cached: int
    """Prompt tokens that need not be computed."""
    n_processed: int
    """Prompt tokens that are cached or computed."""
    ms: float
    """Since the request got its slot."""


class Output(msgspec.Struct, frozen=True, tag="output"):
    """Newly generated text, never a part of a character or of a stop string, and its tokens.

    With `prefill` or `prompt_probs` it has none of them.
    """

    completion_id: str
    content: str
    tokens: tuple[int, ...]
    progress: Progress | None = None
    """In the first one of a request, in those with `prefill`, and in all with `GenerateParams.reports_progress`."""
    prefill: Prefill | None = None
    probs: TokenProbs | None = None
    """Those of `tokens`, if the request asks for them."""
    prompt_probs: TokenProbs | None = None
    """Those of the next tokens of the prompt, if the request asks for them; all come before the first text."""


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The request is complete; `content` is the last text, which no `Output` carried."""

    completion_id: str
    reason: FinishReason
    progress: Progress
    content: str = ""
    tokens: tuple[int, ...] = ()
    stopping_word: str = ""
    truncated: bool = False
    """True if the end of the slot's context, not `max_tokens`, was the limit, or if the context was shifted."""
    generated: Generated | None = None
    """None if the reply is not to be remembered."""
    probs: TokenProbs | None = None
    """As in `Output`."""
    vector: bytes = b""
    """Little-endian float32: the vector of `GenerateParams.vector`, or the scores; empty without one."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request was refused, or failed after it was accepted."""

    completion_id: str
    error: ErrorInfo
    progress: Progress | None = None
    """Work done so far, if the request had been accepted."""


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled"):
    """The request was cancelled; its slot keeps what was computed."""

    completion_id: str
    progress: Progress | None = None
    """None if no engine has the request."""
    generated: Generated | None = None
    """None if the reply is not to be remembered."""


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer to a `Query`: the struct that the query's docstring names, or an error.

    Between processes `body` arrives as builtins, which `msgspec.convert` turns into that struct.
    """

    query_id: str
    body: Any = None
    error: ErrorInfo | None = None


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The engine has stopped; `reason` is empty for a normal shutdown."""

    reason: str


class ModelInfoChanged(msgspec.Struct, frozen=True, tag="model_info_changed"):
    """The self-test of reuse has ended, or the engine was restarted: facts about the model have changed."""

    info: ModelInfo


class ModelLoaded(msgspec.Struct, frozen=True, tag="model_loaded"):
    """Answers `Load` and `Unload`: whether the model is loaded now."""

    is_loaded: bool
    reason: str = ""
    """Why it could not be loaded again."""


Event: TypeAlias = (
    Started | Output | Finished | Failed | Cancelled | Reply | ModelInfoChanged | ModelLoaded | Stopped
)
