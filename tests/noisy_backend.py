"""The llama backend with noise in its logits, as on GPUs, where equal tokens in other cells give other bits.

CUDA's flash attention splits its sums by where the cells are. On an H100 with random weights the logits of equal
chunks in other cells were 0.2 apart (rms), those of other chunks 0.8. The noise is drawn anew for each step, as if
nothing ever came to the same cells again, so a test that holds here needs no two runs with equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import llama_cpp
import numpy as np

from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.backend import Decoded, Draws, Run, Status

_RANK = 64
"""Directions that the noise of a row has, like the width of a layer in which the rounding happened."""


class NoisyBackend(LlamaBackend):
    """A backend of which the logits of two runs are that far apart (rms), while all states are exact."""

    def __init__(self, settings: LlamaSettings, noise: float = 0.0) -> None:
        self._random = np.random.default_rng(7)
        self._noise = noise
        self._directions = np.zeros((0, 0), np.float32)
        super().__init__(settings)

    def decode(self, runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        decoded = super().decode(runs, draws)
        n_rows = sum(max(run.n_outputs, len(run.targets) if run.targets is not None else 0) for run in runs)
        if self._noise and n_rows and decoded.status is Status.OK:
            rows = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (n_rows, self.vocab.n_tokens))
            rows += self._drawn(n_rows)
        return decoded

    def _drawn(self, n_rows: int) -> np.ndarray:
        if not self._directions.size:
            self._directions = self._random.standard_normal((_RANK, self.vocab.n_tokens), np.float32)
        weights = self._random.standard_normal((n_rows, _RANK), np.float32)
        # Two runs differ by the noise of both.
        return weights @ self._directions * np.float32(self._noise / np.sqrt(2 * _RANK))
