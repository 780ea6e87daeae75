"""Tests of the SDKs that llamaslot need not pass, with the reason."""

from __future__ import annotations

import re

EXCEPTIONS: tuple[tuple[str, str], ...] = (
    ("test_models.py.*delete", "the model of a server cannot be deleted"),
    (
        "api_resources/test_completions.py.*create_with_all_params",
        "'suffix' and 'echo' in one request exclude each other",
    ),
    (
        "test_responses.py.*create_with_all_params",
        "'background', 'conversation' and 'prompt' ask for stored things",
    ),
    ("test_input_tokens.py.*with_all_params", "'conversation' asks for a stored one"),
    ("test_input_items.py.*with_all_params", "'limit' is 0, OpenAI's own range begins at 1"),
)
"""Regular expressions for a test's id, and why llamaslot fails what they match."""


def reason(test: str) -> str | None:
    """Why llamaslot need not pass this test; None if it must. Those of empty path parameters ask no server."""
    if "_path_params_" in test:
        return None
    return next((why for pattern, why in EXCEPTIONS if re.search(pattern, test)), None)
