"""Chunked prefill: how many prompt tokens a step takes while requests decode.

Prefill raises the inter-token latency of decoding requests, so chunks are sized by the observed cost of steps: a
step with prompt tokens should take about as long as the gap (`--prefill-gap-ms`). The first query block may take
1.5 times as long, and a step may always take twice as long as one without prompts.

The cost of a token depends on how many are in the step (`StepCost`): 64 tokens may take less time than 32. So the
costs of steps below and above `QUERY_BLOCK` are learned separately. Otherwise the high cost per token of small
chunks would make the next chunks even smaller.

In a partitioned pool prompts have their own steps (`PromptTurns`). All those between two steps of the decodes share
one gap. If the decodes' own step leaves no gap, only the first of them may take as long as that step.
"""

from __future__ import annotations

from llamaslot.base.model import QUERY_BLOCK

MIN_CHUNK = 16
"""Smallest chunk, in prompt tokens."""
MIN_OBSERVED_TOKENS = 8
"""Steps with fewer prompt tokens are not learned from: they say little about the cost of one."""
_DECAY = 0.99
"""Factor on the estimate for large steps after each small step, so that a slowdown does not rule them out."""
FIRST_BLOCK_FACTOR = 1.5
"""Factor by which the first query block may exceed the allowed time."""
_BACKGROUND_S = 0.05
"""Longest step in the background, unless the smallest chunk takes longer."""
_NEWEST_WEIGHT = 0.2
"""Weight of the newest observation in the moving averages."""


