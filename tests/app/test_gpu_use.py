"""GPUs that the system sees, and the sentence on a llama.cpp that does not use them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llamaslot.app.start_lines import HostGpu, host_gpus, unused_gpu
from llamaslot.backend.llama import library

NVIDIA = HostGpu("NVIDIA", has_driver=True, cmake_args="-DGGML_CUDA=on")
NO_DRIVER = HostGpu("NVIDIA", has_driver=False, cmake_args="-DGGML_CUDA=on")
APPLE = HostGpu("Apple", has_driver=True, cmake_args="-DGGML_METAL=on")


def machine(folder: Path, *, devices: tuple[str, ...] = (), pci: tuple[tuple[str, str], ...] = ()) -> list[HostGpu]:
    """The GPUs of a Linux with these device nodes, and PCI devices of these classes and vendors."""
    (folder / "dev").mkdir()
    for name in devices:
        (folder / "dev" / name).touch()
    for i, (kind, vendor) in enumerate(pci):
        card = folder / "pci" / f"0000:00:{i:02}.0"
        card.mkdir(parents=True)
        (card / "class").write_text(f"{kind}\n")
        (card / "vendor").write_text(f"{vendor}\n")
    return host_gpus(folder / "dev", folder / "pci", "linux-x86_64")


def test_a_gpu_with_its_driver_is_seen(tmp_path: Path) -> None:
    assert machine(tmp_path, devices=("nvidia0", "nvidiactl"), pci=(("0x030200", "0x10de"),)) == [NVIDIA]


def test_a_card_without_driver_is_seen(tmp_path: Path) -> None:
    (gpu,) = machine(tmp_path, pci=(("0x030000", "0x8086"), ("0x030000", "0x10de"), ("0x020000", "0x15b3")))
    assert (gpu.name, gpu.has_driver) == ("NVIDIA GPU", False)


def test_the_gpu_of_windows_is_seen_in_wsl(tmp_path: Path) -> None:
    assert machine(tmp_path, devices=("dxg",)) == [NVIDIA]


def test_amds_driver_for_computing_is_seen_but_no_integrated_gpu(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert machine(tmp_path / "other", pci=(("0x030000", "0x1002"), ("0x030000", "0x8086"))) == []
    (gpu,) = machine(tmp_path, devices=("kfd",))
    assert gpu.cmake_args == "-DGGML_HIP=on"


def test_apple_silicon_always_has_a_gpu(tmp_path: Path) -> None:
    assert host_gpus(tmp_path, tmp_path, "darwin-arm64") == [APPLE]
    assert host_gpus(tmp_path, tmp_path, "darwin-x86_64") == []


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
