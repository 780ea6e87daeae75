"""Damage to bytes: bits flipped, parts cut off, removed, repeated, moved, or taken from another file."""

from __future__ import annotations

import random

_INTEGERS = (0, 1, 0x7F, 0xFF, 0x7FFF_FFFF, 0xFFFF_FFFF, 2**63 - 1, 2**64 - 1, 2**40)


def damaged(data: bytes, chance: random.Random, other: bytes = b"", within: int | None = None) -> bytes:
    """Bytes that differ from `data`, in its first `within` bytes; `other` is a file to take parts from."""
    while True:
        result = bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 5))):
            _damage(result, chance, other, min(within or len(data), len(result)))
        if result != data:
            return bytes(result)


def _damage(data: bytearray, chance: random.Random, other: bytes, within: int) -> None:
    at = chance.randrange(within) if within else 0
    n = chance.choice((1, 2, 4, 8, 16, 100))
    match chance.randrange(8):
        case 0 | 1 if data:
            data[at] ^= 1 << chance.randrange(8)
        case 2:
            data[at : at + n] = chance.randbytes(n)
        case 3:
            del data[at:]
        case 4:
            del data[at : at + n]
        case 5:
            data[at:at] = data[at : at + n]
        case 6:
            width = chance.choice((1, 4, 8))
            number = chance.choice(_INTEGERS) % 256**width
            data[at : at + width] = number.to_bytes(width, "little")
        case _:
            source = other or bytes(data)
            start = chance.choice((at, chance.randrange(max(len(source), 1))))
            data[at : at + n] = source[start : start + n]
