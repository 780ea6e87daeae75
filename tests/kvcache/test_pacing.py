"""The speed of transfers: an average of the newest ones, known for a while only; and that of reads."""

from __future__ import annotations

import pytest

from llamaslot.kvcache.tiers.pacing import MIN_READ_BYTES, RETRY_DELAY_S, ReadRate, TransferRate


def test_the_newest_transfers_count_most() -> None:
    rate = TransferRate()
    assert rate.seconds(0.0) is None
    rate.observe(10, 10.0, 0.0)
    assert rate.seconds(0.0) == 1.0
    rate.observe(10, 20.0, 0.0)
    assert rate.seconds(0.0) == pytest.approx(1.2)


def test_a_rate_is_known_for_a_while() -> None:
    rate = TransferRate()
    rate.observe(10, 10.0, 1.0)
    assert rate.seconds(RETRY_DELAY_S) == 1.0
    assert rate.seconds(1.0 + RETRY_DELAY_S) is None
    rate.observe(10, 30.0, 1.0 + RETRY_DELAY_S)
    assert rate.seconds(1.0 + RETRY_DELAY_S) == 3.0, "what is not known any more is not averaged"
    rate.reset()
    assert rate.seconds(1.0 + RETRY_DELAY_S) is None


def test_a_transfer_that_was_not_waited_for_never_makes_the_rate_faster() -> None:
    rate = TransferRate()
    rate.at_least(10, 20.0, 1.0)
    assert rate.seconds(1.0) == 2.0
    rate.at_least(100, 20.0, 1.0)
    assert rate.seconds(1.0) == 2.0
    rate.at_least(10, 30.0, 1.0)
    assert rate.seconds(1.0) == 3.0


def test_a_read_is_expected_to_take_as_long_as_most_of_the_newest_did() -> None:
    rate, n_bytes = ReadRate(), 10 * MIN_READ_BYTES
    assert rate.seconds is None
    for seconds, expected in ((5.0, 5.0), (1.0, 1.0), (2.0, 2.0), (2.0, 2.0), (9.0, 2.0), (9.0, 2.0), (9.0, 9.0)):
        rate.observe(n_bytes, seconds, 1.0)
        assert rate.seconds == pytest.approx(expected / n_bytes)
    rate.observe(1, 9e9, 2.0)
    assert rate.seconds == pytest.approx(9.0 / n_bytes)


def test_the_speed_of_reads_is_in_doubt_after_few_reads_and_after_a_while() -> None:
    rate = ReadRate()
    for _ in range(2):
        rate.observe(1, 1.0, 1.0)
        assert rate.is_doubtful(1.0)
    rate.observe(1, 1.0, 1.0)
    assert not rate.is_doubtful(RETRY_DELAY_S)
    assert rate.is_doubtful(1.0 + RETRY_DELAY_S)
    assert rate.seconds is not None, "a request need not wait for a guess"
