"""What a slot held, as a file of its user's own: `SnapshotStore` in a folder.

    magic, format version, key of all that the KV depends on, length of the head, checksum of all that follows
    head: namespace, tokens, and for each segment its positions and its length
    the KV of the segments

A file is taken only if it is exactly what was written, by this model and in the same way to run it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec

from llamaslot.backend.disk import files
from llamaslot.backend.memory import new_kv
from llamaslot.base.kv_ops import Kv
from llamaslot.base.model import SegmentSize
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.offload.slot_snapshot import InvalidSnapshotError, SlotSnapshot, SnapshotPart

VERSION = 2
_MAGIC = b"llamslot"
_KIND = b"slot"
_HEADER = struct.Struct(f"<8s4sI{files.KEY_BYTES}sQ16s")


class _Segment(msgspec.Struct, array_like=True):
    start: int
    end: int
    n_bytes: int


class _Head(msgspec.Struct, array_like=True):
    namespace: str
    tokens: bytes
    segments: list[_Segment]


class SlotFiles:
    """See `SnapshotStore`. `key` is asked for when it is needed first: it may take as long as to read the model."""

    def __init__(self, folder: Path, key: Callable[[], bytes], size: SegmentSize) -> None:
        self._folder = folder
        self._key_of = key
        self._key = b""
        self._size = size

    def write(self, name: str, saved: SlotSnapshot) -> int:
        """See `SnapshotStore.write`."""
        segments = [_Segment(each.start, each.end, len(each.kv)) for each in saved.parts]
        head = msgspec.msgpack.encode(_Head(saved.namespace, saved.tokens, segments))
        body = [memoryview(head), *(segment.kv.data for segment in saved.parts)]
        header = _HEADER.pack(_MAGIC, _KIND, VERSION, self._its_key(), len(head), files.checksum_of(*body))
        # No name that a client may give begins with a dot.
        files.write_whole(
            self._folder / name, [memoryview(header), *body], unfinished=self._folder / f".{name}.unfinished"
        )
        return len(header) + sum(map(len, body))

    def read(self, name: str) -> tuple[SlotSnapshot, int]:
        """See `SnapshotStore.read`."""
        path = self._folder / name
        n_bytes = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size or not header.startswith(_MAGIC + _KIND):
                raise InvalidSnapshotError("it is no slot's file")
            _, _, version, key, n_head, checksum = _HEADER.unpack(header)
            if version != VERSION:
                raise InvalidSnapshotError(f"its format is version {version}, not {VERSION}")
            if key != self._its_key():
                raise InvalidSnapshotError("it is from another model, or from another way to run it")
            body = new_kv(n_bytes - len(header))
            at = 0
            while at < len(body) and (n := file.readinto(body.data[at:])):
                at += n
        if at < len(body) or n_head > len(body) or files.checksum_of(body.data) != checksum:
            raise InvalidSnapshotError("it is not what was written")
        return self._decoded(body, n_head), n_bytes

    def _decoded(self, body: Kv, n_head: int) -> SlotSnapshot:
        try:
            head = msgspec.msgpack.decode(body.data[:n_head], type=_Head)
        except msgspec.MsgspecError as error:
            raise InvalidSnapshotError(str(error)) from None
        at = n_head
        segments = []
        for segment in head.segments:
            kv = body[at : at + segment.n_bytes]
            if len(kv) != segment.n_bytes or segment.n_bytes != self._size.of(segment.end - segment.start):
                raise InvalidSnapshotError("it has segments of another size")
            segments.append(SnapshotPart(segment.start, segment.end, kv))
            at += segment.n_bytes
        bounds = [0, *(segment.end for segment in segments)]
        starts = [segment.start for segment in segments]
        are_in_a_row = starts == bounds[:-1] and all(a < b for a, b in pairwise(bounds))
        if not are_in_a_row or len(head.tokens) != bounds[-1] * WIDTH or at != len(body):
            raise InvalidSnapshotError("its segments are not what its tokens want")
        return SlotSnapshot(head.namespace, head.tokens, tuple(segments))

    def _its_key(self) -> bytes:
        self._key = self._key or self._key_of()
        return self._key
