"""Model worker: executes plans on the model thread, with multi-step decode if nothing has to be decided.

Between two decode steps, a hop to the event loop and back would leave the processor idle for about 0.2 ms (fact
16). So a plan has the number of steps that may follow it (`StepPlan.n_extra_steps`). The worker takes them at once,
each with the tokens that the last one sampled, until a generation ends or the loop has something to do. Results go
to the loop in order. The worker decides nothing, and changes no state but the backend's. `StepWatch` notices a step
that hangs.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

from llamaslot.base.backend import Backend
from llamaslot.base.threads import ProcessTimes, process_times, started_executor, starved_seconds
from llamaslot.scheduler.step import StepPlan, StepResult, apply, next_decode_step

OnStep: TypeAlias = Callable[[StepPlan, StepResult], None]
T = TypeVar("T")
_TILE_FACTOR = 10
"""Multiple of `seconds` that a step with a tile may take: how long encoding takes is not known before."""
_WATCH_FACTOR = 20
"""Longest duration of a step, as a multiple of its expected duration."""
_WATCH_INTERVAL_S = 0.5
"""Time between two checks of the running step."""


def model_thread() -> Executor:
    """Return the thread on which a model is loaded and computes.

    Both must be on the same thread: OpenMP keeps a team of threads for each thread that computes, and if there are
    more threads than cores, they wait in the kernel instead of spinning, which slows every step down (fact 16).
    """
    return started_executor(1, "llamaslot-model")


class ModelWorker:
    """Runs plans on a backend, all of whose calls are made on `thread`. `clock` returns seconds.

    `needs_plan` is called on the thread after each step, and returns True if the event loop must plan the next one.
    `watch` is told when a step begins.
    """

    def __init__(
        self,
        backend: Backend,
        thread: Executor,
        clock: Callable[[], float],
        needs_plan: Callable[[], bool],
        watch: StepWatch,
    ) -> None:
        self._backend = backend
        self._thread = thread
        self._clock = clock
        self._needs_plan = needs_plan
        self._watch = watch

    async def run(self, plan: StepPlan, on_step: OnStep) -> None:
        """Carry out `plan` and its extra steps; `on_step` is called on the event loop after each step.

        Raises what `on_step` raises, which is then not called again, or what `apply` raises, after reporting the
        steps before it. Must not be called while it is running.
        """
        loop = asyncio.get_running_loop()
        errors: list[Exception] = []

        def hand_over(step: StepPlan, result: StepResult) -> None:
            if not errors:
                try:
                    on_step(step, result)
                except Exception as error:
                    errors.append(error)

        def compute() -> None:
            step: StepPlan | None = plan
            while step is not None:
                self._watch.begin(step.n_tokens, has_tile=step.turn.tile is not None)
                result = apply(step, self._backend, self._clock)
                after = (
                    None
                    if errors or self._needs_plan()
                    else next_decode_step(step, result, self._backend.vocab.eog)
                )
                # After preparing the next step, not before: this wakes the event loop, which then gets the GIL
                # while the next step computes without it.
                loop.call_soon_threadsafe(hand_over, step, result)
                step = after

        # The end is reported through the same queue of callbacks as the results, hence after all of them.
        await loop.run_in_executor(self._thread, compute)
        if errors:
            raise errors[0]

    async def call(self, function: Callable[[], T]) -> T:
        """Call `function` on the model thread and return its result. Must not be called while `run` is running."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def close(self) -> None:
        """Wait for the current step, and end the thread. `needs_plan` must return True by now."""
        self._thread.shutdown()


class StepWatch:
    """Detects a step that takes far longer than expected, for example because a GPU driver hangs.

    Time during which the process was stopped, or waited for a CPU that others used, does not count. Steps are
    limited to `seconds` (0 for no limit), with a tile to `_TILE_FACTOR` times as many, or to `_WATCH_FACTOR`
    times their expected duration if that is longer.

    `begin` is called on the event loop (for planning) and on the model thread (for each step), `end` when nothing
    is left to do.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._watched: float | None = None
        """The deadline of the step that was in progress at the last `look`."""
        self._times: ProcessTimes | None = None
        """The CPU times read at the last `look`."""
        self._token_s = 0.0
        self._deadline: float | None = None
        self._is_active = threading.Event()

    def expect(self, prefill_us: float) -> None:
        """Set the measured microseconds to compute a token; 0 if unknown."""
        self._token_s = prefill_us / 1e6

    def begin(self, n_tokens: int = 0, *, has_tile: bool = False) -> None:
        """Record that a step of `n_tokens` begins, or (with 0) its planning."""
        if self._seconds:
            limit = self._seconds * (_TILE_FACTOR if has_tile else 1)
            limit = max(limit, _WATCH_FACTOR * n_tokens * self._token_s)
            self._deadline = self._clock() + limit
            self._is_active.set()

    def end(self) -> None:
        """Record that no step is in progress."""
        self._deadline = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Watch nothing during work between two steps of which it is not known how long it takes."""
        self.end()
        try:
            yield
        finally:
            self.begin()

    @property
    def is_overdue(self) -> bool:
        """True if the step in progress has exceeded its deadline."""
        deadline = self._deadline
        return deadline is not None and self._clock() > deadline

    def look(self, slept: float) -> bool:
        """Return True if the step in progress has exceeded its deadline.

        Must be called again and again, `slept` seconds after the last call.

        The deadline moves by the time that this process did not get a CPU. For a step that began since the last
        call, CPU times are not read: that would take longer than a short step.
        """
        deadline, times = self._deadline, None
        if deadline is not None and deadline == self._watched:
            times = process_times(os.getpid(), self._clock())
            starved = starved_seconds(self._times, times) if self._times is not None else 0.0
            paused = slept if slept > 2 * _WATCH_INTERVAL_S else 0.0
            # Meanwhile another step may have begun on the model thread, with its own deadline.
            if self._deadline == deadline:
                self._deadline = deadline + max(starved, paused)
        self._times = times
        self._watched = self._deadline
        return self.is_overdue

    def run(self, on_overdue: Callable[[], None]) -> None:
        """Start a thread that watches steps until the process ends, and sleeps while none is in progress."""
        threading.Thread(target=self._run, args=(on_overdue,), name="llamaslot-watch", daemon=True).start()

    def _run(self, on_overdue: Callable[[], None]) -> None:
        while True:
            self._is_active.wait()
            slept = self._clock()
            time.sleep(_WATCH_INTERVAL_S)
            if self.look(self._clock() - slept):
                on_overdue()
                return
            self._is_active.clear()
            if self._deadline is not None:
                self._is_active.set()
