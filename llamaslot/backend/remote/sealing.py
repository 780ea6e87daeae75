"""Keyed digests of the remote tier: names of objects, and authentication codes of their fields.

Both are BLAKE2b, keyed with a secret that all servers of the fleet share. Without the secret nobody can tell to
which prompt an object belongs, or write an object that a server accepts.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from llamaslot.base.kv_ops import Kv
from llamaslot.base.tokens import WIDTH

DIGEST_BYTES = 16


class Sealer:
    """Digests for one fleet and one model. `model_key` is a digest of everything that KV depends on."""

    def __init__(self, secret: bytes, model_key: bytes) -> None:
        self._key = hashlib.blake2b(secret, digest_size=32, person=b"llamaslot fleet").digest()
        self.scope = self._digest(b"scope", model_key).hex()
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

    def _digest(self, field: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(field + b"\0" + data, key=self._key, digest_size=DIGEST_BYTES).digest()
