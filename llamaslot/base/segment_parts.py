"""Parts of saved segments, of which other segments are put together."""

from __future__ import annotations

from dataclasses import dataclass

from llamaslot.base.kv_ops import Kv


@dataclass(frozen=True, slots=True)
class KvPart:
    """Positions `wanted` of a segment that has `positions`, with its KV."""

    kv: Kv
    positions: range
    wanted: range
