"""Proofs that no value matches two of some schemas, so that `oneOf` can be treated as `anyOf`.

If the rules cannot prove it, they say no. Schemas are compared as they were sent, before objects are closed
(`json_schema.py`): closed objects would look exclusive although a valid answer to one may match the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import msgspec

from llamaslot.base.json_schemas import ALL_TYPES, Resolve, Schema, conjuncts, dict_of, is_number, list_of, type_of

_MAX_STEPS = 100_000
"""Most steps (schemas, values and names visited) for one schema, which take 0.3 s. 100 alternatives that differ by
a property take half of them. What is left undecided is decided by llguidance, which compares properties only.
"""
_STEPS_PER_CHAR = 4
"""Most steps per character, so that many short schemas, such as those of tools, take no longer than a long one."""
_LEAST_STEPS = 500
_ALTERNATIVES_STEPS = 50
"""Steps that entering the alternatives of an alternative counts as."""
_MAX_DEPTH = 12
"""Most levels of nested properties and alternatives."""
_LENGTHS = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems")}


class Judge:
    """Compares the alternatives of a schema of `n_chars` characters, in a limited number of steps.

    Each side of a comparison is a list of schemas that a value must match at once.
    """

    def __init__(self, resolve: Resolve, n_chars: int) -> None:
        self._resolve = resolve
        self._n_left = min(_MAX_STEPS, _LEAST_STEPS + _STEPS_PER_CHAR * n_chars)

    def are_exclusive(self, schemas: list[Any]) -> bool:
        """Return True if no value can match two of the schemas."""
        return all(self.excludes([a], [b], 0) for a, b in itertools.combinations(schemas, 2))

    def _may_take(self, n_steps: int) -> bool:
        self._n_left -= n_steps
        return self._n_left >= 0

    def excludes(self, one: list[Any], other: list[Any], depth: int) -> bool:
        """Return True if no value can match all schemas of both sides."""
        if depth > _MAX_DEPTH or not self._may_take(1):
            return False
        a, b = conjuncts(one, self._resolve), conjuncts(other, self._resolve)
        if a is None or b is None:
            # One side matches nothing.
            return True
        if not self._may_take(sum(map(_size, a + b))):
            return False
        return self._directly(a, b, depth) or self._by_alternatives(a, b, depth)

    def _by_alternatives(self, a: list[Schema], b: list[Schema], depth: int) -> bool:
        """Return True if each alternative of a schema of one side excludes the other side."""
        for mine, theirs in ((a, b), (b, a)):
            for schema in mine:
                for name in ("anyOf", "oneOf"):
                    options = list_of(schema.get(name))
                    if not options or not self._may_take(_ALTERNATIVES_STEPS):
                        continue
                    rest = list(_without(mine, schema, name))
                    if all(self.excludes([*rest, each], theirs, depth + 1) for each in options):
                        return True
        return False

    def _directly(self, a: list[Schema], b: list[Schema], depth: int) -> bool:
        types = _types(a) & _types(b)
        values = _values(a), _values(b)
        for mine, theirs, parts in ((values[0], values[1], b), (values[1], values[0], a)):
            if mine is not None:
                if not self._may_take(_comparisons(mine, parts)):
                    return False
                found = None if theirs is None else _Values(theirs)
                return all(
                    _type_of(each) not in types
                    or (found is not None and each not in found)
                    or any(_breaks(each, schema) for schema in parts)
                    or (isinstance(each, dict) and self._breaks_object(each, parts, depth))
                    for each in mine
                )
        return all(self._excludes_type(kind, a, b, depth) for kind in types)

    def _breaks_object(self, value: dict[str, Any], parts: list[Schema], depth: int) -> bool:
        return any(
            name in value and self.excludes([{"const": value[name]}], [schema], depth + 1)
            for part in parts
            for name, schema in dict_of(part.get("properties")).items()
        )

    def _excludes_type(self, kind: str, a: list[Schema], b: list[Schema], depth: int) -> bool:
        """Return True if no value of a type can match both sides."""
        if kind == "number":
            (low, low_open), (high, high_open) = _bound(a + b, "minimum", max), _bound(a + b, "maximum", min)
            if low is None or high is None:
                return False
            return low > high or (low == high and (low_open or high_open))
        if kind in _LENGTHS:
            least, most = _LENGTHS[kind]
            lows = [each[least] for each in a + b if is_number(each.get(least))]
            highs = [each[most] for each in a + b if is_number(each.get(most))]
            if lows and highs and max(lows) > min(highs):
                return True
        if kind == "array":
            n_sure = max((each["minItems"] for each in a + b if is_number(each.get("minItems"))), default=0)
            first = _list_of(a, "prefixItems"), _list_of(b, "prefixItems")
            return any(
                self.excludes([mine], [theirs], depth + 1)
                for n, (mine, theirs) in enumerate(zip(*first, strict=False))
                if n < n_sure
            )
        return kind == "object" and self._excludes_objects(a, b, depth)

    def _excludes_objects(self, a: list[Schema], b: list[Schema], depth: int) -> bool:
        names = _required(a) | _required(b)
        for name in sorted(names):
            mine, theirs = _property(a, name), _property(b, name)
            if mine is None or theirs is None:
                # One side forbids a property that the other one requires.
                return True
            if mine and theirs and self.excludes(mine, theirs, depth + 1):
                return True
        return False


class _Values:
    """Values of an `enum`. Only lists and objects are searched one by one."""

    def __init__(self, values: list[Any]) -> None:
        self._simple = {(_type_of(each), each) for each in values if not isinstance(each, list | dict)}
        self._others = [each for each in values if isinstance(each, list | dict)]

    def __contains__(self, value: object) -> bool:
        if isinstance(value, list | dict):
            return value in self._others
        return (_type_of(value), value) in self._simple


def _comparisons(values: list[Any], parts: list[Schema]) -> int:
    """Return about how many steps comparing values with schemas takes."""
    n_bytes = sum(len(msgspec.json.encode(each)) for each in values if isinstance(each, list | dict))
    return len(values) * len(parts) + n_bytes // 8 * sum(map(_size, parts))


def _size(schema: Schema) -> int:
    """Return a schema's number of keywords plus that of the items in them."""
    return len(schema) + sum(len(each) for each in schema.values() if isinstance(each, list | dict))


