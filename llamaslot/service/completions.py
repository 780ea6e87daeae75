"""Completions between their `Submit` and their terminal event, as the dispatcher keeps them.

state       event                     next state
TOKENIZING  tokenized and valid       WAITING
WAITING     sent to the engine        SENT
SENT        the engine starts it      STARTED
SENT        the engine's end          WAITING
STARTED     the engine's end          failed
any         terminal event            ended
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from llamaslot.base.commands import Submit
from llamaslot.base.errors import ContextSizeError, InvalidRequestError
from llamaslot.base.model import ModelInfo
from llamaslot.base.prompt import TokenizedPrompt
from llamaslot.service.suspects import request_digest


class State(Enum):
    """State of a completion."""

    TOKENIZING = "tokenizing"
    WAITING = "waiting"
    SENT = "sent"
    STARTED = "started"


@dataclass(slots=True, eq=False)
class Prompt:
    """The prompt that the completions of a request share."""

    submit: Submit
    submitted: float
    completions: dict[str, Completion] = field(default_factory=dict)
    """Those that have not ended, by id."""
    tokenizing: asyncio.Future[TokenizedPrompt] | None = None
    tokenized: TokenizedPrompt | None = None
    """Set when the completions are accepted."""

    @property
    def digest(self) -> bytes:
        """The digest by which the request is suspected."""
        assert self.tokenized is not None
        return request_digest(self.submit, self.tokenized)


@dataclass(slots=True, eq=False)
class Completion:
    """A completion between its `Submit` and its terminal event."""

    submit: Submit
    prompt: Prompt
    state: State = State.TOKENIZING
    is_cancelled: bool = False
    """True if the engine was told to cancel it."""
    diverged_at: int = -1
    """`Progress.diverged_at`."""

    @property
    def is_in_engine(self) -> bool:
        """True if the engine has it."""
        return self.state in (State.SENT, State.STARTED)


def check_submit(submit: Submit, n_prompt: int, info: ModelInfo) -> None:
    """Raise `InvalidRequestError` or `ContextSizeError` for a request that cannot run."""
    if not n_prompt:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    if n_prompt >= info.n_ctx_slot:
        raise ContextSizeError.of(n_prompt, info.n_ctx_slot)
    if not -1 <= submit.id_slot < info.n_slots:
        raise InvalidRequestError(f"id_slot must be between -1 and {info.n_slots - 1}", param="id_slot")
    for token in submit.sampling.logit_bias:
        if not 0 <= token < info.n_vocab:
            raise InvalidRequestError(
                f"logit_bias names token {token}; the vocabulary has {info.n_vocab}", param="logit_bias"
            )
