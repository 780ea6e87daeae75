"""GPUs that the system sees, and the sentence on a llama.cpp that does not use them."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamaslot.app import start_lines
from llamaslot.app.start_lines import HostGpu, host_gpus, unused_gpu
from llamaslot.backend.llama import library

NVIDIA = HostGpu("NVIDIA", has_driver=True, cmake_args="-DGGML_CUDA=on")
NO_DRIVER = HostGpu("NVIDIA", has_driver=False, cmake_args="-DGGML_CUDA=on")
APPLE = HostGpu("Apple", has_driver=True, cmake_args="-DGGML_METAL=on")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[HostGpu]]:
    """Returns the GPUs of a Linux with some device nodes, and PCI devices of some classes and vendors."""
    devices_folder, pci_folder = tmp_path / "dev", tmp_path / "pci"
    devices_folder.mkdir()
    monkeypatch.setattr(start_lines, "_DEVICES", devices_folder)
    monkeypatch.setattr(start_lines, "_PCI", pci_folder)
    monkeypatch.setattr(sys, "platform", "linux")

    def with_hardware(devices: tuple[str, ...] = (), pci: tuple[tuple[str, str], ...] = ()) -> list[HostGpu]:
        for name in devices:
            (devices_folder / name).touch()
        for i, (kind, vendor) in enumerate(pci):
            card = pci_folder / f"0000:00:{i:02}.0"
            card.mkdir(parents=True)
            (card / "class").write_text(f"{kind}\n")
            (card / "vendor").write_text(f"{vendor}\n")
        return host_gpus()

    return with_hardware


def test_a_gpu_with_its_driver_is_seen(machine: Any) -> None:
    assert machine(devices=("nvidia0", "nvidiactl"), pci=(("0x030200", "0x10de"),)) == [NVIDIA]


def test_a_card_without_driver_is_seen(machine: Any) -> None:
    (gpu,) = machine(pci=(("0x030000", "0x8086"), ("0x030000", "0x10de"), ("0x020000", "0x15b3")))
    assert (gpu.name, gpu.has_driver) == ("NVIDIA GPU", False)


def test_the_gpu_of_windows_is_seen_in_wsl(machine: Any) -> None:
    assert machine(devices=("dxg",)) == [NVIDIA]


def test_amds_driver_for_computing_is_seen_but_no_integrated_gpu(machine: Any) -> None:
    assert machine(pci=(("0x030000", "0x1002"), ("0x030000", "0x8086"))) == []
    (gpu,) = machine(devices=("kfd",))
    assert gpu.cmake_args == "-DGGML_HIP=on"


def test_apple_silicon_always_has_a_gpu(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert host_gpus() == [APPLE]
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert machine() == []


def test_this_machine_can_be_asked() -> None:
    assert all(gpu.cmake_args.startswith("-DGGML_") for gpu in host_gpus())


@pytest.mark.parametrize(
    ("gpu_layers", "backends", "host", "words"),
    [
        (99, ("CPU",), [NVIDIA], '99 asks for a GPU, but llama.cpp is built for CPU only: .*"-DGGML_CUDA'),
        ("all", ("BLAS", "CPU"), [], "all asks .* there is none here, and llama.cpp is built for BLAS, CPU"),
        ("auto", ("CPU",), [NVIDIA], "This machine has an NVIDIA GPU, but llama.cpp is built for CPU only"),
        ("auto", ("CPU",), [APPLE], "This machine has an Apple GPU, but .*-DGGML_METAL=on"),
        ("auto", ("CUDA", "CPU"), [NVIDIA], r"llama.cpp \(CUDA, CPU\) finds none that it can use: check whether"),
        ("auto", ("CUDA", "CPU"), [NO_DRIVER], "install the driver of the NVIDIA"),
        (99, ("CUDA", "CPU"), [], r"--gpu-layers 99 asks for a GPU, but llama.cpp \(CUDA, CPU\) finds none"),
    ],
)  # fmt: skip
def test_why_no_gpu_is_used_and_what_to_do(
    gpu_layers: int | str, backends: tuple[str, ...], host: list[HostGpu], words: str
) -> None:
    assert re.search(words, ": ".join(unused_gpu(gpu_layers, "CPU", backends, host) or ()))


@pytest.mark.parametrize(
    ("gpu_layers", "device", "host"),
    [("auto", "CPU", []), (0, "CPU", [NVIDIA]), ("auto", "CUDA0 (NVIDIA H100)", [NVIDIA]), (99, "Metal", [APPLE])],
)
def test_nothing_is_said_where_all_is_as_wanted(gpu_layers: int | str, device: str, host: list[HostGpu]) -> None:
    assert unused_gpu(gpu_layers, device, ("CUDA", "CPU"), host) is None


def test_the_library_says_how_it_was_built() -> None:
    library.initialise()
    assert "CPU" in library.backends()
    assert " : " in library.flags()
