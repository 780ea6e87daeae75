"""The speed of transfers: an average of the newest ones, known for a while only."""

from __future__ import annotations

import pytest

from llamaslot.kvcache.tiers.pacing import RETRY_DELAY_S, TransferRate


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
