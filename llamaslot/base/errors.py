"""The errors that users can meet, each with a stable `type`, which is llama-server's.

`llamaslot.api.http_errors` maps each type to an HTTP status.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error as a plain value that can cross a process boundary."""

    type: str
    message: str
    param: str | None = None
    n_prompt_tokens: int = 0
    n_ctx: int = 0
    retry_after: int = 0

    def exception(self) -> LlamaslotError:
        """Return the exception that this describes."""
        if self.type == ContextSizeError.type:
            return ContextSizeError(self.message, n_prompt_tokens=self.n_prompt_tokens, n_ctx=self.n_ctx)
        if self.type == QueueFullError.type:
            return QueueFullError(self.message, retry_after=self.retry_after)
        for kind in (InvalidRequestError, UnavailableError, NotSupportedError):
            if kind.type == self.type:
                return kind(self.message, param=self.param)
        return ServerError(self.message, param=self.param)


class LlamaslotError(Exception):
    """An error with a message for the user; `param` names the request field or the flag that caused it."""

    type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def info(self) -> ErrorInfo:
        """Return the error as a plain value."""
        return ErrorInfo(self.type, self.message, self.param)


class InvalidRequestError(LlamaslotError):
    """The request is malformed or cannot be carried out."""

    type = "invalid_request_error"


class ContextSizeError(LlamaslotError):
    """The prompt does not fit into a slot's context."""

    type = "exceed_context_size_error"

    def __init__(self, message: str, *, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(message)
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx

    def info(self) -> ErrorInfo:
        """Return the error as a plain value."""
        return ErrorInfo(self.type, self.message, n_prompt_tokens=self.n_prompt_tokens, n_ctx=self.n_ctx)

    @classmethod
    def of(cls, n_prompt_tokens: int, n_ctx: int, *, at_least: bool = False) -> ContextSizeError:
        """Return the error for a prompt of that many tokens."""
        count = f"{'at least ' if at_least else ''}{n_prompt_tokens} tokens"
        message = (
            f"the request ({count}) exceeds the available context size of a slot ({n_ctx} tokens); "
            "shorten the prompt or raise --ctx-size"
        )
        return cls(message, n_prompt_tokens=n_prompt_tokens, n_ctx=n_ctx)


class TooLargeError(LlamaslotError):
    """The request body exceeds the limit."""

    type = "request_too_large_error"


class AuthenticationError(LlamaslotError):
    """The API key is missing or wrong."""

    type = "authentication_error"


class NotFoundError(LlamaslotError):
    """The address or the named resource does not exist."""

    type = "not_found_error"


class NotSupportedError(LlamaslotError):
    """The feature is turned off or not available."""

    type = "not_supported_error"


class QueueFullError(LlamaslotError):
    """Too many requests are in flight; `retry_after` is in seconds."""

    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def info(self) -> ErrorInfo:
        """Return the error as a plain value."""
        return ErrorInfo(self.type, self.message, retry_after=self.retry_after)


class UnavailableError(LlamaslotError):
    """The model is still loading, or the server is shutting down."""

    type = "unavailable_error"


class ServerError(LlamaslotError):
    """An internal error."""


class ConfigError(LlamaslotError):
    """A command cannot run as configured: printed as one line, exit status 2."""

    type = "config_error"
