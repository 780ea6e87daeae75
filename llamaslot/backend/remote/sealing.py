"""Keyed digests, index entries and members of the sorted set: the contents of the remote store beside the KV.

Digests are names of objects and authentication codes of their fields: BLAKE2b, keyed with a secret that all servers
of the fleet share. Without the secret nobody can tell to which prompt an object belongs, or write an object that a
server accepts.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable

from llamaslot.base.kv_ops import Kv
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.tiers.remote_tier import RemoteObject

DIGEST_BYTES = 16
ENTRY = struct.Struct(f"<IIQQ{DIGEST_BYTES}s")
"""Start, end, bytes of KV, bytes of state, digest."""
_MAX_DIGITS = 15
"""Most digits of a size in an entry; longer ones cannot come from a server."""


class Sealer:
    """Digests for one fleet and one model. `model_key` is a digest of everything that KV depends on."""

    def __init__(self, secret: bytes, model_key: bytes) -> None:
        self._key = hashlib.blake2b(secret, digest_size=32, person=b"llamaslot fleet").digest()
        self.scope = hashlib.blake2b(b"scope\0" + model_key, key=self._key, digest_size=DIGEST_BYTES).hexdigest()
        """Prefix of all keys in the store; different for each secret and model."""

    def path_digests(self, namespace: str, tokens: bytes, ends: Iterable[int]) -> dict[int, bytes]:
        """Return digests of a prompt's tokens up to each of `ends`."""
        state = hashlib.blake2b(key=self._key, digest_size=DIGEST_BYTES, person=b"path")
        state.update(self.scope.encode() + b"\0" + namespace.encode() + b"\0")
        digests: dict[int, bytes] = {}
        at = 0
        for end in sorted(ends):
            state.update(tokens[at * WIDTH : end * WIDTH])
            digests[end] = state.copy().digest()
            at = end
        return digests

    def code(self, digest: bytes, field: bytes, data: Kv | bytes) -> bytes:
        """Return the authentication code of a field of an object."""
        state = hashlib.blake2b(key=self._key, digest_size=DIGEST_BYTES, person=b"object")
        state.update(self.scope.encode() + digest + field)
        state.update(data if isinstance(data, bytes) else data.data)
        return state.digest()

    def is_genuine(self, digest: bytes, field: bytes, data: Kv | bytes, code: bytes) -> bool:
        """True if a server of the fleet uploaded exactly this field."""
        return hmac.compare_digest(self.code(digest, field, data), code)


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
