"""Self-test of reuse: checks on the loaded model that reused state is the state that was computed.

A model with a partial state computes a prefix, takes a checkpoint, computes other tokens, and continues after the
prefix again: in the same sequence, in a copy of its cells, in a copy of the live sequence, and after loading
segments. A model that can be truncated is truncated and copied instead. Each time, two checks follow:

1. What the sequence holds, as saved by llama.cpp, must be what it held when the prefix had just been computed: each
   row of each layer by position, and the recurrent state, byte for byte (`state_format.py`). On every device this
   detects an operation that does nothing or affects another sequence, a state of other tokens or one token late, a
   missing layer or cell, and swapped rows. While the prefix was computed, another sequence held the first cells, so
   KV is loaded into cells that hold other rows, and cells that were not written are detected too. It cannot detect
   state that llama.cpp never saves, or does not read when it computes.
2. So the logits of a few more tokens must show that the state is used. Their distance from a cold run is compared
   with that of a cold run in the same chunks but other cells (fact 35: on a GPU equal chunks do not give equal
   bits), and with that of a run after another prefix. A slightly wrong state may pass this check, but never the
   first.

Where recurrent states can go back (fact 44), logits are compared after rejected drafts too. If they differ, nothing
is drafted, but prefixes are reused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import Any, Literal, TypeAlias

import llama_cpp
import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from llamaslot.backend.llama.saved_states import save_sequence
from llamaslot.backend.state_format import digests
from llamaslot.base.backend import Backend, Run, Status
from llamaslot.base.kv_ops import (
    Copy,
    Free,
    IllegalCallError,
    Load,
    NotLoadedError,
    NotSavedError,
    Remove,
    Restore,
    Save,
    Take,
)
from llamaslot.base.model import ModelInfo, SelfTestOutcome
from llamaslot.base.tokens import Tokens

_log = structlog.get_logger(__name__)

START_LIMIT_S = 0.5
"""Most seconds that the test may take at load. If it would take longer, it stays pending."""
_MAX_OVERRUN = 2.0
"""A test whose estimate met the limit is stopped at this multiple of the limit."""

_N_PREFIX = 48
"""Tokens of the prefix; for a model with a sliding window it is longer than the window."""
_N_MOVED = 16
"""Tokens by which the prefix exceeds the window, so that the window has moved."""
_N_OTHER = 24
"""Number of other tokens computed after the prefix, or before it to occupy the first cells."""
_N_COMPARED = 8
"""Tokens after the prefix whose logits are compared."""
_PROBE_GROWTH = 4
"""Growth factor of the number of tokens from one timed step to the next."""
_N_PREFILLS = 3
"""How often a test computes the prefix, for the estimate. It reads a sequence's content twice as often."""
_SMALL_STEP_TOKENS = 16
_N_SMALL_STEPS = 12
"""Number of steps of a few tokens in a test, and their size, for the estimate."""
_N_DRAFT_PREFILLS, _N_DRAFT_STEPS = 3, 6
"""Numbers that drafts add to these."""
_NOISE_FACTOR = 1.5
"""Distances up to this multiple of the measured noise count as noise: other cells may move logits farther."""
_LEAST_SHARE = 0.05
"""Smallest noise to assume, as a fraction of the logits' standard deviation."""
_CHECKPOINT, _FIRST_SEGMENT, _SECOND_SEGMENT = -1, -2, -3
"""Numbers that the engine does not use."""

Logits: TypeAlias = npt.NDArray[np.float32]
"""Rows of logits, `[tokens, n_vocab]`."""


class SelfTestResult(msgspec.Struct, frozen=True):
    """Result of a self-test."""

    outcome: SelfTestOutcome
    reason: str = ""
    """The reason, unless it passed."""
    is_lasting: bool = True
    """False if a later start may have another result, so that this one must not be kept."""
    why_no_drafts: str = ""
    """Why recurrent states cannot go back to an earlier token, although prefixes are reused."""


class _StoppedError(Exception):
    """The test was stopped between two steps."""


class _FailedError(Exception):
    """The test cannot be passed."""

    def __init__(self, reason: str, *, is_lasting: bool = True) -> None:
        super().__init__(reason)
        self.is_lasting = is_lasting


def is_needed(info: ModelInfo) -> bool:
    """Return True for models with checkpoints, and for those with MLA or M-RoPE that can be truncated."""
    is_unusual = info.state.has_mla or info.state.has_mrope
    return info.keeps_checkpoints or (info.can_trim and is_unusual)


