"""Anthropic's Messages API: fields of its request bodies, and their conversion to a `ChatBody`.

The bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens` have Anthropic's fields, and this server's
own for sampling, structured output and the cache. The `ChatBody` is read like that of `/v1/chat/completions`.
Messages, tools and content blocks are read here, so that errors can name the block.

Tool results become separate messages, in order with the texts of their message. Consecutive messages of the same
role become one turn, as Anthropic defines it; many chat templates refuse them otherwise. Text blocks stay parts of
a message, except in replies of the assistant: the server splits those around calls, so joining them restores what
was generated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn, TypeAlias

import msgspec
from msgspec import Meta

from llamaslot.base.errors import NotSupportedError
from llamaslot.base.generation.tools import ReasoningFormat
from llamaslot.protocol.bodies import (
    INT32_MAX,
    ChatBody,
    FieldNames,
    JsonSchemaFormat,
    Options,
    ResponseFormat,
    options_of,
    whole,
)
from llamaslot.protocol.images import image_part
from llamaslot.text.conversation import Message, checked_object, object_of, refuse_field, text_of

_CHOICES = ("n", "n_cmpl")
_EXTRAS = ("logprobs", "top_logprobs", "n_probs", "return_tokens", "timings_per_token", "return_progress")
"""Fields whose result has no place in Anthropic's replies."""
_NOT_SUPPORTED = ("mcp_servers", "thread", "compaction")
_EFFORTS = {"xhigh": "high", "max": "high"}
"""Effort levels that chat templates do not know, and what they are replaced by."""
_FIELD_NAMES: FieldNames = (
    (r"response_format\.json_schema\.schema", "output_config.format.schema"),
    (whole("response_format"), "output_config.format"),
    (r"function\.parameters", "input_schema"),
    ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    ("reasoning_budget_tokens", "thinking.budget_tokens"),
)
_Blocks: TypeAlias = list[tuple[str, Mapping[str, Any], str]]
"""The type, the fields and the path of each content block."""


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


def chat_of(body: CountTokensBody) -> ChatBody:
    """Convert a body to a chat body; raises `InvalidRequestError` and `NotSupportedError`."""
    _check(body)
    shared = options_of(body)
    if body.stop_sequences is not None:
        shared["stop"] = body.stop_sequences
    output_format = (body.output_config and body.output_config.format) or body.output_format
    if output_format is not None:
        shared["response_format"] = ResponseFormat("json_schema", JsonSchemaFormat(schema=output_format.schema))
    effort = body.output_config and body.output_config.effort
    conversation = conversation_of(body.system, body.messages)
    _clear_thinking(body, conversation)
    return ChatBody(
        **shared,
        messages=conversation,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())] or None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=None if body.tool_choice is None else not body.tool_choice.disable_parallel_tool_use,
        reasoning_effort=_EFFORTS.get(effort, effort) if effort else None,
        reasoning_format=body.reasoning_format,
        thinking_budget_tokens=body.thinking.budget_tokens if body.thinking is not None else None,
        chat_template_kwargs={**_thinking_kwargs(body), **(body.chat_template_kwargs or {})} or None,
    )


def field_names(body: CountTokensBody) -> FieldNames:
    """Return the chat fields that errors may name, with their names in this body."""
    return _FIELD_NAMES if body.stop_sequences is None else (*_FIELD_NAMES, (whole("stop"), "stop_sequences"))


def _check(body: CountTokensBody) -> None:
    asked = [name for name in _CHOICES if (getattr(body, name) or 1) > 1]
    asked += [name for name in _EXTRAS if getattr(body, name) is not None and getattr(body, name) is not False]
    if asked:
        refuse_field(asked[0], "is not supported: Anthropic's replies have no field for it", NotSupportedError)
    for name in _NOT_SUPPORTED:
        if getattr(body, name):
            refuse_field(name, "is not supported", NotSupportedError)
    if body.output_config is not None and body.output_config.task_budget is not None:
        refuse_field("output_config.task_budget", "is not supported", NotSupportedError)


