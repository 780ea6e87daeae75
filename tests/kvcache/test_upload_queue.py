"""The upload queue: order and delay of uploads, retries, and segments that are never sent."""

from __future__ import annotations

import pytest

from llamaslot.kvcache.nodes import Node, Segment, SegmentState
from llamaslot.kvcache.tiers.pacing import PARTIAL_DELAY_S, RETRY_DELAY_S
from llamaslot.kvcache.tiers.segment_tiers import OFFER_AGAIN_S, RETRY_UPLOAD_S, UploadQueue

N = 8


def segment(number: int, n_tokens: int = N, namespace: str = "") -> Segment:
    """A segment at the end of a path of its own."""
    made = Segment(number, 0, n_tokens, 100)
    root = Node(bytearray(), None, 0, namespace)
    made.nodes = [Node(bytearray(4 * n_tokens), root, 0, namespace)]
    return made


def queue() -> UploadQueue:
    return UploadQueue(N, is_on=True)


def upload(uploads: UploadQueue, each: Segment, *, ok: bool = True) -> None:
    """Queue a full segment and upload it, at time 0."""
    uploads.put([each])
    assert uploads.take_due(0.0) == [each]
    uploads.on_uploaded(each.number, 0.0, ok=ok)


def test_full_segments_are_due_at_once_and_partial_ones_later() -> None:
    uploads, full, partial = queue(), segment(1), segment(2, N - 1)
    uploads.put([partial, full])
    assert uploads.take_due(0.0) == [full]
    assert uploads.due_at == PARTIAL_DELAY_S
    assert uploads.take_due(PARTIAL_DELAY_S) == [partial]


def test_at_most_two_are_sent_at_a_time() -> None:
    uploads = queue()
    uploads.put(segment(i) for i in range(3))
    assert len(uploads.take_due(0.0)) == 2
    assert uploads.due_at is None
    uploads.on_uploaded(0, 0.0, ok=True)
    assert len(uploads.take_due(0.0)) == 1


def test_what_is_being_sent_or_stored_is_not_queued_again_for_a_while() -> None:
    uploads, each = queue(), segment(1)
    uploads.put([each])
    assert uploads.take_due(0.0) == [each]
    uploads.put([each])
    assert uploads.take_due(0.0) == []
    uploads.on_uploaded(1, 0.0, ok=True)
    uploads.put([each])
    assert uploads.take_due(1.0) == []
    assert uploads.take_due(OFFER_AGAIN_S) == []
    uploads.put([each])
    assert uploads.take_due(OFFER_AGAIN_S) == [each]


def test_after_a_failure_nothing_is_due_for_a_while() -> None:
    uploads, each = queue(), segment(1)
    uploads.put([each])
    uploads.take_due(0.0)
    uploads.on_uploaded(1, 5.0, ok=False)
    assert uploads.due_at == 5.0 + RETRY_DELAY_S, "or an idle engine would plan again and again"
    assert uploads.take_due(6.0) == []
    assert uploads.take_due(5.0 + RETRY_DELAY_S) == [each]


def test_a_store_that_does_not_answer_pauses_uploads_and_may_have_lost_what_it_had() -> None:
    uploads, stored, waiting = queue(), segment(1), segment(2)
    upload(uploads, stored)
    uploads.put([waiting])
    uploads.pause(30.0)
    assert uploads.due_at == 30.0
    uploads.put([stored])
    assert uploads.take_due(30.0) == [waiting, stored]


def test_a_failed_upload_or_a_cleared_store_has_all_offered_again() -> None:
    uploads, stored, failed = queue(), segment(1), segment(2)
    upload(uploads, stored)
    upload(uploads, failed, ok=False)
    uploads.put([stored])
    assert uploads.take_due(RETRY_DELAY_S) == [failed, stored]
    for each in (1, 2):
        uploads.on_uploaded(each, RETRY_DELAY_S, ok=True)
    uploads.offer_all_again()
    uploads.put([stored])
    assert uploads.take_due(RETRY_DELAY_S) == [stored]


def test_what_cannot_be_put_together_is_tried_a_few_times() -> None:
    uploads, each = queue(), segment(1)
    uploads.put([each])
    now, n_tries = 0.0, 0
    while uploads.take_due(now):
        n_tries += 1
        uploads.postpone(each, now)
        assert uploads.take_due(now) == []
        now += RETRY_UPLOAD_S
    assert 1 < n_tries < 10
    uploads.put([each])
    assert uploads.take_due(now) == [each]


def test_private_segments_and_those_that_left_ram_are_not_sent() -> None:
    uploads, private, gone = queue(), segment(1, namespace="request x"), segment(2)
    uploads.put([private, gone])
    gone.state = SegmentState.DISK
    uploads.remove(gone)
    assert uploads.take_due(0.0) == []
    uploads.put([gone])
    assert uploads.due_at is None


def test_without_a_store_it_stays_empty() -> None:
    uploads = UploadQueue(N, is_on=False)
    uploads.put([segment(1)])
    assert uploads.due_at is None


def test_at_shutdown_everything_is_due() -> None:
    uploads, partial = queue(), segment(1, N - 1)
    uploads.put([partial])
    uploads.flush()
    assert uploads.take_due(0.0) == [partial]


def test_what_waits_for_a_store_that_is_gone_is_not_gone_through_with_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uploads = queue()
    uploads.put(segment(i) for i in range(3))
    uploads.pause(50.0)
    assert uploads.take_due(1.0) == []
    monkeypatch.setattr(uploads, "_due_at", None)
    assert uploads.due_at == 50.0
