"""KV operations: changes of sequences between two decodes as plain data, and the checks that they are legal.

llama.cpp aborts the process on many illegal calls, so each operation is checked before it reaches ctypes.
Tokens are counted from 0; a sequence of n tokens holds 0 to n - 1, without a gap. In models with
M-RoPE a backend refuses to remove or copy a part of a tile of an image. Segments may have one.

Some models have a *partial state* besides the KV of every token: a recurrent state, or KV of a sliding window. A
partial state belongs to one position. A sequence is *live* if it has the state of its last token; only live
sequences can be decoded. One without that state is *stateless*: its attention cells can still be copied and saved,
and restoring a checkpoint makes it live again:

    live      --Remove some--> stateless     live source --Copy to its end--> live target (recurrent state)
    stateless --Restore------> live          any other Copy, and Load     --> stateless target
    any       --Remove all---> live, empty
    live      --Remove some--> live, if the model has no state but windows, and none was full
    live      --Remove some--> live, if these tokens of its last step were rejected (`Remove.is_rejected`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from llamaslot.base.model import StateKind

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Kv: TypeAlias = "npt.NDArray[np.uint8]"
"""Bytes of a segment's KV in llama.cpp's format; read-only."""


@dataclass(frozen=True, slots=True)
class KvPart:
    """Tokens `wanted` of a segment that has `tokens`, with its KV."""

    kv: Kv
    tokens: range
    wanted: range


class IllegalCallError(AssertionError):
    """A call that would make llama.cpp abort the process: a bug, never caused by a request."""


class NotSavedError(Exception):
    """Not enough host memory for a `Save` or `Take`; nothing was changed."""

    def __init__(self, segment: int) -> None:
        super().__init__(f"not enough memory for segment {segment}")


class NotLoadedError(Exception):
    """Not enough memory for a `Load` or `Restore`; the target is then empty."""

    def __init__(self, segment: int) -> None:
        super().__init__(f"segment {segment} could not be loaded")


@dataclass(frozen=True, slots=True)
class Remove:
    """Truncate a sequence to its first `keep` tokens."""

    seq: int
    keep: int
    is_rejected: bool = False
    """True if what is removed are tokens of the last step, but not its first one.

    It leaves a window whole. With a recurrent state at most `Capabilities.n_rollback` tokens, once after a step.
    """


@dataclass(frozen=True, slots=True)
class Copy:
    """Append tokens `[start, end)` of `src` to `dst`, which holds `start` tokens.

    In a unified pool they share the cells then. In a partitioned one `dst` gets cells of its own, which takes as
    long as to save both and to load `dst`; raises `MemoryError` if there is not enough memory, and `dst` is then
    empty.
    """

    src: int
    dst: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Share:
    """Replace the cells of `dst` in `[start, end)` by those of `src`, which hold the same tokens.

    In a unified pool only. In models with M-RoPE, cells of a tile are replaced if its last token is in the range.
    """

    src: int
    dst: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Shift:
    """Discard tokens `[start, end)` of `seq`, and move the tokens after them down to `start`.

    With `copies`, what is left gets cells of its own first in a unified pool: llama.cpp moves a cell for all
    sequences that hold it (fact 18). Without it no other sequence may hold any. The next decode rotates the keys;
    until then `seq` may be neither copied nor saved. Raises `MemoryError` if there is not enough memory, and `seq`
    is then empty.
    """

    seq: int
    start: int
    end: int
    copies: bool


@dataclass(frozen=True, slots=True)
class Save:
    """Copy the KV of `src` in `[start, end)` to host memory, as a segment with a number that is not in use.

    Raises `NotSavedError` if there is not enough memory.
    """

    segment: int
    src: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Load:
    """Append parts of segments to `dst`, which holds `start` tokens, in cells of their own.

    `parts` are the numbers of segments, each with the tokens that `dst` holds after it. In a unified pool each is
    loaded whole, into the lowest free cells: there must be one for each of its tokens, and those outside of its
    part are freed at once. In a partitioned pool all parts are loaded at once, with what `dst` holds already.
    Raises `NotLoadedError` if there is not enough memory, and `dst` is then empty.
    """

    dst: int
    start: int
    parts: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """Tokens that `dst` holds afterwards."""
        return self.parts[-1][1]

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """Number of each segment, and the tokens that are loaded from it."""
        starts = (self.start, *(end for _, end in self.parts[:-1]))
        return [(number, start, end) for (number, end), start in zip(self.parts, starts, strict=True)]


@dataclass(frozen=True, slots=True)
class Take:
    """Copy the partial state of live `src`, which holds `end` tokens, to host memory as a checkpoint.

    Segments and checkpoints share their numbers, and `checkpoint` must be unused. Raises `NotSavedError` if the
    host has not enough memory.
    """

    checkpoint: int
    src: int
    end: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Load a checkpoint into `dst`, and truncate `dst` to as many tokens as the source held then.

    `dst` must begin with these tokens. Raises `NotLoadedError` if there is not enough
    memory.
    """

    checkpoint: int
    dst: int


