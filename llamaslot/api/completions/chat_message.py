"""The message of a chat reply, parsed from the text of its completion."""

from __future__ import annotations

from llamaslot.base.events import Finished, Output
from llamaslot.formats.calls import Delta
from llamaslot.formats.parsed_message import ParsedMessage


class ChatMessage(ParsedMessage):
    """Content, reasoning and tool calls of one completion, added event by event."""

    def add(self, event: Output | Finished) -> Delta:
        """Add the text of an event; return what it adds to the message, in which each call has an id."""
        return self.push(event.content, is_last=isinstance(event, Finished))
