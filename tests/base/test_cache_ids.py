"""Ids by which the cache knows tokens: those before an image, and before the invocation of an adapter."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from llamaslot.base.adapters import Adapters, activation_of, applied
from llamaslot.base.cache_ids import CacheIds, cache_ids_of
from llamaslot.base.commands import GenerateParams
from llamaslot.base.images import PromptImage, before_tile, tile_ids
from llamaslot.base.namespaces import PUBLIC_NAMESPACE, PUBLIC_SALT, key_salt, key_secret, public_of
from llamaslot.base.tokens import TokenizedPrompt, packed
from tests.base.test_activation import LOADED, chosen

N_TILE = 4


def prompt_of(*parts: int | str) -> TokenizedPrompt:
    """A prompt of tokens, and of images: each letter is one, `ab` one of two tiles with a delimiter (3) between."""
    tokens, images = list[int](), list[PromptImage]()
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
            continue
        digest, tiles = part.encode() * 8, list[tuple[int, int]]()
        for number in range(len(part)):
            tokens += [3] * bool(number)
            tiles.append((len(tokens), len(tokens) + N_TILE))
            tokens += tile_ids(digest, number, N_TILE).tolist()
        images.append(PromptImage(b"", digest, tuple(tiles)))
    return TokenizedPrompt(packed(np.array(tokens, dtype=np.int32)), images=tuple(images))


def cached(*parts: int | str, adapters: Adapters = ()) -> CacheIds:
    prompt = prompt_of(*parts)
    return cache_ids_of(prompt, activation_of(adapters, prompt.packed_tokens))


def marked(prompt: TokenizedPrompt, found: CacheIds) -> list[int]:
    """Positions whose ids are other ones in the cache; says which tokens they have."""
    changed = np.flatnonzero(found.ids != prompt.tokens)
    assert (found.ids[changed] < 0).all()
    # Each says which token it is. So an id that two prompts have by chance is that of the same KV.
    assert (found.ids[changed] >> 10 & 2**20 - 1).tolist() == prompt.tokens[changed].tolist()
    # The cache takes each range of them for a tile.
    begun = [int(each) for each in changed if before_tile(found.ids, int(each)) == each]
    assert begun == sorted(each for each in found.marked_from if each in changed)
    return [*map(int, changed)]


def test_a_prompt_of_text_is_as_it_is() -> None:
    for adapters in ((), chosen(1, 1, 1)):
        found = cached(*range(10, 30), adapters=adapters)
        assert found.ids.tolist() == [*range(10, 30)]
        assert (found.marked_from, found.key) == ((), "")


@pytest.mark.parametrize(
    ("parts", "positions", "starts", "is_told"),
    [
        # Up to four tokens before an image.
        ((*range(10, 20), "a", 1, 2), [6, 7, 8, 9], (6,), True),
        ((10, 11, "a"), [0, 1], (0,), True),
        # What is between the tiles of an image, and what follows, is as it is.
        ((10, 11, 12, "ab", 13), [0, 1, 2], (0,), True),
        # With less text before it, the image is told by too few bits, and by the namespace.
        ((10, "a", 11, 12), [0], (0,), False),
        (("a", 11, 12, 13), [], (0,), False),
        # A later image has marks of its own, if there is room for them; otherwise both are one group.
        ((10, 11, "a", 12, 13, "b"), [0, 1, 6, 7], (0, 6), True),
        ((10, 11, "a", 12, "b", 13), [0, 1], (0,), True),
        ((10, 11, "a", "b", "c", 14, 15, 16, "d"), [0, 1, 14, 15, 16], (0, 14), True),
        ((10, "a", 11, 12, "b"), [0, 5, 6], (0, 5), False),
        # A token that leaves no room for a digest is not marked, nor any before it.
        ((10, 2**20, 11, 12, "a"), [2, 3], (2,), True),
        ((10, 11, 2**20, 12, "a"), [3], (3,), False),
        ((10, 2**20 - 1, "a"), [0, 1], (0,), True),
    ],
)
def test_tokens_before_an_image_are_marked(
    parts: Sequence[int | str], positions: list[int], starts: tuple[int, ...], is_told: bool
) -> None:
    prompt, found = prompt_of(*parts), cached(*parts)
    assert marked(prompt, found) == positions
    assert (found.marked_from, not found.key) == (starts, is_told)


def test_marks_tell_images_apart() -> None:
    before = (10, 11, 12, 13)

    def marks(*parts: int | str) -> tuple[int, ...]:
        return tuple(cached(*parts).ids[:4].tolist())

    same = marks(*before, "a", 14, 15)
    assert same == marks(*before, "a") == marks(*before, "a", 16, 17, "b")
    group = marks(*before, "a", "c")
    assert group == marks(*before, "a", 14, "c"), "the ids after the marks tell these apart"
    others = [
        marks(*before, "b"),
        marks(*before, "aa"),
        marks(*before, "a", "b"),
        marks(9, *before[1:], "a"),
    ]
    assert len({same, group, *others}) == 6
    # The digest is that of all marked tokens: nobody can search for an image once for all texts.
    assert not {*same[1:]} & {*marks(9, *before[1:], "a")[1:]}
    # The image alone has no ids of the marks before it.
    assert not {*same} & {*cached(*before, "a").ids[4:].tolist()}


def test_ids_before_an_invocation_are_those_of_the_same_adapters_alone() -> None:
    def ids(adapters: Adapters, *tokens: int) -> tuple[int, ...]:
        found, prompt = cached(*tokens, adapters=adapters), prompt_of(*tokens)
        assert marked(prompt, found) == [0, 1, 2, 3]
        return tuple(found.ids[:4].tolist())

    before = 1, 2, 3, 2**20 - 1
    first = ids(chosen(1, 0, 0), *before, 7, 8, 2)
    # Whatever follows, whatever order the files are loaded in, and with others that are not invoked.
    turned = applied(LOADED[::-1], (0, 1, 1))
    assert first == ids(chosen(1, 0, 0), *before, 7, 8) == ids(turned, *before, 7, 8, 2)
    others = [
        ids(chosen(0.5, 0, 0), *before, 7, 8, 2),
        ids(chosen(1, 0, 1), *before, 7, 8, 2),
        ids(chosen(0, 1, 0), *before, 5, 8, 2),
    ]
    assert len({first, *others}) == 4


def test_eight_tokens_before_an_invocation_are_marked_and_six_are_enough() -> None:
    chance = random.Random(1)
    for _ in range(300):
        tokens = chance.choices((1, 5, 7, 8), k=chance.randint(1, 20))
        found, prompt = cached(*tokens, adapters=chosen(1, 1, 0)), prompt_of(*tokens)
        activation = activation_of(chosen(1, 1, 0), prompt.packed_tokens)
        if activation is None:
            assert 5 not in tokens
            continue
        start = activation.start
        assert marked(prompt, found) == [*range(max(start - 8, 0), start)]
        assert (not found.key) == (start >= 6)


@pytest.mark.parametrize(
    ("parts", "positions"),
    [
        (("a", 7, 8), []),
        ((1, 2, "a", 1, 2, 7, 8, "b"), [0, 1, 6, 7, 8, 9]),
        # Those before the invocation are marked for it; for an image soon after it those of the invocation.
        ((1, 2, 3, 4, 5, 6, 7, 8, "a"), [0, 1, 2, 3, 4, 5, 6, 7]),
        ((2**20, *range(9), 7, 8), [2, 3, 4, 5, 6, 7, 8, 9]),
        ((1, 2**20, 1, 7, 8), [2]),
    ],
)
def test_no_token_is_marked_twice_nor_one_of_an_image(parts: Sequence[int | str], positions: list[int]) -> None:
    found = cached(*parts, adapters=chosen(1, 0, 0))
    assert marked(prompt_of(*parts), found) == positions


def test_what_too_few_ids_tell_apart_has_keys_that_differ() -> None:
    one, two = chosen(1, 0, 0), chosen(0.5, 0, 0)
    group = cached("a", "b").key
    assert group == cached("a", 11, "b").key, "their ids tell these apart"
    keys = [
        group,
        cached("a", 11, 12, 13).key,
        cached("b", 11, 12, 13).key,
        cached(10, "aa").key,
        cached(1, 7, 8, adapters=one).key,
        cached(1, 7, 8, adapters=two).key,
        cached("a", 7, 8, adapters=one).key,
        cached("b", 7, 8, adapters=one).key,
    ]
    assert all(keys)
    assert len({*keys}) == 8
    # Only what its group has, not what follows.
    assert cached("a", 11, 12, 13).key == cached("a", 14, 15, "b").key


def test_a_key_is_at_the_end_of_a_namespace() -> None:
    key, adapters = cached("a").key, chosen(0, 0, 1)
    given = [
        GenerateParams("r", cache_salt=salt, adapters=each) for salt in ("", "salt") for each in ((), adapters)
    ]
    names = [each.namespace_with(name) for each in given for name in ("", key)]
    assert len({*names}) == 8
    assert names[::2] == [each.namespace for each in given]
    public = GenerateParams("r", cache_salt=PUBLIC_SALT).namespace_with(key)
    tenant = GenerateParams("r", cache_salt=key_salt(key_secret("ann"), "")).namespace_with(key)
    assert public_of(tenant) == public != PUBLIC_NAMESPACE
