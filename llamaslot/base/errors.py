"""Every error that a user can meet, as one small tree with a stable `type` each.

The types are llama-server's. This room knows no HTTP: `llamaslot.api.errors` maps each type to a status.
"""

from __future__ import annotations

from typing import ClassVar


class LlamaslotError(Exception):
    """An error with a message for the user; `param` names the field or the flag at fault, if one is."""

    type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(LlamaslotError):
    """The request cannot be carried out as it stands."""

    type = "invalid_request_error"


class ContextSizeError(LlamaslotError):
    """The prompt does not fit into a slot's context."""

    type = "exceed_context_size_error"

    def __init__(self, message: str, *, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(message)
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx

    @classmethod
    def of(cls, n_prompt_tokens: int, n_ctx: int, *, at_least: bool = False) -> ContextSizeError:
        """The error for a prompt of that many tokens, or of at least that many."""
        count = f"{'at least ' if at_least else ''}{n_prompt_tokens} tokens"
        message = (
            f"the request ({count}) exceeds the available context size of a slot ({n_ctx} tokens); "
            "shorten the prompt or raise --ctx-size"
        )
        return cls(message, n_prompt_tokens=n_prompt_tokens, n_ctx=n_ctx)


class TooLargeError(LlamaslotError):
    """The request's body is over the limit."""

    type = "request_too_large_error"


class AuthenticationError(LlamaslotError):
    """No API key, or a wrong one."""

    type = "authentication_error"


class NotFoundError(LlamaslotError):
    """There is nothing at this address."""

    type = "not_found_error"


class NotSupportedError(LlamaslotError):
    """The server was told not to offer this, or cannot."""

    type = "not_supported_error"


class QueueFullError(LlamaslotError):
    """Too many requests wait already; `retry_after` is in seconds."""

    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnavailableError(LlamaslotError):
    """The model is still loading, or the server is shutting down."""

    type = "unavailable_error"


class ServerError(LlamaslotError):
    """The fault is the server's."""


class ConfigError(LlamaslotError):
    """The server cannot start as configured: one line for the terminal, exit status 2."""

    type = "config_error"


def from_failure(
    error_type: str, message: str, param: str | None, *, n_prompt_tokens: int = 0, n_ctx: int = 0
) -> LlamaslotError:
    """The error that a `Failed` message describes."""
    if error_type == ContextSizeError.type:
        return ContextSizeError(message, n_prompt_tokens=n_prompt_tokens, n_ctx=n_ctx)
    for kind in (InvalidRequestError, UnavailableError, NotSupportedError):
        if kind.type == error_type:
            return kind(message, param=param)
    return ServerError(message, param=param)
