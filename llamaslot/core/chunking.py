"""How many prompt tokens a step takes while other requests generate.

Prefill beside running streams stretches their inter-token time, so the chunk is sized from what steps were seen to
cost: a step of `n` prompt tokens beside streams should end within the allowed gap.
"""

from __future__ import annotations

_WEIGHT = 0.2
"""Share of the newest observation in the moving averages."""

_MIN_OBSERVED = 8
"""Prompt tokens below which a step says little of the cost of one."""


class ChunkSizer:
    """Learns the cost of decode steps and of prompt tokens, and sizes chunks by it."""

    def __init__(self, *, n_ubatch: int, gap_ms: float, min_chunk: int = 16) -> None:
        self._n_ubatch = n_ubatch
        self._gap = gap_ms / 1e3
        self._min_chunk = min(min_chunk, n_ubatch)
        self._decode: float | None = None
        self._per_token: float | None = None

    def limit(self, n_decoding: int) -> int:
        """Prompt tokens that the next step may take beside `n_decoding` streams."""
        whole = self._n_ubatch - n_decoding
        if n_decoding == 0:
            return whole
        if self._per_token is None:
            return min(self._min_chunk, whole)
        decode = self._decode or 0.0
        # Where a bare decode step already takes most of the gap, prefill may still double the time between tokens.
        allowed = max(self._gap, 2 * decode) - decode
        return max(min(self._min_chunk, whole), min(whole, int(allowed / self._per_token)))

    def seconds(self, n_tokens: int) -> float:
        """What so many prompt tokens will take; 0 as long as nothing is known."""
        return n_tokens * (self._per_token or 0.0)

    def observe(self, n_prefill: int, n_decoding: int, seconds: float) -> None:
        """Learn from a step that computed `n_prefill` prompt tokens beside `n_decoding` streams."""
        if n_prefill == 0 and n_decoding:
            self._decode = _blend(self._decode, seconds)
        elif n_prefill >= _MIN_OBSERVED:
            decode = (self._decode or 0.0) if n_decoding else 0.0
            self._per_token = _blend(self._per_token, max(seconds - decode, 1e-6) / n_prefill)


def _blend(average: float | None, value: float) -> float:
    return value if average is None else (1 - _WEIGHT) * average + _WEIGHT * value
