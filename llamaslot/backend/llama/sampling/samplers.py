"""llama.cpp's samplers that a request needs, and their arguments: for chains on the host and on the device."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import llama_cpp

from llamaslot.base.generation.sampling import Sampling

_MAX_BIAS, _MIN_TEMPERATURE = 1e30, 1e-6
"""Largest bias, and lowest temperature above 0. Divided by the temperature a logit must stay a finite float32: of
infinite ones llama.cpp chooses the last.
"""
SEED_MASK = 0xFFFFFFFF
"""llama.cpp's seeds are 32-bit numbers."""
_MIROSTAT_TOKENS = 100
"""Number of most likely tokens from which Mirostat 1 estimates the distribution, as in llama-server."""


def bounded_biases(sampling: Sampling, eog: frozenset[int]) -> dict[int, float]:
    """Return the biases by token: -inf for tokens that are ruled out."""
    biases = {**sampling.logit_bias, **dict.fromkeys(eog if sampling.ignore_eos else (), -math.inf)}
    # Bounded, because a bias that makes a logit infinite would look like a failure of the model.
    return {
        token: bias if bias == -math.inf else min(max(bias, -_MAX_BIAS), _MAX_BIAS)
        for token, bias in biases.items()
    }


def active_samplers(sampling: Sampling, adjusters: Collection[str]) -> list[str]:
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


def constructors(sampling: Sampling, n_vocab: int) -> dict[str, tuple[Any, ...]]:
    """Return the constructor and arguments of each of llama.cpp's samplers."""
    seed, min_keep = sampling.seed & SEED_MASK, sampling.min_keep
    temperature = max(sampling.temperature, _MIN_TEMPERATURE) if sampling.temperature > 0 else sampling.temperature
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
        "temperature": (lib.llama_sampler_init_temp_ext, temperature, spread, sampling.dynatemp_exponent),
        "mirostat_1": (lib.llama_sampler_init_mirostat, n_vocab, seed, tau, eta, _MIROSTAT_TOKENS),
        "mirostat_2": (lib.llama_sampler_init_mirostat_v2, seed, tau, eta),
        "adaptive_p": (lib.llama_sampler_init_adaptive_p, sampling.adaptive_target, sampling.adaptive_decay, seed),
        "dist": (lib.llama_sampler_init_dist, seed),
    }
