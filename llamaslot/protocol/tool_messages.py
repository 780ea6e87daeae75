"""Tools, calls and results as text, for chat templates that leave them out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llamaslot.formats.calls import ToolCall
from llamaslot.formats.format import Format
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
    """Return the messages with all that the template leaves out in their text; the same ones if that is nothing.

    Calls are written as models of the format write them. Raises `InvalidRequestError` for invalid messages.
    """
    adds_tools = bool(tools) and not template.takes_tools
    has_calls = any(isinstance(each, Mapping) and each.get("tool_calls") for each in messages)
    has_results = any(isinstance(each, Mapping) and each.get("role") == "tool" for each in messages)
    adds_calls = has_calls and not template.takes_calls
    adds_results = has_results and not template.takes_results
    if not (adds_tools or adds_calls or adds_results):
        return messages
    conversation = [clean_message(message, index) for index, message in enumerate(messages)]
    if adds_calls:
        conversation = [_with_calls(message, format_) for message in conversation]
    if adds_results:
        conversation = _with_results(conversation)
    return _with_tools(conversation, format_, tools) if adds_tools else conversation


def _with_calls(message: Message, format_: Format) -> Message:
    calls = message.pop("tool_calls", ())
    if not calls:
        return message
    rendered = format_.render(
        [
            ToolCall(call["function"]["name"], call["function"]["arguments"] or "{}", call.get("id"))
            for call in calls
        ]
    )
    text = joined(message["content"], "\n")
    return {**message, "content": f"{text}\n{rendered}" if text else rendered}


def _with_results(conversation: Conversation) -> Conversation:
    """Return results as messages of the user, one for those that follow each other."""
    result: Conversation = []
    follows = False
    for message in conversation:
        is_result = message["role"] == "tool"
        if not is_result:
            result.append(message)
        else:
            named = {key: message[key] for key in ("name", "tool_call_id") if key in message}
            content = joined(message["content"], "\n")
            text = json.dumps({"tool_response": {**named, "content": content}}, ensure_ascii=False)
            if follows:
                result[-1]["content"] += "\n" + text
            else:
                result.append({"role": "user", "content": text})
        follows = is_result
    return result


def _with_tools(conversation: Conversation, format_: Format, tools: Sequence[Mapping[str, Any]]) -> Conversation:
    """Return the conversation with a description of the tools at the start of its system message."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = "\n".join(
        [_INTRODUCTION, *lines, "To call a function, reply with nothing but this form:", format_.render([_EXAMPLE])]
    )
    if conversation and conversation[0]["role"] in {"system", "developer"}:
        first, *rest = conversation
        return [{**first, "content": f"{text}\n\n{joined(first['content'], chr(10))}"}, *rest]
    return [{"role": "system", "content": text}, *conversation]
