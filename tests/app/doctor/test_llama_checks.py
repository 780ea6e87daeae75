"""The doctor on llama.cpp: a library that does not load, builds without the CPU's instructions, models."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import synthetic
from llamaslot.app.config import Config
from llamaslot.app.doctor import Check, Outcome
from llamaslot.app.doctor import llama_checks as module
from llamaslot.app.doctor.llama_checks import LlamaFacts, ask_llama, default_model, llama_checks, model_file
from llamaslot.app.model_files import DEFAULT, find_model, wheel_file
from llamaslot.app.start_lines import HostGpu

NVIDIA = HostGpu("NVIDIA", has_driver=True, cmake_args="-DGGML_CUDA=on")


def test_a_default_model_that_is_not_here_yet_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamaslot.app.model_files.platformdirs.user_cache_path", lambda name: tmp_path / name)
    coming, missing = default_model(offline=False), default_model(offline=True)
    assert coming is not None
    assert coming.outcome is Outcome.OK
    assert missing is not None
    assert missing.outcome is Outcome.WARN
    assert "llamaslot pull smollm2-135m" in missing.advice
    file = wheel_file(find_model(DEFAULT))
    file.parent.mkdir(parents=True)
    file.touch()
    assert default_model(offline=True) is None


def broken_library(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> Check:
    """The check with a llama-cpp-python that does this when it is imported."""
    (folder / "llama_cpp").mkdir()
    (folder / "llama_cpp" / "__init__.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    (check,) = llama_checks(None, "auto", [])
    return check


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "found", "advice"),
    [
        ("import os; os.kill(os.getpid(), 4)", "that this CPU does not", "built on this machine"),
        ("import os; os.abort()", "(SIGABRT)", "built on this machine"),
        ("import no_such_module", "not completely installed: ModuleNotFoundError", "install llama-cpp-python"),
        (
            "raise OSError('libcudart.so.12: cannot open shared object file: No such file or directory')",
            "needs a library that is not installed: OSError: libcudart.so.12",
            "install the toolkit or driver",
        ),
        ("raise RuntimeError('Failed to load')", "does not load: RuntimeError: Failed", "built on this machine"),
    ],
    ids=["another CPU", "abort", "not installed", "no CUDA", "other"],
)  # fmt: skip
def test_a_library_that_does_not_load_fails_without_ending_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, found: str, advice: str
) -> None:
    check = broken_library(tmp_path, source, monkeypatch)
    assert check.outcome is Outcome.FAIL
    assert found in check.found
    assert advice in check.advice


def test_builds_models_and_devices_are_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_info = tmp_path / "cpuinfo"
    monkeypatch.setattr(module, "_CPU_INFO", cpu_info)
    cpu_info.write_text("processor : 0\nflags : fpu sse2\n")
    model = synthetic.ensure("tiny-swa", folder=tmp_path)
    checks = {each.name: each for each in llama_checks(model, "auto", [])}
    assert checks["llama.cpp"].outcome is Outcome.OK
    assert "llama-cpp-python 0." in checks["llama.cpp"].found
    assert checks["devices"].outcome is Outcome.OK
    assert "GiB free" in checks["devices"].found
    assert checks["model"].found.endswith("gemma3; prefixes are reused by checkpoints")
    assert list(checks) == ["llama.cpp", "devices", "model"]


@pytest.mark.slow
def test_a_build_that_does_without_instructions_of_the_cpu_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = ask_llama()
    assert isinstance(facts, LlamaFacts)
    cpu_info = tmp_path / "cpuinfo"
    monkeypatch.setattr(module, "_CPU_INFO", cpu_info)
    cpu_info.write_text("flags\t\t: fpu avx2 fma f16c avx512f\n")
    build, devices = llama_checks(None, "auto", [] if len(facts.devices) > 1 else [NVIDIA])
    has_all = all(f"{name} = 1" in facts.flags for name in ("AVX2", "FMA", "F16C", "AVX512"))
    assert build.outcome is (Outcome.OK if has_all else Outcome.WARN)
    assert ("this CPU also has" in build.found) != has_all
    if len(facts.devices) == 1 and "CUDA" not in facts.backends:
        assert devices.outcome is Outcome.WARN
        assert "This machine has an NVIDIA GPU" in devices.found
        assert "-DGGML_CUDA=on" in devices.advice


def test_a_model_that_cannot_be_served_fails(tmp_path: Path, tiny_model: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("not a model")
    for name, words in ((str(text), "not a GGUF file"), ("no-such-model", "unknown model")):
        check = model_file(Config(model=name))
        assert isinstance(check, Check)
        assert check.outcome is Outcome.FAIL
        assert words in check.found
    assert model_file(Config(model=str(tiny_model))) == tiny_model


def test_a_model_that_llama_cpp_does_not_know_fails(tmp_path: Path, tiny_model: Path) -> None:
    other = tmp_path / "other.gguf"
    # The same file for an architecture of the same length that does not exist.
    other.write_bytes(tiny_model.read_bytes().replace(b"llama", b"lomas"))
    *_, model = llama_checks(other, "auto", [])
    assert model.outcome is Outcome.FAIL
    assert "unknown model architecture" in model.found
