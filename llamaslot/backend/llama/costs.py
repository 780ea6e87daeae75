"""Measurements while nothing runs (`KvCost`, `StepCost`, `StateCost`, where to sample), and files that keep them.

- `KvCost`: idle prefixes in the pool slow down prefill, because attention scans it up to its highest used cell
  (fact 5). In RAM they cost the time to save and to load them, measured with the tokens of the timed prefill.
- `StepCost`: a few tokens, and `QUERY_BLOCK` of them, are timed in an empty sequence and after many cells.
- `StateCost`: a checkpoint is taken and restored. A recurrent state always has the same size, a sliding window is
  filled.
- `samples_faster`: steps of one stream and of all slots are timed, sampled on the device and on the host.

A request may come at any time, so a measurement can be stopped before each of its steps, and a model of which a few
tokens take long is not measured at all (`is_slow`).

Computing enough tokens to fill cells or windows would take long on a slow machine, but their content does not
matter: one short sequence is saved, and loaded many times into another one. That one then has each position many
times, and tokens computed after it attend to all of them, which is good enough for timing. Everything is cleared at
the end.

A measurement counts only if other programs did not disturb it: they can make times several times as long, and the
result would be used for a week. So each measurement checks between its parts (`Quiet`) how long threads waited for
a CPU, and whether equal work took equal time, which also detects other users of a GPU. The first disturbed part
ends the measurement.

Costs, and the result of the self-test, are kept in the user's cache folder for the next start (`Measurements`). A
file has those of one key: a digest of the model's files, all settings and sizes on which times depend, the library
and the machine. Servers may share the folder: a file is replaced as a whole, and one that is corrupt or has another
key counts as missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import llama_cpp
import msgspec
import numpy as np

from llamaslot.backend.host import host_cpus
from llamaslot.backend.llama import library
from llamaslot.backend.llama.loading import LlamaSettings
from llamaslot.backend.llama.saved_states import PartialStates, load_sequence, save_sequence
from llamaslot.backend.llama.self_test import SelfTestResult
from llamaslot.backend.storage import open_regular, private_folder, write_atomically
from llamaslot.base.backend import Backend, Run, Sampler, Status
from llamaslot.base.errors import ConfigError
from llamaslot.base.files import parts
from llamaslot.base.kv_ops import Free, Load, NotLoadedError, NotSavedError, Operation, Remove, Restore, Save, Take
from llamaslot.base.model import QUERY_BLOCK, KvCost, ModelInfo, StateCost, StepCost
from llamaslot.base.threads import thread_times
from llamaslot.kvcache.cache_settings import MAX_SEGMENT_TOKENS

MAX_IDLE_CELLS = 8192
"""Most idle cells in the pool while prefill is measured."""
MIN_IDLE_CELLS = 2048
"""With fewer idle cells nothing is measured: the result would be noise, and they cost little."""

_SEGMENT = _CHECKPOINT = -1
"""Number of what is saved; the engine uses no such number."""
_SAVED_TOKENS = 64
"""Tokens of the sequence that is loaded repeatedly."""
_PROBE_TOKENS = 16
"""Tokens computed first, to estimate how many take `_TARGET_S`; also the fewest that are worth measuring."""
_TARGET_S = 0.2
"""Time that each measured prefill should take."""
_SLOW_S = 2 * _TARGET_S
"""A step of 1, 4 or `_PROBE_TOKENS` tokens that takes longer ends the measurement: requests would wait for it."""
_N_PAIRS = 5
"""Number of prefills with, and without, idle cells."""

_FEW_TOKENS, _MORE_TOKENS = 8, 32
"""Tokens of small steps."""
_MANY_CELLS = 1024
"""Cells to attend to in the measurements with many cells."""
_LIMIT_S = 0.2
"""If a small step takes longer, nothing is measured; also the time after which a measurement is not repeated."""
_MAX_REPEATS = 5
"""Most repetitions of a step."""

_N_REPEATS = 5
"""Number of measurements of each cost."""

_N_UNTIMED, _N_TIMED = 3, 9
"""Steps that sample, of each kind."""

MAX_WAITING_SHARE = 0.1
"""Largest fraction of the time that threads may have waited for a CPU."""
MIN_WAITING_S = MAX_WAITING_SHARE * _TARGET_S
"""Shorter waits never count. Some parts take only 30 ms, and there the shortest of five times is kept: a process
that wakes up on one of their CPUs costs a thread 10 ms, but not the shortest time.
"""
MAX_SPREAD = 1.5
"""Largest ratio of the median time of equal work to the shortest time."""
MAX_AGE_S = 7 * 86_400
"""Age at which measurements are repeated, because the machine may have changed."""
_MAX_FILE_BYTES = 2**16
FORMAT = 8
"""Incremented whenever something is measured in another way."""


def is_slow(backend: Backend, context: Any, quiet: Quiet) -> bool:
    """Return True if a step of a measurement would take too long. Sequence 0 must be empty, and is afterwards."""
    sizes = [n for n in (1, 4, _PROBE_TOKENS) if n <= min(backend.info.n_ubatch, backend.info.n_ctx_slot)]
    try:
        # The first step of a size may take longer, for example while kernels are loaded.
        return any(min(_prefill(backend, context, quiet, n) for _ in range(2)) > _SLOW_S for n in sizes)
    finally:
        backend.change(Remove(0, 0))


def measure_kv_cost(backend: Backend, context: Any, quiet: Quiet) -> KvCost | None:
    """Measure the cost on a backend with this context, which is empty before and after. Takes about two seconds.

    None if nothing can be saved, if a unified pool has less than `MIN_IDLE_CELLS` to spare, or if the model is too
    slow to measure. Raises `NotSavedError` if memory does not suffice.
    """
    info = backend.info
    n_idle = min(info.n_ctx - info.n_ubatch, MAX_IDLE_CELLS) // _SAVED_TOKENS * _SAVED_TOKENS
    if info.segment_size is None or info.n_ubatch < _SAVED_TOKENS or (info.unified and n_idle < MIN_IDLE_CELLS):
        return None
    if not info.unified:
        n_idle = 0
    try:
        return _kv_cost(backend, context, n_idle, quiet)
    finally:
        if backend.kv_of(_SEGMENT) is not None:
            backend.change(Free(_SEGMENT))
        backend.change(Remove(0, 0))
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), 1, -1, -1)


def _kv_cost(backend: Backend, context: Any, n_idle: int, quiet: Quiet) -> KvCost | None:
    """Measure. Sequences 0 and 1 may be left with cells."""
    fastest = min(_prefill(backend, context, quiet, _PROBE_TOKENS) for _ in range(3))
    n_tokens = min(round(_PROBE_TOKENS * _TARGET_S / fastest), backend.info.n_ubatch, backend.info.n_ctx_slot)
    if n_tokens < _PROBE_TOKENS:
        return None
    n_saved = min(n_tokens, MAX_SEGMENT_TOKENS)
    ratios, prefill, saving, loading = [], [], [], []
    for _ in range(_N_PAIRS):
        alone = _prefill(backend, context, quiet, n_tokens)
        quiet.check()
        save, load = _save_and_load(backend, context, n_saved)
        if n_idle:
            is_full = _fill(backend, context, quiet, n_idle)
            crowded = _prefill(backend, context, quiet, n_tokens)
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), 1, -1, -1)
            if not is_full:
                return None
            ratios.append(crowded / alone)
        prefill.append(alone)
        saving.append(save)
        loading.append(load)
        quiet.check()
    quiet.compare(prefill)
    return KvCost(
        n_idle_cells=n_idle,
        prefill_slowdown=max(statistics.median(ratios), 1.0) if ratios else 1.0,
        prefill_us=1e6 * statistics.median(prefill) / n_tokens,
        save_us=1e6 * statistics.median(saving) / n_saved,
        first_save_us=1e6 * max(saving) / n_saved,
        load_us=1e6 * statistics.median(loading) / n_saved,
    )


def _prefill(backend: Backend, context: Any, quiet: Quiet, n_tokens: int) -> float:
    """Return the seconds in which sequence 0 computes `n_tokens`."""
    backend.change(Remove(0, 0))
    return _seconds(context, lambda: _compute(backend, quiet, n_tokens))


def _save_and_load(backend: Backend, context: Any, n_tokens: int) -> tuple[float, float]:
    """Return the seconds to save `n_tokens` of sequence 0, and to load them again."""
    save = _change(backend, context, Save(_SEGMENT, 0, 0, n_tokens))
    backend.change(Remove(0, 0))
    load = _change(backend, context, Load(0, 0, ((_SEGMENT, n_tokens),)))
    backend.change(Free(_SEGMENT))
    return save, load


def _change(backend: Backend, context: Any, operation: Operation) -> float:
    return _seconds(context, lambda: backend.change(operation))


def _seconds(context: Any, call: Callable[[], None]) -> float:
    started = perf_counter()
    call()
    llama_cpp.llama_synchronize(context)
    return perf_counter() - started


def _fill(backend: Backend, context: Any, quiet: Quiet, n_cells: int) -> bool:
    """Fill sequence 1 with `n_cells` without computing them; False if that fails. Raises `NotSavedError`.

    They are loaded from a segment, so layers with a sliding window, which have fewer cells, are not filled.
    """
    memory = llama_cpp.llama_get_memory(context)
    backend.change(Remove(0, 0))
    _compute(backend, quiet, _SAVED_TOKENS)
    backend.change(Save(_SEGMENT, 0, 0, _SAVED_TOKENS))
    kv = backend.kv_of(_SEGMENT)
    assert kv is not None
    n_loaded = 0
    while n_loaded < n_cells and load_sequence(context, 0, kv):
        llama_cpp.llama_memory_seq_cp(memory, 0, 1, -1, -1)
        n_loaded += _SAVED_TOKENS
    backend.change(Free(_SEGMENT))
    backend.change(Remove(0, 0))
    return n_loaded == n_cells


def _compute(backend: Backend, quiet: Quiet, n_tokens: int, *, seq: int = 0, start: int = 0) -> None:
    """Compute `n_tokens` in a sequence that holds `start` tokens; raises `ConfigError` if the model cannot."""
    quiet.stop_if_asked()
    tokens = np.arange(n_tokens, dtype=np.int32) % backend.info.n_vocab
    status = backend.decode([Run(seq=seq, start=start, tokens=tokens, n_outputs=1)]).status
    if status is not Status.OK:
        reason = f"the model cannot compute {n_tokens} tokens at once ({status.name})"
        raise ConfigError(reason, param="--ubatch-size")


def measure_step_cost(backend: Backend, context: Any, quiet: Quiet) -> StepCost | None:
    """Measure the cost on a backend with this context, which is empty before and after.

    Takes half a second, or a few for slow models. None if there is no scratch sequence to pad with, if the pool is
    too small, if the model is too slow to measure, and for models with a partial state, whose steps are not padded.
    """
    info = backend.info
    if (
        not info.can_trim
        or not info.unified
        or info.segment_size is None
        or info.n_ubatch < QUERY_BLOCK
        or info.n_ctx < _MANY_CELLS + 2 * QUERY_BLOCK
    ):
        return None
    try:
        return _step_cost(backend, context, quiet)
    finally:
        if backend.kv_of(_SEGMENT) is not None:
            backend.change(Free(_SEGMENT))
        for seq in (0, 1):
            # The backend does not know what `_fill` did; asking for the length corrects its record.
            backend.seq_len(seq)
            backend.change(Remove(seq, 0))


def _step_cost(backend: Backend, context: Any, quiet: Quiet) -> StepCost | None:
    """Measure. Sequence 1 may be left with cells."""
    seconds = partial(_step_seconds, backend, context, quiet)
    if (few := seconds(_FEW_TOKENS)) > _LIMIT_S:
        return None
    quiet.check()
    more, block = seconds(_MORE_TOKENS), seconds(QUERY_BLOCK)
    if not _fill(backend, context, quiet, _MANY_CELLS):
        return None
    few_far, block_far = seconds(_FEW_TOKENS), seconds(QUERY_BLOCK)
    token = max(more - few, 0.0) / (_MORE_TOKENS - _FEW_TOKENS)
    return StepCost(
        step_us=1e6 * max(few - _FEW_TOKENS * token, 0.0),
        token_us=1e6 * token,
        token_cell_us=1e6 * max(few_far - few, 0.0) / _FEW_TOKENS / _MANY_CELLS,
        block_us=1e6 * block,
        block_cell_us=1e6 * max(block_far - block, 0.0) / _MANY_CELLS,
    )


def _step_seconds(backend: Backend, context: Any, quiet: Quiet, n_tokens: int) -> float:
    """Return the shortest time of several runs in which sequence 1 computes `n_tokens` after its own."""
    start = backend.seq_len(1)
    taken: list[float] = []
    while not taken or (sum(taken) < _LIMIT_S and len(taken) < _MAX_REPEATS):
        taken.append(_seconds(context, lambda: _compute(backend, quiet, n_tokens, seq=1, start=start)))
        backend.change(Remove(1, start))
    return min(taken)


def measure_state_cost(backend: Backend, context: Any, states: PartialStates, quiet: Quiet) -> StateCost | None:
    """Measure the cost on a backend with this context, whose sequences are empty before and after.

    None if no checkpoints are taken, or if pool or memory are too small for one of the largest size.
    """
    if not backend.info.keeps_checkpoints:
        return None
    try:
        return _state_cost(backend, context, states, quiet)
    except (NotSavedError, NotLoadedError, MemoryError):
        return None
    finally:
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), 1, -1, -1)
        backend.change(Remove(0, 0))


def _state_cost(backend: Backend, context: Any, states: PartialStates, quiet: Quiet) -> StateCost | None:
    """Measure. Sequences 0 and 1 may be left with cells."""
    n_swa = backend.info.state.n_swa
    n_tokens = min(n_swa or 1, _SAVED_TOKENS, backend.info.n_ubatch)
    _compute(backend, quiet, n_tokens)
    if not _fill_state(context, -(-n_swa // n_tokens) or 1):
        return None
    quiet.begin()
    taking, restoring = [], []
    for _ in range(_N_REPEATS):
        taking.append(_seconds(context, lambda: states.take(Take(_CHECKPOINT, src=1, end=n_tokens))))
        try:
            restoring.append(_seconds(context, lambda: states.restore(Restore(_CHECKPOINT, dst=1), n_tokens)))
        finally:
            del states.states[_CHECKPOINT]
        quiet.check()
    return StateCost(take_ms=1e3 * statistics.median(taking), restore_ms=1e3 * statistics.median(restoring))


def _fill_state(context: Any, n_loads: int) -> bool:
    """Load the content of sequence 0 into sequence 1 `n_loads` times; False if the cells do not suffice."""
    memory = llama_cpp.llama_get_memory(context)
    saved = save_sequence(context, 0)
    for _ in range(n_loads):
        if not load_sequence(context, 0, saved):
            return False
        llama_cpp.llama_memory_seq_cp(memory, 0, 1, -1, -1)
    return True


def measure_sampling(
    backend: Backend, quiet: Quiet, *, host: Callable[[], Sampler], device: Callable[[], Sampler]
) -> bool | None:
    """Return True if steps are faster with tokens sampled on the device, for one stream and for all slots.

    `host` and `device` each create a sampler. Sequences are empty before and after. None if the slots have too few
    cells.
    """
    info = backend.info
    if min(info.n_ctx_slot, info.n_ctx // info.n_slots) < 2 * (_N_UNTIMED + _N_TIMED):
        return None
    try:
        for n in sorted({1, min(info.n_slots, info.n_ubatch)}):
            host_s = _sampled_step(backend, quiet, [host() for _ in range(n)])
            device_s = _sampled_step(backend, quiet, [device() for _ in range(n)])
            quiet.check()
            if device_s > host_s:
                return False
        return True
    finally:
        for seq in range(info.n_slots):
            backend.change(Remove(seq, 0))


def _sampled_step(backend: Backend, quiet: Quiet, samplers: Sequence[Sampler]) -> float:
    """Return the median seconds of a step that computes and samples one token for each sampler, and close them."""
    draws = list(enumerate(samplers))
    taken = []
    try:
        for _ in range(_N_UNTIMED + _N_TIMED):
            quiet.stop_if_asked()
            runs = [Run(seq, backend.seq_len(seq), np.ones(1, dtype=np.int32), n_outputs=1) for seq, _ in draws]
            started = perf_counter()
            if (status := backend.decode(runs, draws).status) is not Status.OK:
                raise ConfigError(f"the model cannot compute {len(runs)} sequences at once ({status.name})")
            backend.sample(draws)
            taken.append(perf_counter() - started)
    finally:
        for sampler in samplers:
            sampler.close()
    # The first steps build the graph.
    return statistics.median(taken[_N_UNTIMED:])


class DisturbedError(Exception):
    """Other programs disturbed a measurement; the message says how."""


class StoppedError(Exception):
    """The measurement was stopped on request."""


class Clocks(NamedTuple):
    """Clocks of this process, in seconds."""

    wall_s: float
    thread_s: float
    """CPU time of the calling thread."""
    waits_s: dict[int, float] | None
    """Time that each thread has waited for a CPU; None if the system does not report it."""


class Quiet:
    """Watches measurements on one thread. `should_stop` is called before each step, and at each check.

    With `exceeds_cpus` this process has more threads than can run at once. They wait for each other, which says
    nothing about other programs, so only the times of equal work are compared. `has_fewer_threads` returns True if
    steps had fewer threads than on a quiet machine: those that are left wait for nobody.
    """

    def __init__(
        self,
        *,
        on_cpu: bool,
        exceeds_cpus: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
        has_fewer_threads: Callable[[], bool] = lambda: False,
    ) -> None:
        self._on_cpu = on_cpu
        self._exceeds_cpus = exceeds_cpus
        self._should_stop = should_stop
        self._has_fewer_threads = has_fewer_threads
        self._before = read_clocks()

    def begin(self) -> None:
        """Begin the next measurement."""
        self._before = read_clocks()

    def stop_if_asked(self) -> None:
        """Raise `StoppedError` if other work waits."""
        if self._should_stop():
            raise StoppedError

    def check(self) -> None:
        """Raise `DisturbedError` if other programs used the CPUs since `begin`, and `StoppedError` on request."""
        self.stop_if_asked()
        if self._has_fewer_threads():
            raise DisturbedError("fewer threads than usual computed, because other programs used the CPUs")
        if self._exceeds_cpus:
            return
        after = read_clocks()
        seconds = after.wall_s - self._before.wall_s
        waited = waited_s(self._before, after, on_cpu=self._on_cpu)
        if waited > max(MIN_WAITING_S, MAX_WAITING_SHARE * seconds):
            raise DisturbedError(f"threads waited {waited:.2f} s for CPUs within {seconds:.2f} s")

    @staticmethod
    def compare(seconds: Sequence[float]) -> None:
        """Raise `DisturbedError` if equal work took very different times."""
        if statistics.median(seconds) > MAX_SPREAD * min(seconds) + MIN_WAITING_S:
            raise DisturbedError(f"the same work took {min(seconds):.3f} to {max(seconds):.3f} s")


def read_clocks() -> Clocks:
    """Read the clocks."""
    waits = {thread: each.waited_s for thread, each in thread_times(os.getpid()).items()}
    return Clocks(time.perf_counter(), time.thread_time(), waits or None)


def waited_s(before: Clocks, after: Clocks, *, on_cpu: bool) -> float:
    """Return how long threads of this process waited for a CPU between two readings on the same thread.

    If the system does not report that, it is the time in which the calling thread did not run; but 0 if the model
    is not computed `on_cpu`, because a thread that waits for a GPU does not run either.
    """
    if before.waits_s is not None and after.waits_s is not None:
        return sum(max(0.0, s - before.waits_s.get(thread, 0.0)) for thread, s in after.waits_s.items())
    if not on_cpu:
        return 0.0
    return max(0.0, (after.wall_s - before.wall_s) - (after.thread_s - before.thread_s))


class Measurements(msgspec.Struct, frozen=True):
    """Measured values for fields of `ModelInfo`, and the result of the self-test."""

    kv_cost: KvCost | None = None
    step_cost: StepCost | None = None
    state_cost: StateCost | None = None
    samples_faster: bool | None = None
    """True if steps are faster with tokens sampled on the device; None if that was not measured."""
    self_test: SelfTestResult | None = None
    """Result of the self-test of reuse; None if there is none."""
    has_costs: bool = True
    """False if costs are not measured yet, so that only the self-test's result is kept."""

    @property
    def costs(self) -> dict[str, Any]:
        """The measured costs, by the names of `ModelInfo`'s fields."""
        names = "kv_cost", "step_cost", "state_cost"
        return {name: getattr(self, name) for name in names}

    @property
    def to_keep(self) -> Measurements:
        """Measurements for later starts: without the result of a self-test if that is pending or may change."""
        result = self.self_test
        if result is None or (result.outcome in ("passed", "failed") and result.is_lasting):
            return self
        return msgspec.structs.replace(self, self_test=None)


