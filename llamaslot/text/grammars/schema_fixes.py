"""Changes of JSON Schema keywords that llguidance 1.9.1 refuses or gets wrong: every answer is valid and ends.

Keywords without effect are removed, because it refuses keywords that it does not support even then, such as zod's
`propertyNames: {"type": "string"}`. What it gets wrong was found by comparison with a validator, which
`tests/text/test_json_schema.py` repeats with generated schemas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, TypeAlias

from llamaslot.base.json_schemas import Resolve, Schema, is_number, list_of

Share: TypeAlias = Callable[[object], object]
"""Returns a short schema, such as a reference, that can be used in several places instead of the given one."""

_OF_CONTAINS = ("contains", "minContains", "maxContains")
_MAPS = ("dependentRequired", "dependentSchemas", "dependencies")
_OPEN = ("unevaluatedProperties", "unevaluatedItems")
_REMARKS = frozenset({"$schema", "$id", "$comment", "$defs", "definitions"})
MAX_NUMBER = 10**18 - 1
"""Bound of the absolute value of numbers that have no bound of their own."""
_LAST_DIGIT = Decimal("1e-10")
"""Value of the last digit of numbers. llguidance refuses 1e-12, because of too many digits."""
_BOUNDS = (("minimum", "exclusiveMinimum"), -MAX_NUMBER), (("maximum", "exclusiveMaximum"), MAX_NUMBER)
_VALUES = frozenset({"enum", "const"})
_ABOUT_NUMBERS = (*_VALUES, *_BOUNDS[0][0], *_BOUNDS[1][0])
ALL_TYPES = ("object", "array", "string", "number", "boolean", "null")
_VALUES_BY_OTHERS = frozenset({"$ref", "allOf", "anyOf", "oneOf", "not", "if"}) | _VALUES
"""A schema without `type` that has one of these keywords does not allow any value."""
_HAVE_SCHEMAS = frozenset({"items", "prefixItems", "anyOf", "oneOf"}) | frozenset(
    {"properties", "patternProperties", "$defs", "definitions"}
)
_EXACT_DIGITS = 12
"""Most digits of a bound; one with more is rounded to a tighter bound, because llguidance would round it."""
_SMALLEST_STEP = Decimal("0.000001")
"""Usual distance of the inclusive bound that replaces an exclusive one; less if the range is narrow."""
_NAMES_CONTROL = re.compile(r"\\x00|\\x\{0+\}|\\u0000|\\u\{0+\}|\\0|\\[pP]\{?(?:gc=|General_Category=)?C|\x00")
"""Ways to write a range of characters that begins with U+0000, or the class of control characters."""


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
        "maxProperties": n_allowed is not None and _is_at_most(n_allowed, schema.get("maxProperties")),
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


def _is_at_most(value: Any, bound: Any) -> bool:
    return bool(is_number(value) and is_number(bound) and value <= bound)


def exact_bounds(schema: dict[str, Any]) -> None:
    """Replace bounds that llguidance does not keep exactly by slightly tighter ones. Integers are not affected.

    It allows 1 with `exclusiveMinimum: 1` and `maximum: 1.5`, and rounds -3.9000000000000004 to -3.9.
    """
    if schema.get("type") == "integer":
        return
    for name, rounding in (("inimum", ROUND_CEILING), ("aximum", ROUND_FLOOR)):
        for key in (f"m{name}", f"exclusiveM{name}"):
            bound = _number(schema.get(key))
            if bound is not None and len(bound.as_tuple().digits) > _EXACT_DIGITS:
                schema[key] = float(Context(_EXACT_DIGITS, rounding).plus(bound))
    for exclusive, inclusive, other, sign in (
        ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        bound = _number(schema.get(exclusive))
        if bound is None or bound != bound.to_integral_value():
            continue
        widths = [abs(value - bound) for name in other if (value := _number(schema.get(name))) is not None]
        step = min([_SMALLEST_STEP, *(width / 1000 for width in widths if width)])
        moved = bound + sign * step
        stated = _number(schema.get(inclusive))
        if stated is None or (moved - stated) * sign > 0:
            schema[inclusive] = float(moved)
        del schema[exclusive]


def limit_digits(schema: dict[str, Any]) -> None:
    """Limit the digits of numbers, which a model might continue forever, as for 1/3.

    llguidance writes numbers with bounds without an exponent, so the numbers get bounds. It reads bounds as 64-bit
    integers, so wider ones would be an error or wrong, and are replaced. Raises `ValueError` if no number is left.
    """
    said = schema.get("type")
    kinds = said if isinstance(said, list) else [said]
    if not {"integer", "number"} & set(map(str, kinds)) or not _VALUES.isdisjoint(schema):
        return
    step = _number(schema.get("multipleOf"))
    if step is not None and step == step.to_integral_value():
        # With an integral step, numbers are integers: fractions of zeros would take too many states.
        kinds = list(dict.fromkeys("integer" if kind == "number" else kind for kind in kinds))
        schema["type"] = kinds if isinstance(said, list) else kinds[0]
    ends = []
    for names, limit in _BOUNDS:
        for name in names:
            bound = _number(schema.get(name))
            if bound is None or abs(bound) <= MAX_NUMBER:
                continue
            if (bound > 0) != (limit > 0):
                raise ValueError(f"the bound {bound:g} exceeds the largest supported number, {-limit:+}")
            del schema[name]
        if not schema.keys() & set(names):
            schema[names[0]] = limit
        found = [number for name in names if (number := _number(schema.get(name))) is not None]
        ends.append((max if limit < 0 else min)(found, default=Decimal(limit)))
    if "number" in kinds and step is None and _has_multiple(*ends):
        schema["multipleOf"] = float(_LAST_DIGIT)


def _has_multiple(low: Decimal, high: Decimal) -> bool:
    """Return True if there is a multiple of `_LAST_DIGIT` between two bounds."""
    return high - low > 2 * _LAST_DIGIT or not (low % _LAST_DIGIT or high % _LAST_DIGIT)


def has_wide_numbers(schema: dict[str, Any]) -> bool:
    """Return True if a schema itself has a number that limits in other schemas could make impossible.

    For example `allOf: [{type: number}, {const: 1e30}]`.
    """
    # `limit_digits` sets `multipleOf` as well, which may be incompatible.
    if "multipleOf" in schema:
        return True
    todo = [schema[name] for name in _ABOUT_NUMBERS if name in schema]
    while todo:
        each = todo.pop()
        if isinstance(each, dict | list):
            todo += each.values() if isinstance(each, dict) else each
        elif (number := _number(each)) is not None and (abs(number) > MAX_NUMBER or number % _LAST_DIGIT):
            return True
    return False


def limit_any_value(
    schema: dict[str, Any], any_value: Callable[[], dict[str, Any]], said: Set[str], *, names: bool
) -> None:
    """Write values that a schema leaves open, such as the items of `{"type": "array"}`, as references to
    `any_value`.

    `said` has its keywords without annotations. Without `names`, an object gets no other properties.
    """
    if not said:
        schema |= any_value()
        return
    for name in _HAVE_SCHEMAS & schema.keys():
        children = schema[name]
        if not isinstance(children, dict | list):
            continue
        # A copy, since `any_value` may add to the definitions.
        places = list(children) if isinstance(children, dict) else range(len(children))
        for place in places:
            if children[place] is True:
                children[place] = any_value()
    if said & _VALUES_BY_OTHERS:
        return
    kinds = schema.setdefault("type", list(ALL_TYPES))
    kinds = kinds if isinstance(kinds, list) else [kinds]
    # If `items` is a tuple, further items are described by `additionalItems`.
    rest = "additionalItems" if isinstance(schema.get("items"), list) else "items"
    opens = {rest: "array" in kinds, "additionalProperties": "object" in kinds and names}
    for name, is_open in opens.items():
        if is_open and schema.get(name, True) is True:
            schema[name] = any_value()


def ecmascript_pattern(pattern: str) -> str | None:
    """Convert an ECMAScript pattern for llguidance, which uses Rust's syntax; None if that is impossible.

    - In a character class, `[`, `&` and `~` are plain characters in ECMAScript but operators in Rust.
    - In llguidance a class with all control characters also matches an escaped quote and an escaped backslash. So
      negated classes must exclude U+0000, and other classes with it are refused.
    """
    result = ""
    at = 0
    is_in_class = is_negated = False
    while at < len(pattern):
        char = pattern[at]
        part = pattern[at : at + 2] if char == "\\" else char
        if not is_negated and _NAMES_CONTROL.match(pattern, at):
            return None
        if not is_in_class and char == "[":
            is_in_class = True
            is_negated = pattern.startswith("^", at + 1)
            part = r"[^" if is_negated else "["
            at += len(part)
            # An immediate closing bracket ends the class in ECMAScript, but is a character in Rust.
            if pattern.startswith("]", at):
                return None
            result += part + (r"\x00" if is_negated else "")
            continue
        if is_in_class:
            if char == "]":
                is_in_class = is_negated = False
            elif pattern.startswith("--", at):
                return None
            elif char in "[&~":
                part = f"\\{char}"
                at -= 1
        result += part
        at += len(part)
    return result


def _number(value: object) -> Decimal | None:
    return Decimal(str(value)) if is_number(value) else None
