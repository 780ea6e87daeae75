"""Drafts: where they are found, how long they are, and that replies stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamaslot.base.commands import GenerateParams
from llamaslot.base.generation.tools import ReasoningBudget
from llamaslot.base.model import ModelInfo, StateKind, StepCost
from llamaslot.base.tokens import Tokens
from llamaslot.kvcache.cache import KVCache
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.scheduler.chunk_sizer import ChunkSizer
from llamaslot.scheduler.drafter import (
    LENGTHS,
    MAX_MATCH,
    MAX_SEARCHES,
    MIN_MATCH,
    MIN_MATCH_ELSEWHERE,
    SEARCH_EVERY,
    Drafter,
    prompt_lookup,
)
from llamaslot.scheduler.request import NO_TOKENS, Acceptance, Request
from llamaslot.text.grammars.json_schema import json_schema_constraint
from tests.fake_backend import FakeBackend
from tests.scheduler.test_scheduler import Driver, TimedBackend, generated, tokenized

INFO = FakeBackend(n_ctx=1024, n_spare_rows=64).info
STEP_S, TOKEN_S = 0.016, 0.001
"""Seconds of a step of decodes, and those that each drafted token adds."""


pieces = st.lists(st.integers(0, 2), min_size=1, max_size=90)
texts = st.builds(lambda piece, n, end: piece * n + end, pieces, st.integers(1, 4), st.just([]) | pieces)
"""Some have many occurrences of their last tokens, some of which are longer than what is compared."""


@given(tokens=texts, n=st.integers(1, 70))
@example(tokens=[1, 0] * 40 + [2, 0], n=3)
@example(tokens=[2, 0, 0, 0] + [1, 0, 0, 0] * 40 + [2, 0, 0, 0], n=3)
def test_prompt_lookup_follows_the_longest_and_latest_earlier_occurrence(tokens: list[int], n: int) -> None:
    n_matched, follows = prompt_lookup(np.array(tokens, dtype=np.int32), n)

    def matched(end: int) -> int:
        lengths = range(1, min(end, MAX_MATCH) + 1)
        return max((k for k in lengths if tokens[end - k : end] == tokens[-k:]), default=0)

    best = max(((matched(end), end) for end in range(1, len(tokens))), default=(0, 0))
    assert n_matched == best[0]
    if not n_matched:
        assert not len(follows)
        return
    text = tokens[:]
    for _ in range(n):
        text.append(text[best[1] + len(text) - len(tokens)])
    assert follows.tolist() == text[len(tokens) :]


def drafter(*, token_s: float = TOKEN_S, n_streams: Sequence[int] = range(1, 9), info: ModelInfo = INFO) -> Drafter:
    """A drafter that has seen steps of decodes, and what a prompt token costs beside them."""
    sizer = ChunkSizer(n_ubatch=512, gap_ms=100.0)
    for n in n_streams:
        sizer.observe(0, n, STEP_S)
    sizer.observe(32, 1, STEP_S + 32 * token_s)
    return Drafter(info, sizer, KVCache(CacheSettings(n_slots=1, n_cells=1024, n_seqs=1, gap_ms=100.0)))


def request(text: str, *, max_draft: int = LENGTHS[-1], **fields: Any) -> Request:
    params = GenerateParams("r", max_draft=max_draft, **fields)
    return Request(params, tokenized(text), arrival=0, now=0.0)


def letters(n: int, seed: int = 1) -> str:
    return "".join(map(chr, np.random.default_rng(seed).integers(97, 123, n)))


@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=150), cut=st.integers(0, 149))
def test_no_lookup_is_left_out_that_finds_enough(tokens: list[int], cut: int) -> None:
    """Also after a context shift at some token."""
    proposing, asked = drafter(), request("x")
    for i, token in enumerate(tokens):
        asked.add_token(token, 0.0)
        if i == cut:
            asked.shift(1, 1 + (len(asked.tokens) - 1) // 2)
        n_matched, follows = proposing._find(asked, 20)
        expected = prompt_lookup(asked.tokens.view(), 20)
        if max(n_matched, expected[0]) >= MIN_MATCH:
            assert (n_matched, follows.tolist()) == (expected[0], expected[1].tolist())


def test_few_lookups_are_made_in_text_that_repeats_little(monkeypatch: pytest.MonkeyPatch) -> None:
    n_lookups, n_tokens = 0, 800

    def counted(tokens: Tokens, n: int) -> tuple[int, Tokens]:
        nonlocal n_lookups
        n_lookups += 1
        return prompt_lookup(tokens, n)

    monkeypatch.setattr("llamaslot.scheduler.drafter.prompt_lookup", counted)
    proposing, asked = drafter(), request(letters(100))
    for letter in letters(n_tokens, 2):
        asked.add_token(ord(letter), 0.0)
        proposing.propose([asked])
    assert n_tokens / MIN_MATCH <= n_lookups < n_tokens / 4


def drafted(proposing: Drafter, *requests: Request) -> list[int]:
    has_drafts = proposing.propose(requests)
    lengths = [len(each.draft) for each in requests]
    assert has_drafts == any(lengths)
    return lengths


def test_a_repeated_text_is_drafted_as_it_went_on() -> None:
    text = letters(100)
    for n_repeated in (MIN_MATCH, 20, 50):
        asked = request(text + text[:n_repeated])
        (n,) = drafted(drafter(), asked)
        assert n
        assert asked.draft.tolist() == [ord(each) for each in (text + text)[n_repeated : n_repeated + n]]


def test_a_longer_repetition_has_a_longer_draft() -> None:
    text = letters(200)
    matched = MIN_MATCH, 16, 64
    lengths = [drafted(drafter(token_s=TOKEN_S / 4), request(text + text[:n]))[0] for n in matched]
    assert lengths == sorted(set(lengths))
    assert set(lengths) <= set(LENGTHS)


def test_nothing_is_drafted_after_a_short_match_or_where_drafts_are_off() -> None:
    text = letters(100)
    assert drafted(drafter(), request(text + text[: MIN_MATCH - 1])) == [0]
    assert drafted(drafter(), request(text + text[:30], max_draft=0)) == [0]
    assert drafted(drafter(), request(text + text[:30], max_draft=5)) == [5]


def test_nothing_is_drafted_under_a_grammar_before_limited_reasoning_ends() -> None:
    text = letters(100)
    budget = ReasoningBudget(20, (), (46, 46), is_open=True)
    constraint = json_schema_constraint({}, "json_schema")
    asked = request(text + text[:30], constraint=constraint, reasoning_budget=budget)
    assert drafted(drafter(), asked) == [0]
    assert asked.reasoning_limit is not None
    asked.reasoning_limit.add([46, 46])
    assert drafted(drafter(), asked) != [0]


def test_the_length_is_that_with_the_most_tokens_per_second() -> None:
    """Not that with the largest gain: where a token costs more than a third of a step, short drafts are faster."""
    text = letters(200)
    for share, n in ((0.005, 63), (0.04, 31), (0.4, 7)):
        assert drafted(drafter(token_s=share * STEP_S), request(text + text[:64])) == [n]


def test_drafts_are_no_longer_than_a_recurrent_state_can_go_back_and_all_as_long() -> None:
    info = FakeBackend(n_ctx=1024, n_spare_rows=64, kind=StateKind.HYBRID, n_rollback=7).info
    text = letters(200)
    repeating = request(text + text[:64]), request(text + text[:50])
    assert drafted(drafter(info=info), repeating[0]) == [7]
    assert drafted(drafter(info=info), *repeating) == [7, 7]
    assert drafted(drafter(info=info), *repeating, request(text + text[:50], max_draft=2)) == [2, 2, 2]
    assert drafted(drafter(info=info), *repeating, request(letters(10, 2))) == [0, 0, 0]


def test_nothing_is_drafted_before_the_time_of_a_step_is_known() -> None:
    text = letters(100)
    assert drafted(drafter(n_streams=()), request(text + text[:30])) == [0]


def test_nothing_is_drafted_that_takes_longer_than_single_steps() -> None:
    text = letters(100)
    assert drafted(drafter(token_s=1.2 * STEP_S), request(text + text[:50])) == [0]


def test_what_a_draft_took_counts_more_than_the_estimate() -> None:
    text = letters(100)
    proposing, asked = drafter(), request(text + text[:50])
    (n,) = drafted(proposing, asked)
    for _ in range(10):
        proposing.observe(n, 1, 150, STEP_S + 2 * n * STEP_S)
    assert drafted(proposing, asked)[0] not in {0, n}
    for length in 10 * LENGTHS:
        proposing.observe(length, 1, 150, STEP_S + 2 * length * STEP_S)
    assert drafted(proposing, asked) == [0]
    # As after a disturbance: after a while they are tried again.
    n_steps = next(i for i in range(10_000) if drafted(proposing, asked)[0])
    assert n_steps > 100
    proposing.set_model(INFO)
    assert drafted(proposing, asked) == [n]
    # One step that was disturbed ends no drafts.
    proposing.observe(n, 1, 150, 2 * STEP_S + n * TOKEN_S)
    assert drafted(proposing, asked)[0]


def test_rejected_drafts_end_drafting_until_more_is_repeated() -> None:
    text = letters(200)
    proposing, asked = drafter(), request(text + text[:MIN_MATCH])
    asked.count_draft(60, 60)
    n_rejected = 0
    while drafted(proposing, asked)[0] and n_rejected < 20:
        asked.count_draft(len(asked.draft), 0)
        n_rejected += 1
    assert 1 < n_rejected < 15
    assert (asked.n_drafted > 60, asked.n_accepted) == (True, 60)
    # A long match is tried all the same.
    other = request(text + text[:60])
    other.acceptance = asked.acceptance
    assert drafted(proposing, other)[0]


def test_the_estimate_is_a_probability() -> None:
    acceptance = Acceptance()
    for right in (0, 3, 63, 63, 63, 0, 0, 0):
        acceptance.add(63, right)
        assert 0 < acceptance.rate(MIN_MATCH) < acceptance.rate(MAX_MATCH) < 1


def test_nobody_waits_for_drafts_much_longer_than_they_gain() -> None:
    texts = [letters(150, seed) for seed in range(8)]
    repeating = [request(text + text[:60]) for text in texts]
    lengths = drafted(drafter(), *repeating)
    assert len({*lengths}) == 1
    assert lengths[0] > sum(lengths) * TOKEN_S / STEP_S > 1
    # One that repeats nothing is delayed by a tenth of a step at most.
    *lengths, n_other = drafted(drafter(token_s=TOKEN_S / 20), *repeating[:7], request(texts[7]))
    assert 0 < sum(lengths) * TOKEN_S / 20 <= 0.1 * STEP_S
    assert not n_other
    assert not any(drafted(drafter(), *repeating[:7], request(texts[7])))
    # Alone, a longer step delays nobody else.
    assert drafted(drafter(token_s=STEP_S / 2), repeating[0])[0] > 1


def test_estimates_are_those_of_measured_steps() -> None:
    text = letters(100)
    costly = StepCost(
        step_us=1e6 * STEP_S, token_us=2e6 * STEP_S, token_cell_us=0.0, block_us=1e9, block_cell_us=0.0
    )
    proposing, asked = drafter(), request(text + text[:50])
    proposing.set_model(msgspec.structs.replace(INFO, step_cost=costly))
    assert drafted(proposing, asked) == [0]


class CopyingBackend(TimedBackend):
    """A model that repeats the first `PERIOD` tokens again and again, with a change in each repetition.

    The changed token depends on all that the sequence holds, so a cell that should have been removed is noticed.
    """

    PERIOD = 40

    def _logits(self, seq: int) -> int:
        seen = self.seen(seq)
        n = len(seen)
        is_change = n % (self.PERIOD + 1) == 0
        if is_change or n < self.PERIOD or [position for position, _ in seen] != list(range(n)):
            return super()._logits(seq)
        _, token = seen[n - self.PERIOD]
        index = self.alphabet.index(token)
        return index * self._eos_every + 1


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("n_streams", [1, 3])
def test_a_reply_that_repeats_its_prompt_takes_fewer_steps_and_is_the_same(n_streams: int, unified: bool) -> None:
    replies, n_steps = [], []
    for max_draft in (0, 63):
        backend = CopyingBackend(n_slots=4, n_ctx=4096, n_ubatch=256, n_spare_rows=64, unified=unified)
        driver = Driver(backend=backend)
        prompts = [letters(CopyingBackend.PERIOD, seed) for seed in range(n_streams)]
        asked = [driver.submit(each, max_tokens=200, max_draft=max_draft) for each in prompts]
        driver.finish(*asked)
        replies.append([generated(each) for each in asked])
        n_steps.append(len(driver.plans))
        stats = driver.scheduler.cache_stats().speculation
        assert stats.drafted_tokens == sum(each.n_drafted for each in asked)
        assert stats.accepted_tokens == sum(each.n_accepted for each in asked)
        assert bool(stats.drafts) == (max_draft > 0)
    assert replies[0] == replies[1]
    assert n_steps[1] < (0.5 if n_streams == 1 else 0.8) * n_steps[0]


def test_multi_step_decode_ends_only_for_a_draft() -> None:
    backend = CopyingBackend(n_slots=4, n_ctx=4096, n_ubatch=256, n_spare_rows=64)
    driver = Driver(backend=backend)
    asked = driver.submit(letters(CopyingBackend.PERIOD), max_tokens=100, max_draft=63)
    for _ in range(60):
        plan = driver.step()
        assert driver.scheduler.has_drafts == bool(len(asked.draft))
        assert not (plan.n_extra_steps and any(work.run.n_drafted for work in plan.work))


def test_a_prompt_that_was_answered_before_is_answered_in_fewer_steps() -> None:
    """By the tree, and only within the namespace: another tenant's reply is never drafted."""
    driver = Driver(n_slots=2, n_ctx=1024, n_ubatch=128, n_spare_rows=64)
    first = driver.run("a prompt", max_tokens=60)
    n_first = len(driver.plans)
    again = driver.run("a prompt", max_tokens=60, max_draft=63)
    assert generated(again) == generated(first)
    assert len(driver.plans) - n_first < n_first / 3
    assert again.n_accepted > 40
    other = driver.run("a prompt", max_tokens=60, max_draft=63, cache_salt="another tenant")
    assert generated(other) == generated(first)
    assert not other.n_drafted
    private = driver.run("a prompt", max_tokens=60, max_draft=63, cache_prompt=False)
    assert not private.n_drafted


