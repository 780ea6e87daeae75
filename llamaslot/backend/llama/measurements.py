"""Start-up measurements, kept in the user's cache folder for the next start with the same model.

A file has the measurements of one key: a digest of the model's files, all settings and sizes on which times depend,
the library and the machine. Measurements that other programs disturbed are never kept (`costs.py`). Servers may
share the folder: a file is replaced as a whole, and one that is corrupt or has another key counts as missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import msgspec

from llamaslot.backend.files import open_regular, private_folder, write_atomically
from llamaslot.backend.host import host_cpus
from llamaslot.backend.llama import library
from llamaslot.backend.llama.costs import MAX_IDLE_CELLS
from llamaslot.backend.llama.llama_settings import LlamaSettings
from llamaslot.backend.llama.self_test import SelfTestResult
from llamaslot.base.gguf_file import parts
from llamaslot.base.model import KvCost, ModelInfo, StateCost, StepCost

MAX_AGE_S = 7 * 86_400
"""Age at which measurements are repeated, because the machine may have changed."""
_MAX_FILE_BYTES = 2**16
FORMAT = 4
"""Incremented whenever something is measured in another way."""


class Measurements(msgspec.Struct, frozen=True):
    """Fields of `ModelInfo` that are measured at start, and the result of the self-test."""

    kv_cost: KvCost | None = None
    step_cost: StepCost | None = None
    state_cost: StateCost | None = None
    self_test: SelfTestResult | None = None
    """Result of the self-test of reuse; None if there is none."""
    has_costs: bool = True
    """False if other programs disturbed the measurement of costs, so that only the self-test's result is kept."""

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
            n_ctx=0,
            kv_mem_fraction=0.0,
            measurements=None,
            self_test_limit_s=0.0,
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


def read(folder: Path, key: str) -> Measurements | None:
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


def write(folder: Path, key: str, measurements: Measurements) -> None:
    """Keep measurements for the key and delete old ones. Does nothing if the folder is not writable.

    Costs with which nothing would be offloaded are not kept: a busy machine may have caused them, and they would
    turn RAM and disk off at every start.
    """
    if not measurements.has_costs and measurements.self_test is None:
        return
    if not _may_offload(measurements):
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
