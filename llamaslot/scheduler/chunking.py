"""How many prompt tokens a step takes while other requests generate.

Prefill beside running streams stretches their inter-token time, so the chunk is sized from what steps were seen to
cost: a step with prompt tokens beside streams should take about the allowed gap. One tile may take half as long
again, and any step twice what it takes without them.

What a token costs depends on how many there are in a step (`StepCost`): 64 tokens may be done before 32. So steps
that are smaller and larger than `TILE` are learned apart, or small chunks would make the next ones smaller still.
"""

from __future__ import annotations

from llamaslot.base.model import TILE

_MIN_OBSERVED = 8
"""Prompt tokens below which a step says little of the cost of one."""
_FADING = 0.99
"""What remains of what large steps took, with each small one: a slow spell must not keep them away for good."""
_STRETCH = 1.5
"""Factor by which the first tile may exceed what is allowed."""
_WEIGHT = 0.2
"""Share of the newest observation in the moving averages."""


class ChunkSizer:
    """Learns the cost of decode steps and of prompt tokens, and sizes chunks by it."""

    def __init__(self, *, n_ubatch: int, gap_ms: float, min_chunk: int = 16) -> None:
        self._n_ubatch = n_ubatch
        self._gap = gap_ms / 1e3
        self._min_chunk = min_chunk
        self._decode: dict[int, float] = {}
        """Seconds of a step without prompts by the number of streams."""
        self._alone: float | None = None
        """Seconds of a prompt token beside no stream."""
        self._few: float | None = None
        """Seconds that a prompt token adds to a step of streams, in all fewer than `TILE`."""
        self._many: _Line | None = None
        """Seconds that prompt tokens add to a decode step, in all `TILE` or more."""

    def limit(self, n_decoding: int) -> int:
        """Prompt tokens that the next step may take beside `n_decoding` streams."""
        whole = self._n_ubatch - n_decoding
        if n_decoding == 0:
            return whole
        decode = self._decode_seconds(n_decoding)
        # Where a step without prompts already takes most of the gap, they may still double the time between tokens.
        allowed = max(self._gap - decode, decode)
        return max(min(self._chunk(allowed, n_decoding), whole), min(self._min_chunk, whole))

    def seconds(self, n_tokens: int) -> float:
        """What so many prompt tokens will take; 0 as long as nothing is known."""
        return n_tokens * (self._alone or self._few or 0.0)

    def observe(self, n_prefill: int, n_decoding: int, seconds: float) -> None:
        """Learn from a step that computed so many prompt tokens, padding included, beside so many streams."""
        if n_prefill == 0:
            if n_decoding:
                self._decode[n_decoding] = _blend(self._decode.get(n_decoding), seconds)
            return
        added = max(seconds - self._decode_seconds(n_decoding), 1e-6)
        if n_prefill < _MIN_OBSERVED:
            return
        if not n_decoding:
            self._alone = _blend(self._alone, added / n_prefill)
        elif n_prefill + n_decoding < TILE:
            self._few = _blend(self._few, added / n_prefill)
            if self._many is not None:
                self._many.fade(_FADING)
        elif self._many is None:
            self._many = _Line(added / n_prefill)
        else:
            self._many.learn(n_prefill, added)

    def _chunk(self, allowed: float, n_decoding: int) -> int:
        """Prompt tokens that add about `allowed` seconds to a step of so many streams: together whole tiles,
        rounded, or too few for one.

        The first tile may take half as long again, or as long as a small chunk: it is worth several of those.
        """
        tile = TILE - n_decoding % TILE
        line = self._many or (_Line(self._alone) if self._alone else None)
        few = self._few or (line.per_token if line else None)
        if few is None:
            return self._min_chunk
        small = min(max(int(allowed / few), self._min_chunk), tile)
        if line is None:
            return small
        if (large := line.tokens(allowed)) >= tile:
            return tile + (large - tile + TILE // 2) // TILE * TILE
        return tile if line.seconds(tile) <= max(_STRETCH * allowed, few * small) else small

    def _decode_seconds(self, n_decoding: int) -> float:
        """Seconds of a decode step of so many streams, or of the most similar number that was seen."""
        if not n_decoding or not self._decode:
            return 0.0
        return self._decode[min(self._decode, key=lambda n: (abs(n - n_decoding), n))]


class _Line:
    """Seconds by tokens: what there is to a step at all, and so much for each token.

    Learns by normalised least mean squares: what a prediction was off by is shared out among the two, the more to
    the tokens the more there were.
    """

    _RATE = 0.3
    _EVEN = 256
    """Tokens at which both take the same share."""

    def __init__(self, per_token: float) -> None:
        self.per_token = per_token
        self._base = 0.0

    def seconds(self, n: int) -> float:
        """What so many tokens take."""
        return max(self._base + n * self.per_token, 0.0)

    def tokens(self, seconds: float) -> int:
        """How many tokens take so long."""
        return int((seconds - self._base) / self.per_token)

    def fade(self, factor: float) -> None:
        """Forget a little of it."""
        self._base *= factor
        self.per_token *= factor

    def learn(self, n: int, seconds: float) -> None:
        """So many tokens took so long."""
        step = self._RATE * (seconds - self._base - n * self.per_token) / (n**2 + self._EVEN**2)
        self._base += step * self._EVEN**2
        self.per_token = max(self.per_token + step * n, 1e-7)


def _blend(average: float | None, value: float) -> float:
    return value if average is None else (1 - _WEIGHT) * average + _WEIGHT * value
