"""The chunk sizer keeps about to its gap, whatever the machine's speed."""

from __future__ import annotations

import pytest

from llamaslot.base.model import QUERY_BLOCK
from llamaslot.scheduler.chunk_sizer import ChunkSizer


def taught(
    *, decode_ms: float, token_ms: float, gap_ms: float = 100.0, n_ubatch: int = 512, unified: bool = True
) -> ChunkSizer:
    sizer = ChunkSizer(n_ubatch=n_ubatch, gap_ms=gap_ms, unified=unified)
    for _ in range(20):
        sizer.observe(256, 0, 256 * token_ms / 1e3)
        sizer.observe(0, 4, decode_ms / 1e3)
        sizer.observe(64, 4, (decode_ms + 64 * token_ms) / 1e3)
    return sizer


def test_a_prompt_beside_no_stream_takes_the_whole_micro_batch() -> None:
    assert taught(decode_ms=10, token_ms=1).limit(0) == 512


@pytest.mark.parametrize(("decode_ms", "token_ms"), [(1, 0.2), (10, 0.5), (30, 2.0), (45, 1.0), (20, 4.0)])
def test_beside_streams_the_step_ends_about_when_the_gap_does(decode_ms: float, token_ms: float) -> None:
    chunk = taught(decode_ms=decode_ms, token_ms=token_ms).limit(4)
    half = QUERY_BLOCK / 2 * token_ms
    assert 100 - half <= decode_ms + chunk * token_ms <= 100 + half or chunk in (QUERY_BLOCK - 4, 508)
    assert decode_ms + chunk * token_ms <= 150


def test_chunks_fill_whole_query_blocks_together_with_the_streams() -> None:
    for n_decoding in (*range(1, 9), 64, 65, 130):
        assert (taught(decode_ms=10, token_ms=0.5).limit(n_decoding) + n_decoding) % QUERY_BLOCK == 0


def test_the_fixed_cost_of_a_step_is_told_from_the_cost_of_its_tokens() -> None:
    # 40 ms for any prompt at all and 0.2 ms for each of its tokens: of 90 ms allowed, 50 are left for 250 of them.
    sizer = ChunkSizer(n_ubatch=512, gap_ms=100)
    for _ in range(100):
        sizer.observe(0, 4, 0.01)
        for n in (64, 380):
            sizer.observe(n, 4, (10 + 40 + 0.2 * n) / 1e3)
    assert sizer.limit(4) == 4 * QUERY_BLOCK - 4


def test_expensive_small_steps_do_not_make_the_next_ones_smaller_still() -> None:
    # What the attention of llama.cpp costs on a CPU: 3 ms for each token of a small step, 0.6 ms in a larger one.
    sizer = taught(decode_ms=40, token_ms=0.6)
    for n in (40, 30, 17, 16, 16, 16, 16, 16):
        sizer.observe(n, 4, (40 + 3 * n) / 1e3)
    assert sizer.limit(4) == 2 * QUERY_BLOCK - 4


def test_large_chunks_come_back_after_a_slow_period() -> None:
    """A machine where small steps cost 2 ms a token and large ones 0.6, six times as much for a while."""
    sizer = taught(decode_ms=40, token_ms=0.6)
    for _ in range(5):
        sizer.observe(30, 4, (40 + 2 * 30) / 1e3)

    def step(slower: float) -> int:
        n = sizer.limit(4)
        added = (0.6 * slower if n + 4 >= QUERY_BLOCK else 2.0) * n
        sizer.observe(n, 4, (40 + added) / 1e3)
        return n

    for _ in range(30):
        step(6.0)
    assert step(1.0) < QUERY_BLOCK - 4
    assert max(step(1.0) for _ in range(300)) >= QUERY_BLOCK - 4
    assert step(1.0) == 2 * QUERY_BLOCK - 4


def test_steps_with_few_prompt_tokens_do_not_change_the_estimates() -> None:
    sizer = taught(decode_ms=10, token_ms=0.5)
    before = sizer.limit(4)
    for _ in range(50):
        sizer.observe(2, 4, 0.5)
        sizer.observe(2, 0, 0.5)
    assert sizer.limit(4) == before
    assert sizer.seconds(100) == pytest.approx(0.05)


def test_chunks_stay_small_where_a_query_block_takes_far_too_long() -> None:
    assert taught(decode_ms=100, token_ms=50).limit(4) == 16


def test_the_cost_of_decoding_is_learned_for_each_number_of_streams() -> None:
    sizer = taught(decode_ms=10, token_ms=0.5)
    for _ in range(20):
        sizer.observe(0, 8, 0.05)
    assert sizer.limit(8) < sizer.limit(4)


