"""The shared library itself: initialisation, its log, its devices, metadata of models."""

from __future__ import annotations

import ctypes
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import llama_cpp
import structlog
from llama_cpp._ggml import libggml

from llamaslot.base.model import CPU

_log = structlog.get_logger("llama.cpp")

_NUMA = {
    "distribute": llama_cpp.GGML_NUMA_STRATEGY_DISTRIBUTE,
    "isolate": llama_cpp.GGML_NUMA_STRATEGY_ISOLATE,
    "numactl": llama_cpp.GGML_NUMA_STRATEGY_NUMACTL,
}
_DEBUG, _INFO, _WARN, _ERROR = 1, 2, 3, 4
GPU, INTEGRATED_GPU = 1, 2
"""ggml's device types: GPUs with their own memory, and GPUs that use the host's (0 is the CPU)."""

_OVERFLOW = "possible training context overflow"
"""A warning that never applies: a slot gets no more than the model's training context, however large the pool."""
_GAP = "non-consecutive token position"
"""A warning that does not apply to models with M-RoPE: after an image, positions need not follow each other."""

_NO_GPU = re.compile(r"ggml_cuda_init: failed to initialize \w+: ")
"""Logged if no GPU can be used. An error, unless GPUs are hidden from this process on purpose."""

_OBJECT, _TEXT, _SIZE = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ggml_blck_size": (ctypes.c_int64, ctypes.c_int),
    "ggml_type_size": (_SIZE, ctypes.c_int),
    "ggml_backend_reg_count": (_SIZE,),
    "ggml_backend_reg_get": (_OBJECT, _SIZE),
    "ggml_backend_reg_name": (_TEXT, _OBJECT),
    "ggml_backend_dev_count": (_SIZE,),
    "ggml_backend_dev_get": (_OBJECT, _SIZE),
    "ggml_backend_dev_type": (ctypes.c_int, _OBJECT),
    "ggml_backend_dev_name": (_TEXT, _OBJECT),
    "ggml_backend_dev_description": (_TEXT, _OBJECT),
    "ggml_backend_dev_memory": (None, _OBJECT, *[ctypes.POINTER(_SIZE)] * 2),
    "ggml_backend_dev_buffer_type": (_OBJECT, _OBJECT),
    "ggml_backend_dev_host_buffer_type": (_OBJECT, _OBJECT),
    "ggml_backend_buft_name": (_TEXT, _OBJECT),
    "ggml_backend_buft_alloc_buffer": (_OBJECT, _OBJECT, _SIZE),
    "ggml_backend_buffer_get_type": (_OBJECT, _OBJECT),
    "ggml_backend_buffer_get_base": (_OBJECT, _OBJECT),
    "ggml_backend_buffer_free": (None, _OBJECT),
}
"""Types of the result and the arguments of ggml's functions, which llama_cpp does not declare."""

for _name, (_result, *_arguments) in _SIGNATURES.items():
    _function = getattr(libggml, _name)
    _function.restype, _function.argtypes = _result, _arguments

_recent: deque[str] = deque(maxlen=1000)
_errors: deque[str] = deque(maxlen=20)
_watching: list[bool] = []
"""An entry for each `watched` in progress: True if warnings are not to be logged either."""
_ignored = [_OVERFLOW]
"""Parts of the warnings that do not apply to the model that was loaded last."""


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def on_log(level: int, text: bytes | None, _user: Any) -> None:
    """Take a line of llama.cpp's log, or libmtmd's."""
    if level == _DEBUG:
        return
    line = (text or b"").decode(errors="replace").strip()
    if not line or line == "." * len(line):
        return
    if level == _ERROR and _NO_GPU.match(line) and _hides_gpus():
        level = _INFO
    _recent.append(line)
    if level == _ERROR:
        _errors.append(line)
    if level == _ERROR and not _watching:
        _log.error("llama.cpp", line=line)
    elif level == _WARN and not any(_watching) and not any(words in line for words in _ignored):
        _log.warning("llama.cpp", line=line)
    else:
        _log.debug("llama.cpp", line=line)


def _hides_gpus() -> bool:
    """True in a process that must not use a GPU, such as the prompt worker."""
    return any(os.environ.get(name) in ("", "-1") for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))


