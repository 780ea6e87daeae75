"""Entries of the remote store's index, and members of its sorted set of objects."""

from __future__ import annotations

import struct

from llamaslot.backend.remote.sealing import DIGEST_BYTES
from llamaslot.kvcache.tiers.remote_io import RemoteObject

ENTRY = struct.Struct(f"<IIQQ{DIGEST_BYTES}s")
"""Start, end, bytes of KV, bytes of state, digest."""
_MAX_DIGITS = 15
"""Most digits of a size in an entry; longer ones cannot come from a server."""


def packed(each: RemoteObject) -> bytes:
    """Return the index entry of an object."""
    return ENTRY.pack(each.start, each.end, each.n_bytes, each.state_bytes, each.digest)


def unpacked(data: bytes | None) -> RemoteObject | None:
    """Return the object that an index entry names; None for invalid bytes."""
    if data is None or len(data) != ENTRY.size:
        return None
    start, end, n_bytes, state_bytes, digest = ENTRY.unpack(data)
    return RemoteObject(start, end, digest, n_bytes, state_bytes) if start < end else None


def member_of(each: RemoteObject) -> bytes:
    """Return an object's member of the sorted set: its digest and size."""
    return f"{each.digest.hex()}:{each.n_bytes + each.state_bytes}".encode()


def digest_and_size(member: bytes) -> tuple[bytes, int]:
    """Return digest and size in a member of the sorted set; empty and 0 if no server can have written it."""
    digest, _, n_bytes = member.partition(b":")
    if len(digest) != 2 * DIGEST_BYTES or not n_bytes.isdigit() or len(n_bytes) > _MAX_DIGITS:
        return b"", 0
    try:
        return bytes.fromhex(digest.decode("ascii")), int(n_bytes)
    except ValueError:
        return b"", 0
