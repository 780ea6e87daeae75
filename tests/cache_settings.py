"""Settings of the cache by the names of all fields, those of its parts included."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from llamaslot.base.model import CheckpointLimits, KvCost, StateCost
from llamaslot.kvcache.cache_settings import MAX_SEGMENT_TOKENS, Budgets, CacheSettings, CheckpointSettings

NO_CHECKPOINTS = CheckpointSettings()


@dataclass(slots=True, kw_only=True)
class VariedSettings(CacheSettings):
    """Settings whose constants a test chooses."""

    segment_tokens: int = MAX_SEGMENT_TOKENS
    min_shared: int = CacheSettings.min_shared
    write_interval_ms: float = CacheSettings.write_interval_ms
    idle_delay_ms: float = CacheSettings.idle_delay_ms


@dataclass(slots=True, kw_only=True)
class VariedCheckpointSettings(CheckpointSettings):
    """Settings of checkpoints whose constants a test chooses."""

    min_gap: int = CheckpointSettings.min_gap
    min_end_gap: int = CheckpointSettings.min_end_gap


class Cost(KvCost, frozen=True):
    """A cost whose `foreign_us` does not follow from the others."""

    foreign: float = 0.0

    @property
    def foreign_us(self) -> float:
        return self.foreign


def cache_settings(**given: Any) -> CacheSettings:
    """Settings of the cache; `save_us`, `load_us`, `prefill_us` and `foreign_us` are those of its `cost`."""
    save_us = given.pop("save_us", 0.0)
    times = {name: given.pop(name, 0.0) for name in ("prefill_us", "load_us")}
    cost = Cost(0, 1.0, save_us=save_us, first_save_us=save_us, foreign=given.pop("foreign_us", 0.0), **times)
    return VariedSettings(budgets=take_budgets(given), cost=cost, **given)


def tier_settings(**given: Any) -> CacheSettings:
    """Settings of the cache for tests of its tiers alone, which need no more of the context than a scratch id."""
    n_slots = given.pop("n_slots", 1)
    return cache_settings(n_slots=n_slots, n_cells=0, n_seqs=n_slots + 1, gap_ms=0.0, **given)


def take_budgets(given: dict[str, Any]) -> Budgets:
    """Take the fields of budgets out of others, with names of their own for the limits of checkpoints."""
    limits = NO_CHECKPOINTS.limits
    checkpoints = CheckpointLimits(
        given.pop("checkpoint_bytes", limits.ram_bytes),
        given.pop("checkpoints_on_path", limits.on_path),
        given.pop("checkpoint_step", limits.step),
    )
    own = _take(given, (each.name for each in fields(Budgets) if each.name != "checkpoints"))
    return Budgets(checkpoints=checkpoints, **own)


def checkpoint_settings(**given: Any) -> CheckpointSettings:
    """Settings of checkpoints, with the fields of `limits` and `cost`."""
    limits = msgspec.structs.replace(NO_CHECKPOINTS.limits, **_take(given, CheckpointLimits.__struct_fields__))
    cost = msgspec.structs.replace(NO_CHECKPOINTS.cost, **_take(given, StateCost.__struct_fields__))
    return VariedCheckpointSettings(limits=limits, cost=cost, **given)


def _take(given: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: given.pop(name) for name in names if name in given}