class RecitingBackend(TimedBackend):
    """A model that says the same text after any prompt, which ends with "|"."""

    TEXT = letters(300)

    def _logits(self, seq: int) -> int:
        seen = [token for _, token in self.seen(seq)]
        n_said = seen[::-1].index(ord("|")) if ord("|") in seen else 0
        return self.alphabet.index(ord(self.TEXT[n_said])) * self._eos_every + 1


def test_a_text_of_another_conversation_is_drafted_within_the_namespace() -> None:
    driver = Driver(backend=RecitingBackend(n_slots=4, n_ctx=2048, n_ubatch=128, n_spare_rows=64))
    replies = []
    for prompt, fields in [
        ("first|", {}),
        ("another prompt|", {}),
        ("a third one|", {}),
        ("one of another tenant|", {"cache_salt": "another"}),
        ("a private one|", {"cache_prompt": False}),
    ]:
        n_before = len(driver.plans)
        n_matched, _ = driver.cache.search("", tokenized(RecitingBackend.TEXT[:16]).tokens, 16, 1)
        assert n_matched or not replies, "the text that others must not draft is gone"
        asked = driver.run(prompt, max_tokens=200, max_draft=63, **fields)
        replies.append((generated(asked), len(driver.plans) - n_before, asked.n_accepted))
        assert not asked.n_drafted or not fields
    assert all(reply == [ord(each) for each in RecitingBackend.TEXT[:200]] for reply, _, _ in replies)
    assert [n_accepted > 150 for _, _, n_accepted in replies] == [False, True, True, False, False]
    assert replies[1][1] < replies[0][1] / 2