class _Kept(msgspec.Struct, frozen=True):
    key: str
    measurements: Measurements


def key_of(settings: LlamaSettings, info: ModelInfo, n_seqs: int) -> str:
    """Return a digest of everything that the measurements depend on."""
    cpus = host_cpus()
    facts = (
        FORMAT,
        _identities(parts(settings.model)),
        (info.architecture, info.name, info.n_params, info.size_bytes, info.n_vocab, info.n_embd),
        replace(
            settings,
            model=Path(),
            adapters=(),
            n_ctx=0,
            kv_mem_fraction=0.0,
            context_shift=False,
            max_draft=0,
            measure_at_load=False,
            measurements=None,
            reuse_self_test="auto",
        ),
        # In a unified pool, cells beyond those that are measured make no difference.
        (min(info.n_ctx, MAX_IDLE_CELLS + info.n_ubatch) if info.unified else info.n_ctx, n_seqs, info.flash_attn),
        (llama_cpp.__version__, _identities(library.paths())),
        (
            platform.machine(),
            cpus.allowed,
            cpus.n_threads,
            info.device,
            [device.description for device in library.devices()],
        ),
    )
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def read_kept(folder: Path, key: str) -> Measurements | None:
    """Return the measurements kept for the key; None if the file is missing, too old, corrupt or of another key."""
    path = folder / f"{key}.json"
    try:
        if _is_old(path):
            return None
        with open_regular(path) as file:
            kept = msgspec.json.decode(file.read(_MAX_FILE_BYTES), type=_Kept)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError):
        return None
    return kept.measurements if kept.key == key and _may_offload(kept.measurements) else None


