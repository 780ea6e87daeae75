"""Ids by which the cache knows the tokens of a prompt: those of images, and of what precedes an adapter.

All that compares, stores or looks up tokens takes equal ids for equal KV, one by one: two sequences share the cell
of a token if its id, and all before it, are the same. An id has 32 bits, and a client can search for an image, or a
scale of an adapter, of which one id is that of another. So the last tokens of text before an image, and before the
invocation of an activated adapter (`adapters.py`), are *marked*: they have ids like those of a tile (`images.py`),
each with the token and a part of a digest. They are computed as the tokens that they are, so where some of the ids
are alike, the KV that is shared is the same. Only where all of them are, what follows can be shared:

    text         Look at this: <start of image>      image
    ids          812  m1  m2  m3  m4                 -7 -9 -2 ...       m1 to m4: 10 bits of the image's digest each
    another one  812  m1  n2  n3  n4                 -7 -5 -6 ...       m1 is alike by chance: its KV is the same

A few tokens are computed again for each image, and for each set of adapters. Where too little text is between two
images, they are one *group*: the marks before the first have the digests of both, which are shared together or not
at all. Where too little is before the first, or before the invocation, the prompt has a namespace with the digest.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from llamaslot.base.adapters import Activation
from llamaslot.base.images import tile_ids
from llamaslot.base.tokens import TokenizedPrompt, Tokens

_MARK_BITS = 10
"""Bits of a digest in the id of a marked token; the other ones are the token's."""
MAX_MARKED_TOKEN = 2 ** (30 - _MARK_BITS) - 1
"""Greatest token that can be marked."""
MAX_MARKED_FOR_ADAPTERS = 8
"""Most tokens that are marked before an invocation: 80 bits, which cannot be searched for."""
_MIN_MARKED_FOR_ADAPTERS = 6
MAX_MARKED_FOR_IMAGE = 4
"""Most tokens that are marked before an image, whose first id has 30 bits more. With chat templates they are those
after the last message's end, at which models with a partial state have a checkpoint that all images share.
"""
_MIN_MARKED_FOR_IMAGE = 2
"""Least of them. Between two images that are adjacent many models have two delimiters."""


class CachedPrompt(NamedTuple):
    """A prompt as the cache knows it."""

    ids: Tokens
    marked_from: tuple[int, ...] = ()
    """Positions of the first token of each range that is marked."""
    key: str = ""
    """For its namespace (`keyed_namespace`): a digest that too few tokens are marked with."""


def cached_prompt(prompt: TokenizedPrompt, activation: Activation | None) -> CachedPrompt:
    """Return the ids of a prompt that has images, or activates an adapter; others are as they are."""
    ids = prompt.tokens
    if activation is None and not prompt.images:
        return CachedPrompt(ids)
    ids, starts, untold = ids.copy(), list[int](), b""
    if activation is not None:
        n = _n_markable(ids, activation.start, MAX_MARKED_FOR_ADAPTERS)
        untold += activation.digest if n < _MIN_MARKED_FOR_ADAPTERS else b""
        starts.append(_mark(ids, activation.start - n, n, activation.digest))
    groups: list[tuple[int, int, bytes]] = []
    for image in prompt.images:
        start = image.tiles[0][0]
        n = _n_markable(ids, start, MAX_MARKED_FOR_IMAGE)
        if n >= _MIN_MARKED_FOR_IMAGE or not groups:
            groups.append((start - n, n, image.digest))
        else:
            place, n, digest = groups.pop()
            groups.append((place, n, digest + image.digest))
    if groups and groups[0][1] < _MIN_MARKED_FOR_IMAGE:
        untold += groups[0][2]
    starts += [_mark(ids, *group) for group in groups]
    key = hashlib.blake2b(untold, digest_size=16, person=b"not marked").hexdigest() if untold else ""
    return CachedPrompt(ids, tuple(starts), key)


def marked_ids(digest: bytes, tokens: Tokens) -> Tokens:
    """Return ids like those of a tile, of which each has one of the tokens and its part of a digest.

    The digest is that of all tokens too. The same id stands for the same token, whatever the digest.
    """
    if not len(tokens):
        return tokens
    whole = hashlib.blake2b(
        digest + tokens.astype("<i4").tobytes(), digest_size=32, person=b"marked tokens"
    ).digest()
    ids = tile_ids(whole, 0, len(tokens))
    marked: Tokens = ids & ~(MAX_MARKED_TOKEN << _MARK_BITS) | tokens << _MARK_BITS
    return marked


def _mark(ids: Tokens, start: int, n: int, digest: bytes) -> int:
    """Replace `n` ids from `start` on by marked ones, and return `start`."""
    ids[start : start + n] = marked_ids(digest, ids[start : start + n])
    return start


def _n_markable(ids: Tokens, end: int, most: int) -> int:
    """Return how many of the tokens before `end`, at most `most`, can be marked."""
    before = ids[max(end - most, 0) : end]
    others = ((before < 0) | (before > MAX_MARKED_TOKEN)).nonzero()[0]
    return len(before) - (int(others[-1]) + 1 if len(others) else 0)