def _tool(tool: Mapping[str, Any], where: str) -> Message:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        why = f"is {kind!r}: the server has no tools of its own, only 'custom' tools are accepted"
        refuse_field(f"{where}.type", why, NotSupportedError)
    function: Message = {
        "name": text_of(tool, "name", where),
        "description": text_of(tool, "description", where) if tool.get("description") is not None else "",
        "parameters": dict(object_of(tool, "input_schema", where)),
    }
    if tool.get("input_examples"):
        function["parameters"]["examples"] = tool["input_examples"]
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice | None) -> Any:
    if choice is None or choice.type in ("auto", "none"):
        return choice and choice.type
    if choice.type == "any":
        return "required"
    if choice.name is None:
        refuse_field("tool_choice.name", "is required")
    return {"type": "function", "function": {"name": choice.name}}


def _thinking_kwargs(body: CountTokensBody) -> dict[str, Any]:
    """Return the template variable that turns thinking on or off; empty for the server's default.

    If a call is forced and `thinking` is absent, it is turned off, as with Anthropic's models: otherwise thinking
    could use up `max_tokens`.
    """
    thinking = body.thinking
    if thinking is None:
        is_forced = body.tool_choice is not None and body.tool_choice.type in ("any", "tool")
        return {"enable_thinking": False} if is_forced else {}
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        refuse_field("thinking.budget_tokens", "is required")
    return {"enable_thinking": thinking.type != "disabled"}


def _clear_thinking(body: CountTokensBody, conversation: Sequence[Message]) -> None:
    """Remove reasoning from all but the last turns, as `context_management` asks; refuse other edits."""
    edits = body.context_management.edits if body.context_management is not None else None
    for i, edit in enumerate(edits or ()):
        where = f"context_management.edits[{i}]"
        if edit.get("type") != "clear_thinking_20251015":
            refuse_field(f"{where}.type", f"is {edit.get('type')!r}: not supported", NotSupportedError)
        keep = edit.get("keep", {"type": "thinking_turns", "value": 1})
        kind = keep.get("type") if isinstance(keep, Mapping) else keep
        n_kept = keep.get("value") if isinstance(keep, Mapping) and kind == "thinking_turns" else None
        if kind == "all":
            continue
        if not isinstance(n_kept, int) or n_kept < 1:
            refuse_field(f"{where}.keep", "must be 'all' or a number of turns")
        n_turns, in_turn = 0, False
        for message in reversed(conversation):
            if message["role"] == "user":
                in_turn = False
            elif message["role"] == "assistant":
                n_turns += not in_turn
                in_turn = True
                if n_turns > n_kept:
                    message.pop("reasoning_content", None)


