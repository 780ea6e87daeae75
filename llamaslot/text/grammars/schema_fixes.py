"""Keywords of JSON Schema that llguidance 1.9.1 gets wrong, rewritten so that every answer is valid and ends.

Found by comparing it with a validator (`tests/text/test_json_schema.py` does that with generated schemas).
"""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

MAX_NUMBER = 10**18 - 1
"""Numbers without a bound of their own are at most this, and at least its negative."""
_LAST_DIGIT = Decimal("1e-10")
"""llguidance refuses 1e-12 as having too many digits."""
_LIMITS_OF_ITS_OWN = frozenset({"multipleOf", "enum", "const"})
_EXACT_DIGITS = 12
_SMALLEST_STEP = Decimal("0.000001")
_NAMES_CONTROL = re.compile(r"\\x00|\\x\{0+\}|\\u0000|\\u\{0+\}|\\0|\\[pP]\{?(?:gc=|General_Category=)?C|\x00")
"""Ways to write a set of characters that begins with U+0000, or one of control characters."""


def exact_bounds(schema: dict[str, Any]) -> None:
    """Replace bounds that llguidance does not keep by ones a little further in. Integers are not affected.

    It takes `exclusiveMinimum: 1` beside `maximum: 1.5` to include 1, and rounds -3.9000000000000004 to -3.9.
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
    """Limit the digits of numbers, which a model could go on with forever, such as those of 1/3.

    llguidance writes numbers with bounds without an exponent; so are those without bounds then.
    """
    said = schema.get("type")
    kinds = set(said) if isinstance(said, list) and all(isinstance(each, str) for each in said) else {said}
    if kinds.isdisjoint({"integer", "number"}) or not _LIMITS_OF_ITS_OWN.isdisjoint(schema):
        return
    bounds = [_number(schema.get(name)) for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")]
    if any(each is not None and (abs(each) > MAX_NUMBER or each % _LAST_DIGIT) for each in bounds):
        return
    if bounds[:2] == [None, None]:
        schema["minimum"] = -MAX_NUMBER
    if bounds[2:] == [None, None]:
        schema["maximum"] = MAX_NUMBER
    if "number" in kinds:
        schema["multipleOf"] = float(_LAST_DIGIT)


def has_wide_numbers(schema: object) -> bool:
    """Return True if a number anywhere in a schema is beyond the limits of those that have none.

    Beside such a one, the limits could make a schema impossible: `allOf: [{type: number}, {const: 1e30}]`.
    """
    todo = [schema]
    while todo:
        each = todo.pop()
        if isinstance(each, dict):
            # Steps of their own do not go together with those of `limit_digits`.
            if "multipleOf" in each:
                return True
            todo += each.values()
        elif isinstance(each, list):
            todo += each
        elif (number := _number(each)) is not None and (abs(number) > MAX_NUMBER or number % _LAST_DIGIT):
            return True
    return False


def ecmascript_pattern(pattern: str) -> str | None:
    """Return a pattern for llguidance, which reads it as a regular expression of Rust; None if that is impossible.

    - In a class of characters, `[`, `&` and `~` are plain in ECMAScript and operators in Rust.
    - A class with all control characters also lets an escaped quote and an escaped backslash through. So negated
      classes exclude U+0000, and other ones with it are impossible.
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
            # A bracket that follows at once ends the class in ECMAScript, and is a character in Rust.
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
    return None if isinstance(value, bool) or not isinstance(value, int | float) else Decimal(str(value))
