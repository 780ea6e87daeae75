"""Activated adapters: where a prompt activates one."""

from __future__ import annotations

import numpy as np
import pytest

from llamaslot.base.adapters import Adapters, activation_of, adapters_key, always_active, applied
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
