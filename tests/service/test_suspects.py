"""Suspects are remembered until they run to their end, and refused for ten minutes if they ran alone."""

from __future__ import annotations

import pytest

from llamaslot.base.commands import GenerateParams
from llamaslot.base.errors import UnavailableError
from llamaslot.base.tokens import TokenizedPrompt
from llamaslot.service import limits as module
from llamaslot.service.limits import Suspects, request_digest


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_convict_is_refused_for_ten_minutes_and_runs_alone_after_them() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    suspects.add(b"a")
    assert suspects.check(b"a")
    suspects.refuse(b"a")
    clock.now += 599
    with pytest.raises(UnavailableError, match="1 more minute") as refusal:
        suspects.check(b"a")
    assert refusal.value.retry_after == 1
    clock.now += 1
    assert suspects.check(b"a")
    suspects.clear(b"a")
    assert not suspects.check(b"a")


def test_a_suspect_that_is_accused_again_stays_refused() -> None:
    suspects = Suspects(Clock())
    suspects.refuse(b"a")
    suspects.add(b"a")
    with pytest.raises(UnavailableError):
        suspects.check(b"a")


def test_the_oldest_are_forgotten_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_SUSPECTS", 2)
    suspects = Suspects(Clock())
    for digest in (b"a", b"b", b"c"):
        suspects.add(digest)
    assert [suspects.check(digest) for digest in (b"a", b"b", b"c")] == [False, True, True]


def test_requests_are_recognized_by_namespace_and_tokens() -> None:
    def digest(salt: str, tokens: bytes) -> bytes:
        return request_digest(GenerateParams("any", cache_salt=salt), TokenizedPrompt(tokens))

    assert digest("", b"1234") == digest("", b"1234")
    assert len({digest("", b"1234"), digest("", b"12345678"), digest("a", b"1234")}) == 3
