"""A disk without files, which carries out one job at a time when it is told to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llamaslot.kvcache.disk_io import CancelReads, Erase, Job, MarkUsed, Read, Reparent, SegmentMeta, Write

Path = tuple[int, ...]


class FakeDisk:
    """Carries out jobs in order, one by one, and may stop between any two of them."""

    def __init__(self) -> None:
        self.metas: dict[int, SegmentMeta] = {}
        """The least recently used first."""
        self.writes: list[Write | Erase | MarkUsed | Reparent] = []
        self.reads: list[int] = []
        self.first_number = 0

    def take(self, jobs: list[Job]) -> None:
        """Queue jobs; `CancelReads` leaves only the read that is being carried out."""
        for job in jobs:
            if isinstance(job, Read):
                self.reads.append(job.number)
            elif isinstance(job, CancelReads):
                del self.reads[1:]
            else:
                self.writes.append(job)

    def next_change(self, *, ok: bool) -> Write | None:
        """Carry out the next job that is no read; returns a write, which is to be answered."""
        job = self.writes.pop(0)
        if isinstance(job, Write):
            assert job.meta.number not in self.metas
            if ok:
                self.metas[job.meta.number] = job.meta
                self.first_number = max(self.first_number, job.meta.number + 1)
            return job
        for number in job.numbers:
            if isinstance(job, Reparent):
                if number in self.metas:
                    self.metas[number] = replace(self.metas[number], parent=job.parent)
                continue
            meta = self.metas.pop(number, None)
            if isinstance(job, MarkUsed) and meta is not None:
                self.metas[number] = meta
        return None

    @property
    def kept(self) -> set[int]:
        """Numbers of the files that are there and are not about to be erased."""
        erased = {number for job in self.writes if isinstance(job, Erase) for number in job.numbers}
        return set(self.metas) - erased

    def path(self, number: int) -> tuple[str, Path]:
        """Namespace and all tokens of a file, by the index alone."""
        meta = self.metas[number]
        parent = self.path(meta.parent)[1] if meta.parent is not None else ()
        own = tuple(np.frombuffer(meta.tokens, dtype="<i4").tolist())
        return meta.namespace, (*parent[: meta.start], *own)
