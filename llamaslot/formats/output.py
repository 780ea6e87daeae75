"""The parts of a message that a parser has found, until they are taken as a `Delta`.

Whitespace around reasoning, before a call and between calls belongs to the markers and is left out. So whitespace
that ends the text so far is kept back until it is known what follows.
"""

from __future__ import annotations

from collections.abc import Callable

from llamaslot.formats.calls import Delta, ToolCallDelta


class Output:
    """Content, reasoning and calls that are not taken yet.

    Without `trim` all content is passed on as it is. With `reasoning_as_content`, reasoning and its markers become
    content. Calls after the first are left out unless they are `parallel`.
    """

    def __init__(self, *, trim: bool, reasoning_as_content: bool, parallel: bool) -> None:
        self.n_calls = 0
        self.on_call: Callable[[], object] = lambda: None
        """Called when a call is certain."""
        self._trims = trim
        self._as_content = reasoning_as_content
        self._parallel = parallel
        self._content: list[str] = []
        self._whitespace: list[str] = []
        self._reasoning: list[str] = []
        self._reasoning_whitespace: list[str] = []
        self._reasoning_began = False
        self._reasoning_gap = ""
        self._at_section_start = False
        self._calls: list[ToolCallDelta] = []
        self._arguments: list[str] = []

    def content(self, text: str) -> None:
        """Add text of the answer."""
        if not self._trims:
            self._content.append(text)
            return
        body = text.rstrip()
        if body:
            if self._at_section_start:
                self._whitespace.clear()
                body = body.lstrip()
            self._content += self._whitespace
            self._content.append(body)
            self._whitespace.clear()
            self._at_section_start = False
        if text[-1:].isspace():
            self._whitespace.append(text[len(text.rstrip()) :])

    def reasoning(self, text: str) -> None:
        """Add text of the reasoning."""
        if self._as_content:
            self._content.append(text)
            return
        body = text.rstrip()
        if body:
            if self._reasoning_began:
                self._reasoning += self._reasoning_whitespace
            else:
                body = self._reasoning_gap + body.lstrip()
            self._reasoning.append(body)
            self._reasoning_whitespace.clear()
            self._reasoning_began = True
        if text[-1:].isspace():
            self._reasoning_whitespace.append(text[len(text.rstrip()) :])

    def begin_reasoning(self, marker: str, *, continued: bool = False) -> None:
        """Begin a section of reasoning, which the prompt may have `continued`; whitespace before it is left out."""
        if self._as_content:
            self._content += [*self._whitespace, marker]
        else:
            self._reasoning_gap = "\n" if self._reasoning_began else ""
            self._reasoning_began = continued
        self._whitespace.clear()

    def end_reasoning(self, marker: str) -> None:
        """End a section of reasoning, and leave out whitespace after it."""
        if self._as_content:
            self._content.append(marker)
        else:
            self._reasoning_whitespace.clear()
            self._at_section_start = True

    def call(self, name: str, call_id: str | None) -> None:
        """Begin a call."""
        self.on_call()
        self._end_arguments()
        self._whitespace.clear()
        self._at_section_start = True
        self.n_calls += 1
        if self._shows_call:
            self._calls.append(ToolCallDelta(self.n_calls - 1, name, call_id or None))

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that began last."""
        if self._shows_call:
            self._arguments.append(text)

    def finish(self) -> None:
        """End the message: whitespace at the end of its content belongs to it."""
        if self._whitespace and not self._at_section_start:
            self._content += self._whitespace
        self._whitespace.clear()

    def take(self) -> Delta:
        """Return what was added since the last time."""
        self._end_arguments()
        delta = Delta("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        self._content.clear()
        self._reasoning.clear()
        self._calls.clear()
        return delta

    @property
    def _shows_call(self) -> bool:
        return self._parallel or self.n_calls == 1

    def _end_arguments(self) -> None:
        text = "".join(self._arguments)
        self._arguments.clear()
        if not text:
            return
        index = self.n_calls - 1 if self._parallel else 0
        last = self._calls.pop() if self._calls and self._calls[-1].index == index else ToolCallDelta(index)
        self._calls.append(ToolCallDelta(index, last.name, last.id, last.arguments + text))
