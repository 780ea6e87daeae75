"""One state machine for every backend: whatever is done to sequences, each sees exactly its own tokens.

The oracle is a list of (cell, token) pairs per sequence id. What a sequence answers is compared with the answer
that a second, fresh backend gives to the same tokens computed cold.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from llamaslot.backend.fake import FakeBackend
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.messages import Sampling
from llamaslot.core.backend import (
    Backend,
    Copy,
    IllegalCallError,
    Move,
    Operation,
    Piece,
    Remove,
    Run,
    Share,
    Status,
)
from tests.conftest import LONG
from tests.noise import Noise

N_SLOTS, N_RESERVED = 2, 1
N_SEQS = N_SLOTS + N_RESERVED + 1  # the last is for scratch
N_CTX = 256
N_UBATCH = 64
GREEDY = Sampling(temperature=0.0)

tokens = st.lists(st.integers(97, 99), min_size=1, max_size=24)
seqs = st.integers(0, N_SEQS - 1)


class SequencesMachine(RuleBasedStateMachine):
    """Subclasses say which backend, and whether two greedy tokens may stand for the same answer."""

    def new_backend(self) -> Backend:
        raise NotImplementedError

    def same_answer(self, history: list[int], warm: int, cold: int) -> bool:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.backend = self.new_backend()
        self.oracle: dict[int, list[tuple[int, int]]] = {seq: [] for seq in range(N_SEQS)}
        self.n_computed = 0

    def teardown(self) -> None:
        self.backend.close()

    @rule(batch=st.dictionaries(seqs, st.tuples(tokens, st.booleans()), min_size=1))
    def decode(self, batch: dict[int, tuple[list[int], bool]]) -> None:
        total = sum(len(run) for run, _ in batch.values())
        assume(total <= N_UBATCH)
        runs = [self.run_of(seq, run, output) for seq, (run, output) in batch.items()]
        decoded = self.backend.decode(runs)
        if self.cells_used + total > N_CTX:
            assert decoded.status is Status.NO_ROOM
            return
        assert decoded.status is Status.OK
        assert decoded.sent == {run.seq: (run.start, len(run.tokens)) for run in runs}
        for run in runs:
            for token in run.tokens.tolist():
                self.oracle[run.seq].append((self.n_computed, token))
                self.n_computed += 1
        wanted = [run.seq for run in runs if run.output]
        draws = [(seq, self.backend.new_sampler(GREEDY, np.empty(0, dtype=np.int32))) for seq in wanted * 2]
        answers = self.backend.sample(draws)
        for _, sampler in draws:
            sampler.close()
        assert answers[: len(wanted)] == answers[len(wanted) :]  # one row serves any number of samplers
        for seq, answer in zip(wanted, answers, strict=False):
            assert self.same_answer(self.held(seq), answer, cold_answer(self.new_backend, self.held(seq)))

    @rule(seq=seqs, share=st.floats(0, 1))
    def remove(self, seq: int, share: float) -> None:
        keep = int(share * len(self.oracle[seq]))
        self.backend.change(Remove(seq, keep))
        del self.oracle[seq][keep:]

    @rule(src=seqs, dst=seqs, share=st.floats(0, 1))
    def copy(self, src: int, dst: int, share: float) -> None:
        source, target = self.oracle[src], self.oracle[dst]
        start, end = len(target), int(share * len(source))
        assume(src != dst and start < end and self.common(src, dst) == start)
        self.backend.change(Copy(src, dst, start, end))
        target.extend(source[start:end])

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """A range anywhere in the middle: what the target holds in front and behind stays its own."""
        src, dst = data.draw(st.sampled_from(self.pairs))
        end = data.draw(st.integers(1, self.common(src, dst)))
        start = data.draw(st.integers(0, end - 1))
        self.backend.change(Share(src, dst, start, end))
        self.oracle[dst][start:end] = self.oracle[src][start:end]

    @rule(src=seqs, dst=seqs, run=tokens)
    def compute_side_by_side(self, src: int, dst: int, run: list[int]) -> None:
        """Two sequences compute the same tokens in one batch, so that there is something to share."""
        assume(src != dst and 2 * len(run) <= N_UBATCH)
        self.decode({src: (run, False), dst: (run, True)})

    @precondition(lambda self: any(self.oracle.values()) and not all(self.oracle.values()))
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """Parts of sequences, with all who see them, to other cells: nobody can tell."""
        scratch = next(seq for seq, held in self.oracle.items() if not held)
        chosen = data.draw(st.lists(st.sampled_from([s for s, held in self.oracle.items() if held]), min_size=1))
        pieces: list[Piece] = []
        seen: set[int] = set()
        for seq in chosen:
            end = data.draw(st.integers(1, len(self.oracle[seq])))
            start = data.draw(st.integers(0, end - 1))
            part = self.oracle[seq][start:end]
            cells = {cell for cell, _ in part}
            holders = {s for s, held in self.oracle.items() if cells & {cell for cell, _ in held}}
            if seen.isdisjoint(cells) and all(self.oracle[s][start:end] == part for s in holders):
                pieces.append(Piece(tuple(holders), start, end))
                seen |= cells
        self.backend.change(Move(tuple(pieces), scratch))
        taken = next(seq for seq, held in self.oracle.items() if held)
        whole = Piece((taken,), 0, len(self.oracle[taken]))
        self.refuses(Move((whole,), taken))
        self.refuses(Move((whole, whole), scratch))
        self.refuses(Move((Piece((taken,), 0, whole.end + 1),), scratch))
        self.refuses(Move((Piece((taken,), 1, 1),), scratch))
        self.refuses(Move((Piece((), 0, 1),), scratch))
        self.refuses(Move((Piece((taken, N_SEQS), 0, 1),), scratch))

    @rule(seq=seqs, shift=st.sampled_from([-1, 1, 7]))
    def decode_elsewhere(self, seq: int, shift: int) -> None:
        run = Run(seq, len(self.oracle[seq]) + shift, np.array([97], dtype=np.int32), True)
        self.refused(lambda: self.backend.decode([run]))

    @rule(token=st.sampled_from([-1, 10**6]), seq=seqs)
    def decode_a_token_that_does_not_exist(self, token: int, seq: int) -> None:
        self.refused(lambda: self.backend.decode([self.run_of(seq, [token], True)]))

    @rule(seq=st.sampled_from([-1, N_SEQS, 255, 256]))
    def name_a_sequence_that_does_not_exist(self, seq: int) -> None:
        for operation in (Remove(seq, 0), Copy(seq, 0, 0, 1), Copy(0, seq, 0, 1), Share(0, seq, 0, 1)):
            self.refuses(operation)
        self.refused(lambda: self.backend.seq_len(seq))
        self.refused(lambda: self.backend.decode([Run(seq, 0, np.array([97], dtype=np.int32), True)]))

    @rule()
    def decode_more_than_a_micro_batch(self) -> None:
        self.refused(lambda: self.backend.decode([self.run_of(0, [97] * (N_UBATCH + 1), True)]))
        self.refused(lambda: self.backend.decode([]))
        self.refused(lambda: self.backend.decode([self.run_of(0, [97], True), self.run_of(0, [97], True)]))

    @precondition(lambda self: any(len(s) > 1 for s in self.oracle.values()))
    @rule(data=st.data())
    def copy_into_what_is_taken(self, data: st.DataObject) -> None:
        src = data.draw(st.sampled_from([s for s, held in self.oracle.items() if len(held) > 1]))
        dst = data.draw(seqs.filter(lambda s: s != src))
        n_src, n_dst = len(self.oracle[src]), len(self.oracle[dst])
        self.refuses(Copy(src, dst, n_dst + 1, n_dst + 2))
        self.refuses(Copy(src, dst, n_dst, max(n_dst, n_src) + 1))
        self.refuses(Copy(src, src, n_src, n_src + 1))
        if n_dst:
            self.refuses(Copy(src, dst, n_dst - 1, n_dst))

    @precondition(lambda self: any(self.oracle.values()))
    @rule(data=st.data())
    def share_what_one_of_them_lacks(self, data: st.DataObject) -> None:
        src = data.draw(st.sampled_from([s for s, held in self.oracle.items() if held]))
        dst = data.draw(seqs.filter(lambda s: s != src))
        n_src, n_dst = len(self.oracle[src]), len(self.oracle[dst])
        self.refuses(Share(src, dst, 0, n_src + 1))
        self.refuses(Share(src, dst, n_dst, n_dst + 1))
        self.refuses(Share(src, dst, 1, 1))
        self.refuses(Share(src, dst, -1, 1))
        self.refuses(Share(src, src, 0, 1))
        self.refuses(Remove(src, -1))

    @invariant()
    def lengths_are_right(self) -> None:
        for seq, held in self.oracle.items():
            assert self.backend.seq_len(seq) == len(held)
        if isinstance(self.backend, FakeBackend):
            assert self.backend.cells_used == self.cells_used
            for seq, held in self.oracle.items():
                assert self.backend.seen(seq) == [(i, token) for i, (_, token) in enumerate(held)]

    @property
    def cells_used(self) -> int:
        return len({cell for held in self.oracle.values() for cell, _ in held})

    def held(self, seq: int) -> list[int]:
        return [token for _, token in self.oracle[seq]]

    def common(self, a: int, b: int) -> int:
        """Tokens at the start of two sequences that are the same."""
        pairs = zip(self.held(a), self.held(b), strict=False)
        return next((i for i, (x, y) in enumerate(pairs) if x != y), min(map(len, (self.held(a), self.held(b)))))

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Sequences that start alike."""
        return [(a, b) for a in self.oracle for b in self.oracle if a != b and self.common(a, b)]

    def run_of(self, seq: int, run: list[int], output: bool) -> Run:
        return Run(seq, len(self.oracle[seq]), np.array(run, dtype=np.int32), output)

    def refuses(self, operation: Operation) -> None:
        self.refused(lambda: self.backend.change(operation))

    def refused(self, call: Callable[[], object]) -> None:
        before = copy.deepcopy(self.oracle)
        with pytest.raises(IllegalCallError):
            call()
        assert self.oracle == before