def conversation_of(system: str | Sequence[Any] | None, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages of a conversation.

    Raises `InvalidRequestError` for malformed messages, and `NotSupportedError` for blocks that are neither text,
    images, tool use nor thinking.
    """
    conversation: list[Message] = []
    if system is not None:
        _add(conversation, "system", _parts(_content_blocks(system, "system")))
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = message.get("role")
        blocks = _content_blocks(message.get("content"), f"{where}.content")
        match role:
            case "user":
                _add_user(conversation, blocks)
            case "assistant":
                _add_assistant(conversation, blocks)
            case "system":
                _add(conversation, "system", _parts(blocks))
            case _:
                refuse_field(f"{where}.role", "must be one of user, assistant, system")
    for message in conversation:
        if message["role"] == "assistant":
            _join_texts(message)
    if all(message["role"] == "system" for message in conversation):
        # llama-server accepts such requests. Most chat templates need a user message.
        conversation.append({"role": "user", "content": ""})
    return conversation


def _add_user(conversation: list[Message], blocks: _Blocks) -> None:
    parts: list[Message] = []
    for kind, block, where in blocks:
        if kind != "tool_result":
            parts += _parts([(kind, block, where)], may_have_images=True)
            continue
        if parts:
            _add(conversation, "user", parts)
            parts = []
        call_id = text_of(block, "tool_use_id", where)
        conversation.append({"role": "tool", "tool_call_id": call_id, "content": _result(block, where)})
    if parts or not blocks:
        _add(conversation, "user", parts)


def _result(block: Mapping[str, Any], where: str) -> str | list[Message]:
    content = block.get("content")
    parts: list[Message] = []
    for kind, part, place in [] if content is None else _content_blocks(content, f"{where}.content"):
        if kind == "tool_reference":
            # Result of a search for tools. All tools are in the prompt already.
            parts.append(_text_part(f"The tool {text_of(part, 'tool_name', place)} is available."))
        else:
            parts += _parts([(kind, part, place)], may_have_images=True)
    if all(part.get("text") == "" for part in parts):
        return "The tool failed." if block.get("is_error") is True else ""
    return _content(parts)


def _add_assistant(conversation: list[Message], blocks: _Blocks) -> None:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Message] = []
    for kind, block, where in blocks:
        match kind:
            case "text":
                texts.append(text_of(block, "text", where))
            case "thinking":
                reasoning.append(text_of(block, "thinking", where))
            case "redacted_thinking":
                pass  # Only Anthropic can read it.
            case "tool_use":
                calls.append(_call(block, where))
            case _:
                _refuse_block(kind, where)
    if not any((*texts, *reasoning, calls)):
        return
    if not conversation or conversation[-1]["role"] != "assistant":
        conversation.append({"role": "assistant", "content": [], "reasoning_content": [], "tool_calls": []})
    turn = conversation[-1]
    turn["content"].append("".join(texts))
    turn["reasoning_content"].append("".join(reasoning))
    turn["tool_calls"] += calls


def _join_texts(turn: Message) -> None:
    """Join the texts and the reasoning of a turn. Done once, because a turn may come in 100,000 messages."""
    for key in ("content", "reasoning_content"):
        turn[key] = "\n".join(filter(None, turn[key]))
    for key in ("reasoning_content", "tool_calls"):
        if not turn[key]:
            del turn[key]


def _call(block: Mapping[str, Any], where: str) -> Message:
    arguments = json.dumps(object_of(block, "input", where), ensure_ascii=False)
    return {
        "id": text_of(block, "id", where),
        "type": "function",
        "function": {"name": text_of(block, "name", where), "arguments": arguments},
    }


def _add(conversation: list[Message], role: str, parts: list[Message]) -> None:
    """Add parts to the last message if it has the same role, else as a new message."""
    if conversation and conversation[-1]["role"] == role:
        last = conversation[-1]
        if parts and isinstance(last["content"], str):
            last["content"] = [_text_part(last["content"])]
        if parts:
            last["content"] += parts
    else:
        conversation.append({"role": role, "content": _content(parts)})


def _content(parts: list[Message]) -> str | list[Message]:
    """Return parts as content: a text if they are at most one text."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts


def _text_part(text: str) -> Message:
    return {"type": "text", "text": text}


def _parts(blocks: _Blocks, *, may_have_images: bool = False) -> list[Message]:
    """Return blocks as the parts of a chat."""
    parts = []
    for kind, block, where in blocks:
        if kind == "image" and may_have_images:
            parts.append(_image(block, where))
        elif kind == "text":
            parts.append(_text_part(text_of(block, "text", where)))
        else:
            _refuse_block(kind, where)
    return parts


def _image(block: Mapping[str, Any], where: str) -> Message:
    source = object_of(block, "source", where)
    kind = text_of(source, "type", f"{where}.source")
    if kind != "base64":
        why = f"is '{kind}': the server fetches nothing, send the image as base64"
        refuse_field(f"{where}.source.type", why, NotSupportedError)
    return image_part(source.get("data"), f"{where}.source.data")


def _content_blocks(content: Any, where: str) -> _Blocks:
    """Return the blocks of a content. A string counts as one block of type `text`."""
    if isinstance(content, str):
        return [("text", {"text": content}, where)]
    if not isinstance(content, Sequence):
        refuse_field(where, "must be text or a list of content blocks")
    blocks = []
    for i, block in enumerate(content):
        place = f"{where}[{i}]"
        blocks.append((text_of(checked_object(block, place), "type", place), block, place))
    return blocks


def _refuse_block(kind: str, where: str) -> NoReturn:
    """Raise an error about a content block that is not allowed here, or in no prompt."""
    refuse_field(f"{where}.type", f"is '{kind}': it is not supported here", NotSupportedError)
