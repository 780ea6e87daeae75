"""Random JSON schemas, and random texts that a constraint allows."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeAlias

from llguidance import LLMatcher

from llamaslot.backend.constraints import next_mask
from tests.fake_backend import EOS, N_VOCAB

Schema: TypeAlias = dict[str, Any]

_NAMES = ("a", "b", "name", "x y", '"', "é", "a/b", "count")
_VALUES = ("red", "b c", '"q"', "é", 1, 2.5, -3, None, True, {"x": 1}, [1, 2])
_PATTERNS = (
    *("^a+$", "^[a-z]{2,4}$", "^(x|y)?z$", r"^\d{3}-\d{2}$", '^[^"]{1,5}$', r"^[^\\,]{2}$", "^(a|ab)c{0,3}$"),
    *(r"^\w{1,6}$", "^.$", r"[A-Z]\d$"),
)


class SchemaMaker:
    """Draws schemas: nested ones, `enum`, `anyOf`, `$ref`, patterns, ranges, `additionalProperties`.

    With `is_rough`, also such as cannot be satisfied or are not supported, and texts without a limit of length.
    """

    def __init__(self, seed: int, *, is_rough: bool = False) -> None:
        self._random = random.Random(seed)
        self._is_rough = is_rough

    def schema(self) -> Schema:
        """Return a schema with two definitions that it may refer to."""
        definitions = {"A": self._schema(2), "B": self._schema(2)}
        return {**self._schema(0), "$defs": definitions}

    def _schema(self, depth: int) -> Schema:
        flat = [self._string, self._integer, self._number, self._enum, self._pattern, self._any_type]
        nested = [self._object, self._object, self._array, self._any_of, self._reference]
        rough = [self._all_of, self._one_of, self._tuple, self._unbounded, self._beside]
        kinds = flat if depth > 2 else [*flat, *nested, *nested, *(rough if self._is_rough else ())]
        if depth == 0 and not self._is_rough:
            kinds = nested
        return self._random.choice(kinds)(depth)

    def _string(self, _: int) -> Schema:
        least = self._random.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + self._random.randint(0, 6)}

    def _integer(self, _: int) -> Schema:
        least = self._random.randint(-200, 200)
        below, above = self._bounds()
        return {"type": "integer", below: least, above: least + self._random.randint(2, 500)}

    def _number(self, _: int) -> Schema:
        least = round(self._random.uniform(-5, 5), self._random.randint(0, 2))
        below, above = self._bounds()
        return {"type": "number", below: least, above: least + self._random.choice([0.5, 1, 2.25, 100])}

    def _bounds(self) -> tuple[str, str]:
        below = self._random.choice(["minimum", "exclusiveMinimum"])
        return below, self._random.choice(["maximum", "exclusiveMaximum"])

    def _enum(self, _: int) -> Schema:
        return {"enum": self._random.sample(_VALUES, self._random.randint(1, 4))}

    def _pattern(self, _: int) -> Schema:
        return {"type": "string", "pattern": self._random.choice(_PATTERNS[: None if self._is_rough else -1])}

    def _any_type(self, _: int) -> Schema:
        return self._random.choice([{"type": "boolean"}, {"type": "null"}, {"const": self._random.choice(_VALUES)}])

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(_NAMES, self._random.randint(0, 4))
        schema: Schema = {"type": "object", "properties": {name: self._schema(depth + 1) for name in names}}
        schema["required"] = [name for name in names if self._random.random() < 0.5]
        more = self._random.random()
        if more < 0.4:
            schema["additionalProperties"] = False
        elif more < 0.5:
            schema |= {"additionalProperties": self._schema(3)} if self._is_rough else {}
        return schema

    def _array(self, depth: int) -> Schema:
        least = self._random.randint(0, 2)
        most = least + self._random.randint(0, 3)
        return {"type": "array", "items": self._schema(depth + 1), "minItems": least, "maxItems": most}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._schema(depth + 1) for _ in range(self._random.randint(1, 3))]}

    def _reference(self, depth: int) -> Schema:
        return {"$ref": f"#/$defs/{self._random.choice('AB')}"} if depth < 2 else self._enum(depth)

    def _all_of(self, depth: int) -> Schema:
        return {"allOf": [self._schema(depth + 1) for _ in range(self._random.randint(1, 2))]}

    def _one_of(self, depth: int) -> Schema:
        return {"oneOf": [self._schema(depth + 1) for _ in range(self._random.randint(1, 3))]}

    def _tuple(self, depth: int) -> Schema:
        schema: Schema = {"type": "array", "prefixItems": [self._schema(depth + 1)], "minItems": 1}
        return schema | self._random.choice([{}, {"items": False}, {"items": self._schema(3)}])

    def _unbounded(self, _: int) -> Schema:
        return self._random.choice(
            [
                *({"type": "string"}, {}, {"type": "object"}, {"type": "array"}, {"exclusiveMinimum": 1}),
                {"type": ["string", "null"], "minimum": 3},
                {"type": "number", "multipleOf": self._random.choice([2, 7, 0.5])},
                {"type": "object", "patternProperties": {"^p": {"type": "null"}}, "additionalProperties": False},
                {"type": "string", "format": self._random.choice(["date", "ipv4", "uuid"])},
            ]
        )

    def _beside(self, depth: int) -> Schema:
        """A schema that has more than one kind of keywords."""
        return self._schema(depth + 1) | self._schema(depth + 1)


def random_text(matcher: LLMatcher, choice: random.Random, most: int = 600) -> bytes | None:
    """Return a text over bytes that a matcher of `FakeBackend`'s vocabulary allows; None if it does not end."""
    text = bytearray()
    for _ in range(most):
        mask = next_mask(matcher, N_VOCAB)
        assert not matcher.is_error(), matcher.get_error()
        allowed = set(mask.tokens.tolist()) if mask.is_allowed else set(range(N_VOCAB)) - set(mask.tokens.tolist())
        if EOS in allowed and (len(allowed) == 1 or choice.random() < 0.5):
            return bytes(text)
        token = _next(allowed - {EOS}, choice)
        text.append(token)
        assert matcher.consume_token(token)
    return None


def _next(allowed: set[int], choice: random.Random) -> int:
    """Return one of the allowed bytes: often one that ends a value, rarely one that cannot be seen."""
    preferences: tuple[tuple[float, Callable[[int], bool]], ...] = (
        (0.3, lambda byte: byte in b'"]}'),
        (0.95, lambda byte: 32 <= byte < 127),
    )
    for share, is_preferred in preferences:
        preferred = sorted(filter(is_preferred, allowed))
        if preferred and choice.random() < share:
            return choice.choice(preferred)
    return choice.choice(sorted(allowed))
