"""Copying what models write as JSON: valid JSON unchanged, anything else made valid."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaslot.formats.json_value import PYTHON_QUOTES, QUOTES, ValueCopier
from llamaslot.formats.reader import Machine, Markers, Reader, Steps

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def copied(text: str, quotes: Sequence[str] = QUOTES) -> tuple[str, str]:
    """The copy of a value, and the text behind it, read a character at a time."""
    reader = Reader()
    copy: list[str] = []
    rest: list[str] = []

    def steps() -> Steps[None]:
        yield from ValueCopier(reader, copy.append, quotes=quotes).copy()
        yield from reader.until(Markers([]), rest.append)

    machine = Machine(reader, steps())
    for char in text:
        machine.feed(char)
    machine.end()
    return "".join(copy), "".join(rest)


@given(value=VALUES, ascii_only=st.booleans(), indent=st.sampled_from([None, 0, 2]))
def test_json_is_copied_unchanged(value: object, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps([value], ensure_ascii=ascii_only, indent=indent)
    assert copied(text + " ]}, rest") == (text, " ]}, rest")


@pytest.mark.parametrize(
    ("text", "value", "rest"),
    [
        ("{a: 1, 'b-c': True,}", {"a": 1, "b-c": True}, ""),
        ('{"a": "x\ny\t\x01"}', {"a": "x\ny\t\x01"}, ""),
        ('{"a": "\\d \\\' \\x41 \\u12g"}', {"a": "\\d ' A \\u12g"}, ""),
        ("{'a': 'it\\'s \"q\"', 'b': (1, 2,)}", {"a": 'it\'s "q"', "b": [1, 2]}, ""),
        ('{"a": ,"b":}', {"a": None, "b": None}, ""),
        ('{"a": "b" "c": 1}', {"a": "b", "c": 1}, ""),
        ('{"a": [1, {"b": 2</x>', {"a": [1, {"b": 2}]}, "</x>"),
        ('{"a": [1, 2}, 3', {"a": [1, 2]}, ", 3"),
        ('{"a" "b"}', {}, '"b"}'),
        ("[1, .5, 2., +3, 007, 1e5, NaN, x]", [1, 0.5, 2.0, 3, 7, 1e5, "NaN", "x"], ""),
        ("[,1,,2,]", [1, 2], ""),
        ('{\u3000"a":\xa0"\xa0",\u2028\x0b"b":\x85[\x1c] }', {"a": "\xa0", "b": []}, ""),
        ("{a b: 1, c d :2}", {"a b": 1, "c d": 2}, ""),
    ],
)
def test_mistakes_are_corrected(text: str, value: object, rest: str) -> None:
    copy, behind = copied(text)
    assert (json.loads(copy), behind) == (value, rest)


@pytest.mark.parametrize(
    ("text", "copy"),
    [('{"a": 1', '{"a":'), ('{"a": "x\\', '{"a": "x'), ('{"a": "\\u00', '{"a": "'), ("[tru", "["), ('{"a', "{")],
)
def test_what_may_be_cut_is_left_out_at_the_end_of_the_text(text: str, copy: str) -> None:
    assert copied(text) == (copy, "")


def test_strings_may_have_pythons_three_quotes() -> None:
    assert copied('["""a "b"\n""", \'\', ""]', PYTHON_QUOTES)[0] == '["a \\"b\\"\\n", "", ""]'


@given(text=st.text("{}[]()\"'\\:, \n1a-.<", max_size=40))
def test_a_value_with_text_behind_it_is_valid(text: str) -> None:
    copy, rest = copied("{" + text + "<" + text)
    if rest:
        assert isinstance(json.loads(copy), dict)
