"""Slot files: snapshots of single slots, which users save and restore by name.

    magic, format version, key of all that the KV depends on, length of the head, checksum of all that follows
    head: namespace, tokens, the position at which each part of the KV ends, and the size of the partial state
    the KV of the parts, then the partial state after the last token, for a model that has one

A file is used only if it is exactly what was written, by this model with the same settings.
"""

from __future__ import annotations

import errno
import functools
import os
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec

from llamaslot.backend.disk.segment_files import KEY_BYTES, checksum_of
from llamaslot.backend.files import open_regular, write_atomically
from llamaslot.backend.memory import new_kv
from llamaslot.base.kv_ops import Kv
from llamaslot.base.model import CheckpointSize, SegmentSize
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.pools.slot_snapshot import InvalidSnapshotError, SlotSnapshot, SnapshotPart

VERSION = 3
_MAGIC = b"llamslotslot"
_HEADER = struct.Struct(f"<12sI{KEY_BYTES}sQ16s")
_MAX_NAMESPACE_BYTES = 2**12
_decode_head = msgspec.msgpack.Decoder(tuple[str, bytes, list[int], int]).decode


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
        self._max_bytes += state_size.of(n_ctx) if state_size is not None else 0

    def write(self, name: str, snapshot: SlotSnapshot) -> int:
        """Write a file atomically, replacing a slot file of that name; returns its size in bytes.

        Raises `OSError`: `FileExistsError` if the name is that of anything else, or another process writes it.
        """
        self._check_replaceable(self._folder / name)
        ends = [part.end for part in snapshot.parts]
        state = [] if snapshot.state is None else [snapshot.state.data]
        head = msgspec.msgpack.encode((snapshot.namespace, snapshot.tokens, ends, sum(map(len, state))))
        body = [memoryview(head), *(part.kv.data for part in snapshot.parts), *state]
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
            if version != VERSION:
                raise InvalidSnapshotError(f"its format is version {version}, not {VERSION}")
            if key != self._key():
                raise InvalidSnapshotError("it was saved with another model or other KV settings")
            if n_bytes > self._max_bytes:
                raise InvalidSnapshotError("it is larger than what a slot here can hold")
            body = new_kv(n_bytes - len(header))
            n_read = file.readinto(body.data)
        if n_read < len(body) or n_head > len(body) or checksum_of(body.data) != checksum:
            raise InvalidSnapshotError("it is not what was written")
        return self._decoded(body, n_head), n_bytes

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

    def _decoded(self, body: Kv, n_head: int) -> SlotSnapshot:
        try:
            namespace, tokens, ends, n_state = _decode_head(body.data[:n_head])
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
        if at + n_state != len(body) or not parts or n_state not in self._state_sizes(bounds[-1]):
            raise InvalidSnapshotError("its KV has another size than that of its tokens")
        return SlotSnapshot(namespace, tokens, tuple(parts), body[at:] if n_state else None)

    def _state_sizes(self, n_tokens: int) -> tuple[int, ...]:
        """Bytes that the partial state after so many tokens may have."""
        return (0,) if self._state_size is None else self._state_size.all_of(n_tokens)
