"""Facts about llama.cpp and a model, determined in a child process.

A build for another CPU or GPU may crash (SIGILL) or fail to load. The doctor can then report that.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

_PROBE = "llamaslot.app.doctor.llama_probe"
_TIMEOUT_S = 60.0
_REBUILD = "reinstall llama-cpp-python, built on this machine (docs/install.md)"


class DeviceFacts(msgspec.Struct, frozen=True):
    """A device that ggml can use; sizes in bytes."""

    name: str
    description: str
    is_gpu: bool
    free: int
    total: int


class ModelFacts(msgspec.Struct, frozen=True):
    """Facts about a model file; `error` is why llama.cpp cannot load it, empty if it can."""

    architecture: str = ""
    reuse: str = ""
    """How prefixes are reused: `to the token`, `by checkpoints`, or the reason why they are not."""
    error: str = ""


class LlamaFacts(msgspec.Struct, frozen=True):
    """Facts about the library, its devices and, if one was given, the model."""

    version: str
    flags: str
    backends: tuple[str, ...]
    devices: tuple[DeviceFacts, ...]
    model: ModelFacts | None = None


class LlamaError(Exception):
    """llama.cpp cannot be loaded; `advice` says what to do."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice


def ask_llama(model: Path | None = None) -> LlamaFacts:
    """Load llama.cpp and a model (without its weights) in another process. Raises `LlamaError`."""
    command = [sys.executable, "-P", "-m", _PROBE, *([str(model)] if model is not None else [])]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise LlamaError(
            f"llama.cpp did not load within {_TIMEOUT_S:.0f} s", "check whether the disk responds"
        ) from None
    if done.returncode == 0:
        return msgspec.json.decode(done.stdout, type=LlamaFacts)
    raise _failure(done.returncode, done.stderr.decode(errors="replace"))


def _failure(status: int, errors: str) -> LlamaError:
    lines = [line for line in errors.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else f"exit status {status}"
    if status == -signal.SIGILL:
        return LlamaError("llama.cpp uses instructions that this CPU does not have (SIGILL)", _REBUILD)
    if status < 0:
        name = f"signal {-status}"
        with contextlib.suppress(ValueError):
            name = signal.Signals(-status).name
        return LlamaError(f"loading llama.cpp crashed the process ({name})", _REBUILD)
    if "No module named" in last:
        return LlamaError(f"llama-cpp-python is not completely installed: {last}", "install llama-cpp-python")
    if "cannot open shared object" in last or "Library not loaded" in last:
        return LlamaError(
            f"llama.cpp needs a library that is not installed: {last}",
            "install the toolkit or driver that the wheel was built for, or a wheel for this machine's device",
        )
    return LlamaError(f"llama.cpp does not load: {last}", _REBUILD)