class ChunkSizer:
    """Learns the cost of decode steps and prompt tokens, and sizes chunks accordingly."""

    def __init__(self, *, n_ubatch: int, gap_ms: float, unified: bool = True) -> None:
        self.n_ubatch = n_ubatch
        self._gap_s = gap_ms / 1e3
        self._unified = unified
        self._decode: dict[int, float] = {}
        """Seconds of a step without prompts, by the number of requests that decode."""
        self._alone: float | None = None
        """Seconds per prompt token without decodes; in a partitioned pool only of steps that fill a query block."""
        self._small: float | None = None
        """Seconds per prompt token in steps that delay decodes and fill no query block. Such steps also compute the
        decodes; in a partitioned pool they precede a step of the decodes.
        """
        self._large: _LinearCost | None = None
        """Seconds of all prompt tokens in steps that delay decodes and fill at least one query block."""

    def limit(self, n_decoding: int, *, n_waiting: int = 0, waited_s: float | None = None) -> int:
        """Return how many prompt tokens the next step may compute beside `n_decoding` decoding requests.

        `n_waiting` others wait for its end. `waited_s` is the time that steps of prompts have taken since
        the decodes' last step, None before the first of them. The next one must fit into the rest of the gap; the
        limit is 0 if not even the smallest chunk does.
        """
        whole = self.n_ubatch - n_decoding
        if n_decoding + n_waiting == 0:
            return whole
        decode = self.decode_seconds(n_decoding + n_waiting)
        allowed = self._gap_s - decode - (waited_s or 0.0)
        if waited_s is None:
            # If the decodes alone take most of the gap, little or nothing is left. One step of prompts may then
            # take as long as theirs, which doubles the interval.
            allowed = max(allowed, decode)
        elif allowed <= 0:
            return 0
        n = max(min(self._chunk(allowed, n_decoding), whole), min(MIN_CHUNK, whole))
        if waited_s is not None and self.chunk_seconds(n, n_decoding) > FIRST_BLOCK_FACTOR * allowed:
            return 0
        return n

    def background(self) -> int:
        """Return how many tokens a step in the background may have: whole query blocks, or less than one.

        A request that arrives meanwhile waits for its end.
        """
        per_token = self.seconds(1)
        n = int(_BACKGROUND_S / per_token) if per_token else QUERY_BLOCK
        n = n // QUERY_BLOCK * QUERY_BLOCK if n >= QUERY_BLOCK else max(n, MIN_CHUNK)
        return min(n, self.n_ubatch)

    def block(self, n_decoding: int) -> int:
        """Return how many prompt tokens fill up a query block beside `n_decoding` decodes, within a micro-batch."""
        if self._unified:
            return QUERY_BLOCK - n_decoding % QUERY_BLOCK
        return min(QUERY_BLOCK, self.n_ubatch - n_decoding)

    def without_short_rest(self, limit: int, n_left: int, n_decoding: int, *, may_grow: bool = True) -> int:
        """Adjust a limit of whole query blocks by at most one block, so that no small rest of a prompt is left.

        In a partitioned pool, a rest of a prompt's `n_left` tokens that is smaller than a block would need a step
        of its own, which takes longer than a whole block. If decodes have waited, `may_grow` is False and the
        limit is only reduced.
        """
        block = self.block(n_decoding)
        if self._unified or limit < block or not 0 < n_left - limit < block:
            return limit
        shorter = limit - QUERY_BLOCK
        if shorter >= block:
            return shorter
        return min(n_left, self.n_ubatch - n_decoding) if may_grow else limit

    def set_layout(self, *, unified: bool) -> None:
        """Forget the cost of prompts beside decodes, which differs between the layouts of the pool.

        The cost of decode steps differs less, and adapts with the next ones.
        """
        self._unified = unified
        self._small = self._large = None

    def seconds(self, n_tokens: int) -> float:
        """Return the expected seconds to compute `n_tokens` prompt tokens; 0 before any was observed."""
        return n_tokens * (self._alone or self._small or 0.0)

    def chunk_seconds(self, n: int, n_decoding: int) -> float:
        """Return the seconds that a chunk is expected to add to a step; 0 before any was observed."""
        if n < self.block(n_decoding) or self._large is None:
            return n * (self._small or self._alone or 0.0)
        return self._large.seconds(n)

    def decode_seconds(self, n_decoding: int) -> float:
        """Return the seconds of a step of `n_decoding` requests, or of the nearest number observed."""
        if not n_decoding or not self._decode:
            return 0.0
        return self._decode[min(self._decode, key=lambda n: (abs(n - n_decoding), n))]

    def observe(self, n_prefill: int, n_decoding: int, seconds: float) -> None:
        """Learn from a step of `n_prefill` prompt tokens (including padding) and `n_decoding` decoding requests."""
        if n_prefill == 0:
            if n_decoding:
                self._decode[n_decoding] = _blend(self._decode.get(n_decoding), seconds)
            return
        added = max(seconds - self.decode_seconds(n_decoding), 1e-6)
        if n_prefill < MIN_OBSERVED_TOKENS:
            return
        is_small = n_prefill < self.block(n_decoding)
        # In a partitioned pool, decodes wait for every step of prompts.
        delays_decodes = n_decoding > 0 or not self._unified
        if not n_decoding and not (delays_decodes and is_small):
            self._alone = _blend(self._alone, added / n_prefill)
        if not delays_decodes:
            return
        if is_small:
            self._small = _blend(self._small, added / n_prefill)
            if self._large is not None:
                self._large.decay(_DECAY)
        elif self._large is None:
            self._large = _LinearCost(added / n_prefill)
        else:
            self._large.learn(n_prefill, added)

    def _chunk(self, allowed: float, n_decoding: int) -> int:
        """Return the number of prompt tokens that adds about `allowed` seconds to a step of `n_decoding` requests.

        Together with the decodes it fills whole query blocks, or it is less than one. A single block is also chosen
        if it takes up to `FIRST_BLOCK_FACTOR` times as long as allowed, or no longer than the small chunk: it
        computes several times as many tokens.
        """
        block = self.block(n_decoding)
        line = self._large or (_LinearCost(self._alone) if self._alone else None)
        small_cost = self._small or (line.per_token if line else None)
        if small_cost is None:
            return MIN_CHUNK
        small = min(max(int(allowed / small_cost), MIN_CHUNK), block)
        if line is None:
            return small
        if (large := line.tokens(allowed)) >= block:
            return block + (large - block + QUERY_BLOCK // 2) // QUERY_BLOCK * QUERY_BLOCK
        return block if line.seconds(block) <= max(FIRST_BLOCK_FACTOR * allowed, small_cost * small) else small


class _LinearCost:
    """Seconds of a step: a fixed part, and a part per token.

    Learned by normalised least mean squares: the error of each prediction is divided between the two parts, and the
    part per token gets more of it the more tokens the step had.
    """

    _RATE = 0.3
    _EVEN = 256
    """Number of tokens at which both parts get the same share of an error."""

    def __init__(self, per_token: float) -> None:
        self.per_token = per_token
        self._base = 0.0

    def seconds(self, n: int) -> float:
        """Return the seconds of a step of `n` tokens."""
        return max(self._base + n * self.per_token, 0.0)

    def tokens(self, seconds: float) -> int:
        """Return the number of tokens that take `seconds`."""
        return int((seconds - self._base) / self.per_token)

    def decay(self, factor: float) -> None:
        """Scale the estimate down."""
        self._base *= factor
        self.per_token *= factor

    def learn(self, n: int, seconds: float) -> None:
        """Learn from a step of `n` tokens."""
        step = self._RATE * (seconds - self._base - n * self.per_token) / (n**2 + self._EVEN**2)
        self._base += step * self._EVEN**2
        self.per_token = max(self.per_token + step * n, 1e-7)


def _blend(average: float | None, value: float) -> float:
    return value if average is None else (1 - _NEWEST_WEIGHT) * average + _NEWEST_WEIGHT * value
