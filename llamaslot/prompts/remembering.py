"""Context of a prompt that its reply is remembered with, and the record that finds the message when it comes back.

A client sends a tool call back as JSON, and the template renders it in another layout than the model's. Reasoning
does not come back at all. So the prefix match would end inside of the last reply. `protocol/replies/` finds the
messages of a conversation in the token memory by these records, and has its prompt continue with their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from msgspec import structs

from llamaslot.base.commands import ImagePart, TextPart
from llamaslot.base.events import FinishReason
from llamaslot.base.generation.tools import ParserOptions
from llamaslot.base.text_records import ChatTurn, RememberedReply
from llamaslot.base.tokens import WIDTH, TokenizedPrompt, packed
from llamaslot.formats.format import Format, ParsedMessage
from llamaslot.prompts.cut_points import PromptText
from llamaslot.protocol.images import MEDIA_MARKER
from llamaslot.protocol.replies.meaning import digest_of, reasoning_meaning, reply_meaning
from llamaslot.protocol.replies.rendering import Rendering
from llamaslot.protocol.text_requests import TextRequest
from llamaslot.text.conversation import Message

_MAX_CLOSING = 80
"""Characters kept of the end of a reply's text."""


@dataclass(frozen=True, slots=True)
class PromptContext:
    """A tokenized prompt, kept until its request is released, with what is needed to remember the reply to it."""

    request: TextRequest
    prompt: TokenizedPrompt
    text: PromptText | None = None
    """None if text anchors and sessions do not apply."""
    n_head: int | None = None
    """Tokens before the last cut point; None where it lies within a token."""

    @property
    def without_files(self) -> PromptContext:
        """The same without the files of its images, which may have many MiB."""
        if not self.prompt.images:
            return self
        parts = (TextPart(MEDIA_MARKER) if isinstance(part, ImagePart) else part for part in self.request.parts)
        request = replace(self.request, parts=tuple(parts))
        images = tuple(structs.replace(each, data=b"") for each in self.prompt.images)
        return replace(self, request=request, prompt=structs.replace(self.prompt, images=images))


class SentReply(NamedTuple):
    """A reply as it was sent."""

    text: str
    tokens: list[int]
    has_ended: bool
    """True if the model ended it; otherwise a limit or a stop string did."""


def remembered_reply(
    context: PromptContext, completion_id: str, sent: SentReply, format_: Format
) -> RememberedReply | None:
    """Return the reply to a prompt; None if it could not be recognized later.

    It cannot if it is empty, was sent only in part, or ends within a call, whose markup then lacks its end.
    """
    request, turn = context.request, context.request.chat
    text, ids, has_ended = sent
    if turn is None or not ids:
        return None
    message = _received(turn, completion_id, sent, format_)
    if message is not None and message.has_calls and not has_ended:
        return None
    meaning = reply_meaning(message.content, message.calls) if message is not None else None
    before = _before(context, turn)
    if message is None or meaning is None or before is None:
        return None
    own = packed(np.concatenate([context.prompt.tokens[before.n_tokens :], np.array(ids, dtype=np.int32)]))
    state, parent = (turn.state, turn.parent) if context.prompt.n_remembered else (turn.start, b"")
    return RememberedReply(
        key=digest_of(state, turn.conversation, meaning),
        parent=parent,
        state=digest_of(state, own),
        n_text=before.n_text,
        text=before.text,
        opening=before.opening,
        reasoning=reasoning_meaning(message.reasoning),
        has_reasoning=bool(message.reasoning.strip()) or _has_tags(turn.begun + text, format_),
        begun=before.begun,
        closing=text[-_MAX_CLOSING:],
        tokens=own,
        n_reply=before.n_reply + len(ids),
        session=request.session,
        owner=request.owner,
    )


def returned_message(
    context: PromptContext, completion_id: str, sent: SentReply, format_: Format
) -> Message | None:
    """Return the reply to a prompt as clients send it back, without its reasoning; None if they cannot."""
    turn = context.request.chat
    # A message that the reply continues is a part of the conversation already.
    message = _received(turn, completion_id, sent, format_) if turn is not None and not turn.begun else None
    if message is None or not (message.content.strip() or message.calls):
        return None
    found: Message = {"role": "assistant", "content": message.content}
    if message.calls:
        found["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    return found


class _Before(NamedTuple):
    """The part of a prompt between the earlier replies of its chain and what was generated."""

    n_tokens: int
    """Tokens of the earlier replies and of the prompts before them."""
    n_reply: int
    """Tokens that the prompt has of the reply, because it continues a message."""
    begun: str
    """The text that it has of the reply."""
    n_text: int
    """As in `RememberedReply`, like the other two."""
    text: bytes
    opening: str


def _before(context: PromptContext, turn: ChatTurn) -> _Before | None:
    """Return what is remembered of the prompt before a reply, None if that is unknown."""
    restored = turn.restored
    continued = restored.continued if restored is not None else None
    n_remembered = context.prompt.n_remembered
    if continued is not None:
        if not n_remembered:
            return None
        return _Before(
            n_remembered - len(continued.tokens) // WIDTH,
            continued.n_reply,
            continued.begun,
            continued.n_text,
            continued.text,
            continued.opening,
        )
    parts = context.request.rest if n_remembered else context.request.parts
    rendering = Rendering([part for part in parts if isinstance(part, TextPart)])
    n_text = len(rendering.text) - len(turn.begun) - len(turn.opening)
    return _Before(n_remembered, 0, turn.begun, n_text, rendering.digest(0, n_text), turn.opening)


def _received(turn: ChatTurn, completion_id: str, sent: SentReply, format_: Format) -> ParsedMessage | None:
    """Return the message that the client got, None if it differs from the model's text, or calls were left out."""
    text = turn.begun + sent.text
    end: FinishReason = "eos" if sent.has_ended else "limit"
    message = _parsed(turn.parser, completion_id, text, end, format_)
    if message.is_partial:
        return None
    parser = structs.replace(turn.parser, parse_tools=True, parallel=True)
    if parser != turn.parser and _parsed(parser, completion_id, text, end, format_).calls != message.calls:
        return None
    return message


def _parsed(
    parser: ParserOptions, completion_id: str, text: str, end: FinishReason, format_: Format
) -> ParsedMessage:
    message = ParsedMessage(format_, parser, completion_id)
    message.push(text, end)
    return message


def _has_tags(text: str, format_: Format) -> bool:
    tags = format_.reasoning
    return tags is not None and (tags.start in text or tags.end in text)
