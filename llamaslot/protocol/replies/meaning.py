"""The meaning of messages: what must be unchanged when a client sends a reply back.

Clients change the form of a reply: they leave out its reasoning, send null for empty content, write arguments in
another layout or order, and send parallel calls in several messages. The digests made here do not depend on any of
this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llamaslot.formats.calls import ToolCall
from llamaslot.text.conversation import Conversation, Message, joined

_MAX_EXACT_FLOAT = 2**53
MAX_MERGED = 32
"""Most consecutive messages that are tried as one reply, which a client may have divided by its calls. Models do
not make more parallel calls. Needed in tool loops, where all messages may be calls: without a limit each one would
be tried together with all later ones.
"""
START = b"start"
"""Digest of a conversation without messages."""


def digest_of(*values: bytes) -> bytes:
    """Return a 16-byte digest of several values."""
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        digest.update(len(value).to_bytes(8, "little") + value)
    return digest.digest()


def reply_meaning(content: str, calls: Sequence[ToolCall]) -> bytes | None:
    """Return a digest of a reply's content, without outer whitespace, and of its calls.

    None if it has neither, or if arguments are not valid JSON.
    """
    return _meaning(content, [_call_meaning(call) for call in calls])


def _meaning(content: str, calls: Sequence[bytes | None]) -> bytes | None:
    """Return the digest of content and calls; `calls` has a digest of each, None if its arguments are not JSON."""
    if not content.strip() and not calls:
        return None
    known = [call for call in calls if call is not None]
    return digest_of(_encoded(content.strip()), *known) if len(known) == len(calls) else None


def _call_meaning(call: ToolCall) -> bytes | None:
    try:
        arguments = _normal(json.loads(call.arguments or "{}"))
    except (ValueError, RecursionError):
        return None
    return digest_of(_encoded([call.id, call.name, arguments]))


def reasoning_meaning(reasoning: str) -> bytes:
    """Return a digest of reasoning, without outer whitespace; empty if there is none."""
    text = reasoning.strip()
    return digest_of(text.encode(errors="surrogatepass")) if text else b""


def content_of(message: Message) -> str:
    """Return the text of a message's content."""
    return joined(message["content"], "")


class Meanings:
    """Digests of the messages of one cleaned conversation, which must not be changed meanwhile.

    Each call is parsed only once, although several replies may be tried of which it is a part.
    """

    def __init__(self) -> None:
        self._calls: dict[int, bytes | None] = {}
        """Digests of calls, by the `id()` of the call's object."""

    def of(self, message: Message) -> bytes | None:
        """Return the `reply_meaning` of a message by the assistant."""
        return _meaning(content_of(message), [self._of_call(call) for call in message.get("tool_calls", ())])

    def with_message(self, conversation: bytes, message: Message) -> bytes:
        """Return the digest of a conversation with one more message."""
        meaning = self.of(message) if message["role"] == "assistant" else None
        if meaning is None:
            # Content counts as text, because clients may convert a text to parts, for example to mark it for
            # caching.
            meaning = digest_of(_encoded({**message, "content": content_of(message)}))
        return digest_of(conversation, meaning)

    def _of_call(self, call: Message) -> bytes | None:
        if id(call) not in self._calls:
            function = call["function"]
            self._calls[id(call)] = _call_meaning(ToolCall(function["name"], function["arguments"], call.get("id")))
        return self._calls[id(call)]


def with_merged_replies(conversation: Conversation) -> list[list[Message]]:
    """Divide a conversation into runs of consecutive messages by the assistant, and single other messages."""
    runs: list[list[Message]] = []
    for message in conversation:
        is_reply = message["role"] == "assistant"
        if is_reply and runs and runs[-1][0]["role"] == "assistant":
            runs[-1].append(message)
        else:
            runs.append([message])
    return runs


@dataclass(frozen=True, slots=True)
class Merged:
    """Several messages as one reply that a client may have divided."""

    message: Message
    results: Conversation
    """Results of its calls that were between its parts."""
    n_runs: int


def merged_replies(runs: Sequence[list[Message]], start: int) -> Iterator[Merged]:
    """Yield the replies of which a run of the assistant's messages may be a part, the shortest first.

    Some clients send each of several parallel calls in a separate message, followed by its result.
    """
    parts, results, end = list(runs[start]), Conversation(), start + 1
    for _ in range(MAX_MERGED):
        message = _merged(parts)
        if message is None:
            return
        yield Merged(message, list(results), end - start)
        at = end
        while at < len(runs) and runs[at][0]["role"] == "tool":
            at += 1
        if at == end or at == len(runs) or not message.get("tool_calls"):
            return
        if not all(part.get("tool_calls") and not content_of(part).strip() for part in runs[at]):
            return
        results += [run[0] for run in runs[end:at]]
        parts += runs[at]
        end = at + 1


def _merged(parts: Sequence[Message]) -> Message | None:
    """Merge messages by the assistant; None if more than one has content."""
    if len(parts) == 1:
        return parts[0]
    contents = [content_of(part) for part in parts if content_of(part).strip()]
    if len(contents) > 1:
        return None
    reasoning = [part["reasoning_content"] for part in parts if part.get("reasoning_content")]
    merged: Message = {"role": "assistant", "content": "".join(contents)}
    if reasoning:
        merged["reasoning_content"] = "\n".join(reasoning)
    if calls := [call for part in parts for call in part.get("tool_calls", ())]:
        merged["tool_calls"] = calls
    return merged


def _normal(value: Any) -> Any:
    """Normalise numbers in a JSON value, so that equal ones are encoded alike: 1.0 becomes 1, as in JavaScript."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_EXACT_FLOAT:
        return int(value)
    if isinstance(value, dict):
        return {key: _normal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_normal(item) for item in value]
    return value


def _encoded(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
