"""Verifying a draft chooses as often, and gives the same tokens, as going on token by token."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llamaslot.base.backend import NO_TOKEN, Run, accepted

EOS = 9
TOKENS = st.integers(0, 4)


class Reply:
    """Chosen tokens, each with those that are forced after it."""

    def __init__(self, parts: list[tuple[int, list[int]]]) -> None:
        self._parts = parts
        self.n_chosen = self.n_forced = 0

    def choose(self, row: int) -> int:
        assert row == sum(1 + len(forced) for _, forced in self._parts[: self.n_chosen]), "another row"
        assert self.n_forced == self.n_chosen, "chosen before the forced tokens"
        if self.n_chosen == len(self._parts):
            return NO_TOKEN
        self.n_chosen += 1
        return self._parts[self.n_chosen - 1][0]

    def force(self) -> tuple[int, ...]:
        if self.n_forced == self.n_chosen:
            return ()
        self.n_forced += 1
        return tuple(self._parts[self.n_chosen - 1][1])


@given(
    st.lists(st.tuples(TOKENS, st.lists(TOKENS, max_size=3)), min_size=1, max_size=5),
    st.lists(TOKENS, max_size=12),
    st.integers(0, 12),
    st.booleans(),
)
def test_a_draft_is_followed_by_the_choices_and_forced_tokens_of_single_steps(
    parts: list[tuple[int, list[int]]], draft: list[int], n_right: int, ends: bool
) -> None:
    if ends:
        *before, (last, forced) = parts
        parts = [*before, (last, [*forced, EOS])]
    whole = [token for chosen, forced in parts for token in (chosen, *forced)]
    draft = [*whole[:n_right], *draft]
    reply = Reply(parts)
    tokens = list(accepted(draft, frozenset({EOS}), reply.choose, reply.force))
    tokens += reply.force()
    n_same = next((i for i, (a, b) in enumerate(zip(draft, whole, strict=False)) if a != b), None)
    n_same = min(len(draft), len(whole)) if n_same is None else n_same
    # Whole parts: up to the one with the first token that the draft has not, if there is one before the end.
    ends_of_parts = [*accumulate(1 + len(forced) for _, forced in parts)]
    assert tokens == whole[: next((end for end in ends_of_parts if end > n_same), len(whole))]
    assert reply.n_chosen == sum(
        end - 1 - len(forced) < len(tokens) for end, (_, forced) in zip(ends_of_parts, parts, strict=True)
    )
    run = Run(0, 5, np.array([7, *draft], dtype=np.int32), n_outputs=1 + len(draft))
    assert run.n_accepted(tokens) == min(n_same, len(tokens) - 1)


def test_a_row_that_fails_is_left_to_the_next_step_unless_it_is_the_first() -> None:
    assert accepted([1, 2, 3], frozenset(), lambda row: [1, 2, NO_TOKEN][row], lambda: ()) == (1, 2)
    assert accepted([1], frozenset(), lambda _: NO_TOKEN, lambda: ()) == (NO_TOKEN,)
