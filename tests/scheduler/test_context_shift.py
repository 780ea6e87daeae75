"""Context shift in the scheduler: what is discarded, and that nothing of what was moved is found again.

The fake backend gives another token for KV that was moved than for KV that was computed, and the pool is compared
after each step (`tests/pool.py`).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from llamaslot.base.commands import ContextShift
from llamaslot.base.kv_ops import Remove, Shift
from llamaslot.base.namespaces import is_shifted
from llamaslot.base.tokens import n_common
from llamaslot.kvcache.offloading import Offloader
from llamaslot.kvcache.slot_snapshots import UnsavableSlotError
from llamaslot.scheduler import admission
from llamaslot.scheduler.request import Request, RequestState
from tests.scheduler.test_scheduler import Driver, TimedBackend, as_letters, generated

N_CTX = 64
ON = ContextShift(is_on=True)
LAYOUTS: dict[str, dict[str, Any]] = {
    "unified": {"n_slots": 2, "n_ctx": N_CTX, "n_reserved": 2},
    "one spare": {"n_slots": 2, "n_ctx": N_CTX},
    "one slot": {"n_slots": 1, "n_ctx": N_CTX},
    "ample": {"n_slots": 2, "n_ctx": 4 * N_CTX, "n_reserved": 2},
    "partitioned": {"n_slots": 2, "n_ctx": 2 * N_CTX, "unified": False},
}


def until_shifted(driver: Driver, request: Request) -> tuple[list[int], Shift | Remove]:
    """Step until a context is shifted; returns the tokens before, and the operation."""
    for _ in range(2000):
        before, n = request.tokens.view().tolist(), request.n_discarded
        plan = driver.step()
        if request.n_discarded > n:
            (done,) = [
                each
                for each in plan.operations
                if isinstance(each, Shift) or (isinstance(each, Remove) and each.seq == request.slot)
            ]
            return before, done
    raise AssertionError(request.state)


def shifted_paths(driver: Driver) -> list[str]:
    return [node.namespace for node in driver.cache._tree.nodes() if is_shifted(node.namespace)]


@pytest.mark.parametrize(
    ("shift", "adds_bos", "expected"),
    [
        ((0, 0), False, (0, 31)),
        ((0, 0), True, (1, 32)),
        ((5, 0), False, (5, 34)),
        ((-1, 0), False, (20, 41)),
        ((-1, 0), True, (21, 42)),
        ((10**6, 0), True, (60, 61)),
        ((0, 7), False, (0, 7)),
        ((5, 10**6), False, (5, 62)),
    ],
)
def test_as_much_is_discarded_as_by_llama_server(
    shift: tuple[int, int], adds_bos: bool, expected: tuple[int, int]
) -> None:
    backend = TimedBackend(n_slots=2, n_ctx=N_CTX)
    backend.info = msgspec.structs.replace(backend.info, adds_bos=adds_bos)
    driver = Driver(backend=backend)
    request = driver.submit("a" * 20, max_tokens=-1, shift=ContextShift(True, *shift))
    before, done = until_shifted(driver, request)
    assert len(before) == N_CTX
    assert done == Shift(request.slot, *expected, copies=True)
    assert request.n_discarded == expected[1] - expected[0]
    left = before[: done.start] + before[done.end :]
    assert request.tokens.view().tolist()[: len(left)] == left
    _, again = until_shifted(driver, request)
    assert isinstance(again, Shift)
    assert not again.copies, "nobody else has its cells"
    assert request.state is RequestState.RUNNING


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ram_bytes", [0, 10**6])
def test_what_was_computed_before_stays_cached_and_what_was_moved_does_not(layout: str, ram_bytes: int) -> None:
    backend = TimedBackend(**LAYOUTS[layout])
    backend.info = msgspec.structs.replace(backend.info, n_ctx_slot=N_CTX)
    driver = Driver(ram_bytes=ram_bytes, backend=backend)
    request = driver.submit("abcdefgh" * 2, max_tokens=200, shift=ON)
    before, done = until_shifted(driver, request)
    assert isinstance(done, Shift)
    matched = driver.match(as_letters(before)).n_cached
    assert matched == N_CTX - 1 or (matched < N_CTX - 1 and not ram_bytes and layout != "ample")
    rest = request.tokens.view().tolist()
    driver.finish(request)
    assert request.n_generated == 200
    assert driver.cache.stats().context_shifts >= 4
    assert not shifted_paths(driver)
    assert driver.cache.length(request.slot) == 0
    # The same tokens as a prompt: as much is found as was computed for it, and the next token is the cold one.
    n_shared = n_common(np.array(before), np.array(rest))
    again = driver.run(as_letters(rest[:33]), max_tokens=3)
    assert again.n_matched <= n_shared
    assert generated(again) == generated(Driver(n_slots=1, n_ctx=256).run(as_letters(rest[:33]), max_tokens=3))
    # And so is that of the first tokens.
    again = driver.run(as_letters(before[:50]), max_tokens=3)
    assert again.n_matched > 0 or not ram_bytes
    assert generated(again) == generated(Driver(n_slots=1, n_ctx=256).run(as_letters(before[:50]), max_tokens=3))


def test_other_sequences_keep_the_cells_that_were_shared() -> None:
    backend = TimedBackend(n_slots=3, n_ctx=4 * N_CTX, n_reserved=2)
    backend.info = msgspec.structs.replace(backend.info, n_ctx_slot=N_CTX)
    driver = Driver(backend=backend)
    head = "the same beginning of all "
    requests = [driver.submit(f"{head}{i}", max_tokens=n, shift=ON) for i, n in enumerate([150, 30, 30])]
    driver.finish(*requests)
    for i in (1, 2):
        assert generated(requests[i]) == generated(Driver(n_slots=1, n_ctx=256).run(f"{head}{i}", max_tokens=30))
    assert requests[0].n_discarded > 0


def test_without_cells_for_what_is_left_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may hold so many of its cells that a copy of the rest has no place."""
    monkeypatch.setattr(Offloader, "free_cells", lambda *_: False)
    driver = Driver(n_slots=2, n_ctx=N_CTX, n_reserved=2)
    request = driver.submit("a" * 20, max_tokens=60, shift=ON)
    _, done = until_shifted(driver, request)
    assert done == Remove(request.slot, 0)
    assert driver.plans[-1].work[0].run.start == 0
    driver.finish(request)
    assert request.n_generated == 60
    assert not shifted_paths(driver)


