"""Distance that logits move when only the size of chunks changes, or the cells that they are computed in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

import llama_cpp
import numpy as np

from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.backend import Run
from llamaslot.base.commands import Constraint
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import Remove
from tests.recorder import Past


class Noise:
    """Tells whether two tokens lie closer together than rounding alone moves them."""

    def __init__(self, settings: LlamaSettings) -> None:
        self._settings = replace(settings, n_slots=2)
        self.n_explained = 0

    def tokenize(self, text: str) -> list[int]:
        """The ids of a prompt."""
        with self._opened() as backend:
            return backend.vocab.tokenize(text, add_special=True, parse_special=True).tolist()

    def distance(self, history: Sequence[int]) -> float:
        """The farthest that rounding alone moves a logit after `history`."""
        with self._opened() as backend:
            return max(noise for _, noise in self._spread(backend, history))

    def explains(self, history: Sequence[int], warm: int, cold: int, past: Past = ()) -> bool:
        """True if `warm` may stand for `cold` as the greedy token after `history`, and the shifts before."""
        self.n_explained += 1
        with self._opened() as backend:
            spread = self._spread(backend, history, past)
            return any(abs(reference[warm] - reference[cold]) <= 2 * noise for reference, noise in spread)

    def explains_draw(
        self,
        prompt: Sequence[int],
        reply: Sequence[int],
        sampling: Sampling,
        warm: int,
        cold: int,
        *,
        constraint: Constraint | None = None,
    ) -> bool:
        """True if `warm` may stand for `cold` as the token sampled after `prompt` and `reply`.

        A draw goes through the tokens, by id or from the likeliest on, to the first at which the sum of
        probabilities reaches a random number. Rounding moves this sum continuously, so the draw may stop anywhere
        between `cold` and the token that it reaches if all logits move as far as they may: those up to `warm` in
        one direction, the others in the other.
        """
        if sampling.temperature == 0:
            return self.explains([*prompt, *reply], warm, cold)
        self.n_explained += 1
        is_sorted = sampling.top_k > 0 or sampling.top_p < 1

        def is_reached(reference: np.ndarray, noise: float) -> bool:
            reference = np.where(is_allowed, reference, -np.inf)
            order = np.argsort(-reference) if is_sorted else np.arange(len(reference))
            places = np.argsort(order)
            is_earlier = bool(places[warm] < places[cold])
            farthest = reference.copy()
            farthest[order[: places[warm] + is_earlier]] += 2 * noise if is_earlier else -2 * noise
            drawn = self._draw(backend, prompt, chosen, sampling, farthest)
            # Rounding also exchanges the places of tokens whose logits are as close together as that.
            near = np.flatnonzero(np.abs(reference - reference[warm]) <= 2 * noise) if is_sorted else ()
            return any(
                places[drawn] <= places[token] if is_earlier else places[drawn] >= places[token]
                for token in (warm, *near)
            )

        with self._opened() as backend:
            chosen, is_allowed = _constrained(backend, reply, constraint)
            # A draw is as much work as logits: one after a few of them, which mostly suffices, and one after all.
            spread = self._spread(backend, [*prompt, *reply])
            first = list(islice(spread, 4))[-1]
            return is_reached(*first) or is_reached(*list(spread)[-1])

    @contextmanager
    def _opened(self) -> Iterator[LlamaBackend]:
        backend = LlamaBackend(self._settings)
        try:
            yield backend
        finally:
            backend.close()

    def _draw(
        self,
        backend: LlamaBackend,
        prompt: Sequence[int],
        reply: Sequence[int],
        sampling: Sampling,
        logits: np.ndarray,
    ) -> int:
        """The token drawn from `logits` after as many draws as `reply` has tokens."""
        backend._clear()
        history = np.array(prompt, dtype=np.int32)
        sampler = backend.new_sampler(sampling, history)
        # Each draw of the reply takes a random number.
        for start in range(0, len(prompt) if reply else 0, self._settings.n_ubatch):
            part = history[start : start + self._settings.n_ubatch]
            backend.decode([Run(0, start, part, start + len(part) == len(prompt))])
        for at, token in enumerate(reply, len(prompt)):
            backend.sample([(0, sampler)])
            backend.decode([Run(0, at, np.array([token], dtype=np.int32), 1)])
        drawn = sampler.choose(logits)
        sampler.close()
        return drawn

    def _spread(
        self, backend: LlamaBackend, history: Sequence[int], past: Past = ()
    ) -> Iterator[tuple[np.ndarray, float]]:
        """Logits after `history`, and the distance that rounding moves them, which grows with what was computed."""
        whole = self._settings.n_ubatch
        reference = logits_after(backend, history, whole, past=past)
        # A token alone in its batch goes through other kernels, and cells out of order are added up in another one.
        last_alone = next(n for n in range(whole, 0, -1) if n == 1 or len(history) % n == 1)
        shapes = [(last_alone, 0, False), (7, 0, False), (20, 40, True), (1, 40, False), (whole, 33, False)]
        shapes += [(7, 7, True), (64, 128, True), (1, 1, True), (19, 20, False), (last_alone, 40, False)]
        shapes += [(1, 0, False), (3, 60, False), (5, 9, False), (12, 1, False)]
        noise = 0.0
        for shape in shapes:
            other = logits_after(backend, history, *shape, past=past)
            noise = max(noise, float(np.abs(reference - other).max()))
            yield reference, noise

    def logits(self, history: Sequence[int], chunk: int, n_before: int) -> np.ndarray:
        """Logits after `history`, decoded in chunks, the first behind `n_before` cells that then come free."""
        with self._opened() as backend:
            return logits_after(backend, history, chunk, n_before)


def _constrained(
    backend: LlamaBackend, reply: Sequence[int], constraint: Constraint | None
) -> tuple[Sequence[int], np.ndarray]:
    """The tokens of a reply that its constraint has not forced, and which tokens it allows next."""
    is_allowed = np.ones(backend.info.n_vocab, dtype=bool)
    if constraint is None:
        return reply, is_allowed
    matcher = backend.compile(constraint).matcher()
    chosen, at = [], 0
    while at < len(reply):
        chosen.append(reply[at])
        matcher.accept(reply[at])
        forced = matcher.forced()
        at += 1 + len(forced)
        assert (*chosen[-1:], *forced) == tuple(reply[at - 1 - len(forced) : at]), "another token is forced"
    mask = matcher.mask()
    assert mask is not None
    is_allowed[:] = not mask.is_allowed
    is_allowed[mask.tokens] = mask.is_allowed
    return chosen, is_allowed


def logits_after(
    backend: LlamaBackend,
    history: Sequence[int],
    chunk: int,
    n_before: int = 0,
    is_scattered: bool = False,
    *,
    past: Past = (),
) -> np.ndarray:
    """Return the logits after `history`, decoded in chunks into sequence 0 of an empty pool, with `past` shifts.

    Sequence 1 takes `n_before` cells before the first chunk, which come free behind it. If it `is_scattered`, each
    chunk of the first half lies behind as many, which come free before the second half: its chunks lie between
    those of the first. Attention adds up V in the order of the cells (fact 9), so this may move logits several
    times as far as chunk sizes do.
    """
    backend._clear()
    parts = [*past, (history, None)]
    n_free = backend.info.n_ctx - max(len(tokens) for tokens, _ in parts)
    n_taken = 0
    for tokens, shift in parts:
        for at in range(backend.seq_len(0), len(tokens), chunk):
            n_others = min(n_before, n_free - n_taken, backend.info.n_ubatch)
            if n_others > 0 and (at == 0 or (is_scattered and at < len(tokens) // 2)):
                backend.decode([Run(1, n_taken, np.full(n_others, 97, dtype=np.int32), 0)])
                n_taken += n_others
            elif n_taken:
                backend.change(Remove(1, 0))
                n_taken = n_free
            part = np.array(tokens[at : at + chunk], dtype=np.int32)
            backend.decode([Run(0, at, part, at + chunk >= len(tokens))])
        if shift is not None:
            backend.change(replace(shift, seq=0))
    return last_logits(backend)


def last_logits(backend: LlamaBackend) -> np.ndarray:
    """Return the logits of the last output of the last step."""
    row = llama_cpp.llama_get_logits_ith(backend._context, -1)
    return np.ctypeslib.as_array(row, (backend.info.n_vocab,)).copy()
