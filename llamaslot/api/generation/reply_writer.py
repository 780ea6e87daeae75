"""The reply to a request, whole or as the events of a stream; each endpoint has a `ReplyWriter` of its own."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from aiohttp import web

from llamaslot.api import http_errors
from llamaslot.api.generation.logprobs import ProbsWriter
from llamaslot.api.sse import PING
from llamaslot.base.errors import LlamaslotError
from llamaslot.base.events import Finished, FinishReason, Output
from llamaslot.base.generation.request_context import ReplyOptions
from llamaslot.formats.format import Format
from llamaslot.formats.parsed_message import ParsedMessage
from llamaslot.service.live_request import Completion
from llamaslot.service.reply_budget import ProbsLimit


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """The request that a reply answers, with the server's settings for it."""

    request: web.Request
    id: str
    model: str
    """Name of the model."""
    options: ReplyOptions
    output_format: Format
    """The format in which the model writes chat messages."""
    eog: Sequence[int]
    """Tokens that end a text."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""


def end_reason(output: Output | Finished) -> FinishReason | None:
    """Return why a completion ended with an event; None if it has not."""
    return output.reason if isinstance(output, Finished) else None


class ReplyWriter(ABC):
    """Writes the reply of one endpoint to one request, from the completions in `completions`."""

    id_prefix: ClassVar[str]
    """Beginning of the reply's id."""
    ping: ClassVar[bytes] = PING
    """An event of a stream that means nothing, and keeps its connection open."""
    shows_prompt: ClassVar[bool] = False
    """True if the reply contains the prompt."""
    counts_tokens: ClassVar[bool] = False
    """True if each event of a stream has the number of tokens so far."""
    probs_fields: ClassVar[Sequence[str]] = ("max_tokens",)
    """Request fields that multiply the probabilities in the reply."""

    def __init__(self, reply: ReplyContext, completions: Sequence[Completion]) -> None:
        self._reply = reply
        self._options = reply.options
        self._completions = completions
        self._probs_writers: dict[int, ProbsWriter] = {}

    @classmethod
    def probs_limit(cls, options: ReplyOptions, most: int) -> ProbsLimit | None:
        """Return the limit of the reply's probabilities; None for a stream that keeps none of them."""
        return None if options.stream else ProbsLimit(most, cls.probs_fields)

    def probs_writer(self, completion: Completion) -> ProbsWriter:
        """Return the writer of the probabilities of a completion's tokens."""
        writer = self._probs_writers.get(completion.index)
        if writer is None:
            writer = self._probs_writers[completion.index] = ProbsWriter(completion.params)
        return writer

    def new_message(self, completion: Completion) -> ParsedMessage:
        """Return the message that the text of a chat's completion is to be added to."""
        return ParsedMessage(self._reply.output_format, self._options.parser, completion.params.request_id)

    @abstractmethod
    def chunks(self, completion: Completion, output: Output | Finished) -> Iterable[bytes]:
        """Yield the server-sent events for an event of a completion, each whole or in parts."""

    @abstractmethod
    def closing(self) -> Iterable[bytes]:
        """Yield the server-sent events after all completions are finished."""

    def failure(self, error: LlamaslotError) -> Iterable[bytes]:
        """Yield the last server-sent events of a stream that fails."""
        yield http_errors.event(error, self._reply.request)

    @abstractmethod
    def whole(self) -> Iterable[bytes]:
        """Yield the JSON body of a reply that is not streamed."""