def initialise() -> None:
    """Load the library's backends and redirect its log. May be called again."""
    llama_cpp.llama_log_set(on_log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()


def expect_gaps(*, has_mrope: bool) -> None:
    """Ignore warnings about gaps between positions if the model that is loaded now has M-RoPE."""
    _ignored[:] = [_OVERFLOW, _GAP] if has_mrope else [_OVERFLOW]


@contextmanager
def watched(*, quiet: bool = False) -> Iterator[tuple[deque[str], deque[str]]]:
    """Collect all lines, and all errors, that llama.cpp logs meanwhile. Errors are left to the caller to report.

    With `quiet`, warnings are not logged either.
    """
    _recent.clear()
    _errors.clear()
    _watching.append(quiet)
    try:
        yield _recent, _errors
    finally:
        _watching.pop()


def paths() -> list[Path]:
    """Return the files of the library: llama.cpp's own, and those of ggml's backends."""
    own = Path(llama_cpp.llama_cpp._lib._name)
    return sorted(each for each in own.parent.iterdir() if each.suffix == own.suffix)


def metadata(model: Any, key: str) -> str:
    """Return a value of the model file's metadata; empty if it is missing."""
    size = 256
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = llama_cpp.llama_model_meta_val_str(model, key.encode(), buffer, size)
        if n < 0:
            return ""
        if n < size:
            return buffer.value.decode(errors="replace")
        size = n + 1


def number(model: Any, key: str) -> int:
    """Return a number of the architecture's metadata; 0 if it is missing, or if there is one for each layer."""
    text = metadata(model, f"{metadata(model, 'general.architecture')}.{key}")
    return int(text) if text.isdecimal() else 0


def row_bytes(kind: int, width: int) -> int:
    """Return the bytes of a row of `width` elements of a ggml type, in whole blocks."""
    return int(-(-width // libggml.ggml_blck_size(kind)) * libggml.ggml_type_size(kind))


def flags() -> str:
    """Return the instruction sets and options with which the library was built. Call `initialise` first."""
    return " ".join(llama_cpp.llama_print_system_info().decode(errors="replace").split()).strip(" |")


def backends() -> tuple[str, ...]:
    """Return the names of the backends that were compiled in, or found by ggml."""
    found = (libggml.ggml_backend_reg_get(i) for i in range(libggml.ggml_backend_reg_count()))
    return tuple(libggml.ggml_backend_reg_name(each).decode(errors="replace") for each in found)


@dataclass(frozen=True, slots=True)
class Device:
    """A device on which ggml computes, and its memory in bytes."""

    name: str
    description: str
    kind: int
    free: int
    total: int
    handle: int = 0
    """ggml's own."""


def gpus() -> list[Device]:
    """Return the GPUs that llama.cpp uses: integrated ones only if there are no others."""
    found = devices()
    return [each for each in found if each.kind == GPU] or [each for each in found if each.kind == INTEGRATED_GPU]


def device_used(used: Sequence[Device]) -> str:
    """Return `ModelInfo.device` for a model on these GPUs."""
    return ", ".join(f"{each.name} ({each.description})" for each in used) or CPU


def devices() -> list[Device]:
    """Return all devices, including the CPU."""
    found = []
    for i in range(libggml.ggml_backend_dev_count()):
        device = libggml.ggml_backend_dev_get(i)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        libggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        name = libggml.ggml_backend_dev_name(device).decode(errors="replace")
        description = libggml.ggml_backend_dev_description(device).decode(errors="replace")
        kind = libggml.ggml_backend_dev_type(device)
        found.append(Device(name, description, kind, free.value, total.value, device))
    return found


def buffer_types() -> dict[str, int]:
    """Return ggml's types of memory in which weights may be, one for each device, by their names."""
    kinds = (libggml.ggml_backend_dev_buffer_type(device.handle) for device in devices())
    return {libggml.ggml_backend_buft_name(kind).decode(errors="replace"): kind for kind in kinds if kind}


def use_numa(strategy: Literal["off", "distribute", "isolate", "numactl"]) -> None:
    """Have threads keep to NUMA nodes from now on, in all of this process. Call `initialise` first."""
    # Off is not passed on: it changes nothing, and an earlier choice stays.
    if strategy != "off":
        llama_cpp.llama_numa_init(_NUMA[strategy])


def page_locked_allocator() -> Callable[[int], int | None] | None:
    """Return what allocates page-locked memory for copies to and from the GPUs; None if they offer none.

    That is so on a CPU, and where GPU and host share their memory.
    """
    kinds = (libggml.ggml_backend_dev_host_buffer_type(each.handle) for each in devices() if each.kind == GPU)
    kind = next(filter(None, kinds), None)
    return buffer_allocator(kind) if kind is not None else None


def buffer_allocator(kind: int) -> Callable[[int], int | None]:
    """Return a function from a size to the address of a ggml buffer of a type; None if there is no memory.

    The buffers are never freed.
    """

    def allocate(n_bytes: int) -> int | None:
        buffer = libggml.ggml_backend_buft_alloc_buffer(kind, n_bytes)
        if not buffer:
            return None
        # Where no page can be locked, or GGML_CUDA_NO_PINNED is set, ggml returns ordinary memory instead.
        if libggml.ggml_backend_buffer_get_type(buffer) != kind:
            libggml.ggml_backend_buffer_free(buffer)
            return None
        return int(libggml.ggml_backend_buffer_get_base(buffer))

    return allocate
