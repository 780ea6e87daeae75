"""Errors that users can meet, each with a stable `type`, which is llama-server's; the error of the state machines.

`llamaslot.api.http_errors` maps each type to an HTTP status.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import ClassVar, TypeVar

import msgspec

_S = TypeVar("_S", bound=Enum)
_E = TypeVar("_E", bound=Enum)

MAX_MESSAGE_CHARS = 4000
"""Characters of a message: some quote a request's field, which may have many MiB."""
_MAX_PARAM_CHARS = 200
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Characters that control a terminal or the direction of text, except tab and newline."""


def printable(text: str) -> str:
    """Return a text with escapes for the characters that would control a terminal or reverse its text."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def shortened(text: str, most: int) -> str:
    """Return a text with its middle left out if it is longer than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error as a plain value that can cross a process boundary."""

    type: str
    message: str
    param: str | None = None
    n_prompt_tokens: int = 0
    n_ctx: int = 0
    retry_after: int = 0
    at_least: bool = False

    def exception(self) -> LlamaslotError:
        """Return the exception that this describes."""
        kinds = LlamaslotError.__subclasses__()
        kind = next((each for each in kinds if each.type == self.type), ServerError)
        sizes = {"n_prompt_tokens": self.n_prompt_tokens, "n_ctx": self.n_ctx}
        return kind(self.message, param=self.param, retry_after=self.retry_after, at_least=self.at_least, **sizes)


class LlamaslotError(Exception):
    """An error with a message for the user; `param` names the request field or the flag that caused it.

    `retry_after` is in seconds. The sizes are those of `ContextSizeError`; with `at_least`, `n_prompt_tokens` is a
    lower bound, since a prompt that is far too long is not tokenized.
    """

    type: ClassVar[str] = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        n_prompt_tokens: int = 0,
        n_ctx: int = 0,
        retry_after: int = 0,
        at_least: bool = False,
    ) -> None:
        message = shortened(message, MAX_MESSAGE_CHARS)
        super().__init__(message)
        self.message = message
        self.param = shortened(param, _MAX_PARAM_CHARS) if param else param
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx
        self.retry_after = retry_after
        self.at_least = at_least

    def info(self) -> ErrorInfo:
        """Return the error as a plain value."""
        sizes = (self.n_prompt_tokens, self.n_ctx)
        return ErrorInfo(self.type, self.message, self.param, *sizes, self.retry_after, self.at_least)


@contextmanager
def about(field: str) -> Iterator[None]:
    """Have errors in the block name a request's field, if it is not empty: one of several inputs."""
    try:
        yield
    except LlamaslotError as error:
        if not field:
            raise
        info = msgspec.structs.replace(error.info(), message=f"'{field}': {error.message}", param=field)
        raise info.exception() from error


class IllegalTransitionError(AssertionError):
    """An event that the table of a state machine does not allow: a bug, never caused by input."""


def next_state(table: Mapping[tuple[_S, _E], _S], state: _S, event: _E, what: str) -> _S:
    """Return the state of `what` after an event; raises `IllegalTransitionError`."""
    after = table.get((state, event))
    if after is None:
        raise IllegalTransitionError(f"{what}: {event.value} while {state.value}")
    return after


class InvalidRequestError(LlamaslotError):
    """The request is malformed or cannot be carried out."""

    type = "invalid_request_error"


class ContextSizeError(LlamaslotError):
    """The prompt does not fit into a slot's context."""

    type = "exceed_context_size_error"

    @classmethod
    def of(
        cls, n_prompt_tokens: int, n_ctx: int, *, at_least: bool = False, is_whole: bool = False
    ) -> ContextSizeError:
        """Return the error for a prompt of that many tokens; with `is_whole` it has to fit into one step."""
        count = f"{'at least ' if at_least else ''}{n_prompt_tokens} tokens"
        message = (
            f"the request ({count}) exceeds the available context size of a slot ({n_ctx} tokens); "
            "shorten the prompt or raise --ctx-size"
        )
        if is_whole:
            message = (
                f"input ({count}) is too large to process: its vector is of all of its tokens, and at most {n_ctx} "
                "fit into a step (--ubatch-size, or the model's own context if that is smaller); shorten the input"
            )
        return cls(message, n_prompt_tokens=n_prompt_tokens, n_ctx=n_ctx, at_least=at_least)


class TooLargeError(LlamaslotError):
    """The request body exceeds the limit."""

    type = "request_too_large_error"


class RequestTimeoutError(LlamaslotError):
    """The request did not arrive in time."""

    type = "request_timeout_error"


class UnsupportedMediaTypeError(LlamaslotError):
    """The request body has a content encoding that is not supported."""

    type = "unsupported_media_type_error"


class DeadlineError(LlamaslotError):
    """The request took longer than the server allows."""

    type = "timeout_error"


class AuthenticationError(LlamaslotError):
    """The API key is missing or wrong."""

    type = "authentication_error"


class ForbiddenError(LlamaslotError):
    """The client may not do this."""

    type = "permission_error"


class NotFoundError(LlamaslotError):
    """The address or the named resource does not exist."""

    type = "not_found_error"


class NotSupportedError(LlamaslotError):
    """The feature is turned off or not available."""

    type = "not_supported_error"


class QueueFullError(LlamaslotError):
    """A limit is reached: of requests in flight, queries, or memory for bodies and replies."""

    type = "rate_limit_error"


class UnavailableError(LlamaslotError):
    """The server cannot do this now: it is loading, restarting or stopping, something that is needed fails or is in
    use, or the request is suspected of crashes.
    """

    type = "unavailable_error"


class ServerError(LlamaslotError):
    """An internal error."""


def stopped_error(reason: str) -> ServerError | UnavailableError:
    """Return the error of requests that a stopped engine leaves; `reason` is empty for a shutdown."""
    if reason:
        return ServerError("the engine stopped because of an internal error")
    return UnavailableError("the server is shutting down", retry_after=1)


class ConfigError(LlamaslotError):
    """A command cannot run as configured: printed as one line, exit status 2."""

    type = "config_error"
