"""Removal of JSON Schema keywords without effect, and replacement of `propertyNames`.

llguidance refuses keywords that it does not support even if they have no effect, such as zod's
`propertyNames: {"type": "string"}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from llamaslot.text.grammars.schema_parts import Resolve, Schema, is_number, list_of

Share: TypeAlias = Callable[[object], object]
"""Returns a short schema, such as a reference, that can be used in several places instead of the given one."""

_OF_CONTAINS = ("contains", "minContains", "maxContains")
_MAPS = ("dependentRequired", "dependentSchemas", "dependencies")
_OPEN = ("unevaluatedProperties", "unevaluatedItems")
_REMARKS = frozenset({"$schema", "$id", "$comment", "$defs", "definitions"})


def remove_vacuous(schema: Schema, resolve: Resolve, share: Share) -> None:
    """Remove keywords without effect from a schema, but not from those in it."""
    _write_names_otherwise(schema, resolve, share)
    required, properties = schema.get("required"), schema.get("properties")
    n_required = len(set(map(str, required))) if isinstance(required, list) else 0
    n_allowed = None
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        n_allowed = len(properties) if isinstance(properties, dict) else 0
    without_effect = {
        "uniqueItems": schema.get("uniqueItems") is False or _is_at_most(schema.get("maxItems"), 1),
        "contains": _is_at_most(schema.get("minContains"), 0) and "maxContains" not in schema,
        "minProperties": _is_at_most(schema.get("minProperties"), n_required),
        "maxProperties": n_allowed is not None and _is_at_least(schema.get("maxProperties"), n_allowed),
        "not": schema.get("not") is False,
        "propertyNames": _says_nothing(schema.get("propertyNames"), "string", resolve),
        "if": all(_says_nothing(schema.get(name, True)) for name in ("then", "else")),
        "additionalItems": not isinstance(schema.get("items"), list),
        "allOf": isinstance(schema.get("allOf"), list) and all(map(_says_nothing, schema["allOf"])),
        "patternProperties": schema.get("patternProperties") == {},
        **{name: _is_empty_map(schema.get(name)) for name in _MAPS},
        **{name: _says_nothing(schema[name]) for name in _OPEN if name in schema},
    }
    for name, is_vacuous in without_effect.items():
        if is_vacuous and name in schema and not isinstance(schema[name], str):
            del schema[name]
    if isinstance(schema.get("items"), list) and _says_nothing(schema.get("additionalItems", False)):
        del schema["additionalItems"]
    for names, base in ((("then", "else"), "if"), (_OF_CONTAINS, "contains")):
        if base not in schema:
            for name in names:
                schema.pop(name, None)


def _write_names_otherwise(schema: Schema, resolve: Resolve, share: Share) -> None:
    """Replace `propertyNames` by `properties` or `patternProperties` if these can express the same."""
    names = _resolved(schema.get("propertyNames"), resolve)
    if names is None or "patternProperties" in schema:
        return
    said = names.keys() - _REMARKS - {"type"}
    listed = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    if not isinstance(listed, dict) or names.get("type", "string") != "string":
        return
    if said in ({"enum"}, {"const"}):
        options = [names["const"]] if "const" in names else names["enum"]
        allowed = [each for each in options if isinstance(each, str)] if isinstance(options, list) else []
        properties = {name: each for name, each in listed.items() if name in allowed}
        if others is not False:
            shared = share(others)
            properties |= {name: shared for name in allowed if name not in properties}
        schema["properties"] = properties
        schema["additionalProperties"] = False
    elif not listed and others is not False and said == {"pattern"}:
        schema["patternProperties"] = {str(names["pattern"]): others}
        schema["additionalProperties"] = False
    elif not listed and others is not False and said and said <= {"minLength", "maxLength"}:
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        schema["patternProperties"] = {f"^.{{{least},{most}}}$": others}
        schema["additionalProperties"] = False
    else:
        return
    del schema["propertyNames"]


def _resolved(schema: object, resolve: Resolve) -> Schema | None:
    """Return the schema to which a pure reference leads; any other schema is returned itself."""
    for _ in range(10):
        if not isinstance(schema, dict) or "$ref" not in schema or schema.keys() - _REMARKS != {"$ref"}:
            break
        schema = resolve(schema["$ref"])
    return schema if isinstance(schema, dict) else None


def _says_nothing(schema: object, kind: str = "", resolve: Resolve = lambda _: None) -> bool:
    """Return True for a schema that all values match, or all values of the type `kind`."""
    if schema is True:
        return True
    found = _resolved(schema, resolve)
    if found is None:
        return False
    said = found.keys() - _REMARKS
    return not said or (bool(kind) and said == {"type"} and kind in (found["type"], *list_of(found["type"])))


def _is_empty_map(value: object) -> bool:
    return isinstance(value, dict) and all(each in ([], True, {}) for each in value.values())


def _is_at_most(value: Any, bound: int) -> bool:
    return is_number(value) and value <= bound


def _is_at_least(value: Any, bound: int) -> bool:
    return is_number(value) and value >= bound
