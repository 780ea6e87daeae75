"""The shared library itself: initialised once, its log caught, its devices named."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import structlog
from llama_cpp._ggml import libggml

_log = structlog.get_logger("llama.cpp")

_WARN, _ERROR = 3, 4
_GPU_DEVICES = (1, 2)
"""ggml's device types of discrete and integrated GPUs (0 is the CPU, 3 an accelerator beside it)."""

_HARMLESS = ("possible training context overflow",)
"""Warnings that do not apply: a slot never gets more than the model's training context, whatever the pool has."""

_recent: deque[str] = deque(maxlen=200)
_errors: deque[str] = deque(maxlen=20)
_watching: list[bool] = []


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes | None, _user: Any) -> None:
    line = (text or b"").decode(errors="replace").strip()
    if not line or line == "." * len(line):
        return
    _recent.append(line)
    if level == _ERROR:
        _errors.append(line)
        if not _watching:
            _log.error("llama.cpp", line=line)
    elif level == _WARN and not any(words in line for words in _HARMLESS):
        _log.warning("llama.cpp", line=line)


def initialise() -> None:
    """Load the library's backends and catch its log; safe to call again."""
    llama_cpp.llama_log_set(_on_log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()


@contextmanager
def watched() -> Iterator[tuple[deque[str], deque[str]]]:
    """The lines that llama.cpp logs meanwhile: all of them, and its errors, which nobody else logs then."""
    _recent.clear()
    _errors.clear()
    _watching.append(True)
    try:
        yield _recent, _errors
    finally:
        _watching.pop()


def paths() -> list[Path]:
    """The files of the library: llama.cpp's own, and those that compute for it."""
    own = Path(llama_cpp.llama_cpp._lib._name)
    return sorted(each for each in own.parent.iterdir() if each.suffix == own.suffix)


def devices() -> list[str]:
    """The GPUs that the library sees, by the names that their drivers give."""
    found = []
    libggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    libggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    libggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    libggml.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    libggml.ggml_backend_dev_type.restype = ctypes.c_int
    for function in (libggml.ggml_backend_dev_name, libggml.ggml_backend_dev_description):
        function.argtypes = [ctypes.c_void_p]
        function.restype = ctypes.c_char_p
    for i in range(libggml.ggml_backend_dev_count()):
        device = libggml.ggml_backend_dev_get(i)
        if libggml.ggml_backend_dev_type(device) in _GPU_DEVICES:
            name = libggml.ggml_backend_dev_name(device).decode(errors="replace")
            description = libggml.ggml_backend_dev_description(device).decode(errors="replace")
            found.append(f"{name} ({description})")
    return found
