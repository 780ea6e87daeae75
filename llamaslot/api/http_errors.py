"""Errors as HTTP: a status for each type of error, and a body `{"error": {...}}`.

At the paths of Anthropic's and of Ollama's API the body has their form. Unexpected exceptions go to the log and
never into a body.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

import msgspec
import structlog
from aiohttp import web

from llamaslot.api.context import shown_id
from llamaslot.base import errors

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS = {
    "invalid_request_error": 400,
    "exceed_context_size_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "method_not_allowed_error": 405,
    "request_timeout_error": 408,
    "request_too_large_error": 413,
    "unsupported_media_type_error": 415,
    "expectation_failed_error": 417,
    "rate_limit_error": 429,
    "server_error": 500,
    "not_supported_error": 501,
    "unavailable_error": 503,
    "timeout_error": 504,
}

_encoder = msgspec.json.Encoder()
_ANTHROPIC_PATH = "/v1/messages"
_OLLAMA_PATH = "/api"

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
_THREAD = "thread"
"""The field that asks the server to keep a conversation."""
_ANTHROPIC_TYPES: dict[str, AnthropicErrorType] = {
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

_log = structlog.get_logger(__name__)


class MethodNotAllowedError(errors.LlamaslotError):
    """The address does not take this HTTP method."""

    type = "method_not_allowed_error"

    def __init__(self, message: str, *, allowed: set[str]) -> None:
        super().__init__(message)
        self.allowed = allowed


class ExpectationFailedError(errors.LlamaslotError):
    """The request has an `Expect` header other than `100-continue`."""

    type = "expectation_failed_error"


class ErrorDetail(msgspec.Struct):
    """The fields of an error body; the last two belong to `exceed_context_size_error`."""

    code: int
    message: str
    type: str
    param: str | None = None
    n_prompt_tokens: int | msgspec.UnsetType = msgspec.UNSET
    n_ctx: int | msgspec.UnsetType = msgspec.UNSET


class ErrorBody(msgspec.Struct):
    """The body of every reply that is not a success."""

    error: ErrorDetail


def status(error: errors.LlamaslotError) -> int:
    """Return the HTTP status.

    An unsupported field gets 400 instead of 501, because clients repeat requests that end in a server error.
    """
    if isinstance(error, errors.NotSupportedError) and error.param:
        return 400
    return _STATUS.get(error.type, 500)


def body(error: errors.LlamaslotError, request: web.BaseRequest | None = None) -> bytes:
    """Return the error as JSON, in the form of the API to which the request belongs."""
    if request is not None and is_anthropic(request.path):
        return _encoder.encode(anthropic_error(error, shown_id(request)))
    if request is not None and is_ollama(request.path):
        return _encoder.encode(OllamaError(error.message))
    detail = ErrorDetail(status(error), error.message, error.type, error.param)
    if isinstance(error, errors.ContextSizeError):
        detail.n_prompt_tokens, detail.n_ctx = error.n_prompt_tokens, error.n_ctx
    return _encoder.encode(ErrorBody(detail))


def event(error: errors.LlamaslotError, request: web.BaseRequest) -> bytes:
    """Return the error as the last event of a stream."""
    name = b"event: error\n" if is_anthropic(request.path) else b""
    return name + b"data: " + body(error, request) + b"\n\n"


def response(error: errors.LlamaslotError, request: web.BaseRequest) -> web.Response:
    """Return the error as a reply, with the headers of its status."""
    headers = {}
    if error.retry_after:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, errors.AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    elif isinstance(error, errors.DeadlineError | errors.NotSupportedError):
        # OpenAI's clients obey this; otherwise they would send the request again, to take as long or fail again.
        headers["X-Should-Retry"] = "false"
    elif isinstance(error, MethodNotAllowedError):
        headers["Allow"] = ", ".join(sorted(error.allowed))
    elif isinstance(error, errors.UnsupportedMediaTypeError):
        headers["Accept-Encoding"] = "identity"
    data = body(error, request)
    return web.Response(status=status(error), body=data, content_type="application/json", headers=headers)


def described(error: Exception) -> errors.LlamaslotError:
    """Return the error for the client; an unexpected exception is logged here."""
    if isinstance(error, errors.LlamaslotError):
        return error
    _log.error("request.crashed", exc_info=error)
    return errors.ServerError("internal error; see the server's log for this request id")


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever a handler raises into a reply."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return response(translated(request, error), request)
    except ConnectionError:
        raise  # The client is gone: a reply cannot be delivered.
    except Exception as error:
        return response(described(error), request)


def translated(request: web.BaseRequest, error: web.HTTPException) -> errors.LlamaslotError:
    """Return aiohttp's own errors as ours."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        return MethodNotAllowedError(
            f"{request.path} does not take {error.method}", allowed=set(error.allowed_methods)
        )
    if isinstance(error, web.HTTPNotFound):
        return _not_found(request)
    if isinstance(error, web.HTTPExpectationFailed):
        return ExpectationFailedError("'Expect' may only be 100-continue")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return errors.TooLargeError("the request's body is over the server's limit")
    if error.status < 500:
        return errors.InvalidRequestError(error.reason)
    return errors.ServerError(error.reason)


def _not_found(request: web.BaseRequest) -> errors.LlamaslotError:
    if is_ollama(request.path):
        return errors.NotFoundError(
            f"there is nothing at {request.path}: of Ollama's API this server has POST /api/chat, /api/generate, "
            "/api/embed, /api/embeddings, /api/show, and GET /api/tags, /api/ps, /api/version; it pulls "
            "and deletes no models"
        )
    return errors.NotFoundError(f"there is nothing at {request.path}; GET /openapi.json lists the endpoints")


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


class OllamaError(msgspec.Struct):
    """An error in Ollama's form, as a reply or as the last line of a stream."""

    error: str


def is_anthropic(path: str) -> bool:
    """Return True if errors at a path have Anthropic's form."""
    return path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")


def is_ollama(path: str) -> bool:
    """Return True if errors at a path have Ollama's form."""
    return path == _OLLAMA_PATH or path.startswith(f"{_OLLAMA_PATH}/")


def anthropic_error(error: errors.LlamaslotError, request_id: str) -> AnthropicError:
    """Return an error in Anthropic's form."""
    message = error.message
    if isinstance(error, errors.ContextSizeError):
        # Anthropic's words: Claude Code compacts the conversation when it reads them.
        least = "at least " if error.at_least else ""
        message = f"prompt is too long: {least}{error.n_prompt_tokens} tokens > {error.n_ctx} maximum"
    detail = AnthropicErrorDetail(_ANTHROPIC_TYPES.get(error.type, "invalid_request_error"), message)
    if error.param == _THREAD:
        # Anthropic's client then sends the whole conversation, without the field.
        detail.details = AnthropicErrorCode("thread_unsupported_request")
    return AnthropicError(detail, request_id)
