"""Context of a tokenized prompt, kept until its request is released, to remember the reply to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llamaslot.base.tokens import TokenizedPrompt
from llamaslot.prompts.cut_points import PromptText
from llamaslot.protocol.text_requests import TextRequest


@dataclass(frozen=True, slots=True)
class PromptContext:
    """A tokenized prompt, with what is needed to remember the reply to it."""

    request: TextRequest
    prompt: TokenizedPrompt
    text: PromptText | None = None
    """None where the prompt's text gets no tokens but its own."""
    n_head: int | None = None
    """Tokens before the last cut point; None where it lies within a token."""


class SentReply(NamedTuple):
    """A reply as it was sent."""

    text: str
    tokens: list[int]
    has_ended: bool
    """True if the model ended it; otherwise a limit or a stop string did."""
