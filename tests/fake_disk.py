"""A disk without files, which does what it is told one job at a time."""

from __future__ import annotations

import numpy as np

from llamaslot.kvcache.disk import Erase, Job, Read, Record, Use, Write

Path = tuple[int, ...]


class Files:
    """A disk that does what it is told in order, when it is told to go on, and may stop between any two jobs."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}
        """The least recently used first."""
        self.writes: list[Write | Erase | Use] = []
        self.reads: list[int] = []
        self.first = 0

    def take(self, jobs: list[Job]) -> None:
        for job in jobs:
            if isinstance(job, Read):
                self.reads.append(job.number)
            else:
                self.writes.append(job)

    def next_change(self, *, is_good: bool) -> Write | None:
        """Carry out a job; a write that is to be answered."""
        job = self.writes.pop(0)
        if isinstance(job, Write):
            assert job.record.number not in self.records
            if is_good:
                self.records[job.record.number] = job.record
                self.first = max(self.first, job.record.number + 1)
            return job
        for number in job.numbers:
            record = self.records.pop(number, None)
            if isinstance(job, Use) and record is not None:
                self.records[number] = record
        return None

    @property
    def kept(self) -> set[int]:
        """What is there, and is not about to be erased."""
        erased = {number for job in self.writes if isinstance(job, Erase) for number in job.numbers}
        return set(self.records) - erased

    def path(self, number: int) -> tuple[str, Path]:
        """What a file stands for, by the index alone."""
        record = self.records[number]
        front = self.path(record.front)[1] if record.front is not None else ()
        own = tuple(np.frombuffer(record.tokens, dtype="<i4").tolist())
        return record.space, (*front[: record.start], *own)
