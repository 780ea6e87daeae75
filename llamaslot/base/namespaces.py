"""The names of namespaces: what is computed in one is never found in another."""

from __future__ import annotations

import hashlib

_PRIVATE = "request "


def salted(salt: str) -> str:
    """The namespace of all requests with a salt, which cannot be read off its name: names go to disk."""
    return hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=16).hexdigest() if salt else ""


def private(name: str) -> str:
    """The namespace of one request, or of a group of them, that nobody else shares."""
    return _PRIVATE + name


def is_private(space: str) -> bool:
    """Whether it ends with the requests in it."""
    return space.startswith(_PRIVATE)
