"""Ids by which the cache knows the tokens of a prompt: those of images, and of what precedes one or an invocation.

All that compares, stores or looks up tokens takes equal ids for equal KV, one by one: two sequences share the cell
of a token if its id, and all before it, are the same. The id of text is its token. Those of a tile are a digest of
the image (`images.py`), but an id has 32 bits, and a client can search for an image whose first id is that of
another. What follows the invocation of an activated adapter (`adapters.py`) depends on the adapters, and the ids of
its text do not.

So the last tokens of text before an image, and before an invocation, are *marked*: the id of each has the token and
10 bits of a digest of the image, or of the adapters. By these ids alone they look like a tile.

    text         Look at this: <start of image>      image
    ids          812  m1  m2  m3  m4                 -7 -9 -2 ...       m1 to m4: 10 bits of the image's digest each
    another one  812  m1  n2  n3  n4                 -7 -5 -6 ...       m1 is alike by chance: its KV is the same

A marked token is computed as the token that it is, before anything that its mark stands for. So where some marks
are alike by chance, the KV that is shared is the same. What follows is shared only if all of them are alike. This
costs a few tokens, which are computed again for each image, and for each set of adapters.

Where too few tokens can be marked

- between two images, these are one *group*: the marks before the first have the digests of both, which are shared
  together or not at all;
- before the first image, or before the invocation, the digest becomes a part of the prompt's namespace.
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
"""Fewest that tell adapters apart without a namespace: 60 bits."""
MAX_MARKED_FOR_IMAGE = 4
"""Most tokens that are marked before an image: with its first id, which has 30 bits, 70 bits. With chat templates
they are those after the last message's end, at which models with a partial state have a checkpoint that all images
share.
"""
_MIN_MARKED_FOR_IMAGE = 2
"""Fewest that tell images apart without a group or a namespace: 50 bits, with the first id. Between adjacent images
many models have two delimiters. They are fewer than those for adapters, since an image that was searched for would
share one cell, and each further one takes 30 bits more.
"""


class CacheIds(NamedTuple):
    """A prompt as the cache knows it."""

    ids: Tokens
    marked_from: tuple[int, ...] = ()
    """Position of each range of marked tokens. An empty range is at the image or the invocation. None of these in a
    prompt without either.
    """
    key: str = ""
    """Digest of what too few tokens are marked for, a part of the prompt's namespace."""


class _Range(NamedTuple):
    """Tokens that are to be marked."""

    start: int
    n: int
    digest: bytes
    """Digest of what follows them."""


def cache_ids_of(prompt: TokenizedPrompt, activation: Activation | None) -> CacheIds:
    """Return a prompt as the cache knows it: unless it has images or activates an adapter, by its tokens."""
    if activation is None and not prompt.images:
        return CacheIds(prompt.tokens)
    ids, starts, not_told = prompt.tokens.copy(), list[int](), b""
    if activation is not None:
        # First, so that an image soon after the invocation does not take its tokens.
        found = _range_before(activation.start, ids, MAX_MARKED_FOR_ADAPTERS, activation.digest)
        if found.n < _MIN_MARKED_FOR_ADAPTERS:
            not_told += activation.digest
        _mark(ids, found)
        starts.append(found.start)
    groups: list[_Range] = []
    for image in prompt.images:
        found = _range_before(image.tiles[0][0], ids, MAX_MARKED_FOR_IMAGE, image.digest)
        if groups and found.n < _MIN_MARKED_FOR_IMAGE:
            groups[-1] = groups[-1]._replace(digest=groups[-1].digest + image.digest)
        else:
            groups.append(found)
    if groups and groups[0].n < _MIN_MARKED_FOR_IMAGE:
        not_told += groups[0].digest
    for group in groups:
        _mark(ids, group)
        starts.append(group.start)
    key = hashlib.blake2b(not_told, digest_size=16, person=b"not marked").hexdigest() if not_told else ""
    return CacheIds(ids, tuple(starts), key)


def marked_ids(digest: bytes, tokens: Tokens) -> Tokens:
    """Return ids like those of a tile, of which each has one of the tokens and its part of a digest.

    The digest is that of all these tokens too. Tokens that differ never have the same id, whatever the digest.
    """
    if not len(tokens):
        return tokens
    # Not the image's digest itself, from which the ids of its first tile are made.
    whole = hashlib.blake2b(
        digest + tokens.astype("<i4").tobytes(), digest_size=32, person=b"marked tokens"
    ).digest()
    ids = tile_ids(whole, 0, len(tokens))
    marked: Tokens = ids & ~(MAX_MARKED_TOKEN << _MARK_BITS) | tokens << _MARK_BITS
    return marked


def _range_before(end: int, ids: Tokens, most: int, digest: bytes) -> _Range:
    """Return the tokens before `end`, at most `most`, that can be marked: not those of images or marked already."""
    before = ids[max(end - most, 0) : end]
    others = ((before < 0) | (before > MAX_MARKED_TOKEN)).nonzero()[0]
    n = len(before) - (int(others[-1]) + 1 if len(others) else 0)
    return _Range(end - n, n, digest)


def _mark(ids: Tokens, found: _Range) -> None:
    """Replace the ids of a range by marked ones."""
    place = slice(found.start, found.start + found.n)
    ids[place] = marked_ids(found.digest, ids[place])
