"""Base class of formats: how the models of a family write reasoning and tool calls.

`ParsedMessage` is the assistant's message as the client receives it.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from llamaslot.base.events import FinishReason
from llamaslot.base.generation.tools import ParserOptions, Tool
from llamaslot.formats.calls import Delta, ToolCall, ToolCallDelta, is_object
from llamaslot.formats.grammar import GrammarWriter, Thinking
from llamaslot.formats.message import CallMarkers, Output, OutputParser, ReasoningTags, TaggedMessage
from llamaslot.formats.reader import Reader, Steps


@dataclass(frozen=True, slots=True)
class Layout:
    """Texts that models write around calls."""

    opening: str = ""
    """Before each call."""
    closing: str = ""
    """After each call."""
    separator: str = ""
    start: str = ""
    """Before the first call."""
    end: str = ""
    """After the last call."""


class Format(ABC):
    """The format of one chat template.

    `source` is the template's text. `special` maps the tokens that a grammar has to name by id, which are those
    that llguidance's tokenizer treats as special: control tokens, and user-defined tokens such as `<name>`.
    `reasoning` holds the reasoning tags that the template mentions.

    A call is reported even if no tool has that name, so that the client can tell the model; the argument types of
    an unknown function are guessed from their text. (llama-server's parser fails on such a call, and its grammar
    prevents it.) If calls have no marker, as in `llama3` and `generic`, the name must be one of the tools;
    otherwise the text is content.
    """

    name: ClassVar[str]
    signs: ClassVar[tuple[str, ...]] = ()
    """Texts that are in all templates of the format, and together in no other's that is tried later."""
    markers: ClassVar[CallMarkers]
    calls_are_json: ClassVar[bool] = False
    """True if calls are JSON without a marker, so that a grammar cannot tell them from JSON content."""

    calls_stand_alone: ClassVar[bool] = False
    """True if a grammar must not allow text before calls, because it cannot tell where they begin."""

    allows_several_calls: ClassVar[bool] = True
    """False if generation ends after a call, or the templates cannot render several."""

    text_after_reasoning: ClassVar[str] = ""
    """Text to insert after the end tag when a budget ends the reasoning."""

    limits_digits: ClassVar[bool] = False
    """True if the format's grammars limit the digits of numbers, so that schemas need not do it."""

    layout = Layout()

    def __init__(self, source: str, special: Mapping[str, int], reasoning: ReasoningTags | None) -> None:
        self.source = source
        self.special = special
        self.reasoning = reasoning

    @classmethod
    def recognises(cls, source: str) -> bool:
        """Return True if the template with this source uses the format."""
        return all(sign in source for sign in cls.signs)

    @abstractmethod
    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool], marker: str) -> Steps[bool]:
        """Read the calls that a marker begins (`ReadCalls`)."""

    @abstractmethod
    def call_text(self, call: ToolCall) -> str:
        """Return a call as the model writes it, without the texts of `layout`."""

    @abstractmethod
    def call_expression(self, writer: GrammarWriter, tool: Tool) -> str:
        """Return a grammar expression for a call as `call_text` writes it."""

    @property
    def preserved(self) -> tuple[str, ...]:
        """Control tokens whose text must stay in the output for the parser."""
        markers = self.markers
        tags = (self.reasoning.start, self.reasoning.end) if self.reasoning else ()
        texts = (*markers.calls, *markers.left_over, *markers.ignored, *markers.inner, *tags)
        return tuple(dict.fromkeys(texts))

    def parser(self, options: ParserOptions) -> OutputParser:
        """Return a parser for one message.

        Without `parse_tools` or without tools, calls are content. Without `parallel`, only the first call is
        reported. `reasoning_open` is the return value of `reasoning_open_at` for the prompt.
        """
        reader = Reader()
        output = Output(reader, options, trim=options.reads_calls or self.reasoning is not None)
        return OutputParser(reader, output, self.steps(reader, output, options))

    def steps(self, reader: Reader, output: Output, options: ParserOptions) -> Steps[None]:
        """Return the parser's generator for one message."""
        read_calls = partial(self.read_calls, reader, output, options.tools_by_name)
        message = TaggedMessage(
            reader, output, options, tags=self.reasoning, markers=self.markers, read_calls=read_calls
        )
        return message.steps()

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them, for templates that do not render a message's calls."""
        layout = self.layout
        texts = (f"{layout.opening}{self.call_text(call)}{layout.closing}" for call in calls)
        return f"{layout.start}{layout.separator.join(texts)}{layout.end}"

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return a grammar expression for a call of any one of the tools or, if `parallel`, for several."""
        layout = self.layout
        functions = [writer.rule(self.call_expression(writer, tool)) for tool in tools]
        opening, closing = writer.text(layout.opening), writer.text(layout.closing)
        calls = writer.rule(writer.sequence(opening, writer.choice(functions), closing))
        if parallel and self.allows_several_calls:
            calls = writer.repeated(calls, layout.separator)
        return writer.sequence(writer.text(layout.start), calls, writer.text(layout.end))

    def grammar(self, tools: Sequence[Tool], *, parallel: bool = True, thinking: Thinking = "none") -> str:
        """Return a Lark grammar for llguidance that forces a call of one of the tools; `tools` must not be empty.

        `thinking` says whether reasoning may come before the call. Without `parallel` only one call is allowed.
        Raises `ValueError` for a schema that the format's grammars cannot enforce.
        """
        writer = GrammarWriter(self.special)
        reasoning = self.reasoning_expression(writer, thinking)
        return writer.finished(writer.sequence(reasoning, self.calls_expression(writer, tools, parallel=parallel)))

    def reply_grammar(self, tools: Sequence[Tool], *, parallel: bool, thinking: Thinking, content: str = "") -> str:
        """Return a Lark grammar for a reply that is content, calls, or content followed by calls.

        Calls can only name one of the tools. By default content is any text in which no call begins. `content`
        names another grammar for it; then a reply is content or calls, and with `calls_are_json` content only.
        """
        writer = GrammarWriter(self.special)
        reasoning = self.reasoning_expression(writer, thinking)
        calls = self.calls_expression(writer, tools, parallel=parallel) if tools else ""
        if content:
            calls = "" if self.calls_are_json else calls
            told = self.content_expression(writer, f"@{content}")
            return writer.finished(writer.sequence(reasoning, writer.choice([calls, told]) if calls else told))
        text = self.content_expression(writer, writer.text_without(self.markers.calls, self.markers.lines))
        if self.calls_stand_alone:
            return writer.finished(writer.sequence(reasoning, writer.choice([calls, text])))
        return writer.finished(writer.sequence(reasoning, text, f"({calls})?"))

    def content_expression(self, writer: GrammarWriter, content: str) -> str:
        """Return an expression for content, with the markers around it if the format has any."""
        return content

    def reasoning_expression(self, writer: GrammarWriter, thinking: Thinking) -> str:
        """Return a grammar expression for the reasoning before the calls; empty if there must be none."""
        if self.reasoning is None or thinking == "none":
            return ""
        ended = f"{writer.text_until(self.reasoning.end)} /\\n{{0,2}}/"
        return ended if thinking == "open" else f"({writer.text(self.reasoning.start)} {ended})?"

    def new_id(self) -> str:
        """Return a random id for a call."""
        return self.call_id(secrets.token_hex(16), 0)

    def call_id(self, completion_id: str, index: int) -> str:
        """Return the id of a call, derived from the completion's random id so that it can be computed again."""
        digest = hashlib.blake2b(f"{completion_id} {index}".encode(), digest_size=18).digest()
        return f"call_{base64.b64encode(digest, altchars=b'ab').decode()}"

    def reasoning_open_at(self, prompt: str) -> str:
        """Return the prompt's end, from an opening reasoning tag on; empty if it does not end with that tag."""
        stripped = prompt.rstrip()
        if self.reasoning is None or not stripped.endswith(self.reasoning.start):
            return ""
        return prompt[len(stripped) - len(self.reasoning.start) :]


