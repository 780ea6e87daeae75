"""JSON schemas as constraints.

llguidance enforces a schema, and refuses by name keywords of JSON Schema that it does not implement. Other keywords
have no effect. Before that, schemas are changed here:

- Objects that list `properties` and do not mention others get no others, as in llama-server and XGrammar: a model
  that never saw the schema might add properties forever. Every answer is still valid. This is not done where it
  could make a schema impossible (within `allOf`, or with other keywords), or an answer invalid (within `oneOf`,
  where it would make alternatives look exclusive).
- As in llama-server, a schema that only describes the items of an array, or the properties of an object, allows
  only arrays or objects, although all other values match it too; and a tuple of schemas allows exactly as many
  items.
- Keywords without effect that llguidance would refuse are removed (`schema_fixes.py`), and so are formats that it
  does not know, and descriptions, which are most of the text of tools' schemas.
- `oneOf` becomes `anyOf` if no value can match two of its alternatives (`exclusive.py`).
- `multipleOf` and the number of an object's properties are limited, because the time to compile grows with their
  square.
- Keywords that llguidance gets wrong are rewritten (`schema_fixes.py`).
"""

from __future__ import annotations

import itertools
import re
from decimal import Decimal
from functools import cache, partial
from typing import Any

import msgspec
from llguidance import LLMatcher

from llamaslot.base.commands import Constraint
from llamaslot.base.errors import InvalidRequestError
from llamaslot.base.json_schemas import (
    APPLICATORS,
    Resolve,
    Schema,
    conjuncts,
    is_number,
    list_of,
    names_in,
    referenced,
    subschemas,
)
from llamaslot.text.conversation import refuse_field
from llamaslot.text.grammars.compiling import MAX_CONSTRAINT_CHARS, too_long
from llamaslot.text.grammars.exclusive import Judge
from llamaslot.text.grammars.schema_fixes import (
    ALL_TYPES,
    ecmascript_pattern,
    exact_bounds,
    has_wide_numbers,
    limit_any_value,
    limit_digits,
    remove_vacuous,
)

MAX_MULTIPLE_OF = 10_000
"""Largest sum of all `multipleOf`, without decimal points. Compiles in 0.1 s; a sum of 1,000,000 took 27 s."""
MAX_PROPERTIES = 4000
"""Most properties of an object. 4,000 compile in 0.8 s; 8,000 took 4 s."""
MAX_OPTIONAL = 1000
"""Most optional properties of an object, because a mask visits all that may come next."""
MAX_INTERSECTION = 10_000
"""Largest product of the counted repetitions of patterns for the same string: about their number of states."""
_MAX_HOPS = 8
"""Most references from one to the next that are followed to find a type."""
_COUNTS = re.compile(r"[{,](\d{1,9})\}")
WHITESPACE = r"( |\n[ \t]{0,20})?"
"""Whitespace between JSON's tokens, as in llama-server: a model can indent, but not write blanks forever."""

_IN_PLACE = ("allOf", "anyOf", "oneOf")
"""Keywords whose schemas apply to the same value as the schema itself."""
_KNOWN_FORMATS = frozenset({"date-time", "date", "time", "duration", "email", "hostname"}) | frozenset(
    {"ipv4", "ipv6", "uri", "uuid"}
)
"""Formats that llguidance enforces. In JSON Schema a format is only an annotation, unless agreed otherwise."""
_WORDS = frozenset(
    {"$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
)
"""Keywords for human readers."""
_ANNOTATIONS = frozenset({"$schema", "$id", "$defs", "definitions"}) | _WORDS
_KEYWORDS = (
    frozenset({"$schema", "$id", "id", "$ref", "$dynamicRef", "$recursiveRef", "$vocabulary"})
    | frozenset({"$anchor", "$dynamicAnchor", "$recursiveAnchor", "type", "enum", "const", "format", "pattern"})
    | frozenset({"minLength", "maxLength", "contentEncoding", "contentMediaType", "contentSchema", "multipleOf"})
    | frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems", "uniqueItems"}
    )
    | frozenset({"minContains", "maxContains", "required", "minProperties", "maxProperties"})
    | frozenset({"dependentRequired", "dependencies"})
    | APPLICATORS
)
"""Keywords of all drafts of JSON Schema, except those for human readers."""
_OBJECT = frozenset({"type", "properties", "required"})
"""An object that has only these keywords can be closed."""
_ARRAY = frozenset({"type", "items", "prefixItems"})
"""A schema that has only these keywords can be limited to arrays, and a tuple to its length."""


