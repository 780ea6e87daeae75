"""RAM limits of prefixes and checkpoints and the limit of idle cells, chosen once at start."""

from __future__ import annotations

import msgspec

from llamaslot.app.config import Config
from llamaslot.base.errors import ConfigError
from llamaslot.base.model import CheckpointLimits, ModelInfo, StateKind
from llamaslot.kvcache.cache_settings import Budgets, part_cells

MAX_AUTO_RAM_BYTES = 8 * 2**30
"""Upper limit of `--cache-ram auto`: llama-server's default for `--cache-ram`."""
_AUTO_RAM_FRACTION = 0.5
"""Fraction of free memory that `--cache-ram auto` uses."""
_MAX_AUTO_CHECKPOINT_BYTES = 2 * 2**30
"""Upper limit of `--checkpoint-ram auto`, unless `_MIN_AUTO_CHECKPOINTS` need more."""
_AUTO_CHECKPOINT_FRACTION = 1 / 8
"""Fraction of free memory that `--checkpoint-ram auto` uses."""
_MIN_AUTO_CHECKPOINTS = 8
"""Checkpoints of full size that `--checkpoint-ram auto` has room for, within `_MAX_CHECKPOINT_FRACTION`."""
_MAX_CHECKPOINT_FRACTION = 1 / 4
"""Largest fraction of free memory for `_MIN_AUTO_CHECKPOINTS`."""
_MIB = 2**20


def choose_budgets(config: Config, info: ModelInfo, n_free: int) -> Budgets:
    """Return the budgets for a model. `n_free`: free bytes of host memory, including pages of mapped weights.

    Raises `ConfigError`.
    """
    if config.maps_weights:
        n_free = max(0, n_free - info.size_bytes)
    checkpoints = _checkpoint_limits(config, info, n_free)
    ram_bytes = 0
    if not why_not_offloaded(config, info):
        ram_bytes = _ram_bytes(config, max(0, n_free - (checkpoints.ram_bytes if checkpoints else 0)))
    return Budgets(
        ram_bytes=ram_bytes,
        ram_is_fixed=config.cache_ram not in ("auto", -1),
        ram_bytes_per_key=config.cache_ram_per_key * _MIB,
        disk_bytes_per_key=config.cache_disk_per_key * _MIB,
        disk_bytes_per_day=config.cache_disk_write_per_day * _MIB,
        idle_cells=config.cache_idle_cells if isinstance(config.cache_idle_cells, int) else None,
        offloads_by_cost=config.cache_idle_cells == "auto",
        checkpoints=checkpoints,
    ).with_costs(info)


def with_budgets(config: Config, info: ModelInfo, budgets: Budgets) -> ModelInfo:
    """Return the model's description completed by its budgets.

    Sets the checkpoint limits or the reason why there are none, and whether the pool's layout may change.
    """
    return msgspec.structs.replace(
        info,
        part_cells=part_cells(info, budgets, has_slot_files=bool(config.slot_save_path)),
        checkpoint_limits=budgets.checkpoints,
        reuse_reason=info.reuse_reason + _why_no_checkpoints(config, info),
    )


def restart_flags(info: ModelInfo) -> dict[str, int]:
    """Return flags that give a restarted engine a pool and a checkpoint limit of the same sizes.

    `auto` may choose less RAM than one checkpoint takes. That value is left out, since it is an error as a flag.
    """
    flags = {"ctx_size": info.n_ctx}
    limits, size = info.checkpoint_limits, info.checkpoint_size
    if limits is not None and size is not None and limits.ram_bytes >= size.of(info.n_ctx_slot):
        flags["checkpoint_ram"] = limits.ram_bytes // _MIB
    return flags


def why_not_offloaded(config: Config, info: ModelInfo) -> str:
    """Return the reason why prefixes are not offloaded to RAM; empty if they are."""
    reasons = (
        (config.cache_ram == 0, "--cache-ram 0"),
        (bool(info.unsaved_reason), info.unsaved_reason),
        (not info.flash_attn, "offloading needs flash attention"),
    )
    return next((reason for holds, reason in reasons if holds), "")


def _ram_bytes(config: Config, n_free: int) -> int:
    if config.cache_ram == "auto":
        return min(int(n_free * _AUTO_RAM_FRACTION), MAX_AUTO_RAM_BYTES)
    return n_free if config.cache_ram < 0 else config.cache_ram * _MIB


def _checkpoint_limits(config: Config, info: ModelInfo, n_free: int) -> CheckpointLimits | None:
    """Return the checkpoint limits, with RAM in whole MiB; None if no checkpoints are taken."""
    if not info.keeps_checkpoints or info.checkpoint_size is None:
        return None
    largest = info.checkpoint_size.of(info.n_ctx_slot)
    if config.checkpoint_ram == "auto":
        n_bytes = min(int(n_free * _AUTO_CHECKPOINT_FRACTION), _MAX_AUTO_CHECKPOINT_BYTES)
        least = _MIN_AUTO_CHECKPOINTS * largest
        if least <= n_free * _MAX_CHECKPOINT_FRACTION:
            n_bytes = max(n_bytes, least)
        # A restarted engine gets the same value as a flag, in MiB.
        n_bytes = max(-(-n_bytes // _MIB), 1) * _MIB
    else:
        n_bytes = config.checkpoint_ram * _MIB
        if n_bytes < largest:
            raise ConfigError(
                f"--checkpoint-ram {config.checkpoint_ram} is less than one checkpoint of this model "
                f"({largest / _MIB:,.1f} MiB)",
                param="--checkpoint-ram",
            )
    return CheckpointLimits(n_bytes, config.ctx_checkpoints, config.checkpoint_min_step)


def _why_no_checkpoints(config: Config, info: ModelInfo) -> str:
    """Return why a model that needs checkpoints for prefix reuse has none; empty for any other model."""
    if (
        info.can_reuse
        or info.self_test in ("failed", "off")
        or info.state.kind is StateKind.NONE
        or info.state.has_own_cache
    ):
        return ""
    if not config.ctx_checkpoints:
        return "; --ctx-checkpoints 0 turns checkpoints off"
    if not info.unified:
        return "; checkpoints need a pool shared by all slots (--kv-unified)"
    return "; checkpoints need a spare sequence id: lower --parallel"
