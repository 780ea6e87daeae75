"""The start lines of `llamaslot serve`: what runs where, why a GPU is not used, how to send requests.

GPUs are found whether or not llama.cpp is built for them: on Linux by PCI display controllers and the device nodes
of their drivers; on macOS all of Apple silicon has one (untested).
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from llamaslot import __version__
from llamaslot.app.cache_budgets import why_not_offloaded
from llamaslot.app.config import Config
from llamaslot.app.model_table import ModelEntry
from llamaslot.base.errors import printable
from llamaslot.base.model import CPU, NOT_YET, QUERY_BLOCK, CheckpointLimits, KvCost, ModelInfo, StateKind, StepCost
from llamaslot.kvcache.cache_settings import Budgets
from llamaslot.processes.messages import DiskUse, Loaded

_BOLD = 1
_WITHOUT_GPU = frozenset({"CPU", "BLAS", "RPC"})
"""ggml backends that do not use a GPU of this machine."""
_DEVICES = Path("/dev")
_PCI = Path("/sys/bus/pci/devices")
_DISPLAY_CLASS = "0x03"
"""Prefix of the PCI class of display controllers."""
_NVIDIA = "0x10de"
"""PCI vendor id."""
_MIB = 2**20

_EXAMPLES = {
    "": ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "Hello!"}]}'),
    "last": ("/v1/embeddings", '{"input": "Hello!"}'),
    "rank": ("/v1/rerank", '{"query": "Hello?", "documents": ["Hello!", "Goodbye."]}'),
}
"""Paths and bodies of requests to try, by `ModelInfo.pooling`."""

_log = structlog.get_logger(__name__)


def announce(loaded: Loaded, urls: Sequence[str], config: Config) -> None:
    """Print the start lines and log the same as one event."""
    info = loaded.info
    size = f"{info.size_bytes / _MIB:,.0f} MiB"
    name, description = printable(info.name), printable(info.description)
    print(f"llamaslot {__version__}: {_styled(name, _BOLD)} ({description}, {size}) on {info.device}")
    if unused := unused_gpu(config.wanted_gpu_layers, info.device, info.backends, host_gpus()):
        reason = ": ".join(unused)
        print(_yellow(f"{reason}."))
        _log.warning("gpu.unused", reason=reason)
    if info.sizing:
        print(info.sizing)
    pool = "shared by all slots" if info.unified else "in equal parts"
    if info.part_cells:
        pool += f" or {info.part_cells:,} for each"
    spare = f", {info.n_cache_seqs} more sequences for idle prefixes" if info.n_cache_seqs else ""
    print(
        f"{info.n_slots} slots, {info.n_ctx:,} cells (tokens of KV) {pool}, at most {info.n_ctx_slot:,} tokens a "
        f"request{spare}; KV {info.cache_type_k}/{info.cache_type_v}, flash attention "
        f"{'on' if info.flash_attn else 'off'}"
    )
    print(_reuse_line(info) if info.can_reuse and not info.self_test_note else _yellow(_reuse_line(info)))
    if info.checkpoint_limits is not None:
        print(_checkpoints_line(info, info.checkpoint_limits))
    print(ram_line(config, info, loaded.budgets))
    if info.costs_pending:
        line = _pending_line(info)
        print(line if info.costs_pending == NOT_YET else _yellow(line))
    if info.step_cost is not None:
        print(_small_steps_line(info.step_cost))
    if loaded.disk is not None:
        print(disk_line(info, loaded.disk))
    elif config.cache_disk:
        print(_yellow("--cache-disk is not used: only prefixes that are offloaded to RAM are written to disk."))
    if loaded.remote_address:
        shared = "shared with all servers that have the same key and model"
        limit = f", at most {config.cache_remote_size:,} MiB" if config.cache_remote_size else ""
        print(f"Remote tier: {loaded.remote_address}, {shared}{limit}")
    elif config.cache_remote:
        print(_yellow("--cache-remote is not used: only prefixes that are offloaded to RAM are shared."))
    if config.context_shift and info.unshifted_reason:
        print(_yellow(f"--context-shift is not used: {info.unshifted_reason}."))
    if not info.flash_attn:
        print(_yellow("Without flash attention, idle prefixes slow down running requests."))
    _print_addresses(urls, config, *_EXAMPLES.get(info.pooling, _EXAMPLES["last"]))
    _log.info(
        "server.ready",
        urls=urls,
        model=info.name,
        device=info.device,
        slots=info.n_slots,
        cells=info.n_ctx,
        tokens_a_slot=info.n_ctx_slot,
        cache_seqs=info.n_cache_seqs,
        flash_attention=info.flash_attn,
        self_test=info.self_test or "not needed",
        reuse="by checkpoints" if info.keeps_checkpoints else info.reuse_reason or "on",
        disk=config.cache_disk if loaded.disk is not None else "off",
        remote="on" if loaded.remote_address else "off",
    )


def announce_several(entries: Sequence[ModelEntry], urls: Sequence[str], config: Config) -> None:
    """Print the start lines of a server that may have several models, and log the same as one event."""
    names = ", ".join(printable(each.names[0]) for each in entries)
    at_once = f", at most {config.models_max} of them at once" if 0 < config.models_max < len(entries) else ""
    how = "loaded when a request names them" if config.models_autoload else "loaded by POST /models/load"
    print(f"llamaslot {__version__}: {len(entries)} models, {how}{at_once}: {names}")
    path, body = _EXAMPLES[""]
    _print_addresses(urls, config, path, body.replace("{", f'{{"model": {json.dumps(entries[0].names[0])}, ', 1))
    _log.info("server.ready", urls=urls, models=[each.names[0] for each in entries])


def _print_addresses(urls: Sequence[str], config: Config, path: str, body: str) -> None:
    """Print where the server listens, and a request to try."""
    page = " (in a browser: chat, and what is cached)" if config.webui else ""
    print(f"listening on {', '.join(urls)}{page}")
    key = " -H 'Authorization: Bearer KEY'" if config.api_key or config.api_key_file else ""
    ca = f" --cacert {shlex.quote(config.ssl_cert_file)}" if config.ssl_cert_file else ""
    print(f"try:  curl{ca} {urls[0]}{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}")
    sys.stdout.flush()


def _yellow(text: str) -> str:
    return _styled(text, 33)


def _styled(text: str, code: int) -> str:
    """Return text in an ANSI style, on terminals only. Not with rich, because its import slows down each start."""
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


def _reuse_line(info: ModelInfo) -> str:
    """Return the line about prefix reuse: how prefixes are reused or why not, and which layers keep which state."""
    state = info.state
    if info.keeps_checkpoints and info.checkpoint_size is not None:
        at_most = "at most " if info.checkpoint_size.per_cell else ""
        size = _mib(info.checkpoint_size.of(info.n_ctx_slot))
        pending = f", once the self-test has passed ({info.self_test_note})" if info.self_test_note else ""
        pending += ", untested because of --reuse-self-test on" if info.self_test == "skipped" else ""
        return f"Prefix reuse: by checkpoints{pending} ({_partial_state(info)}; one takes {at_most}{size})"
    latent = " (MLA)" if state.has_mla else ""
    kept = []
    if state.n_attention_layers:
        kept.append(f"KV of every token in {state.n_attention_layers}{latent}")
    if state.n_window_layers:
        kept.append(f"KV of the last {state.n_swa:,} in {state.n_window_layers}")
    if state.kind is StateKind.RECURRENT:
        kept.append("a recurrent state in all")
    layers = f"; {state.n_layers} layers: {', '.join(kept)}" if kept else ""
    if info.can_trim:
        pending = f", once the self-test has passed ({info.self_test_note})" if info.self_test_note else ""
        return f"Prefix reuse: on{pending}{layers}"
    return f"Prefix reuse: off, every prompt is computed whole ({info.self_test_note or info.reuse_reason}){layers}"


def _partial_state(info: ModelInfo) -> str:
    """Return a description of the state that checkpoints copy."""
    state = info.state
    parts = []
    if state.kind.has_window:
        layers = f" in {state.n_window_layers} of {state.n_layers} layers" if state.n_window_layers else ""
        parts.append(f"sliding window of {state.n_swa:,} tokens{layers}")
    if state.kind is StateKind.RECURRENT:
        parts.append(f"recurrent state in {state.n_layers} layers")
    elif state.kind.has_recurrent_state:
        layers = f" beside KV of every token in {state.n_attention_layers} of {state.n_layers} layers"
        parts.append(f"recurrent state{layers if state.n_attention_layers else ''}")
    return ", ".join(parts)


def ram_line(config: Config, info: ModelInfo, budgets: Budgets) -> str:
    """Return the line about RAM for prefixes."""
    cost = info.kv_cost
    if reason := why_not_offloaded(config, info):
        return f"RAM: not used for prefixes ({reason}){_slowdown(cost)}"
    line = f"RAM: {budgets.ram_bytes / _MIB:,.0f} MiB for prefixes{_about_tokens(info, budgets.ram_bytes)}"
    if cost is not None:
        line += f" (1,000 take {cost.load_us:,.1f} ms to load, {cost.prefill_us:,.0f} ms to compute)"
    if budgets.offload_after is not None:
        line += f"; idle prefixes are offloaded after {budgets.offload_after:,} further prompt tokens"
    elif budgets.idle_cells is not None:
        line += f"; idle prefixes keep {budgets.idle_cells:,} cells"
    else:
        line += "; idle prefixes are offloaded when their cells are needed"
    return line + _slowdown(cost)


def disk_line(info: ModelInfo, disk: DiskUse) -> str:
    """Return the line about the disk tier."""
    others = f", {disk.n_other_bytes / _MIB:,.1f} MiB of other models" if disk.n_other_bytes else ""
    return (
        f"Disk stores up to {disk.capacity / _MIB:,.0f} MiB of prefixes in {disk.folder}"
        f"{_about_tokens(info, disk.capacity)}; it already contains "
        f"{(disk.n_bytes - disk.n_other_bytes) / _MIB:,.1f} MiB of this model{others}"
    )


def _about_tokens(info: ModelInfo, n_bytes: int) -> str:
    """Return ", about N tokens" for the KV that fits into `n_bytes`; empty if no layer keeps KV of every token."""
    assert info.segment_size is not None
    per_token = info.segment_size.per_token
    return f", about {n_bytes // per_token:,} tokens" if per_token else ""


def _slowdown(cost: KvCost | None) -> str:
    if cost is None or not cost.n_idle_cells:
        return ""
    return f". Prefill takes {cost.prefill_slowdown:.2f}x as long with {cost.n_idle_cells:,} idle cells"


def _checkpoints_line(info: ModelInfo, limits: CheckpointLimits) -> str:
    """Return the line about checkpoints: how many fit, and the cost of one."""
    assert info.checkpoint_size is not None
    n = limits.ram_bytes // info.checkpoint_size.of(info.n_ctx_slot)
    line = (
        f"Checkpoints: {_mib(limits.ram_bytes)} of RAM, room for {n:,}; at most {limits.on_path:,} of one "
        f"conversation, one every {limits.step:,} tokens of a long prompt"
    )
    if (cost := info.state_cost) is not None:
        line += f" ({cost.take_ms:,.1f} ms to take one, {cost.restore_ms:,.1f} ms to restore it)"
    if n:
        return line
    # Without checkpoints, only a live sequence can be continued, and only at its end.
    return _yellow(f"{line}. Raise --checkpoint-ram: without one, only a slot's last request can be continued.")


def _mib(n_bytes: int) -> str:
    n_mib = n_bytes / _MIB
    return f"{n_mib:,.{0 if n_mib >= 10 else 1 if n_mib >= 1 else 2}f} MiB"


def _pending_line(info: ModelInfo) -> str:
    """Return why costs were not measured, and the defaults that apply until they are."""
    defaults = ["idle prefixes stay in the pool until their cells are needed"]
    if info.unified:
        defaults.append("small steps are not padded")
    if info.keeps_checkpoints:
        defaults.append("checkpoints are always restored, whatever it costs")
    if info.costs_pending == NOT_YET:
        why = "Costs of this model are not known yet on this machine"
    else:
        why = f"Costs could not be measured ({info.costs_pending})"
    return f"{why}. Until they are measured, while the server is idle: {', '.join(defaults)}."


def _small_steps_line(cost: StepCost) -> str:
    n_cells, n = 1024, 16
    small, whole = cost.small_ms(n, n * n_cells), cost.block_ms(n_cells)
    return (
        f"Steps: after {n_cells:,} cached tokens, {n} more take {small:,.0f} ms and {QUERY_BLOCK} take "
        f"{whole:,.0f} ms; "
        f"small steps are padded to {QUERY_BLOCK} tokens where that is faster"
    )


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


def host_gpus() -> list[HostGpu]:
    """Return the kinds of GPUs that llama.cpp can be built for, without GPUs integrated in x86-64 processors."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return [HostGpu("Apple", has_driver=True, cmake_args="-DGGML_METAL=on")]
    found = []
    vendors = _display_vendors()
    has_nvidia = any(_DEVICES.glob("nvidia[0-9]*"))
    # `dxg` is the device by which Windows passes its GPU on to WSL2.
    if has_nvidia or _NVIDIA in vendors or (_DEVICES / "dxg").exists():
        has_driver = has_nvidia or (_DEVICES / "dxg").exists()
        found.append(HostGpu("NVIDIA", has_driver=has_driver, cmake_args="-DGGML_CUDA=on"))
    if (_DEVICES / "kfd").exists():
        # Found by the device node of AMD's compute driver, because integrated GPUs have AMD's vendor id as well.
        found.append(HostGpu("AMD", has_driver=True, cmake_args="-DGGML_HIP=on"))
    return found


def _display_vendors() -> set[str]:
    """Return the vendor ids of display controllers; empty if the system does not list them."""
    vendors = set()
    for device in _PCI.glob("*"):
        try:
            if (device / "class").read_text().startswith(_DISPLAY_CLASS):
                vendors.add((device / "vendor").read_text().strip())
        except OSError:
            continue
    return vendors


def unused_gpu(
    gpu_layers: int | str, device: str, backends: Sequence[str], host: Sequence[HostGpu]
) -> tuple[str, str] | None:
    """Return why the GPU is not used, and what to do about it; None if it is used or not wanted.

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
            return problem, f"install the driver of the {host[0].name}, or pass the GPU to this container"
        return problem, (
            "check whether its driver is older than the toolkit of the build, and whether this user may open the "
            "device"
        )
    if not host:
        return f"{reason}, but there is none here, and llama.cpp is built for {built} only", "use --gpu-layers 0"
    return f"{reason}, but llama.cpp is built for {built} only", (
        f'reinstall llama-cpp-python with CMAKE_ARGS="{host[0].cmake_args}" (docs/install.md), '
        "or use --gpu-layers 0"
    )
