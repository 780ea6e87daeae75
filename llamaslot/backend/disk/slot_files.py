"""Slot files: snapshots of single slots, which users save and restore by name.

    magic, format version, key of model and settings, length of the head, checksum of everything after this header
    head: namespace, tokens, the position at which each part of the KV ends, the size of the partial state, and
        position and size of each checkpoint (not in version 3)
    the KV of the parts, then for models with a partial state: that after the last token, and the checkpoints

A file is used only if it is intact and was written by the same model with the same settings.
"""

from __future__ import annotations

import errno
import functools
import os
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import msgspec

from llamaslot.backend.disk.disk_store import KEY_BYTES, checksum_of
from llamaslot.backend.host import new_kv
from llamaslot.backend.storage import open_regular, write_atomically
from llamaslot.base.kv_ops import Kv
from llamaslot.base.model import CheckpointSize, SegmentSize
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.slot_snapshots import (
    MAX_SAVED_CHECKPOINTS,
    InvalidSnapshotError,
    SlotSnapshot,
    SnapshotPart,
)

VERSION = 4
_VERSION_WITHOUT_CHECKPOINTS = 3
"""Oldest format version that can still be read."""
_MAGIC = b"llamslotslot"
_HEADER = struct.Struct(f"<12sI{KEY_BYTES}sQ16s")
_MAX_NAMESPACE_BYTES = 2**12
_MAX_HEAD_BYTES_OF_CHECKPOINT = 16
"""Most bytes of a checkpoint's entry in a file's head."""
_Head: TypeAlias = tuple[str, bytes, list[int], int, list[tuple[int, int]]]
_decode_head = msgspec.msgpack.Decoder(_Head).decode
_decode_old_head = msgspec.msgpack.Decoder(tuple[str, bytes, list[int], int]).decode


