"""A rendered conversation with placeholders for replies: where each reply begins and ends in its text.

    ...results<|im_end|>\n<|im_start|>assistant\n  <think>\nP\n</think>..{"a": "P"}}\n</tool_call>  <|im_end|>\n...
                                                   ^ own text of the reply                          ^ end

The placeholders stand for the reasoning, and for the content or the arguments of calls. The text from the last of
them to the end-of-turn token belongs to the reply, and is replaced by the reply's own tokens.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from llamaslot.base.commands import TextPart
from llamaslot.protocol.replies.meaning import digest_of
from llamaslot.text.conversation import Message

_IGNORED = re.compile(r"[\s\"'\])}]+")
"""Whitespace and characters that close values, which models and templates write differently."""
_TAG = re.compile(r"<[^<>]+>")
_CLOSERS = re.compile(r"(?:\s*[\"'\])}])*")


@dataclass(frozen=True, slots=True)
class Rendering:
    """A prompt's parts as one text. Offsets count characters."""

    parts: Sequence[TextPart]

    @property
    def text(self) -> str:
        """The whole text."""
        return self.parts[0].text if len(self.parts) == 1 else "".join(part.text for part in self.parts)

    def cut(self, start: int, end: int | None = None) -> tuple[TextPart, ...]:
        """Return the parts between two offsets."""
        found: list[TextPart] = []
        at = 0
        for part in self.parts:
            stop = at + len(part.text)
            if run := part.text[max(start - at, 0) : None if end is None else max(end - at, 0)]:
                found.append(TextPart(run, special=part.special))
            at = stop
        return tuple(found)

    def digest(self, start: int, end: int) -> bytes:
        """Return a digest of the text between two offsets, including which of its parts are plain text."""
        parts = self.cut(start, end)
        return digest_of(*(b"%d" % part.special + part.text.encode(errors="surrogatepass") for part in parts))


class Placeholders:
    """Texts that stand for the replies of a conversation.

    Each reply has one for its reasoning, and one for its content or, if it has calls, for the arguments of each
    call.
    """

    def __init__(self) -> None:
        # Random, so that it occurs in no message.
        self._mark = secrets.token_hex(8)
        self._pattern = re.compile(f"{self._mark}([rb])([0-9]+)e")

    def message(self, number: int, calls: Sequence[Message]) -> Message:
        """Return a message by the assistant with the placeholders of reply `number`; calls keep names and ids."""
        body = f"{self._mark}b{number}e"
        # No content beside calls: some templates write it after the results of the calls, where it would not be
        # replaced.
        message: Message = {
            "role": "assistant",
            "content": "" if calls else body,
            "reasoning_content": f"{self._mark}r{number}e",
        }
        if calls:
            arguments = f'{{"a": "{body}"}}'
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": arguments}} for call in calls
            ]
        return message

    def spans(self, text: str) -> dict[int, ReplySpan]:
        """Return the spans of the replies in a text, by number, without those that the template left out."""
        found: dict[int, list[re.Match[str]]] = {}
        for each in self._pattern.finditer(text):
            found.setdefault(int(each[2]), []).append(each)
        return {
            number: ReplySpan(
                text,
                start=each[0].start(),
                last=max(part.end() for part in each if part[1] == "b"),
                until=each[-1].end(),
                has_reasoning=any(part[1] == "r" for part in each),
            )
            for number, each in found.items()
            if any(part[1] == "b" for part in each)
        }


@dataclass(frozen=True, slots=True)
class ReplySpan:
    """The place of a reply in a text."""

    text: str
    start: int
    """Offset of the first placeholder."""
    last: int
    """Offset after the last placeholder of content or arguments."""
    until: int
    """Offset after the last placeholder of any kind."""
    has_reasoning: bool
    """True if the template writes the reasoning."""

    def end(self, own: str, closing: str, end_tokens: Sequence[str], *, has_calls: bool) -> int:
        """Return the offset at which the prompt continues after the tokens of the reply.

        That is its end-of-turn token. `own` is what the template writes after the last placeholder of a message. If
        it has no such token, the prompt continues after the last text, or tag, with which both `own` and the reply
        (`closing`) end.
        """
        own = own[: n_common_characters(own, self.text[self.last : self.last + len(own)])]
        ends = [at for token in end_tokens if (at := own.find(token)) >= 0]
        if ends:
            return self.last + min(ends)
        if not has_calls:
            return self.last
        told = _IGNORED.sub("", closing)
        n_closed, seen = 0, ""
        for i, character in enumerate(own):
            if not _IGNORED.fullmatch(character):
                seen += character
                if told.endswith(seen):
                    n_closed = i + 1
        if n_closed:
            return self.last + n_closed
        # A reply whose last call has no arguments has fewer closing tags than the template's text.
        for tag in reversed([*_TAG.finditer(own)]):
            if told.endswith(_IGNORED.sub("", tag[0])):
                return self.last + tag.end()
        closers = _CLOSERS.match(own)
        return self.last + (closers.end() if closers else 0)


def n_common_characters(a: str, b: str) -> int:
    """Return the length of the common prefix of two texts. Bisects, because both are long and mostly equal."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
