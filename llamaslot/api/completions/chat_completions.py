"""`POST /v1/chat/completions`: chat completions in OpenAI's format; `POST /apply-template`: their prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web

from llamaslot.api.bodies import ChatBody, encode, json_response, read_as
from llamaslot.api.completions import unsupported
from llamaslot.api.completions.reply_bodies import (
    REASONS,
    ChatChoice,
    ChatChunkChoice,
    Delta,
    Envelope,
    Message,
    OpenAIReason,
    stats_of,
    timings,
)
from llamaslot.api.completions.response_format import OpenAIFormat, complete
from llamaslot.api.context import READINESS
from llamaslot.base.commands import TextPart
from llamaslot.base.errors import InvalidRequestError
from llamaslot.base.events import Finished, Output
from llamaslot.service.generations import Generation
from llamaslot.service.service import Service

_MARK = "\0"
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Complete a conversation."""
    return await complete(request, ChatBody, lambda service, body: [rendered(service, body)], ChatFormat)


async def apply_template(request: web.Request) -> web.Response:
    """Return the prompt that the template makes of a conversation and its tools."""
    service = request.app[READINESS].check()

    def prompt_of(body: ChatBody) -> str:
        unsupported.refuse(body, but_for=("tools", "tool_choice"))
        return "".join(part.text for part in rendered(service, body))

    return json_response({"prompt": await read_as(request, ChatBody, prompt_of)})


def rendered(service: Service, body: ChatBody) -> tuple[TextPart, ...]:
    """Return the conversation as prompt parts; raises `InvalidRequestError` if it cannot be rendered."""
    for i, message in enumerate(body.messages):
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise InvalidRequestError(
                f"'messages[{i}].role' must be one of {', '.join(sorted(_ROLES))}", param=f"messages[{i}].role"
            )
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort == "none":
        kwargs["enable_thinking"] = False
    elif body.reasoning_effort:
        kwargs["reasoning_effort"] = body.reasoning_effort
    return service.chat_template.render(
        body.messages, tools=body.tools, add_generation_prompt=_wants_reply(body), kwargs=kwargs
    )


def _wants_reply(body: ChatBody) -> bool:
    """Return True if the prompt ends where a reply of the assistant begins or, for its own message, continues."""
    if not body.continue_final_message:
        return body.add_generation_prompt is not False
    if body.add_generation_prompt:
        raise InvalidRequestError(
            "'continue_final_message' and 'add_generation_prompt' exclude each other",
            param="continue_final_message",
        )
    if body.messages[-1]["role"] != "assistant":
        raise InvalidRequestError(
            "'continue_final_message' needs a last message of the assistant", param="continue_final_message"
        )
    return True


class ChatFormat(OpenAIFormat[ChatBody]):
    """OpenAI's chat completions."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, reply_id: str, model: str, body: ChatBody, generations: Sequence[Generation]) -> None:
        super().__init__(reply_id, model, body, generations)
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
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
        if output.content and self._body.timings_per_token:
            yield self._delta(index, Delta(content=output.content), timings=timings([output.progress]))
        elif output.content:
            yield encode(output.content).join(frame)
        if isinstance(output, Finished):
            shown = {} if self._with_usage else stats_of([output.progress])
            yield self._delta(index, Delta(), REASONS[output.reason], **shown)

    def closing(self) -> Iterator[bytes]:
        """Yield the usage, if it was asked for, and the end mark."""
        if self._with_usage:
            yield self._chunk([], **self._totals())
        yield from super().closing()

    def whole(self) -> Envelope:
        """Return one body with all choices."""
        return self._whole(
            [ChatChoice(each.index, Message(each.text), REASONS[each.end.reason]) for each in self._generations]
        )

    def _delta(self, index: int, delta: Delta, finish_reason: OpenAIReason | None = None, **stats: Any) -> bytes:
        return self._chunk([ChatChunkChoice(index, delta, finish_reason)], **stats)
