"""Probes of a chat template: small conversations that are rendered to find out what it writes around replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llamaslot.base.commands import TextPart
from llamaslot.base.errors import InvalidRequestError
from llamaslot.protocol.replies.rendering import Placeholders, Rendering, ReplySpan
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
_MAX_PROBES = 64
"""Most combinations of template variables for which findings are kept."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of the probes, by the number of the reply's calls, where 2 stands for 2 or more."""

    own_ends: dict[int, str] = field(default_factory=dict)
    strips: dict[int, bool] = field(default_factory=dict)
    takes_several_calls: list[bool] = field(default_factory=list)
    """True if a message with several calls is written as one message; empty until that is known."""
    outer: dict[tuple[str, str], tuple[str, str] | None] = field(default_factory=dict)
    """Whitespace that the template writes around a reply's text, by that in the message; None if unknown."""
    prompts: list[str] = field(default_factory=list)
    """Prompts that end with a question, and with the result of a call."""


class Probes:
    """Findings about a template, by the template variables on which they depend."""

    def __init__(self) -> None:
        self._known: dict[bytes, Findings] = {}

    def of(self, variables: bytes) -> Findings:
        """Return the findings for these variables, to which the caller adds."""
        if variables not in self._known and len(self._known) >= _MAX_PROBES:
            # Clients choose variables, so their number is limited. Most clients never send any.
            self._known.clear()
        return self._known.setdefault(variables, Findings())


@dataclass(frozen=True, slots=True)
class ProbedTemplate:
    """A template with the tools and variables of a request."""

    render: Render
    known: Findings

    def own_end(self, calls: Sequence[Message]) -> str:
        """Return the text that the template writes after the last placeholder of a message with these calls."""
        n_calls = min(len(calls), len(_CALLS))
        if n_calls not in self.known.own_ends:
            text, span = self._probe(n_calls, is_last=True)
            self.known.own_ends[n_calls] = text[span.last :] if span is not None else ""
        own = self.known.own_ends[n_calls]
        if not calls:
            return own
        # Some templates write the id after the arguments.
        own = own.replace(_CALLS[n_calls - 1]["id"], calls[-1].get("id", ""))
        return own.replace(_NAME, calls[-1]["function"]["name"])

    def own_calls(self, calls: Sequence[Message]) -> Sequence[Message]:
        """Return the calls with which a message is rendered if its own tokens will replace it: all, or the first.

        Templates that write only one call per message put each result right after its call. A result must not be
        replaced, so only the first call is rendered with them.
        """
        if len(calls) < len(_CALLS):
            return calls
        if not self.known.takes_several_calls:
            text, span = self._probe(len(_CALLS), is_last=False)
            self.known.takes_several_calls.append(span is None or _RESULT not in text[span.start : span.until])
        return calls if self.known.takes_several_calls[0] else calls[:1]

    def strips_reasoning(self, calls: Sequence[Message]) -> bool:
        """Return True if the template leaves out the reasoning of a reply when another question follows."""
        n_calls = min(len(calls), len(_CALLS))
        if n_calls not in self.known.strips:
            _, span = self._probe(n_calls, is_last=False)
            self.known.strips[n_calls] = span is not None and not span.has_reasoning
        return self.known.strips[n_calls]

    def outer_of(self, content: str) -> tuple[str, str] | None:
        """Return the whitespace that the template writes around a reply's text; None if that is unknown."""
        lead, trail = content[: len(content) - len(content.lstrip())], content[len(content.rstrip()) :]
        if (lead, trail) not in self.known.outer:
            if len(self.known.outer) >= _MAX_PROBES:
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
        try:
            text = Rendering(self.render([_QUESTION, reply, _QUESTION], True)).text
        except InvalidRequestError:
            return None
        before, found, after = text.partition(_TEXT)
        return (before, after) if found else None

    def opens_replies(self, text: str) -> bool:
        """Return True if a text is just what the template writes before replies, without any text of a message."""
        if not self.known.prompts:
            result = {"role": "tool", "content": "!", "tool_call_id": CALL["id"]}
            called = [_QUESTION, Placeholders().message(0, [CALL]), result]
            self.known.prompts.extend(map(self._prompt, ([_QUESTION], called)))
        return any(prompt.endswith(text) for prompt in self.known.prompts)

    def _prompt(self, messages: Conversation) -> str:
        try:
            return Rendering(self.render(messages, True)).text
        except InvalidRequestError:
            return ""

    def _probe(self, n_calls: int, *, is_last: bool) -> tuple[str, ReplySpan | None]:
        """Render a reply, as the last message or followed by another question; returns the text and its span."""
        placeholders = Placeholders()
        calls = _CALLS[:n_calls]
        reply = placeholders.message(0, calls)
        results = [{"role": "tool", "content": _RESULT, "tool_call_id": call["id"]} for call in calls]
        followers = [] if is_last else [*results, _QUESTION]
        try:
            text = Rendering(self.render([_QUESTION, reply, *followers], not is_last)).text
        except InvalidRequestError:
            text = ""
        return text, placeholders.spans(text).get(0)
