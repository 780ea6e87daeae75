"""Worker: executes plans on the model thread, with multi-step decode if nothing has to be decided.

Between two decode steps, a hop to the event loop and back would leave the processor idle for about 0.2 ms (fact
16). So a plan has the number of steps that may follow it (`StepPlan.n_extra_steps`). The worker takes them at once,
each with the tokens that the last one sampled, until a generation ends or the loop has something to do. Results go
to the loop in order. The worker decides nothing, and changes no state but the backend's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeAlias, TypeVar

from llamaslot.base.backend import Backend
from llamaslot.base.threads import started_executor
from llamaslot.engine.step_watch import StepWatch
from llamaslot.scheduler.step import StepPlan, StepResult, apply, next_decode_step

OnStep: TypeAlias = Callable[[StepPlan, StepResult], None]
T = TypeVar("T")


def model_thread() -> Executor:
    """Return the thread on which a model is loaded and computes.

    Both must be on the same thread: OpenMP keeps a team of threads for each thread that computes, and if there are
    more threads than cores, they wait in the kernel instead of spinning, which slows every step down (fact 16).
    """
    return started_executor(1, "llamaslot-model")


class Worker:
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
        watch: StepWatch | None = None,
    ) -> None:
        self._backend = backend
        self._thread = thread
        self._clock = clock
        self._needs_plan = needs_plan
        self._watch = watch or StepWatch(0)

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
                self._watch.begin(step.n_tokens)
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
