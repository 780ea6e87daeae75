"""Base class of formats: how the models of a family write reasoning and tool calls."""

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
    TaggedMessage,
)
from llamaslot.formats.output import Output
from llamaslot.formats.reader import Reader, Steps


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
    markers: ClassVar[CallMarkers]
    calls_are_json: ClassVar[bool] = False
    """True if calls are JSON without a marker, so that a grammar cannot tell them from JSON content."""

    calls_stand_alone: ClassVar[bool] = False
    """True if a grammar must not allow text before calls, because it cannot tell where they begin."""

    text_after_reasoning: ClassVar[str] = ""
    """Text to insert after the end tag when a budget ends the reasoning."""

    limits_digits: ClassVar[bool] = False
    """True if the format's grammars limit the digits of numbers, so that schemas need not do it."""

    def __init__(self, source: str, special: Mapping[str, int], reasoning: ReasoningTags | None) -> None:
        self.source = source
        self.special = special
        self.reasoning = reasoning

    @classmethod
    @abstractmethod
    def recognises(cls, source: str) -> bool:
        """Return True if the template with this source uses the format."""

    @abstractmethod
    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        """Return the function that reads the calls a marker begins."""

    @abstractmethod
    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them, for templates that do not render a message's calls."""

    @abstractmethod
    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return a grammar expression for one or more calls."""

    @property
    def preserved(self) -> tuple[str, ...]:
        """Control tokens whose text must stay in the output for the parser."""
        markers = self.markers
        tags = (self.reasoning.start, self.reasoning.end) if self.reasoning else ()
        return tuple(dict.fromkeys((*markers.calls, *markers.left_over, *markers.ignored, *tags)))

    def parser(self, options: ParserOptions) -> OutputParser:
        """Return a parser for one message.

        Without `parse_tools` or without tools, calls are content. Without `parallel`, only the first call is
        reported. `reasoning_open` is the return value of `reasoning_open_at` for the prompt.
        """
        reader = Reader()
        output = Output(
            trim=options.reads_calls or self.reasoning is not None,
            reasoning_as_content=options.reasoning_format == "none",
            parallel=options.parallel,
            calls_only=options.calls_only,
        )
        return OutputParser(reader, output, self.steps(reader, output, options))

    def steps(self, reader: Reader, output: Output, options: ParserOptions) -> Steps[None]:
        """Return the parser's generator for one message."""
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
        """Return a Lark grammar for llguidance that forces a call of one of the tools; `tools` must not be empty.

        `thinking` says whether reasoning may come before the call. Without `parallel` only one call is allowed.
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

    def plain_grammar(self, content: str) -> str:
        """Return a grammar for a reply that is only `content`, the name of another grammar."""
        return GrammarWriter(self.special).finished(f"@{content}")

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
