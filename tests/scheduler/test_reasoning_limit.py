"""The limit of reasoning: what is forced, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llamaslot.base.generation.tools import ReasoningBudget
from llamaslot.scheduler.request import ReasoningLimit

START, END, AFTER = (1, 2), (3, 1, 4), (9,)


def replies(n: int, sampled: list[int], *, is_open: bool) -> list[int]:
    """The reply that sampled tokens and forced ones make."""
    limit = ReasoningLimit(ReasoningBudget(n, START, END, AFTER, is_open))
    reply: list[int] = []
    for token in sampled:
        reply += (token, *limit.add((token,)))
    return reply


def test_the_end_tag_is_forced_behind_the_last_token_that_may_reason() -> None:
    assert replies(2, [7, 7, 7, 7], is_open=True) == [7, 7, *END, *AFTER, 7, 7]
    assert replies(2, [5, 1, 2, 7, 7, 7], is_open=False) == [5, 1, 2, 7, 7, *END, *AFTER, 7]
    assert replies(0, [7, 7], is_open=True) == [7, *END, *AFTER, 7]
    assert replies(0, [1, 2, 7], is_open=False) == [1, 2, *END, *AFTER, 7]


def test_a_tag_that_has_begun_is_completed() -> None:
    assert replies(3, [7, 3, 1, 7], is_open=True) == [7, 3, 1, 4, *AFTER, 7]


def test_reasoning_that_ends_in_time_is_left_alone() -> None:
    assert replies(5, [7, *END, *([7] * 20)], is_open=True) == [7, *END, *([7] * 20)]
    assert replies(2, [7] * 20, is_open=False) == [7] * 20
    assert replies(3, [*END, 7], is_open=True) == [*END, 7]


@given(st.lists(st.integers(1, 5), max_size=40), st.integers(0, 12), st.booleans())
def test_reasoning_is_never_longer(sampled: list[int], n: int, is_open: bool) -> None:
    reply = replies(n, sampled, is_open=is_open)
    text = "".join(map(str, reply))
    start = 0 if is_open else text.find("12") + 2
    reasons = is_open or "12" in text
    if reasons:
        end = text.find("314", start)
        assert (end if end >= 0 else len(text)) - start <= max(n, 1)
    if "9" not in text:
        assert reply == sampled
