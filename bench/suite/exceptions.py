"""Tests of llama-server's suite that llamaslot need not pass, with the reason."""

from __future__ import annotations

import re

EXCEPTIONS: tuple[tuple[str, str], ...] = (
    ("test_no_ui|test_access_static_assets_without_api_key", "the page at / is another one"),
    ("test_cors_proxy_only_forwards_explicit_proxy_headers", "there is no proxy for MCP servers of the page"),
    ("test_cors_origins_defaults_to_localhost_with_tools_enabled", "there are no built-in tools"),
    ("test_local_media_file|_vision_|_with_image", "there is no vision"),
    ("test_server_sleep_read_only_endpoints", "metrics show that the pool is empty while the model is unloaded"),
    (r"test_invalid_chat_completion_req\[messages7\]", "two replies in a row are rendered as one"),
    (
        r"test_cors_options\[web.mydomain.fr-Access-Control-Allow-Headers-\*\]",
        "browsers do not take * for Authorization, so a preflight names the headers that it asked for",
    ),
)
"""Regular expressions for the ids of tests, each with the reason why llamaslot fails them."""


def reason(test: str) -> str | None:
    """Return the reason why llamaslot need not pass a test; None if it must."""
    return next((why for pattern, why in EXCEPTIONS if re.search(pattern, test)), None)
