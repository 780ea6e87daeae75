"""The assistant's message as the client receives it: parsed from generated text, with an id for each call."""

from __future__ import annotations

from dataclasses import replace

from llamaslot.base.events import FinishReason
from llamaslot.base.generation.tools import ParserOptions
from llamaslot.formats.calls import Delta, ToolCall, ToolCallDelta, is_object
from llamaslot.formats.format import Format


class ParsedMessage:
    """Content, reasoning and tool calls of one completion, parsed as its text arrives.

    Calls without an id in the output get one derived from `completion_id` and their index. The prompt worker parses
    the complete text again to remember the message, and thereby gets the same ids that the client received.
    """

    def __init__(self, format_: Format, options: ParserOptions, completion_id: str) -> None:
        self._format = format_
        self._completion_id = completion_id
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
        if self._parser is None:
            delta = Delta(text)
        else:
            delta = self._parser.push(text)
            if end is not None:
                delta = Delta.of([delta, self._parser.finish(end)])
            if delta.tool_calls:
                delta = Delta.of(map(self._with_ids, delta.parts or (delta,)))
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            if call.index == len(self._calls):
                self._calls.append([])
            self._calls[call.index].append(call)
        is_cut = self._parser is not None and self._parser.is_cut
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
        return self._parser is not None and self._parser.is_partial

    def _with_ids(self, part: Delta) -> Delta:
        return replace(part, tool_calls=tuple(map(self._with_id, part.tool_calls)))

    def _with_id(self, call: ToolCallDelta) -> ToolCallDelta:
        if call.name is None or call.id is not None:
            return call
        return replace(call, id=self._format.call_id(self._completion_id, call.index))