def applied(info: ModelInfo, result: SelfTestResult) -> ModelInfo:
    """Return the facts about a model with the result of its self-test. After a failed one nothing is reused."""
    info = msgspec.structs.replace(info, self_test=result.outcome, self_test_reason=result.reason)
    if result.why_no_drafts:
        info = msgspec.structs.replace(info, state=msgspec.structs.replace(info.state, n_rollback=0))
    if result.outcome not in ("failed", "off"):
        return info
    return msgspec.structs.replace(
        info,
        reuse_reason=result.reason,
        keeps_checkpoints=False,
        checkpoint_size=None,
        segment_size=None,
        state_cost=None,
        n_cache_seqs=0,
        state=msgspec.structs.replace(info.state, can_trim=False),
    )


def overridden(choice: Literal["auto", "on", "off"]) -> SelfTestResult | None:
    """Return the result that `--reuse-self-test` sets instead of the test; None if the test decides."""
    if choice == "auto":
        return None
    return SelfTestResult("skipped" if choice == "on" else "off", f"--reuse-self-test {choice}", is_lasting=False)


def run(
    backend: Backend,
    context: Any,
    *,
    limit_s: float | None,
    should_stop: Callable[[], bool] = lambda: False,
) -> SelfTestResult:
    """Run the self-test on a backend with this context, whose sequences are empty before and after.

    The outcome is `pending` if it would take longer than `limit_s` (None for no limit), or if `should_stop`, which
    is called before each step, returns True.
    """
    deadline = math.inf
    trial = _Trial(backend, context, lambda: perf_counter() > deadline or should_stop())
    try:
        trial.check_size()
        if limit_s is not None:
            if (seconds := trial.estimated_s(limit_s)) > limit_s:
                return SelfTestResult("pending", f"the self-test takes too long at start: about {seconds:.1f} s")
            deadline = perf_counter() + _MAX_OVERRUN * limit_s
        trial.check_reuse()
        why_no_drafts = trial.why_no_drafts()
    except _StoppedError:
        return SelfTestResult(
            "pending", "the self-test takes too long at start" if limit_s else "the self-test was stopped"
        )
    except _FailedError as error:
        return SelfTestResult("failed", f"self-test failed: {error}", error.is_lasting)
    except IllegalCallError as error:
        return SelfTestResult("failed", f"self-test failed: llama.cpp refuses an operation ({error})")
    except (NotSavedError, NotLoadedError, MemoryError) as error:
        return SelfTestResult("failed", f"self-test failed: {error or 'not enough memory'}", is_lasting=False)
    finally:
        trial.clean_up()
    if why_no_drafts:
        _log.warning("drafts.off", reason=why_no_drafts)
    return SelfTestResult("passed", why_no_drafts=why_no_drafts)


