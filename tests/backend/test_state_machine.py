"""One state machine for every backend: whatever is done to sequences, each sees exactly its own tokens.

The oracle is a list of (cell, token) pairs per sequence id. What a sequence answers is compared with the answer
that a second, fresh backend gives to the same tokens computed cold. Models with a partial state run through it too:
there the oracle also knows which sequences are live, and the tokens after which each checkpoint was taken. With a
projector sequences hold tiles of images too.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from bench import synthetic
from bench.projector_files import Kind, picture, write_projector
from llamaslot.backend.llama import LlamaBackend, LlamaSettings, loading
from llamaslot.base.backend import Backend, Run, Status
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.images import ImageSize, PromptImage, Tile, tile_ids
from llamaslot.base.kv_ops import (
    Copy,
    Free,
    IllegalCallError,
    Load,
    NotLoadedError,
    Operation,
    Remove,
    Restore,
    Save,
    Share,
    Shift,
    Take,
)
from llamaslot.base.model import StateKind
from tests.backend.test_models import failing, logits
from tests.conftest import LONG
from tests.fake_backend import WINDOW, FakeBackend
from tests.noise import Noise
from tests.vision_files import with_mrope, with_tokens

N_SLOTS, N_RESERVED = 2, 1
N_SEQS = N_SLOTS + N_RESERVED + 2  # one spare for moving paths, one for scratch
SCRATCH = N_SEQS - 1
N_CTX = 256
N_UBATCH = 64
GREEDY = Sampling(temperature=0.0)

MAX_DRAFT = 7

tokens = st.lists(st.integers(97, 99), min_size=1, max_size=24)
few_tokens = st.lists(st.integers(97, 99), min_size=1, max_size=12)
drafts = st.lists(st.integers(97, 99), max_size=MAX_DRAFT)
seqs = st.integers(0, N_SEQS - 2)


@dataclass
class Picture:
    """A tile of an image that sequences may hold."""

    data: bytes
    digest: bytes
    number: int
    ids: list[int]


class Drafted(NamedTuple):
    """Tokens of a sequence, a draft after them, and the greedy tokens of a cold run."""

    seq: int
    run: list[int]
    draft: list[int]
    expected: list[int]


def pictures_of(backend: Backend) -> list[Picture]:
    """The tiles of two images."""
    size = ImageSize(100, 40)
    n_tokens = [piece for piece in backend.image_layout(size).pieces if isinstance(piece, int)]
    return [
        Picture(data, data[-16:], number, tile_ids(data[-16:], number, n).tolist())
        for data in (picture(i, size.width, size.height) + bytes([i]) * 16 for i in (1, 2))
        for number, n in enumerate(n_tokens[:3])
    ]


def runs_of(pictures: Sequence[Picture], seq: int, start: int, held: Sequence[int], output: bool) -> Iterator[Run]:
    """The steps that compute tokens; with `output` the last has logits."""
    at = 0
    while at < len(held):
        picture = next((each for each in pictures if each.ids[0] == held[at]), None)
        if picture is None:
            n = next((i for i, token in enumerate(held[at : at + N_UBATCH]) if token < 0), N_UBATCH)
            tokens, tile = held[at : at + n], None
        else:
            tokens = held[at : at + len(picture.ids)]
            # Its place among the tiles of its image stays, though the others are not in this prompt.
            spans = ((0, 0),) * picture.number + ((start + at, start + at + len(tokens)),)
            tile = Tile(PromptImage(picture.data, picture.digest, spans), picture.number)
        is_last = at + len(tokens) == len(held)
        yield Run(seq, start + at, np.array(tokens, dtype=np.int32), output and is_last, tile=tile)
        at += len(tokens)


class SequencesMachine(RuleBasedStateMachine):
    """Subclasses choose the backend, and whether two greedy tokens count as the same answer."""

    kind = StateKind.NONE
    """Kind of the model's partial state."""
    n_swa = 0
    n_rollback = 0
    unified = True
    """False if each sequence has `N_CTX` cells of its own."""
    pictures: Sequence[Picture] = ()
    """Tiles of images that the model takes."""
    is_joint = False
    """True if tokens of a tile share a position, so that the backend refuses to cut it."""

    def new_backend(self) -> Backend:
        raise NotImplementedError

    def same_answer(self, history: list[int], warm: int, cold: int) -> bool:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.backend = self.new_backend()
        self.oracle: dict[int, list[tuple[int, int]]] = {seq: [] for seq in range(N_SEQS)}
        self.n_computed = 0
        self.segments: dict[int, tuple[int, list[int]]] = {}
        """The start of each, and all tokens up to its end."""
        self.n_bytes: dict[int, int] = {}
        """Size of the segments of each number of tokens."""
        self.live = set(range(N_SEQS))
        """Sequences with the state of their last token, or without tokens."""
        self.checkpoints: dict[int, list[int]] = {}
        """All tokens after which each was taken."""

    def teardown(self) -> None:
        self.backend.close()

    @rule(batch=st.dictionaries(seqs, st.tuples(tokens, st.booleans()), min_size=1))
    def decode(self, batch: dict[int, tuple[list[int], bool]]) -> None:
        total = sum(len(run) for run, _ in batch.values())
        if total > N_UBATCH or self.is_beyond_a_partition(batch, N_UBATCH):
            return
        runs = [self.run_of(seq, run, output) for seq, (run, output) in batch.items()]
        if not self.live.issuperset(batch) or not self.may_mix(run for run, _ in batch.values()):
            self.refused(lambda: self.backend.decode(runs))
            return
        is_full = self.unified and self.cells_used + total > N_CTX
        if is_full and self.kind is StateKind.RECURRENT:
            return  # There are no cells to run out of.
        decoded = self.backend.decode(runs)
        if is_full:
            assert decoded.status is Status.NO_CELLS
            return
        assert decoded.status is Status.OK
        assert decoded.sent == {run.seq: (run.start, len(run.tokens)) for run in runs}
        for run in runs:
            self.extend(run.seq, run.tokens.tolist())
        self.check_answers([run.seq for run in runs if run.n_outputs])

    def check_answers(self, wanted: list[int]) -> None:
        """Compare the greedy tokens after these sequences with those of cold runs."""
        draws = [(seq, self.backend.new_sampler(GREEDY, np.empty(0, dtype=np.int32))) for seq in wanted * 2]
        answers = self.backend.sample(draws)
        for _, sampler in draws:
            sampler.close()
        assert answers[: len(wanted)] == answers[len(wanted) :]  # one row serves any number of samplers
        for seq, (answer,) in zip(wanted, answers, strict=False):
            assert self.same_answer(self.held(seq), answer, self.cold_answers(self.held(seq), 1)[0])

    def cold_answers(self, history: list[int], n: int) -> list[int]:
        return cold_answers(self.new_backend, history, n, self.pictures)

    @precondition(lambda self: self.pictures)
    @rule(seq=seqs, place=st.integers(0, 99), n_first=st.integers(1, 8), output=st.booleans())
    def decode_a_tile(self, seq: int, place: int, n_first: int, output: bool) -> None:
        """Compute a tile of an image; a part of it is refused."""
        picture = self.pictures[place % len(self.pictures)]
        start, ids = len(self.oracle[seq]), picture.ids
        if seq not in self.live or (self.unified and self.cells_used + len(ids) > N_CTX):
            return
        (run,) = runs_of(self.pictures, seq, start, ids, output)
        self.refused(lambda: self.backend.decode([replace(run, tile=None)]))
        self.refused(lambda: self.backend.decode([replace(run, tokens=run.tokens[: -min(n_first, len(ids))])]))
        decoded = self.backend.decode([run])
        assert decoded.status is Status.OK
        assert decoded.sent == {seq: (start, len(ids))}
        self.extend(seq, ids)
        if output:
            self.check_answers([seq])

    def bounded(self, history: Sequence[int], n: int) -> int:
        """Return `n`, or where the tile begins that it would cut."""
        tiles = (run.tile for run in runs_of(self.pictures, 0, 0, history, output=False))
        return next((tile.start for tile in tiles if tile is not None and tile.start < n < tile.end), n)

    @rule(batch=st.dictionaries(seqs, st.tuples(few_tokens, st.integers(0, 7), drafts), min_size=1, max_size=3))
    def verify(self, batch: dict[int, tuple[list[int], int, list[int]]]) -> None:
        """Compute tokens of sequences in one step, with drafts after those of some."""
        if self.is_beyond_a_partition(batch, N_UBATCH) or not self.live.issuperset(batch):
            return
        if self.unified and self.cells_used + N_UBATCH > N_CTX:
            return
        n_drafted = min(MAX_DRAFT, self.backend.info.n_spare_rows // len(batch))
        n_most = N_UBATCH
        if not self.kind.allows_mixed_lengths:
            n_most = min(len(run) + min(n_right + len(wrong), n_drafted) for run, n_right, wrong in batch.values())
        checked = []
        for seq, (whole, n_right, wrong) in batch.items():
            run = whole[:n_most]
            expected = self.cold_answers([*self.held(seq), *run], MAX_DRAFT + 1)
            draft = [*expected[:n_right], *wrong][: min(n_drafted, n_most - len(run))]
            checked.append(Drafted(seq, run, draft, expected))
        runs = [
            Run(seq, len(self.oracle[seq]), np.array([*run, *draft], dtype=np.int32), 1 + len(draft))
            for seq, run, draft, _ in checked
        ]
        assert self.backend.decode(runs).status is Status.OK
        draws = [(seq, self.backend.new_sampler(GREEDY, np.empty(0, dtype=np.int32))) for seq, *_ in checked]
        chosen = self.backend.sample(draws)
        for _, sampler in draws:
            sampler.close()
        for each, tokens in zip(checked, chosen, strict=True):
            self.accept(each, tokens)

    def accept(self, drafted: Drafted, chosen: Sequence[int]) -> None:
        """A draft is accepted as far as it is what was sampled; the rest is removed."""
        seq, run, draft, expected = drafted
        history, n = [*self.held(seq), *run], len(chosen) - 1
        assert [*chosen[:n]] == draft[:n]
        assert n == len(draft) or chosen[n] != draft[n] or chosen[n] in self.backend.vocab.eog
        for i, (token, cold) in enumerate(zip(chosen, expected, strict=False)):
            assert self.same_answer([*history, *expected[:i]], token, cold)
            if token != cold:
                break  # within noise: the cold run went another way
        self.extend(seq, [*run, *draft])
        rejected = Remove(seq, len(history) + n, is_rejected=True)
        if n < len(draft) and (not self.kind.has_recurrent_state or len(draft) - n <= self.n_rollback):
            self.backend.change(rejected)
            # The state is whole, so the next step gives the answers of a cold run.
            del self.oracle[seq][rejected.keep :]
        if self.kind.has_recurrent_state and n < len(draft):
            # It cannot go back so far, or not again.
            self.refuses(Remove(seq, len(history), is_rejected=True))

    @rule(seq=seqs, share=st.floats(0, 1))
    def remove(self, seq: int, share: float) -> None:
        keep = self.bounded(self.held(seq), int(share * len(self.oracle[seq])))
        self.backend.change(Remove(seq, keep))
        self.cut(seq, keep)

    @precondition(lambda self: self.copyable)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        """Continue a sequence with cells of one that begins with its tokens, up to the last one or not."""
        src, dst = data.draw(st.sampled_from(self.copyable))
        source, target = self.oracle[src], self.oracle[dst]
        start = len(target)
        end = data.draw(st.sampled_from([len(source), (start + len(source) + 1) // 2, start + 1]))
        end = self.bounded(self.held(src), end)
        if start == end:
            return
        self.backend.change(Copy(src, dst, start, end))
        if self.unified:
            target.extend(source[start:end])
        else:
            self.extend(dst, [token for _, token in source[start:end]])
        copies_live = self.kind in (StateKind.RECURRENT, StateKind.HYBRID) and end == len(source)
        self.set_live(dst, is_live=copies_live and src in self.live)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Share a range in the middle: the target keeps its own cells before and after it."""
        src, dst = data.draw(st.sampled_from(self.pairs))
        end = data.draw(st.integers(1, common(self.held(src), self.held(dst))))
        start = data.draw(st.integers(0, end - 1))
        if self.has_states or not self.unified:
            self.refuses(Share(src, dst, start, end))
            return
        self.backend.change(Share(src, dst, start, end))
        if self.is_joint:
            # A tile belongs to the range that has its last token.
            start, end = (self.bounded(self.held(dst), n) for n in (start, end))
        self.oracle[dst][start:end] = self.oracle[src][start:end]

    @precondition(lambda self: any(len(held) > 1 for held in self.oracle.values()))
    @rule(data=st.data())
    def shift(self, data: st.DataObject) -> None:
        """Discard a part in the middle. Others keep their cells; what is left is not computed, so it is removed."""
        seq = data.draw(st.sampled_from([seq for seq, held in self.oracle.items() if len(held) > 1]))
        n = len(self.oracle[seq])
        start = data.draw(st.integers(0, n - 2))
        end = data.draw(st.integers(start + 1, n - 1))
        self.refuses(Shift(seq, start, n, copies=True))
        self.refuses(Shift(seq, end, end, copies=True))
        self.refuses(Shift(seq, -1, end, copies=True))
        shift = Shift(seq, start, end, copies=True)
        if self.backend.info.unshifted_reason:
            self.refuses(shift)
            return
        others = {cell for other, held in self.oracle.items() if other != seq for cell, _ in held}
        if self.unified and len(others) + n - (end - start) > N_CTX:
            with pytest.raises(MemoryError):
                self.backend.change(shift)
        else:
            self.backend.change(shift)
            assert self.backend.seq_range(seq) == range(n - (end - start))
            self.backend.change(Remove(seq, 0))
        self.cut(seq, 0)

    @rule(src=seqs, dst=seqs, run=tokens)
    def compute_side_by_side(self, src: int, dst: int, run: list[int]) -> None:
        """Two sequences compute the same tokens in one batch, so that there is something to share."""
        if src == dst or 2 * len(run) > N_UBATCH:
            return
        self.decode({src: (run, False), dst: (run, True)})

    @precondition(lambda self: any(self.oracle.values()))
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        """Save a part of a sequence, or all of it; neither it nor other segments change."""
        src = data.draw(st.sampled_from([seq for seq, held in self.oracle.items() if held]))
        n = len(self.oracle[src])
        start = data.draw(st.sampled_from([0, n // 2, n - 1]))
        end = data.draw(st.integers(start + 1, n))
        number = self.unused_number()
        self.refuses(Save(number, src, start, n + 1))
        self.refuses(Save(number, src, end, end))
        self.refuses(Save(number, src, -1, end))
        self.refuses(Save(number, N_SEQS, start, end))
        self.backend.change(Save(number, src, start, end))
        self.segments[number] = (start, self.held(src)[:end])
        kv = self.backend.kv_of(number)
        assert kv is not None
        assert self.n_bytes.setdefault(end - start, len(kv)) == len(kv), "foreign cells or a state"
        self.refuses(Save(number, src, start, end))

    @precondition(lambda self: self.segments)
    @rule(data=st.data(), is_crowded=st.booleans())
    def load(self, data: st.DataObject, *, is_crowded: bool) -> None:
        """Load a part of a segment after some of the tokens before it; the whole segment needs room."""
        shared = {
            (number, dst): min(common(self.held(dst), history), len(history) - 1)
            for number, (_, history) in self.segments.items()
            for dst in range(SCRATCH)
        }
        fitting = [(number, dst) for (number, dst), n in shared.items() if n >= self.segments[number][0]]
        number, dst = data.draw(st.sampled_from(fitting or sorted(shared)))
        first, history = self.segments[number]
        stop, most = len(history), shared[number, dst]
        start = self.bounded(history, data.draw(st.sampled_from([most, *range(min(first, most), most)])))
        self.backend.change(Remove(dst, start))
        self.cut(dst, start)
        end = self.bounded(history, data.draw(st.sampled_from([stop, *range(start + 1, stop)])))
        if start >= end:
            return
        self.refuses(Load(dst, start, ((number, stop + 1),)))
        self.refuses(Load(dst, start, ((number, start),)))
        self.refuses(Load(dst, start + 1, ((number, stop),)))
        self.refuses(Load(dst, start - 1, ((number, end),)))
        self.refuses(Load(N_SEQS, start, ((number, end),)))
        if self.unified:
            self.refuses(Load(SCRATCH, start, ((number, end),)))
        self.refuses(Load(dst, start, ((max(self.segments) + 1, end),)))
        self.refuses(Load(dst, start, ((number, end), (number, end))))
        load = Load(dst, start, ((number, end),))
        if start < first:
            self.refuses(load)
            return
        if is_crowded and self.unified and not self.has_states:
            self.fails_with_too_few_cells(load, stop - first - 1)
            return
        if self.unified and self.cells_used + stop - first > N_CTX and self.kind is not StateKind.RECURRENT:
            self.fails(load)
        else:
            self.backend.change(load)
            self.extend(dst, history[start:end])
            self.set_live(dst, is_live=False)

    @precondition(lambda self: any(len(held) > 2 for held in self.oracle.values()))
    @rule(data=st.data())
    def load_what_was_saved_in_parts(self, data: st.DataObject) -> None:
        """Save a sequence in parts, also of tiles, and load them into another one."""
        src = data.draw(st.sampled_from([seq for seq, held in self.oracle.items() if len(held) > 2]))
        dst = data.draw(seqs.filter(lambda seq: seq != src))
        history = self.held(src)
        cuts = sorted(data.draw(st.sets(st.integers(1, len(history) - 1), max_size=4)))
        number, ends = self.unused_number(), [*cuts, len(history)]
        self.backend.change(Remove(dst, 0))
        self.cut(dst, 0)
        if self.unified and self.cells_used + len(history) > N_CTX:
            return
        numbers = range(number, number + len(ends))
        if any(each in self.segments or each in self.checkpoints for each in numbers):
            return
        for each, start, end in zip(numbers, [0, *cuts], ends, strict=True):
            self.backend.change(Save(each, src, start, end))
        self.backend.change(Load(dst, 0, tuple(zip(numbers, ends, strict=True))))
        self.extend(dst, history)
        self.set_live(dst, is_live=False)
        for each in numbers:
            self.backend.change(Free(each))

    @precondition(lambda self: self.is_joint)
    @rule(seq=seqs, place=st.integers(0, 999))
    def cut_a_tile(self, seq: int, place: int) -> None:
        history = self.held(seq)
        n = place % (len(history) + 1)
        if self.bounded(history, n) != n:
            self.refuses(Remove(seq, n))
            self.refuses(Copy(seq, (seq + 1) % SCRATCH, len(self.oracle[(seq + 1) % SCRATCH]), n))

    @precondition(lambda self: self.segments)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.segments)))
        self.backend.change(Free(number))
        del self.segments[number]
        self.refuses(Free(number))

    @precondition(lambda self: any(self.oracle[seq] for seq in self.live))
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        """Take a checkpoint of a live sequence; nothing else changes."""
        src = data.draw(st.sampled_from([seq for seq in sorted(self.live) if self.oracle[seq]]))
        n, number = len(self.oracle[src]), self.unused_number()
        if not self.has_states:
            self.refuses(Take(number, src, n))
            return
        for end in (n - 1, n + 1, 0):
            self.refuses(Take(number, src, end))
        self.refuses(Take(number, N_SEQS, n))
        self.refuses(Restore(number, src))
        for other in set(self.oracle) - self.live:
            self.refuses(Take(number, other, len(self.oracle[other])))
        for taken in (*self.segments, *self.checkpoints):
            self.refuses(Take(taken, src, n))
        self.backend.change(Take(number, src, n))
        self.checkpoints[number] = self.held(src)
        self.refuses(Save(number, src, 0, n))

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """Restore a checkpoint in a sequence that begins with its tokens, whatever it holds after them."""
        fitting = [
            (number, seq)
            for number, history in self.checkpoints.items()
            for seq in range(SCRATCH)
            if self.held(seq)[: len(history)] == history
        ]
        for number, history in self.checkpoints.items():
            for seq in range(SCRATCH):
                if len(self.oracle[seq]) < len(history):
                    self.refuses(Restore(number, seq))
        if fitting:
            number, seq = data.draw(st.sampled_from(fitting))
            self.backend.change(Restore(number, seq))
            del self.oracle[seq][len(self.checkpoints[number]) :]
            self.set_live(seq, is_live=True)

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data())
    def discard_a_checkpoint(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.checkpoints)))
        self.backend.change(Free(number))
        del self.checkpoints[number]
        self.refuses(Free(number))

    @precondition(lambda self: self.has_states)
    @rule(batch=st.dictionaries(seqs, tokens, min_size=1, max_size=2))
    def fail(self, batch: dict[int, list[int]]) -> None:
        """A step fails while it computes: its sequences hold what they held, and states are lost."""
        total = sum(map(len, batch.values()))
        if total > N_UBATCH or self.cells_used + total > N_CTX or not self.live.issuperset(batch):
            return
        if not self.may_mix(batch.values()):
            return
        with self.failing():
            decoded = self.backend.decode([self.run_of(seq, run, True) for seq, run in batch.items()])
        assert decoded.status is Status.ABORTED
        lost = batch if self.kind is StateKind.WINDOW else self.oracle
        for seq in lost:
            self.set_live(seq, is_live=False)

    def failing(self) -> AbstractContextManager[None]:
        """The next step fails."""
        raise NotImplementedError

    @rule(seq=seqs, shift=st.sampled_from([-1, 1, 7]))
    def decode_at_another_position(self, seq: int, shift: int) -> None:
        run = Run(seq, len(self.oracle[seq]) + shift, np.array([97], dtype=np.int32), 1)
        self.refused(lambda: self.backend.decode([run]))

    @rule(token=st.sampled_from([-1, 10**6]), seq=seqs)
    def decode_a_token_that_does_not_exist(self, token: int, seq: int) -> None:
        self.refused(lambda: self.backend.decode([self.run_of(seq, [token], True)]))

    @rule(seq=st.sampled_from([-1, N_SEQS, 255, 256]))
    def use_a_sequence_that_does_not_exist(self, seq: int) -> None:
        shift = Shift(seq, 0, 1, copies=True)
        for operation in (Remove(seq, 0), Copy(seq, 0, 0, 1), Copy(0, seq, 0, 1), Share(0, seq, 0, 1), shift):
            self.refuses(operation)
        self.refused(lambda: self.backend.seq_len(seq))
        self.refused(lambda: self.backend.decode([Run(seq, 0, np.array([97], dtype=np.int32), 1)]))

    @rule()
    def decode_more_than_a_micro_batch(self) -> None:
        self.refused(lambda: self.backend.decode([self.run_of(0, [97] * (N_UBATCH + 1), True)]))
        self.refused(lambda: self.backend.decode([]))
        self.refused(lambda: self.backend.decode([self.run_of(0, [97], True), self.run_of(0, [97], True)]))

    @precondition(lambda self: any(len(s) > 1 for s in self.oracle.values()))
    @rule(data=st.data())
    def copy_onto_taken_positions(self, data: st.DataObject) -> None:
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
    def share_positions_that_one_of_them_lacks(self, data: st.DataObject) -> None:
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
            assert self.backend.seq_range(seq) == range(len(held)) or self.kind is not StateKind.NONE
        if isinstance(self.backend, FakeBackend):
            assert self.backend.cells_used == self.cells_used
            for pool in self.backend.pools:
                pool.check()
            for seq, held in self.oracle.items():
                assert self.backend.seen(seq) == [(i, token) for i, (_, token) in enumerate(held)]
            stored = {number: range(start, len(history)) for number, (start, history) in self.segments.items()}
            assert self.backend.segments == stored
            assert self.backend.states.checkpoints == {n: len(held) for n, held in self.checkpoints.items()}
            assert self.backend.n_segment_bytes == sum(100 + 10 * len(each) for each in stored.values())

    def extend(self, seq: int, run: list[int]) -> None:
        """A sequence holds more tokens, in cells of their own."""
        self.oracle[seq] += [(self.n_computed + i, token) for i, token in enumerate(run)]
        self.n_computed += len(run)

    def cut(self, seq: int, keep: int) -> None:
        """A sequence is truncated."""
        length = len(self.oracle[seq])
        if keep < length:
            is_whole = self.kind is StateKind.WINDOW and length < self.n_swa and seq in self.live
            del self.oracle[seq][keep:]
            self.set_live(seq, is_live=is_whole)

    def set_live(self, seq: int, *, is_live: bool) -> None:
        """A sequence has got the state of its last token, or lost it."""
        if is_live or not self.oracle[seq] or not self.has_states:
            self.live.add(seq)
        else:
            self.live.discard(seq)

    def unused_number(self) -> int:
        return next(i for i in range(100) if i not in self.segments and i not in self.checkpoints)

    @property
    def has_states(self) -> bool:
        return self.kind is not StateKind.NONE

    @property
    def cells_used(self) -> int:
        return len({cell for held in self.oracle.values() for cell, _ in held})

    def may_mix(self, runs: Iterable[list[int]]) -> bool:
        """True if such runs may share a step."""
        return self.kind.allows_mixed_lengths or len({*map(len, runs)}) == 1

    def held(self, seq: int) -> list[int]:
        return [token for _, token in self.oracle[seq]]

    @property
    def copyable(self) -> list[tuple[int, int]]:
        """Pairs of sequences of which the first begins with all tokens of the second, and has more."""
        return [
            (src, dst)
            for src, dst in itertools.permutations(range(SCRATCH), 2)
            if common(self.held(src), self.held(dst)) == len(self.oracle[dst]) < len(self.oracle[src])
        ]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Sequences with a common prefix."""
        return [(a, b) for a in self.oracle for b in self.oracle if a != b and common(self.held(a), self.held(b))]

    def is_beyond_a_partition(self, seqs: Iterable[int], n: int) -> bool:
        """True if so many more tokens may not fit in one of these sequences."""
        return not self.unified and any(len(self.oracle[seq]) + n > N_CTX for seq in seqs)

    def fails_with_too_few_cells(self, load: Load, n_free: int) -> None:
        """Fail to load while another sequence leaves only so many cells."""
        other = (load.dst + 1) % SCRATCH
        n_missing = N_CTX - self.cells_used - n_free
        for n in [N_UBATCH] * (n_missing // N_UBATCH) + [n_missing % N_UBATCH] * (n_missing % N_UBATCH > 0):
            run = Run(other, self.backend.seq_len(other), np.full(n, 97, dtype=np.int32), 0)
            assert self.backend.decode([run]).status is Status.OK
        self.fails(load)
        self.backend.change(Remove(other, len(self.oracle[other])))

    def fails(self, load: Load) -> None:
        """Fail to load for want of cells: the fake backend calls that a bug, the other one empties the target."""
        try:
            self.backend.change(load)
        except IllegalCallError:
            return
        except NotLoadedError:
            self.cut(load.dst, 0)
            return
        raise AssertionError(f"{load} did not fail")

    def run_of(self, seq: int, run: list[int], output: bool) -> Run:
        return Run(seq, len(self.oracle[seq]), np.array(run, dtype=np.int32), output)

    def refuses(self, operation: Operation) -> None:
        self.refused(lambda: self.backend.change(operation))

    def refused(self, call: Callable[[], object]) -> None:
        before = copy.deepcopy(self.oracle)
        with pytest.raises(IllegalCallError):
            call()
        assert self.oracle == before


def common(a: list[int], b: list[int]) -> int:
    """Leading tokens that two sequences have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def cold_answers(
    new_backend: Callable[[], Backend], history: list[int], n: int, pictures: Sequence[Picture] = ()
) -> list[int]:
    """The greedy tokens that follow a history."""
    backend = new_backend()
    try:
        for run in runs_of(pictures, 0, 0, history, output=True):
            assert backend.decode([run]).status is Status.OK
        sampler = backend.new_sampler(GREEDY, np.empty(0, dtype=np.int32))
        answers: list[int] = []
        for at in range(len(history), len(history) + n):
            if answers:
                assert (
                    backend.decode([Run(0, at - 1, np.array(answers[-1:], dtype=np.int32), 1)]).status is Status.OK
                )
            ((token,),) = backend.sample([(0, sampler)])
            answers.append(token)
        sampler.close()
        return answers
    finally:
        backend.close()


class VectorMachine(SequencesMachine):
    """The answers are vectors, and nothing is drafted."""

    verify = None  # type: ignore[assignment]
    tolerance = 0.0

    def check_answers(self, wanted: list[int]) -> None:
        for seq in wanted:
            warm, cold = vector_of(self.backend, seq), cold_vector(self.new_backend, self.held(seq))
            assert np.abs(warm - cold).max() <= self.tolerance
        for seq in set(self.oracle) - set(wanted):
            with pytest.raises(IllegalCallError):
                self.backend.vector(seq)


def vector_of(backend: Backend, seq: int) -> np.ndarray:
    """The normalized vector of a sequence."""
    vector = np.frombuffer(backend.vector(seq), dtype="<f4")
    assert len(vector) == backend.info.n_vector
    return vector / np.linalg.norm(vector)


def cold_vector(new_backend: Callable[[], Backend], history: list[int]) -> np.ndarray:
    backend = new_backend()
    try:
        for at in range(0, len(history), N_UBATCH):
            chunk = np.array(history[at : at + N_UBATCH], dtype=np.int32)
            assert backend.decode([Run(0, at, chunk, at + N_UBATCH >= len(history))]).status is Status.OK
        return vector_of(backend, 0)
    finally:
        backend.close()


class FakeMachine(SequencesMachine):
    backend: FakeBackend

    def new_backend(self) -> FakeBackend:
        if not self.unified:
            return FakeBackend(n_slots=N_SEQS, n_ctx=N_SEQS * N_CTX, n_ubatch=N_UBATCH, unified=False)
        sizes = {"n_slots": N_SLOTS, "n_reserved": N_RESERVED, "n_ctx": N_CTX, "n_ubatch": N_UBATCH}
        return FakeBackend(kind=self.kind, n_rollback=self.n_rollback, **sizes)

    def same_answer(self, history: list[int], warm: int, cold: int) -> bool:
        return warm == cold

    @contextmanager
    def failing(self) -> Iterator[None]:
        self.backend.failures.append((Status.ABORTED, 1))
        yield


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(StateKind))
def test_fake_backend(kind: StateKind) -> None:
    fields = {"kind": kind, "n_swa": WINDOW, "n_rollback": 5 * (kind is StateKind.HYBRID)}
    machine = type("FakeMachine", (FakeMachine,), fields)
    n = (1200 if LONG else 40) // (1 if kind is StateKind.NONE else 2)
    run_state_machine_as_test(machine, settings=settings(max_examples=n))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [StateKind.NONE, StateKind.WINDOW, StateKind.HYBRID])
@pytest.mark.parametrize("projector", [True, "whole", "joint"])
def test_fake_backend_with_images(kind: StateKind, projector: bool | Literal["whole", "joint"]) -> None:
    class Machine(FakeMachine):
        n_swa = WINDOW
        is_joint = projector == "joint"
        pictures = pictures_of(FakeBackend(projector=projector))

        def new_backend(self) -> FakeBackend:
            sizes = {"n_slots": N_SLOTS, "n_reserved": N_RESERVED, "n_ctx": N_CTX, "n_ubatch": N_UBATCH}
            return FakeBackend(kind=self.kind, projector=projector, **sizes)

    machine = type("Machine", (Machine,), {"kind": kind})
    run_state_machine_as_test(machine, settings=settings(max_examples=600 if LONG else 20))


@pytest.mark.slow
def test_partitioned_fake_backend() -> None:
    machine = type("FakeMachine", (FakeMachine,), {"unified": False})
    run_state_machine_as_test(machine, settings=settings(max_examples=600 if LONG else 20))


@pytest.mark.slow
def test_fake_backend_of_vectors() -> None:
    class Machine(VectorMachine):
        def new_backend(self) -> FakeBackend:
            sizes = {"n_slots": N_SLOTS, "n_reserved": N_RESERVED, "n_ctx": N_CTX, "n_ubatch": N_UBATCH}
            return FakeBackend(pooling="last", **sizes)

    run_state_machine_as_test(Machine, settings=settings(max_examples=600 if LONG else 20))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("n_rows", [8, N_UBATCH])
def test_llama_backend_of_vectors(n_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few rows of outputs, larger steps are computed in two batches."""
    monkeypatch.setattr(loading, "spare_rows", lambda *_: n_rows)
    chosen = LlamaSettings(
        synthetic.ensure("tiny", folder=tmp_path, is_exact=True), n_ctx=N_CTX, n_slots=N_SLOTS,
        n_cache_seqs=N_RESERVED, n_ubatch=N_UBATCH, n_threads=1, cache_type_k="f32", cache_type_v="f32",
        flash_attn="off", embeds=True, pooling="last",
    )  # fmt: skip

    class Machine(VectorMachine):
        tolerance = 1e-4

        def new_backend(self) -> Backend:
            return LlamaBackend(chosen)

    run_state_machine_as_test(Machine, settings=settings(max_examples=100 if LONG else 5, stateful_step_count=40))


@pytest.mark.gpu
@pytest.mark.parametrize("is_unified", [True, False])
def test_llama_backend(tiny_model: Path, *, is_unified: bool) -> None:
    sizes = (
        {"n_ctx": N_CTX, "n_slots": N_SLOTS, "n_cache_seqs": N_RESERVED}
        if is_unified
        else {"n_ctx": N_SEQS * N_CTX, "n_slots": N_SEQS, "n_cache_seqs": 0}
    )
    chosen = LlamaSettings(tiny_model, n_ubatch=N_UBATCH, n_threads=1, unified=is_unified, **sizes)
    noise = Noise(chosen)

    class LlamaMachine(SequencesMachine):
        unified = is_unified

        def new_backend(self) -> Backend:
            return LlamaBackend(chosen)

        def same_answer(self, history: list[int], warm: int, cold: int) -> bool:
            return warm == cold or noise.explains(history, warm, cold)

    run_state_machine_as_test(
        LlamaMachine, settings=settings(max_examples=200 if LONG else 10, stateful_step_count=40)
    )
    print(f"tokens that differed within noise: {noise.n_explained}")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tiny-lfm2", "tiny-qwen35", "tiny-mamba", "tiny-swa"])
def test_llama_backend_with_a_partial_state(shape: str) -> None:
    chosen = LlamaSettings(
        synthetic.ensure(shape, is_exact=True), n_ctx=N_CTX, n_slots=N_SLOTS, n_cache_seqs=N_RESERVED + 1,
        n_ubatch=N_UBATCH, n_threads=1, flash_attn="off", cache_type_k="f32", cache_type_v="f32", checkpoints=True,
        max_draft=5,
    )  # fmt: skip
    noise = Noise(chosen)
    backend = LlamaBackend(chosen)
    state = backend.info.state
    backend.close()

    class LlamaMachine(SequencesMachine):
        kind, n_swa, n_rollback = state.kind, state.n_swa, state.n_rollback
        backend: LlamaBackend

        def new_backend(self) -> LlamaBackend:
            return LlamaBackend(chosen)

        def same_answer(self, history: list[int], warm: int, cold: int) -> bool:
            return warm == cold or noise.explains(history, warm, cold)

        def failing(self) -> AbstractContextManager[None]:
            return failing(self.backend)

    assert state.kind is not StateKind.NONE
    assert state.n_rollback == 5 * (state.kind is StateKind.HYBRID)
    run_state_machine_as_test(
        LlamaMachine, settings=settings(max_examples=100 if LONG else 5, stateful_step_count=40)
    )
    print(f"tokens that differed within noise: {noise.n_explained}")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "of_projector"),
    [
        ("tiny", "idefics3"),
        ("tiny", "gemma3"),
        ("tiny-swa", "gemma3"),
        ("tiny-swa", "idefics3"),
        ("tiny-lfm2", "idefics3"),
        ("tiny-mamba", "idefics3"),
        ("tiny-qwen2vl", "qwen2vl_merger"),
        ("tiny-qwen35", "qwen2vl_merger"),
    ],
)
def test_llama_backend_with_images(shape: str, of_projector: Kind, tmp_path: Path) -> None:
    is_mrope = of_projector == "qwen2vl_merger"
    model = with_tokens(
        synthetic.ensure(shape.replace("-qwen2vl", ""), folder=tmp_path, is_exact=True), tmp_path / "model.gguf"
    )
    if shape == "tiny-qwen2vl":
        model = with_mrope(model, tmp_path / "qwen2vl.gguf")
    chosen = LlamaSettings(
        model, mmproj=write_projector(tmp_path / "mmproj.gguf", of_projector), n_ctx=N_CTX, n_slots=N_SLOTS,
        n_cache_seqs=N_RESERVED + ("tiny-" in shape and shape != "tiny-qwen2vl"), n_ubatch=N_UBATCH, n_threads=1,
        flash_attn="on" if is_mrope else "off", cache_type_k="f32", cache_type_v="f32", checkpoints=True,
        max_draft=5,
    )  # fmt: skip
    backend = LlamaBackend(chosen)
    state, tiles = backend.info.state, pictures_of(backend)
    backend.close()

    class LlamaMachine(SequencesMachine):
        kind, n_swa, n_rollback = state.kind, state.n_swa, state.n_rollback
        pictures, is_joint = tiles, is_mrope
        backend: LlamaBackend

        def new_backend(self) -> LlamaBackend:
            return LlamaBackend(chosen)

        def same_answer(self, history: list[int], warm: int, cold: int) -> bool:
            if warm == cold:
                return True
            backend = self.new_backend()
            for run in runs_of(tiles, 0, 0, history, output=True):
                backend.decode([run])
            found = logits(backend, len(run.tokens) - 1)
            backend.close()
            # What rounding explains; other images change them by more (`test_projector.py`).
            return bool(abs(found[warm] - found[cold]) < 0.01)

        def failing(self) -> AbstractContextManager[None]:
            return failing(self.backend)

    run_state_machine_as_test(
        LlamaMachine, settings=settings(max_examples=100 if LONG else 5, stateful_step_count=40)
    )
