"""Verifying a draft chooses as often, and gives the same tokens, as going on token by token."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llamaslot.base.backend import NO_TOKEN, Run, accepted

EOS = 9
TOKENS = st.integers(0, 4)
Parts = list[tuple[int, list[int]]]
"""A reply: chosen tokens, each with those that are forced after it."""
ENDS = st.sampled_from([[], [(EOS, [])], [(0, [EOS])]])


class Reply:
    """Gives the tokens of a reply, and checks that they are asked for as in single steps."""

    def __init__(self, parts: Parts) -> None:
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
    ENDS,
    st.integers(0, 12),
    st.lists(TOKENS, max_size=12),
)
def test_a_draft_is_followed_by_the_choices_and_forced_tokens_of_single_steps(
    parts: Parts, end: Parts, n_right: int, others: list[int]
) -> None:
    parts = [*parts, *end]
    draft = [*[token for chosen, forced in parts for token in (chosen, *forced)][:n_right], *others]
    expected: list[int] = []
    n_chosen = 0
    for chosen, forced in parts:
        has_row = len(expected) <= len(draft) and expected == draft[: len(expected)]
        if not has_row or EOS in expected:
            break
        expected += [chosen, *forced]
        n_chosen += 1
    reply = Reply(parts)
    tokens = accepted(draft, frozenset({EOS}), reply.choose, reply.force)
    # As `Sampler.advance` does after the last chosen token.
    assert [*tokens, *reply.force()] == expected
    assert reply.n_chosen == n_chosen
    run = Run(0, 5, np.array([7, *draft], dtype=np.int32), n_outputs=1 + len(draft))
    n_kept = run.n_accepted(tokens)
    assert draft[:n_kept] == expected[:n_kept]
    assert n_kept == len(tokens) - 1 or draft[n_kept : n_kept + 1] != [tokens[n_kept]]


def test_a_row_that_fails_is_left_to_the_next_step_unless_it_is_the_first() -> None:
    assert accepted([1, 2, 3], frozenset(), lambda row: [1, 2, NO_TOKEN][row], lambda: ()) == (1, 2)
    assert accepted([1], frozenset(), lambda _: NO_TOKEN, lambda: ()) == (NO_TOKEN,)


def test_nothing_is_chosen_after_a_token_that_ends_the_reply() -> None:
    assert accepted([EOS, 2], frozenset({EOS}), lambda row: [EOS][row], lambda: ()) == (EOS,)
    assert accepted([1, EOS, 2], frozenset({EOS}), lambda row: [1][row], lambda: (EOS,)) == (1, EOS)
