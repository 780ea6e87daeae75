"""A backend without a model for tests, with the KV cells of llama.cpp.

A cell holds a token, its position and the set of sequence ids that use it, as in llama.cpp (`seq_rm`, `seq_cp`).
A generated token is a hash of the (position, token) pairs of its sequence, so wrong KV gives a wrong token. So does
a wrong partial state, in models of a `kind` that has one: a hash of the tokens that were computed in the sequence.
Tokens of images have their negative ids in their cells.
What is computed with LoRA adapters has other tokens in its cells (`adapted`), and so has what was moved to other
positions (`moved`). Constraints are followed by the real matcher, on a vocabulary of bytes. Tests choose which
decodes fail. The state machine that tests the real backend (`tests/backend/test_state_machine.py`) tests this one
too, so it cannot be bent to pass.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

import msgspec
import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from llamaslot.backend.constraints import Compiled, ConstraintCompiler, Matcher
from llamaslot.base import kv_ops
from llamaslot.base.adapters import Adapters
from llamaslot.base.backend import (
    CONSTRAINT_FAILED,
    NO_TOKEN,
    CompiledConstraint,
    Decoded,
    Draws,
    Run,
    Status,
    accepted,
    check_adapters,
    check_runs,
)
from llamaslot.base.commands import Constraint
from llamaslot.base.errors import ConfigError, InvalidRequestError, NotSupportedError
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.generation.token_probs import NOT_SCORED, TokenScore
from llamaslot.base.images import ImageLayout, ImageSize, tile_ids
from llamaslot.base.model import (
    Adapter,
    Capabilities,
    CheckpointSize,
    ModelInfo,
    Pooling,
    ProjectorInfo,
    RerankFormat,
    SegmentSize,
    StateKind,
)
from llamaslot.base.stats import BackendStats
from llamaslot.base.tokens import Tokens
from llamaslot.text.grammars.compiling import SPECIAL_PREFIX, LocalTrial, Vocabulary
from tests.fake_pool import CellPool

_Saved: TypeAlias = list[tuple[int, int]]
"""Tokens and their positions, in the order of their cells."""

SEGMENT_SIZE = SegmentSize(100, 10)
BOS, EOS = 256, 257
WINDOW = 8
"""Tokens of a sliding window."""
N_VOCAB = 258
N_TOKENS = 2**12
"""More than the tokens of any vocabulary, so that a cell can also have a number for the adapters."""
MAX_EDGE = 4096
"""Most pixels of an image's edge."""
N_VECTOR, N_SCORES = 6, 2
"""Numbers of a vector, and scores of a reranker."""


_MOVED = 2**60


class FakeVocab:
    """A token for each byte, and the control tokens `<s>`, `end`, and others; `ends` of them end generations too.
    `tags` are added tokens that are text in a reply.

    `<s>` in a text is not parsed.
    """

    stack_bytes = 0
    words_per_token = 0

    def __init__(
        self, others: Sequence[str] = (), *, end: str = "</s>", ends: Sequence[str] = (), tags: Sequence[str] = ()
    ) -> None:
        self.names = {BOS: "<s>", EOS: end} | dict(enumerate((*others, *tags), N_VOCAB))
        self.named_tokens = {name: token for token, name in self.names.items()}
        self.added_tags = {name: self.named_tokens[name] for name in tags}
        self.n_tokens = BOS + len(self.names)
        self.eog = frozenset({EOS, *(self.named_tokens[name] for name in ends)})
        self.special_tokens = tuple(self.names.values())
        self.cut_tokens = self.special_tokens[1:]
        self.longest_piece = max(map(len, self.special_tokens))
        self._parsed = re.compile("|".join(map(re.escape, sorted(self.cut_tokens, key=len, reverse=True))))

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        """Return the UTF-8 bytes of `text` as tokens."""
        ids = [BOS] if add_special else []
        done = 0
        for control in self._parsed.finditer(text) if parse_special else ():
            ids += [*text[done : control.start()].encode(), self.named_tokens[control[0]]]
            done = control.end()
        return np.array([*ids, *text[done:].encode()], dtype=np.int32)

    def piece(self, token: int) -> bytes:
        """Return one byte, the text of an added tag, or nothing for a control token."""
        if token < BOS:
            return bytes([token])
        return self.names[token].encode() if self.names[token] in self.added_tags else b""

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of all tokens, control tokens written out, and none for those of images."""
        return b"".join(self.names[t].encode() if t in self.names else bytes([t]) for t in tokens if t >= 0)


@dataclass(slots=True)
class FakeSampler:
    """Sampler that is greedy or follows a seed; `closed` lets tests find leaks."""

    sampling: Sampling
    n_drawn: int = 0
    closed: bool = False
    scores: list[TokenScore] = field(default_factory=list)
    matcher: Matcher | None = None

    @property
    def failure(self) -> str:
        """Reason for `CONSTRAINT_FAILED`."""
        return self.matcher.failure if self.matcher is not None else ""

    def advance(self, *, forced: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens that the constraint forces behind `forced` ones."""
        if self.matcher is None:
            return ()
        for token in forced:
            self.matcher.accept(token)
        more = self.force()
        self.matcher.begin_mask()
        return more

    def force(self) -> tuple[int, ...]:
        """Return the tokens that the constraint forces next, unless probabilities are wanted."""
        return self.matcher.forced() if self.matcher is not None and self.sampling.n_probs < 0 else ()

    def close(self) -> None:
        """Mark the sampler as freed; a bug if it is already."""
        if self.closed:
            raise kv_ops.IllegalCallError("a sampler was closed twice")
        self.closed = True


