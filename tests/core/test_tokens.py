"""The token buffer against a list, and the prefix comparison against a loop."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llamaslot.core.tokens import TokenBuffer, common_prefix

runs = st.lists(st.integers(0, 2), max_size=40)


@given(st.lists(st.one_of(st.integers(0, 9), runs, st.tuples(st.integers(0, 100)))))
def test_buffer_behaves_like_a_list(actions: list[int | list[int] | tuple[int]]) -> None:
    buffer, expected = TokenBuffer(), []
    for action in actions:
        if isinstance(action, tuple):
            buffer.truncate(action[0])
            expected = expected[: action[0]]
        elif isinstance(action, list):
            buffer.extend(np.array(action, dtype=np.int32))
            expected += action
        else:
            buffer.append(action)
            expected.append(action)
        assert buffer.view().tolist() == expected
        assert len(buffer) == len(expected)
        assert buffer.view(2, 5).tolist() == expected[2:5]


def test_a_view_survives_growth() -> None:
    buffer = TokenBuffer([1, 2, 3])
    view = buffer.view()
    for token in range(1000):
        buffer.append(token)
    assert view.tolist() == [1, 2, 3]


@given(runs, runs)
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    assert common_prefix(np.array(a, dtype=np.int32), np.array(b, dtype=np.int32)) == n
