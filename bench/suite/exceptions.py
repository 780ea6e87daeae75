"""Tests of llama-server's suite that llamaslot need not pass, with the reason."""

from __future__ import annotations

import re

_NO_PRESETS = "tables in the file of --config describe several models, not --models-preset"

EXCEPTIONS: tuple[tuple[str, str], ...] = (
    ("test_no_ui|test_access_static_assets_without_api_key", "the page at / is another one"),
    (
        "test_cors_proxy_only_forwards|test_mcp_no_proxy|test_mcp_proxy",
        "there is no proxy for MCP servers of the page",
    ),
    ("test_cors_origins_defaults_to_localhost_with_tools_enabled", "there are no built-in tools"),
    ("test_local_media_file", "the server reads no files for clients (--media-path)"),
    ("_vision_|_with_image", "without a projector, images are refused with 400 and not with 500"),
    ("test_server_sleep_read_only_endpoints", "metrics show that the pool is empty while the model is unloaded"),
    (r"test_invalid_chat_completion_req\[messages7\]", "two replies in a row are rendered as one"),
    (
        r"test_cors_options\[web.mydomain.fr-Access-Control-Allow-Headers-\*\]",
        "browsers do not take * for Authorization, so a preflight names the headers that it asked for",
    ),
    ("test_gcp_predict", "requests in the form of Google's Vertex AI (/predict) are left to a gateway"),
    ("test_slot_save_restore$", "a prefix is reused from any slot, so restoring one leaves less to compute"),
    ("test_slot_restore_legacy_token_list", "files of slots have another format"),
    ("test_clear_and_restore", "it reads llama-server's log"),
    ("test_speculative.py", "there are no draft models: what a request repeats is drafted without one"),
    ("test_stream.py", "a client that was disconnected cannot go on with its stream (/v1/stream)"),
    ("test_router_reload_models|test_router_dedup_cache_models", _NO_PRESETS),
    ("test_router_download_model|test_router_delete_model", "clients cannot download and delete models"),
    (
        "test_router_queue_client_disconnect_keeps_model",
        "it presumes that a request takes seconds, as LLAMA_SERVER_DEBUG_FAKE_TIMING makes those of llama-server",
    ),
)
"""Regular expressions for the ids of tests, each with the reason why llamaslot fails them."""


def reason(test: str) -> str | None:
    """Return the reason why llamaslot need not pass a test; None if it must."""
    return next((why for pattern, why in EXCEPTIONS if re.search(pattern, test)), None)