def sent(runs: Sequence[Run]) -> dict[int, tuple[int, int]]:
    """First position and number of tokens of each sequence in a batch."""
    found: dict[int, tuple[int, int]] = {}
    for run in runs:
        first, n = found.get(run.seq, (run.start, 0))
        found[run.seq] = first, n + len(run.tokens)
    return found


class FakeBackend:
    """`Backend` of a hash function.

    `failures` are the results of the next decodes, each with the number of runs that are applied all the same.
    With the projector `joint` tokens of a tile cannot be removed or copied alone, as in models with M-RoPE.
    """

    n_tiles_encoded = n_decoded = 0
    n_switches = 0
    """Number of steps with other adapters than the one before."""

    def __init__(
        self,
        *,
        vocab: FakeVocab | None = None,
        n_slots: int = 4,
        n_reserved: int = 0,
        n_seqs: int | None = None,
        n_ctx: int = 256,
        n_ubatch: int = 32,
        unified: bool = True,
        can_trim: bool = True,
        segment_size: SegmentSize | None = SEGMENT_SIZE,
        n_spare_rows: int = 8,
        eos_every: int = 40,
        kind: StateKind = StateKind.NONE,
        n_rollback: int = 0,
        may_partition: bool = False,
        pooling: Pooling | Literal[""] = "",
        rerank: RerankFormat | None = None,
        attends_later: bool = False,
        n_adapters: int = 0,
        invocation: bytes = b"",
        flash_attn: bool = True,
        projector: bool | Literal["whole", "joint"] = False,
    ) -> None:
        self.vocab = vocab or FakeVocab()
        has_states = kind is not StateKind.NONE
        embeds_whole = attends_later or pooling in ("none", "mean", "cls")
        can_trim = can_trim and not has_states and not embeds_whole
        n_seqs = n_seqs or (n_slots + n_reserved + 2 if has_states else None)
        self.n_seqs = n_seqs or n_slots + n_reserved + 2 * (unified and can_trim)
        self._scratch = self.n_seqs - 1 if unified and self.n_seqs > n_slots else None
        self._can_reuse = can_trim or has_states
        can_save = self._can_reuse and flash_attn and (self._scratch is not None or not unified)
        self.info = ModelInfo(
            name="fake", path="fake.gguf", architecture="fake", description="fake", n_params=0, size_bytes=0,
            n_vocab=self.vocab.n_tokens, vocab_type=2, n_embd=1, n_ctx_train=n_ctx, n_ctx=n_ctx,
            n_ctx_slot=n_ctx if unified else n_ctx // n_slots, n_slots=n_slots, n_batch=n_ubatch,
            n_ubatch=n_ubatch, unified=unified, flash_attn=flash_attn, cache_type_k="f16", cache_type_v="f16",
            device="none", part_cells=n_ctx // n_slots * may_partition,
            reuse_reason="" if can_trim else "turned off by the test",
            bos_token="<s>",
            eos_token=self.vocab.names[EOS], eog=(EOS,), n_cache_seqs=n_reserved,
            segment_size=segment_size if can_save else None, n_spare_rows=n_spare_rows,
            state=Capabilities(kind=kind, can_trim=can_trim, n_swa=WINDOW, n_rollback=n_rollback),
            keeps_checkpoints=has_states,
            checkpoint_size=CheckpointSize(64, 8 * ("window" in kind), WINDOW) if has_states else None,
            pooling=pooling, embeds_whole=embeds_whole, rerank=rerank,
            n_vector=0 if not pooling else N_SCORES if pooling == "rank" else N_VECTOR,
            adapters=tuple(
                Adapter(f"{i}.gguf", f"digest-{i}", 0.0, invocation=tuple(invocation)) for i in range(n_adapters)
            ),
            projector=ProjectorInfo("projector", n_ubatch * (projector == "whole")) if projector else None,
        )  # fmt: skip
        self._is_joint = projector == "joint"
        self.failures: deque[tuple[Status, int]] = deque()
        self.poison: set[int] = set()
        """Tokens after which a sequence has no logits."""
        self.bad_segments: set[int] = set()
        """Saved segments whose cells are bad once loaded."""
        self.bad_images: set[bytes] = set()
        """Files of images that cannot be encoded."""
        self._tiles: dict[int, int] = {}
        """Numbers of tokens of the tiles, by the id of the first one, if these cannot be cut."""
        self.samplers: list[FakeSampler] = []
        self.is_loaded = True
        self.load_error = ""
        """Reason why the model cannot be loaded again."""
        self.alphabet = b"abcdefghijklmnopqrstuvwxyz"
        """Tokens that are generated."""
        self._eos_every = eos_every
        self._make_pools()
        self.is_spoiled = False
        """True once a token of `poison` was computed without flash attention, until its data is cleared."""
        self._adapters: Adapters = ()
        self._rows: dict[int, list[int]] = {}
        self._drafts: dict[int, list[int]] = {}
        self._targets: dict[int, Run] = {}
        self.states = kv_ops.StateRecord(kind, WINDOW, n_rollback)
        self._partial: dict[int, int] = {}
        """The partial state of each sequence that has one: a hash of all tokens that it stands for."""
        self._after: dict[tuple[int, int], int] = {}
        """Partial states within the last step, by sequence and length."""
        self._taken: dict[int, int] = {}
        """That of each checkpoint, by number."""
        self._unrotated: set[int] = set()
        """Sequences with tokens that were moved since the last decode."""
        self.segments: dict[int, range] = {}
        """Token positions of each saved segment, by number."""
        self._states: dict[int, _Saved] = {}
        self._constraints = ConstraintCompiler(
            lambda: byte_tokenizer(self.vocab), n_vocab=self.vocab.n_tokens, eog=sorted(self.vocab.eog)
        )

    def clear(self) -> None:
        """Make the pools anew, which are empty."""
        self._check_loaded()
        if any(pool.n_used for pool in self.pools):
            raise kv_ops.IllegalCallError("a sequence holds something")
        self._make_pools()
        self.is_spoiled = False

    def unload(self) -> None:
        """Refuse what needs the pools, which are empty."""
        self._check_loaded()
        if any(pool.n_used for pool in self.pools):
            raise kv_ops.IllegalCallError("a sequence holds something")
        self.is_loaded = False

    def reload(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Allow what needs the pools again."""
        if self.is_loaded:
            raise kv_ops.IllegalCallError("the model is loaded")
        if self.load_error or should_stop():
            raise ConfigError(self.load_error or "loading the model was stopped")
        self.is_loaded = True

    def _check_loaded(self) -> None:
        if not self.is_loaded:
            raise kv_ops.IllegalCallError("the model is not loaded")

    def set_layout(self, *, unified: bool) -> None:
        """Make new pools."""
        self._check_loaded()
        if not self.info.part_cells or any(pool.n_used for pool in self.pools):
            raise kv_ops.IllegalCallError("the layout is fixed, or a sequence holds something")
        self.info = msgspec.structs.replace(self.info, unified=unified)
        self.n_seqs = self.info.n_slots + unified * (self.info.n_cache_seqs + 2)
        self._scratch = self.n_seqs - 1 if unified else None
        self._rows, self._targets = {}, {}
        self._make_pools()

    def _make_pools(self) -> None:
        info = self.info
        n_pools, size = (1, info.n_ctx) if info.unified else (self.n_seqs, info.n_ctx // info.n_slots)
        self.pools = [CellPool(size) for _ in range(n_pools)]

    def change(self, operation: kv_ops.Operation) -> None:  # noqa: PLR0912
        """Carry out an operation on sequences."""
        if not isinstance(operation, kv_ops.Free):
            self._check_loaded()
        kv_ops.check_operation(
            operation,
            length_of=self._length,
            segments=self.segments,
            can_reuse=self._can_reuse,
            can_shift=not self.info.unshifted_reason,
            unified=self.info.unified,
            scratch=self._scratch,
            states=self.states,
        )
        self._check_tiles(operation)
        match operation:
            case kv_ops.Remove(seq, keep):
                if not self._can_reuse and not self.info.can_trim and 0 < keep < self.seq_len(seq):
                    raise kv_ops.IllegalCallError("this model's sequences can only be cleared whole")
                self._remove(operation)
            case kv_ops.Copy(src) | kv_ops.Share(src) | kv_ops.Save(src=src) if src in self._unrotated:
                raise kv_ops.IllegalCallError(f"{operation}: the keys of moved tokens are not rotated yet")
            case kv_ops.Share(src, dst):
                start, end = (self._tile_start(dst, n) for n in (operation.start, operation.end))
                self._pool(dst).remove(dst, start, end)
                self._pool(dst).copy(src, dst, start, end)
            case kv_ops.Shift():
                self._shift(operation)
            case kv_ops.Copy(src, dst, start, end):
                self.states.copy(operation, self.seq_len(src))
                if self.info.unified:
                    self._pool(dst).copy(src, dst, start, end)
                else:
                    self._pool(dst).copy_from(self._pool(src), src, dst, start, end)
                self._set_state(dst, self._partial.get(src))
            case kv_ops.Save(segment, src, start, end):
                self.segments[segment] = range(start, end)
                cells = self._pool(src).of(src, start, end)
                self._states[segment] = [(cell.token, cell.position) for cell in cells]
                if any(cell.is_bad for cell in cells):
                    self.bad_segments.add(segment)
            case kv_ops.Load(dst):
                for segment, start, end in operation.ranges:
                    self._load(segment, dst, start, end)
                self.states.load(dst)
                self._set_state(dst, None)
                if self._tile_start(dst, operation.end) != operation.end and not self.states.has_states:
                    raise kv_ops.IllegalCallError(f"{operation}: a part of a tile")
            case kv_ops.Take(checkpoint, src, end):
                self.states.checkpoints[checkpoint] = end
                self._taken[checkpoint] = self._partial[src]
            case kv_ops.Restore(checkpoint, dst):
                self._pool(dst).remove(dst, self.states.checkpoints[checkpoint], self.seq_len(dst))
                self.states.restore(dst)
                self._set_state(dst, self._taken[checkpoint])
            case kv_ops.Free(checkpoint) if checkpoint in self._taken:
                del self.states.checkpoints[checkpoint], self._taken[checkpoint]
            case kv_ops.Free(segment):
                del self.segments[segment], self._states[segment]
                self.bad_segments.discard(segment)

    def kv_of(self, segment: int) -> kv_ops.Kv | None:
        """Return the bytes of a segment or checkpoint, as many as its size says, or None."""
        if segment in self._taken and self.info.checkpoint_size is not None:
            state = np.zeros(self.info.checkpoint_size.of(self.states.checkpoints[segment]), dtype=np.uint8)
            state[:8] = np.array([self._taken[segment]], dtype=np.int64).view(np.uint8)
            return state
        saved, size = self._states.get(segment), self.info.segment_size
        if saved is None or size is None:
            return None
        state = np.zeros(size.of(len(saved)), dtype=np.uint8)
        pairs = np.array(saved, dtype=np.int32).view(np.uint8).ravel()
        state[: len(pairs)] = pairs
        return state

    def put(self, segment: int, start: int, end: int, kv: kv_ops.Kv) -> None:
        """Add a segment of KV that an earlier process saved."""
        if start == end:
            self._taken[segment], self.states.checkpoints[segment] = int(kv[:8].view(np.int64)[0]), end
            return
        size = self.info.segment_size
        if size is None or len(kv) != size.of(end - start):
            raise ValueError(f"{len(kv)} bytes are not {end - start} tokens")
        pairs = kv[: 8 * (end - start)].view(np.int32).reshape(-1, 2)
        self._states[segment] = [(token, position) for token, position in pairs.tolist()]
        self.segments[segment] = range(start, end)

    def end_changes(self) -> None:
        """Do nothing: nothing is kept for further operations."""

    def seq_len(self, seq: int) -> int:
        """Return the number of tokens of a sequence."""
        self._check_loaded()
        return self._length(seq)

    def _length(self, seq: int) -> int:
        kv_ops.check_seq(seq, self.n_seqs)
        seen = self.seen(seq)
        return seen[-1][0] + 1 if seen else 0

    def seq_range(self, seq: int) -> range:
        """Return the positions that a sequence holds, from the lowest to the highest."""
        kv_ops.check_seq(seq, self.n_seqs)
        seen = self.seen(seq)
        return range(seen[0][0], seen[-1][0] + 1) if seen else range(0)

    stats = BackendStats()

    def image_layout(self, size: ImageSize) -> ImageLayout:
        """Return a layout with up to 4 tiles, each between delimiters, or with one if tiles are computed whole."""
        if self.info.projector is None:
            raise NotSupportedError("this server takes no images: start it with --mmproj")
        if min(size.width, size.height) < 1 or max(size.width, size.height) > MAX_EDGE:
            raise InvalidRequestError(f"no tokens can be made of an image of {size.width} x {size.height} pixels")
        n_tiles = 1 if self.info.projector.max_tile else min(1 + size.width // 64, 4)
        pieces: list[tuple[int, ...] | int] = [tuple(b"<i>")]
        for _ in range(n_tiles):
            pieces += [3 + size.height % 5, (ord("|"),)]
        return ImageLayout((*pieces[:-1], tuple(b"</i>")))

    def _encode(self, run: Run) -> bool:
        """Check the ids of a tile and count its encoding; False if that fails."""
        assert run.tile is not None
        image = run.tile.image
        if not np.array_equal(tile_ids(image.digest, run.tile.number, len(run.tokens)), run.tokens):
            raise kv_ops.IllegalCallError("the tokens are not those of the tile")
        if image.data in self.bad_images:
            return False
        if self._is_joint:
            self._tiles[int(run.tokens[0])] = len(run.tokens)
        self.n_tiles_encoded += 1
        return True

    def _tile_start(self, seq: int, n: int) -> int:
        """Return `n`, or the start of the tile within which a sequence would end that has so many tokens."""
        ids = [token_of(cell) for _, cell in self.seen(seq)]
        starts = (i for i, each in enumerate(ids) if each in self._tiles)
        return next((start for start in starts if start < n < start + self._tiles[ids[start]]), n)

    def _check_tiles(self, operation: kv_ops.Operation) -> None:
        cuts: list[tuple[int, int]] = []
        match operation:
            case kv_ops.Remove(seq, keep):
                cuts = [(seq, keep)]
            case kv_ops.Copy(src, _, start, end):
                cuts = [(src, start), (src, end)]
        if any(self._tile_start(seq, n) != n for seq, n in cuts):
            raise kv_ops.IllegalCallError(f"{operation}: a part of a tile")

    def use_adapters(self, adapters: Adapters) -> None:
        """Have KV depend on these adapters from now on."""
        self._check_loaded()
        check_adapters(adapters, self.info)
        self.n_switches += adapters != self._adapters
        self._adapters = adapters

    def decode(self, runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        """Place a batch in the pool, or fail as `failures` says."""
        self._check_loaded()
        check_runs(runs, length_of=self.seq_len, info=self.info, states=self.states)
        if runs[0].tile is not None and not self._encode(runs[0]):
            return Decoded(Status.INVALID, sent(runs))
        self._unrotated.clear()
        status, n_applied = self.failures.popleft() if self.failures else (Status.OK, len(runs))
        self._rows = {}
        self._after = {}
        self._targets = {run.seq: run for run in runs if run.targets is not None}
        if status in (Status.NO_CELLS, Status.INVALID) or not self._fits(runs):
            return Decoded(status if status is not Status.OK else Status.NO_CELLS, sent(runs))
        self.states.decoded(run.seq for run in runs[:n_applied])
        for run in runs[:n_applied]:
            self.n_decoded += len(run.tokens)
            rows = []
            n_before = len(run.tokens) - max(run.n_outputs, 1) + 1
            # All tokens up to the first row of logits at once, then the drafted ones.
            for start, end in [(0, n_before), *((i, i + 1) for i in range(n_before, len(run.tokens)))]:
                tokens = [adapted(token, self._adapters) for token in run.tokens[start:end].tolist()]
                self._place(run.seq, [(token, run.start + start + i) for i, token in enumerate(tokens)])
                if self.states.has_states:
                    self._partial[run.seq] = _state_of(tokens, self._partial.get(run.seq, 0))
                    self._after[run.seq, run.start + end] = self._partial[run.seq]
                if status is Status.OK and run.n_outputs:
                    is_bad = self._pool(run.seq).is_bad(run.seq, self.poison)
                    rows.append(NO_TOKEN if is_bad or self.is_spoiled else self._logits(run.seq))
            if rows:
                self._rows[run.seq] = rows
                self._drafts[run.seq] = run.draft.tolist()
        self.is_spoiled |= not self.info.flash_attn and any(NO_TOKEN in rows for rows in self._rows.values())
        if self.states.has_states and status in (Status.ABORTED, Status.FATAL):
            self._lose_states(runs)
        return Decoded(status, sent(runs))

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """Compile a constraint for bytes."""
        return self._constraints.compile(constraint)

    def new_sampler(
        self, sampling: Sampling, history: Tokens, constraint: CompiledConstraint | None = None
    ) -> FakeSampler:
        """Create a sampler, and keep it in `samplers`."""
        assert isinstance(constraint, Compiled | None)
        sampler = FakeSampler(sampling, matcher=constraint.matcher() if constraint is not None else None)
        self.samplers.append(sampler)
        return sampler

    def sample(self, draws: Draws) -> list[tuple[int, ...]]:
        """Sample for each sequence id: drafted tokens as far as they are right, and one more."""
        sampled = []
        for seq, sampler in draws:
            if not isinstance(sampler, FakeSampler) or sampler.closed:
                raise kv_ops.IllegalCallError("sampling with a freed sampler")
            sampler.scores.clear()
            choose = functools.partial(self._draw, self._rows[seq], sampler)
            sampled.append(accepted(self._drafts[seq], self.vocab.eog, choose, sampler.force))
        return sampled

    def score(self, seq: int, n_top: int) -> list[TokenScore]:
        """Score the targets of a sequence, each by the tokens up to it."""
        run = self._targets[seq]
        assert run.targets is not None
        seen = self.seen(seq)
        scores = []
        for i, token in enumerate(run.targets.tolist()):
            before = seen[: run.start + i + 1]
            is_bad = any(position_token[1] in self.poison for position_token in before)
            scores.append(TokenScore(token, NOT_SCORED) if is_bad else prompt_score(before, token, n_top))
        return scores

    def vector(self, seq: int) -> bytes:
        """Return a vector that is a hash of the (position, token) pairs of a sequence, or scores."""
        if not self.info.pooling or seq not in self._rows or self._targets:
            raise kv_ops.IllegalCallError(f"sequence {seq} has no vector")
        (row,), n = self._rows[seq], self.info.n_vector
        if self.info.pooling == "none":
            seen = self.seen(seq)
            return b"".join(vector_of(_digest(seen[:end]), n) for end in range(1, len(seen) + 1))
        return np.full(n, np.nan, dtype="<f4").tobytes() if row == NO_TOKEN else vector_of(row, n)

    def run_self_test(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Return True: no test of this backend is ever pending."""
        return True

    def measure_costs(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Return True: no cost of this backend is ever pending."""
        return True

    def close(self) -> None:
        """End the threads that compute masks; there is no model to free."""
        self._constraints.close()

    def seen(self, seq: int) -> list[tuple[int, int]]:
        """Return the (position, token) pairs of a sequence, in order."""
        return self._pool(seq).seen(seq)

    def contents(self) -> list[list[tuple[int, int]]]:
        """Return what `seen` does, of all sequences at once."""
        return [self.seen(seq) for seq in range(self.n_seqs)]

    def damage(self, position: int) -> None:
        """Make what all sequences hold at a position bad, as an overflow or faulty memory would."""
        for pool in self.pools:
            for cell in pool.cells:
                cell.is_bad |= bool(cell.seqs) and cell.position == position

    @property
    def cells_used(self) -> int:
        """Number of cells that any sequence uses."""
        return sum(pool.n_used for pool in self.pools)

    @property
    def n_segment_bytes(self) -> int:
        """Size of all saved segments."""
        size = self.info.segment_size
        return sum(size.of(len(saved)) for saved in self.segments.values()) if size is not None else 0

    def _place(self, seq: int, saved: _Saved, *, is_bad: bool = False) -> None:
        """Place tokens of a sequence in the lowest free cells."""
        pool = self._pool(seq)
        if pool.n_free < len(saved):
            raise kv_ops.IllegalCallError(f"{len(saved)} tokens cannot be placed in {pool.n_free} cells")
        pool.place(seq, saved, is_bad=is_bad)

    def _shift(self, shift: kv_ops.Shift) -> None:
        pool, discarded = self._pool(shift.seq), self.seen(shift.seq)[shift.start : shift.end]
        copies = shift.copies and self.info.unified
        pool.shift(shift.seq, shift.start, shift.end, lambda token: moved(token, discarded), copies=copies)
        self._unrotated.add(shift.seq)

    def _remove(self, operation: kv_ops.Remove) -> None:
        seq, keep, length = operation.seq, operation.keep, self.seq_len(operation.seq)
        if not keep:
            self._unrotated.discard(seq)
        if keep >= length:
            return
        self.states.truncate(operation, length)
        self._pool(seq).remove(seq, keep, length)
        if operation.is_rejected and self.states.is_live(seq) and self.states.has_states:
            self._partial[seq] = self._after[seq, keep]
        elif self.states.is_live(seq) and keep:
            # A window that was never full: it has lost nothing.
            self._partial[seq] = _state_of([token for _, token in self.seen(seq)])
        else:
            self._set_state(seq, None)

    def _set_state(self, seq: int, state: int | None) -> None:
        """Give a sequence a partial state, or none if it is not to have one."""
        if state is None or not self.states.is_live(seq):
            self._partial.pop(seq, None)
        else:
            self._partial[seq] = state

    def _lose_states(self, runs: Sequence[Run]) -> None:
        starts = {run.seq: run.start for run in runs}
        for seq, start in starts.items():
            self._pool(seq).remove(seq, start, self.seq_len(seq))
        self.states.fail(starts, {seq: self.seq_len(seq) for seq in range(self.n_seqs)})
        for seq in range(self.n_seqs):
            self._set_state(seq, self._partial.get(seq) if self.seq_len(seq) else None)

    def _load(self, segment: int, dst: int, start: int, end: int) -> None:
        is_bad = segment in self.bad_segments
        if self._scratch is None:
            wanted = [(token, position) for token, position in self._states[segment] if start <= position < end]
            self._place(dst, wanted, is_bad=is_bad)
            return
        self._place(self._scratch, self._states[segment], is_bad=is_bad)
        self._pool(dst).copy(self._scratch, dst, start, end)
        self._pool(self._scratch).remove(self._scratch, 0, self.seq_len(self._scratch))

    def _draw(self, rows: Sequence[int], sampler: FakeSampler, index: int) -> int:
        row = rows[index]
        if row == NO_TOKEN:
            return NO_TOKEN
        sampler.n_drawn += 1
        if sampler.sampling.temperature > 0:
            row = _digest((row, sampler.sampling.seed, sampler.n_drawn))
        if sampler.matcher is not None:
            token = self._draw_allowed(row, sampler.matcher)
        else:
            is_end = row % self._eos_every == 0 and not sampler.sampling.ignore_eos
            token = EOS if is_end else self.alphabet[row // self._eos_every % len(self.alphabet)]
        if sampler.sampling.n_probs >= 0 and token >= 0:
            sampler.scores.append(score_of(row, token, sampler.sampling.n_probs))
        return token

    def _draw_allowed(self, row: int, matcher: Matcher) -> int:
        mask = matcher.mask()
        if mask is None:
            return CONSTRAINT_FAILED
        # As a model does that was trained on text: mostly visible characters, and quotes that end.
        allowed = mask.tokens if mask.is_allowed else np.setdiff1d(np.arange(self.vocab.n_tokens), mask.tokens)
        plain = [token for token in allowed.tolist() if 32 <= token < 127 or token == EOS]
        ends = [token for token in plain if token in (*b'"]}', EOS)]
        chosen = ends if ends and row % 4 == 0 else plain or allowed.tolist()
        token: int = chosen[row // 4 % len(chosen)]
        matcher.accept(token)
        return token

    def _logits(self, seq: int) -> int:
        if self.states.has_states:
            return _digest((*self.seen(seq), self._partial[seq]))
        return _digest(self.seen(seq))

    def _fits(self, runs: Sequence[Run]) -> bool:
        wanted = [0] * len(self.pools)
        for run in runs:
            wanted[0 if self.info.unified else run.seq] += len(run.tokens)
        return all(n <= pool.n_free for n, pool in zip(wanted, self.pools, strict=True))

    def _pool(self, seq: int) -> CellPool:
        return self.pools[0 if self.info.unified else seq]


def adapted(token: int, adapters: Adapters) -> int:
    """Return what a cell has of a token, which may be an image's, that was computed with these adapters."""
    if not adapters:
        return token
    return token + (1 + _digest(adapters) % 2**18) * N_TOKENS if token >= 0 else _marked(token, adapters)


def moved(cell: int, discarded: Sequence[tuple[int, int]]) -> int:
    """Return what a cell has of a token that was moved after these (position, token) pairs were discarded.

    It depends on them, and is unlike that of any token that was computed where it is (`is_moved`).
    """
    return _marked(token_of(cell), (cell, discarded)) - _MOVED


def is_moved(cell: int) -> bool:
    """Return true for a token that was computed at another position."""
    return cell < -_MOVED


def _marked(token: int, value: object) -> int:
    """Return a number less than any token, from which `token_of` gets the token, and which depends on a value."""
    return token + 2**31 - (1 + _digest(value) % 2**18) * 2**40


def token_of(cell: int) -> int:
    """Return the token that was computed for a cell."""
    if cell >= 0:
        return cell % N_TOKENS
    return cell if cell >= -(2**31) else cell % 2**40 - 2**31


def vector_of(row: int, n: int) -> bytes:
    """Return numbers between -1 and 1, those of scores between 0 and 1, for a hash of a sequence."""
    values = [_digest((row, i)) % 2**20 / 2**20 for i in range(n)]
    return np.array(values if n == N_SCORES else [2 * value - 1 for value in values], dtype="<f4").tobytes()


def cold_vector(tokens: Sequence[int], n: int = N_VECTOR) -> list[float]:
    """Return the vector of a sequence of these tokens, as it is in any backend without a partial state."""
    numbers: list[float] = np.frombuffer(vector_of(_digest(list(enumerate(tokens))), n), dtype="<f4").tolist()
    return numbers


def score_of(row: int, token: int, n_top: int) -> TokenScore:
    """Probabilities of halves: that of the token is the highest."""
    others = sorted(set(range(N_VOCAB)) - {token}, key=lambda other: _digest((row, other)))
    top = [token, *others][:n_top]
    return TokenScore(token, -1.0, top, [-1.0 - i for i in range(len(top))])


def prompt_score(before: Sequence[tuple[int, int]], token: int, n_top: int) -> TokenScore:
    """The score of a prompt's token after (position, token) pairs, and of the `n_top` most likely ones."""

    def value(other: int) -> float:
        return -(_digest((before, other)) % 1024) / 64

    top = sorted(range(N_VOCAB), key=lambda other: (-value(other), other))[:n_top] if n_top else []
    return TokenScore(token, value(token), top, [value(other) for other in top])


class _ByteTokens:
    """The vocabulary as llguidance takes it."""

    bos_token_id = BOS
    eos_token_id = EOS
    special_token_ids: ClassVar[list[int]] = []

    def __init__(self, vocab: FakeVocab) -> None:
        self.tokens = [bytes([i]) for i in range(BOS)] + [b"\xff" + name.encode() for name in vocab.names.values()]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def byte_tokenizer(vocab: FakeVocab | None = None) -> LLTokenizer:
    """Return the tokenizer of a vocabulary."""
    vocab = vocab or FakeVocab()
    return LLTokenizer(TokenizerWrapper(_ByteTokens(vocab)), eos_token=sorted(vocab.eog))


def byte_trial(special_tokens: Sequence[str], n_tokens: int) -> LocalTrial:
    """Return a trial of grammars with a token for each byte and each control token, which suffice to check them."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [SPECIAL_PREFIX + text.encode() for text in special_tokens]
    tokens += [b""] * (n_tokens - len(tokens))
    return LocalTrial(Vocabulary(tokens))


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=6).digest(), "big")


def _state_of(tokens: Sequence[int], state: int = 0) -> int:
    """The partial state behind further tokens."""
    for token in tokens:
        state = _digest((state, token))
    return state
