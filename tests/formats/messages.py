"""Messages of each family as its models write them, and what is in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llamaslot.base.events import FinishReason
from llamaslot.base.generation.tools import ParserOptions, Tool, encoded_tools
from llamaslot.formats.calls import Delta, ToolCall
from llamaslot.formats.format import Format
from llamaslot.formats.message import OutputParser
from llamaslot.formats.recognition import format_of

EXCERPTS = {
    "hermes": '{{- \'\\n<tool_call>\\n{"name": "\' }}',
    "hermes-thinking": "<think> <tool_call>",
    "qwen3-coder": "<tool_call>\\n<function= <parameter=",
    "qwen3.5": "<think> <tool_call>\\n<function= <parameter=",
    "glm-4.6": "<think></think> <tool_call> <arg_key>{{ k }}</arg_key>\n<arg_value>",
    "glm-4.7": "<think></think> <tool_call> <arg_key>{{ k }}</arg_key><arg_value>",
    "minimax-m2": "<think> <minimax:tool_call>",
    "llama3": 'Respond in the format {"name": function name, "parameters": dictionary}. <|start_header_id|>',
    "llama-pythonic": "[func_name1(params_name1=params_value1)]",
    "mistral-nemo": '"[TOOL_CALLS]["',
    "mistral-small": "'[TOOL_CALLS]' '[CALL_ID]' '[ARGS]'",
    "ministral": "'[TOOL_CALLS]' '[ARGS]' '[THINK]'",
    "deepseek-r1": "<think> <｜tool▁calls▁begin｜> ```json",
    "deepseek-v3.1": "</think> <｜tool▁calls▁begin｜>",
    "granite-3": "<|start_of_role|> <|tool_call|> <think>",
    "granite-4": "<|start_of_role|> <tool_call>",
    "gemma4": "'<|tool_call>call:' <|channel>thought",
    "function-gemma": "<start_function_call>call:",
    "lfm2": "List of tools: <|tool_list_start|>[",
    "lfm2.5": 'List of tools: [ <think> "<|tool_call_start|>["',
    "gpt-oss": "<|channel|>analysis<|message|>",
    "kimi-k2": "<|tool_calls_section_begin|>",
    "generic": "<start_of_turn>model",
    "generic-thinking": "<start_of_turn>model <think>",
}
"""Enough of each chat template to recognise it."""


def made(name: str) -> Format:
    """The format of an excerpt, in a vocabulary without control tokens."""
    return format_of(EXCERPTS[name], {})


def tool(name: str, *required: str, **properties: Any) -> Tool:
    return Tool(name, {"type": "object", "properties": properties, "required": list(required)})


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS = [
    tool("get_weather", "city", city=STRING, days=INTEGER),
    tool("python", "code", code=STRING),
    tool("edit", path=STRING, old=STRING, new=STRING, all={"type": "boolean"}),
    tool("todo", items={"type": "array", "items": {"type": "object"}}, options={"type": "object"}),
    tool("set", value={"type": ["string", "null"]}, either={"anyOf": [STRING, INTEGER]}, any={}),
    Tool("no_arguments"),
]


@dataclass
class Message:
    """The concatenation of a parser's deltas."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    parts: list[tuple[str, str]] = field(default_factory=list)
    """Content, reasoning and the arguments of each call, one after the other."""

    def add(self, delta: Delta) -> None:
        for each in delta.parts or (delta,):
            self._add_part(each)
        self.content += delta.content
        self.reasoning += delta.reasoning
        for part in delta.tool_calls:
            if part.name is not None:
                assert part.index == len(self.calls)
                assert not part.arguments, "the name comes alone, as OpenAI sends it"
                self.calls.append(ToolCall(part.name, part.arguments, part.id))
            else:
                assert part.id is None
                call = self.calls[part.index]
                self.calls[part.index] = ToolCall(call.name, call.arguments + part.arguments, call.id)

    def _add_part(self, delta: Delta) -> None:
        assert sum(map(bool, (delta.content, delta.reasoning, delta.tool_calls))) <= 1, "a part has one kind"
        texts = [("content", delta.content)] if delta.content else []
        texts += [("reasoning", delta.reasoning)] if delta.reasoning else []
        texts += [(f"call {call.index}", call.arguments) for call in delta.tool_calls]
        for kind, text in texts:
            if self.parts and self.parts[-1][0] == kind:
                earlier = self.parts.pop()[1]
                self.parts.append((kind, earlier + text))
            else:
                self.parts.append((kind, text))


def fed(parser: OutputParser, pieces: Sequence[str], reason: FinishReason = "eos") -> Message:
    """The message of an output that arrives in pieces."""
    message = Message()
    for piece in pieces:
        message.add(parser.push(piece))
    message.add(parser.finish(reason))
    return message


def parsed(name: str, text: str, **options: Any) -> Message:
    """The message of an output that arrives at once."""
    return fed(made(name).parser(ParserOptions(encoded_tools(options.pop("tools", TOOLS)), **options)), [text])


@dataclass(frozen=True)
class Case:
    """An output of a family's model, and what is in it; arguments are compared as JSON."""

    family: str
    id: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[Any, ...], ...] = ()
    """Name, arguments as a value, and the id if there is one; arguments are text if they are no JSON."""
    options: dict[str, Any] = field(default_factory=dict)

    def check(self, message: Message) -> None:
        calls = [
            (call.name, self._comparable(call.arguments), *([call.id] if call.id else [])) for call in message.calls
        ]
        assert (message.content, message.reasoning, calls) == (self.content, self.reasoning, list(self.calls))

    def _comparable(self, arguments: str) -> Any:
        try:
            return json.loads(arguments)
        except ValueError:
            return arguments


PARIS = {"city": "Paris"}
CODE = 'def f():\n    print("</tool_call> <|tool_call_end|> ünï 格")\n\nf()'
"""Contains marks of the end of calls, quotes, line breaks and other letters."""
