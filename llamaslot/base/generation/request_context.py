"""Inputs of a request beside its body, and the fields of the body that shape the reply."""

from __future__ import annotations

import msgspec

from llamaslot.base.callers import Caller
from llamaslot.base.generation.chats import ChatToStore
from llamaslot.base.generation.responses import ResponseFields
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.generation.tools import ParserOptions, ReasoningDefaults


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of what one request may ask for."""

    max_prompts: int
    max_choices: int
    """Completions of all prompts together."""
    max_logit_bias_entries: int
    max_stop_strings: int
    max_stop_chars: int
    """Characters of all stop strings together."""


class RequestContext(msgspec.Struct, frozen=True):
    """Inputs of the prompt worker beside a completion request's body: HTTP headers and server settings."""

    request_id: str
    limits: RequestLimits
    sampling: Sampling
    """Defaults; a `seed` of -1 stands for a new one each time."""
    max_tokens: int = -1
    """Default limit of new tokens."""
    cache_prompt: bool = True
    """Default of the field."""
    shows_prompt: bool = False
    """The reply shows the prompt's text."""
    counts_tokens: bool = False
    """Every event of a stream has the number of tokens so far."""
    verbose: bool = False
    """Default of the field."""
    caller: Caller = Caller()
    key_secret: str = ""
    """`key_secret` of the API key where each key has namespaces of its own; empty where not."""
    is_admin: bool = False
    """True if the API key is an administrator's, who may share KV with all keys."""
    reasoning: ReasoningDefaults = ReasoningDefaults()


class ReplyOptions(msgspec.Struct, frozen=True):
    """Fields of a request that shape its reply, and not what is generated."""

    stream: bool = False
    include_usage: bool = False
    """The last event of a stream has the usage."""
    timings_per_token: bool = False
    return_tokens: bool = False
    verbose: bool = False
    """The reply contains llama-server's own, with the prompt."""
    echo: bool = False
    """Texts begin with their prompts."""
    n_best: int = 0
    """Completions of each prompt that are in the reply, the most likely ones; 0 for all."""
    hides_logprobs: bool = False
    """The probabilities are there to find the best completions only."""
    response_fields: tuple[str, ...] = ()
    """Fields that llama-server's reply is reduced to; empty for all."""
    parser: ParserOptions = ParserOptions()
    """For the message of a chat's reply."""
    omit_reasoning: bool = False
    """The text of the reasoning is left out of the reply."""
    sse_ping_interval: int | None = None
    response: ResponseFields = ResponseFields()
    """Further fields of a Responses request."""
    chat: ChatToStore | None = None
    """A chat that is to be stored."""
