"""Content blocks of a message, in the order in which the model wrote what is in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from llamaslot.api.anthropic.reply_bodies import (
    Block,
    BlockEvent,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from llamaslot.formats.calls import Delta, ToolCallDelta, is_object

_NO_ARGUMENTS = msgspec.Raw(b"{}")


class BlockEvents:
    """Turns the parts of a message into events: one block is open at a time.

    With `omit_thinking`, thinking blocks have no text.
    """

    def __init__(self, *, omit_thinking: bool) -> None:
        self._omit_thinking = omit_thinking
        self._index = -1
        self._open: Literal["", "text", "thinking", "tool_use"] = ""

    def add(self, delta: Delta) -> Iterator[BlockEvent]:
        """Yield the events of what was added to the message."""
        for part in delta.parts or (delta,):
            if part.reasoning:
                if self._open != "thinking":
                    yield from self._start(ThinkingBlock(""))
                    self._open = "thinking"
                if not self._omit_thinking:
                    yield ContentBlockDelta(self._index, ThinkingDelta(part.reasoning))
            if part.content:
                if self._open != "text":
                    yield from self._start(TextBlock(""))
                    self._open = "text"
                yield ContentBlockDelta(self._index, TextDelta(part.content))
            for call in part.tool_calls:
                yield from self._add_call(call)

    def close(self) -> Iterator[BlockEvent]:
        """Yield the end of the block that is open."""
        if self._open == "thinking":
            yield ContentBlockDelta(self._index, SignatureDelta())
        if self._open:
            yield ContentBlockStop(self._index)
        self._open = ""

    def _start(self, block: Block) -> Iterator[BlockEvent]:
        yield from self.close()
        self._index += 1
        yield ContentBlockStart(self._index, block)

    def _add_call(self, call: ToolCallDelta) -> Iterator[BlockEvent]:
        if call.name is not None:
            yield from self._start(ToolUseBlock(call.id or "", call.name, _NO_ARGUMENTS))
            self._open = "tool_use"
        if call.arguments:
            yield ContentBlockDelta(self._index, InputJsonDelta(call.arguments))


def blocks_of(events: Iterable[BlockEvent]) -> list[Block]:
    """Return the whole blocks that events add up to.

    A call that is not complete is left out: with empty arguments a client might run it.
    """
    blocks: list[Block] = []
    texts: list[str] = []
    for each in events:
        match each:
            case ContentBlockStart():
                blocks.append(each.content_block)
                texts.clear()
            case ContentBlockDelta(delta=TextDelta(text) | ThinkingDelta(text) | InputJsonDelta(text)):
                texts.append(text)
            case ContentBlockStop():
                if not _complete(blocks[-1], "".join(texts)):
                    blocks.pop()
    return blocks


def _complete(block: Block, text: str) -> bool:
    """Set what a block has; False if it is a call that is not complete."""
    match block:
        case TextBlock():
            block.text = text
        case ThinkingBlock():
            block.thinking = text
        case ToolUseBlock():
            block.input = msgspec.Raw(text.encode())
            return is_object(text)
    return True
