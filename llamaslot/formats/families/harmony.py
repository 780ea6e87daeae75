"""The Harmony format of gpt-oss: messages in channels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

from llamaslot.base.generation.tools import ParserOptions, Tool
from llamaslot.formats.calls import ToolCall, as_json
from llamaslot.formats.format import Format, Layout
from llamaslot.formats.grammar import GrammarWriter, Thinking
from llamaslot.formats.json_value import copy_arguments
from llamaslot.formats.message import CallMarkers, Output, ReadCalls, ReasoningTags
from llamaslot.formats.reader import Emit, Markers, Reader, Steps

START, END, CALL, RETURN = "<|start|>", "<|end|>", "<|call|>", "<|return|>"
CHANNEL, MESSAGE, CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
_NAMESPACE = "functions."

_HEADER_END = Markers([MESSAGE, START, END, CALL, RETURN])
_BODY_END = Markers([CHANNEL, START, END, CALL, RETURN])
"""Includes the channel marker: the models sometimes start the next message with it, without ending the last one."""
_HEADER_BEGINNINGS = (CHANNEL, CONSTRAIN, MESSAGE, START, "to=", "assistant")
"""Texts with which the header of a message may begin."""
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


class Harmony(Format):
    """`<|start|>assistant<|channel|>final<|message|>...<|end|>`; the prompt ends with `<|start|>assistant`.

    The channel `analysis` is reasoning; `final` and `commentary` are content. A message `to=functions.f` is a call;
    the recipient comes before or after the channel. Messages to other recipients are dropped, for example calls of
    built-in tools that the request does not declare.
    """

    name = "gpt-oss"
    signs = (CHANNEL,)
    markers = CallMarkers()
    layout = Layout(f" to={_NAMESPACE}", separator=f"{START}assistant")
    calls_stand_alone = True
    allows_several_calls = False
    text_after_reasoning = f"{START}assistant"

    def __init__(self, source: str, special: Mapping[str, int], reasoning: ReasoningTags | None) -> None:
        super().__init__(source, special, ReasoningTags(ANALYSIS, END))

    @property
    def preserved(self) -> tuple[str, ...]:
        return (CHANNEL, CONSTRAIN, MESSAGE, START, END, CALL, RETURN)

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool], marker: str) -> Steps[bool]:
        """Read the arguments of a call of the function that `marker` names, up to the end of its message."""
        yield from reader.whitespace()
        if not (yield from reader.looking_at("{")):
            return False
        output.call(marker, None)
        yield from copy_arguments(reader, output)
        return True

    def steps(self, reader: Reader, output: Output, options: ParserOptions) -> Steps[None]:
        read_call = partial(self.read_calls, reader, output, options.tools_by_name)
        return _Messages(reader, output, options, read_call).steps()

    def call_text(self, call: ToolCall) -> str:
        """Return a call as the model writes it after `<|start|>assistant`, in a message of its own."""
        return f"{call.name}{CHANNEL}commentary json{MESSAGE}{as_json(call.arguments)}{CALL}"

    def call_expression(self, writer: GrammarWriter, tool: Tool) -> str:
        """Return a grammar expression for a call without `<|call|>`, which ends generation."""
        before = writer.text(f"{tool.name}{CHANNEL}commentary json{MESSAGE}")
        return writer.sequence(before, writer.arguments(tool))

    def content_expression(self, writer: GrammarWriter, content: str) -> str:
        """Return an expression for `content` in the final channel."""
        return writer.sequence(writer.text(FINAL), content)

    def reasoning_expression(self, writer: GrammarWriter, thinking: Thinking) -> str:
        if thinking == "none":
            return ""
        ended = writer.sequence(writer.text_until(END), writer.text(f"{START}assistant"))
        return ended if thinking == "open" else f"({writer.sequence(writer.text(ANALYSIS), ended)})?"


class _Messages:
    """Reads the messages of one reply."""

    def __init__(self, reader: Reader, output: Output, options: ParserOptions, read_call: ReadCalls) -> None:
        self._reader = reader
        self._output = output
        self._options = options
        self._tools = options.tools_by_name
        self._read_call = read_call
        self._in_content = False
        self._is_first = True
        """True in the first message, which may start without a header."""

    def steps(self) -> Steps[None]:
        """Read all messages."""
        opened = self._options.reasoning_open
        if opened:
            self._output.begin_reasoning(opened, continued=opened.strip() != ANALYSIS)
            yield from self._reasoning()
        while (yield from self._reader.peek()):
            yield from self._message()
            self._is_first = False

    def _message(self) -> Steps[None]:
        whitespace = yield from self._reader.whitespace()
        if not (yield from self._reader.looking_at(*_HEADER_BEGINNINGS)):
            begun = self._reader.fragment(*_HEADER_BEGINNINGS)
            is_marker = len(begun) > 1 and self._reader.end_reason == "limit" and not "assistant".startswith(begun)
            if begun and (is_marker or not self._is_first):
                self._output.leave_out(begun)
                return
            self._output.content(whitespace + begun)
            yield from self._content()
            return
        header: list[str] = []
        ended = yield from self._reader.until(_HEADER_END, header.append)
        text = "".join(header)
        if ended == MESSAGE:
            yield from self._body(text)
        elif not ended:
            text += self._reader.rest()
            if self._begins_call(text):
                self._output.cut(text)
            elif self._is_first and text.startswith(("to=", "assistant")):
                self._output.content(whitespace + text)
            else:
                self._output.leave_out(text)

    def _begins_call(self, header: str) -> bool:
        """Return True if the text ended in a header that names a function, or was about to."""
        if header.endswith("to="):
            return not self._is_first or self._reader.end_reason == "limit"
        recipients = _RECIPIENT.findall(header)
        name = recipients[-1] if recipients else ""
        return bool(name) and (name.startswith(_NAMESPACE) or _NAMESPACE.startswith(name) or name in self._tools)

    def _body(self, header: str) -> Steps[None]:
        """Read the body of a message with this header."""
        recipients = _RECIPIENT.findall(header)
        channels = _CHANNEL.findall(header)
        channel = channels[-1] if channels else "final"
        recipient = recipients[-1] if recipients else "assistant"
        name = recipient.removeprefix(_NAMESPACE)
        if recipient != name or recipient in self._tools:
            yield from self._call(name)
        elif recipient != "assistant":
            yield from self._until_end(self._output.leave_out)
        elif channel == "analysis":
            self._output.begin_reasoning(ANALYSIS)
            yield from self._reasoning()
        else:
            yield from self._content()

    def _call(self, name: str) -> Steps[None]:
        if not self._options.reads_calls:
            yield from self._until_end(self._output.leave_out)
            return
        mark = self._reader.mark()
        is_call = yield from self._read_call(name)
        rejected = self._reader.release(mark)
        if is_call:
            yield from self._until_end(self._output.leave_out)
        elif self._reader.is_undecided:
            self._output.cut(name)
            self._reader.rest()
        elif (yield from self._reader.looking_at(START, END, CALL, RETURN)):
            self._output.call(name, None)
            self._output.arguments("{}")
        else:
            self._output.content(rejected)
            yield from self._content()

    def _reasoning(self) -> Steps[None]:
        self._output.leave_out((yield from self._until_end(self._output.reasoning)))
        self._output.end_reasoning(END)

    def _content(self) -> Steps[None]:
        if self._in_content:
            self._output.content("\n")
        self._in_content = True
        rest = yield from self._until_end(self._output.content)
        if len(rest) > 1 and (self._reader.end_reason == "limit" or not self._is_first):
            self._output.leave_out(rest)
        else:
            self._output.content(rest)

    def _until_end(self, emit: Emit) -> Steps[str]:
        """Read a message up to and including its end marker; return a partial marker that the output ends with."""
        if (yield from self._reader.until(_BODY_END, emit)) == CHANNEL:
            self._reader.unread(CHANNEL)
        return self._reader.rest()
