"""Callers: who sent a request, whose turn it is, and whose share of memory is charged.

    owner       pays for memory (replies, stored chats, bodies): its API key, else its address
    client      takes turns, and has a limit of requests: its API key, else its session, else its address
    namespace   shares KV (`base/namespaces.py`): its salt and, with --cache-salt-from-api-key, its API key

All namespaces of one API key are a tenant in `GET /cache`. An owner is never a session, since a client may open any
number of sessions.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import msgspec

from llamaslot.base.namespaces import tenant_name

MAX_CLIENTS = 1024
"""Clients whose last turn is remembered: those that had one most recently."""
MAX_ROUND_TURNS = 64
"""After this many turns of others a client ranks as new, so that a stream of new clients cannot starve it."""
INACTIVE_S = 3600.0
"""Idle time after which an owner has no share."""
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Caller(msgspec.Struct, frozen=True):
    """The sender of a request, by digests that do not disclose its key and address."""

    key: str = ""
    """The key's `tenant_name`; empty if the server has no API keys, since clients may then send any key."""
    address: str = ""
    session_id: str = ""
    """The session that the headers name; empty without one."""
    client_request_id: str = ""
    """The client's `X-Request-Id`; empty without a valid one."""

    @classmethod
    def of(cls, api_key: str | None, address: str) -> Caller:
        """Return the caller with this key (None for a server without keys) and address."""
        return cls("" if api_key is None else tenant_name(api_key), _digest("address", address))

    @property
    def owner(self) -> str:
        """The id of the owner."""
        return self.key or self.address

    @property
    def known_client(self) -> str:
        """The id of the client if it is known before the body is read; else empty: the body may name a session."""
        return self.client() if self.key or self.session_id else ""

    def client(self, session_id: str = "") -> str:
        """Return the id of the client; `session_id` is the session that the body names, if any."""
        if self.key:
            return self.key
        session_id = session_id or self.session_id
        return _digest("session", session_id) if session_id else self.address


class Amounts:
    """Amounts of a limited resource that owners or clients hold."""

    def __init__(self) -> None:
        self.total = 0
        self.each: dict[str, int] = {}
        """By owner or client; without those that hold nothing."""

    def __getitem__(self, holder: str) -> int:
        """Return the amount of one holder."""
        return self.each.get(holder, 0)

    def may_add(self, holder: str, n: int, limit: int, times: int = 1) -> bool:
        """True if a holder that adds `n` then has at most `times` as much as all holders leave free of `limit`.

        With `times` 1 a single holder gets half, and there is always room for the next one.
        """
        return self[holder] + n <= times * (limit - self.total - n)

    def add(self, holder: str, n: int) -> None:
        """Add `n`, which may be negative."""
        self.total += n
        amount = self.each.pop(holder, 0) + n
        if amount:
            self.each[holder] = amount


class Turns:
    """Numbers the turns that clients take; the next one to be served is the one whose last turn is oldest."""

    def __init__(self) -> None:
        self.n_taken = 0
        self._last: dict[str, int] = {}

    def last(self, client: str) -> int:
        """Return the number of a client's last turn; 0 if it had none, or so long ago that it is forgotten."""
        return self._last.get(client, 0)

    def next(self, waiting: Iterable[T], client_of: Callable[[T], str | None]) -> T:
        """Return the first item of the client whose turn it is; items of no client come before all others."""

        def place(item: T) -> int:
            client = client_of(item)
            if client is None:
                return -1
            last = self.last(client)
            return last if last > self.n_taken - MAX_ROUND_TURNS else 0

        return min(waiting, key=place)

    def take(self, client: str) -> None:
        """Count a turn of a client."""
        self.n_taken += 1
        self._last.pop(client, None)
        self._last[client] = self.n_taken
        if len(self._last) > MAX_CLIENTS:
            del self._last[next(iter(self._last))]


@dataclass(slots=True)
class _Share(Generic[K]):
    """Entries and bytes of one owner."""

    keys: OrderedDict[K, None] = field(default_factory=OrderedDict)
    """Its entries, the least recently used first."""
    n_bytes: int = 0
    last_used: float = 0.0


