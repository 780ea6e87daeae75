"""Checks of llama.cpp: does it load, how was it built, which devices does it use, can it load the model?

A build for another CPU or GPU may crash the process (SIGILL) or fail to load. So a child process, whose main
program is this module too, loads llama.cpp and the model without its weights, and prints `LlamaFacts` as JSON.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from llamaslot.app.config import Config
from llamaslot.app.doctor import Check, fail, ok, shown_size, warn
from llamaslot.app.logs import configure_logging
from llamaslot.app.model_config import metadata_overrides
from llamaslot.app.model_files import DEFAULT, EMBEDDED, find_model, local_file, resolve_model
from llamaslot.app.start_lines import HostGpu, unused_gpu
from llamaslot.base.errors import ConfigError
from llamaslot.base.files import check_metadata, parts
from llamaslot.base.model import CPU

_TIMEOUT_S = 60.0
_REBUILD = "reinstall llama-cpp-python, built on this machine (docs/install.md)"
_CPU_INFO = Path("/proc/cpuinfo")
_IMPORTANT = {"avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "avx512f": "AVX512"}
"""Instruction sets that matter for speed on x86-64: their names in Linux, and in llama.cpp."""


class LlamaFacts(msgspec.Struct, frozen=True):
    """Facts about the library, its devices and, if one was given, the model."""

    flags: str
    backends: tuple[str, ...]
    devices: tuple[str, ...]
    """Descriptions of the devices that ggml can use."""
    device: str
    """Names of the GPUs among them; `CPU` without any."""
    architecture: str = ""
    reuse: str = ""
    """How prefixes are reused: `to the token`, `by checkpoints`, or the reason why they are not."""
    model_error: str = ""
    """Why llama.cpp cannot load the model; empty if it can."""


def model_file(config: Config) -> Path | Check:
    """Return the file that `--model` names if it can be served, otherwise a failed check."""
    try:
        path = resolve_model(config.model)
        check_metadata(path, metadata_overrides(config), embeds=config.embeds)
    except ConfigError as error:
        return fail("model", error.message, "give another --model or get it with `llamaslot pull`")
    return path


def default_model(offline: bool) -> Check | None:
    """Report a default model that is not here yet; None if there is nothing to say."""
    model = find_model(DEFAULT)
    if local_file(model):
        return None
    if offline:
        found = f"{model.name} is not on this machine: `llamaslot serve` serves {EMBEDDED}"
        return warn("default model", found, f"get it with `llamaslot pull {model.name}`, or give a --model")
    return ok("default model", f"{model.name}, which `llamaslot serve` downloads first; {EMBEDDED} is checked here")


def llama_checks(model: Path | None, gpu_layers: int | str, host: Sequence[HostGpu]) -> Iterator[Check]:
    """Check the library, its devices and the model."""
    facts = ask_llama(model)
    if isinstance(facts, Check):
        yield facts
        return
    found = f"llama-cpp-python {version('llama-cpp-python')}, built for {', '.join(facts.backends)}; {facts.flags}"
    if missing := _unused_instructions(facts.flags):
        advice = "reinstall llama-cpp-python, built on this machine: a generic build does not use them"
        yield warn("llama.cpp", f"{found}; this CPU also has {', '.join(missing)}", advice)
    else:
        yield ok("llama.cpp", found)
    devices = "; ".join(facts.devices)
    if unused := unused_gpu(gpu_layers, facts.device, facts.backends, host):
        yield warn("devices", f"{devices}. {unused[0]}", unused[1])
    else:
        yield ok("devices", devices)
    if model is not None:
        yield _model(model, facts)


def ask_llama(model: Path | None = None) -> LlamaFacts | Check:
    """Load llama.cpp and a model (without its weights) in another process; return a failed check if that fails."""
    command = [sys.executable, "-P", "-m", __name__, *([str(model)] if model is not None else [])]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        advice = "check whether the disk responds"
        return fail("llama.cpp", f"llama.cpp did not load within {_TIMEOUT_S:.0f} s", advice)
    if done.returncode == 0:
        return msgspec.json.decode(done.stdout, type=LlamaFacts)
    lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip() if lines else f"exit status {done.returncode}"
    found, advice = f"llama.cpp does not load: {last}", _REBUILD
    if done.returncode == -signal.SIGILL:
        found = "llama.cpp uses instructions that this CPU does not have (SIGILL)"
    elif done.returncode < 0:
        name = f"signal {-done.returncode}"
        with contextlib.suppress(ValueError):
            name = signal.Signals(-done.returncode).name
        found = f"loading llama.cpp crashed the process ({name})"
    elif "No module named" in last:
        found, advice = f"llama-cpp-python is not completely installed: {last}", "install llama-cpp-python"
    elif "cannot open shared object" in last or "Library not loaded" in last:
        found = f"llama.cpp needs a library that is not installed: {last}"
        advice = "install the toolkit or driver that the wheel was built for, or a wheel for this machine's device"
    return fail("llama.cpp", found, advice)


def _unused_instructions(flags: str) -> list[str]:
    """Return the instruction sets that the CPU has but the build does not use; empty if the CPU's are unknown."""
    try:
        text = _CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    has = found[1].split() if found else []
    return [name for key, name in _IMPORTANT.items() if key in has and not re.search(rf"\b{name} = 1", flags)]


def _model(path: Path, facts: LlamaFacts) -> Check:
    if facts.model_error:
        return fail("model", facts.model_error, "give another --model or install a newer llama-cpp-python")
    found = f"{path.name}, {shown_size(sum(part.stat().st_size for part in parts(path)))}, {facts.architecture}"
    if facts.reuse in ("to the token", "by checkpoints"):
        return ok("model", f"{found}; prefixes are reused {facts.reuse}")
    advice = "choose another model if prefixes should be reused (docs/models.md)"
    return warn("model", f"{found}; every prompt is computed whole ({facts.reuse})", advice)


def main() -> None:
    """Print the facts about llama.cpp, and about the model file that the argument names, if any."""
    configure_logging("json", "error")
    # Imported after logging is configured, because the import fails if the library cannot be loaded.
    from llamaslot.backend.llama import capabilities, library, loading  # noqa: PLC0415

    library.initialise()
    devices = library.devices()
    gpus = [each.name for each in devices if each.kind in (library.GPU, library.INTEGRATED_GPU)]
    shown = tuple(
        f"{each.name} ({each.description}), {shown_size(each.free)} of {shown_size(each.total)} free"
        for each in devices
    )
    facts = LlamaFacts(library.flags(), library.backends(), shown, ", ".join(gpus) or CPU)
    if len(sys.argv) > 1:
        try:
            handle = loading.load_structure(Path(sys.argv[1]))
        except ConfigError as error:
            facts = msgspec.structs.replace(facts, model_error=error.message)
        else:
            later = "its tokens attend to later ones" if capabilities.attends_later(handle, {}) else ""
            reason = later or capabilities.why_not_reusable(handle)
            by_states = capabilities.has_partial_state(handle) and not later
            reuse = "by checkpoints" if by_states else reason or "to the token"
            architecture = library.metadata(handle, "general.architecture")
            facts = msgspec.structs.replace(facts, architecture=architecture, reuse=reuse)
    sys.stdout.buffer.write(msgspec.json.encode(facts))


if __name__ == "__main__":
    main()
