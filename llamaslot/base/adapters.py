"""LoRA adapters of a request: which of those that are loaded it applies, and what its KV therefore depends on.

An activated adapter (aLoRA) is active from its *invocation* on, a few tokens that a prompt has near its end. What
comes before is computed without it, so it belongs to the namespace of the other adapters, and is shared with all
requests there. What follows is shared by requests with the same adapters alone, for the last tokens before the
invocation have other ids in the cache (`cache_ids.py`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from llamaslot.base.model import Adapter
from llamaslot.base.tokens import WIDTH

MAX_ADAPTERS = 256
"""Most adapters of a server, and of a request."""
MAX_SCALE = 100.0
"""Greatest absolute value of a scale. With 10,000, K and V of a request were infinite, and without flash attention
other requests, which only mask its cells, got invalid logits.
"""
MAX_INVOCATION = 256
"""Most tokens of an adapter's invocation."""
_FLOAT32 = struct.Struct("<f")


class AppliedAdapter(msgspec.Struct, frozen=True):
    """An adapter that a request applies."""

    id: int
    scale: float
    """Not 0, and as llama.cpp rounds it."""
    digest: str
    """`Adapter.digest`."""
    invocation: tuple[int, ...] = ()
    """`Adapter.invocation`."""


Adapters: TypeAlias = tuple[AppliedAdapter, ...]
"""All that a request applies, by their ids; empty for the model alone."""


def applied(loaded: Sequence[Adapter], scales: Sequence[float]) -> Adapters:
    """Return the adapters whose scale is not 0: with the others KV is that of the model alone."""
    rounded = (_FLOAT32.unpack(_FLOAT32.pack(scale))[0] for scale in scales)
    pairs = zip(loaded, rounded, strict=False)
    return tuple(
        AppliedAdapter(i, scale, each.digest, each.invocation) for i, (each, scale) in enumerate(pairs) if scale
    )


def always_active(adapters: Adapters) -> Adapters:
    """Return the adapters without those that an invocation activates."""
    return tuple(each for each in adapters if not each.invocation)


def adapters_key(adapters: Adapters) -> str:
    """Return a digest of the files and scales of adapters that are always active; empty for none."""
    return _digest(always_active(adapters)).hex()


@dataclass(frozen=True, slots=True)
class Activation:
    """The place of a prompt from which on an adapter is active."""

    start: int
    adapters: Adapters
    """All that are applied from there on."""

    @property
    def digest(self) -> bytes:
        """Digest of their files and scales."""
        return _digest(self.adapters)


def activation_of(adapters: Adapters, packed_prompt: bytes) -> Activation | None:
    """Return where a prompt activates one of a request's adapters; None if it has no invocation of them.

    The last invocation in the prompt counts, so that of earlier turns has no effect, and of several adapters one is
    active.
    """
    places = ((_last(packed_prompt, each.invocation), each) for each in adapters if each.invocation)
    start, chosen = max(places, key=lambda pair: pair[0], default=(-1, None))
    if chosen is None or start < 0:
        return None
    return Activation(start, tuple(each for each in adapters if each is chosen or not each.invocation))


def _last(packed_tokens: bytes, wanted: tuple[int, ...]) -> int:
    """Return where tokens are found last; -1 if they are not."""
    pattern = struct.pack(f"<{len(wanted)}i", *wanted)
    at = packed_tokens.rfind(pattern)
    while at % WIDTH and at >= 0:
        at = packed_tokens.rfind(pattern, 0, at + len(pattern) - 1)
    return at // WIDTH


def _digest(adapters: Adapters) -> bytes:
    if not adapters:
        return b""
    pairs = sorted((each.digest, each.scale) for each in adapters)
    return hashlib.blake2b(repr(pairs).encode(), digest_size=16, person=b"adapters").digest()
