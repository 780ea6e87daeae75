"""Token memory: which tokens stood for a text when this server generated or computed it.

Clients send conversations back as text or as messages. Tokenizing them again may give other tokens than those whose
KV is cached, so the prefix match would end there. This memory gives the tokens back, and is asked in three ways:

    text      a prompt begins with exactly the text of an earlier prompt and its reply (`prompts/tokenizer.py`)
    session   a prompt belongs to a named conversation, and is compared with its last text (`cut_points.py`)
    reply     a message has the meaning of one that was sent (`protocol/replies/restoring.py`)

It only gives token ids; whether their KV is cached is for the prefix cache to say.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

from llamaslot.base.callers import OwnerShares
from llamaslot.base.text_records import (
    MAX_BYTES,
    RecordKind,
    RememberedReply,
    ReplyStore,
    Session,
    TextAnchor,
    TextRecord,
)
from llamaslot.base.tokens import WIDTH

_Key: TypeAlias = tuple[RecordKind, bytes]
"""Kind and key: the digests of two kinds are made of different things."""


class TokenMemory(ReplyStore):
    """The records of all namespaces, in which owners have shares.

    Beyond `max_bytes` the least recently used record of the owner that holds most is evicted. A record counts as
    used before those that it continues, so that they go after it. Of two owners the parent may still go first:
    what continues it is not found then.

    May be used on any thread. `clock` is as in `OwnerShares`.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.max_bytes = max_bytes
        self._records: OrderedDict[_Key, TextRecord] = OrderedDict()
        self._shares: OwnerShares[_Key] = OwnerShares(clock)
        self._amounts: dict[RecordKind, tuple[int, int]] = {}
        """Records and bytes of each kind."""
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        """Bytes of all records, estimated."""
        return self._shares.n_bytes

    def amount(self, kind: RecordKind) -> tuple[int, int]:
        """Return how many records of a kind there are, and their bytes."""
        return self._amounts.get(kind, (0, 0))

    def records(self) -> tuple[TextRecord, ...]:
        """Return all records, the least recently used first."""
        with self._lock:
            return tuple(self._records.values())

    def anchored(self, key: bytes) -> bytes | None:
        """Return the packed tokens of a text; None if no anchor for it is known, or not all that it continues."""
        with self._lock:
            return b"".join(each.tokens for each in self._anchors(key)) or None

    def session(self, key: bytes) -> Session | None:
        """Return a session."""
        with self._lock:
            session = self._get(Session, key)
            assert session is None or isinstance(session, Session)
            return session

    def find(self, key: bytes) -> RememberedReply | None:
        """Return a reply; does not count as a use."""
        with self._lock:
            reply = self._records.get((RememberedReply, key))
            assert reply is None or isinstance(reply, RememberedReply)
            return reply

    def use(self, key: bytes) -> None:
        """Make a reply and those before it in its chain the most recently used ones, the first of them last."""
        with self._lock:
            self._chain(RememberedReply, key)

    def add(self, record: TextRecord) -> None:
        """Remember a record, in place of an earlier one of its kind and key.

        It is not kept if it is larger than `max_bytes`, or if its owner would hold most and has no other to evict.
        """
        with self._lock:
            self._put(record)

    def add_anchor(
        self, key: bytes, tokens: bytes, parent: bytes, *, session: bytes = b"", owner: str = ""
    ) -> TextAnchor | None:
        """Remember the packed tokens of a text, without those of `parent` if they begin with them.

        None if the text has tokens already, which other anchors may continue, or if all of them are too large.
        """
        with self._lock:
            if self._anchors(key):
                return None
            before = self._anchors(parent)
            shared = b"".join(each.tokens for each in before)
            # The parent may have been dropped since the prompt was tokenized, and added again with other tokens.
            if not shared or not tokens.startswith(shared):
                parent, before, shared = b"", [], b""
            start = len(shared) // WIDTH
            own = tokens[len(shared) :]
            anchor = TextAnchor(key=key, parent=parent, start=start, tokens=own, session=session, owner=owner)
            is_small = anchor.n_bytes + sum(each.n_bytes for each in before) <= self.max_bytes
            return anchor if is_small and self._put(anchor) else None

    def drop_session(self, digest: bytes) -> list[Session]:
        """Drop a session with its branches, replies and text anchors; returns it and the branches."""
        with self._lock:
            dropped = [record for record in self._records.values() if record.session == digest]
            for each in dropped:
                self._drop((type(each), each.key))
        return [each for each in dropped if isinstance(each, Session)]

    def clear(self) -> None:
        """Drop all records."""
        with self._lock:
            self._records.clear()
            self._shares.clear()
            self._amounts.clear()

    # With the lock:

    def _get(self, kind: RecordKind, key: bytes) -> TextRecord | None:
        """Return a record and make it the most recently used one."""
        record = self._records.get((kind, key))
        if record is not None:
            self._records.move_to_end((kind, key))
            self._shares.use((kind, key))
        return record

    def _chain(self, kind: RecordKind, key: bytes) -> list[TextRecord]:
        """Use a record and those that it continues, in this order."""
        chain: list[TextRecord] = []
        # Parents that form a circle, as in a damaged file, must not be followed for ever.
        while len(chain) < len(self._records) and (record := self._get(kind, key)) is not None:
            chain.append(record)
            key = record.parent
        return chain

    def _anchors(self, key: bytes) -> list[TextAnchor]:
        """Use and return the anchors that together have the tokens of a text; none if one of them is missing."""
        found: list[TextAnchor] = []
        n_tokens = 0
        for each in reversed(self._chain(TextAnchor, key)):
            assert isinstance(each, TextAnchor)
            # What it continues was evicted, or replaced by another number of tokens for the same text.
            if each.start != n_tokens:
                return []
            found.append(each)
            n_tokens += len(each.tokens) // WIDTH
        return found

    def _put(self, record: TextRecord) -> bool:
        key = (type(record), record.key)
        earlier = self._records.get(key)
        self._drop(key)
        # Chosen first, so that nothing is evicted for a record that does not fit after all.
        evicted: list[_Key] = []
        excess = self.n_bytes + record.n_bytes - self.max_bytes
        if excess > 0:
            for each in self._shares.evictions(record.owner, record.n_bytes, size_of=self._size_of):
                evicted.append(each)
                excess -= self._size_of(each)
                if excess <= 0:
                    break
        if excess > 0:
            if earlier is not None:
                self._insert(earlier)
            return False
        for each in evicted:
            self._drop(each)
        self._insert(record)
        self._chain(*key)
        return True

    def _size_of(self, key: _Key) -> int:
        return self._records[key].n_bytes

    def _insert(self, record: TextRecord) -> None:
        key = (type(record), record.key)
        self._records[key] = record
        self._shares.add(key, record.owner)
        self._count(record, 1)

    def _drop(self, key: _Key) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self._shares.remove(key)
            self._count(record, -1)

    def _count(self, record: TextRecord, n: int) -> None:
        self._shares.charge(record.owner, n * record.n_bytes)
        n_records, n_bytes = self.amount(type(record))
        self._amounts[type(record)] = n_records + n, n_bytes + n * record.n_bytes
