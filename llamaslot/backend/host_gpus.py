"""GPUs that the operating system sees, whether or not llama.cpp is built for them.

Linux: PCI display controllers, and the device nodes of their drivers. macOS: Apple silicon (untested).
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from pathlib import Path

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
