"""Replies of the HTTP API, compared with the types that `/openapi.json` is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from llamaslot.api.http_errors import ErrorDetail
from llamaslot.api.routes import ROUTES, Route
from llamaslot.api.sse import JSON_LINES


def route_of(method: str, path: str) -> Route:
    """The route of a method and a path."""
    return next(route for route in ROUTES if (route.method, route.path) == (method, path))


def check_reply(method: str, path: str, status: int, content_type: str, raw: bytes, *, picked: bool = False) -> Any:
    """Return a decoded reply, or the events of a stream; an `AssertionError` says how it differs from its type.

    `picked` is true for a request with `response_fields`.
    """
    route = route_of(method, path)
    try:
        if status != 200:
            assert content_type == "application/json", content_type
            error = msgspec.json.decode(raw, type=route.error).error
            assert not isinstance(error, ErrorDetail) or error.code == status, raw
            return error
        if content_type == "text/event-stream":
            return _events(raw, _without_picked(route.chunks, picked), route.error)
        if content_type == JSON_LINES:
            return _lines(raw, route.chunks, route.error)
        assert content_type == route.content_type, content_type
        if route.content_type != "application/json":
            return raw.decode()
        return _decoded(raw, _without_picked(route.replies, picked))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise AssertionError(f"{method} {path}: {error}: {raw[:500]!r}") from error


def _events(raw: bytes, types: Sequence[Any], error: Any) -> list[Any]:
    """The events of a stream; its last one may be an error. Comment lines keep connections open.

    An event that has a name has it in its data as well.
    """
    events: list[Any] = []
    *lines, rest = [line for line in raw.split(b"\n\n") if not line.startswith(b":")]
    assert rest == b"", rest
    for line in lines:
        name, _, text = line.rpartition(b"\n")
        assert text.startswith(b"data: "), line
        data = text.removeprefix(b"data: ")
        assert not name or name == b"event: " + msgspec.json.decode(data)["type"].encode(), line
        assert not events or not isinstance(events[-1], error), "nothing follows an error"
        if data == b"[DONE]":
            events.append("[DONE]")
        else:
            events.append(_decoded(data, [*types, error]))
    return events


def _lines(raw: bytes, types: Sequence[Any], error: Any) -> list[Any]:
    """The lines of a stream, of which the last one alone is done, or is an error."""
    *lines, rest = raw.split(b"\n")
    assert rest == b"", rest
    parts = [_decoded(line, [*types, error]) for line in lines]
    assert [getattr(part, "done", True) for part in parts] == [*([False] * (len(parts) - 1)), True], raw
    return parts


def _without_picked(types: Sequence[Any], picked: bool) -> Sequence[Any]:
    """The types of a reply; mappings of any fields are among them only if the request asked for fields."""
    own = [each for each in types if "dict" not in str(each)]
    return types if picked else own or types


def _decoded(raw: bytes, types: Sequence[Any]) -> Any:
    errors = []
    for each in types:
        try:
            return msgspec.json.decode(raw, type=each)
        except msgspec.ValidationError as error:
            errors.append(f"{each}: {error}")
    raise msgspec.ValidationError("; ".join(errors))
