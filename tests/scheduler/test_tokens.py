"""The token buffer against a list."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llamaslot.scheduler.request import TokenBuffer

runs = st.lists(st.integers(0, 9), max_size=200)


@given(runs, runs)
def test_buffer_behaves_like_a_list(first: list[int], then: list[int]) -> None:
    given = np.array(first, dtype=np.int32)
    buffer, expected = TokenBuffer(given), list(first)
    for token in then:
        buffer.append(token)
        expected.append(token)
        assert len(buffer) == len(expected)
        assert buffer.view(2, 5).tolist() == expected[2:5]
    assert buffer.view().tolist() == expected
    assert given.tolist() == first


def test_a_view_survives_growth() -> None:
    buffer = TokenBuffer(np.array([1, 2, 3], dtype=np.int32))
    view = buffer.view()
    for token in range(1000):
        buffer.append(token)
    assert view.tolist() == [1, 2, 3]
