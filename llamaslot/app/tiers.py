"""Where idle prefixes live: in the pool, or in the host's memory; decided once, from what was measured at start."""

from __future__ import annotations

from dataclasses import dataclass

from llamaslot.app.config import Config
from llamaslot.base.model import KvCost, ModelInfo

_MOST = 8 * 2**30
"""Bytes of RAM to take at most where nothing else is said: llama-server's default for all it takes."""
_SHARE = 0.5
"""Share of free memory to take at most where nothing else is said."""
_POOLS = 2
"""Pools that RAM must have room for to be the home of idle prefixes: else it would hold less than the pool can."""
_NOISE = 1.02
"""Ratios up to this one are taken for 1."""
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Budgets:
    """What idle prefixes may keep where."""

    ram_bytes: int
    """Bytes of the host's memory; 0 where nothing is stored."""
    idle_cells: int | None
    """Cells of the pool; None for all that nothing else needs."""
    idle_life: int | None
    """See `SchedulerSettings.idle_life`."""
    line: str
    """What follows from that, to print."""


def choose(config: Config, info: ModelInfo, n_free: int) -> Budgets:
    """The tiers for a model, with `n_free` bytes of the host's memory free, in which mapped weights are counted."""
    if config.mmap and not config.mlock:
        n_free = max(0, n_free - info.size_bytes)
    idle_cells = config.cache_idle_cells if isinstance(config.cache_idle_cells, int) else None
    why_not = _why_not_stored(config, info)
    ram = 0 if why_not else _ram_bytes(config, n_free)
    life = None
    if config.cache_idle_cells == "auto" and info.kv_cost is not None and ram and ram >= _POOLS * _pool_bytes(info):
        life = idle_life(info.kv_cost)
    line = why_not or _ram_line(info, ram, life, idle_cells)
    return Budgets(ram, idle_cells, life, _idle_line(info.kv_cost) + line)


def idle_life(cost: KvCost) -> int | None:
    """Prompt tokens to compute until idle cells have cost the time to save and to load them; None: never.

    Each cell makes one of them take `(ratio - 1) / n_cells` longer.
    """
    if cost.ratio <= _NOISE:
        return None
    rent = cost.prefill_us * (cost.ratio - 1) / cost.n_cells
    return max(round((cost.save_us + cost.load_us) / rent), 1)


def _why_not_stored(config: Config, info: ModelInfo) -> str:
    """Why nothing is stored; empty where it is."""
    cost = info.kv_cost
    reasons = (
        (config.cache_ram == 0, "--cache-ram 0"),
        (not info.reuse, "no prefix of this model is reused"),
        (not info.unified, "that needs one pool for all slots (--kv-unified)"),
        (not info.flash_attn, "that needs flash attention"),
        (info.segment_size is None, "no sequence id is left for it, so lower --parallel"),
        (
            cost is not None and cost.load_us >= cost.prefill_us,
            "loading a token takes as long as computing it",
        ),
    )
    return next((f"RAM stores nothing: {reason}" for holds, reason in reasons if holds), "")


def _ram_bytes(config: Config, n_free: int) -> int:
    if config.cache_ram == "auto":
        return min(int(n_free * _SHARE), _MOST)
    return n_free if config.cache_ram < 0 else config.cache_ram * _MIB


def _pool_bytes(info: ModelInfo) -> int:
    return info.segment_size.of(info.n_ctx) if info.segment_size is not None else 0


def _ram_line(info: ModelInfo, ram: int, life: int | None, idle_cells: int | None) -> str:
    assert info.segment_size is not None
    n_tokens = ram // info.segment_size.per_token
    line = f"RAM stores {ram / _MIB:,.0f} MiB of prefixes, about {n_tokens:,} tokens"
    if info.kv_cost is not None:
        line += f"; 1,000 load in {info.kv_cost.load_us:,.1f} ms and compute in {info.kv_cost.prefill_us:,.0f} ms"
    if life is not None:
        return f"{line}. Idle ones leave the pool before more than {life:,} prompt tokens are computed beside them"
    if idle_cells is not None:
        return f"{line}. Idle ones keep {idle_cells:,} cells"
    return f"{line}. Idle ones stay in the pool until their cells are needed"


def _idle_line(cost: KvCost | None) -> str:
    if cost is None:
        return ""
    return f"Prefill takes {cost.ratio:.2f} times as long beside {cost.n_cells:,} idle cells. "
