"""Parsing a message: reasoning, then text with calls in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from llamaslot.base.generation.tools import ParserOptions
from llamaslot.formats.calls import Delta
from llamaslot.formats.output import Output
from llamaslot.formats.reader import Emit, Machine, Markers, Reader, Steps


class OutputParser(Protocol):
    """Parser of one message. It raises nothing: output that cannot be parsed is content.

    The concatenated deltas do not depend on how the output was cut into pieces.
    """

    def push(self, text: str) -> Delta:
        """Add output and return what is certain of it."""
        ...

    def finish(self) -> Delta:
        """End the output and return the rest."""
        ...

    @property
    def is_partial(self) -> bool:
        """True if the model has written something that the message does not have."""
        ...


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The texts that begin and end a section of reasoning.

    With `anywhere` there may be several; otherwise there is one, at the beginning of the message.
    """

    start: str
    end: str
    anywhere: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMarkers:
    """Where calls may begin in a message."""

    calls: tuple[str, ...] = ()
    """Texts that begin a call or a list of calls."""
    lines: tuple[str, ...] = ()
    """Texts that begin a call at the start of a line."""
    left_over: tuple[str, ...] = ()
    """Texts that end calls: left out of the content once there was a call."""
    ignored: tuple[str, ...] = ()
    """Texts that are always left out of the content."""
    end_reasoning: bool = False
    """A call may begin in the reasoning, which it ends."""


ReadCalls: TypeAlias = Callable[[str], Steps[bool]]
"""Reads the calls that a marker begins; returns False if there is none, and nothing was reported.

`CallMarkers.calls` are read already; `CallMarkers.lines` come next, since they are a part of the call.
"""


class StreamParser:
    """An `OutputParser` that runs a computation on a reader."""

    def __init__(self, reader: Reader, output: Output, steps: Steps[None]) -> None:
        self._output = output
        self._machine = Machine(reader, steps)

    def push(self, text: str) -> Delta:
        """Add output and return what is certain of it."""
        self._machine.feed(text)
        return self._output.take()

    def finish(self) -> Delta:
        """End the output and return the rest."""
        self._machine.end()
        self._output.finish()
        return self._output.take()

    @property
    def is_partial(self) -> bool:
        """True if the model has written something that the message does not have."""
        return self._output.is_partial


class TaggedMessage:
    """A message of reasoning between tags, text, and calls that begin with markers."""

    def __init__(
        self,
        reader: Reader,
        output: Output,
        options: ParserOptions,
        *,
        tags: ReasoningTags | None,
        markers: CallMarkers,
        read_calls: ReadCalls,
    ) -> None:
        self._reader = reader
        self._output = output
        self._options = options
        self._tags = tags
        self._read_calls = read_calls
        self._markers = markers if options.reads_calls else CallMarkers(ignored=markers.ignored)
        self._line_markers = tuple("\n" + text for text in self._markers.lines)
        self._reasoning_tags = (tags.start, tags.end) if tags is not None and tags.anywhere else ()
        output.on_call = reader.unmark

    def steps(self) -> Steps[None]:
        """Read the message."""
        if self._tags is not None:
            yield from self._first_reasoning(self._tags)
        yield from self._content()

    def _first_reasoning(self, tags: ReasoningTags) -> Steps[None]:
        opened = self._options.reasoning_open
        if opened:
            self._output.begin_reasoning(opened, continued=opened.strip() != tags.start)
        whitespace = yield from self._reader.whitespace()
        tag = yield from self._reader.accept(tags.start, tags.end)
        if opened and tag == tags.end:
            self._output.reasoning(whitespace)
            self._output.end_reasoning(tag)
        elif opened:
            self._output.reasoning(whitespace + (tag if self._options.reasoning_format == "none" else ""))
            yield from self._reasoning(tags)
        elif tag == tags.start:
            self._output.content(whitespace)
            self._output.begin_reasoning(tag)
            yield from self._reasoning(tags)
        elif tag:
            self._output.end_reasoning(tag)
        else:
            self._output.content(whitespace)

    def _reasoning(self, tags: ReasoningTags) -> Steps[None]:
        calls = self._markers.calls if self._markers.end_reasoning else ()
        markers = Markers([tags.end, *calls])
        while True:
            marker = yield from self._reader.until(markers, self._output.reasoning)
            if marker in ("", tags.end):
                self._output.end_reasoning(marker)
                return
            if (yield from self._call(marker, marker, self._output.reasoning)):
                return

    def _content(self) -> Steps[None]:
        left_over, ignored = self._markers.left_over, self._markers.ignored
        markers = Markers([*self._markers.calls, *self._line_markers, *left_over, *ignored, *self._reasoning_tags])
        if self._markers.lines:
            self._output.content((yield from self._reader.whitespace()))
            yield from self._lines()
        while True:
            marker = yield from self._reader.until(markers, self._output.content)
            if not marker:
                return
            if self._tags is not None and marker in self._reasoning_tags:
                if marker == self._tags.start:
                    self._output.begin_reasoning(marker)
                    yield from self._reasoning(self._tags)
                continue
            if marker in ignored or (marker in left_over and self._output.n_calls):
                continue
            if marker in left_over:
                self._output.content(marker)
            elif marker in self._line_markers:
                self._reader.unread(marker[1:])
                if (yield from self._call("\n", marker[1:], self._output.content)):
                    yield from self._lines()
            elif (yield from self._call(marker, marker, self._output.content)):
                yield from self._lines()

    def _lines(self) -> Steps[None]:
        """Read calls at the start of the message, or right after another call."""
        while marker := (yield from self._reader.looking_at(*self._markers.lines)):
            if not (yield from self._call("", marker, self._output.content)):
                return

    def _call(self, before: str, marker: str, otherwise: Emit) -> Steps[bool]:
        """Read the calls that `marker` begins; if there are none, pass the text, with `before`, to `otherwise`."""
        mark = self._reader.mark()
        is_call = yield from self._read_calls(marker)
        rejected = self._reader.release(mark)
        if not is_call:
            otherwise(before + rejected)
        return is_call
