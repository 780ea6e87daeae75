"""Pages of lists, by OpenAI's `limit`, `order` and `after`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeVar

import msgspec
from aiohttp import web

from llamaslot.api.bodies import json_reply
from llamaslot.api.context import READINESS
from llamaslot.api.middleware import caller_of, valid_unicode
from llamaslot.base.errors import InvalidRequestError
from llamaslot.base.generation.request_context import ListItems

DEFAULT_LIMIT, MAX_LIMIT = 20, 100
_IS_COUNT = re.compile(r"[0-9]{1,9}").fullmatch

T = TypeVar("T")


class ListReply(msgspec.Struct, Generic[T]):
    """A page of a list."""

    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class Paging:
    """The page that a request asks for; raises `InvalidRequestError`.

    `order` is the default, and `min_limit` the least `limit`.
    """

    def __init__(self, request: web.Request, order: str, min_limit: int) -> None:
        limit = request.query.get("limit", str(DEFAULT_LIMIT))
        if not _IS_COUNT(limit) or not min_limit <= int(limit) <= MAX_LIMIT:
            message = f"'limit' must be an integer from {min_limit} to {MAX_LIMIT}"
            raise InvalidRequestError(message, param="limit")
        order = request.query.get("order", order)
        if order not in ("asc", "desc"):
            raise InvalidRequestError("'order' must be asc or desc", param="order")
        self.limit = int(limit)
        self.is_reversed = order == "desc"
        self.after = request.query.get("after", "")

    def page(self, items: list[T], id_of: Callable[[T], str]) -> ListReply[T]:
        """Return the page of items, which are in ascending order; raises `InvalidRequestError` for `after`."""
        listed = items[::-1] if self.is_reversed else items
        if self.after:
            place = next((i for i, item in enumerate(listed) if id_of(item) == self.after), None)
            if place is None:
                raise InvalidRequestError(f"'after': there is no item '{self.after}'", param="after")
            listed = listed[place + 1 :]
        page = listed[: self.limit]
        first, last = (id_of(page[0]), id_of(page[-1])) if page else (None, None)
        return ListReply(page, first, last, has_more=len(listed) > len(page))


async def page_of_stored(request: web.Request, lists: Sequence[bytes], paging: Paging) -> web.StreamResponse:
    """Return a page of stored items, which are given as JSON lists, the oldest item first.

    The prompt worker decodes them. Here many MiB would hold up the event loop, on another thread too, since
    `msgspec` keeps the GIL.
    """
    caller = caller_of(request)
    job = ListItems(
        tuple(lists),
        paging.limit,
        is_descending=paging.is_reversed,
        after=valid_unicode(paging.after),
        client=caller.client(),
    )
    service = request.app[READINESS].check()
    reply = await service.answer(job)
    with service.reply_budget.held(caller.owner, len(reply.data)):
        return await json_reply(request, [reply.data])
