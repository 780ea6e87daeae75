"""One segment as one file: a header by which it is known again, then the KV as the backend saved it.

    magic, format version, length of the KV, key of all that it depends on, digest of the path, checksum of the KV

Nothing is taken from a file that is not exactly what was written: llama.cpp takes flipped bits without a word, and
ends the process where bytes are missing.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import xxhash

from llamaslot.backend.memory import new_kv
from llamaslot.base.kv_ops import Kv

VERSION = 1
KEY_BYTES = 32
_MAGIC = b"llamslot"
_HEADER = struct.Struct(f"<8sQQ{KEY_BYTES}s16s16s")
_CHUNK = 2**20
"""Bytes to hash at a time, lest other threads wait."""


class BadFileError(Exception):
    """A file that is not what was written."""


def size(n_bytes: int) -> int:
    """Bytes of the file of a segment with so many bytes of KV."""
    return _HEADER.size + n_bytes


def checksum_of(*views: memoryview) -> bytes:
    """16 bytes that tell these bytes from any others but by an accident that nobody will see."""
    digest = xxhash.xxh3_128()
    for view in views:
        for at in range(0, len(view), _CHUNK):
            digest.update(view[at : at + _CHUNK])
    return digest.digest()


def write(file_path: Path, key: bytes, path_digest: bytes, kv: Kv) -> bytes:
    """Write a file that is there whole or not at all, whatever ends the process or the machine; its checksum.

    Raises `OSError`.
    """
    checksum = checksum_of(kv.data)
    header = _HEADER.pack(_MAGIC, VERSION, len(kv), key, path_digest, checksum)
    write_whole(file_path, [memoryview(header), kv.data], unfinished=file_path.with_suffix(".tmp"))
    return checksum


def write_whole(file_path: Path, parts: Sequence[memoryview], *, unfinished: Path) -> None:
    """Write these bytes to a file that has all of them or stays what it was, by way of an `unfinished` one in the
    same folder. Raises `OSError`.
    """
    try:
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", 0) as file:
            for part in parts:
                at = 0
                while at < len(part):
                    at += file.write(part[at:])
            os.fsync(file.fileno())
        unfinished.replace(file_path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def read(file_path: Path, key: bytes, path_digest: bytes, n_bytes: int, checksum: bytes) -> Kv:
    """The KV of a file that must have this key, digest of the path, length and checksum.

    Raises `BadFileError` where it does not, `OSError` where it cannot be read.
    """
    with file_path.open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != size(n_bytes):
            raise BadFileError("its length is not what was written")
        header = file.read(_HEADER.size)
        if header != _HEADER.pack(_MAGIC, VERSION, n_bytes, key, path_digest, checksum):
            raise BadFileError("its header is not what was written")
        kv = new_kv(n_bytes)
        view = kv.data
        at = 0
        while at < n_bytes and (n := file.readinto(view[at:])):
            at += n
    if at < n_bytes or checksum_of(kv.data) != checksum:
        raise BadFileError("its checksum is not what was written")
    return kv
