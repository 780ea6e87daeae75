"""The scheduler with models that have a partial state, on the fake backend."""

from __future__ import annotations

import pytest

from llamaslot.base.model import StateKind
from llamaslot.base.namespaces import key_salt, key_secret, salt_namespace, tenant_of
from llamaslot.scheduler.request import RequestState
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
