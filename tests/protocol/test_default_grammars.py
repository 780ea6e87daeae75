"""Grammars of requests that bring none."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from llamaslot.base.commands import Constraint
from llamaslot.protocol.request_reader import default_grammars


def test_requests_that_are_read_at_once_get_different_grammars() -> None:
    grammars = [Constraint(f'start: "{i}"', "grammar") for i in range(4000)]
    default = default_grammars(grammars)
    barrier = threading.Barrier(4)

    def taken() -> list[Constraint | None]:
        barrier.wait(10)
        return [next(default, None) for _ in range(1001)]

    with ThreadPoolExecutor(4) as threads:
        found = [each for thread in [threads.submit(taken) for _ in range(4)] for each in thread.result()]
    assert sorted(each.grammar for each in found if each) == sorted(each.grammar for each in grammars)
    assert found.count(None) == 4


def test_a_single_grammar_is_for_all_requests() -> None:
    grammar = Constraint('start: "a"', "grammar")
    default = default_grammars([grammar])
    assert [next(default, None) for _ in range(3)] == [grammar] * 3
