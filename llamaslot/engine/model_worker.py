"""Worker: carries out plans on the thread that computes, with multi-step decode where nothing has to be decided.

Between two decode steps, a hop to the event loop and back would leave the processor idle (0.2 ms, fact 16). So a
plan says how many steps may follow it (`StepPlan.n_extra_steps`), and the worker takes them at once, each with the
tokens that the last one sampled, until a generation ends or the loop has something to do. Each result goes to the
loop, in order. The worker decides nothing and touches no state but the backend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeAlias, TypeVar

from llamaslot.base.backend import Backend
from llamaslot.base.executors import started_executor
from llamaslot.engine.step_watch import StepWatch
from llamaslot.scheduler.step import StepPlan, StepResult, apply, next_decode_step

OnStep: TypeAlias = Callable[[StepPlan, StepResult], None]
T = TypeVar("T")


def model_thread() -> Executor:
    """The thread that a model is loaded on and computes on.

    It should be the same one: OpenMP keeps a team of threads for each thread that computes, and with more threads
    in all than cores it waits in the kernel instead of spinning, which makes every step slower.
    """
    return started_executor(1, "llamaslot-model")


class Worker:
    """Runs plans on a backend, whose calls are all made on `thread`; `clock` gives seconds.

    `needs_plan` is called on the thread after each step: True if the next one must be planned by the loop.
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
        """Carry out `plan` and what follows from it; `on_step` is called on the loop as soon as each step is done.

        Raises what `on_step` raises, which is then not called again, or what `apply` raises, after the steps
        before it. Never to be called while it runs.
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
                # Only now: the loop that it wakes should find the interpreter free, while the next step computes.
                loop.call_soon_threadsafe(hand_over, step, result)
                step = after

        # The loop learns of the end through the same queue of callbacks, hence after every step.
        await loop.run_in_executor(self._thread, compute)
        if errors:
            raise errors[0]

    async def call(self, function: Callable[[], T]) -> T:
        """Return the result of `function` on the thread that computes. Never to be called while `run` runs."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def close(self) -> None:
        """Wait for the step that is being computed, and end the thread; `needs_plan` must be true by now."""
        self._thread.shutdown()
