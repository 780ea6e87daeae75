"""Suspects: requests that may have crashed the engine.

A suspect that comes again runs alone. If the engine crashes then too, the request is refused for ten minutes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

from llamaslot.base.commands import GenerateParams
from llamaslot.base.errors import UnavailableError
from llamaslot.base.tokens import TokenizedPrompt

_REFUSED_S = 600.0
_MAX_SUSPECTS = 1024


def request_digest(params: GenerateParams, prompt: TokenizedPrompt) -> bytes:
    """Return the 16 bytes by which a request is recognized: its namespace and its tokens."""
    digest = hashlib.blake2b(params.cache_salt.encode(errors="surrogatepass"), digest_size=16)
    digest.update(b"\0" + prompt.packed_tokens)
    return digest.digest()


class Suspects:
    """Digests of suspects; `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._suspects: dict[bytes, float] = {}
        """By digest, the time until which it is refused."""

    def __len__(self) -> int:
        """Count the suspects."""
        return len(self._suspects)

    def __contains__(self, digest: bytes) -> bool:
        """True if a request has to run alone."""
        return digest in self._suspects

    def add(self, digest: bytes) -> None:
        """Add a request that ran beside others when the engine crashed."""
        self._suspects.setdefault(digest, 0.0)
        while len(self._suspects) > _MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]

    def refuse(self, digest: bytes) -> None:
        """Refuse a request with which the engine crashed although it ran alone."""
        self._suspects[digest] = self._clock() + _REFUSED_S

    def clear(self, digest: bytes) -> None:
        """Take a request off the list: it ran to its end."""
        self._suspects.pop(digest, None)

    def check(self, digest: bytes) -> None:
        """Raise `UnavailableError` if a request is refused."""
        left = self._suspects.get(digest, 0.0) - self._clock()
        if left > 0:
            minutes = math.ceil(left / 60)
            raise UnavailableError(
                f"the engine crashed twice while it ran this request; it is refused for {minutes} more minutes",
                retry_after=math.ceil(left),
            )