@dataclass(frozen=True, slots=True)
class Free:
    """Free the host memory of a segment or checkpoint."""

    segment: int


Operation: TypeAlias = Remove | Copy | Share | Shift | Save | Load | Take | Restore | Free
"""One change of sequences or segments between two decodes."""


class StateRecord:
    """Record of the partial states of a context: which sequences are live, and the checkpoints that were taken.

    Backends update it with each operation that they carry out; `length` is that of the sequence before it.
    """

    def __init__(self, kind: StateKind, n_swa: int, n_rollback: int = 0) -> None:
        self._kind = kind
        self._n_swa = n_swa
        self._n_rollback = n_rollback
        self._stateless: set[int] = set()
        self._rolled_back: set[int] = set()
        self.checkpoints: dict[int, int] = {}
        """Length of the source when each checkpoint was taken, by the checkpoint's number."""

    @property
    def has_states(self) -> bool:
        """True for a model with a partial state; without one, every sequence is live."""
        return self._kind is not StateKind.NONE

    @property
    def copies_live(self) -> bool:
        """True if a full copy of a live sequence is live too, so that both can be continued."""
        return self._kind.copies_live

    def is_live(self, seq: int) -> bool:
        """Return True if a sequence can be decoded."""
        return seq not in self._stateless

    def is_rolled_back(self, seq: int) -> bool:
        """Return True if the state of a sequence is one that its last step passed through (fact 44).

        Until its next step, it cannot be rolled back again, and llama.cpp would copy the wrong state.
        """
        return seq in self._rolled_back

    def check_rejected(self, operation: Remove, length: int) -> None:
        """Raise `IllegalCallError` if the state cannot go back by as many tokens of the last step."""
        if not (operation.is_rejected and self._kind.has_recurrent_state and self.is_live(operation.seq)):
            return
        if self.is_rolled_back(operation.seq) or length - operation.keep > self._n_rollback:
            raise IllegalCallError(f"{operation} of {length}: the state cannot go back by so many tokens")

    def decoded(self, seqs: Iterable[int]) -> None:
        """Record that a step continued these sequences."""
        self._rolled_back.difference_update(seqs)

    def truncate(self, operation: Remove, length: int) -> None:
        """Record that a sequence of `length` tokens is cut to fewer."""
        # Once the window is full, other sequences may take its oldest cell, which the next token does not see.
        # Those that were taken in the last step are not seen by any of its tokens (fact 43).
        is_whole = self._kind is StateKind.WINDOW and (length < self._n_swa or operation.is_rejected)
        goes_back = self._kind.has_recurrent_state and operation.is_rejected and operation.keep < length
        is_live = (is_whole or goes_back) and self.is_live(operation.seq)
        self._set(operation.seq, is_live=not operation.keep or is_live)
        if goes_back and is_live:
            self._rolled_back.add(operation.seq)

    def copy(self, operation: Copy, length: int) -> None:
        """Record a copy of cells from a sequence of `length` tokens.

        llama.cpp shares a recurrent state until either sequence is decoded (copy on write). It would share the
        cells of a window too, and never reuse them, so the target of a copy gets none.
        """
        is_whole = self.copies_live and operation.end == length
        self._set(operation.dst, is_live=is_whole and self.is_live(operation.src))

    def settle(self, seq: int) -> None:
        """Record that the state to which a sequence was rolled back is now the one that llama.cpp copies."""
        self._rolled_back.discard(seq)

    def load(self, seq: int) -> None:
        """Record that a segment was loaded into a sequence; segments have no partial state."""
        self._set(seq, is_live=False)

    def restore(self, seq: int) -> None:
        """Record that a sequence got a checkpoint's state."""
        self._set(seq, is_live=True)

    def fail(self, starts: Mapping[int, int], lengths: Mapping[int, int]) -> None:
        """Record that decoding a batch failed.

        `starts` are the lengths of its sequences before the batch, `lengths` those of all sequences. llama.cpp
        moves recurrent states of sequences outside the batch as well, so on such models none can be trusted then.
        """
        lost = {**lengths, **starts}.keys() if self._kind.has_recurrent_state else starts.keys()
        for seq in lost:
            self._set(seq, is_live=not starts.get(seq, lengths.get(seq, 0)))

    def set_live(self, is_live: Sequence[bool]) -> None:
        """Record for each sequence if it is live."""
        for seq, each in enumerate(is_live):
            self._set(seq, is_live=each)

    def clear(self) -> None:
        """Record that all sequences are empty."""
        self._stateless.clear()
        self._rolled_back.clear()

    def _set(self, seq: int, *, is_live: bool) -> None:
        self._rolled_back.discard(seq)
        if is_live or not self.has_states:
            self._stateless.discard(seq)
        else:
            self._stateless.add(seq)


