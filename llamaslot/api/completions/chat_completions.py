"""`POST /v1/chat/completions`: chat completions in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from aiohttp import web
from msgspec import UNSET, UnsetType

from llamaslot.api.completions.logprobs import ChatLogprobs
from llamaslot.api.completions.reply_bodies import (
    REASONS,
    ChatChoice,
    ChatChunkChoice,
    Delta,
    Envelope,
    Message,
    OpenAIReason,
    PromptProgress,
    stats_of,
    timings,
)
from llamaslot.api.completions.response_format import OpenAIFormat, complete
from llamaslot.api.json_bodies import encode
from llamaslot.base.commands import ReplyOptions
from llamaslot.base.events import Finished, Output
from llamaslot.base.generation.token_probs import TokenProb
from llamaslot.service.generations import Generation

_MARK = "\0"


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Complete a conversation."""
    return await complete(request, "chat", ChatFormat)


class ChatFormat(OpenAIFormat):
    """OpenAI's chat completions."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, reply_id: str, model: str, options: ReplyOptions, generations: Sequence[Generation]) -> None:
        super().__init__(reply_id, model, options, generations)
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """Bytes before and after the text in the chunks of a choice, by index: encoding them once saves time."""

    def chunks(self, generation: Generation, output: Output | Finished) -> Iterator[bytes]:
        """Yield the role once, then text, then the finish reason."""
        index = generation.index
        frame = self._frames.get(index)
        if frame is None:
            before, _, after = self._delta(index, Delta(content=_MARK)).partition(encode(_MARK))
            frame = self._frames[index] = (before, after)
            yield self._delta(index, Delta(role="assistant", content=None))
        if progress := PromptProgress.of(output):
            yield self._delta(index, Delta(), prompt_progress=progress)
        elif generation.has_probs or self._options.timings_per_token:
            if output.content or output.probs:
                yield self._with_details(generation, output)
        elif output.content:
            yield encode(output.content).join(frame)
        if isinstance(output, Finished):
            shown = {} if self._options.include_usage else stats_of([output.progress])
            yield self._delta(index, Delta(), REASONS[output.reason], **shown)

    def closing(self) -> Iterator[bytes]:
        """Yield the usage, if it was asked for, and the end mark."""
        if self._options.include_usage:
            yield self._chunk([], **self._totals())
        yield from super().closing()

    def whole(self) -> Envelope:
        """Return one body with all choices."""
        return self._whole(
            [
                ChatChoice(
                    each.index, Message(each.text), REASONS[each.end.reason], self._logprobs(each, each.probs)
                )
                for each in self._generations
            ]
        )

    def _with_details(self, generation: Generation, output: Output | Finished) -> bytes:
        """Return a chunk with new text, and with what the client wants to know about it."""
        choice = ChatChunkChoice(generation.index, Delta(content=output.content))
        choice.logprobs = self._logprobs(generation, output.probs or ())
        shown = timings([output.progress]) if self._options.timings_per_token else UNSET
        return self._chunk([choice], timings=shown)

    def _delta(self, index: int, delta: Delta, finish_reason: OpenAIReason | None = None, **stats: Any) -> bytes:
        return self._chunk([ChatChunkChoice(index, delta, finish_reason)], **stats)

    def _logprobs(self, generation: Generation, rows: Iterable[TokenProb]) -> ChatLogprobs | UnsetType:
        return self.writer(generation).chat(rows) if generation.has_probs else UNSET
