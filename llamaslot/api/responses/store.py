"""Store of earlier responses, in memory, with a limit of their number and one of their bytes.

A response that continues another keeps that one's items, even once the other is deleted or evicted itself. So each
item is stored once for all turns of a conversation, and memory is freed from the last turn to the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from llamaslot.base.callers import OwnerShares
from llamaslot.base.errors import NotFoundError
from llamaslot.base.prompt_jobs import EarlierItems, References


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A response with the items of its turn."""

    namespace: str
    id: str
    body: bytes
    """As it was returned, JSON."""
    input: bytes
    """Its own input items, a JSON list."""
    output: Mapping[str, bytes]
    """Its output items by id, JSON objects."""
    previous: StoredResponse | None = None
    owner: str = ""
    """The `Caller.owner` whose share is charged for it."""
    is_listed: bool = False
    """True if it can be found by its id."""
    n_holders: int = field(default=0)
    """Responses that continue it, and requests that will."""

    @property
    def size(self) -> int:
        """Bytes that are kept of it."""
        return len(self.body) + len(self.input) + sum(map(len, self.output.values()))

    def turns(self) -> Iterator[StoredResponse]:
        """Yield this response and those that it continues, the latest first."""
        turn: StoredResponse | None = self
        while turn is not None:
            yield turn
            turn = turn.previous

    def input_lists(self) -> list[bytes]:
        """Return all items that this response answers, as JSON lists in their order."""
        earlier = self.previous.history() if self.previous is not None else []
        return [*earlier, self.input]

    def history(self) -> list[bytes]:
        """Return the items of the conversation up to this response, as JSON lists in their order."""
        lists = [each for turn in self.turns() for each in (b"[%b]" % b",".join(turn.output.values()), turn.input)]
        return lists[::-1]


class ResponseStore:
    """Responses by namespace and id; of the owner that holds most, the least recently used one is evicted.

    For memory, only responses are evicted that no other and no request continues: the rest would not be freed.
    `clock` gives seconds.
    """

    def __init__(self, *, max_responses: int, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._listed: dict[tuple[str, str], StoredResponse] = {}
        self._shares: OwnerShares[tuple[str, str]] = OwnerShares(clock)

    @property
    def n_bytes(self) -> int:
        """Bytes of all responses that are listed, or continued by others."""
        return self._shares.n_bytes

    def __len__(self) -> int:
        """Return how many responses can be found."""
        return len(self._listed)

    def get(self, namespace: str, response_id: str) -> StoredResponse:
        """Return a response, which becomes the most recently used; raises `NotFoundError`."""
        key = (namespace, response_id)
        if key not in self._listed:
            raise _not_found(f"response '{response_id}'", None)
        self._shares.use(key)
        return self._listed[key]

    def put(self, response: StoredResponse) -> bool:
        """Store a response that is complete, and evict others for it; return False if it does not fit."""
        chain = sum(turn.size for turn in response.turns())
        if not self._max_responses or chain > self._max_bytes:
            return False
        if response.previous is not None:
            self.hold(response.previous)
        while (is_full := len(self) >= self._max_responses) or self.n_bytes + response.size > self._max_bytes:
            evicted = self._shares.evicted_next(
                response.owner,
                response.size,
                by_count=is_full,
                can_evict=lambda key: is_full or not self._listed[key].n_holders,
            )
            if evicted is None:
                # Running requests, or owners within their shares, hold the rest.
                if response.previous is not None:
                    self.release(response.previous)
                return False
            self._unlist(self._listed[evicted])
        response.is_listed = True
        self._listed[response.namespace, response.id] = response
        self._shares.add((response.namespace, response.id), response.owner)
        self._shares.charge(response.owner, response.size)
        return True

    def delete(self, namespace: str, response_id: str) -> None:
        """Delete a response; raises `NotFoundError`."""
        self._unlist(self.get(namespace, response_id))

    def hold(self, response: StoredResponse) -> None:
        """Keep a stored response until `release`, whatever is evicted."""
        response.n_holders += 1

    def release(self, response: StoredResponse) -> None:
        """Undo `hold`."""
        response.n_holders -= 1
        self._free(response)

    def find(self, namespace: str, references: References) -> tuple[EarlierItems, StoredResponse | None]:
        """Return the items that a request refers to, and the response that it continues, which it must `release`.

        Raises `NotFoundError`.
        """
        previous, items = None, {}
        if references.previous:
            try:
                previous = self.get(namespace, references.previous)
            except NotFoundError as error:
                raise NotFoundError(error.message, param="previous_response_id") from None
        for item_id in references.items:
            # The id of an item is made of that of its response (`OutputItems`).
            unique_id = item_id.partition("_")[2].rpartition("_")[0]
            response = self._listed.get((namespace, f"resp_{unique_id}"))
            if response is None or item_id not in response.output:
                raise _not_found(f"item '{item_id}'", "input")
            items[item_id] = response.output[item_id]
        if previous is None:
            return EarlierItems((), items), None
        self.hold(previous)
        return EarlierItems(tuple(previous.history()), items), previous

    def _unlist(self, response: StoredResponse) -> None:
        key = (response.namespace, response.id)
        del self._listed[key]
        self._shares.remove(key)
        response.is_listed = False
        self._free(response)

    def _free(self, response: StoredResponse) -> None:
        """Free a response that nothing holds, and then those that only it has held."""
        each: StoredResponse | None = response
        while each is not None and not (each.is_listed or each.n_holders):
            self._shares.charge(each.owner, -each.size)
            previous, each.previous = each.previous, None
            if previous is not None:
                previous.n_holders -= 1
            each = previous


def _not_found(what: str, param: str | None) -> NotFoundError:
    return NotFoundError(
        f"there is no {what}: it was not stored ('store': false), was deleted, or was evicted "
        "(--max-stored-responses, --max-stored-responses-mb)",
        param=param,
    )
