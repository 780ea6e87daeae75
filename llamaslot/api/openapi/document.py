"""`GET /openapi.json`: the API in OpenAPI's format, from the route table and the types of bodies and replies."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import msgspec
from aiohttp import web

from llamaslot import __version__
from llamaslot.api.http_errors import ErrorBody, Handler
from llamaslot.api.keys import Access
from llamaslot.api.openapi.operations import JSON, OPERATIONS, Operation

Route: TypeAlias = tuple[str, str, Handler, Access]
"""Method, path, handler, and the access that it requires."""

PATH = "/openapi.json"
_ERROR = "Error"
_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
_IS_VARIABLE = re.compile(r"\{(\w+)(?::[^}]*)?\}")


class OpenApi:
    """The description of these routes; computed when it is first asked for, so that it delays no start."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes

    @cached_property
    def body(self) -> bytes:
        """The description as JSON."""
        return msgspec.json.encode(document(self._routes))


OPENAPI = web.AppKey("OPENAPI", OpenApi)


async def openapi(request: web.Request) -> web.Response:
    """Return this description of the API."""
    return web.Response(body=request.app[OPENAPI].body, content_type=JSON)


_OWN = Operation(reply=dict[str, Any])


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes, whose types are in `OPERATIONS`."""
    operations = {handler: _OWN if handler is openapi else OPERATIONS[handler] for _, _, handler, _ in routes}
    types = list(dict.fromkeys(each for operation in operations.values() for each in _types(operation)))
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, pattern, handler, access in routes:
        path = _IS_VARIABLE.sub(r"{\1}", pattern)
        paths.setdefault(path, {})[method.lower()] = {
            "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").rstrip("_"),
            **_described(handler),
            **_security(access),
            **_parameters(pattern, operations[handler]),
            **_body(operations[handler], schema_of),
            "responses": _responses(operations[handler], schema_of),
        }
    error = {
        "description": "An error (docs/api.md lists them).",
        "content": {JSON: {"schema": schema_of[ErrorBody]}},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "llamaslot", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {_ERROR: error},
            "securitySchemes": _SECURITY_SCHEMES,
        },
    }


def _types(operation: Operation) -> Iterable[Any]:
    types = (*_bodies(operation), *_replies(operation), *_chunks(operation), operation.error)
    return (each for each in types if each is not None)


def _bodies(operation: Operation) -> tuple[Any, ...]:
    return (operation.body, *operation.other_bodies)


def _replies(operation: Operation) -> tuple[Any, ...]:
    return (operation.reply, *operation.other_replies)


def _chunks(operation: Operation) -> tuple[Any, ...]:
    return (operation.chunk, *operation.other_chunks)


def _described(handler: Handler) -> dict[str, str]:
    """Return the first paragraph of a handler's docstring, which says what its endpoint does."""
    text = inspect.getdoc(handler) or ""
    return {"summary": " ".join(text.partition("\n\n")[0].split())}


def _security(access: Access) -> dict[str, Any]:
    """Return the schemes of which a request needs one, if the server has keys, and the role of its key."""
    if access is Access.PUBLIC:
        return {"security": []}
    return {"security": [{name: []} for name in _SECURITY_SCHEMES], "x-llamaslot-role": access.name.lower()}


def _parameters(pattern: str, operation: Operation) -> dict[str, Any]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _IS_VARIABLE.findall(pattern)
    ]
    others = [
        {"name": each.name, "in": each.place, "required": each.required, "schema": each.schema}
        for each in operation.parameters
    ]
    return {"parameters": in_path + others} if in_path or others else {}


def _body(operation: Operation, schema_of: dict[Any, Any]) -> dict[str, Any]:
    if operation.body is None:
        return {}
    content = {JSON: {"schema": _any_of(_bodies(operation), schema_of)}}
    return {"requestBody": {"required": operation.body_required, "content": content}}


def _responses(operation: Operation, schema_of: dict[Any, Any]) -> dict[str, Any]:
    content = {operation.content_type: {"schema": _any_of(_replies(operation), schema_of)}}
    if operation.chunk is not None:
        # OpenAPI 3.1 cannot describe the events of a stream; 3.2 does it in `itemSchema`.
        content["text/event-stream"] = {"x-itemSchema": _any_of(_chunks(operation), schema_of)}
    return {
        "200": {"description": "Success", "content": content},
        "default": _error(operation, schema_of),
    }


def _error(operation: Operation, schema_of: dict[Any, Any]) -> dict[str, Any]:
    if operation.error is ErrorBody:
        return {"$ref": f"#/components/responses/{_ERROR}"}
    return {"description": "An error.", "content": {JSON: {"schema": schema_of[operation.error]}}}


def _any_of(types: Sequence[Any], schema_of: dict[Any, Any]) -> Any:
    return schema_of[types[0]] if len(types) == 1 else {"anyOf": [schema_of[each] for each in types]}