def _without(schemas: list[Schema], schema: Schema, name: str) -> Iterator[Schema]:
    """Yield schemas without `$ref` and `allOf`, which are resolved, and `schema` also without `name`."""
    for each in schemas:
        left_out = ("allOf", "$ref", *((name,) if each is schema else ()))
        yield {key: value for key, value in each.items() if key not in left_out}


def _types(parts: list[Schema]) -> frozenset[str]:
    found = ALL_TYPES - {"integer"}
    for each in parts:
        said = each.get("type")
        names = [said] if isinstance(said, str) else said
        if isinstance(names, list):
            found &= frozenset("number" if name == "integer" else str(name) for name in names)
    return found


def _values(parts: list[Schema]) -> list[Any] | None:
    """Return the values of the first `const` or `enum`; None if there is neither."""
    for each in parts:
        if "const" in each:
            return [each["const"]]
        if isinstance(each.get("enum"), list):
            return list(each["enum"])
    return None


def _type_of(value: object) -> str:
    kind = type_of(value)
    return "number" if kind == "integer" else kind


def _breaks(value: object, schema: Schema) -> bool:
    """Return True if a value cannot match a schema because of its keywords about numbers, names and lengths."""
    kind = _type_of(value)
    if kind == "number":
        said = schema.get("type")
        number = Decimal(str(value))
        if said == "integer" and number != number.to_integral_value():
            return True
        (low, low_open), (high, high_open) = _bound([schema], "minimum", max), _bound([schema], "maximum", min)
        return (low is not None and (number < low or (low_open and number == low))) or (
            high is not None and (number > high or (high_open and number == high))
        )
    if isinstance(value, str | list):
        least, most = (schema.get(name) for name in _LENGTHS[kind])
        return (least is not None and is_number(least) and len(value) < least) or (
            most is not None and is_number(most) and len(value) > most
        )
    if isinstance(value, dict):
        return not _required([schema]) <= value.keys() or any(_property([schema], name) is None for name in value)
    return False


def _bound(
    parts: list[Schema], name: str, choose: Callable[[list[Decimal]], Decimal]
) -> tuple[Decimal | None, bool]:
    """Return the tightest bound of numbers, and True if the bound itself is excluded."""
    exclusive = f"exclusive{name.capitalize()}"
    found = [Decimal(str(each[name])) for each in parts if is_number(each.get(name))]
    excluded = [Decimal(str(each[exclusive])) for each in parts if is_number(each.get(exclusive))]
    if not found and not excluded:
        return None, False
    bound = choose([*found, *excluded])
    return bound, bound in excluded


def _required(parts: list[Schema]) -> set[str]:
    return {name for each in parts for name in list_of(each.get("required")) if isinstance(name, str)}


def _property(parts: list[Schema], name: str) -> list[Any] | None:
    """Return the schemas of a property; None if it is forbidden."""
    found: list[Any] = []
    for each in parts:
        properties = dict_of(each.get("properties"))
        if name in properties:
            found.append(properties[name])
        elif not each.get("patternProperties") and "additionalProperties" in each:
            if each["additionalProperties"] is False:
                return None
            found.append(each["additionalProperties"])
    return found


def _list_of(parts: list[Schema], name: str) -> list[Any]:
    return next((each[name] for each in parts if isinstance(each.get(name), list)), [])
