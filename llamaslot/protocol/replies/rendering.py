"""A rendered conversation with placeholders for replies: where each reply begins and ends in its text.

    ...results<|im_end|>\n<|im_start|>assistant\n  <think>\nP\n</think>..{"a": "P"}}\n</tool_call>  <|im_end|>\n...
                                                   ^ own text of the reply                          ^ end

The placeholders stand for the reasoning, and for the content or the arguments of calls. What the template writes
behind the last of them up to the end-of-turn token belongs to the reply, and its own tokens replace it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from llamaslot.base.commands import TextPart
from llamaslot.protocol.replies.meaning import digest_of
from llamaslot.text.conversation import Message

_IGNORED = re.compile(r"[\s\"'\])}]+")
"""Whitespace, and characters that close values: models and templates write them differently."""
_CLOSERS = re.compile(r"(?:\s*[\"'\])}])*")


@dataclass(frozen=True, slots=True)
class Rendering:
    """A prompt's parts as one text; offsets count characters."""

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
        """Return a digest of the text between two offsets, and of which of it is plain."""
        parts = self.cut(start, end)
        return digest_of(*(b"%d" % part.special + part.text.encode(errors="surrogatepass") for part in parts))


@dataclass(frozen=True, slots=True)
class Placeholders:
    """The texts that stand for one reply; none contains another."""

    reasoning: str
    body: str
    """For its content or, if it has calls, for the arguments of each."""

    @classmethod
    def of(cls, mark: str, number: int) -> Placeholders:
        """Return the placeholders of a reply; `mark` occurs in no message."""
        return cls(f"{mark}r{number}e", f"{mark}b{number}e")

    def message(self, calls: Sequence[Message]) -> Message:
        """Return a message of the assistant with the placeholders; calls keep names and ids."""
        # Templates of some models write content behind the results of calls, where it would remain.
        message: Message = {
            "role": "assistant",
            "content": "" if calls else self.body,
            "reasoning_content": self.reasoning,
        }
        if calls:
            arguments = f'{{"a": "{self.body}"}}'
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": arguments}} for call in calls
            ]
        return message


@dataclass(frozen=True)
class ReplySpan:
    """A reply in a text, by its placeholders."""

    text: str
    placeholders: Placeholders

    @cached_property
    def start(self) -> int:
        """Offset of the first placeholder; -1 if the template leaves the reply out."""
        found = [self.text.find(each) for each in (self.placeholders.reasoning, self.placeholders.body)]
        return min((at for at in found if at >= 0), default=-1) if found[1] >= 0 else -1

    @property
    def has_reasoning(self) -> bool:
        """True if the template writes the reasoning."""
        return self.placeholders.reasoning in self.text

    @property
    def last(self) -> int:
        """Offset behind the last placeholder."""
        return self.text.rfind(self.placeholders.body) + len(self.placeholders.body)

    def end(self, own: str, closing: str, end_tokens: Sequence[str], *, has_calls: bool) -> int:
        """Return the offset at which the prompt goes on behind the tokens of the reply.

        That is its end-of-turn token. `own` is what the template writes behind the last placeholder of a message.
        Where that has no such token, it is behind the text with which both `own` and the reply (`closing`) end.
        """
        own = own[: _n_common(own, self.text[self.last : self.last + len(own)])]
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
        closers = _CLOSERS.match(own)
        return self.last + (closers.end() if closers else 0)


def n_common_characters(a: str, b: str) -> int:
    """Count the characters with which two texts begin alike; by halves, as both are long and alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


_n_common = n_common_characters
