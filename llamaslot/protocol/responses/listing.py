"""Pages of the items of a stored response."""

from __future__ import annotations

from typing import Any

import msgspec

from llamaslot.base.commands import JsonReply
from llamaslot.base.errors import InvalidRequestError
from llamaslot.base.generation.responses import ListItems


def list_items(job: ListItems) -> JsonReply:
    """Return a page of items; raises `InvalidRequestError` if there is no item `after` which they come."""
    items = [item for each in job.lists for item in msgspec.json.decode(each, type=list[dict[str, Any]])]
    if job.is_descending:
        items.reverse()
    if job.after:
        place = next((i for i, item in enumerate(items) if item.get("id") == job.after), None)
        if place is None:
            raise InvalidRequestError(f"'after': there is no item '{job.after}'", param="after")
        items = items[place + 1 :]
    page = items[: job.limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    has_more = len(items) > len(page)
    body = {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": has_more}
    return JsonReply(msgspec.json.encode(body))
