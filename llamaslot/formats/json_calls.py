"""Reading calls that are JSON objects, such as `{"name": "f", "arguments": {...}}`.

A call is reported once its name is known and its arguments begin; the arguments are then passed on as they arrive.
If they come before the name, they are held back until it is known. An unclosed object without arguments is not
reported: its arguments may have been about to follow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from llamaslot.formats.calls import is_object
from llamaslot.formats.json_value import QUOTES, ValueCopier, copy_arguments, copy_string
from llamaslot.formats.message import Output
from llamaslot.formats.reader import Machine, Reader, Steps

_ARGUMENT_KEYS = ("arguments", "parameters")
_ID_KEYS = ("id", "tool_call_id", "call_id")
_TEXT_KEYS = ("name", "function", "type", *_ID_KEYS)
_WRAPPER_KEYS = ("function", "tool_call", "tool_calls")
_CALL_KEYS = (*_ARGUMENT_KEYS, "name", "type", *_WRAPPER_KEYS)
"""Keys that distinguish a call from an answer in JSON."""


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Reads calls from `reader` to `output`.

    With `only`, an object is a call only if it names one of these tools and has only fields that calls have. This
    is needed where no marker distinguishes calls from an answer in JSON. `ids` is a pattern of valid ids, for
    formats with ids: there the id comes after the arguments, so a call is reported only when it is complete.
    """

    reader: Reader
    output: Output
    only: Collection[str] | None = None
    ids: re.Pattern[str] | None = None

    def read_all(self) -> Steps[bool]:
        """Read one object or a list of them; return False if the first is not a call (nothing is reported then)."""
        if (yield from self.reader.accept("[")):
            return (yield from self.read_items())
        return (yield from self.read())

    def read_items(self) -> Steps[bool]:
        """Read a list after its opening bracket; return False if the first object is not a call."""
        return (yield from read_list(self.reader, self.output, self.read))

    def read(self) -> Steps[bool]:
        """Read one object; return False if it is not a call (nothing is reported then)."""
        return _Call(self).read()


def read_list(reader: Reader, output: Output, read_call: Callable[[], Steps[bool]]) -> Steps[bool]:
    """Read calls separated by commas, up to a closing bracket; return False if the first item is not a call."""
    n_calls = output.n_calls
    while True:
        yield from reader.whitespace()
        mark = reader.mark()
        is_call = yield from read_call()
        rejected = reader.release(mark)
        if not is_call:
            if output.n_calls == n_calls:
                return False
            output.rejected(rejected)
            return True
        yield from reader.whitespace()
        if not (yield from reader.accept(",")):
            yield from reader.accept("]")
            return True


class _Call:
    """Reads one call and keeps the fields read so far."""

    def __init__(self, calls: JsonCalls) -> None:
        self._calls = calls
        self._reader, self._output, self._only, self._ids = calls.reader, calls.output, calls.only, calls.ids
        self._name: str | None = None
        self._id: str | None = None
        self._arguments: str | None = None
        self._reported = False
        self._n_calls_before = calls.output.n_calls

    def read(self) -> Steps[bool]:
        closed = yield from self._object()
        if self._only is not None and self._id is not None and self._name is self._arguments is None:
            self._reader.is_undecided = False  # An id alone decides nothing: answers in JSON have ids, too.
        if not self._reported and self._name is not None and (closed or self._arguments is not None):
            self._report()
            self._output.arguments(self._arguments or "{}")
            self._output.end_call(was_closed=not closed)
        return self._output.n_calls > self._n_calls_before

    def _report(self) -> None:
        self._reported = True
        valid = self._ids is not None and self._id is not None and self._ids.fullmatch(self._id)
        self._output.call(self._name or "", self._id if valid else None)

    def _object(self) -> Steps[bool]:
        """Read the fields; return True if the object was closed."""
        if not (yield from self._reader.accept("{")):
            return False
        while True:
            yield from self._reader.whitespace()
            end = yield from self._reader.accept("}", ",")
            if end == "}":
                return True
            if end:
                continue
            key = yield from self._string(_CALL_KEYS if self._name is None else (*_CALL_KEYS, *_ID_KEYS))
            yield from self._reader.whitespace()
            if key is None or not (yield from self._reader.accept(":")):
                return False
            yield from self._reader.whitespace()
            if not (yield from self._field(key)):
                return False

    def _field(self, key: str) -> Steps[bool]:
        """Read the value of a field; return False if the object cannot be a call."""
        quoted = yield from self._reader.looking_at(*QUOTES)
        if key in _ARGUMENT_KEYS and self._arguments is None and not self._reported:
            return (yield from self._read_arguments(quoted))
        if quoted and key in _TEXT_KEYS:
            text = yield from self._string(self._possible_texts(key))
            return text is not None and self._take_text(key, text)
        if key in _WRAPPER_KEYS and self._name is None:
            return (yield from self._wrapped())
        if self._only is not None and key not in _ID_KEYS:
            return False
        return (yield from ValueCopier(self._reader, lambda _: None).copy())

    def _string(self, possible: Iterable[str] | None) -> Steps[str | None]:
        """Read a string; return None if there is none or the text ends inside it.

        Without a marker, the object can only be a call while the string may still become one of `possible` (None:
        any string).
        """
        raw: list[str] = []
        quote = yield from self._reader.accept(*QUOTES)
        if quote and (yield from copy_string(self._reader, quote, raw.append)):
            return str(json.loads(f'"{"".join(raw)}"'))
        begun = "".join(raw)
        if self._only is not None and possible is not None and not any(each.startswith(begun) for each in possible):
            self._reader.is_undecided = False
        return None

    def _possible_texts(self, key: str) -> Iterable[str] | None:
        """Return the values of a field that only a call has, not an answer; None for any value."""
        if key == "type":
            return ("function",)
        if key in _ID_KEYS:
            return () if self._name is None else None
        return self._only

    def _take_text(self, key: str, text: str) -> bool:
        """Keep the text of a field; return False if the object cannot be a call."""
        if key in _ID_KEYS:
            self._id = text
        elif key == "type":
            return text == "function" or self._only is None
        elif self._name is None:
            self._name = text
            return self._only is None or text in self._only
        return True

    def _read_arguments(self, quoted: str) -> Steps[bool]:
        if quoted:
            text = yield from self._string(None)
            self._arguments = _as_object(text)
            return self._arguments is not None
        if (yield from self._reader.accept("null", "None")):
            self._arguments = "{}"
            return True
        if (yield from self._reader.peek()) != "{":
            return False
        if self._name is not None and self._ids is None:
            self._report()
            return (yield from copy_arguments(self._reader, self._output))
        parts: list[str] = []
        complete = yield from ValueCopier(self._reader, parts.append).copy()
        self._arguments = "".join(parts) if complete else None
        return complete

    def _wrapped(self) -> Steps[bool]:
        """Read a call, or a list of calls, that is the value of a field."""
        if (yield from self._reader.peek()) == "[":
            return (yield from self._calls.read_all())
        return (yield from self._object())


def _as_object(text: str | None) -> str | None:
    """Return `text` as valid JSON if it is an object, else None: some models write arguments as a string."""
    if text is None or not is_object(text):
        return None
    # `json` also accepts `NaN`, which is not JSON; `ValueCopier` corrects it.
    reader, parts = Reader(), list[str]()
    machine = Machine(reader, ValueCopier(reader, parts.append).copy())
    machine.feed(text)
    machine.end()
    return "".join(parts)
