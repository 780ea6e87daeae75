"""Distance that logits move when only the size of chunks changes, or the cells that they are computed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import llama_cpp
import numpy as np

from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.backend import Run
from llamaslot.base.commands import Sampling
from llamaslot.base.kv_ops import Remove


class Noise:
    """Tells whether two tokens lie closer together than rounding alone moves them."""

    def __init__(self, settings: LlamaSettings) -> None:
        self._settings = replace(settings, n_slots=2)
        self.n_explained = 0

    def tokenize(self, text: str) -> list[int]:
        """The ids of a prompt."""
        backend = LlamaBackend(self._settings)
        try:
            return backend.vocab.tokenize(text, add_special=True, parse_special=True).tolist()
        finally:
            backend.close()

    def explains(self, history: Sequence[int], warm: int, cold: int) -> bool:
        """True if `warm` may stand for `cold` as the greedy token after `history`."""
        reference, noise = self._spread(history)
        self.n_explained += 1
        return bool(abs(reference[warm] - reference[cold]) <= 2 * noise)

    def explains_draw(
        self, prompt: Sequence[int], reply: Sequence[int], sampling: Sampling, warm: int, cold: int
    ) -> bool:
        """True if `warm` may stand for `cold` as the token sampled after `prompt` and `reply`."""
        if sampling.temperature == 0:
            return self.explains([*prompt, *reply], warm, cold)
        reference, noise = self._spread([*prompt, *reply])
        shifted = []
        # A draw takes the first token at which the sum of probabilities exceeds a number: in the order of the ids,
        # or from the likeliest on, as the sampling says. Rounding moves that sum before and after a token.
        for order in (np.arange(len(reference)), np.argsort(-reference)):
            first, last = sorted(int(np.flatnonzero(order == token)[0]) for token in (warm, cold))
            for end in range(first + 1, last + 1):
                for shift in (-2 * noise, 2 * noise):
                    logits = reference.copy()
                    logits[order[:end]] += shift
                    shifted.append(logits)
        self.n_explained += 1
        return warm in self._draws(prompt, reply, sampling, shifted)

    def _draws(
        self, prompt: Sequence[int], reply: Sequence[int], sampling: Sampling, ends: Sequence[np.ndarray]
    ) -> set[int]:
        """The tokens that are drawn from each of `ends` after the draws of the reply."""
        backend = LlamaBackend(self._settings)
        try:
            history = np.array(prompt, dtype=np.int32)
            samplers = [backend.new_sampler(sampling, history) for _ in ends]
            for start in range(0, len(prompt), self._settings.n_ubatch):
                part = history[start : start + self._settings.n_ubatch]
                backend.decode([Run(0, start, part, start + len(part) == len(prompt))])
            for at, token in enumerate(reply, len(prompt)):
                for sampler in samplers:
                    backend.sample([(0, sampler)])
                backend.decode([Run(0, at, np.array([token], dtype=np.int32), True)])
            drawn = {sampler.choose(logits) for sampler, logits in zip(samplers, ends, strict=True)}
            for sampler in samplers:
                sampler.close()
            return drawn
        finally:
            backend.close()

    def _spread(self, history: Sequence[int]) -> tuple[np.ndarray, float]:
        """Logits after `history`, and the distance that rounding moves them."""
        whole = self._settings.n_ubatch
        reference = self.logits(history, whole, 0)
        # A token alone in its batch goes through other kernels, and cells out of order are added up in another one.
        last_alone = next(n for n in range(whole, 0, -1) if n == 1 or len(history) % n == 1)
        shapes = [(7, 0), (whole, 33), (19, 20), (last_alone, 0), (last_alone, 40)]
        shapes += [(1, 0), (1, 40), (3, 60), (5, 9), (12, 1)]
        others = [self.logits(history, chunk, n_before) for chunk, n_before in shapes]
        return reference, max(float(np.abs(reference - other).max()) for other in others)

    def logits(self, history: Sequence[int], chunk: int, n_before: int) -> np.ndarray:
        """Logits after `history`, decoded in chunks, the first behind `n_before` cells that then come free."""
        backend = LlamaBackend(self._settings)
        try:
            n_before = min(n_before, backend.info.n_ctx - len(history), self._settings.n_ubatch)
            if n_before:
                backend.decode([Run(1, 0, np.full(n_before, 97, dtype=np.int32), False)])
            for at in range(0, len(history), chunk):
                part = np.array(history[at : at + chunk], dtype=np.int32)
                backend.decode([Run(0, at, part, at + chunk >= len(history))])
                backend.change(Remove(1, 0))
            row = llama_cpp.llama_get_logits_ith(backend._context, -1)
            return np.ctypeslib.as_array(row, (backend.info.n_vocab,)).copy()
        finally:
            backend.close()
