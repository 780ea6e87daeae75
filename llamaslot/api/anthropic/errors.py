"""Errors in Anthropic's form, for all paths of its API; their status is that of `http_errors`."""

from __future__ import annotations

from typing import Literal

import msgspec

from llamaslot.base.errors import ContextSizeError, LlamaslotError

PATH = "/v1/messages"

AnthropicErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "api_error",
    "overloaded_error",
]
THREAD = "thread"
"""The field that asks the server to keep a conversation."""
_TYPES: dict[str, AnthropicErrorType] = {
    "authentication_error": "authentication_error",
    "permission_error": "permission_error",
    "not_found_error": "not_found_error",
    "request_too_large_error": "request_too_large",
    "rate_limit_error": "rate_limit_error",
    "timeout_error": "timeout_error",
    "server_error": "api_error",
    "unavailable_error": "overloaded_error",
}
"""By our own types; all others are `invalid_request_error`."""


class AnthropicErrorCode(msgspec.Struct):
    """A code by which clients recognise an error that they can avoid."""

    error_code: str


class AnthropicErrorDetail(msgspec.Struct):
    """Type and message of an error."""

    type: AnthropicErrorType
    message: str
    details: AnthropicErrorCode | msgspec.UnsetType = msgspec.UNSET


class AnthropicError(msgspec.Struct, tag_field="type", tag="error"):
    """An error, as a reply or as the last event of a stream."""

    error: AnthropicErrorDetail
    request_id: str


def is_anthropic(path: str) -> bool:
    """Return True if errors at a path have Anthropic's form."""
    return path == PATH or path.startswith(f"{PATH}/")


def anthropic_error(error: LlamaslotError, request_id: str) -> AnthropicError:
    """Return an error in Anthropic's form."""
    message = error.message
    if isinstance(error, ContextSizeError):
        # Anthropic's words: Claude Code compacts the conversation when it reads them.
        least = "at least " if error.at_least else ""
        message = f"prompt is too long: {least}{error.n_prompt_tokens} tokens > {error.n_ctx} maximum"
    detail = AnthropicErrorDetail(_TYPES.get(error.type, "invalid_request_error"), message)
    if error.param == THREAD:
        # Anthropic's client then sends the whole conversation, without the field.
        detail.details = AnthropicErrorCode("thread_unsupported_request")
    return AnthropicError(detail, request_id)
