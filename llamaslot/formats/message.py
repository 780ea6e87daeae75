"""Parsing a message: reasoning, then text with calls in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from llamaslot.base.events import FinishReason
from llamaslot.base.generation.tools import ParserOptions
from llamaslot.formats.calls import Delta
from llamaslot.formats.output import Output
from llamaslot.formats.reader import Emit, Machine, Markers, Reader, Steps, beginnings


class OutputParser(Protocol):
    """Parser of one message. It raises nothing: output that cannot be parsed is content.

    The concatenated deltas do not depend on how the output was cut into pieces.
    """

    def push(self, text: str) -> Delta:
        """Add output and return what is certain of it."""
        ...

    def finish(self, reason: FinishReason = "eos") -> Delta:
        """End the output and return the rest."""
        ...

    @property
    def is_partial(self) -> bool:
        """True if the message differs from what the model has written: something was left out of it, or closed."""
        ...

    @property
    def is_cut(self) -> bool:
        """True if the output ended inside a call that the message has not, or only a part of."""
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

    def finish(self, reason: FinishReason = "eos") -> Delta:
        """End the output and return the rest."""
        self._machine.end(reason)
        self._output.finish()
        return self._output.take()

    @property
    def is_partial(self) -> bool:
        """True if the message differs from what the model has written: something was left out of it, or closed."""
        return self._output.is_partial

    @property
    def is_cut(self) -> bool:
        """True if the output ended inside a call that the message has not, or only a part of."""
        return self._output.is_cut


class TaggedMessage:
    """A message of reasoning between tags, text, and calls that begin with markers.

    A call in the reasoning ends it if no end tag follows: models at times forget the tag. If one follows, the call
    is a part of the reasoning, unless the model ends the message right behind call and tag: nothing would be left
    of it. So a call is kept back there until the text ends, or goes on behind the tag.

    The beginning of a marker at the end of the text is left out inside a structure: in the reasoning, right after a
    call, or where only calls may come. In other text it may be meant as it is (`a <`), so it stays, unless a limit
    has cut the text behind two or more of its characters.
    """

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
        self._seen_ignored = False
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
        begun = "" if tag else self._reader.fragment(tags.start, tags.end)
        if opened and tag == tags.end:
            self._output.reasoning(whitespace)
            self._output.end_reasoning(tag)
        elif opened:
            self._output.leave_out(begun)
            self._output.reasoning(whitespace + (tag if self._options.reasoning_format == "none" else ""))
            yield from self._reasoning(tags)
        elif tag == tags.start:
            self._output.content(whitespace)
            self._output.begin_reasoning(tag)
            yield from self._reasoning(tags)
        elif tag:
            self._output.end_reasoning(tag)
        else:
            is_tag = len(begun) > 1 and self._reader.end_reason == "limit" and tags.start.startswith(begun)
            self._output.content(whitespace + ("" if is_tag else begun))
            self._output.leave_out(begun if is_tag else "")

    def _reasoning(self, tags: ReasoningTags) -> Steps[None]:
        markers = Markers([tags.end, *self._markers.calls, *self._line_markers])
        line = yield from self._reader.looking_at(*self._markers.lines)
        while True:
            before, marker = "", line
            if not line:
                before = marker = yield from self._reader.until(markers, self._output.reasoning)
            line = ""
            if marker in ("", tags.end):
                rest = "" if marker else self._reader.rest()
                if rest.isspace():
                    self._output.reasoning(rest)
                else:
                    self._output.leave_out(rest)
                self._output.end_reasoning(marker)
                return
            if marker in self._line_markers:
                before, marker = "\n", marker[1:]
                self._reader.unread(marker)
            if (yield from self._ends_with_call(tags, before, marker)):
                return
            if self._reader.has_ended and not self._reader.has_later(tags.end):
                if (yield from self._call(before, marker, self._output.reasoning)):
                    return
            else:
                self._output.reasoning(before)

    def _ends_with_call(self, tags: ReasoningTags, before: str, marker: str) -> Steps[bool]:
        """Read a whole call that begins here, and the rest of the reasoning if it is a part of that; else nothing.

        It ends the reasoning if no end tag follows, or if nothing follows behind one, which is then left out.
        """
        if self._reader.has_ended:
            return False
        mark = self._reader.mark()
        self._output.mute()
        is_call = yield from self._read_calls(marker)
        is_last = is_call and (yield from self._more_calls(tags.end))
        end = tags.end if is_last else ""
        is_whole = self._output.unmute() and is_call
        if is_whole and not end:
            end = yield from self._reader.until(Markers([tags.end]), lambda _: None)
        if is_last:
            yield from self._reader.whitespace()
            is_last = not (yield from self._reader.peek()) and self._reader.end_reason != "limit"
        text = self._reader.release(mark)
        thought, _, after = text.rpartition(end) if end else (text, "", "")
        self._reader.unread(after if end and not is_last else thought)
        if is_last or (is_whole and not end):
            return (yield from self._call(before, marker, self._output.reasoning))
        if not end:
            return False
        self._output.reasoning(before + thought)
        self._output.end_reasoning(end)
        return True

    def _more_calls(self, end: str) -> Steps[bool]:
        """Read other calls, and the end tag; False if there is anything else."""
        calls, lines = self._markers.calls, self._markers.lines
        between = tuple(each for each in (*self._markers.left_over, *self._markers.ignored) if each not in calls)
        while True:
            yield from self._reader.whitespace()
            if tag := (yield from self._reader.accept(end, *between)):
                if tag == end:
                    return True
                continue
            marker = (yield from self._reader.accept(*calls)) or (yield from self._reader.looking_at(*lines))
            if not marker or not (yield from self._read_calls(marker)):
                return False

    def _content(self) -> Steps[None]:
        left_over, ignored = self._markers.left_over, self._markers.ignored
        markers = Markers([*self._markers.calls, *self._line_markers, *left_over, *ignored, *self._reasoning_tags])
        if self._markers.lines:
            self._output.content((yield from self._reader.whitespace()))
            yield from self._lines()
        while True:
            if self._output.after_call:
                yield from self._cut_left_over()
            marker = yield from self._reader.until(markers, self._output.content)
            if not marker:
                self._fragment(self._reader.rest())
                return
            if self._tags is not None and marker in self._reasoning_tags:
                if marker == self._tags.start:
                    self._output.begin_reasoning(marker)
                    yield from self._reasoning(self._tags)
                continue
            is_call = marker in self._markers.calls
            if (marker in ignored and not is_call) or (marker in left_over and self._output.n_calls):
                self._seen_ignored |= marker in ignored
                continue
            if marker in left_over:
                self._output.content(marker)
            elif marker in self._line_markers:
                self._reader.unread(marker[1:])
                if (yield from self._call("\n", marker[1:], self._output.content)):
                    yield from self._lines()
            elif (yield from self._call("" if marker in ignored else marker, marker, self._output.content)):
                yield from self._lines()

    def _cut_left_over(self) -> Steps[None]:
        """Leave out the beginning of a text that ends calls, right behind a call and before another marker."""
        markers = self._markers
        mark = self._reader.mark()
        yield from self._reader.whitespace()
        cut = yield from self._reader.accept(*(text for each in markers.left_over for text in beginnings(each, 2)))
        yield from self._reader.whitespace()
        following = (*markers.calls, *markers.left_over, *markers.ignored)
        is_left_out = bool(cut) and bool((yield from self._reader.looking_at(*following)))
        text = self._reader.release(mark)
        if is_left_out:
            self._output.leave_out(text)
        else:
            self._reader.unread(text)

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
        if is_call:
            return True
        if not self._reader.is_undecided:
            otherwise(before + rejected)
            return False
        text = rejected + self._reader.rest()
        # A marker alone may be meant as text, as its beginning may.
        n_least = 2 if marker in self._markers.lines else int(self._reader.end_reason != "limit")
        in_structure = self._output.after_call or otherwise != self._output.content
        if in_structure or len(text.strip()) >= n_least:
            self._output.cut(before + text)
        else:
            otherwise(before + text)
        return False

    def _fragment(self, rest: str) -> None:
        """Add the beginning of a marker, with which the text ends, to the content, or leave it out."""
        text, output, markers = rest.strip(), self._output, self._markers
        expected = bool(output.n_calls) * markers.left_over + self._seen_ignored * markers.ignored
        if self._reader.end_reason == "limit":
            openings = (*markers.calls, *self._line_markers, *markers.ignored, *self._reasoning_tags[:1])
            expected += tuple(each for each in openings if not each.startswith("</"))
        is_marker = len(text) > 1 and any(each.startswith(text) for each in expected)
        if output.after_call or is_marker:
            output.leave_out(rest)
        else:
            output.content(rest)
