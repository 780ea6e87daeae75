"""LoRA adapters of a request: which of those that are loaded it applies, and what its KV therefore depends on.

An activated adapter (aLoRA) is active from its *invocation* on, a few tokens that a prompt has near its end. What
comes before is computed without it, so it belongs to the namespace of the other adapters, and is shared with all
requests there. The last tokens before the invocation have other ids in the cache, negative like those of a tile of
an image: each has the token and a part of a digest of the adapters, so that only requests that apply the same ones
share what follows. So all that compares, stores or looks up token ids need not know of adapters. These tokens are
computed without the adapter: where others have some of the ids by chance, or since a client looked for scales that
have them, the KV that they share is the same.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from llamaslot.base.images import MAX_MARKED_TOKEN, marked_ids
from llamaslot.base.model import Adapter
from llamaslot.base.tokens import WIDTH, Tokens, packed, unpacked

MAX_ADAPTERS = 256
"""Most adapters of a server, and of a request."""
MAX_SCALE = 100.0
"""Greatest absolute value of a scale. With 10,000, K and V of a request were infinite, and without flash attention
other requests, which only mask its cells, got invalid logits.
"""
MAX_INVOCATION = 256
"""Most tokens of an adapter's invocation."""
_MIN_MARKED = 6
"""Least tokens that must have a part of the digest, 10 bits each, for KV to be shared after them."""
MAX_MARKED = 8
"""Most of them: 80 bits, which cannot be searched for. So many tokens are computed again for each adapter."""
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
    tokens: Tokens
    """The last tokens before it."""
    ids: Tokens
    """What they are called in the cache, as many."""

    @property
    def marked_from(self) -> int:
        """Position of the first token with another id."""
        return self.start - len(self.ids)

    @property
    def can_share(self) -> bool:
        """True if the ids tell these adapters from others, so that KV may be shared after them."""
        return len(self.ids) >= _MIN_MARKED

    def as_cached(self, start: int, tokens: Tokens) -> Tokens:
        """Return tokens of the request, the first of which is at `start`, as the cache knows them."""
        return _replaced(tokens, start, self.ids, self.marked_from)

    def cached_prompt(self, packed_tokens: bytes) -> bytes:
        """Return the prompt, both packed, as the cache knows it."""
        return packed(self.as_cached(0, unpacked(packed_tokens)))

    def as_computed(self, start: int, ids: Tokens) -> Tokens:
        """Return what `as_cached` made of tokens as the model knows them."""
        return _replaced(ids, start, self.tokens, self.marked_from)


def activation_of(adapters: Adapters, packed_prompt: bytes) -> Activation | None:
    """Return where a prompt activates one of a request's adapters; None if it has no invocation of them.

    The last invocation in the prompt counts, so that of earlier turns has no effect, and of several adapters one is
    active.
    """
    places = ((_last(packed_prompt, each.invocation), each) for each in adapters if each.invocation)
    start, chosen = max(places, key=lambda pair: pair[0], default=(-1, None))
    if chosen is None or start < 0:
        return None
    active = tuple(each for each in adapters if each is chosen or not each.invocation)
    before = unpacked(packed_prompt[max(start - MAX_MARKED, 0) * WIDTH : start * WIDTH])
    # Ids of an image stay as they are.
    others = ((before < 0) | (before > MAX_MARKED_TOKEN)).nonzero()[0]
    if len(others):
        before = before[int(others[-1]) + 1 :]
    return Activation(start, active, before, marked_ids(_digest(active), before))


def _last(packed_tokens: bytes, wanted: tuple[int, ...]) -> int:
    """Return where tokens are found last; -1 if they are not."""
    pattern = struct.pack(f"<{len(wanted)}i", *wanted)
    at = packed_tokens.rfind(pattern)
    while at % WIDTH and at >= 0:
        at = packed_tokens.rfind(pattern, 0, at + len(pattern) - 1)
    return at // WIDTH


def _replaced(tokens: Tokens, start: int, others: Tokens, others_start: int) -> Tokens:
    """Return tokens, of which the first is at `start`, with others in place of those at the same positions."""
    first, end = max(start, others_start), min(start + len(tokens), others_start + len(others))
    if first >= end:
        return tokens
    changed = tokens.copy()
    changed[first - start : end - start] = others[first - others_start : end - others_start]
    return changed


def _digest(adapters: Adapters) -> bytes:
    if not adapters:
        return b""
    pairs = sorted((each.digest, each.scale) for each in adapters)
    return hashlib.blake2b(repr(pairs).encode(), digest_size=16, person=b"adapters").digest()
