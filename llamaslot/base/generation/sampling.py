"""Sampling parameters of a request, with llama-server's names and defaults."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

SAMPLERS = (
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature",
)  # fmt: skip
"""The default order of the samplers."""
_LETTERS = dict(zip("edskypmxta", [*SAMPLERS, "adaptive_p"], strict=True))
"""llama-server's letters for all samplers except `i`."""
INFILL = "infill"
"""A sampler of llama-server that this server does not have."""


def _spellings() -> dict[str, str]:
    """Return the names of samplers by all spellings that llama-server accepts."""
    names = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}
    for name in (*_LETTERS.values(), INFILL):
        names |= dict.fromkeys((name, name.replace("_", "-"), name.replace("_", "")), name)
    return names


_SPELLINGS = _spellings()


class Sampling(msgspec.Struct, frozen=True):
    """Sampling parameters."""

    temperature: float = 0.8
    dynatemp_range: float = 0.0
    """Largest change of the temperature, up or down, that depends on the entropy; 0 for none."""
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    top_n_sigma: float = -1.0
    """Keep logits within this many standard deviations of the highest; off if not positive."""
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    """Latest tokens to which the penalties apply: 0 for none, -1 for the whole context."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    """Off if 0, like `dry_penalty_last_n`."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    """Tokens in which DRY looks for repetitions: 0 none, -1 the whole context."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    """Version 1 or 2, which replaces all `samplers` except the temperature; 0 for off."""
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    """Used if `samplers` has `adaptive_p`, which is always the last one; negative for plain draws."""
    adaptive_decay: float = 0.9
    min_keep: int = 0
    """Minimum number of tokens that top-p, min-p, typical-p and XTC keep."""
    samplers: tuple[str, ...] = SAMPLERS
    seed: int = 0
    logit_bias: dict[int, float] = {}
    ignore_eos: bool = False
    n_probs: int = -1
    """Record the probability of each token and of this many most likely tokens; -1 for no probabilities."""
    post_sampling_probs: bool = False
    """Record probabilities after all samplers instead of the model's log-probabilities."""


def named_samplers(asked: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of samplers given by names or as a string of letters.

    Unknown names are ignored, as in llama-server, which has had more samplers; the empty string is the default.
    """
    if isinstance(asked, str):
        letters = {**_LETTERS, "i": INFILL}
        return tuple(letters[letter] for letter in asked if letter in letters) if asked else SAMPLERS
    return tuple(_SPELLINGS[name.lower()] for name in asked if name.lower() in _SPELLINGS)
