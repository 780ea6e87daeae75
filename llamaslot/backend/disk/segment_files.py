"""Segment files: a header that identifies the segment, then its KV as the backend saved it.

    magic, format version, length of the KV, key of model and settings, path digest, checksum of the KV

A file is verified byte for byte before it is used, because llama.cpp loads flipped bits without an error, and
aborts the process if bytes are missing.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import xxhash

from llamaslot.backend.files import open_regular, write_atomically
from llamaslot.backend.memory import new_kv
from llamaslot.base.kv_ops import Kv

VERSION = 1
KEY_BYTES = 32
_MAGIC = b"llamslot"
_HEADER = struct.Struct(f"<8sQQ{KEY_BYTES}s16s16s")
_HASH_CHUNK_BYTES = 2**20
"""Bytes to hash at a time, so that other threads need not wait for the GIL during a whole segment."""


class CorruptFileError(Exception):
    """A file's content differs from what was written."""


def file_size(n_kv_bytes: int) -> int:
    """Return the size of the file of a segment with `n_kv_bytes` of KV, in bytes."""
    return _HEADER.size + n_kv_bytes


def checksum_of(*views: memoryview) -> bytes:
    """Return the 128-bit XXH3 of these bytes."""
    digest = xxhash.xxh3_128()
    for view in views:
        for start in range(0, len(view), _HASH_CHUNK_BYTES):
            digest.update(view[start : start + _HASH_CHUNK_BYTES])
    return digest.digest()


def write_segment(path: Path, key: bytes, path_digest: bytes, kv: Kv) -> bytes:
    """Write a segment's file atomically, and return the checksum of its KV. Raises `OSError`."""
    checksum = checksum_of(kv.data)
    header = _HEADER.pack(_MAGIC, VERSION, len(kv), key, path_digest, checksum)
    write_atomically(path, [memoryview(header), kv.data], temporary=path.with_suffix(".tmp"))
    return checksum


def read_segment(path: Path, key: bytes, n_bytes: int, path_digest: bytes, checksum: bytes) -> Kv:
    """Return the KV in a segment's file.

    Raises `CorruptFileError` unless key, path digest, length and checksum match, and `OSError` if it is unreadable.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size != file_size(n_bytes):
            raise CorruptFileError("its length differs from what was written")
        if file.read(_HEADER.size) != _HEADER.pack(_MAGIC, VERSION, n_bytes, key, path_digest, checksum):
            raise CorruptFileError("its header differs from what was written")
        kv = new_kv(n_bytes)
        n_read = file.readinto(kv.data)
    if n_read < n_bytes or checksum_of(kv.data) != checksum:
        raise CorruptFileError("its checksum differs from what was written")
    return kv
