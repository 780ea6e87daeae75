"""Activated adapters: where a prompt activates one, and the ids that its tokens have in the cache."""

from __future__ import annotations

import random

import numpy as np
import pytest

from llamaslot.base.adapters import Adapters, activation_of, adapters_key, always_active, applied
from llamaslot.base.images import before_tile
from llamaslot.base.model import Adapter
from llamaslot.base.tokens import packed

INVOKED, OTHER = (7, 8), (5,)
LOADED = (
    Adapter("a.gguf", "a", 1.0, invocation=INVOKED),
    Adapter("b.gguf", "b", 1.0, invocation=OTHER),
    Adapter("c.gguf", "c", 1.0),
)


def chosen(*scales: float) -> Adapters:
    return applied(LOADED, scales)


def start_of(adapters: Adapters, *tokens: int) -> int | None:
    found = activation_of(adapters, packed(np.array(tokens)))
    return found.start if found is not None else None


@pytest.mark.parametrize(
    ("tokens", "start"),
    [
        ((1, 7, 8, 2), 1),
        ((7, 8, 1, 7, 8), 3),
        ((7, 7, 8, 8), 1),
        ((7, 8), 0),
        ((1, 7, 2, 8), None),
        ((8, 7), None),
        ((7,), None),
        # The bytes of the invocation, but within others.
        ((7 << 8, 8 << 8, 0), None),
        ((7, 8, 7 << 16, 8 << 16, 0), 0),
    ],
)
def test_the_last_invocation_counts(tokens: tuple[int, ...], start: int | None) -> None:
    assert start_of(chosen(1, 0, 0), *tokens) == start


def test_of_several_adapters_the_one_that_is_invoked_last_is_active() -> None:
    everything = chosen(1, 1, 1)
    for tokens, active in (((1, 7, 8, 5, 2), (1, 2)), ((1, 5, 7, 8, 2), (0, 2)), ((1, 5, 2), (1, 2))):
        found = activation_of(everything, packed(np.array(tokens)))
        assert found is not None
        assert tuple(each.id for each in found.adapters) == active
    assert activation_of(everything, packed(np.array((1, 2)))) is None
    assert activation_of(chosen(0, 0, 1), packed(np.array((1, 7, 8)))) is None


def test_what_comes_before_has_the_namespace_of_the_other_adapters() -> None:
    assert adapters_key(chosen(1, 0.5, 0)) == adapters_key(()) == ""
    assert adapters_key(chosen(1, 0, 1)) == adapters_key(chosen(0, 0, 1)) != ""
    assert always_active(chosen(1, 1, 1)) == chosen(0, 0, 1)


def test_ids_are_the_same_for_the_same_adapters_alone() -> None:
    def ids(adapters: Adapters, *tokens: int) -> tuple[int, ...]:
        found = activation_of(adapters, packed(np.array(tokens)))
        assert found is not None
        return tuple(found.ids.tolist())

    before = 1, 2, 3, 2**20 - 1
    first = ids(chosen(1, 0, 0), *before, 7, 8, 2)
    assert len(first) == 4
    assert max(first) < 0
    # Whatever follows, whatever order the files are loaded in, and with others that are not invoked.
    turned = applied(LOADED[::-1], (0, 1, 1))
    assert first == ids(chosen(1, 0, 0), *before, 7, 8) == ids(turned, *before, 7, 8, 2)
    others = [
        ids(chosen(0.5, 0, 0), *before, 7, 8, 2),
        ids(chosen(1, 0, 1), *before, 7, 8, 2),
        ids(chosen(0, 1, 0), *before, 5, 8, 2),
    ]
    assert len({first, *others}) == 4
    # Each says which token it is. So an id that two of them have by chance is that of the same KV.
    for found in (first, *others):
        assert tuple(each >> 10 & 2**20 - 1 for each in found) == before
    tokens = np.array((9, *first, 7, 8))
    assert [before_tile(tokens, n) for n in range(8)] == [0, 1, 1, 1, 1, 5, 6, 7]


def test_what_is_cached_is_computed_as_it_was_sent() -> None:
    chance = random.Random(1)
    for _ in range(300):
        prompt = np.array(chance.choices((1, 5, 7, 8), k=chance.randint(1, 20)), dtype=np.int32)
        found = activation_of(chosen(1, 1, 0), packed(prompt))
        if found is None:
            assert 5 not in prompt
            continue
        cached = found.as_cached(0, prompt)
        assert packed(cached) == found.cached_prompt(packed(prompt))
        is_changed = cached != prompt
        assert is_changed.tolist() == [found.start - 8 <= i < found.start for i in range(len(prompt))]
        assert found.can_share == (found.start >= 6)
        start = chance.randint(0, len(prompt))
        end = chance.randint(start, len(prompt))
        assert np.array_equal(found.as_computed(start, cached[start:end]), prompt[start:end])
        assert np.array_equal(found.as_cached(start, prompt[start:end]), cached[start:end])


def test_ids_of_an_image_stay_as_they_are() -> None:
    for tokens, n in (((-5, 7, 8), 0), ((1, 2, -5, -6, 1, 2, 7, 8, -5, -6), 2), ((2**20, *range(9), 7, 8), 8)):
        found = activation_of(chosen(1, 0, 0), packed(np.array(tokens)))
        assert found is not None
        cached, start = found.as_cached(0, np.array(tokens)), found.start
        assert len(found.ids) == n
        assert (*cached[: start - n].tolist(), *cached[start:].tolist()) == (*tokens[: start - n], *tokens[start:])
    found = activation_of(chosen(1, 0, 0), packed(np.array((1, 2**20, 1, 7, 8))))
    assert found is not None
    assert len(found.ids) == 1
