"""A format: how the models of a family mark reasoning and calls."""

from __future__ import annotations

import base64
import hashlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from llamaslot.base.generation.tools import ParserOptions, Tool
from llamaslot.formats.calls import ToolCall
from llamaslot.formats.grammar import GrammarWriter, Thinking
from llamaslot.formats.message import (
    CallMarkers,
    OutputParser,
    ReadCalls,
    ReasoningTags,
    StreamParser,
    TaggedMessage,
)
from llamaslot.formats.output import Output
from llamaslot.formats.reader import Reader, Steps


class Format(ABC):
    """The format of one chat template.

    `source` is the template's text and `special` the control tokens of the vocabulary with their ids: those that a
    grammar names by id, in llguidance's tokenizer control tokens and user-defined ones such as `<name>`.
    `reasoning` are the tags that the template mentions.

    A call is reported whether or not there is a tool of that name, so that the client can tell the model; the
    arguments of an unknown function are typed by their text. (llama-server's parser fails on such a call, and its
    grammar prevents it.) Only where no marker begins a call, as in `llama3` and `generic`, the name must be one of
    the tools', and else the text is content.
    """

    name: ClassVar[str]
    markers: ClassVar[CallMarkers]
    calls_are_json: ClassVar[bool] = False
    """True if a call is JSON without a marker, which a grammar cannot tell from content in JSON."""

    limits_digits: ClassVar[bool] = False
    """True if its grammars limit the digits of numbers, so that schemas need not."""

    def __init__(self, source: str, special: Mapping[str, int], reasoning: ReasoningTags | None) -> None:
        self.source = source
        self.special = special
        self.reasoning = reasoning

    @classmethod
    @abstractmethod
    def recognises(cls, source: str) -> bool:
        """Return True if the template of this text belongs to the format."""

    @abstractmethod
    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        """Return the computation that reads calls."""

    @abstractmethod
    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them, for templates that leave a message's calls out."""

    @abstractmethod
    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return a grammar's expression for at least one call."""

    @property
    def calls_stand_alone(self) -> bool:
        """True if a grammar cannot tell where calls begin after a text."""
        return bool(self.markers.lines)

    @property
    def preserved(self) -> tuple[str, ...]:
        """Texts of control tokens that the parser needs in the output."""
        markers = self.markers
        tags = (self.reasoning.start, self.reasoning.end) if self.reasoning else ()
        return tuple(dict.fromkeys((*markers.calls, *markers.left_over, *markers.ignored, *tags)))

    def parser(self, options: ParserOptions) -> OutputParser:
        """Return a parser for one message.

        Without `parse_tools`, or without tools, calls are content. Unless they are `parallel`, only the first call
        is reported. `reasoning_open` is what `reasoning_open_at` returned for the prompt.
        """
        reader = Reader()
        output = Output(
            trim=options.reads_calls or self.reasoning is not None,
            reasoning_as_content=options.reasoning_format == "none",
            parallel=options.parallel,
            calls_only=options.calls_only,
        )
        return StreamParser(reader, output, self.steps(reader, output, options))

    def steps(self, reader: Reader, output: Output, options: ParserOptions) -> Steps[None]:
        """Return the computation that reads a message."""
        message = TaggedMessage(
            reader,
            output,
            options,
            tags=self.reasoning,
            markers=self.markers,
            read_calls=self.read_calls(reader, output, options.tools_by_name),
        )
        return message.steps()

    def grammar(self, tools: Sequence[Tool], *, parallel: bool = True, thinking: Thinking = "none") -> str:
        """Return a Lark grammar for llguidance that forces a call of one of the tools, of which there must be one.

        It allows reasoning before the call as `thinking` says. Without `parallel` it allows one call.
        """
        writer = GrammarWriter(self.special)
        reasoning = self.reasoning_expression(writer, thinking)
        return writer.finished(writer.sequence(reasoning, self.calls_expression(writer, tools, parallel=parallel)))

    def reply_grammar(self, tools: Sequence[Tool], *, parallel: bool, thinking: Thinking, content: str = "") -> str:
        """Return a Lark grammar for a reply of content, of calls, or of content and then calls.

        All calls are calls of the tools. The content is any text in which no call begins, or what another grammar
        called `content` says; calls then stand alone, and with `calls_are_json` there are none.
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

    def plain_grammar(self, content: str) -> str:
        """Return the `reply_grammar` of nothing but `content`."""
        return GrammarWriter(self.special).finished(f"@{content}")

    def content_expression(self, writer: GrammarWriter, content: str) -> str:
        """Return the expression of content with what stands around it."""
        return content

    def reasoning_expression(self, writer: GrammarWriter, thinking: Thinking) -> str:
        """Return a grammar's expression for reasoning before the calls; nothing if there is to be none."""
        if self.reasoning is None or thinking == "none":
            return ""
        ended = f"{writer.text_until(self.reasoning.end)} /\\n{{0,2}}/"
        return ended if thinking == "open" else f"({writer.text(self.reasoning.start)} {ended})?"

    def new_id(self) -> str:
        """Return a random id for a call."""
        return self.call_id(secrets.token_hex(16), 0)

    def call_id(self, completion_id: str, index: int) -> str:
        """Return the id of a completion's call, always the same one; completions have random ids."""
        digest = hashlib.blake2b(f"{completion_id} {index}".encode(), digest_size=18).digest()
        return f"call_{base64.b64encode(digest, altchars=b'ab').decode()}"

    @property
    def text_after_reasoning(self) -> str:
        """Text between the end tag and what follows, where reasoning is cut by force."""
        return ""

    def reasoning_open_at(self, prompt: str) -> str:
        """Return the end of a prompt from the tag that opens reasoning; nothing if it does not end in one."""
        stripped = prompt.rstrip()
        if self.reasoning is None or not stripped.endswith(self.reasoning.start):
            return ""
        return prompt[len(stripped) - len(self.reasoning.start) :]
