"""Commands that the service sends to the engine.

All are plain values that msgspec can encode, so that the engine can run in a process of its own.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

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
