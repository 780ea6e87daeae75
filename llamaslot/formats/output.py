"""The parts of a message that a parser has found, collected until they are taken as a `Delta`.

Whitespace around reasoning, before a call and between calls belongs to the markers and is dropped. So trailing
whitespace is held back until it is known what follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from llamaslot.formats.calls import Delta, ToolCallDelta
from llamaslot.formats.reader import Reader


@dataclass(slots=True)
class _Part:
    """Consecutive content, reasoning or calls, without anything of another kind in between."""

    kind: Literal["content", "reasoning", "calls"]
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)

    def delta(self) -> Delta:
        text = "".join(self.texts)
        if self.kind == "content":
            return Delta(text)
        return Delta(reasoning=text) if self.kind == "reasoning" else Delta(tool_calls=tuple(self.calls))


class Output:
    """Content, reasoning and calls that have not been taken yet.

    Without `trim` all content is passed on unchanged. With `reasoning_as_content`, reasoning and its markers become
    content. Without `parallel`, calls after the first are dropped. With `calls_only`, content is dropped.
    """

    def __init__(self, *, trim: bool, reasoning_as_content: bool, parallel: bool, calls_only: bool = False) -> None:
        self.n_calls = 0
        self.is_cut = False
        """True if the text ended inside a call, which the message lacks or contains only in part."""
        self.is_partial = False
        """True if the message differs from the model's output: text was dropped, or a call was closed."""
        self.in_call = False
        """True if the last call has not ended."""
        self.after_call = False
        """True if only whitespace has come after the last call."""
        self.on_call: Callable[[], object] = lambda: None
        """Called when it is certain that a call has begun."""
        self._trims = trim
        self._as_content = reasoning_as_content
        self._parallel = parallel
        self._calls_only = calls_only
        self._is_muted = False
        self._before_mute = (0, False, False, False)
        self._parts: list[_Part] = []
        self._whitespace: list[str] = []
        self._reasoning_whitespace: list[str] = []
        self._reasoning_began = False
        self._reasoning_gap = ""
        self._at_section_start = False
        self._arguments: list[str] = []

    def content(self, text: str) -> None:
        """Add content."""
        if self._is_muted:
            return
        if self._calls_only:
            self.leave_out(text)
            return
        self.after_call &= text.isspace() or not text
        if not self._trims:
            self._add_content(text)
            return
        body = text.rstrip()
        if body:
            if self._at_section_start:
                self._whitespace.clear()
                body = body.lstrip()
            self._add_content(*self._whitespace, body)
            self._whitespace.clear()
            self._at_section_start = False
        if text[-1:].isspace():
            self._whitespace.append(text[len(text.rstrip()) :])

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        if self._as_content:
            self._add_content(text)
            return
        body = text.rstrip()
        if body:
            whitespace = self._reasoning_whitespace
            if not self._reasoning_began:
                whitespace, body = [self._reasoning_gap], body.lstrip()
            self._end_arguments()
            self._part("reasoning").texts += [*whitespace, body]
            self._reasoning_whitespace.clear()
            self._reasoning_began = True
        if text[-1:].isspace():
            self._reasoning_whitespace.append(text[len(text.rstrip()) :])

    def leave_out(self, text: str) -> None:
        """Note that this text is dropped from the message."""
        self.is_partial |= bool(text.strip())

    def cut(self, text: str) -> None:
        """Drop an unfinished call at the end of the text, whose name is not known yet."""
        self.leave_out(text)
        self.is_cut |= self._parallel or not self.n_calls

    def rejected(self, text: str, reader: Reader) -> None:
        """Add text that is not a call to the content; drop it if the text ended before that was certain."""
        if reader.is_undecided:
            self.cut(text + reader.rest())
        else:
            self.content(text)

    def begin_reasoning(self, marker: str, *, continued: bool = False) -> None:
        """Begin a section of reasoning and drop whitespace before it.

        `continued`: the prompt already contains the beginning of the reasoning.
        """
        if self._as_content:
            self._add_content(*self._whitespace, marker)
        else:
            self._reasoning_gap = "\n" if self._reasoning_began else ""
            self._reasoning_began = continued
        self._whitespace.clear()

    def end_reasoning(self, marker: str) -> None:
        """End a section of reasoning and drop whitespace after it."""
        if self._as_content:
            self._add_content(marker)
        else:
            self._reasoning_whitespace.clear()
            self._at_section_start = True

    def call(self, name: str, call_id: str | None) -> None:
        """Begin a call."""
        self._end_arguments()
        self.n_calls += 1
        self.in_call = True
        if self._is_muted:
            return
        self.on_call()
        self._whitespace.clear()
        self._at_section_start = True
        if self._shows_call:
            self._part("calls").calls.append(ToolCallDelta(self.n_calls - 1, name, call_id or None))

    def arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        if self._shows_call and not self._is_muted:
            self._arguments.append(text)

    def end_call(self, *, was_closed: bool = False) -> None:
        """End the call, whose arguments are complete; `was_closed`: the model omitted the text that closes them."""
        self.in_call = False
        self.after_call = True
        self.is_partial |= was_closed

    def mute(self) -> None:
        """Add nothing to the message until `unmute`, so that the parser can try to read a call."""
        self._is_muted = True
        self._before_mute = (self.n_calls, self.is_cut, self.is_partial, self.after_call)

    def unmute(self) -> bool:
        """Restore the state before `mute`; return True if the text did not end inside a call."""
        is_whole = not self.in_call and not self.is_cut
        self.n_calls, self.is_cut, self.is_partial, self.after_call = self._before_mute
        self._is_muted = self.in_call = False
        return is_whole

    def finish(self) -> None:
        """End the message; whitespace at the end of its content belongs to the content."""
        if self.in_call and self._shows_call:
            self.is_cut = self.is_partial = True
        if self._whitespace and not self._at_section_start:
            self._add_content(*self._whitespace)
        self._whitespace.clear()

    def take(self) -> Delta:
        """Return everything added since the last call."""
        self._end_arguments()
        delta = Delta.of(part.delta() for part in self._parts)
        self._parts.clear()
        return delta

    def _part(self, kind: Literal["content", "reasoning", "calls"]) -> _Part:
        """Return the last part if it is of this kind, otherwise a new one."""
        if not self._parts or self._parts[-1].kind != kind:
            self._parts.append(_Part(kind))
        return self._parts[-1]

    def _add_content(self, *texts: str) -> None:
        self._end_arguments()
        self._part("content").texts += texts

    @property
    def _shows_call(self) -> bool:
        return self._parallel or self.n_calls == 1

    def _end_arguments(self) -> None:
        text = "".join(self._arguments)
        self._arguments.clear()
        if not text:
            return
        index = self.n_calls - 1 if self._parallel else 0
        calls = self._part("calls").calls
        # OpenAI sends the name in a delta of its own, so arguments are never merged into it.
        earlier = calls.pop().arguments if calls and calls[-1].index == index and calls[-1].name is None else ""
        calls.append(ToolCallDelta(index, arguments=earlier + text))
