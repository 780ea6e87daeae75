"""`POST /v1/chat/completions`: conversations, in OpenAI's words; `POST /apply-template`: their prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from llamaslot.api.bodies import ChatBody, encode, json_response, read
from llamaslot.api.completions import submission, unsupported
from llamaslot.api.completions.delivery import deliver
from llamaslot.api.completions.reply_bodies import (
    REASONS,
    ChatChoice,
    ChatChunkChoice,
    Delta,
    Envelope,
    Message,
    OpenAIReason,
    cache_use,
    timings,
    usage,
)
from llamaslot.api.context import READINESS, SETTINGS
from llamaslot.api.middleware import UNIQUE_ID, caller_of
from llamaslot.api.sse import DONE, event
from llamaslot.base.commands import TextPart
from llamaslot.base.errors import InvalidRequestError
from llamaslot.base.events import Finished, Output, Progress
from llamaslot.service.generations import Generation
from llamaslot.service.service import Service

_MARK = "\0"
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

_decoder = msgspec.json.Decoder(ChatBody)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Complete a conversation."""
    service, settings = request.app[READINESS].check(), request.app[SETTINGS]
    body = await read(request, _decoder)
    unsupported.refuse(body)
    prompt = rendered(service, body)
    reply_id = f"chatcmpl-{request[UNIQUE_ID]}"
    asked = await submission.make(
        service,
        settings,
        body,
        [prompt],
        reply_id,
        caller=caller_of(request),
    )
    async with service.generate(asked) as choices:
        dialect = ChatDialect(reply_id, settings.model_names(service.info)[0], body, choices.all)
        return await deliver(request, body, choices, dialect)


async def apply_template(request: web.Request) -> web.Response:
    """Show the prompt that a conversation and its tools become."""
    service = request.app[READINESS].check()
    body = await read(request, _decoder)
    unsupported.refuse(body, but_for=("tools", "tool_choice"))
    return json_response({"prompt": "".join(part.text for part in rendered(service, body))})


def rendered(service: Service, body: ChatBody) -> tuple[TextPart, ...]:
    """The conversation as parts of a prompt; raises `InvalidRequestError` for one that cannot be rendered."""
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
    return service.render_chat(
        body.messages, tools=body.tools, add_generation_prompt=_wants_reply(body), kwargs=kwargs
    )


def _wants_reply(body: ChatBody) -> bool:
    """Whether the prompt goes on into the assistant's next or, where the last message is its own, begun reply."""
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


class ChatDialect:
    """OpenAI's chat replies."""

    def __init__(self, reply_id: str, model: str, body: ChatBody, choices: Sequence[Generation]) -> None:
        self._envelope = partial(Envelope, id=reply_id, created=int(time.time()), model=model)
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._with_timings = bool(body.timings_per_token)
        self._choices = choices
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """What comes before and after the text in chunks of the choices that have begun."""

    def chunks(self, choice: Generation, output: Output | Finished) -> Iterator[bytes]:
        """The role once, then text, then the reason for the end."""
        frame = self._frames.get(choice.index)
        if frame is None:
            before, _, after = self._chunk(choice, Delta(content=_MARK)).partition(encode(_MARK))
            frame = self._frames[choice.index] = (before, after)
            yield self._chunk(choice, Delta(role="assistant", content=None))
        if output.content and self._with_timings:
            yield self._chunk(choice, Delta(content=output.content), timings=timings([output.progress]))
        elif output.content:
            yield encode(output.content).join(frame)
        if isinstance(output, Finished):
            shown = {} if self._with_usage else _figures([output.progress])
            yield self._chunk(choice, Delta(), finish_reason=REASONS[output.reason], **shown)

    def closing(self) -> Iterator[bytes]:
        """The usage, if it was asked for, and the mark of the end."""
        if self._with_usage:
            yield event(self._envelope(object="chat.completion.chunk", choices=[], **self._figures()))
        yield DONE

    def whole(self) -> Envelope:
        """One body with all choices."""
        answers = [
            ChatChoice(choice.index, Message(choice.text), REASONS[choice.end.reason]) for choice in self._choices
        ]
        return self._envelope(object="chat.completion", choices=answers, **self._figures())

    def _figures(self) -> dict[str, Any]:
        return {
            "usage": usage(self._choices, n=len(self._choices)),
            **_figures([choice.end.progress for choice in self._choices]),
        }

    def _chunk(
        self,
        choice: Generation,
        delta: Delta,
        *,
        finish_reason: OpenAIReason | None = None,
        **figures: Any,
    ) -> bytes:
        choices = [ChatChunkChoice(choice.index, delta, finish_reason)]
        return event(self._envelope(object="chat.completion.chunk", choices=choices, **figures))


def _figures(progress: Sequence[Progress]) -> dict[str, Any]:
    """The figures of choices: their sums, and what the first of them found in the cache."""
    return {"timings": timings(progress), "cache": cache_use(progress[0])}
