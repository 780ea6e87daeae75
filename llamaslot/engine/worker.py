"""The thread that computes: it carries out a plan, and goes on alone while nothing is to be decided.

Between two steps that only decode, a way to the event loop and back would leave the processor waiting. So a plan
says how many steps may follow it (`StepPlan.n_ahead`), and the worker takes them at once, each with the tokens that
the last one sampled, until a generation ends or somebody calls `interrupt`. Each result goes to the loop, in order.
The worker decides nothing and touches no state but the backend.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeAlias

from llamaslot.core.backend import Backend
from llamaslot.core.step import StepPlan, StepResult, apply, following

Done: TypeAlias = tuple[StepPlan, StepResult]


def model_thread() -> Executor:
    """The thread that a model is loaded on and computes on.

    It should be the same one: OpenMP keeps a team of threads for each thread that computes, and with more threads
    in all than cores it waits in the kernel instead of spinning, which makes every step slower.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="llamaslot-model")


class Worker:
    """Runs plans on a backend, whose calls are all made on `thread`; `clock` gives seconds."""

    def __init__(self, backend: Backend, thread: Executor, clock: Callable[[], float]) -> None:
        self._backend = backend
        self._thread = thread
        self._clock = clock
        self._interrupted = False

    async def run(self, plan: StepPlan) -> AsyncIterator[Done]:
        """Carry out `plan` and what follows from it; gives each step with its result as soon as it is done."""
        loop = asyncio.get_running_loop()
        done: asyncio.Queue[Done | None] = asyncio.Queue()
        self._interrupted = False

        def steps() -> None:
            step: StepPlan | None = plan
            while step is not None:
                result = apply(step, self._backend, self._clock)
                loop.call_soon_threadsafe(done.put_nowait, (step, result))
                step = None if self._interrupted else following(step, result, self._backend.vocab.eog)

        future = loop.run_in_executor(self._thread, steps)
        future.add_done_callback(lambda _: done.put_nowait(None))
        while (each := await done.get()) is not None:
            yield each
        future.result()

    def interrupt(self) -> None:
        """Let `run` end with the step that is being computed; nothing is lost."""
        self._interrupted = True

    def close(self) -> None:
        """Wait for the end of the step that is being computed, and end the thread."""
        self.interrupt()
        self._thread.shutdown()
