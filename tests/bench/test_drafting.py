"""`python -m bench drafting`: replies replayed with the drafts of a policy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench import synthetic
from bench.drafting import GPU_COST, KINDS, POLICIES, Text, record, replayed, step_ms
from bench.quoting import CHAT, REWRITE, ChainPrompts
from bench.steps import backend_settings
from bench.tokens import Tokens
from llamaslot.backend.llama import LlamaBackend
from llamaslot.base.model import StepCost
from tests.fake_backend import FakeBackend

INFO = FakeBackend(n_ctx=4096).info
CPU_COST = StepCost(step_us=4800, token_us=3800, token_cell_us=4.5, block_us=252_000, block_cell_us=101)
"""Only drafts that fill a query block gain much."""
SCALE = 0.1


class Scripted:
    """Drafts of a script, one for each step."""

    def __init__(self, *drafts: Sequence[int]) -> None:
        self.draft, *self._next = drafts
        self.seen: list[tuple[list[int], int]] = []

    def observe(self, taken: Sequence[int], n_drafted: int, ms: float) -> None:
        self.seen.append((list(taken), n_drafted))
        self.draft = self._next.pop(0) if self._next else []


def texts(n: int = 12) -> list[Text]:
    """Replies that have pieces of their prompt and others, with nothing else in common."""
    chance = random.Random(1)
    found = []
    for _ in range(n):
        prompt = chance.choices(range(10_000), k=600)
        reply: list[int] = []
        while len(reply) < 300:
            at, length = chance.randrange(500), chance.choice((5, 30, 100))
            reply += prompt[at : at + length] + chance.choices(range(10_000), k=chance.choice((1, 10)))
        found.append(Text(REWRITE, False, prompt, reply))
    return found


def test_a_step_takes_the_accepted_part_of_its_draft_and_one_more_token() -> None:
    policy = Scripted([], [2, 3, 9], [5, 6, 7, 8])
    text = Text(REWRITE, False, [0] * 10, [1, 2, 3, 4, 5, 6])
    found = replayed(text, policy, GPU_COST)
    assert policy.seen == [([1], 0), ([2, 3, 4], 3), ([5, 6], 1)]
    assert (found.n_drafted, found.n_accepted) == (4, 3)
    assert found.ms == pytest.approx(sum(step_ms(GPU_COST, n, at) for n, at in ((1, 10), (4, 11), (2, 14))))
    assert found.plain_ms == pytest.approx(sum(step_ms(GPU_COST, 1, 10 + i) for i in range(6)))


@pytest.mark.parametrize("cost", [CPU_COST, GPU_COST])
def test_no_choice_is_better_than_the_perfect_one(cost: StepCost) -> None:
    for text in texts():
        found = {name: replayed(text, make(INFO, cost, text), cost) for name, make in POLICIES.items()}
        perfect = found["perfect"]
        assert perfect.ms <= min(perfect.plain_ms, *(each.ms for each in found.values())) * 1.02
        assert perfect.ms < 0.95 * perfect.plain_ms


def test_llamaslot_gains_most_of_what_can_be_gained_where_drafts_are_cheap() -> None:
    own, best = (
        sum(replayed(text, POLICIES[name](INFO, GPU_COST, text), GPU_COST).ms for text in texts())
        for name in ("llamaslot", "perfect")
    )
    assert own < 1.15 * best


def test_nothing_is_gained_or_lost_where_nothing_is_repeated() -> None:
    chance = random.Random(2)
    text = Text(CHAT, True, chance.choices(range(10_000), k=300), chance.choices(range(10_000), k=200))
    for make in POLICIES.values():
        found = replayed(text, make(INFO, GPU_COST, text), GPU_COST)
        assert (found.ms, found.n_drafted) == (found.plain_ms, 0)


def test_replies_are_recorded_as_the_model_gives_them(tmp_path: Path) -> None:
    path = synthetic.ensure("tiny", folder=tmp_path, is_chain=True)
    backend = LlamaBackend(backend_settings(path, ["-c", "1024", "-np", "1", "-fa", "on", "-t", "1"]))
    try:
        found = record(backend, ChainPrompts(Tokens(path).n_vocab, SCALE), 1)
        assert backend.seq_len(0) == 0
    finally:
        backend.close()
    assert [(each.kind, each.sampled) for each in found] == [(kind, s) for kind in KINDS for s in (False, True)]
    for each in found:
        expected = np.arange(len(each.reply)) + each.prompt[-1] + 1
        assert each.reply == expected.tolist()
