"""Tools and calls as text, for chat templates that ignore them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llamaslot.formats.calls import ToolCall
from llamaslot.formats.fields import is_object
from llamaslot.formats.format import Format
from llamaslot.text.call_arguments import parsed_arguments
from llamaslot.text.conversation import Conversation, Message, clean_message, joined
from llamaslot.text.template import ChatTemplate

_INTRODUCTION = (
    "You can call functions. Each of the following lines describes one, with the schema of its parameters:"
)
_EXAMPLE = ToolCall("name", '{"parameter": "value"}')


def with_text_of_tools(
    template: ChatTemplate,
    format_: Format,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
) -> Sequence[Mapping[str, Any]]:
    """Return messages with the tools and calls that the template ignores as text; unchanged if there are none.

    Calls are written as models of the format write them. Raises `InvalidRequestError` for invalid messages.
    """
    adds_tools = bool(tools) and not template.takes_tools
    has_calls = any(
        isinstance(each, Mapping) and (each.get("tool_calls") or each.get("function_call")) for each in messages
    )
    adds_calls = has_calls and not template.takes_calls
    if not (adds_tools or adds_calls):
        return messages
    conversation = [clean_message(message, index) for index, message in enumerate(messages)]
    if adds_calls:
        conversation = [_with_calls(message, format_) for message in conversation]
    return _with_tools(conversation, format_, tools) if adds_tools else conversation


def _with_calls(message: Message, format_: Format) -> Message:
    calls = message.pop("tool_calls", ())
    if not calls:
        return message
    rendered = format_.render([_call(call) for call in calls])
    text = joined(message["content"], "\n")
    return {**message, "content": f"{text}\n{rendered}" if text else rendered}


def _call(call: Message) -> ToolCall:
    arguments = call["function"]["arguments"]
    if not is_object(arguments):
        arguments = json.dumps(parsed_arguments(arguments), ensure_ascii=False)
    return ToolCall(call["function"]["name"], arguments, call.get("id"))


def _with_tools(conversation: Conversation, format_: Format, tools: Sequence[Mapping[str, Any]]) -> Conversation:
    """Add a description of the tools at the start of the conversation's system message."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = "\n".join(
        [_INTRODUCTION, *lines, "To call a function, reply with nothing but this form:", format_.render([_EXAMPLE])]
    )
    if conversation and conversation[0]["role"] in {"system", "developer"}:
        first, *rest = conversation
        return [{**first, "content": f"{text}\n\n{joined(first['content'], chr(10))}"}, *rest]
    return [{"role": "system", "content": text}, *conversation]