class _Trial:
    """One run of the test, in sequences 0 and 1 and the scratch sequence."""

    def __init__(self, backend: Backend, context: Any, should_stop: Callable[[], bool]) -> None:
        info = backend.info
        self._backend, self._context, self._info = backend, context, info
        self._should_stop = should_stop
        n_swa, n_more = info.state.n_swa, _N_OTHER + 2 * _N_COMPARED
        can_move = info.keeps_checkpoints and 0 < n_swa < info.n_ctx_slot
        self._n_prefix = n_swa + _N_MOVED if can_move else _N_PREFIX
        self._n_needed = self._n_prefix + n_more
        self._n_compared = min(_N_COMPARED, info.n_ubatch, info.n_spare_rows + 1)
        ids = _ids(backend, self._n_prefix + n_more) if self._fits() else np.zeros(0, np.int32)
        self._prefix, ids = ids[: self._n_prefix], ids[self._n_prefix :]
        self._tail, self._other = ids[: self._n_compared], ids[self._n_compared :][:_N_OTHER]
        self._computed: dict[str, bytes] = {}
        """Digests of what a sequence holds right after computing the prefix."""
        self._cold: Logits = np.zeros((0, 0), np.float32)
        self._bound = 0.0
        self._numbers: list[int] = []

    def check_size(self) -> None:
        """Raise `_FailedError` if sequence ids or cells do not suffice."""
        info = self._info
        if info.keeps_checkpoints and self._backend.n_seqs < 2:
            raise _FailedError("it needs two sequence ids")
        if not self._fits():
            n_cells = min(info.n_ctx, info.n_ctx_slot)
            raise _FailedError(f"it needs {self._n_needed:,} cells, and a sequence has {n_cells:,}")

    def estimated_s(self, limit_s: float) -> float:
        """Estimate how long the test takes, from the time of steps as large as can be tried within the limit.

        The time of a single token is not enough: a step of many tokens is far faster than as many single ones.
        """
        n, most = 1, min(self._n_prefix, self._info.n_ubatch)
        seconds = self._seconds(n)
        if seconds < limit_s:
            # The first step may include one-time work.
            seconds = min(seconds, self._seconds(n))
        small = seconds * _SMALL_STEP_TOKENS

        n_prefills, n_small_steps = _N_PREFILLS, _N_SMALL_STEPS
        if self._info.state.n_rollback:
            n_prefills, n_small_steps = n_prefills + _N_DRAFT_PREFILLS, n_small_steps + _N_DRAFT_STEPS

        def estimate() -> float:
            return n_prefills * self._n_prefix / n * seconds + n_small_steps * small

        while estimate() > limit_s and n < most and seconds * _PROBE_GROWTH < limit_s:
            n = min(n * _PROBE_GROWTH, most)
            seconds = self._seconds(n)
            if n <= _SMALL_STEP_TOKENS:
                small = seconds * _SMALL_STEP_TOKENS / n
        return estimate()

    def check_reuse(self) -> None:
        """Raise `_FailedError` unless all reused states are those that were computed, and are used."""
        other_prefix, other_cells = self._cold_run(self._prefix[::-1]), self._cold_run(self._prefix)
        # Another sequence, if there is one, holds the first cells meanwhile.
        has_other = self._backend.n_seqs > 1
        if has_other:
            self._feed(1, self._other)
        self._feed(0, self._prefix)
        if has_other:
            self._backend.change(Remove(1, 0))
        self._computed = self._held(0)
        if self._info.keeps_checkpoints:
            self._backend.change(Take(_CHECKPOINT, 0, self._n_prefix))
            self._numbers.append(_CHECKPOINT)
        self._cold = self._rows(0)
        self._set_bound(other_cells, other_prefix)
        self._feed(0, self._other)
        if self._info.keeps_checkpoints:
            self._check_checkpoints()
        else:
            self._check_trimming()
        if self._info.segment_size is not None:
            self._check_segments()

    def clean_up(self) -> None:
        """Empty the sequences and free what was saved."""
        for number in self._numbers:
            self._backend.change(Free(number))
        for seq in range(min(2, self._backend.n_seqs)):
            self._backend.change(Remove(seq, 0))

    def _fits(self) -> bool:
        return self._n_needed <= min(self._info.n_ctx, self._info.n_ctx_slot)

    def _seconds(self, n_tokens: int) -> float:
        tokens = self._prefix[:n_tokens]
        started = perf_counter()
        self._feed(0, tokens)
        for _ in range(2):
            self._held(0)
        seconds = perf_counter() - started
        self._backend.change(Remove(0, 0))
        return seconds

    def _cold_run(self, prefix: Tokens) -> Logits:
        """Return the logits after a prefix that is computed in the first cells."""
        self._feed(0, prefix)
        rows = self._rows(0)
        self._backend.change(Remove(0, 0))
        return rows

    def _set_bound(self, other_cells: Logits, other_prefix: Logits) -> None:
        """Set the distance up to which logits count as those of a cold run: between noise and an unused state."""
        if not np.isfinite(self._cold).all():
            raise _FailedError("the logits of a cold run are not finite")
        noise = max(_distance(other_cells, self._cold), _LEAST_SHARE * float(self._cold.std()))
        self._bound = max(_NOISE_FACTOR * noise, math.sqrt(noise * _distance(other_prefix, self._cold)))

    def _check_checkpoints(self) -> None:
        """Check checkpoints. Sequence 0 holds prefix and other tokens before, and at least the prefix afterwards.

        Only one sequence at a time has a window, because a small pool has no cells for two (fact 32).
        """
        backend, end = self._backend, self._n_prefix
        backend.change(Restore(_CHECKPOINT, 0))
        self._check(0, "after a checkpoint in its own sequence")
        backend.change(Copy(0, 1, 0, end))
        backend.change(Remove(0, 0))
        backend.change(Restore(_CHECKPOINT, 1))
        self._check(1, "after a checkpoint in another sequence")
        backend.change(Copy(1, 0, 0, end))
        backend.change(Remove(1, 0))
        if self._info.state.kind.copies_live:
            backend.change(Restore(_CHECKPOINT, 0))
            backend.change(Copy(0, 1, 0, end))
            self._feed(0, self._other)
            self._check(1, "in a copy of a whole sequence")
            backend.change(Remove(1, 0))

    def _check_trimming(self) -> None:
        """Check truncation. Sequence 0 holds prefix and other tokens before, and prefix and tail afterwards."""
        backend, end = self._backend, self._n_prefix
        backend.change(Remove(0, end))
        self._check(0, "in a sequence that was cut")
        if backend.n_seqs > 1:
            backend.change(Copy(0, 1, 0, end))
            self._check(1, "in a copy of a sequence")
            backend.change(Remove(1, 0))

    def _check_segments(self) -> None:
        """Check segments. Sequence 0 holds the prefix and some tokens, all others nothing."""
        backend, end, half = self._backend, self._n_prefix, self._n_prefix // 2
        parts = ((_FIRST_SEGMENT, 0, half), (_SECOND_SEGMENT, half, end))
        for number, first, last in parts:
            backend.change(Save(number, 0, first, last))
            self._numbers.append(number)
        backend.change(Remove(0, 0))
        # In a partitioned pool the cells of sequence 0 still have the computed rows, so sequence 1 is used if
        # possible.
        seq = 0 if self._info.unified or backend.n_seqs == 1 else 1
        backend.change(Load(seq, 0, tuple((number, last) for number, _, last in parts)))
        if self._info.keeps_checkpoints:
            backend.change(Restore(_CHECKPOINT, seq))
        self._check(seq, "after segments that were loaded")

    def why_no_drafts(self) -> str:
        """Return why a recurrent state cannot go back (fact 44): rejected tokens move the logits after them.

        What is held cannot be compared, because the step with a draft rounds differently. How far other chunks move
        logits without a draft is not a fault. Empty if all is right, or if such states never go back.
        """
        backend, end = self._backend, self._n_prefix
        n_rollback = self._info.state.n_rollback
        expected, bound = self._cold, math.inf
        for n_rejected in (0, 1, n_rollback) if n_rollback else ():
            backend.change(Remove(0, 0))
            self._feed(0, self._prefix[:-1])
            drafted = np.concatenate([self._prefix[-1:], self._other[:n_rejected]])
            self._step(Run(0, end - 1, drafted, n_outputs=0))
            backend.change(Remove(0, end, is_rejected=n_rejected > 0))
            rows = self._rows(0)
            distance = _distance(rows, expected)
            if not n_rejected:
                expected, bound = rows, max(self._bound, _NOISE_FACTOR * distance)
            elif not distance <= bound:
                return f"{n_rejected} rejected tokens move logits by {distance:.3g} (at most {bound:.2g})"
        return ""

    def _check(self, seq: int, where: str) -> None:
        """Check that a sequence holds exactly the prefix, and uses it. Afterwards it also holds the tail."""
        held, computed = self._held(seq), self._computed
        if held != computed:
            wrong = [part for part in computed if held.get(part) != computed[part]]
            parts = wrong or [*held.keys() - computed.keys()]
            more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
            raise _FailedError(f"{where}, {parts[0]}{more} are not what was computed")
        distance = _distance(self._rows(seq), self._cold)
        if not distance <= self._bound:
            raise _FailedError(
                f"{where}, logits differ by {distance:.3g} from a cold run (at most {self._bound:.2g})"
            )

    def _held(self, seq: int) -> dict[str, bytes]:
        """Return digests of all parts of a sequence's content.

        It is saved whole, not by the calls that take checkpoints, so that anything these leave out is detected.
        """
        if self._should_stop():
            raise _StoppedError
        state = save_sequence(self._context, seq)
        try:
            return digests(state, self._info.state.kind)
        except ValueError as error:
            raise _FailedError(str(error)) from error

    def _rows(self, seq: int) -> Logits:
        """Compute the tail in a sequence; returns its logits."""
        self._step(Run(seq, self._backend.seq_len(seq), self._tail, n_outputs=1, targets=self._tail[1:]))
        rows = (llama_cpp.llama_get_logits_ith(self._context, row) for row in range(self._n_compared))
        return np.stack([np.ctypeslib.as_array(row, (self._info.n_vocab,)) for row in rows])

    def _feed(self, seq: int, tokens: Tokens) -> None:
        """Append tokens to a sequence, computed in chunks as large as possible."""
        chunk = self._info.n_ubatch
        for at in range(0, len(tokens), chunk):
            self._step(Run(seq, self._backend.seq_len(seq), tokens[at : at + chunk], n_outputs=0))

    def _step(self, run: Run) -> None:
        if self._should_stop():
            raise _StoppedError
        status = self._backend.decode([run]).status
        if status is not Status.OK:
            raise _FailedError(
                f"the model cannot compute {len(run.tokens)} tokens ({status.name})", is_lasting=False
            )


def _distance(one: Logits, other: Logits) -> float:
    """Return the root mean square of the difference; the median over positions, since experts may differ at one."""
    return float(np.median(np.sqrt(np.square(one - other).mean(axis=1))))


def _ids(backend: Backend, n_tokens: int) -> Tokens:
    """Return token ids, always the same ones, that stand for text if the vocabulary has enough such tokens."""
    drawn = np.random.default_rng(18).integers(0, backend.info.n_vocab, 2 * n_tokens).astype(np.int32)
    text = [token for token in drawn.tolist() if backend.vocab.piece(token)]
    return np.resize(np.array(text, np.int32) if len(set(text)) > _N_PREFIX else drawn, n_tokens)
