"""Names of namespaces. Requests of one namespace share cached prefixes; others never find them.

The namespaces of one API key form a tenant: its KV counts against the key's share of the cache, whatever salts its
requests have.

Other tenants find prefixes of the public namespace, and of no other. Only administrators send requests to it.

KV depends on the LoRA adapters that it was computed with, so requests with adapters have namespaces of their own:
the same name with a key of the adapters at its end. Prompts that have hardly any text before an image, or before
the invocation of an adapter, have a further key there (`cache_ids.py`). The public namespace is no exception.
"""

from __future__ import annotations

import hashlib
import hmac

_RESERVED = "\0"
"""Prefix of salts that clients cannot choose."""
_KEY = _RESERVED + "key "
_PRIVATE = "request "
_SHIFTED = _RESERVED + "shifted"
"""Suffix of private namespaces for KV that was moved to other positions."""
_PLUS = "+"
"""Between what a namespace's name has of the salt and its keys: of adapters, of what begins a prompt, or both."""
PUBLIC_TENANT = "public"
"""Tenant of the public namespace; those of API keys are named by a digest."""
PUBLIC_SALT = _RESERVED + "public"
"""Salt of the requests that compute what all tenants share."""


def client_salt(salt: str) -> str:
    """Return a client's salt, escaped so that it never equals a salt that the server makes."""
    return _RESERVED + salt if salt.startswith(_RESERVED) else salt


def key_secret(api_key: str) -> str:
    """Return the secret from which the salts of an API key are made; it does not disclose the key."""
    key = api_key.encode("utf-8", "surrogateescape")
    return f"{tenant_name(api_key)} {hmac.digest(key, b'llamaslot', 'sha256').hex()}"


def key_salt(secret: str, salt: str) -> str:
    """Return the salt of the requests of an API key, by its `key_secret`, with a salt of their own."""
    tenant, _, key = secret.partition(" ")
    return f"{_KEY}{tenant} {hmac.digest(key.encode(), salt.encode(), 'sha256').hex()}"


def tenant_name(api_key: str) -> str:
    """Return the name of an API key: of its turns as a client, and of its namespaces in `GET /cache`.

    It does not disclose the key.
    """
    key = api_key.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(key, digest_size=6, person=b"llamaslot tenant").hexdigest()


def salt_namespace(salt: str, key: str = "") -> str:
    """Return the namespace of all requests with a salt and a key: `adapters_key`, `CacheIds.key`, or both.

    Its name does not disclose the salt, since names are written to disk.
    """
    suffix = _PLUS + key if key else ""
    if not salt:
        return suffix
    digest = hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    tenant = _tenant_of_salt(salt)
    return (f"{tenant}.{digest}" if tenant else digest) + suffix


def private_namespace(name: str, salt: str = "") -> str:
    """Return the namespace of one request with a salt, or of a group of requests."""
    return f"{_PRIVATE}{_tenant_of_salt(salt)}.{name}"


def shifted_namespace(name: str, salt: str = "") -> str:
    """Return the private namespace of a request once its context was shifted."""
    return private_namespace(name, salt) + _SHIFTED


def is_shifted(namespace: str) -> bool:
    """True for a namespace of KV that is not that of its tokens, because these were moved to other positions."""
    return namespace.endswith(_SHIFTED)


def is_private(namespace: str) -> bool:
    """True for a namespace of one request or group, dropped when that ends."""
    return namespace.startswith(_PRIVATE)


def tenant_of(namespace: str) -> str:
    """Return the tenant of a namespace; empty for one that does not belong to an API key."""
    tenant, dot, _ = namespace.removeprefix(_PRIVATE).partition(".")
    return tenant if dot else ""


def reads_public(namespace: str) -> bool:
    """True if lookups of a namespace continue in the public one: namespaces of API keys, except private ones."""
    return tenant_of(namespace) not in ("", PUBLIC_TENANT) and not is_private(namespace)


def public_of(namespace: str) -> str:
    """Return the public namespace of requests with the same keys."""
    return salt_namespace(PUBLIC_SALT, namespace.partition(_PLUS)[2])


def is_salted(namespace: str) -> bool:
    """True if the requests of a namespace have a salt."""
    return bool(namespace.partition(_PLUS)[0])


def _tenant_of_salt(salt: str) -> str:
    if salt == PUBLIC_SALT:
        return PUBLIC_TENANT
    return salt.removeprefix(_KEY).partition(" ")[0] if salt.startswith(_KEY) else ""


PUBLIC_NAMESPACE = salt_namespace(PUBLIC_SALT)