@pytest.mark.parametrize("n_prompt", [5, 200])
def test_other_conversations_are_searched_for_generated_tokens_and_seldom(
    n_prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they have them or not, unless a draft was right: if it does not pay, nothing is gained by it."""
    proposing, asked = drafter(token_s=2 * STEP_S), request(letters(n_prompt))
    searched = []

    def find_some(_cache: KVCache, _namespace: str, last: Tokens, n_least: int, n: int) -> tuple[int, Tokens]:
        searched.append((asked.n_generated, len(last)))
        return (n_least, tokenized(letters(n, 3)).tokens) if len(searched) % 2 else (0, NO_TOKENS)

    monkeypatch.setattr(KVCache, "search", find_some)
    for letter in letters(100, 2):
        asked.add_token(ord(letter), 0.0)
        assert drafted(proposing, asked) == [0]
    due = [*range(MIN_MATCH_ELSEWHERE, 101, SEARCH_EVERY)]
    assert searched == [(n, min(n, MAX_MATCH)) for n in due]
    for n_accepted in (6, 7):
        asked.count_draft(7, n_accepted)
        asked.add_token(ord("?"), 0.0)
        proposing.propose([asked])
    assert [n for n, _ in searched] == [*due, 102]


def test_few_requests_are_searched_for_after_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    proposing = drafter(n_streams=range(1, 17))
    requests = [request(letters(50, seed)) for seed in range(10)]
    steps: list[list[str]] = []

    def find_nothing(_cache: KVCache, _namespace: str, last: Tokens, _n_least: int, _n: int) -> tuple[int, Tokens]:
        steps[-1].append("".join(map(chr, last.tolist())))
        return 0, NO_TOKENS

    monkeypatch.setattr(KVCache, "search", find_nothing)
    texts = [letters(30, 100 + i) for i in range(len(requests))]
    for at in range(30):
        for each, text in zip(requests, texts, strict=True):
            each.add_token(ord(text[at]), 0.0)
        steps.append([])
        proposing.propose(requests)
    assert [len(each) for each in steps[:19]] == [0] * 15 + [MAX_SEARCHES, MAX_SEARCHES, 2, 0]
    # Each of them once.
    firsts = [last[:16] for each in steps[:19] for last in each]
    assert sorted(firsts) == sorted(text[:16] for text in texts)


def test_a_reply_that_goes_on_otherwise_leaves_the_path_of_the_first() -> None:
    driver = Driver(n_slots=2, n_ctx=1024, n_ubatch=128, n_spare_rows=64)
    first = driver.run("a prompt", max_tokens=60)
    forked = driver.run("a prompt" + "".join(map(chr, generated(first)[:20])) + "?", max_tokens=60, max_draft=63)
    assert not forked.n_drafted
    # Only what was sampled is in the tree.
    match = driver.match("a prompt" + "".join(map(chr, generated(first))))
    assert match.n_cached == len("a prompt") + 59
