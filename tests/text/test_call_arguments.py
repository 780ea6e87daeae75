"""Arguments of calls become objects, whatever a client sends back of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaslot.text.conversation import parsed_arguments

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1, "b": "é"}', {"a": 1, "b": "é"}),
        ("", {}),
        (" ", {}),
        ("null", {}),
        ("{", {}),
        ('{"', {}),
        ('{"city', {}),
        ('{"city"', {}),
        ('{"city": ', {}),
        ('{"city": "', {"city": ""}),
        ('{"city": "Zü', {"city": "Zü"}),
        ('{"city": "Zürich"', {"city": "Zürich"}),
        ('{"city": "Zürich", ', {"city": "Zürich"}),
        ('{"city": "Zürich", "days": 3', {"city": "Zürich"}),
        ('{"city": "Zürich", "days": 3,', {"city": "Zürich", "days": 3}),
        ('{"city": "Zürich", "now": tru', {"city": "Zürich"}),
        ('{"list": [1, 2', {"list": [1]}),
        ('{"list": [{"a": "b"}, {"c": "d', {"list": [{"a": "b"}, {"c": "d"}]}),
        ('{"a": "} ] \\"', {"a": '} ] "'}),
        ('{"a": "x\\', {"a": "x"}),
        ('{"a": "x\\\\', {"a": "x\\"}),
        ('{"a": "x\\\\\\', {"a": "x\\"}),
        ('{"a": "x\\u00e', {"a": "x"}),
        ('{"a": "x\\\\u00e', {"a": "x\\u00e"}),
        ('{"a": "x\\ud83d', {"a": "x"}),
        ('{"a": "x\\ud83d\\ude0', {"a": "x"}),
        ('{"a": "x\\ud83d\\ude00', {"a": "x😀"}),
        ("[1, 2]", {"arguments": [1, 2]}),
        ("5", {"arguments": 5}),
        ("5 x", {"arguments": "5 x"}),
        ("not JSON", {"arguments": "not JSON"}),
        ("{a: 5}", {"arguments": "{a: 5}"}),
        ("{'a': 5}", {"arguments": "{'a': 5}"}),
        ('{"a": 5}}', {"arguments": '{"a": 5}}'}),
        ('{"a": [5}', {"arguments": '{"a": [5}'}),
    ],
)
def test_arguments_are_an_object(text: str, expected: dict[str, Any]) -> None:
    assert parsed_arguments(text) == expected


def test_arguments_that_are_nested_too_deep_are_a_text() -> None:
    text = '{"a": ' + "[" * 100_000
    assert parsed_arguments(text) == {"arguments": text}


def is_begun(value: Any, whole: Any) -> bool:
    """True if a value is the beginning of another one."""
    if isinstance(value, dict) and isinstance(whole, dict):
        fields = list(value.items())
        assert [name for name, _ in fields] == list(whole)[: len(fields)]
        return all(each == whole[name] for name, each in fields[:-1]) and all(
            is_begun(each, whole[name]) for name, each in fields[-1:]
        )
    if isinstance(value, list) and isinstance(whole, list):
        return value[:-1] == whole[: len(value)][:-1] and all(map(is_begun, value[-1:], whole[len(value) - 1 :]))
    return whole.startswith(value) if isinstance(value, str) and isinstance(whole, str) else value == whole


@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans(), st.data())
def test_cut_arguments_have_what_stands_before_the_cut(whole: Any, ascii_only: bool, data: st.DataObject) -> None:
    text = json.dumps(whole, ensure_ascii=ascii_only)
    cut = text[: data.draw(st.integers(1, len(text)))]
    assert is_begun(parsed_arguments(cut), whole)
    assert parsed_arguments(text) == whole
    parsed_arguments(cut + data.draw(st.text()))
