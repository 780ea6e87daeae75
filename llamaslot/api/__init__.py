"""HTTP: routes, request and reply bodies, server-sent events and errors. The only package that knows HTTP."""

import ssl
import sys

if "aiohttp" not in sys.modules:
    # For its client, which is not used here, it would read the system's certificate authorities twice: 40 ms.
    ssl.SSLContext.set_default_verify_paths = lambda _: None  # type: ignore[method-assign, assignment]
    try:
        import aiohttp  # noqa: F401
    finally:
        # Defined by a base class.
        del ssl.SSLContext.set_default_verify_paths
