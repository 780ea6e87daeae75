"""The chunk sizer keeps the gap it was given, whatever the machine's speed."""

from __future__ import annotations

import pytest

from llamaslot.core.chunking import ChunkSizer


def taught(*, decode_ms: float, token_ms: float, gap_ms: float = 100.0, n_ubatch: int = 512) -> ChunkSizer:
    sizer = ChunkSizer(n_ubatch=n_ubatch, gap_ms=gap_ms)
    for _ in range(20):
        sizer.observe(256, 0, 256 * token_ms / 1e3)
        sizer.observe(0, 4, decode_ms / 1e3)
        sizer.observe(64, 4, (decode_ms + 64 * token_ms) / 1e3)
    return sizer


def test_alone_a_prompt_takes_the_whole_micro_batch() -> None:
    assert taught(decode_ms=10, token_ms=1).limit(0) == 512


@pytest.mark.parametrize(("decode_ms", "token_ms"), [(1, 0.2), (10, 0.5), (30, 2.0), (45, 1.0)])
def test_beside_streams_the_step_ends_within_the_gap(decode_ms: float, token_ms: float) -> None:
    chunk = taught(decode_ms=decode_ms, token_ms=token_ms).limit(4)
    assert 0.9 * 100 <= decode_ms + chunk * token_ms <= 100 or chunk in (16, 508)


def test_a_faster_machine_takes_larger_chunks() -> None:
    limits = [taught(decode_ms=10, token_ms=t).limit(4) for t in (4.0, 2.0, 1.0, 0.5, 0.25)]
    assert limits == sorted(limits)
    assert len(set(limits)) == len(limits)


def test_a_slow_decode_may_be_doubled_by_prefill() -> None:
    assert taught(decode_ms=200, token_ms=2).limit(4) == pytest.approx(100, abs=1)


def test_before_anything_was_seen_chunks_are_small() -> None:
    assert ChunkSizer(n_ubatch=512, gap_ms=100).limit(1) == 16


def test_a_chunk_never_exceeds_what_the_micro_batch_has_left() -> None:
    sizer = ChunkSizer(n_ubatch=8, gap_ms=100)
    assert sizer.limit(7) == 1
    assert sizer.limit(0) == 8
