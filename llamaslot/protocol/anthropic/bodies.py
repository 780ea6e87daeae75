"""Bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`.

They have Anthropic's fields, and this server's own for sampling, structured output and the cache. Messages, tools
and content blocks stay mappings: `messages.py` reads them, so that errors can name the block.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from llamaslot.base.generation.tools import ReasoningFormat
from llamaslot.protocol.bodies import INT32_MAX, Options


class ThinkingConfig(msgspec.Struct):
    """Anthropic's `thinking`: `adaptive` leaves the choice to the model."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    display: Literal["summarized", "omitted"] | None = None
    """`omitted` leaves the text of thinking blocks out of the reply. Nothing is ever summarized."""


class ToolChoice(msgspec.Struct):
    """Anthropic's `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class JsonFormat(msgspec.Struct):
    """Anthropic's form of a JSON schema for the text of the reply."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """Anthropic's `output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None
    task_budget: Any = None


class ContextManagement(msgspec.Struct):
    """Anthropic's `context_management`."""

    edits: list[dict[str, Any]] | None = None


class CountTokensBody(Options, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    stop_sequences: list[str] | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    """Older name of `output_config.format`."""
    context_management: ContextManagement | None = None

    model: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_control: Any = None
    mcp_servers: Any = None
    thread: Any = None
    compaction: Any = None

    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_format: ReasoningFormat | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """`POST /v1/messages`. With `max_tokens` 0 the prompt is computed and nothing generated."""

    max_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)]
