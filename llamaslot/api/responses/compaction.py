"""`POST /v1/responses/compact`: an item that stands for a conversation, with a summary by the model.

The summary is asked for after the conversation, whose prefix is in the cache already.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from llamaslot.api.generation.reply_stats import CacheUse, Timings, stats_of
from llamaslot.api.json_bodies import encode
from llamaslot.api.responses.reply_bodies import CompactionItem, ResponseUsage
from llamaslot.api.responses.responses import ResponsesReplyWriter
from llamaslot.base.errors import ServerError
from llamaslot.base.events import Finished, Output
from llamaslot.protocol.response_items import encoded_compaction
from llamaslot.service.live_request import Completion


class Compaction(msgspec.Struct, kw_only=True):
    """A conversation that was made short."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[CompactionItem]
    usage: ResponseUsage
    timings: Timings
    cache: CacheUse


class CompactionWriter(ResponsesReplyWriter):
    """One item: what the user wrote, word for word, and a summary of the rest."""

    is_cancellable = False

    def chunks(self, completion: Completion, output: Output | Finished) -> Iterator[bytes]:
        """Raise an error: a request for a stream was refused."""
        raise ServerError("a compaction is not streamed")

    def whole(self) -> Iterator[bytes]:
        """Yield the compaction."""
        end = self._completion.end
        self._message.push(self._completion.text, end.reason)
        content = encoded_compaction(self._fields.user_texts, self._message.content.strip())
        item_id = self._reply.id.replace(self.id_prefix, "cmp_", 1)
        compaction = Compaction(
            id=self._reply.id,
            created_at=self._reply.created,
            output=[CompactionItem(id=item_id, encrypted_content=content)],
            usage=self._usage(),
            **stats_of([end.progress]),
        )
        yield encode(compaction)
