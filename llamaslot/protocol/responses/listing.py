"""Pages of the items of a stored response, and of the messages of a stored chat."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import msgspec

from llamaslot.base.commands import JsonReply
from llamaslot.base.errors import InvalidRequestError
from llamaslot.base.generation.responses import ListItems


class _Identified(msgspec.Struct):
    """The id of an item. The rest may be large, and is passed on without decoding."""

    id: Any = None


_MAX_PAGE_BYTES = 4 * 2**20
"""Most bytes of a page, unless it has only one item. If it ends early, `has_more` is true."""
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_identified = msgspec.json.Decoder(_Identified).decode


def list_items(job: ListItems) -> JsonReply:
    """Return a page of items; raises `InvalidRequestError` if there is no item `after`."""
    items = [item for each in job.lists for item in _items(each)]
    if job.is_descending:
        items.reverse()
    if job.after:
        place = next((i for i, item in enumerate(items) if _identified(item).id == job.after), None)
        if place is None:
            raise InvalidRequestError(f"'after': there is no item '{job.after}'", param="after")
        items = items[place + 1 :]
    page = items[: job.limit]
    sizes = accumulate(len(bytes(item)) for item in page)
    page = page[: max(1, sum(size <= _MAX_PAGE_BYTES for size in sizes))]
    first, last = (_identified(page[0]).id, _identified(page[-1]).id) if page else (None, None)
    has_more = len(items) > len(page)
    body = {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": has_more}
    return JsonReply(msgspec.json.encode(body))
