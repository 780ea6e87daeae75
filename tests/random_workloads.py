"""Random workloads, each of which one seed stands for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from tests.conftest import new_seed


class Workload(Protocol):
    """A workload of one seed."""

    counts: Counter[str]
    """How often what a test must not miss came up."""

    def run(self) -> None:
        """Run it to its end; raises `AssertionError` for what must not be."""


def run_workloads(workload_of: Callable[[int], Workload], n: int, expected: Iterable[str]) -> Counter[str]:
    """Run `n` workloads, and return their counts.

    Raises `AssertionError` if none came to one of the `expected` events.
    """
    counts: Counter[str] = Counter()
    start = new_seed()
    for seed in range(start, start + n):
        workload = workload_of(seed)
        try:
            workload.run()
        except Exception as error:
            error.add_note(f"repeated by Workload({seed}).run()")
            raise
        counts += workload.counts
    missing = [event for event in expected if not counts[event]]
    assert not missing, f"no workload from seed {start} on came to {missing}"
    print(f"seeds from {start} on: {dict(counts)}")
    return counts
