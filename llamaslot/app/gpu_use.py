"""GPUs of the machine, and why a model runs on the CPU although there is one or the user asked for one.

Found whether or not llama.cpp is built for them: on Linux by PCI display controllers and the device nodes of their
drivers; on macOS all of Apple silicon has one (untested).
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llamaslot.base.model import CPU

_WITHOUT_GPU = frozenset({"CPU", "BLAS", "RPC"})
"""ggml backends that do not use a GPU of this machine."""
_DEVICES = Path("/dev")
_PCI = Path("/sys/bus/pci/devices")
_DISPLAY_CLASS = "0x03"
"""Prefix of the PCI class of display controllers."""
_NVIDIA = "0x10de"
"""PCI vendor id."""


@dataclass(frozen=True, slots=True)
class HostGpu:
    """Kind of GPU that the machine has, and how to build llama.cpp for it."""

    vendor: str
    has_driver: bool
    """True if a driver makes it available here. In a container the host may not pass it on."""
    cmake_args: str
    """Options with which llama.cpp is built for it."""

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.vendor} GPU"


def host_gpus(devices: Path = _DEVICES, pci: Path = _PCI, system: str = "") -> list[HostGpu]:
    """Return the kinds of GPUs that llama.cpp can be built for, without GPUs integrated in x86-64 processors.

    `system` is a name such as `darwin-arm64`; empty for the system it runs on.
    """
    if (system or f"{sys.platform}-{platform.machine()}") == "darwin-arm64":
        return [HostGpu("Apple", has_driver=True, cmake_args="-DGGML_METAL=on")]
    found = []
    vendors = _display_vendors(pci)
    has_nvidia = any(devices.glob("nvidia[0-9]*"))
    # `dxg` is the device by which Windows passes its GPU on to WSL2.
    if has_nvidia or _NVIDIA in vendors or (devices / "dxg").exists():
        has_driver = has_nvidia or (devices / "dxg").exists()
        found.append(HostGpu("NVIDIA", has_driver=has_driver, cmake_args="-DGGML_CUDA=on"))
    if (devices / "kfd").exists():
        # Found by the device node of AMD's compute driver, because integrated GPUs have AMD's vendor id as well.
        found.append(HostGpu("AMD", has_driver=True, cmake_args="-DGGML_HIP=on"))
    return found


def _display_vendors(pci: Path) -> set[str]:
    """Return the vendor ids of display controllers; empty if the system does not list them."""
    vendors = set()
    for device in pci.glob("*"):
        try:
            if (device / "class").read_text().startswith(_DISPLAY_CLASS):
                vendors.add((device / "vendor").read_text().strip())
        except OSError:
            continue
    return vendors


class UnusedGpu(NamedTuple):
    """The reason why a GPU is not used, and what to do about it."""

    problem: str
    advice: str

    def __str__(self) -> str:
        """Return both as one sentence."""
        return f"{self.problem}: {self.advice}"


def unused_gpu(
    gpu_layers: int | str, device: str, backends: Sequence[str], host: Sequence[HostGpu]
) -> UnusedGpu | None:
    """Return why the GPU is not used; None if it is used or not wanted.

    `gpu_layers` is the flag's value and `device` the device in use. `auto` wants a GPU if the machine has one.
    """
    if device != CPU or gpu_layers == 0 or not backends:
        return None
    asked = f"--gpu-layers {gpu_layers} asks for a GPU" if gpu_layers != "auto" else ""
    if not asked and not host:
        return None
    seen = " and ".join(gpu.name for gpu in host)
    reason = asked or f"This machine has {'an' if seen[0] in 'AN' else 'a'} {seen}"
    built = ", ".join(backends)
    if any(each not in _WITHOUT_GPU for each in backends):
        problem = f"{reason}, but llama.cpp ({built}) finds none that it can use"
        if host and not host[0].has_driver:
            return UnusedGpu(
                problem, f"install the driver of the {host[0].name}, or pass the GPU to this container"
            )
        return UnusedGpu(
            problem,
            "check whether its driver is older than the toolkit of the build, and whether this user may open the "
            "device",
        )
    if not host:
        return UnusedGpu(
            f"{reason}, but there is none here, and llama.cpp is built for {built} only", "use --gpu-layers 0"
        )
    return UnusedGpu(
        f"{reason}, but llama.cpp is built for {built} only",
        f'reinstall llama-cpp-python with CMAKE_ARGS="{host[0].cmake_args}" (docs/install.md), '
        "or use --gpu-layers 0",
    )