def json_schema_constraint(schema: object, param: str, *, compact: bool = False) -> Constraint:
    """Return the constraint of a schema; an empty schema allows any object. With `compact`, JSON has no whitespace.

    Raises `InvalidRequestError` if it is not a schema or not supported. A `GrammarChecker` may find further errors.
    """
    root = prepared_schema(schema, param, is_of_arguments=False)
    try:
        whitespace = {"whitespace_flexible": False} if compact else {"whitespace_pattern": WHITESPACE}
        options: Any = {"lenient": False, "coerce_one_of": False, **whitespace}
        text = msgspec.json.encode(root).decode()
        return Constraint(LLMatcher.grammar_from_json_schema(text, overrides=options), param)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"'{param}': {str(error) or 'nested too deeply'}", param=param) from error


def prepared_schema(
    schema: object, param: str, *, limits_digits: bool = True, is_of_arguments: bool = True
) -> Schema:
    """Return a copy of a schema that llguidance enforces correctly; raises `InvalidRequestError`.

    Without `limits_digits`, numbers may have as many digits as the schema allows. With `is_of_arguments`, the root
    object is not opened for undeclared names: the format of calls decides about these.
    """
    if schema is True:
        schema = {"type": list(ALL_TYPES)}
    if not isinstance(schema, dict):
        refuse_field(param, "must be a JSON schema, an object")
    try:
        text = msgspec.json.encode(schema)
        # Checked first, because processing takes long for a long schema.
        if len(text.decode()) > MAX_CONSTRAINT_CHARS:
            raise too_long(param)
        root: Schema = msgspec.json.decode(text) or {"type": "object"}
        _check_multiples(root, param)
        _check_intersections(root, param)
        _prepare(root, param, limits_digits=limits_digits, is_of_arguments=is_of_arguments)
        if is_of_arguments:
            _refer_to_definitions(root)
        # Last, because `propertyNames` may have been replaced by properties.
        _check_properties(root, param)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"'{param}': {str(error) or 'nested too deeply'}", param=param) from error
    return root


def _check_multiples(schema: Schema, param: str) -> None:
    total = 0
    for each in subschemas(schema):
        value = each.get("multipleOf")
        if is_number(value):
            number = Decimal(str(value))
            total += int(abs(number.scaleb(max(0, -int(number.as_tuple().exponent)))))
    if total > MAX_MULTIPLE_OF:
        most = f"{MAX_MULTIPLE_OF} (without the decimal point, all of a schema together)"
        refuse_field(param, f": JSON Schema's 'multipleOf' is supported up to {most}")


def _check_properties(schema: Schema, param: str) -> None:
    for each in subschemas(schema):
        properties = each.get("properties")
        if not isinstance(properties, dict):
            continue
        n_optional = len(properties.keys() - set(map(str, list_of(each.get("required")))))
        for n, most, kind in ((len(properties), MAX_PROPERTIES, ""), (n_optional, MAX_OPTIONAL, "optional ")):
            if n > most:
                refuse_field(param, f": an object has {n} {kind}properties (limit: {most})")


def _check_intersections(root: Schema, param: str) -> None:
    """Raise an error if several patterns must match at once, and together have too many states."""
    n_states_of = cache(lambda pattern: 1 + sum(map(int, _COUNTS.findall(pattern))))
    for each in subschemas(root):
        if "allOf" not in each and not ("$ref" in each and "pattern" in each):
            continue
        parts = conjuncts([each], partial(referenced, root=root)) or ()
        patterns = {part["pattern"] for part in parts if isinstance(part.get("pattern"), str)}
        n_states = 1
        for pattern in patterns:
            n_states = min(n_states * n_states_of(pattern), 10**9)
        if len(patterns) > 1 and n_states > MAX_INTERSECTION:
            many = f"{len(patterns)} patterns must match at once ('allOf')"
            refuse_field(
                param, f": {many}, and the product of their repetitions is above {MAX_INTERSECTION}; simplify them"
            )


