"""The scheduler with models that have a partial state, on the fake backend."""

from __future__ import annotations

import pytest

from llamaslot.base.model import StateKind
from llamaslot.base.namespaces import key_salt, key_secret, salt_namespace, tenant_of
from llamaslot.base.tokens import packed
from llamaslot.kvcache.segment import checkpoints_on
from llamaslot.scheduler.request import Request, RequestState
from tests.fake_backend import WINDOW
from tests.scheduler.test_scheduler import Driver, generated


@pytest.mark.parametrize("ram_bytes", [0, 10**6])
def test_an_idle_sequence_that_keeps_one_cell_of_a_window_never_stops_the_only_request(ram_bytes: int) -> None:
    """Where a window is about as long as the context, a request needs all of its cells."""
    few = {"n_window_cells": WINDOW + 2}
    driver = Driver(
        kind=StateKind.WINDOW, n_slots=2, n_ctx=64, n_ubatch=16, ram_bytes=ram_bytes, idle_cells=20, checkpoints=few
    )
    # Slot 0 keeps only the cells before the checkpoint, which the other one shares.
    driver.run("a" * 20 + "b" * 4, id_slot=0)
    driver.step()
    assert driver.cache.length(0) == 20
    assert not driver.cache._sequences.states.is_live(0)
    request = driver.run("a" * 20 + "z" * 34, max_tokens=10, id_slot=1)
    assert request.n_cached == 20
    assert request.state is RequestState.DONE
    assert len(generated(request)) == 10


def test_a_tenant_keeps_its_share_of_the_checkpoints_however_many_another_one_takes() -> None:
    ann, bob = (key_salt(key_secret(key), "") for key in ("ann", "bob"))
    driver = Driver(
        kind=StateKind.RECURRENT, n_slots=2, n_reserved=2, checkpoints={"step_tokens": 16, "ram_bytes": 8 * 64}
    )
    driver.run("a" * 60, cache_salt=ann)
    for letter in "bcdefghijk":
        driver.run(letter * 60, cache_salt=bob)
    n_used = {name: driver.cache._tiers.checkpoints.used[tenant_of(salt_namespace(name))] for name in (ann, bob)}
    assert n_used == {ann: 4 * 64, bob: 4 * 64}


@pytest.mark.parametrize("kind", [StateKind.RECURRENT, StateKind.WINDOW])
@pytest.mark.parametrize("segment_tokens", [16, 512])
def test_what_is_dropped_of_a_path_takes_its_checkpoints_along(kind: StateKind, segment_tokens: int) -> None:
    driver = Driver(
        kind=kind,
        n_slots=2,
        n_reserved=2,
        ram_bytes=10**6,
        segment_tokens=segment_tokens,
        offload_after=10**6,
        checkpoints={"step_tokens": 16},
    )
    dropped, other = driver.run("a" * 30 + "b" * 30, max_tokens=4), driver.run("a" * 30 + "c" * 20)
    for _ in range(4):
        driver.backend.now += 1
        driver.step()

    def positions(request: Request) -> list[int]:
        end = driver.cache._tree.match(request.namespace, packed(request.tokens.view())).matched_end
        return [each.end for each in checkpoints_on(end)]

    kept = positions(other)
    assert {32, 48, 56} <= {*positions(dropped)} - {*kept}
    driver.cache.dropper.drop_paths(dropped.namespace, [packed(dropped.tokens.view())])
    driver.step()
    assert max(positions(dropped)) <= 30
    assert positions(other) == kept


@pytest.mark.parametrize("kind", [StateKind.RECURRENT, StateKind.WINDOW])
def test_an_end_that_two_idle_sequences_lose_at_once_gets_a_checkpoint(kind: StateKind) -> None:
    driver = Driver(kind=kind, n_slots=3, n_ctx=128, ram_bytes=10**6)
    for slot in (0, 1):
        last = driver.run("a" * 30, max_tokens=10, id_slot=slot)
    turn = "a" * 30 + bytes(generated(last)[:9]).decode()
    driver.run("z" * 115, max_tokens=5, id_slot=2)
    assert max(driver.cache.length(0), driver.cache.length(1)) < len(turn)
    assert driver.run(turn + "and what else").n_cached == len(turn)