class ParsedMessage:
    """Content, reasoning and tool calls of one completion, parsed as its text arrives.

    Calls without an id in the output get one derived from `completion_id` and their index, unless calls are to have
    none. The prompt worker parses the complete text again to remember the message, and thereby gets the same ids as
    the client.
    """

    def __init__(self, format_: Format, options: ParserOptions, completion_id: str) -> None:
        self._format = format_
        self._completion_id = completion_id
        self._call_ids = options.call_ids
        # Without reasoning, calls and markers to drop, all text is content and needs no parser.
        is_plain = format_.reasoning is None and not options.reads_calls and not format_.markers.ignored
        self._parser = None if is_plain else format_.parser(options)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[list[ToolCallDelta]] = []
        self.reason: FinishReason | None = None
        """Why the message ended; None until then.

        If the model ended the text inside a call, the reason is `limit`: the call is incomplete either way.
        """

    def push(self, text: str, end: FinishReason | None = None) -> Delta:
        """Add text and return what it adds to the message, with an id for each call.

        Pass `end`, the reason why the text ended, with the last text.
        """
        is_cut = False
        if self._parser is None:
            delta = Delta(text)
        else:
            delta = self._parser.push(text)
            if end is not None:
                delta = Delta.of([delta, self._parser.finish(end)])
            if delta.tool_calls:
                delta = Delta.of(map(self._with_ids, delta.parts or (delta,)))
            is_cut = self._parser.output.is_cut
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            if call.index == len(self._calls):
                self._calls.append([])
            self._calls[call.index].append(call)
        self.reason = "limit" if end == "eos" and is_cut else end
        return delta

    @property
    def content(self) -> str:
        """All content so far."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[ToolCall]:
        """All calls so far."""
        return [
            ToolCall(parts[0].name or "", "".join(part.arguments for part in parts), parts[0].id)
            for parts in self._calls
        ]

    @property
    def has_calls(self) -> bool:
        """True once there is a call."""
        return bool(self._calls)

    @property
    def has_cut_call(self) -> bool:
        """True if the last call is incomplete, so that no client may execute it."""
        return bool(self._calls) and not is_object("".join(part.arguments for part in self._calls[-1]))

    @property
    def is_partial(self) -> bool:
        """True if the message differs from the model's output: text was dropped, or a call was closed."""
        return self._parser is not None and self._parser.output.is_partial

    def _with_ids(self, part: Delta) -> Delta:
        return replace(part, tool_calls=tuple(map(self._with_id, part.tool_calls)))

    def _with_id(self, call: ToolCallDelta) -> ToolCallDelta:
        if not self._call_ids:
            return replace(call, id=None)
        if call.name is None or call.id is not None:
            return call
        return replace(call, id=self._format.call_id(self._completion_id, call.index))