def check_seq(seq: int, n_seqs: int) -> None:
    """Raise `IllegalCallError` for a sequence id that the context does not have."""
    if not 0 <= seq < n_seqs:
        raise IllegalCallError(f"sequence id {seq} is not in [0, {n_seqs})")


def check_operation(
    operation: Operation,
    *,
    length_of: Callable[[int], int],
    segments: Mapping[int, range],
    can_reuse: bool,
    can_shift: bool,
    unified: bool,
    scratch: int | None,
    states: StateRecord,
) -> None:
    """Raise `IllegalCallError` for what would leave a hole, a duplicate position, or a foreign cell or state.

    `length_of` returns the tokens of a sequence, `segments` has the tokens of each saved segment by number,
    `can_reuse` says if anything but whole sequences may be changed, `can_shift` if tokens may be moved, `unified`
    if sequences share one pool, and `scratch` is the empty sequence through which such a pool saves and loads; None
    where it has none to spare.
    """
    if isinstance(operation, Remove):
        if operation.keep < 0:
            raise IllegalCallError(f"{operation} keeps less than nothing")
        states.check_rejected(operation, length_of(operation.seq))
        return
    if isinstance(operation, Take | Restore):
        _check_checkpoint(operation, length_of, segments, states)
        return
    if isinstance(operation, Free) and operation.segment in states.checkpoints:
        return
    if not can_reuse:
        raise IllegalCallError(f"{operation}: nothing is reused here")
    if isinstance(operation, Shift):
        _check_shift(operation, length_of(operation.seq), can_shift=can_shift and not states.has_states)
        return
    if isinstance(operation, Share) and (states.has_states or not unified):
        raise IllegalCallError(f"{operation}: the target would get the source's state, or cells of another stream")
    if isinstance(operation, Save | Load | Free):
        if unified and (scratch is None or length_of(scratch)):
            raise IllegalCallError(f"{operation}: there is no empty scratch sequence")
        _check_segment(operation, length_of, segments, states, scratch)
        return
    start, end = operation.start, operation.end
    n_src, n_dst = length_of(operation.src), length_of(operation.dst)
    if operation.src == operation.dst or not 0 <= start < end <= n_src:
        raise IllegalCallError(f"{operation}: the source holds {n_src} tokens")
    if n_dst != start if isinstance(operation, Copy) else n_dst < end:
        raise IllegalCallError(f"{operation}: the target holds {n_dst} tokens")


def _check_shift(operation: Shift, n_tokens: int, *, can_shift: bool) -> None:
    if not can_shift:
        raise IllegalCallError(f"{operation}: tokens of this model cannot be moved")
    if not 0 <= operation.start < operation.end < n_tokens:
        raise IllegalCallError(f"{operation}: the sequence holds {n_tokens} tokens")


def _check_checkpoint(
    operation: Take | Restore,
    length_of: Callable[[int], int],
    segments: Mapping[int, range],
    states: StateRecord,
) -> None:
    end = states.checkpoints.get(operation.checkpoint)
    if not states.has_states:
        raise IllegalCallError(f"{operation}: this model has no state to keep")
    if isinstance(operation, Restore):
        if end is None or length_of(operation.dst) < end:
            raise IllegalCallError(f"{operation}: the checkpoint is at {end}, the target is shorter")
        return
    if end is not None or operation.checkpoint in segments:
        raise IllegalCallError(f"{operation}: the number is in use")
    if not 0 < operation.end == length_of(operation.src):
        raise IllegalCallError(f"{operation}: the source holds {length_of(operation.src)} tokens")
    if not states.is_live(operation.src):
        raise IllegalCallError(f"{operation}: the source has no state")


def _check_segment(
    operation: Save | Load | Free,
    length_of: Callable[[int], int],
    segments: Mapping[int, range],
    states: StateRecord,
    scratch: int | None,
) -> None:
    if isinstance(operation, Load):
        if operation.dst == scratch or length_of(operation.dst) != operation.start:
            raise IllegalCallError(f"{operation}: the target holds {length_of(operation.dst)} tokens")
        for number, start, end in operation.ranges:
            saved = segments.get(number)
            if saved is None:
                raise IllegalCallError(f"{operation}: segment {number} is not saved")
            if not saved.start <= start < end <= saved.stop:
                raise IllegalCallError(f"{operation}: segment {number} has [{saved.start}, {saved.stop})")
        return
    is_saved = operation.segment in segments
    if isinstance(operation, Free):
        if not is_saved:
            raise IllegalCallError(f"{operation}: the segment is not saved")
        return
    if is_saved or operation.segment in states.checkpoints:
        raise IllegalCallError(f"{operation}: the number is in use")
    if operation.src == scratch or not 0 <= operation.start < operation.end <= length_of(operation.src):
        raise IllegalCallError(f"{operation}: the source holds {length_of(operation.src)} tokens")
