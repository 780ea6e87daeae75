"""Rendered conversations with placeholders for replies: where each reply begins and ends in the text.

    ...results<|im_end|>\n<|im_start|>assistant\n  <think>\nP\n</think>..{"a": "P"}}\n</tool_call>  <|im_end|>\n...
                                                   ^ own text of the reply                          ^ end

The placeholders stand for the reasoning, and for the content or the arguments of calls. The text from the last of
them to the end-of-turn token belongs to the reply, and is replaced by the reply's own tokens.

What a template writes around replies is found out by probes: small conversations that are rendered
(`ProbedTemplate`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llamaslot.base.commands import TextPart
from llamaslot.base.errors import InvalidRequestError
from llamaslot.protocol.replies.meaning import digest_of
from llamaslot.text.conversation import Conversation, Message

Render = Callable[[Conversation, bool], Sequence[TextPart]]
"""Renders messages, with or without a generation prompt; raises `InvalidRequestError`."""

_NAME = "name_of_a_probed_function"
_CALLS: list[Message] = [
    {"type": "function", "id": call_id, "function": {"name": _NAME, "arguments": "{}"}}
    for call_id in ("call00001", "call00002")
]
CALL = _CALLS[0]
_QUESTION: Message = {"role": "user", "content": "?"}
_TEXT = "the_text_of_a_probed_reply"
_RESULT = "the result of a probed function"
MAX_PROBES = 64
"""Most combinations of template variables for which findings are kept."""
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
        self.mark = secrets.token_hex(8)
        self._pattern = re.compile(f"{self.mark}([rb])([0-9]+)e")

    def message(self, number: int, calls: Sequence[Message]) -> Message:
        """Return a message by the assistant with the placeholders of reply `number`; calls keep names and ids."""
        body = f"{self.mark}b{number}e"
        # No content beside calls: some templates write it after the results of the calls, where it would not be
        # replaced.
        message: Message = {
            "role": "assistant",
            "content": "" if calls else body,
            "reasoning_content": f"{self.mark}r{number}e",
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


@dataclass(slots=True)
class Findings:
    """Results of the probes."""

    replies: dict[tuple[int, bool], ReplySpan | None] = field(default_factory=dict)
    """Replies by the number of their calls, where 2 stands for 2 or more, and whether they are the last message."""
    outer: dict[tuple[str, str], tuple[str, str] | None] = field(default_factory=dict)
    """Whitespace that the template writes around a reply's text, by that in the message; None if unknown."""
    prompts: list[str] = field(default_factory=list)
    """Prompts that end with a question, and with the result of a call."""


@dataclass(frozen=True, slots=True)
class ProbedTemplate:
    """A template with the tools and variables of a request."""

    render: Render
    known: Findings

    def own_end(self, calls: Sequence[Message]) -> str:
        """Return the text that the template writes after the last placeholder of a message with these calls."""
        span = self._probe(len(calls), is_last=True)
        own = span.text[span.last :] if span is not None else ""
        if not calls:
            return own
        # Some templates write the id after the arguments.
        own = own.replace(_CALLS[: len(calls)][-1]["id"], calls[-1].get("id", ""))
        return own.replace(_NAME, calls[-1]["function"]["name"])

    def own_calls(self, calls: Sequence[Message]) -> Sequence[Message]:
        """Return the calls with which a message is rendered if its own tokens will replace it: all, or the first.

        Templates that write only one call per message put each result right after its call. A result must not be
        replaced, so only the first call is rendered with them.
        """
        if len(calls) < len(_CALLS):
            return calls
        span = self._probe(len(_CALLS), is_last=False)
        takes_several = span is None or _RESULT not in span.text[span.start : span.until]
        return calls if takes_several else calls[:1]

    def strips_reasoning(self, calls: Sequence[Message]) -> bool:
        """Return True if the template leaves out the reasoning of a reply when another question follows."""
        span = self._probe(len(calls), is_last=False)
        return span is not None and not span.has_reasoning

    def outer_of(self, content: str) -> tuple[str, str] | None:
        """Return the whitespace that the template writes around a reply's text; None if that is unknown."""
        lead, trail = content[: len(content) - len(content.lstrip())], content[len(content.rstrip()) :]
        if (lead, trail) not in self.known.outer:
            if len(self.known.outer) >= MAX_PROBES:
                self.known.outer.clear()
            self.known.outer[lead, trail] = self._outer(lead, trail)
        return self.known.outer[lead, trail]

    def _outer(self, lead: str, trail: str) -> tuple[str, str] | None:
        bare, full = (
            self._around({"role": "assistant", "content": content}) for content in (_TEXT, f"{lead}{_TEXT}{trail}")
        )
        if not (bare and full and full[0].startswith(bare[0]) and full[1].endswith(bare[1])):
            return None if lead or trail else ("", "")
        prompt = self._prompt([_QUESTION])
        # After the generation prompt some templates write a space, others markup, which belongs to the format.
        after = full[0][len(prompt) :] if full[0].startswith(prompt) else lead
        lead = full[0][len(bare[0]) :] if after.strip() else after
        return lead, full[1][: len(full[1]) - len(bare[1])]

    def _around(self, reply: Message) -> tuple[str, str] | None:
        """Return the texts before and after that of a reply between two questions."""
        before, found, after = self._prompt([_QUESTION, reply, _QUESTION]).partition(_TEXT)
        return (before, after) if found else None

    def opens_replies(self, text: str) -> bool:
        """Return True if a text is just what the template writes before replies, without any text of a message."""
        if not self.known.prompts:
            result = {"role": "tool", "content": "!", "tool_call_id": CALL["id"]}
            called = [_QUESTION, Placeholders().message(0, [CALL]), result]
            self.known.prompts.extend(map(self._prompt, ([_QUESTION], called)))
        return any(prompt.endswith(text) for prompt in self.known.prompts)

    def _prompt(self, messages: Conversation, *, wants_reply: bool = True) -> str:
        """Return the text of messages; empty if the template refuses them."""
        try:
            return Rendering(self.render(messages, wants_reply)).text
        except InvalidRequestError:
            return ""

    def _probe(self, n_calls: int, *, is_last: bool) -> ReplySpan | None:
        """Render a reply, as the last message or followed by another question; None if it is left out."""
        calls = _CALLS[:n_calls]
        key = len(calls), is_last
        if key not in self.known.replies:
            placeholders = Placeholders()
            results = [{"role": "tool", "content": _RESULT, "tool_call_id": call["id"]} for call in calls]
            followers = [] if is_last else [*results, _QUESTION]
            text = self._prompt([_QUESTION, placeholders.message(0, calls), *followers], wants_reply=not is_last)
            # Only the text from the reply on is kept: before it are the tools, which may be long.
            text = text[max(text.find(placeholders.mark), 0) :]
            self.known.replies[key] = placeholders.spans(text).get(0)
        return self.known.replies[key]