def keep(folder: Path, key: str, measurements: Measurements) -> None:
    """Keep measurements for the key and delete old ones.

    Does nothing if they are kept already, or the folder is not writable.
    Costs with which nothing would be loaded are not kept: a busy machine may have caused them, and they would make
    RAM and disk useless after every start.
    """
    if not measurements.has_costs and measurements.self_test is None:
        return
    if not _may_offload(measurements) or measurements == read_kept(folder, key):
        return
    unfinished = folder / f".{key}.{os.getpid()}"
    with contextlib.suppress(OSError):
        private_folder(folder)
        data = memoryview(msgspec.json.encode(_Kept(key, measurements)))
        write_atomically(folder / f"{key}.json", [data], temporary=unfinished)
        for path in folder.iterdir():
            # Another server may delete the same file at the same time.
            with contextlib.suppress(OSError):
                if (path.suffix == ".json" or path.name.startswith(".")) and _is_old(path):
                    path.unlink()


def _may_offload(measurements: Measurements) -> bool:
    """True if loading is faster than computing, so that offloading makes sense with these costs."""
    cost = measurements.kv_cost
    return cost is None or cost.load_us < cost.prefill_us


def _is_old(path: Path) -> bool:
    return abs(time.time() - path.stat().st_mtime) > MAX_AGE_S


def _identities(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return path, size and modification time of each file."""
    return [(str(path.resolve()), (about := path.stat()).st_size, about.st_mtime_ns) for path in paths]