def _prepare(root: Schema, param: str, *, limits_digits: bool, is_of_arguments: bool) -> None:
    """Remove keywords without effect, rewrite those that llguidance gets wrong, and close objects."""
    root.pop("x-guidance", None)
    resolve = partial(referenced, root=root)
    # Unknown keywords through which a reference leads, such as OpenAPI's `components`, are kept.
    kept = _KEYWORDS | (_names_in_references(root) - _WORDS)
    for each in subschemas(root):
        # llguidance ignores unknown keywords too, except that it refuses circular references beside which one is.
        for name in each.keys() - kept:
            del each[name]
        if isinstance(each.get("format"), str) and each["format"] not in _KNOWN_FORMATS:
            del each["format"]
        kinds = each.get("type", [])
        if not isinstance(kinds, str) and not (
            isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
        ):
            raise ValueError("'type' must be the name of a type, or a list of names")
    todo: list[object] = [root]
    while todo:
        for each in subschemas(todo.pop()):
            remove_vacuous(each, resolve, partial(_shared, root, todo))
            _leave_type_to_alternatives(each, resolve)
    _make_any_of(root, resolve)
    open_ = _open_schemas(root)
    for each in subschemas(root):
        exact_bounds(each)
        if isinstance(each.get("pattern"), str):
            each["pattern"] = _pattern(each["pattern"], param)
        if isinstance(each.get("patternProperties"), dict):
            children = each["patternProperties"].items()
            each["patternProperties"] = {_pattern(name, param): child for name, child in children}
        properties, required = each.get("properties"), each.get("required", [])
        if (
            open_ is not None
            and id(each) not in open_
            and isinstance(properties, dict)
            and each.keys() <= _OBJECT | _ANNOTATIONS
            and isinstance(required, list)
            and all(isinstance(name, str) and name in properties for name in required)
        ):
            each["additionalProperties"] = False
        if open_ is not None and id(each) not in open_:
            _state_type(each)
    if limits_digits:
        _limit_digits(root, is_of_arguments=is_of_arguments)


def _leave_type_to_alternatives(schema: Schema, resolve: Resolve) -> None:
    """Remove a type that all alternatives have as well.

    llguidance refuses unions that contain themselves if they have any other keyword.
    """
    types = _types(schema)
    for name in ("anyOf", "oneOf"):
        options = list_of(schema.get(name))
        if types and options and all(_types(each, resolve) and _types(each, resolve) <= types for each in options):
            schema.pop("type", None)


def _types(schema: object, resolve: Resolve = lambda _: None) -> frozenset[str]:
    """Return the types named by a schema, or by the one to which it refers; empty if none are named."""
    for _ in range(_MAX_HOPS):
        if not isinstance(schema, dict) or "type" in schema:
            break
        schema = resolve(schema.get("$ref"))
    said = schema.get("type", []) if isinstance(schema, dict) else []
    return frozenset([said] if isinstance(said, str) else said)


def _refer_to_definitions(root: Schema) -> None:
    """Make all references lead to definitions.

    Formats that write each argument separately add the definitions to the schema of each. But schemas also use `#`
    for recursion, and `#/properties/a` if two properties are alike.
    """
    definitions: dict[str, str] = {}
    for each in list(subschemas(root)):
        reference = each.get("$ref")
        target = referenced(reference, root)
        if not isinstance(reference, str) or target is None:
            continue
        if names_in(reference)[:1] in (["$defs"], ["definitions"]):
            continue
        if reference not in definitions:
            whole = {name: value for name, value in root.items() if name not in _ANNOTATIONS}
            definitions[reference] = _defined(root, whole if target is root else target)["$ref"]
        each["$ref"] = definitions[reference]


def _limit_digits(root: Schema, *, is_of_arguments: bool) -> None:
    """Limit the digits of all numbers, also in values of any kind, unless a schema might become impossible."""
    schemas = list(subschemas(root))
    combined = _combined_schemas(root)
    is_wide = any(has_wide_numbers(each) for each in schemas if combined is None or id(each) in combined)
    any_value = cache(partial(_any_value, root))
    for each in schemas:
        is_alone = combined is not None and id(each) not in combined
        if is_alone and ("$id" not in each or each is root):
            names = not (is_of_arguments and each is root)
            limit_any_value(each, any_value, each.keys() - _ANNOTATIONS, names=names)
        if is_alone or not is_wide:
            limit_digits(each)


def _any_value(root: Schema) -> Schema:
    """Add a schema that allows any value to the definitions; returns a reference to it."""
    schema: Schema = {"type": list(ALL_TYPES)}
    reference = _defined(root, schema)
    schema |= {"items": reference, "additionalProperties": reference}
    limit_digits(schema)
    return dict(reference)


def _combined_schemas(root: Schema) -> set[int] | None:
    """Return the ids of schemas that apply to the same value as other schemas, and of all schemas in them.

    llguidance merges such schemas, which fails for references to recursive references. None if references make it
    impossible to tell.
    """
    found: set[int] = set()
    for each in subschemas(root):
        if "$ref" in each and (referenced(each["$ref"], root) is None or "$dynamicRef" in each):
            return None
        n_others = len(each.keys() - _ANNOTATIONS) - 1
        patterns = each.get("patternProperties")
        if (
            ({"$ref", *_IN_PLACE} & each.keys() and (n_others or len(list_of(each.get("allOf"))) > 1))
            or (patterns and "properties" in each)
            or (isinstance(patterns, dict) and len(patterns) > 1)
        ):
            _add_all(root, each, found)
    return found