class SlotFiles:
    """`SnapshotStore` in a folder, for slots of at most `n_ctx` tokens.

    `key` is called at its first use, because it may read the whole model. `state_size` is the size of a partial
    state; None for a model without one.
    """

    def __init__(
        self,
        folder: Path,
        key: Callable[[], bytes],
        size: SegmentSize,
        n_ctx: int,
        state_size: CheckpointSize | None = None,
    ) -> None:
        self._folder = folder
        self._key = functools.cache(key)
        self._size = size
        self._state_size = state_size
        # A bound with one part per token, for twice the context, so that a slot that is only somewhat too long gets
        # the clearer message about its number of tokens.
        self._max_bytes = 2 * n_ctx * (size.of(1) + 2 * WIDTH) + _MAX_NAMESPACE_BYTES
        if state_size is not None:
            self._max_bytes += (1 + MAX_SAVED_CHECKPOINTS) * (state_size.of(n_ctx) + _MAX_HEAD_BYTES_OF_CHECKPOINT)

    def write(self, name: str, snapshot: SlotSnapshot) -> int:
        """Write a file atomically, replacing a slot file of that name; returns its size in bytes.

        Raises `OSError`; `FileExistsError` if the name belongs to any other file, or another process is writing it.
        """
        self._check_replaceable(self._folder / name)
        ends = [part.end for part in snapshot.parts]
        state = [] if snapshot.state is None else [snapshot.state.data]
        checkpoints = [(each.end, len(each.kv)) for each in snapshot.checkpoints]
        fields: _Head = snapshot.namespace, snapshot.tokens, ends, sum(map(len, state)), checkpoints
        head = msgspec.msgpack.encode(fields)
        body = [memoryview(head), *(part.kv.data for part in snapshot.parts), *state]
        body += [each.kv.data for each in snapshot.checkpoints]
        header = _HEADER.pack(_MAGIC, VERSION, self._key(), len(head), checksum_of(*body))
        # No client can name the temporary file: names of clients do not begin with a dot.
        temporary = self._folder / f".{name}.unfinished"
        try:
            write_atomically(self._folder / name, [memoryview(header), *body], temporary=temporary)
        except FileExistsError:
            raise FileExistsError(errno.EEXIST, "is being saved by another process", str(temporary)) from None
        return len(header) + sum(map(len, body))

    def read(self, name: str) -> tuple[SlotSnapshot, int]:
        """Return the snapshot in a file, and the file's size. Raises `OSError` or `InvalidSnapshotError`."""
        with open_regular(self._folder / name) as file:
            n_bytes = os.fstat(file.fileno()).st_size
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size or not header.startswith(_MAGIC):
                raise InvalidSnapshotError("it is not a slot file")
            _, version, key, n_head, checksum = _HEADER.unpack(header)
            if version not in (VERSION, _VERSION_WITHOUT_CHECKPOINTS):
                raise InvalidSnapshotError(f"its format is version {version}, not {VERSION}")
            if key != self._key():
                raise InvalidSnapshotError("it was saved with another model or other KV settings")
            if n_bytes > self._max_bytes:
                raise InvalidSnapshotError("it is larger than a slot of this server")
            body = new_kv(n_bytes - len(header))
            n_read = file.readinto(body.data)
        if n_read < len(body) or n_head > len(body) or checksum_of(body.data) != checksum:
            raise InvalidSnapshotError("it is damaged: its checksum differs from what was written")
        return self._decoded(body, n_head, version), n_bytes

    def _check_replaceable(self, path: Path) -> None:
        if not os.path.lexists(path):
            return
        try:
            with open_regular(path) as file:
                is_slot_file = file.read(len(_MAGIC)) == _MAGIC
        except FileNotFoundError:
            is_slot_file = False
        if not is_slot_file:
            if path.is_dir() and not path.is_symlink():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            raise FileExistsError(errno.EEXIST, "is there already, and is not a slot file", str(path))

    def _decoded(self, body: Kv, n_head: int, version: int) -> SlotSnapshot:
        head = body.data[:n_head]
        checkpoints: list[tuple[int, int]] = []
        try:
            if version == VERSION:
                namespace, tokens, ends, n_state, checkpoints = _decode_head(head)
            else:
                namespace, tokens, ends, n_state = _decode_old_head(head)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidSnapshotError(str(error)) from None
        bounds = [0, *ends]
        if len(tokens) != bounds[-1] * WIDTH or any(start >= end for start, end in pairwise(bounds)):
            raise InvalidSnapshotError("its parts do not match its tokens")
        parts = []
        at = n_head
        for start, end in pairwise(bounds):
            n_bytes = self._size.of(end - start)
            parts.append(SnapshotPart(start, end, body[at : at + n_bytes]))
            at += n_bytes
        n_checkpoints = sum(size for _, size in checkpoints)
        if at + n_state + n_checkpoints != len(body) or not parts or n_state not in self._state_sizes(bounds[-1]):
            raise InvalidSnapshotError("the size of its KV does not match its tokens")
        state = body[at : at + n_state] if n_state else None
        self._check(checkpoints, bounds[-1])
        states = []
        at += n_state
        for end, size in checkpoints:
            states.append(SnapshotPart(end, end, body[at : at + size]))
            at += size
        return SlotSnapshot(namespace, tokens, tuple(parts), state, tuple(states))

    def _check(self, checkpoints: Sequence[tuple[int, int]], n_tokens: int) -> None:
        """Raise `InvalidSnapshotError` for checkpoints that a snapshot of this model cannot have."""
        positions = [0, *(end for end, _ in checkpoints), n_tokens]
        if len(checkpoints) > MAX_SAVED_CHECKPOINTS or any(start >= end for start, end in pairwise(positions)):
            raise InvalidSnapshotError("its checkpoints do not match its tokens")
        if any(size <= 0 or size not in self._state_sizes(end) for end, size in checkpoints):
            raise InvalidSnapshotError("the size of its checkpoints does not match this model")

    def _state_sizes(self, n_tokens: int) -> tuple[int, ...]:
        """Return the possible sizes of a partial state after `n_tokens`."""
        return (0,) if self._state_size is None else self._state_size.all_of(n_tokens)
