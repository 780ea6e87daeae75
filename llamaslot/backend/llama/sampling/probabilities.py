"""Log-probabilities of tokens in a row of logits."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from llamaslot.backend.llama.sampling.candidates import Candidates, Logits, highest
from llamaslot.base.generation.token_probs import FLOAT_MIN, TokenScore


def score_of(token: int, logits: Logits, n_top: int) -> TokenScore:
    """Return the log-probability of a token by the softmax of the logits, and those of the `n_top` best tokens."""
    most = logits.max()
    # Invalid logits give NaN.
    with np.errstate(invalid="ignore"):
        log_total = float(most) + math.log(np.exp(logits - most).sum(dtype=np.float64))
    top = _best(logits, n_top)
    values = [max(value - log_total, FLOAT_MIN) for value in logits[[token, *top]].tolist()]
    return TokenScore(token, values[0], top, values[1:])


def score_after_sampling(token: int, candidates: Candidates | None, n_top: int) -> TokenScore:
    """Return the probability with which a token was drawn from the candidates, and the `n_top` highest ones.

    Tokens that could not be drawn are left out. `candidates` is None if the token was the only one.
    """
    if candidates is None:
        return TokenScore(token, 1.0, [token][:n_top], [1.0][:n_top])
    rows = candidates.rows
    order = np.argsort(-rows["p"], kind="stable")[:n_top]
    top = rows[order[rows["p"][order] > 0]]
    value = float(rows["p"][rows["id"] == token][0])
    return TokenScore(token, value, top["id"].tolist(), top["p"].tolist())


def _best(logits: Logits, n: int) -> list[int]:
    """Return the tokens with the `n` highest logits, in descending order; of equal ones, the lowest ids first."""
    if n <= 0:
        return []
    found = highest(logits, n)
    if found is None:
        found = np.arange(len(logits))
    order: npt.NDArray[np.int64] = np.argsort(-logits[found], kind="stable")[:n]
    best: list[int] = found[order].tolist()
    return best
