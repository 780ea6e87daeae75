"""Parsing a message: reasoning, then content and calls, collected until they are taken as a `Delta`.

Whitespace around reasoning, before a call and between calls belongs to the markers and is dropped. So trailing
whitespace is held back until it is known what follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from llamaslot.base.events import FinishReason
from llamaslot.base.generation.tools import ParserOptions
from llamaslot.formats.calls import Delta, ToolCallDelta
from llamaslot.formats.reader import Emit, Machine, Markers, Reader, Steps, beginnings


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The texts that begin and end a section of reasoning.

    With `anywhere` a message may have several sections; otherwise one, at its beginning.
    """

    start: str
    end: str
    anywhere: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMarkers:
    """Texts around calls, by which the parser finds them in a message."""

    calls: tuple[str, ...] = ()
    """Texts that begin a call or a list of calls."""
    lines: tuple[str, ...] = ()
    """Texts that begin a call at the start of a line."""
    left_over: tuple[str, ...] = ()
    """Texts that end calls: dropped from the content once there was a call."""
    ignored: tuple[str, ...] = ()
    """Texts that are always dropped from the content."""
    inner: tuple[str, ...] = ()
    """Texts within calls, which the parser needs to see as well."""


ReadCalls: TypeAlias = Callable[[str], Steps[bool]]
"""Reads the calls that a marker begins; returns False if there is no call (nothing is reported then).

A marker of `CallMarkers.calls` has been read already; one of `CallMarkers.lines` has not, because it is part of the
call.
"""


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

    Without `trim` all content is passed on unchanged. `options` say whether reasoning and its markers become
    content, and whether calls after the first, or all content, are dropped.
    """

    def __init__(self, reader: Reader, options: ParserOptions, *, trim: bool) -> None:
        self.n_calls = 0
        self.is_cut = False
        """True if the text ended inside a call, which the message lacks or contains only in part."""
        self.is_partial = False
        """True if the message differs from the model's output: text was dropped, or a call was closed."""
        self.in_call = False
        """True if the last call has not ended."""
        self.after_call = False
        """True if only whitespace has come after the last call."""
        self._reader = reader
        self._trims = trim
        self._as_content = options.reasoning_format == "none"
        self._parallel = options.parallel
        self._calls_only = options.calls_only
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

    def rejected(self, text: str) -> None:
        """Add text that is not a call to the content; drop it if the text ended before that was certain."""
        if self._reader.is_undecided:
            self.cut(text + self._reader.rest())
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
        # It is certain now that a call has begun, so the text before it will not be needed again.
        self._reader.unmark()
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


class OutputParser:
    """Parser of one message. It never raises: output that cannot be parsed is content.

    The concatenated deltas do not depend on how the output was split into pieces: a generator (`Steps`) reads them
    from a `Reader`.
    """

    def __init__(self, reader: Reader, output: Output, steps: Steps[None]) -> None:
        self.output = output
        self._machine = Machine(reader, steps)

    def push(self, text: str) -> Delta:
        """Add output and return the part of the message that is certain now."""
        self._machine.feed(text)
        return self.output.take()

    def finish(self, reason: FinishReason = "eos") -> Delta:
        """End the output and return the rest of the message."""
        self._machine.end(reason)
        self.output.finish()
        return self.output.take()


class TaggedMessage:
    """A message of reasoning between tags, content, and calls that begin with markers.

    A call inside the reasoning ends the reasoning if no end tag follows, because models sometimes forget the tag.
    If one follows, the call is part of the reasoning, unless the model ends the message right after the call and
    the tag: otherwise the message would be empty. So a call inside reasoning is held back until the text ends or
    goes on after the tag.

    If the text ends with the beginning of a marker, that beginning is dropped inside a structure: in the reasoning,
    right after a call, or where only calls may come. In other text it may be meant literally (`a <`), so it is
    kept, unless a limit cut the text after two or more of the marker's characters.
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
        """Decide whether a call inside the reasoning ends it, and read on accordingly; True if reasoning ended.

        The call ends the reasoning if no end tag follows, or if nothing follows the end tag, which is then dropped.
        Otherwise the call and the rest of the reasoning, through the end tag, are read as reasoning. Nothing is
        read if there is no complete call here.
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
        """Read further calls and the end tag; return False if anything else comes before it."""
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
        """Drop an incomplete end marker between a call and the next marker."""
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
        """Read the calls that `marker` begins; if there are none, pass `before` and the text to `otherwise`."""
        mark = self._reader.mark()
        is_call = yield from self._read_calls(marker)
        rejected = self._reader.release(mark)
        if is_call:
            return True
        if not self._reader.is_undecided:
            otherwise(before + rejected)
            return False
        text = rejected + self._reader.rest()
        # A marker alone, like the beginning of one, may be meant as text.
        n_least = 2 if marker in self._markers.lines else int(self._reader.end_reason != "limit")
        in_structure = self._output.after_call or otherwise != self._output.content
        if in_structure or len(text.strip()) >= n_least:
            self._output.cut(before + text)
        else:
            otherwise(before + text)
        return False

    def _fragment(self, rest: str) -> None:
        """Add the partial marker that the text ends with to the content, or drop it."""
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
