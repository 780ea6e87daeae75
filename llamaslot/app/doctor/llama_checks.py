"""Checks of llama.cpp: does it load, how was it built, which devices does it use, can it load the model?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from llamaslot.app.doctor.check import Check, fail, ok, shown_size, warn
from llamaslot.app.doctor.llama_facts import LlamaError, LlamaFacts, ask_llama
from llamaslot.app.gpu_use import unused_gpu
from llamaslot.app.models import resolve_model
from llamaslot.backend.host_gpus import HostGpu
from llamaslot.base.errors import ConfigError
from llamaslot.base.gguf_file import check_metadata, parts
from llamaslot.base.model import CPU

_CPU_INFO = Path("/proc/cpuinfo")
_IMPORTANT = {"avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "avx512f": "AVX512"}
"""Instruction sets that matter for speed on x86-64: their names in Linux, and in llama.cpp."""


def model_file(name: str) -> tuple[Path | None, Check | None]:
    """Return the file that `--model` names if it can be served, otherwise a failed check."""
    try:
        path = resolve_model(name)
        check_metadata(path)
    except ConfigError as error:
        return None, fail("model", error.message, "give another --model or get it with `llamaslot pull`")
    return path, None


def llama_checks(
    model: Path | None, gpu_layers: int | str, host: Sequence[HostGpu], cpu_info: Path = _CPU_INFO
) -> Iterator[Check]:
    """Check the library, its devices and the model."""
    try:
        facts = ask_llama(model)
    except LlamaError as error:
        yield fail("llama.cpp", str(error), error.advice)
        return
    yield _build(facts, cpu_info)
    yield _devices(facts, gpu_layers, host)
    if model is not None and facts.model is not None:
        yield _model(model, facts.model.architecture, facts.model.reuse, facts.model.error)


def _build(facts: LlamaFacts, cpu_info: Path) -> Check:
    found = f"llama-cpp-python {facts.version}, built for {', '.join(facts.backends)}; {facts.flags}"
    if missing := _unused_instructions(facts.flags, cpu_info):
        advice = "reinstall llama-cpp-python, built on this machine: a generic build does not use them"
        return warn("llama.cpp", f"{found}; this CPU also has {', '.join(missing)}", advice)
    return ok("llama.cpp", found)


def _unused_instructions(flags: str, cpu_info: Path) -> list[str]:
    """Return the instruction sets that the CPU has but the build does not use; empty if the CPU's are unknown."""
    try:
        text = cpu_info.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    has = found[1].split() if found else []
    return [name for key, name in _IMPORTANT.items() if key in has and not re.search(rf"\b{name} = 1", flags)]


def _devices(facts: LlamaFacts, gpu_layers: int | str, host: Sequence[HostGpu]) -> Check:
    gpus = [device for device in facts.devices if device.is_gpu]
    used = ", ".join(device.name for device in gpus) or CPU
    found = "; ".join(
        f"{device.name} ({device.description}), {shown_size(device.free)} of {shown_size(device.total)} free"
        for device in facts.devices
    )
    if unused := unused_gpu(gpu_layers, used, facts.backends, host):
        return warn("devices", f"{found}. {unused.problem}", unused.advice)
    return ok("devices", found)


def _model(path: Path, architecture: str, reuse: str, error: str) -> Check:
    size = shown_size(sum(part.stat().st_size for part in parts(path)))
    if error:
        return fail("model", error, "give another --model or install a newer llama-cpp-python")
    found = f"{path.name}, {size}, {architecture}; prefixes are reused {reuse}"
    if reuse not in ("to the token", "by checkpoints"):
        found = f"{path.name}, {size}, {architecture}; every prompt is computed whole ({reuse})"
        return warn("model", found, "choose another model if prefixes should be reused (docs/models.md)")
    return ok("model", found)