def test_a_preempted_request_starts_again_from_what_it_has_left() -> None:
    driver = Driver(n_slots=2, n_ctx=N_CTX, n_reserved=2, ram_bytes=10**6)
    request = driver.submit("a" * 20, max_tokens=100, shift=ON)
    until_shifted(driver, request)
    n_left = len(request.tokens)
    driver.scheduler.admission.preempt(request, driver.backend.now)
    assert not shifted_paths(driver)
    plan = driver.step()
    assert plan.work[0].run.start == 0, "nothing is loaded"
    assert len(request.tokens) in (n_left, n_left + 1)
    driver.finish(request)
    assert request.n_generated == 100
    assert request.n_cached <= request.n_prompt


def test_a_cancelled_request_leaves_only_what_it_had_computed_before() -> None:
    driver = Driver(n_slots=2, n_ctx=N_CTX, n_reserved=2, ram_bytes=10**6)
    request = driver.submit("abcdefgh" * 2, max_tokens=-1, shift=ON)
    before, _ = until_shifted(driver, request)
    driver.scheduler.end(request, driver.backend.now, cancelled=True)
    driver.step()
    assert not shifted_paths(driver)
    assert driver.cache.length(request.slot) == 0
    assert driver.match(as_letters(before)).n_cached == N_CTX - 1


def test_the_slot_of_a_reply_that_was_shifted_cannot_be_saved() -> None:
    driver = Driver(n_slots=2, n_ctx=N_CTX, n_reserved=2, ram_bytes=10**6)
    request = driver.run("a" * 20, max_tokens=100, shift=ON)
    assert request.n_discarded
    with pytest.raises(UnsavableSlotError, match="empty"):
        driver.cache.save_slot(request.slot)


def test_a_long_reply_counts_as_one_that_fills_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the next ones would each be expected to fill theirs, and so run one after another."""
    monkeypatch.setattr(admission, "MIN_EXPECTED_TOKENS", 1)
    monkeypatch.setattr(admission, "_NEWEST_WEIGHT", 0.25)
    driver = Driver(n_slots=2, n_ctx=N_CTX, n_reserved=2)
    driver.run("a" * 20, max_tokens=4 * N_CTX, shift=ON)
    later = driver.submit("b" * 8, max_tokens=-1)
    assert driver.scheduler.admission.n_expected(later) == N_CTX // 4


def test_a_private_request_leaves_nothing() -> None:
    driver = Driver(n_slots=2, n_ctx=N_CTX, n_reserved=2, ram_bytes=10**6)
    requests = [driver.submit("a" * 20, max_tokens=90, shift=ON, cache_prompt=False, group="g") for _ in range(2)]
    driver.finish(*requests)
    driver.step()
    assert not list(driver.cache._tree.nodes())
    assert driver.cache.cells.used == 0


def test_without_a_shift_a_full_context_ends_the_reply() -> None:
    driver = Driver(n_slots=2, n_ctx=N_CTX)
    request = driver.run("a" * 20, max_tokens=-1)
    assert (request.n_generated, request.n_discarded) == (N_CTX - 20, 0)


def test_moved_kv_in_the_tree_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the tests: a shift whose rest stays in the namespace of the request."""
    monkeypatch.setattr(Request, "shifted", property(lambda request: request.params.namespace))
    driver = Driver(n_slots=2, n_ctx=N_CTX)
    request = driver.submit("a" * 20, max_tokens=-1, shift=ON)
    with pytest.raises(AssertionError, match="KV of other positions"):
        until_shifted(driver, request)
