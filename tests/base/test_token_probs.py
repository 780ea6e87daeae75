"""Packed probabilities are what was packed, also between processes."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from llamaslot.base.generation.token_probs import NOT_SCORED, TokenProbs, TokenScore

ids = st.integers(0, 2**31 - 1)
values = st.floats(-1e4, 0, width=32)


@st.composite
def scores(draw: st.DrawFn) -> TokenScore:
    top = draw(st.lists(st.tuples(ids, values), max_size=4))
    return TokenScore(draw(ids), draw(values), [token for token, _ in top], [value for _, value in top])


@given(st.lists(scores(), max_size=6))
def test_what_was_packed_comes_out(given: list[TokenScore]) -> None:
    packed = TokenProbs.of(given, lambda token: b"<%d>" % token if token % 3 else b"")
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=TokenProbs)
    assert [(row.token, row.value) for row in received] == [(each.token, each.value) for each in given]
    for row, score in zip(received, given, strict=True):
        assert [each.token for each in row.top] == score.top_tokens
        assert [each.value for each in row.top] == score.top_values
    for row in received:
        for each in (row, *row.top):
            assert each.piece == (b"<%d>" % each.token if each.token % 3 else b"")


def test_a_token_without_a_score_has_none() -> None:
    [row] = TokenProbs.of([TokenScore(5, NOT_SCORED)], lambda token: b"x")
    assert (row.value, row.top) == (None, [])
    assert math.isnan(NOT_SCORED)
