"""Body of `POST /v1/responses`, and the fields that are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from llamaslot.base.errors import InvalidRequestError, NotSupportedError
from llamaslot.base.generation.tools import ReasoningFormat
from llamaslot.protocol.bodies import Count, Metadata, Options

REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
_INCLUDES = frozenset(
    {
        REASONING,
        LOGPROBS,
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)
"""Values of `include`. Except for the first two, they concern items that replies of this server never have."""


class ReasoningOptions(msgspec.Struct):
    """OpenAI's `reasoning`. There are no summaries: the reasoning itself is returned."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed", "none"] | None = None


class TextFormat(msgspec.Struct, omit_defaults=True):
    """OpenAI's `text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    """OpenAI's `text`. The verbosity has no effect."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(Options, kw_only=True):
    """`POST /v1/responses` and `POST /v1/responses/input_tokens`.

    As in OpenAI's API `input` may be absent, and it may be empty if something else makes a prompt.
    """

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[str] | None = None
    max_output_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_format: ReasoningFormat | None = None
    reasoning_budget_tokens: Count | None = None
    thinking_budget_tokens: Count | None = None

    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None


def refuse(body: ResponsesBody) -> None:
    """Raise an error for the first field that asks for an unsupported feature."""
    for name, hint in _HINTS.items():
        if getattr(body, name):
            raise NotSupportedError(f"'{name}' is not supported: {hint}", param=name)
    if body.truncation == "auto":
        message = "'truncation': 'auto' is not supported: shorten the input, or raise --ctx-size"
        raise NotSupportedError(message, param="truncation")
    for name in ("n", "n_cmpl"):
        if (getattr(body, name) or 1) > 1:
            raise InvalidRequestError(f"'{name}' must be 1: a response has only one choice", param=name)
    for index, value in enumerate(body.include or ()):
        if value not in _INCLUDES:
            where = f"include[{index}]"
            raise InvalidRequestError(f"'{where}' must be one of {', '.join(sorted(_INCLUDES))}", param=where)


_HINTS = {
    "background": "the reply is returned by the request itself; stream it if it takes long",
    "conversation": "continue a response with 'previous_response_id', or send its items as 'input'",
    "prompt": "the server has no stored prompts; send 'instructions' and 'input'",
    "context_management": "the server does not compact conversations",
    "moderation": "the server does not moderate",
}