def _add_all(root: Schema, schema: object, found: set[int]) -> None:
    """Add the ids of a schema, of all schemas in it, and of all to which these refer."""
    todo = [schema]
    while todo:
        for each in subschemas(todo.pop(), found):
            found.add(id(each))
            if "$ref" in each:
                todo.append(referenced(each["$ref"], root))


def _make_any_of(root: Schema, resolve: Resolve) -> None:
    """Replace `oneOf` by `anyOf` if its alternatives exclude each other. Must run before they are closed."""
    schemas = list(subschemas(root))
    if any("/oneOf/" in str(each.get("$ref")) for each in schemas):
        return
    judge = Judge(resolve, len(msgspec.json.encode(root)))
    found = [
        each
        for each in schemas
        if isinstance(each.get("oneOf"), list) and "anyOf" not in each and judge.are_exclusive(each["oneOf"])
    ]
    for each in found:
        each["anyOf"] = each.pop("oneOf")


def _state_type(schema: Schema) -> None:
    """Limit a schema to the type that its keywords describe, and a tuple to its length."""
    said = schema.keys() - _ANNOTATIONS
    if {"properties", "additionalProperties"} & said and said <= _OBJECT | {"additionalProperties"}:
        schema.setdefault("type", "object")
    if not {"items", "prefixItems"} & said or not said <= _ARRAY:
        return
    schema.setdefault("type", "array")
    items = list_of(schema.get("prefixItems")) or list_of(schema.get("items"))
    if items and schema["type"] == "array":
        # If `prefixItems` has a tuple, a schema in `items` describes further items.
        schema["minItems"] = len(items)
        if isinstance(schema.get("items"), list) or "items" not in schema:
            schema["maxItems"] = len(items)


def _pattern(pattern: str, param: str) -> str:
    rewritten = ecmascript_pattern(pattern)
    if rewritten is None:
        refuse_field(param, f": a character class in the pattern {pattern!r} is not supported")
    return rewritten


def _open_schemas(root: Schema) -> set[int] | None:
    """Return the ids of schemas that must not be closed; None if references make it impossible to tell."""
    found: set[int] = set()
    todo: list[object] = []
    """Schemas to leave open, with those that apply to the same value."""
    for each in subschemas(root):
        for child in list_of(each.get("oneOf")):
            _add_all(root, child, found)
        todo += list_of(each.get("allOf"))
        if not each.keys() - {"anyOf"} <= _ANNOTATIONS | {"type"}:
            todo += list_of(each.get("anyOf"))
        if "$ref" in each:
            target = referenced(each["$ref"], root)
            if target is None or "$dynamicRef" in each:
                return None
            if not each.keys() - {"$ref"} <= _ANNOTATIONS:
                todo.append(target)
    seen: set[int] = set()
    while todo:
        schema = todo.pop()
        if isinstance(schema, dict) and id(schema) not in seen:
            seen.add(id(schema))
            todo.append(referenced(schema.get("$ref"), root))
            todo += [child for name in _IN_PLACE for child in list_of(schema.get(name))]
    return found | seen


def _names_in_references(root: Schema) -> set[str]:
    """Return the names in all references, even in values that are not schemas."""
    found: set[str] = set()
    todo: list[object] = [root]
    while todo:
        each = todo.pop()
        if isinstance(each, dict):
            todo += each.values()
            if isinstance(reference := each.get("$ref"), str):
                found.update(names_in(reference))
        elif isinstance(each, list):
            todo += each
    return found


def _shared(root: Schema, added: list[object], schema: object) -> object:
    """Add a schema to the definitions and return a reference to it; return a schema as short as that itself."""
    if not isinstance(schema, dict) or not schema or "$ref" in schema:
        return schema
    added.append(schema)
    return _defined(root, schema)


def _defined(root: Schema, schema: object) -> dict[str, str]:
    """Add a schema to the definitions; returns a reference to it."""
    definitions = root.setdefault("$defs", {})
    if not isinstance(definitions, dict):
        raise ValueError("'$defs' must be an object")
    name = next(name for n in itertools.count(len(definitions)) if (name := f"shared-{n}") not in definitions)
    definitions[name] = schema
    return {"$ref": f"#/$defs/{name}"}