def cold_answer(new_backend: Callable[[], Backend], history: list[int]) -> int:
    backend = new_backend()
    try:
        for at in range(0, len(history), N_UBATCH):
            chunk = np.array(history[at : at + N_UBATCH], dtype=np.int32)
            assert backend.decode([Run(0, at, chunk, at + N_UBATCH >= len(history))]).status is Status.OK
        sampler = backend.new_sampler(GREEDY, np.empty(0, dtype=np.int32))
        (token,) = backend.sample([(0, sampler)])
        sampler.close()
        return token
    finally:
        backend.close()


class FakeMachine(SequencesMachine):
    def new_backend(self) -> Backend:
        return FakeBackend(n_slots=N_SLOTS, n_reserved=N_RESERVED, n_ctx=N_CTX, n_ubatch=N_UBATCH)

    def same_answer(self, history: list[int], warm: int, cold: int) -> bool:
        return warm == cold


def test_fake_backend() -> None:
    run_state_machine_as_test(FakeMachine, settings=settings(stateful_step_count=50))


def test_llama_backend(tiny_model: Path) -> None:
    chosen = LlamaSettings(
        tiny_model, n_ctx=N_CTX, n_slots=N_SLOTS, n_cache_seqs=N_RESERVED, n_ubatch=N_UBATCH, n_threads=1
    )
    noise = Noise(chosen)

    class LlamaMachine(SequencesMachine):
        def new_backend(self) -> Backend:
            return LlamaBackend(chosen)

        def same_answer(self, history: list[int], warm: int, cold: int) -> bool:
            return warm == cold or noise.explains(history, warm, cold)

    run_state_machine_as_test(
        LlamaMachine, settings=settings(max_examples=60 if LONG else 3, stateful_step_count=20)
    )
    print(f"tokens that differed within noise: {noise.n_explained}")
