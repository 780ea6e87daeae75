"""Context shift against the oracle of `test_cache_machine.py`: what is moved is one request's, and nobody finds it.

A cold run with the same shifts must give each token. `Recorder` knows what each sequence held before its shifts,
and the machine works out by itself what they discard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from llamaslot.base.commands import ContextShift
from llamaslot.base.kv_ops import Shift
from llamaslot.kvcache import cache, pool
from llamaslot.kvcache.pool import Pool
from llamaslot.scheduler.request import Request
from tests.conftest import LONG
from tests.kvcache.test_cache_machine import COUNTS, CacheMachine, FakeMachine

OFTEN = "shifted", "shifted again", "tokens after a shift"
"""Events that must come up in any run, for else a check is vacuous."""
SELDOM = (
    *("reused tokens", "ended", "cancelled", "broke", "drafted", "rejected", "saves", "loads", "extra steps"),
    *("too few cells to shift", "preempted", "partitioned", "unified again"),
)
"""Events that must come up in a long run."""


class ShiftMachine(CacheMachine):
    """Replies go on beyond their context, in pools with cells for one full context or for several."""

    layouts = "shared", "shared", "shared", "partitions", "changing"

    def slot_context(self) -> int:
        whole = super().slot_context()
        return max(whole // 2, 12) if self.shape.n_ubatch % 2 else whole

    @precondition(lambda self: self.n_waiting < 6)
    @rule(
        origin=st.integers(0, 5), share=st.sampled_from([0, 0.5, 1]), tail=CacheMachine.tails,
        n_free=st.integers(1, 8), salt=CacheMachine.kinds[0], cached=CacheMachine.kinds[1],
        n_keep=st.sampled_from([0, 0, 3, -1]), n_discard=st.sampled_from([0, 0, 0, 1, 5, 10**6]),
        max_tokens=st.sampled_from([5, 20, 20, 60, 60, -1]), greedy=st.booleans(),
    )  # fmt: skip
    def ask_beyond_the_context(
        self, *, origin: int, share: float, tail: int, n_free: int, salt: int, cached: bool, n_keep: int,
        n_discard: int, max_tokens: int, greedy: bool,
    ) -> None:  # fmt: skip
        """A prompt that nearly fills the context."""
        prompt = self.prompt(origin, share, tail, self.n_ctx_slot)
        shift = ContextShift(is_on=True, n_keep=n_keep, n_discard=n_discard)
        self.new_request(
            prompt[: self.n_ctx_slot - n_free], salt=salt, cached=cached, max_tokens=max_tokens, greedy=greedy,
            endless=True, shift=shift,
        )  # fmt: skip


class FakeShiftMachine(ShiftMachine, FakeMachine):
    """On a fake model, where each token depends on what was discarded before it."""


def shift_beside_another(machine: CacheMachine, share: float) -> None:
    """A reply that is shifted twice while another request shares its cells; then one for the tokens that are left.

    `share` is the place of the pool's size between the smallest and the largest.
    """
    machine.start(
        layout=0, n_slots=2, n_spare=2, share=share, batch=0.95, idle_cells=None, offload_after=None, ram=10,
        disk=0, load_us=0, eos_every=10**9, n_expected=1, query_block=None,
    )  # fmt: skip
    try:
        n, before = machine.n_ctx_slot, COUNTS.copy()
        assert n < machine.backend.info.n_ctx
        prompt = machine.prompt(0, 0, 0b1101_0011_1000_1010_0111, n)
        shift = ContextShift(is_on=True, n_keep=3)
        machine.new_request(prompt[: n - 6], max_tokens=n, endless=True, shift=shift)
        machine.new_request(prompt[: n // 2], max_tokens=n // 3, endless=True)
        go_on(machine)
        assert (COUNTS - before)["shifted"] == 2
        machine.new_request(machine.asked[0].tokens[: n // 2], max_tokens=3)
        go_on(machine)
        machine.finish()
    finally:
        for patch in machine.patches:
            patch.stop()


def go_on(machine: CacheMachine) -> None:
    """Step until all requests have ended."""
    for _ in range(1000):
        if not machine.living:
            return
        machine.step(1, 0, is_late=False, n_jobs=0)
    raise AssertionError("a request never ended")


def test_a_shift_beside_a_request_that_shares_its_cells() -> None:
    shift_beside_another(FakeShiftMachine(), 1.0)


def _made(change: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Plant a bug in the operations of shifts."""
    return lambda patch: patch.setattr(pool, "Shift", change)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "other tokens are discarded": _made(lambda seq, a, b, copies: Shift(seq, a + 1, b + 1, copies=copies)),
    "more tokens are discarded": _made(lambda seq, a, b, copies: Shift(seq, a, b + 1, copies=copies)),
    "shared cells are moved": _made(lambda seq, a, b, copies: Shift(seq, a, b, copies=False)),
    "the tree learns what was moved": lambda patch: patch.setattr(
        Request, "shifted", property(lambda request: request.params.namespace)
    ),
    "what was moved stays": lambda patch: patch.setattr(cache, "is_shifted", lambda _: False),
    "what was computed is lost": lambda patch: patch.setattr(Pool, "_move_to_spare", lambda *_: None),
}
"""Bugs that the machine must notice."""


@pytest.mark.parametrize("bug", PLANTED)
def test_bugs_in_shifts_are_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[bug](monkeypatch)
    with pytest.raises(AssertionError):
        shift_beside_another(FakeShiftMachine(), 1.0)


@pytest.mark.slow
def test_the_cache_with_context_shifts() -> None:
    before = COUNTS.copy()
    chosen = settings(max_examples=200 if LONG else 4, stateful_step_count=50, deadline=None)
    run_state_machine_as_test(FakeShiftMachine, settings=chosen)
    counts = COUNTS - before
    missing = [event for event in (*OFTEN, *(SELDOM if LONG else ())) if not counts[event]]
    assert not missing, "no example came to these"
