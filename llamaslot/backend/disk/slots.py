"""What a slot held, as a file of its user's own: `SlotStore` in a folder.

    magic, format version, key of all that the KV depends on, length of the head, checksum of all that follows
    head: namespace, tokens, and for each part its positions, the order of its cells and its length
    the KV of the parts

A file is taken only if it is exactly what was written, by this model and in the same way to run it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from llamaslot.backend.disk import files
from llamaslot.backend.memory import new_kv
from llamaslot.base.model import SegmentSize
from llamaslot.core.backend import Kv
from llamaslot.core.disk import BadSegmentError, SavedPart, SavedSlot
from llamaslot.core.node import WIDTH

VERSION = 1
_MAGIC = b"llamslot"
_KIND = b"slot"
_HEADER = struct.Struct(f"<8s4sI{files.KEY_BYTES}sQ16s")


class _Part(msgspec.Struct, array_like=True):
    start: int
    end: int
    cell_order: bytes
    n_bytes: int


class _Head(msgspec.Struct, array_like=True):
    space: str
    tokens: bytes
    parts: list[_Part]


class SlotFolder:
    """See `SlotStore`. `key` is asked for when it is needed first: it may take as long as to read the model."""

    def __init__(self, folder: Path, key: Callable[[], bytes], size: SegmentSize) -> None:
        self._folder = folder
        self._key_of = key
        self._key = b""
        self._size = size

    def write(self, name: str, saved: SavedSlot) -> int:
        """See `SlotStore.write`."""
        parts = [_Part(part.start, part.end, part.cell_order, len(part.kv)) for part in saved.parts]
        head = msgspec.msgpack.encode(_Head(saved.space, saved.tokens, parts))
        body = [memoryview(head), *(part.kv.data for part in saved.parts)]
        header = _HEADER.pack(_MAGIC, _KIND, VERSION, self._its_key(), len(head), _checksum(body))
        files.write_whole(self._folder / name, [memoryview(header), *body])
        return len(header) + sum(map(len, body))

    def read(self, name: str) -> tuple[SavedSlot, int]:
        """See `SlotStore.read`."""
        path = self._folder / name
        n_bytes = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size or not header.startswith(_MAGIC + _KIND):
                raise BadSegmentError("it is no slot's file")
            _, _, version, key, n_head, checksum = _HEADER.unpack(header)
            if version != VERSION:
                raise BadSegmentError(f"its format is version {version}, not {VERSION}")
            if key != self._its_key():
                raise BadSegmentError("it is from another model, or from another way to run it")
            body = new_kv(n_bytes - len(header))
            at = 0
            while at < len(body) and (n := file.readinto(body.data[at:])):
                at += n
        if at < len(body) or n_head > len(body) or _checksum([body.data]) != checksum:
            raise BadSegmentError("it is not what was written")
        return self._decoded(body, n_head), n_bytes

    def _decoded(self, body: Kv, n_head: int) -> SavedSlot:
        try:
            head = msgspec.msgpack.decode(body.data[:n_head], type=_Head)
        except msgspec.MsgspecError as error:
            raise BadSegmentError(str(error)) from None
        at = n_head
        parts = []
        for part in head.parts:
            kv = body[at : at + part.n_bytes]
            if len(kv) != part.n_bytes or part.n_bytes != self._size.of(part.end - part.start):
                raise BadSegmentError("it has parts of another size")
            if not _is_order(part):
                raise BadSegmentError("it has no order of cells")
            parts.append(SavedPart(part.start, part.end, part.cell_order, kv))
            at += part.n_bytes
        bounds = [0, *(part.end for part in parts)]
        are_in_a_row = [part.start for part in parts] == bounds[:-1] and all(a < b for a, b in pairwise(bounds))
        if not are_in_a_row or len(head.tokens) != bounds[-1] * WIDTH or at != len(body):
            raise BadSegmentError("its parts are not what its tokens want")
        return SavedSlot(head.space, head.tokens, tuple(parts))

    def _its_key(self) -> bytes:
        self._key = self._key or self._key_of()
        return self._key


def _checksum(parts: list[memoryview]) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        for at in range(0, len(part), files.CHUNK):
            digest.update(part[at : at + files.CHUNK])
    return digest.digest()


def _is_order(part: _Part) -> bool:
    n = part.end - part.start
    if not part.cell_order:
        return True
    return len(part.cell_order) == 2 * n and sorted(np.frombuffer(part.cell_order, "<i2").tolist()) == list(
        range(n)
    )
