"""`POST /v1/messages`: chat completions in Anthropic's format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aiohttp import web

from llamaslot.api.anthropic.blocks import BlockEvents, blocks_of
from llamaslot.api.anthropic.reply_bodies import (
    AnthropicMessage,
    AnthropicUsage,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    Stop,
    StopReason,
)
from llamaslot.api.generation.reply_stats import TokenCount, progress_of
from llamaslot.api.generation.reply_writer import ReplyContext, ReplyWriter, end_reason
from llamaslot.api.generation.request_handling import complete, count_prompt_tokens
from llamaslot.api.json_bodies import encode, json_response
from llamaslot.api.sse import typed_event
from llamaslot.base.events import Finished, Output
from llamaslot.service.live_request import Completion


async def messages(request: web.Request) -> web.StreamResponse:
    """Complete a conversation in Anthropic's format."""
    return await complete(request, "messages", MessagesReplyWriter)


async def count_tokens(request: web.Request) -> web.Response:
    """Count the tokens of the prompt that a conversation in Anthropic's format has, and generate nothing."""
    return json_response(TokenCount(await count_prompt_tokens(request, "messages")))


class MessagesReplyWriter(ReplyWriter):
    """Writes Anthropic's messages; each is of one completion."""

    id_prefix = "msg_"
    ping = typed_event(Ping())

    def __init__(self, reply: ReplyContext, completions: Sequence[Completion]) -> None:
        super().__init__(reply, completions)
        self._message = self.new_message(completions[0])
        self._blocks = BlockEvents(omit_thinking=self._options.omit_reasoning)
        self._is_started = False

    def chunks(self, completion: Completion, output: Output | Finished) -> Iterator[bytes]:
        """Yield the beginning of the message with the first event, then blocks, then the stop reason."""
        if not self._is_started:
            self._is_started = True
            yield typed_event(MessageStart(self._empty(AnthropicUsage.of(progress_of(output)))))
        added = self._message.push(output.content, end_reason(output))
        for each in self._blocks.add(added):
            yield typed_event(each)
        if isinstance(output, Finished):
            for each in self._blocks.close():
                yield typed_event(each)
            yield typed_event(MessageDelta(self._stop(output), AnthropicUsage.of(output.progress)))

    def closing(self) -> Iterator[bytes]:
        """Yield the last event."""
        yield typed_event(MessageStop())

    def whole(self) -> Iterator[bytes]:
        """Yield the whole message."""
        (completion,) = self._completions
        end = completion.end
        added = self._message.push(completion.text, end.reason)
        content = blocks_of([*self._blocks.add(added), *self._blocks.close()])
        message = self._empty(AnthropicUsage.of(end.progress))
        stop = self._stop(end)
        message.content = content
        message.stop_reason, message.stop_sequence = stop.stop_reason, stop.stop_sequence
        yield encode(message)

    def _empty(self, usage: AnthropicUsage) -> AnthropicMessage:
        return AnthropicMessage(id=self._reply.id, model=self._reply.model, content=[], usage=usage)

    def _stop(self, end: Finished) -> Stop:
        reason: StopReason = "tool_use" if self._message.has_calls else "end_turn"
        if self._message.reason == "limit":
            reason = "max_tokens"
        elif end.stopping_word:
            return Stop("stop_sequence", end.stopping_word)
        return Stop(reason)
