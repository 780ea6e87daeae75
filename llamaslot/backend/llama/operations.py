"""KV operations on a llama.cpp context: checked, executed and recorded.

For models with a partial state, llama.cpp reports the position of that state, not the length of the sequence. A
lost state shows as position -1, or not at all. So both length and liveness are recorded here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import llama_cpp

from llamaslot.backend.llama.positions import Positions, TileSpan, saved_positions
from llamaslot.backend.llama.saved_states import (
    PartialStates,
    PoolTransfer,
    StreamTransfer,
    load_sequence,
    save_sequence,
    sequence_bytes,
)
from llamaslot.backend.state_format import join_parts
from llamaslot.base import kv_ops
from llamaslot.base.backend import Run
from llamaslot.base.model import ModelInfo, StateKind

_MAX_SET_ASIDE_BYTES = 2 * 2**30
"""Most bytes of sequences that are moved to host memory while the self-test uses the context."""


@dataclass(frozen=True, slots=True)
class Held:
    """Content of all sequences while the self-test uses the context."""

    states: dict[int, kv_ops.Kv]
    """Saved sequences in llama.cpp's format."""
    lengths: list[int]
    tiles: list[tuple[TileSpan, ...]]
    is_live: list[bool]


class KvOperations:
    """Sequences of one context, and their segments and checkpoints in host memory. Not thread-safe.

    Those of an `earlier` context of the same model are taken over.
    """

    def __init__(self, context: Any, info: ModelInfo, n_seqs: int, *, earlier: KvOperations | None = None) -> None:
        self.lengths = [0] * n_seqs
        """Number of tokens that each sequence holds."""
        self.positions = Positions(n_seqs, has_tiles=info.state.has_mrope)
        """Positions of these tokens."""
        kind = info.state.kind if info.keeps_checkpoints else StateKind.NONE
        self.states = kv_ops.StateRecord(kind, info.state.n_swa, info.state.n_rollback)
        """Record of which sequences have their partial state, and so can be decoded."""
        self.partial: PartialStates = PartialStates(
            context, kind, earlier=earlier.partial if earlier is not None else None
        )
        self._scratch = n_seqs - 1 if info.unified and n_seqs > info.n_slots else None
        """Id of the scratch sequence, through which a unified pool saves and loads."""
        self.transfer: PoolTransfer | StreamTransfer = (
            PoolTransfer(context, self._scratch, self.partial.strip, self.positions)
            if info.unified
            else StreamTransfer(context, self.length)
        )
        self.segments: dict[int, kv_ops.Kv] = earlier.segments if earlier is not None else {}
        self.segment_tokens: dict[int, range] = earlier.segment_tokens if earlier is not None else {}
        """Tokens of the sequence that each segment has."""
        if earlier is not None:
            self.states.checkpoints = earlier.states.checkpoints
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._info = info

    def change(self, operation: kv_ops.Operation) -> None:
        """Check an operation and carry it out.

        Raises `IllegalCallError` for an operation that breaks the rules of `kv_ops`, and `NotSavedError` or
        `NotLoadedError` if memory does not suffice.
        """
        kv_ops.check_operation(
            operation,
            length_of=self.length,
            segments=self.segment_tokens,
            can_reuse=self._info.can_reuse,
            can_shift=not self._info.unshifted_reason,
            unified=self._info.unified,
            scratch=self._scratch,
            states=self.states,
        )
        match operation:
            case kv_ops.Remove():
                self._remove(operation)
            case kv_ops.Copy(src=src, dst=dst, end=end):
                # Refuses a part of a tile before anything is changed.
                self.positions.at(src, operation.start, end)
                with self._emptied_if_it_fails(dst):
                    if end == self.lengths[src]:
                        # Else `dst` is stripped. `seq_cp` copies the latest state of `src`, and leaves it to `dst`
                        # to go back (fact 44).
                        self._settle(src, dst)
                    self.transfer.copy(operation)
                self.states.copy(operation, self.lengths[src])
                self.positions.append(dst, self.positions.within(src, range(operation.start, end)))
                self._set_length(dst, end)
            case kv_ops.Share(src, dst):
                # Within a tile `of` returns the one position of its tokens: a range that begins there has the tile,
                # and one that ends there has not.
                start, end = self.positions.of(dst, operation.start), self.positions.of(dst, operation.end)
                llama_cpp.llama_memory_seq_rm(self._memory, dst, start, end)
                llama_cpp.llama_memory_seq_cp(self._memory, src, dst, start, end)
            case kv_ops.Shift():
                with self._emptied_if_it_fails(operation.seq):
                    self._shift(operation)
            case kv_ops.Save(segment, src, start, end):
                try:
                    kv = self._saved(src, range(start, end))
                except MemoryError as error:
                    raise kv_ops.NotSavedError(segment) from error
                self.put(segment, range(start, end), kv)
            case kv_ops.Load(dst=dst):
                with self._emptied_if_it_fails(dst):
                    self._load(operation)
                self.states.load(dst)
                self._set_length(dst, operation.end)
            case kv_ops.Take():
                self.partial.take(operation)
                self.states.checkpoints[operation.checkpoint] = operation.end
            case kv_ops.Restore():
                self._restore(operation)
            case kv_ops.Free(number) if number in self.states.checkpoints:
                del self.partial.states[number], self.states.checkpoints[number]
            case kv_ops.Free(segment):
                del self.segments[segment], self.segment_tokens[segment]

    def put(self, number: int, tokens: range, kv: kv_ops.Kv) -> None:
        """Add a segment with the KV of these tokens; without any, it is a checkpoint after `tokens.stop`."""
        if tokens:
            self.segments[number], self.segment_tokens[number] = kv, tokens
        else:
            self.partial.states[number], self.states.checkpoints[number] = kv, tokens.stop

    def length(self, seq: int) -> int:
        """Return the recorded length of a sequence; raises `IllegalCallError` for an unknown id."""
        kv_ops.check_seq(seq, len(self.lengths))
        return self.lengths[seq]

    def set_length(self, seq: int, length: int) -> None:
        """Record the length of a sequence."""
        self.lengths[seq] = length
        self.positions.truncate(seq, length)

    def failed(self, runs: Sequence[Run]) -> None:
        """Truncate the sequences of a failed batch to their earlier length, and strip those whose state is lost.

        Sequences that can be truncated need nothing: llama.cpp has truncated them itself. For others it may report
        tokens that were never computed (fact 12), and free states may have data of other sequences (fact 34), so
        without checkpoints all sequences are emptied.
        """
        if not self.states.has_states:
            if not self._info.can_trim:
                self.clear()
            return
        starts = {run.seq: run.start for run in runs}
        self.states.fail(starts, dict(enumerate(self.lengths)))
        # Sequences that hold tokens come first, because they free window cells, which the others may need.
        self.partial.occupy_all(sorted(range(len(self.lengths)), key=lambda seq: not self.lengths[seq]))
        for seq, length in enumerate(self.lengths):
            if not length:
                llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)
            elif not self.states.is_live(seq):
                self.partial.strip(seq)
                llama_cpp.llama_memory_seq_rm(self._memory, seq, self.positions.of(seq, length), -1)

    def clear(self) -> None:
        """Empty all sequences and clear all data, since a free state may not be clear (fact 34)."""
        self.transfer.end_changes()
        llama_cpp.llama_memory_clear(self._memory, True)
        for seq in range(len(self.lengths)):
            self.set_length(seq, 0)
        self.states.clear()

    def set_aside(self) -> Held:
        """Empty all sequences, and return what they held; raises `NotSavedError` if memory does not suffice.

        Sequences must not share cells.
        """
        seqs = [seq for seq, length in enumerate(self.lengths) if length]
        if sum(sequence_bytes(self._context, seq) for seq in seqs) > _MAX_SET_ASIDE_BYTES:
            raise kv_ops.NotSavedError(seqs[0])
        states = {}
        for seq in seqs:
            try:
                states[seq] = save_sequence(self._context, seq)
            except MemoryError as error:
                raise kv_ops.NotSavedError(seq) from error
        is_live = [self.states.is_live(seq) for seq in range(len(self.lengths))]
        held = Held(states, list(self.lengths), list(self.positions.of_seqs), is_live)
        self.clear()
        return held

    def put_back(self, held: Held) -> bool:
        """Restore what all sequences held; False if memory does not suffice, in which case all are empty."""
        self.clear()
        for seq, state in held.states.items():
            if not load_sequence(self._context, seq, state):
                self.clear()
                return False
        self.lengths, self.positions.of_seqs = held.lengths, held.tiles
        self.states.set_live(held.is_live)
        return True

    def _set_length(self, seq: int, length: int) -> None:
        """Record a sequence's length, and strip it unless it is live: `seq_cp` may have given it a wrong state.

        Raises `MemoryError` if stripping needs a window cell and none is free; the sequence is then empty.
        """
        self.set_length(seq, length)
        if self.states.is_live(seq):
            return
        try:
            self.partial.strip(seq)
        except MemoryError:
            self._empty(seq)
            raise

    @contextmanager
    def _emptied_if_it_fails(self, seq: int) -> Iterator[None]:
        """Empty a sequence if a copy or load into it fails, because it may have got a part of the tokens."""
        try:
            yield
        except (kv_ops.NotLoadedError, MemoryError):
            self._empty(seq)
            raise

    def _empty(self, seq: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)
        self.states.truncate(kv_ops.Remove(seq, 0), self.lengths[seq])
        self.set_length(seq, 0)

    def _remove(self, operation: kv_ops.Remove) -> None:
        seq, keep = operation.seq, operation.keep
        if keep >= self.lengths[seq]:
            return
        if keep > 0 and not self._info.can_reuse:
            raise kv_ops.IllegalCallError("this model's sequences can only be cleared whole")
        position = self.positions.cut(seq, keep)
        self.states.truncate(operation, self.lengths[seq])
        self._set_length(seq, keep)
        if not llama_cpp.llama_memory_seq_rm(self._memory, seq, position if keep else -1, -1):
            raise kv_ops.IllegalCallError(f"llama.cpp did not truncate sequence {seq} to {keep} tokens")

    def _settle(self, *seqs: int) -> None:
        """Have llama.cpp copy the states to which these sequences were rolled back; raises `MemoryError`."""
        for seq in seqs:
            if self.states.is_rolled_back(seq):
                self.partial.settle(seq)
                self.states.settle(seq)

    def _shift(self, operation: kv_ops.Shift) -> None:
        """Discard a part of a sequence and move the rest; raises `MemoryError`."""
        seq, start, end = operation.seq, operation.start, operation.end
        llama_cpp.llama_memory_seq_rm(self._memory, seq, start, end)
        if operation.copies and self._info.unified:
            state = save_sequence(self._context, seq)
            # Its own cells are free now, as far as no other sequence holds them.
            if not load_sequence(self._context, seq, state):
                raise MemoryError(f"llama.cpp could not load {len(state)} bytes")
        llama_cpp.llama_memory_seq_add(self._memory, seq, end, self.lengths[seq], start - end)
        self.lengths[seq] -= end - start

    def _saved(self, src: int, wanted: range) -> kv_ops.Kv:
        """Return a segment of these tokens, which may begin or end within a tile; raises `MemoryError`."""
        held = self.positions.whole(src, wanted)
        kv = self.transfer.save(src, held)
        if held == wanted:
            return kv
        assert self._info.segment_size is not None
        return join_parts([kv_ops.KvPart(kv, held, wanted)], self._info.segment_size)

    def _load(self, operation: kv_ops.Load) -> None:
        """Append parts of segments; raises `NotLoadedError`.

        llama.cpp does not report whether memory or free cells did not suffice.
        """
        parts = [
            (self.segments[number], self.segment_tokens[number], range(start, end))
            for number, start, end in operation.ranges
        ]
        try:
            self.transfer.load(operation.dst, operation.start, parts)
            if self.positions.has_tiles:
                for each in parts:
                    self.positions.append(operation.dst, saved_positions(*each)[1])
        except (MemoryError, ValueError) as error:
            # Rows of an unknown format cannot be joined.
            raise kv_ops.NotLoadedError(operation.parts[0][0]) from error

    def _restore(self, operation: kv_ops.Restore) -> None:
        seq, end = operation.dst, self.states.checkpoints[operation.checkpoint]
        try:
            self.partial.restore(operation, self.positions.cut(seq, end))
        except kv_ops.NotLoadedError:
            self._empty(seq)
            raise
        self.states.restore(seq)
        self.set_length(seq, end)
