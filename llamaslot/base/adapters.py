"""LoRA adapters of a request: which of those that are loaded it applies, and what its KV therefore depends on."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from llamaslot.base.model import Adapter

MAX_ADAPTERS = 256
"""Most adapters of a server, and of a request."""
MAX_SCALE = 100.0
"""Greatest absolute value of a scale. With 10,000, K and V of a request were infinite, and without flash attention
other requests, which only mask its cells, got invalid logits.
"""
_FLOAT32 = struct.Struct("<f")


class AppliedAdapter(msgspec.Struct, frozen=True):
    """An adapter that a request applies."""

    id: int
    scale: float
    """Not 0, and as llama.cpp rounds it."""
    digest: str
    """`Adapter.digest`."""


Adapters: TypeAlias = tuple[AppliedAdapter, ...]
"""All that a request applies, by their ids; empty for the model alone."""


def applied(loaded: Sequence[Adapter], scales: Sequence[float]) -> Adapters:
    """Return the adapters whose scale is not 0: with the others KV is that of the model alone."""
    rounded = (_FLOAT32.unpack(_FLOAT32.pack(scale))[0] for scale in scales)
    pairs = zip(loaded, rounded, strict=False)
    return tuple(AppliedAdapter(i, scale, each.digest) for i, (each, scale) in enumerate(pairs) if scale)


def adapters_key(adapters: Adapters) -> str:
    """Return a digest of the adapters' files and scales, whatever their ids; empty for none."""
    if not adapters:
        return ""
    pairs = sorted((each.digest, each.scale) for each in adapters)
    return hashlib.blake2b(repr(pairs).encode(), digest_size=16, person=b"adapters").hexdigest()
