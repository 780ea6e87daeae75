"""Reasons why a model runs on the CPU although the machine has a GPU or the user asked for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llamaslot.backend.host_gpus import HostGpu
from llamaslot.base.model import CPU

_WITHOUT_GPU = frozenset({"CPU", "BLAS", "RPC"})
"""ggml backends that do not use a GPU of this machine."""


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
        return UnusedGpu(f"{reason}, but llama.cpp ({built}) finds none that it can use", _driver_advice(host))
    if not host:
        return UnusedGpu(
            f"{reason}, but there is none here, and llama.cpp is built for {built} only", "use --gpu-layers 0"
        )
    return UnusedGpu(
        f"{reason}, but llama.cpp is built for {built} only",
        f'reinstall llama-cpp-python with CMAKE_ARGS="{host[0].cmake_args}" (docs/install.md), '
        "or use --gpu-layers 0",
    )


def _driver_advice(host: Sequence[HostGpu]) -> str:
    if host and not host[0].has_driver:
        return f"install the driver of the {host[0].name}, or pass the GPU to this container"
    return (
        "check whether its driver is older than the toolkit of the build, and whether this user may open the device"
    )
