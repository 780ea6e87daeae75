"""Tools with simpler schemas, for chat templates that cannot print their JSON schemas.

Some templates write a schema as TypeScript or Python, and fail on constructs that they do not know: a list of
types, `anyOf`, a missing type. The arguments of calls must still match the original schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llamaslot.base.schema_references import referenced
from llamaslot.text.conversation import Message
from llamaslot.text.grammars.schema_parts import list_of

_MAX_DEPTH = 12
_MAX_SCHEMAS = 4096
"""Most schemas that one tool may become, because references can multiply them."""
_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": float, "boolean": bool}
_CHOICES = ("anyOf", "oneOf")


def simpler_tools(tools: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the tools with simplified schemas, then without schemas."""
    yield [_with_parameters(tool, _Simplifier(tool["function"]["parameters"]).parameters()) for tool in tools]
    yield [_described(tool) for tool in tools]


def _with_parameters(tool: Message, parameters: Message) -> Message:
    return {**tool, "function": {**tool["function"], "parameters": parameters}}


def _described(tool: Message) -> Message:
    """Return a tool without parameters whose description includes their schema as JSON."""
    function = tool["function"]
    try:
        schema = json.dumps(function["parameters"], ensure_ascii=False)
    except RecursionError:
        schema = ""
    description = "\n".join(filter(None, [str(function["description"]), schema]))
    return {
        **tool,
        "function": {**function, "description": description, "parameters": {"type": "object", "properties": {}}},
    }


class _Simplifier:
    """Reduces the schemas of one tool to a type, a description and the keywords of the type."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._n_left = _MAX_SCHEMAS

    def parameters(self) -> Message:
        """Return the simplified schema of the parameters, which are an object."""
        return {"properties": {}, **self._schema(self._root, 0), "type": "object"}

    def _schema(self, schema: Any, depth: int) -> Message:
        self._n_left -= 1
        found = self._merged(schema, depth)
        kind = _type_of(found)
        description = found.get("description") or found.get("title") or ""
        simple: Message = {"type": kind, "description": description if isinstance(description, str) else ""}
        values = [each for each in list_of(found.get("enum")) if each is not None]
        if values and kind not in ("object", "array"):
            simple["enum"] = values
        is_cut = depth >= _MAX_DEPTH or self._n_left <= 0
        if kind == "array":
            items = found.get("items", found.get("prefixItems"))
            items = items[0] if isinstance(items, list) and items else items
            simple["items"] = {"type": "string"} if is_cut or items is None else self._schema(items, depth + 1)
        if kind == "object":
            properties = found.get("properties")
            known = properties if isinstance(properties, Mapping) and not is_cut else {}
            simple["properties"] = {name: self._schema(each, depth + 1) for name, each in known.items()}
            simple["required"] = [each for each in list_of(found.get("required")) if each in known]
        return simple

    def _merged(self, schema: Any, depth: int) -> Mapping[str, Any]:
        """Merge a schema with its reference, its first alternative and its `allOf`."""
        found = schema if isinstance(schema, Mapping) else {}
        for _ in range(_MAX_DEPTH):
            parts = [referenced(found["$ref"], self._root)] if "$ref" in found else []
            parts += [_first_choice(found[key]) for key in _CHOICES if key in found]
            parts += list_of(found.get("allOf"))
            if not parts:
                break
            rest: dict[str, Any] = {
                key: value for key, value in found.items() if key not in ("$ref", "allOf", *_CHOICES)
            }
            for part in parts:
                for key, value in part.items() if isinstance(part, Mapping) else ():
                    if key == "properties" and isinstance(value, Mapping) and isinstance(rest.get(key), Mapping):
                        rest[key] = {**value, **rest[key]}
                    elif key not in rest:
                        rest[key] = value
            found = rest
        return found


def _first_choice(choices: Any) -> Any:
    """Return the first alternative that is not null."""
    for each in list_of(choices):
        if isinstance(each, Mapping) and each.get("type") != "null" and each.get("const", "") is not None:
            return each
    return {}


def _type_of(schema: Mapping[str, Any]) -> str:
    given = schema.get("type")
    for kind in given if isinstance(given, list) else [given]:
        if isinstance(kind, str) and kind in _TYPES:
            return kind
    if "properties" in schema or "additionalProperties" in schema:
        return "object"
    if "items" in schema or "prefixItems" in schema:
        return "array"
    value, *_ = list_of(schema.get("enum")) or [schema.get("const")]
    return next((kind for kind, of_python in _TYPES.items() if type(value) is of_python), "string")
