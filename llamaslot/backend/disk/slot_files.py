"""Slot files: snapshots of single slots, which users save and restore by name.

    magic, format version, key of all that the KV depends on, length of the head, checksum of all that follows
    head: namespace, tokens, the position at which each part of the KV ends, the size of the partial state, and
        position and size of each checkpoint (not in version 3)
    the KV of the parts, then for a model that has them the partial state after the last token and the checkpoints

A file is used only if it is exactly what was written, by this model with the same settings.
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

from llamaslot.backend.disk.segment_files import KEY_BYTES, checksum_of
from llamaslot.backend.files import open_regular, write_atomically
from llamaslot.backend.memory import new_kv
from llamaslot.base.kv_ops import Kv
from llamaslot.base.model import CheckpointSize, SegmentSize
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.pools.slot_snapshot import (
    MAX_SAVED_CHECKPOINTS,
    InvalidSnapshotError,
    SlotSnapshot,
    SnapshotPart,
)

VERSION = 4
_VERSION_WITHOUT_CHECKPOINTS = 3
_MAGIC = b"llamslotslot"
_HEADER = struct.Struct(f"<12sI{KEY_BYTES}sQ16s")
_MAX_NAMESPACE_BYTES = 2**12
_MAX_HEAD_BYTES_OF_CHECKPOINT = 16
_Head: TypeAlias = tuple[str, bytes, list[int], int, list[tuple[int, int]]]
_decode_head = msgspec.msgpack.Decoder(_Head).decode
_decode_old_head = msgspec.msgpack.Decoder(tuple[str, bytes, list[int], int]).decode


class SlotFiles:
    """`SnapshotStore` in a folder, for slots of at most `n_ctx` tokens.

    `key` is called when it is first needed: it may read the whole model. `state_size` is that of the partial state,
    None for a model without one.
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
        # With a part for each token, and for twice as many tokens: a slot that is slightly too long is refused by
        # the number of its tokens.
        self._max_bytes = 2 * n_ctx * (size.of(1) + 2 * WIDTH) + _MAX_NAMESPACE_BYTES
        if state_size is not None:
            self._max_bytes += (1 + MAX_SAVED_CHECKPOINTS) * (state_size.of(n_ctx) + _MAX_HEAD_BYTES_OF_CHECKPOINT)

    def write(self, name: str, snapshot: SlotSnapshot) -> int:
        """Write a file atomically, replacing a slot file of that name; returns its size in bytes.

        Raises `OSError`: `FileExistsError` if the name is that of anything else, or another process writes it.
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
        # The name of the temporary file is no client's: theirs do not begin with a dot.
        temporary = self._folder / f".{name}.unfinished"
        try:
            write_atomically(self._folder / name, [memoryview(header), *body], temporary=temporary)
        except FileExistsError:
            raise FileExistsError(errno.EEXIST, "is being saved by another process", str(temporary)) from None
        return len(header) + sum(map(len, body))

    def read(self, name: str) -> tuple[SlotSnapshot, int]:
        """The snapshot in a file, and its size in bytes. Raises `OSError` or `InvalidSnapshotError`."""
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
                raise InvalidSnapshotError("it is larger than what a slot here can hold")
            body = new_kv(n_bytes - len(header))
            n_read = file.readinto(body.data)
        if n_read < len(body) or n_head > len(body) or checksum_of(body.data) != checksum:
            raise InvalidSnapshotError("it is not what was written")
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
            raise InvalidSnapshotError("its parts are not those of its tokens")
        parts = []
        at = n_head
        for start, end in pairwise(bounds):
            n_bytes = self._size.of(end - start)
            parts.append(SnapshotPart(start, end, body[at : at + n_bytes]))
            at += n_bytes
        n_checkpoints = sum(size for _, size in checkpoints)
        if at + n_state + n_checkpoints != len(body) or not parts or n_state not in self._state_sizes(bounds[-1]):
            raise InvalidSnapshotError("its KV has another size than that of its tokens")
        state = body[at : at + n_state] if n_state else None
        self._check(checkpoints, bounds[-1])
        states = []
        at += n_state
        for end, size in checkpoints:
            states.append(SnapshotPart(end, end, body[at : at + size]))
            at += size
        return SlotSnapshot(namespace, tokens, tuple(parts), state, tuple(states))

    def _check(self, checkpoints: Sequence[tuple[int, int]], n_tokens: int) -> None:
        """Raise `InvalidSnapshotError` for checkpoints that such a snapshot of this model does not have."""
        positions = [0, *(end for end, _ in checkpoints), n_tokens]
        if len(checkpoints) > MAX_SAVED_CHECKPOINTS or any(start >= end for start, end in pairwise(positions)):
            raise InvalidSnapshotError("its checkpoints are not those of its tokens")
        if any(size <= 0 or size not in self._state_sizes(end) for end, size in checkpoints):
            raise InvalidSnapshotError("its checkpoints have another size than this model's")

    def _state_sizes(self, n_tokens: int) -> tuple[int, ...]:
        """Bytes that the partial state after so many tokens may have."""
        return (0,) if self._state_size is None else self._state_size.all_of(n_tokens)