def test_a_faster_machine_takes_larger_chunks() -> None:
    limits = [taught(decode_ms=10, token_ms=t).limit(4) for t in (4.0, 1.0, 0.5, 0.25)]
    assert limits == sorted(limits)
    assert len(set(limits)) == len(limits)


def test_a_slow_decode_may_be_doubled_by_prefill() -> None:
    assert taught(decode_ms=200, token_ms=2).limit(4) == 2 * QUERY_BLOCK - 4


def test_chunks_are_small_before_anything_was_measured() -> None:
    assert ChunkSizer(n_ubatch=512, gap_ms=100).limit(1) == 16


def test_a_chunk_never_exceeds_what_the_micro_batch_has_left() -> None:
    sizer = ChunkSizer(n_ubatch=8, gap_ms=100)
    assert sizer.limit(7) == 1
    assert sizer.limit(0) == 8


def test_in_a_partitioned_pool_a_prompt_fills_whole_query_blocks_while_streams_wait() -> None:
    for n_waiting in (*range(1, 9), 63, 64, 65):
        sizer = taught(decode_ms=10, token_ms=0.5, unified=False)
        assert sizer.limit(0, n_waiting=n_waiting) == 3 * QUERY_BLOCK
    assert sizer.block(0) == QUERY_BLOCK


def test_prompts_between_two_steps_of_streams_share_the_gap() -> None:
    sizer = taught(decode_ms=10, token_ms=0.5, unified=False)
    limits = [sizer.limit(0, n_waiting=4, waited_s=waited) for waited in (None, 0.0, 0.032, 0.06, 0.085, 0.091)]
    assert limits == [3 * QUERY_BLOCK, 3 * QUERY_BLOCK, 2 * QUERY_BLOCK, QUERY_BLOCK, 0, 0]


def test_streams_that_have_waited_do_not_wait_for_the_smallest_chunk_where_that_takes_too_long() -> None:
    sizer = taught(decode_ms=10, token_ms=5.0, unified=False)
    assert sizer.limit(0, n_waiting=4, waited_s=0.03) == 16
    assert sizer.limit(0, n_waiting=4, waited_s=0.04) == 0


def test_a_rest_is_not_added_to_a_chunk_that_streams_wait_for_already() -> None:
    apart = ChunkSizer(n_ubatch=512, gap_ms=100.0, unified=False)
    assert apart.without_short_rest(64, 100, 0) == 100
    assert apart.without_short_rest(64, 100, 0, may_grow=False) == 64
    assert apart.without_short_rest(128, 150, 0, may_grow=False) == 64


def test_streams_that_take_the_gap_alone_wait_for_one_step_of_a_prompt() -> None:
    sizer = taught(decode_ms=200, token_ms=2, unified=False)
    assert sizer.limit(0, n_waiting=4) >= QUERY_BLOCK
    assert sizer.limit(0, n_waiting=4, waited_s=1e-3) == 0


@pytest.mark.parametrize(
    ("limit", "n_left", "n_decoding", "expected"),
    [
        (128, 128, 0, 128),
        (128, 400, 0, 128),
        (128, 129, 0, 64),
        (128, 191, 0, 64),
        (128, 192, 0, 128),
        (64, 65, 0, 65),
        (64, 127, 0, 127),
        (64, 128, 0, 64),
        (512, 540, 0, 448),
        (512, 576, 0, 512),
        (16, 40, 2, 16),
        (16, 80, 2, 16),
    ],
)
def test_in_a_partitioned_pool_no_short_rest_is_left_of_a_prompt(
    limit: int, n_left: int, n_decoding: int, expected: int
) -> None:
    apart, unified = (ChunkSizer(n_ubatch=512, gap_ms=100.0, unified=each) for each in (False, True))
    assert apart.without_short_rest(limit, n_left, n_decoding) == expected
    assert unified.without_short_rest(limit, n_left, n_decoding) == limit


def test_no_chunk_exceeds_the_micro_batch_for_want_of_a_short_rest() -> None:
    apart = ChunkSizer(n_ubatch=64, gap_ms=100.0, unified=False)
    assert apart.without_short_rest(64, 70, 0) == 64
    assert apart.without_short_rest(62, 63, 2) == 62


def test_what_prompts_cost_beside_streams_is_learned_anew_in_another_layout() -> None:
    sizer = taught(decode_ms=10, token_ms=3.0)
    for _ in range(20):
        sizer.observe(512, 0, 512 * 0.1e-3)
    slow = sizer.limit(4)
    sizer.set_layout(unified=False)
    assert sizer.limit(4) > 4 * slow
