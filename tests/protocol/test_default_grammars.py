"""Grammars of requests that bring none."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from llamaslot.base.commands import Constraint
from llamaslot.protocol.request_reader import DefaultGrammars


def test_requests_that_are_read_at_once_get_different_grammars() -> None:
    barrier = threading.Barrier(2)

    class Meeting(tuple[Constraint, ...]):
        """Has both threads go on together from where it is read."""

        __slots__ = ()

        def __len__(self) -> int:
            barrier.wait(10)
            return super().__len__()

    grammars = Meeting(Constraint(f'start: "{i}"', "grammar") for i in range(3))
    default = DefaultGrammars(grammars)
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(default.next) for _ in range(2)]
        assert {each.result().grammar for each in both} == {'start: "0"', 'start: "1"'}
