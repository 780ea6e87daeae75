"""llama.cpp's samplers in the order that a request asks for, with our own ones among them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp

from llamaslot.backend.llama.sampling.candidates import Adjuster, Candidates
from llamaslot.base.generation.sampling import Sampling

_SEED_MASK = 0xFFFFFFFF
_MIROSTAT_TOKENS = 100
"""Number of most likely tokens from which Mirostat 1 estimates the distribution, as in llama-server."""


def active_samplers(sampling: Sampling, adjusters: Mapping[str, Adjuster]) -> list[str]:
    """Return the samplers that have an effect, in order. With Mirostat these are only temperature and Mirostat."""
    if sampling.mirostat:
        return ["temperature", f"mirostat_{sampling.mirostat}"]
    is_off = {
        "top_n_sigma": sampling.top_n_sigma <= 0,
        "top_k": sampling.top_k <= 0,
        "typ_p": sampling.typical_p >= 1,
        "top_p": sampling.top_p >= 1,
        "min_p": sampling.min_p <= 0,
        "xtc": sampling.xtc_probability <= 0 or sampling.xtc_threshold > 0.5,
    }  # fmt: skip
    is_off |= {name: name not in adjusters for name in ("penalties", "dry")}
    names = [name for name in sampling.samplers if name != "adaptive_p" and not is_off.get(name, False)]
    return [*names, "adaptive_p" if "adaptive_p" in sampling.samplers else "dist"]


def takes_the_best(sampling: Sampling, names: Sequence[str]) -> bool:
    """Return True if these samplers always choose the token with the highest logit.

    As in llama-server, a temperature of 0 does that. But XTC before it may rule out the best tokens, penalties and
    DRY after other samplers change the order of the remaining tokens, and a dynamic temperature is not 0.
    """
    if sampling.temperature > 0 or sampling.dynatemp_range > 0 or "temperature" not in names:
        return False
    return not {"xtc", "penalties", "dry"} & set(names[: names.index("temperature")])


class Chain:
    """Samplers by name, in order. The last one chooses the token."""

    def __init__(
        self, sampling: Sampling, names: Sequence[str], adjusters: Mapping[str, Adjuster], n_vocab: int
    ) -> None:
        self._parts: list[tuple[Adjuster | None, Any]] = []
        """Parts of the chain: each is either one of our samplers, or a chain of llama.cpp's."""
        self._is_told = names[-1] == "adaptive_p"
        constructors = _constructors(sampling, n_vocab)
        for name in names:
            if name in adjusters:
                self._parts.append((adjusters[name], None))
                continue
            if not self._parts or self._parts[-1][0] is not None:
                chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
                self._parts.append((None, chain))
            constructor, *arguments = constructors[name]
            llama_cpp.llama_sampler_chain_add(self._parts[-1][1], constructor(*arguments))

    def choose(self, candidates: Candidates) -> int:
        """Return the token that the last sampler chooses; -1 if it chooses none."""
        for adjuster, chain in self._parts:
            if adjuster is None:
                llama_cpp.llama_sampler_apply(chain, ctypes.byref(candidates.array))
            else:
                candidates.adjust(adjuster)
        selected = candidates.array.selected
        return int(candidates.array.data[selected].id) if selected >= 0 else -1

    def accept(self, token: int) -> None:
        """Tell adaptive-p, if it is used, which token was chosen: it learns from that."""
        if self._is_told:
            llama_cpp.llama_sampler_accept(self._parts[-1][1], token)

    def close(self) -> None:
        """Free llama.cpp's samplers."""
        for adjuster, chain in self._parts:
            if adjuster is None:
                llama_cpp.llama_sampler_free(chain)


def _constructors(sampling: Sampling, n_vocab: int) -> dict[str, tuple[Any, ...]]:
    """Return the constructor and arguments of each of llama.cpp's samplers."""
    seed, min_keep = sampling.seed & _SEED_MASK, sampling.min_keep
    tau, eta = sampling.mirostat_tau, sampling.mirostat_eta
    # With Mirostat the temperature is not dynamic.
    spread = 0.0 if sampling.mirostat else sampling.dynatemp_range
    lib = llama_cpp
    return {
        "top_n_sigma": (lib.llama_sampler_init_top_n_sigma, sampling.top_n_sigma),
        "top_k": (lib.llama_sampler_init_top_k, sampling.top_k),
        "typ_p": (lib.llama_sampler_init_typical, sampling.typical_p, min_keep),
        "top_p": (lib.llama_sampler_init_top_p, sampling.top_p, min_keep),
        "min_p": (lib.llama_sampler_init_min_p, sampling.min_p, min_keep),
        "xtc": (lib.llama_sampler_init_xtc, sampling.xtc_probability, sampling.xtc_threshold, min_keep, seed),
        "temperature": (lib.llama_sampler_init_temp_ext, sampling.temperature, spread, sampling.dynatemp_exponent),
        "mirostat_1": (lib.llama_sampler_init_mirostat, n_vocab, seed, tau, eta, _MIROSTAT_TOKENS),
        "mirostat_2": (lib.llama_sampler_init_mirostat_v2, seed, tau, eta),
        "adaptive_p": (lib.llama_sampler_init_adaptive_p, sampling.adaptive_target, sampling.adaptive_decay, seed),
        "dist": (lib.llama_sampler_init_dist, seed),
    }
