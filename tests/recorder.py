"""A backend that keeps its own account of the tokens of each sequence, from the operations that it was given.

Every token that is computed or loaded gets a cell of its own; `Copy` and `Share` pass cells on. A *prefix* is a
namespace and the tokens so far, interned as a number, so that two positions hold the same prefix if and only if
their numbers agree. Whatever mixes prefixes fails here, before any token is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from llamaslot.base.adapters import Adapters
from llamaslot.base.backend import Backend, CompiledConstraint, Decoded, Draws, Run, Sampler, Status
from llamaslot.base.commands import Constraint
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import (
    Copy,
    Free,
    Kv,
    Load,
    NotLoadedError,
    NotSavedError,
    Operation,
    Remove,
    Restore,
    Save,
    Share,
    Shift,
    Take,
)
from llamaslot.base.stats import BackendStats
from llamaslot.base.tokens import Tokens
from tests.fake_backend import FakeBackend, sent, token_of

Past: TypeAlias = Sequence[tuple[Sequence[int], Shift]]
"""The shifts of a sequence, each with all tokens that it held before: what is left depends on those that are gone.
"""


@dataclass(frozen=True)
class Failure:
    """The outcome of the next decode, which does not succeed."""

    status: Status
    n_applied: int
    """Tokens of the batch that stay computed, from its start, after `ABORTED` and `FATAL`."""
    loses: bool = False
    """True if the first sequence of the batch comes back shorter than it was."""


@dataclass
class Held:
    """Contents of one sequence: per position the cell, the token and the prefix that ends there."""

    cells: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    namespace: str = ""
    past: list[tuple[Sequence[int], Shift]] = field(default_factory=list)
    """A `Past`; empty for KV that is that of its tokens."""

    def __len__(self) -> int:
        """Tokens held."""
        return len(self.cells)

    def truncate(self, keep: int) -> None:
        for each in (self.cells, self.tokens, self.prefixes):
            del each[keep:]
        if not keep:
            self.past.clear()


@dataclass(frozen=True)
class Offloaded:
    """Contents of a segment: from `start` on the tokens and the prefixes that end there."""

    namespace: str
    start: int
    tokens: list[int]
    prefixes: list[int]


class Recorder:
    """Passes everything on to `inner`; `namespaces` has the namespace in which each sequence is computed next.

    A shift moves its sequence to that namespace. What was moved is neither copied nor saved.

    What was saved in the namespace `public` may be loaded into any other.
    """

    def __init__(self, inner: Backend, public: str | None = None) -> None:
        self._public = public
        self.inner = inner
        self.info, self.vocab, self.n_seqs = inner.info, inner.vocab, inner.n_seqs
        self.held = [Held() for _ in range(self.n_seqs)]
        self.namespaces: dict[int, str] = {}
        self.failure: Failure | None = None
        self.abort: Callable[[Any], AbstractContextManager[object]] | None = None
        """Makes a real backend abort its decodes, instead of applying a part of them; None for the latter."""
        self.refused: set[int] = set()
        """Segments and checkpoints for which there is no memory."""
        self.unloadable: set[int] = set()
        """Checkpoints that cannot be restored for want of memory."""
        self.unstripped: set[int] = set()
        """Sequences that cannot lose their window for want of a cell: what makes them stateless empties them."""
        self.checkpoints: dict[int, tuple[str, list[int]]] = {}
        """By number of a checkpoint: the namespace and the prefixes of the sequence from which it was taken."""
        self.ever_taken: dict[int, tuple[str, list[int]]] = {}
        """The same of all that were ever taken."""
        self.has_lost = False
        """True once cells were lost without being removed, so that the cells of the others are unknown."""
        self.n_calls = 0
        """Calls that may have changed what the backend holds."""
        self.samplers: list[Sampler] = []
        self.segments: dict[int, Offloaded] = {}
        """Segments in memory, by number."""
        self.snapshots: dict[int, Offloaded] = {}
        """Parts of saved slots in memory; their numbers are below 0, and they belong to no tier."""
        self.saved: dict[int, Offloaded] = {}
        """All segments that were ever saved, by number."""
        self.is_loaded = True
        self._n_cells = 0
        self._prefixes: dict[tuple[str | int, int], int] = {}

    # --- reading ---

    @property
    def cells(self) -> set[int]:
        """Cells that any sequence sees."""
        return set().union(*(held.cells for held in self.held))

    def prefixes(self, seqs: Iterable[int] | None = None) -> set[int]:
        """The prefixes that these sequences hold, all of them by default."""
        return set().union(*(self.held[seq].prefixes for seq in (range(self.n_seqs) if seqs is None else seqs)))

    def named(self, namespace: str, tokens: Iterable[int], before: Sequence[int] = ()) -> list[int]:
        """The numbers of all prefixes of some tokens, which continue those that are named `before`."""
        last: str | int = before[-1] if before else namespace
        found = [*before]
        for token in tokens:
            last = self._prefixes.setdefault((last, token), len(self._prefixes))
            found.append(last)
        return found

    def check(self) -> list[range]:
        """Verify that the backend holds what was recorded; returns the positions that each sequence holds."""
        n_cells = len(self.cells)
        if self.info.unified:
            assert n_cells <= self.info.n_ctx
        if isinstance(self.inner, FakeBackend):
            assert self.inner.cells_used == n_cells
            for seq, (held, seen) in enumerate(zip(self.held, self.inner.contents(), strict=True)):
                tokens = [(position, token_of(token)) for position, token in seen] if held.past else seen
                assert tokens == list(enumerate(held.tokens)), seq
            return [range(len(held)) for held in self.held]
        if not self.is_loaded:
            assert not any(self.held)
            return [range(0)] * self.n_seqs
        for seq, held in enumerate(self.held):
            assert self.inner.seq_len(seq) == len(held), seq
        return [*map(self.inner.seq_range, range(self.n_seqs))]

    # --- the backend ---

    def change(self, operation: Operation) -> None:
        self.n_calls += 1
        if isinstance(operation, Save) and operation.segment in self.refused:
            raise NotSavedError(operation.segment)
        if isinstance(operation, Take | Restore):
            self._take(operation) if isinstance(operation, Take) else self._restore(operation)
            return
        if isinstance(operation, Shift):
            self._shift(operation)
            return
        if isinstance(operation, Free) and operation.segment in self.checkpoints:
            self.inner.change(operation)
            del self.checkpoints[operation.segment]
            return
        if self._is_unstripped(operation):
            self._empty(operation)
        try:
            self.inner.change(operation)
        except NotLoadedError as error:
            raise AssertionError(f"{operation}: too few cells") from error
        if isinstance(operation, Remove):
            self.held[operation.seq].truncate(operation.keep)
            return
        if isinstance(operation, Save | Load):
            self._save(operation) if isinstance(operation, Save) else self._load(operation)
            return
        if isinstance(operation, Free):
            del self._place_of(operation.segment)[operation.segment]
            return
        source, target = self.held[operation.src], self.held[operation.dst]
        start, end = operation.start, operation.end
        assert not source.past, f"{operation} of what was moved"
        assert source.namespace == target.namespace or not target.cells, f"{operation} between two namespaces"
        if isinstance(operation, Copy):
            assert source.prefixes[:start] == target.prefixes, f"{operation} of something else"
            target.namespace = source.namespace
            target.tokens += source.tokens[start:end]
            target.prefixes += source.prefixes[start:end]
        assert isinstance(operation, Copy | Share)
        assert source.prefixes[:end] == target.prefixes[:end], f"{operation} of something else"
        if self.info.unified:
            target.cells[start:end] = source.cells[start:end]
        else:
            self._take_cells(target)

    def is_live(self, seq: int) -> bool:
        """True if the backend can decode a sequence."""
        is_live: bool = self._states.is_live(seq)
        return is_live

    @property
    def taken(self) -> dict[int, int]:
        """The checkpoints that the backend has: by number, the length of the source when each was taken."""
        taken: dict[int, int] = self._states.checkpoints
        return taken

    @property
    def _states(self) -> Any:
        return self.inner.states if isinstance(self.inner, FakeBackend) else self.inner._kv.states  # type: ignore[attr-defined]

    def _take(self, take: Take) -> None:
        if take.checkpoint in self.refused:
            raise NotSavedError(take.checkpoint)
        source = self.held[take.src]
        assert len(source) == take.end, f"{take} elsewhere"
        self.inner.change(take)
        self.checkpoints[take.checkpoint] = source.namespace, list(source.prefixes)
        self.ever_taken[take.checkpoint] = self.checkpoints[take.checkpoint]
        self.saved[take.checkpoint] = Offloaded(source.namespace, take.end, [], [])

    def _restore(self, restore: Restore) -> None:
        """Restore a checkpoint into a sequence that begins with the tokens after which it was taken."""
        namespace, prefixes = self.checkpoints[restore.checkpoint]
        target = self.held[restore.dst]
        same = target.prefixes
        if namespace == self._public != target.namespace:
            same = self.named(namespace, target.tokens)
        assert same[: len(prefixes)] == prefixes, f"{restore} after something else"
        if restore.checkpoint in self.unloadable:
            self.inner.change(Remove(restore.dst, 0))
            target.truncate(0)
            raise NotLoadedError(restore.checkpoint)
        self.inner.change(restore)
        target.truncate(len(prefixes))

    def _is_unstripped(self, operation: Operation) -> bool:
        """True if an operation would make a sequence stateless that cannot lose its window."""
        if isinstance(operation, Copy | Load):
            return operation.dst in self.unstripped
        if isinstance(operation, Remove) and operation.seq in self.unstripped and operation.keep:
            return operation.keep < len(self.held[operation.seq])
        return False

    def _empty(self, operation: Operation) -> None:
        assert isinstance(operation, Copy | Load | Remove)
        seq = operation.seq if isinstance(operation, Remove) else operation.dst
        self.inner.change(Remove(seq, 0))
        self.held[seq].truncate(0)
        raise MemoryError("a full window cache")

    def _place_of(self, segment: int) -> dict[int, Offloaded]:
        return self.segments if segment >= 0 else self.snapshots

    def _save(self, save: Save) -> None:
        assert save.segment not in self._place_of(save.segment)
        source, part = self.held[save.src], slice(save.start, save.end)
        assert save.end <= len(source)
        assert not source.past, f"{save} of what was moved"
        tokens, prefixes = source.tokens[part], source.prefixes[part]
        stored = Offloaded(source.namespace, save.start, tokens, prefixes)
        self._place_of(save.segment)[save.segment] = self.saved[save.segment] = stored

    def _shift(self, shift: Shift) -> None:
        """Discard tokens of a sequence, which has cells of its own and a namespace of its own from now on."""
        held = self.held[shift.seq]
        others = {cell for each in self.held if each is not held for cell in each.cells}
        copies = shift.copies and self.info.unified
        assert copies or others.isdisjoint(held.cells), f"{shift} moves cells of others"
        try:
            self.inner.change(shift)
        except MemoryError as error:
            raise AssertionError(f"{shift}: too few cells") from error
        held.past.append((tuple(held.tokens), shift))
        for each in (held.cells, held.tokens):
            del each[shift.start : shift.end]
        if copies:
            held.cells.clear()
            self._take_cells(held)
        assert held.namespace != self.namespaces[shift.seq], f"{shift} in a namespace in which it was computed"
        held.namespace = self.namespaces[shift.seq]
        held.prefixes = self.named(held.namespace, held.tokens)
        if self.info.unified:
            assert len(self.cells) <= self.info.n_ctx, f"{shift} of more than there was room for"

    def _load(self, load: Load) -> None:
        """Load parts of segments that continue what the target holds; it gets cells of its own."""
        for segment, start, end in load.ranges:
            stored, target = self._place_of(segment)[segment], self.held[load.dst]
            namespace = stored.namespace
            if namespace == self._public and segment >= 0:
                namespace = self.namespaces.get(load.dst, namespace)
            assert namespace == target.namespace or not target.cells, f"{load} into another namespace"
            assert len(target) == start
            part = slice(start - stored.start, end - stored.start)
            target.namespace = namespace
            target.tokens += stored.tokens[part]
            before = self.named(stored.namespace, target.tokens)
            assert before[start:] == stored.prefixes[part], f"{load} after something else"
            target.prefixes += self.named(namespace, target.tokens)[start:]
            assert target.prefixes == self.named(namespace, target.tokens), f"{load} after something else"
            self._take_cells(target)
            n_dropped = len(stored.tokens) - (end - start) if self.info.unified else 0
            assert len(self.cells) + n_dropped <= self.info.n_ctx, f"{load} of more than there was room for"

    def end_changes(self) -> None:
        self.inner.end_changes()

    def unload(self) -> None:
        """Unload the model; nothing may be held."""
        assert not any(self.held)
        self.inner.unload()
        self.is_loaded = False

    def reload(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Load it again."""
        self.inner.reload(should_stop)
        self.is_loaded = True

    def set_layout(self, *, unified: bool) -> None:
        self.n_calls += 1
        assert not any(held.cells for held in self.held), "a sequence holds something"
        self.inner.set_layout(unified=unified)
        self.info, self.n_seqs = self.inner.info, self.inner.n_seqs
        self.held = [Held() for _ in range(self.n_seqs)]
        self.namespaces = {}

    stats = BackendStats()

    def use_adapters(self, adapters: Adapters) -> None:
        self.inner.use_adapters(adapters)

    def decode(self, runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        self.n_calls += 1
        failure, self.failure = self.failure, None
        if failure is None:
            decoded = self.inner.decode(runs, draws)
            assert decoded.status is Status.OK, decoded.status
            self._record(runs)
            return decoded
        if isinstance(self.inner, FakeBackend) and self.inner.states.has_states:
            # It knows itself what such a failure takes from the states of its sequences.
            self.inner.failures.append((failure.status, failure.n_applied))
            return self.inner.decode(runs, draws)
        is_fatal = failure.status in (Status.ABORTED, Status.FATAL)
        if self.abort is not None and is_fatal:
            with self.abort(self.inner):
                return self.inner.decode(runs, draws)
        left = failure.n_applied if is_fatal else 0
        applied = []
        for run in runs:
            tokens = run.tokens[:left]
            if len(tokens):
                applied.append(Run(run.seq, run.start, tokens, 0))
                left -= len(tokens)
        if applied:
            assert self.inner.decode(applied).status is Status.OK
            self._record(applied)
        if failure.loses and failure.status is Status.FATAL:
            self.has_lost = True
            self.change(Remove(runs[0].seq, runs[0].start // 2 if self.info.can_trim else 0))
        return Decoded(failure.status, sent(runs))

    def _record(self, runs: Sequence[Run]) -> None:
        for run in runs:
            held, namespace, tokens = self.held[run.seq], self.namespaces[run.seq], run.tokens.tolist()
            assert held.namespace == namespace or not held.cells, f"sequence {run.seq} goes on in another namespace"
            held.namespace = namespace
            held.tokens += tokens
            held.prefixes = self.named(namespace, tokens, held.prefixes)
            self._take_cells(held)

    def _take_cells(self, held: Held) -> None:
        """Give each token that has no cell yet one of its own."""
        n = len(held.tokens) - len(held.cells)
        held.cells += range(self._n_cells, self._n_cells + n)
        self._n_cells += n

    def kv_of(self, segment: int) -> Kv | None:
        return self.inner.kv_of(segment)

    def put(self, segment: int, start: int, end: int, kv: Kv) -> None:
        self.n_calls += 1
        place = self._place_of(segment)
        assert segment not in place
        self.inner.put(segment, start, end, kv)
        if start == end:
            self.checkpoints[segment] = self.ever_taken[segment]
            assert len(self.checkpoints[segment][1]) == end
            return
        stored = place[segment] = self.saved[segment]
        assert range(start, end) == range(stored.start, stored.start + len(stored.tokens))

    def seq_len(self, seq: int) -> int:
        return self.inner.seq_len(seq)

    def seq_range(self, seq: int) -> range:
        return self.inner.seq_range(seq)

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        return self.inner.compile(constraint)

    def new_sampler(
        self, sampling: Sampling, history: Tokens, constraint: CompiledConstraint | None = None
    ) -> Sampler:
        self.samplers.append(self.inner.new_sampler(sampling, history, constraint))
        return self.samplers[-1]

    def sample(self, draws: Draws) -> list[tuple[int, ...]]:
        return self.inner.sample(draws)

    def run_self_test(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        return self.inner.run_self_test(should_stop)

    def close(self) -> None:
        self.inner.close()
