"""Names of namespaces. Requests of one namespace share cached prefixes; others never find them."""

from __future__ import annotations

import hashlib

_PRIVATE = "request "


def salt_namespace(salt: str) -> str:
    """Return the namespace of all requests with a salt.

    Its name does not disclose the salt, since names are written to disk.
    """
    return hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=16).hexdigest() if salt else ""


def private_namespace(name: str) -> str:
    """Return the namespace of one request, or of a group of requests."""
    return _PRIVATE + name


def is_private(namespace: str) -> bool:
    """True for a namespace of one request or group, dropped when that ends."""
    return namespace.startswith(_PRIVATE)
