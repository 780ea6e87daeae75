"""Clocks in the processes of a server that is profiled (`bench/profile.py`).

Every Python that the server starts imports this module first (`environment`). The parent and the engine's process
count the CPU time of their parts, and write the counts to a file when they get SIGUSR2.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any

SERVER, ENGINE = "llamaslot.cli.main", "llamaslot.app.runtime.engine_main"
"""The modules that the two processes run."""
PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    ENGINE: {
        "fill": ("llamaslot.backend.llama.llama_backend:LlamaBackend.decode",),
        "decode": ("llama_cpp:llama_decode",),
        "sample": ("llamaslot.backend.llama.llama_backend:LlamaBackend.sample",),
        "follow": ("llamaslot.engine.model_worker:apply", "llamaslot.engine.model_worker:next_decode_step"),
        "plan": ("llamaslot.scheduler.scheduler:Scheduler.plan",),
        "commit": ("llamaslot.scheduler.scheduler:Scheduler.commit",),
        "detokenize": ("llamaslot.engine.engine:Engine._deliver",),
    },
    SERVER: {
        "pass on": ("llamaslot.service.service:Service.receive",),
        "send": ("llamaslot.api.sse:EventStream.write_now",),
    },
}
"""Functions that are timed, in the order of a step. `sample` chooses the tokens, `follow` prepares the next step;
`send` writes a chunk and hands it to the event loop.
"""
STEP, IDLE, WAIT = "llamaslot.engine.model_worker:apply", "llamaslot.engine.engine:Engine._idle", "wait"
"""The functions that carry out a step, and wait for a request; and the part for the time between two steps."""
_FOLDER = "LLAMASLOT_CLOCKS"


class Clocks:
    """CPU nanoseconds by part. What one part spends inside another counts for the inner one alone."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._inner = threading.local()
        self._step_ended: tuple[int, int] | None = None
        """Wall and CPU time of the model thread at the end of its last step."""
        self._own = 0
        """Measured time of a function that does nothing."""
        nothing = self.around("nothing", int)
        for _ in range(2000):
            nothing()
        self._own = self.spent.pop("nothing") // 2000

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, timed."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer = getattr(self._inner, "ns", 0)
            self._inner.ns = 0
            started = thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                taken = thread_time_ns() - started
                self.spent[part] += taken - self._inner.ns - self._own
                self._inner.ns = outer + taken

        return timed

    def between(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function; how long its thread did not run between two calls is added to `wait`.

        The time from `idling` to the next call is left out.
        """

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._step_ended is not None:
                wall, cpu = self._step_ended
                self.spent[WAIT] += (perf_counter_ns() - wall) - (thread_time_ns() - cpu)
            try:
                return function(*args, **kwargs)
            finally:
                self._step_ended = perf_counter_ns(), thread_time_ns()

        return timed

    def idling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, whose call says that nothing is to be computed."""

        @wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._step_ended = None
            return function(*args, **kwargs)

        return noted


def environment(folder: Path) -> list[str]:
    """Return variables for a server whose processes have clocks, and write their counts to `folder`."""
    (folder / "sitecustomize.py").write_text("from bench import clocks\n\nclocks.install()\n")
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return [f"PYTHONPATH={path.rstrip(os.pathsep)}", f"{_FOLDER}={folder}"]


def counts_file(folder: Path, process: str) -> Path:
    """Return the file with the counts of a process."""
    return folder / f"{process}.json"


def install() -> None:
    """Put a clock around every part, if this process has some."""
    process = next((each for each in PARTS if each in sys.orig_argv), None)
    if process is None:
        return
    clocks = Clocks()
    for part, places in PARTS[process].items():
        for place in places:
            _replace(place, partial(clocks.around, part))
    if process == ENGINE:
        _replace(STEP, clocks.between)
        _replace(IDLE, clocks.idling)
    file = counts_file(Path(os.environ[_FOLDER]), process)
    n_written = 0

    def write(*_: object) -> None:
        nonlocal n_written
        n_written += 1
        # A handler runs on the main thread, which has the event loop.
        counts = {"pid": os.getpid(), "n": n_written, "loop": thread_time_ns(), "spent": clocks.spent}
        unfinished = file.with_suffix(".partial")
        unfinished.write_text(json.dumps(counts))
        unfinished.replace(file)

    signal.signal(signal.SIGUSR2, write)
    write()


def _replace(place: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put another function in the place of one (`module:path`), made from that."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner: Any = import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    setattr(owner, name, made(getattr(owner, name)))
