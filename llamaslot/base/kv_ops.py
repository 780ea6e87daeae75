"""KV operations: changes of sequences between two decodes as plain data, and the checks that they are legal.

llama.cpp aborts the process on many illegal calls, so each operation is checked before it reaches ctypes.
Positions count tokens from 0; a sequence of n tokens holds the positions 0 to n - 1, without a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Kv: TypeAlias = "npt.NDArray[np.uint8]"
"""Bytes of a segment's KV in llama.cpp's format; read-only."""


class IllegalCallError(AssertionError):
    """A call that would make llama.cpp abort the process: a bug, never caused by a request."""


class NotSavedError(Exception):
    """The host has no memory for a `Save`; nothing was changed."""

    def __init__(self, segment: int) -> None:
        super().__init__(f"no memory for segment {segment}")
        self.segment = segment


class NotLoadedError(Exception):
    """The host has no memory for a `Load`; the target sequence was not changed."""

    def __init__(self, segment: int) -> None:
        super().__init__(f"segment {segment} could not be loaded")
        self.segment = segment


@dataclass(frozen=True, slots=True)
class Remove:
    """Truncate a sequence to its first `keep` tokens."""

    seq: int
    keep: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Append positions `[start, end)` of `src` to `dst`, which holds `start` tokens; they share the cells then."""

    src: int
    dst: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Share:
    """Replace the cells of `dst` in `[start, end)` by those of `src`, which hold the same tokens."""

    src: int
    dst: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CopyStream:
    """Replace all that `dst` holds by a copy of the first `keep` tokens of `src`; in a partitioned pool only.

    llama.cpp copies the whole stream with the next decode (fact 3): until then neither may be copied again.
    """

    src: int
    dst: int
    keep: int


@dataclass(frozen=True, slots=True)
class Save:
    """Copy the KV of `src` in `[start, end)` to host memory, as a segment with a number that is not in use.

    Raises `NotSavedError` if there is no memory for it. `scratch` is an empty sequence, before and after.
    """

    segment: int
    src: int
    start: int
    end: int
    scratch: int


@dataclass(frozen=True, slots=True)
class Load:
    """Append positions `[start, end)` of a segment to `dst`, which holds `start` tokens, in cells of their own.

    llama.cpp loads a segment whole, into the lowest free cells: there must be one for each of its tokens, and those
    outside of `[start, end)` are freed at once. `scratch` is an empty sequence, before and after.
    Raises `NotLoadedError` if there is no memory for it.
    """

    segment: int
    dst: int
    start: int
    end: int
    scratch: int


@dataclass(frozen=True, slots=True)
class Free:
    """Free the host memory of a segment."""

    segment: int


Operation: TypeAlias = Remove | Copy | Share | CopyStream | Save | Load | Free
"""One change of sequences or segments between two decodes."""


def check_seq(seq: int, n_seqs: int) -> None:
    """Raise `IllegalCallError` for a sequence id that the context does not have."""
    if not 0 <= seq < n_seqs:
        raise IllegalCallError(f"sequence id {seq} is not in [0, {n_seqs})")


def check_operation(
    operation: Operation, *, length_of: Callable[[int], int], segments: Mapping[int, range], shares: bool
) -> None:
    """Raise `IllegalCallError` if an operation would leave a hole, a duplicate position or a foreign cell.

    `length_of` returns the tokens of a sequence, `segments` has the positions of each saved segment by number, and
    `shares` says if sequences can share cells.
    """
    if isinstance(operation, Remove):
        if operation.keep < 0:
            raise IllegalCallError(f"{operation} keeps less than nothing")
        length_of(operation.seq)
        return
    if isinstance(operation, CopyStream):
        n_src = length_of(operation.src)
        length_of(operation.dst)
        if operation.src == operation.dst or not 0 < operation.keep <= n_src:
            raise IllegalCallError(f"{operation}: the source holds {n_src} tokens")
        return
    if not shares:
        raise IllegalCallError("cells cannot be shared here")
    if isinstance(operation, Save | Load | Free):
        _check_segment(operation, length_of, segments)
        return
    start, end = operation.start, operation.end
    n_src, n_dst = length_of(operation.src), length_of(operation.dst)
    if operation.src == operation.dst or not 0 <= start < end <= n_src:
        raise IllegalCallError(f"{operation}: the source holds {n_src} tokens")
    if n_dst != start if isinstance(operation, Copy) else n_dst < end:
        raise IllegalCallError(f"{operation}: the target holds {n_dst} tokens")


def _check_segment(
    operation: Save | Load | Free, length_of: Callable[[int], int], segments: Mapping[int, range]
) -> None:
    saved = segments.get(operation.segment)
    if (saved is None) != isinstance(operation, Save):
        raise IllegalCallError(f"{operation}: the segment is {'not ' if saved is None else ''}saved")
    if isinstance(operation, Free):
        return
    start, end = operation.start, operation.end
    if length_of(operation.scratch):
        raise IllegalCallError(f"{operation}: the scratch sequence holds something")
    if isinstance(operation, Save):
        if not 0 <= start < end <= length_of(operation.src):
            raise IllegalCallError(f"{operation}: the source holds {length_of(operation.src)} tokens")
    else:
        assert saved is not None
        if operation.dst == operation.scratch or length_of(operation.dst) != start:
            raise IllegalCallError(f"{operation}: the target holds {length_of(operation.dst)} tokens")
        if not saved.start <= start < end <= saved.stop:
            raise IllegalCallError(f"{operation}: the segment has [{saved.start}, {saved.stop})")