class OwnerShares(Generic[K]):
    """Bounded memory of replies, by owner: keys in the order of their last use, and the bytes of each owner.

    The least recently used entry of the owner that holds most is evicted first. That owner has at least its equal
    share, so one that sends much never evicts an entry of an owner that is below its share. Owners may use what
    others leave, as with the KV of tenants (`kvcache/tiers/budget.py`). One that has added and used nothing
    for an hour has no share: its entries are evicted first.

        capacity   |-- owner 1 ---|---------- owner 2 -----------|-- owner 3 ---|
                                     evicted first

    `clock` gives seconds; without one no owner is ever inactive.
    """

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._clock = clock
        self.n_bytes = 0
        """Bytes of all owners."""
        self._owner_of: dict[K, str] = {}
        self._owners: OrderedDict[str, _Share[K]] = OrderedDict()
        """Those that have entries or bytes, the one that used an entry least recently first."""

    def __len__(self) -> int:
        """Count the entries."""
        return len(self._owner_of)

    def __contains__(self, key: object) -> bool:
        """True if there is an entry."""
        return key in self._owner_of

    def __iter__(self) -> Iterator[K]:
        """Iterate over the keys of all entries."""
        return iter(self._owner_of)

    def add(self, key: K, owner: str) -> None:
        """Add an entry that is not here, as the most recently used one; `charge` adds its bytes."""
        self._owner_of[key] = owner
        self._active(owner).keys[key] = None

    def use(self, key: K) -> None:
        """Make an entry the most recently used one of its owner."""
        self._active(self._owner_of[key]).keys.move_to_end(key)

    def remove(self, key: K) -> str:
        """Remove an entry and return its owner, which keeps its bytes until they are charged back."""
        owner = self._owner_of.pop(key)
        del self._owners[owner].keys[key]
        self.charge(owner, 0)
        return owner

    def charge(self, owner: str, n_bytes: int) -> None:
        """Add to the bytes that an owner holds; a negative number subtracts."""
        share = self._owners.setdefault(owner, _Share())
        share.n_bytes += n_bytes
        self.n_bytes += n_bytes
        if not share.keys and not share.n_bytes:
            del self._owners[owner]

    def clear(self) -> None:
        """Remove all entries and bytes."""
        self._owner_of.clear()
        self._owners.clear()
        self.n_bytes = 0

    def evicted_next(
        self,
        owner: str,
        n_bytes: int,
        *,
        by_count: bool = False,
        can_evict: Callable[[K], bool] = lambda key: True,
    ) -> K | None:
        """Return the first of `evictions`."""
        return next(self.evictions(owner, n_bytes, by_count=by_count, can_evict=can_evict), None)

    def evictions(
        self,
        owner: str,
        n_bytes: int,
        *,
        size_of: Callable[[K], int] = lambda key: 0,
        by_count: bool = False,
        can_evict: Callable[[K], bool] = lambda key: True,
    ) -> Iterator[K]:
        """Yield the keys to evict, in this order, before an owner adds an entry of `n_bytes`; nothing is changed.

        Each belongs to an inactive owner, else to the one that would hold the most bytes, or with `by_count` the
        most entries, among those with an entry that `can_evict`. They end where the owner would itself hold most
        and has no such entry: then it can add nothing more.
        """
        shares = {each: share for each, share in self._owners.items() if share.keys}
        held = {each: len(share.keys) if by_count else share.n_bytes for each, share in shares.items()}
        # Entries that running requests use cannot be evicted; that must not block other owners.
        left = {each: filter(can_evict, share.keys) for each, share in shares.items()}
        first = {each: next(keys, None) for each, keys in left.items()}
        inactive_since = self._clock() - INACTIVE_S
        # In the order of their last use.
        inactive = [each for each in shares if shares[each].last_used <= inactive_since and each != owner]

        def amount(each: str) -> tuple[int, bool, str]:
            added = (1 if by_count else n_bytes) if each == owner else 0
            # On a tie, the owner that wants more gives way.
            return held.get(each, 0) + added, each == owner, each

        while True:
            chosen = next((each for each in inactive if first[each] is not None), None)
            if chosen is None:
                chosen = max({owner, *(each for each, key in first.items() if key is not None)}, key=amount)
            key = first.get(chosen)
            if key is None:
                return
            yield key
            held[chosen] -= 1 if by_count else size_of(key)
            first[chosen] = next(left[chosen], None)

    def _active(self, owner: str) -> _Share[K]:
        """Return the share of an owner that adds or uses an entry now."""
        share = self._owners.setdefault(owner, _Share())
        share.last_used = self._clock()
        self._owners.move_to_end(owner)
        return share


def _digest(kind: Literal["session", "address"], name: str) -> str:
    return hashlib.blake2b(f"{kind} {name}".encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
