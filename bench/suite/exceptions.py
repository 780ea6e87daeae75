"""Tests of llama-server's suite that llamaslot need not pass, with the reason."""

from __future__ import annotations

import re

EXCEPTIONS: tuple[tuple[str, str], ...] = (
    ("test_no_ui|test_access_static_assets_without_api_key", "the page at / is another one"),
    (
        "test_cors_proxy_only_forwards|test_mcp_no_proxy|test_mcp_proxy",
        "there is no proxy for MCP servers of the page",
    ),
    ("test_cors_origins_defaults_to_localhost_with_tools_enabled", "there are no built-in tools"),
    ("test_local_media_file", "the server reads no files for clients (--media-path)"),
    (
        "test_anthropic_vision_format_accepted|test_anthropic_tool_result_with_image",
        "without a projector, images are refused with 400 and not with 500, after which clients would try again",
    ),
    (
        r"test_vision_chat_completion(_token_count|\[.*IMG_URL)",
        "images come with the request: a server that fetches URLs lends out its network (SSRF)",
    ),
    ("test_vision_embeddings", "vectors are of texts alone"),
    ("test_mcp_servers.py|test_tools_builtin.py", "tools run in the client, not in the server"),
    ("test_server_sleep_read_only_endpoints", "metrics show that the pool is empty while the model is unloaded"),
    (r"test_invalid_chat_completion_req\[messages7\]", "two replies in a row are rendered as one"),
    (
        r"test_cors_options\[web.mydomain.fr-Access-Control-Allow-Headers-\*\]",
        "browsers do not take * for Authorization, so a preflight names the headers that it asked for",
    ),
    ("test_gcp_predict", "requests in the form of Google's Vertex AI (/predict) are left to a gateway"),
    (
        "test_slot_save_restore$|test_slot_restore_media_file_without_mmproj",
        "a prefix is reused from any slot, so less is left to compute in one",
    ),
    ("test_slot_restore_legacy_token_list|payload_larger_than_context", "files of slots have another format"),
    ("test_clear_and_restore", "it reads llama-server's log"),
    ("test_speculative.py", "there are no draft models: what a request repeats is drafted without one"),
    ("test_stream.py", "a client that was disconnected cannot go on with its stream (/v1/stream)"),
    ("test_router_reload_models", "the list of models is read at the start, and not again (/models?reload=1)"),
    ("test_router_dedup_cache_models", "models in the cache of Hugging Face's hub are not listed"),
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
