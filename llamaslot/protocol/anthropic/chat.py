"""Conversion of Anthropic's request bodies to chat bodies, which are then read like those of
`/v1/chat/completions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamaslot.base.errors import InvalidRequestError, NotSupportedError
from llamaslot.protocol.anthropic.bodies import CountTokensBody, ToolChoice
from llamaslot.protocol.anthropic.messages import conversation_of
from llamaslot.protocol.bodies import ChatBody, options_of
from llamaslot.protocol.decoding import FieldNames, whole
from llamaslot.protocol.structured_options import JsonSchemaFormat, ResponseFormat
from llamaslot.text.conversation import Message
from llamaslot.text.json_fields import object_of, text_of

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
        message = f"'{asked[0]}' is not supported: Anthropic's replies have no field for it"
        raise NotSupportedError(message, param=asked[0])
    for name in _NOT_SUPPORTED:
        if getattr(body, name):
            raise NotSupportedError(f"'{name}' is not supported", param=name)
    if body.output_config is not None and body.output_config.task_budget is not None:
        raise NotSupportedError("'output_config.task_budget' is not supported", param="output_config.task_budget")


def _tool(tool: Mapping[str, Any], where: str) -> Message:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise NotSupportedError(
            f"'{where}.type' is {kind!r}: the server has no tools of its own, only 'custom' tools are accepted",
            param=f"{where}.type",
        )
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
        raise InvalidRequestError("'tool_choice.name' is required", param="tool_choice.name")
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
        raise InvalidRequestError("'thinking.budget_tokens' is required", param="thinking.budget_tokens")
    return {"enable_thinking": thinking.type != "disabled"}


def _clear_thinking(body: CountTokensBody, conversation: Sequence[Message]) -> None:
    """Remove reasoning from all but the last turns, as `context_management` asks; refuse other edits."""
    edits = body.context_management.edits if body.context_management is not None else None
    for i, edit in enumerate(edits or ()):
        where = f"context_management.edits[{i}]"
        if edit.get("type") != "clear_thinking_20251015":
            raise NotSupportedError(f"'{where}.type' is {edit.get('type')!r}: not supported", param=f"{where}.type")
        keep = edit.get("keep", {"type": "thinking_turns", "value": 1})
        kind = keep.get("type") if isinstance(keep, Mapping) else keep
        n_kept = keep.get("value") if isinstance(keep, Mapping) and kind == "thinking_turns" else None
        if kind == "all":
            continue
        if not isinstance(n_kept, int) or n_kept < 1:
            raise InvalidRequestError(f"'{where}.keep' must be 'all' or a number of turns", param=f"{where}.keep")
        n_turns, in_turn = 0, False
        for message in reversed(conversation):
            if message["role"] == "user":
                in_turn = False
            elif message["role"] == "assistant":
                n_turns += not in_turn
                in_turn = True
                if n_turns > n_kept:
                    message.pop("reasoning_content", None)
