"""Memory of replies: each assistant message that was sent, by its meaning, with its exact tokens.

A client sends a tool call back as JSON, and the template renders it in another layout than the model's. Reasoning
does not come back at all. So the prefix match would end inside of the last reply. `protocol/replies/` finds the
messages of a conversation here, and has its prompt continue with their tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import structs

from llamaslot.base.commands import TextPart
from llamaslot.base.events import FinishReason
from llamaslot.base.generation.tools import ParserOptions
from llamaslot.base.namespaces import salt_namespace
from llamaslot.base.text_records import MAX_REPLIES_BYTES, ChatTurn, RememberedReply, ReplyStore, TextRecord
from llamaslot.base.tokens import WIDTH, packed
from llamaslot.formats.format import Format
from llamaslot.formats.parsed_message import ParsedMessage
from llamaslot.prompts.lru_cache import LruCache
from llamaslot.prompts.prompt_context import PromptContext, SentReply
from llamaslot.prompts.sessions import session_digest
from llamaslot.protocol.replies.meaning import digest_of, reasoning_meaning, reply_meaning
from llamaslot.protocol.replies.rendering import Rendering

_MAX_CLOSING = 80
"""Characters kept of the end of a reply's text."""
_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(RememberedReply).decode


class ReplyMemory(ReplyStore):
    """The remembered replies of all namespaces, in which owners have shares.

    Of the owner that holds most, the least recently used are evicted first, and none before those after it.

    Replies are looked up on any thread, and added on one. `clock` is as in `OwnerShares`.
    """

    def __init__(self, max_bytes: int = MAX_REPLIES_BYTES, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._replies: LruCache[RememberedReply] = LruCache(max_bytes, clock)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Count the replies."""
        return len(self._replies)

    @property
    def n_bytes(self) -> int:
        """Bytes in memory, estimated."""
        return self._replies.n_bytes

    def find(self, key: bytes) -> RememberedReply | None:
        """Return a reply; does not count as a use."""
        with self._lock:
            return self._replies.peek(key)

    def use(self, key: bytes) -> None:
        """Make a reply and those before it in its chain the most recently used ones, the first of them last."""
        with self._lock:
            while (reply := self._replies.get(key)) is not None:
                key = reply.parent

    def add(self, reply: RememberedReply) -> None:
        """Remember a reply, in place of an earlier one with its key."""
        with self._lock:
            self._replies.put(reply.key, reply, reply.owner)
        self.use(reply.key)

    def remember(
        self, context: PromptContext, completion_id: str, sent: SentReply, format_: Format
    ) -> TextRecord | None:
        """Remember the reply to a prompt and return its record; None where `remembered_reply` returns nothing."""
        reply = remembered_reply(context, completion_id, sent, format_)
        if reply is None:
            return None
        self.add(reply)
        return TextRecord("reply", reply.key, _encode(reply), reply.session, reply.owner)

    def restore(self, record: TextRecord) -> None:
        """Take over the record of an earlier process; raises `msgspec.MsgspecError`."""
        self.add(_decode(record.content))

    def drop_session(self, session: bytes) -> None:
        """Drop the replies of a session."""
        with self._lock:
            for key in [key for key, reply in self._replies.items() if reply.session == session]:
                self._replies.drop(key)

    def clear(self) -> None:
        """Drop all replies."""
        with self._lock:
            self._replies.clear()


def remembered_reply(
    context: PromptContext, completion_id: str, sent: SentReply, format_: Format
) -> RememberedReply | None:
    """Return the reply to a prompt; None if it has no meaning, or if its client got less than its tokens.

    So is a reply with calls that the model did not end: a part of the last one's markup is missing.
    """
    params, turn = context.request.params, context.request.chat
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
    state, parent = (turn.state, turn.parent) if context.prompt.n_restored else (turn.start, b"")
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
        session=session_digest(salt_namespace(params.cache_salt), params.session_id) if params.session_id else b"",
        owner=params.owner,
    )


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
    n_restored = context.prompt.n_restored
    if continued is not None:
        if not n_restored:
            return None
        return _Before(
            n_restored - len(continued.tokens) // WIDTH,
            continued.n_reply,
            continued.begun,
            continued.n_text,
            continued.text,
            continued.opening,
        )
    parts = context.request.rest if n_restored else context.request.parts
    rendering = Rendering([part for part in parts if isinstance(part, TextPart)])
    n_text = len(rendering.text) - len(turn.begun) - len(turn.opening)
    return _Before(n_restored, 0, turn.begun, n_text, rendering.digest(0, n_text), turn.opening)


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
